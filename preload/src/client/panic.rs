//! The panic handler. No code of this library should panic. If a thread of this library panics, the
//! handler opens every gate and stops the thread, because the program's work matters more than
//! nvshare's.

use crate::{client, env::trace, submit::threads, sys::errno};

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    errno::preserve(|| trace::line(format_args!("defect in libnvshare.so, please report: {info}")));
    client::give_up();
    if !threads::is_ours() {
        // The thread is in a call of the program, and the library has no result to return.
        // SAFETY: `abort` has no preconditions.
        unsafe { libc::abort() };
    }
    loop {
        crate::sys::time::sleep(core::time::Duration::from_secs(3600));
    }
}

// `core` and `alloc` were compiled with unwinding, and refer to these symbols. They are never called,
// because the panic handler does not return.
core::arch::global_asm!(
    ".globl rust_eh_personality",
    ".hidden rust_eh_personality",
    "rust_eh_personality:",
    ".globl _Unwind_Resume",
    ".hidden _Unwind_Resume",
    "_Unwind_Resume:",
    #[cfg(target_arch = "x86_64")]
    "ud2",
    #[cfg(target_arch = "aarch64")]
    "brk #1",
);
