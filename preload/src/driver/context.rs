//! The calling thread's current context.

use super::{check, cuCtxGetCurrent, cuCtxPopCurrent_v2, cuCtxPushCurrent_v2, types::*};

/// The current context; NULL if there is none.
///
/// # Errors
/// Those of `cuCtxGetCurrent`.
pub fn current_context() -> Result<CUcontext, CUresult> {
    let mut context = core::ptr::null_mut();
    // SAFETY: a valid place.
    check(unsafe { cuCtxGetCurrent(&mut context) })?;
    Ok(context)
}

/// The current context; NULL if there is none or after an error.
#[inline]
pub fn current_or_null() -> CUcontext {
    let mut context = core::ptr::null_mut();
    // SAFETY: a valid place.
    unsafe { cuCtxGetCurrent(&mut context) };
    context
}

/// Runs `f` with this context current on the calling thread.
///
/// # Errors
/// The context cannot be made current; `f` was not run.
pub fn with_current<R>(context: usize, f: impl FnOnce() -> R) -> Result<R, CUresult> {
    // SAFETY: a context that has not been destroyed.
    check(unsafe { cuCtxPushCurrent_v2(context as CUcontext) })?;
    let result = f();
    let mut popped = core::ptr::null_mut();
    unsafe { cuCtxPopCurrent_v2(&mut popped) };
    Ok(result)
}

/// Whether this error means that nothing runs in the context any more.
pub fn is_dead(result: CUresult) -> bool {
    ERRORS_OF_A_BROKEN_CONTEXT.contains(&result)
        || matches!(result, ERROR_DEINITIALIZED | ERROR_INVALID_CONTEXT | ERROR_ECC_UNCORRECTABLE)
}
