//! The calling thread's current context.

use super::{check, cuCtxGetCurrent, cuCtxPopCurrent_v2, cuCtxPushCurrent_v2, query, types::*};

/// Returns the current context, or NULL if there is none.
///
/// # Errors
/// Returns errors of `cuCtxGetCurrent`.
pub fn current_context() -> Result<CUcontext, CUresult> {
    // SAFETY: the place is valid.
    query::handle(|context| unsafe { cuCtxGetCurrent(context) })
}

/// Returns the current context, or NULL if there is none or the query fails.
#[inline]
pub fn current_or_null() -> CUcontext {
    current_context().unwrap_or(core::ptr::null_mut())
}

/// Runs `f` with this context current on the calling thread.
///
/// # Errors
/// Returns the driver's error if the context cannot be made current. `f` has not run then.
pub fn with_current<R>(context: usize, f: impl FnOnce() -> R) -> Result<R, CUresult> {
    // SAFETY: the caller passes a context that has not been destroyed.
    check(unsafe { cuCtxPushCurrent_v2(context as CUcontext) })?;
    let result = f();
    let mut popped = core::ptr::null_mut();
    // SAFETY: `popped` outlives the call.
    unsafe { cuCtxPopCurrent_v2(&mut popped) };
    Ok(result)
}

/// Whether this error means that the context is permanently broken or destroyed. Every further call
/// returns the error.
pub fn is_broken(result: CUresult) -> bool {
    // In the order of the codes: uncorrectable and contained ECC and NVLink errors, an illegal address, a
    // kernel timeout, a destroyed context, an assertion, the errors from a hardware stack error to a launch
    // failure, tensor memory that was not freed, a client that MPS has ended, data that another device has
    // declared invalid, and unknown errors. Codes in between concern only one call.
    matches!(result, 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 911 | 999)
}

/// Whether this error of a call means that no work runs in the current context any more.
pub fn is_dead(result: CUresult) -> bool {
    if is_doubtful(result) { is_current_broken() } else { is_dead_without_doubt(result) }
}

/// Does the same as [`is_dead`], for a context that need not be current.
pub fn is_dead_in(context: usize, result: CUresult) -> bool {
    if is_doubtful(result) { is_broken_in(context) } else { is_dead_without_doubt(result) }
}

/// Whether a context is broken. It need not be current.
pub fn is_broken_in(context: usize) -> bool {
    with_current(context, is_current_broken).unwrap_or_else(|error| is_doubtful(error) || is_dead_without_doubt(error))
}

/// Whether this error leaves open whether the context is broken: it can be permanent or concern
/// only one call. For example, the import of a chunk returned [`ERROR_UNKNOWN`] on an H200 with
/// driver
/// 580. Registering memory may return
/// [`ERROR_OPERATING_SYSTEM`]. If a process could not be restored from a checkpoint, every call returns
/// [`ERROR_OPERATING_SYSTEM`].
fn is_doubtful(result: CUresult) -> bool {
    matches!(result, ERROR_UNKNOWN | ERROR_OPERATING_SYSTEM | ERROR_DEVICE_UNAVAILABLE)
}

fn is_dead_without_doubt(result: CUresult) -> bool {
    is_broken(result) || matches!(result, ERROR_DEINITIALIZED | ERROR_INVALID_CONTEXT)
}

/// Whether the current context is broken, for example by an illegal address. Every call must then
/// return the driver's error.
pub fn is_current_broken() -> bool {
    // This call is the cheapest one that reports a broken context, and always allowed.
    query::is_capturing(CTX_DEFAULT_STREAM).is_err_and(|error| is_broken(error) || is_doubtful(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sticky_errors_are_distinguished_from_errors_of_one_call() {
        for error in [4, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999] {
            assert!(is_dead_without_doubt(error), "{error}");
        }
        // Errors of peer access, contexts in use, host memory and launches that are too large, among others.
        for error in
            [SUCCESS, 1, 2, 217, 400, 500, 600, 701, 703, 704, 705, 708, 711, 712, 713, 720, 800, 801, 906, 916, 917]
        {
            assert!(!is_dead_without_doubt(error), "{error}");
        }
        // For these errors, a call without effect shows whether the driver returns them permanently.
        for error in [46, 304, 999] {
            assert!(is_doubtful(error), "{error}");
        }
        for error in [SUCCESS, 1, 2, 4, 201, 600, 700, 906] {
            assert!(!is_doubtful(error), "{error}");
        }
    }
}
