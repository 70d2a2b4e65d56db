//! Hooks of calls in which the driver allocates GPU memory for itself, for code, stacks and streams. If
//! memory is short, the scheduler makes room and the call is repeated ([`crate::gpu::reservation`]).

use crate::{driver::types::*, gpu::reservation::retry, sys::errno};
use alloc::vec::Vec;
use core::ffi::{c_char, c_void};

type P = *mut c_void;

/// An upper bound on the number of options that exist.
const MANY: u32 = 64;

/// Like [`retry`], for a call that writes to its option values. The values are restored before each
/// further attempt.
fn retry_with(n: u32, values: P, real: impl Fn() -> CUresult) -> CUresult {
    let values = values.cast::<usize>();
    if values.is_null() || n == 0 || n > MANY {
        return retry(real);
    }
    // SAFETY: `values` is the program's own array of length `n`.
    let saved: Vec<_> = (0..n as usize).map(|i| unsafe { values.add(i).read_unaligned() }).collect();
    let again = core::cell::Cell::new(false);
    retry(|| {
        if again.replace(true) {
            // SAFETY: `values` is the program's own array of length `n`, and the driver writes to it too.
            saved.iter().enumerate().for_each(|(i, value)| unsafe { values.add(i).write_unaligned(*value) });
        }
        real()
    })
}

fn make_stream(flags: u32) {
    if flags & STREAM_NON_BLOCKING == 0 {
        errno::preserve(crate::submit::expect_blocking_streams);
    }
}

hooks! { always real, flavour;
    [cuModuleLoad] (module: P, path: *const c_char) { retry(real) }
    [cuModuleLoadData | cuModuleLoadFatBinary] (module: P, image: P) { retry(real) }
    [cuModuleLoadDataEx] (module: P, image: P, n: u32, options: P, values: P) { retry_with(n, values, real) }
    [cuLibraryLoadData] (
        library: P, image: P, jit_options: P, jit_values: P, jit_n: u32, options: P, values: P, n: u32,
    ) { retry_with(jit_n, jit_values, real) }
    [cuLibraryLoadFromFile] (
        library: P, path: *const c_char, jit_options: P, jit_values: P, jit_n: u32, options: P, values: P, n: u32,
    ) { retry_with(jit_n, jit_values, real) }
    // With lazy loading, the driver loads code on its first use.
    [cuModuleGetFunction] (function: P, module: P, name: *const c_char) { retry(real) }
    [cuLibraryGetModule | cuKernelGetFunction] (place: P, of: P) { retry(real) }
    [cuFuncLoad] (function: CUfunction) { retry(real) }
    [cuCtxSetLimit] (limit: i32, value: Size) { retry(real) }
    [cuStreamCreate] (stream: P, flags: u32) {
        make_stream(flags);
        retry(real)
    }
    [cuStreamCreateWithPriority] (stream: P, flags: u32, priority: i32) {
        make_stream(flags);
        retry(real)
    }
    // A stream of a green context is never a blocking stream.
    [cuGreenCtxStreamCreate] (stream: P, green: P, flags: u32, priority: i32) { retry(real) }
}
