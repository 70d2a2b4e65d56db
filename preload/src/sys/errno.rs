//! Preserves `errno`, which belongs to the program.

/// Runs `f` and restores `errno` afterwards.
pub fn preserved<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: the location is valid for the calling thread.
    let errno = unsafe { libc::__errno_location() };
    let before = unsafe { *errno };
    let result = f();
    unsafe { *errno = before };
    result
}
