//! The driver's errors.

use std::ffi::{CStr, c_char};

/// A `CUresult` that is not `CUDA_SUCCESS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Error(pub u32);

/// The result of most calls.
pub type Done = Result<(), Error>;

macro_rules! errors {
    ($($name:ident = $code:literal $text:literal;)*) => {
        // The table contains all errors, although the simulator returns only some of them.
        #[allow(dead_code)]
        impl Error {
            $(pub const $name: Error = Error($code);)*
        }

        const ERRORS: &[(u32, &CStr, &CStr)] = &[
            (0, c"CUDA_SUCCESS", c"no error"),
            $(($code, match CStr::from_bytes_with_nul(concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            }, match CStr::from_bytes_with_nul(concat!($text, "\0").as_bytes()) {
                Ok(text) => text,
                Err(_) => c"",
            }),)*
        ];
    };
}

errors! {
    INVALID_VALUE = 1 "invalid argument";
    OUT_OF_MEMORY = 2 "out of memory";
    NOT_INITIALIZED = 3 "initialization error";
    DEINITIALIZED = 4 "driver shutting down";
    NO_DEVICE = 100 "no CUDA-capable device is detected";
    INVALID_DEVICE = 101 "invalid device ordinal";
    INVALID_IMAGE = 200 "device kernel image is invalid";
    INVALID_CONTEXT = 201 "invalid device context";
    CONTEXT_ALREADY_IN_USE = 216 "exclusive-thread device already in use by a different thread";
    PEER_ACCESS_UNSUPPORTED = 217 "peer access is not supported between these two devices";
    NO_BINARY_FOR_GPU = 209 "no kernel image is available for execution on the device";
    INVALID_PTX = 218 "a PTX JIT compilation failed";
    UNSUPPORTED_LIMIT = 215 "limit is not supported on this architecture";
    FILE_NOT_FOUND = 301 "file not found";
    OPERATING_SYSTEM = 304 "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400 "invalid resource handle";
    ILLEGAL_STATE = 401 "the operation cannot be performed in the present state";
    NOT_FOUND = 500 "named symbol not found";
    NOT_READY = 600 "device not ready";
    ILLEGAL_ADDRESS = 700 "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701 "too many resources requested for launch";
    PEER_ACCESS_ALREADY_ENABLED = 704 "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705 "peer access has not been enabled";
    PRIMARY_CONTEXT_ACTIVE = 708 "cannot set while device is active in this process";
    CONTEXT_IS_DESTROYED = 709 "context is destroyed";
    HOST_MEMORY_ALREADY_REGISTERED = 712 "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713 "pointer does not correspond to a registered memory region";
    MISALIGNED_ADDRESS = 716 "misaligned address";
    LAUNCH_FAILED = 719 "unspecified launch failure";
    NOT_PERMITTED = 800 "operation not permitted";
    NOT_SUPPORTED = 801 "operation not supported";
    STREAM_CAPTURE_UNSUPPORTED = 900 "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901 "operation failed due to a previous error during capture";
    STREAM_CAPTURE_MERGE = 902 "operation would result in a merge of separate capture sequences";
    STREAM_CAPTURE_UNMATCHED = 903 "capture was not ended in the same stream as it began";
    STREAM_CAPTURE_UNJOINED = 904 "capturing stream has unjoined work";
    STREAM_CAPTURE_ISOLATION = 905 "dependency created on uncaptured work in another stream";
    STREAM_CAPTURE_IMPLICIT = 906 "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = 907 "operation not permitted on an event last recorded in a capturing stream";
    STREAM_CAPTURE_WRONG_THREAD = 908 "attempt to terminate a thread-local capture sequence from another thread";
    GRAPH_EXEC_UPDATE_FAILURE = 910 "the graph update was not performed because it included changes which violated constraints";
    UNKNOWN = 999 "unknown error";
}

fn find(code: u32) -> Result<&'static (u32, &'static CStr, &'static CStr), Error> {
    ERRORS.iter().find(|e| e.0 == code).ok_or(Error::INVALID_VALUE)
}

/// `cuGetErrorName`
pub fn name(code: u32, text: *mut *const c_char) -> Done {
    crate::out(text, find(code).map_or(std::ptr::null(), |e| e.1.as_ptr()))?;
    find(code).map(drop)
}

/// `cuGetErrorString`
pub fn string(code: u32, text: *mut *const c_char) -> Done {
    crate::out(text, find(code).map_or(std::ptr::null(), |e| e.2.as_ptr()))?;
    find(code).map(drop)
}
