//! Preserves `errno`, which belongs to the program.

/// Runs `f` and restores `errno` afterwards.
pub fn preserve<R>(f: impl FnOnce() -> R) -> R {
    // SAFETY: the call only returns the address of this thread's `errno`.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: `errno` exists as long as its thread.
    let before = unsafe { errno.read() };
    let result = f();
    // SAFETY: `errno` exists as long as its thread.
    unsafe { errno.write(before) };
    result
}
