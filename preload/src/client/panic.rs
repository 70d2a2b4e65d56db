//! The panic handler. No code of this library should panic. If a thread of ours does, it stops and every gate opens:
//! the program's work matters more than an explanation.

use crate::{client, env::trace, gate::threads, sys::errno};

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    errno::preserved(|| trace::line(format_args!("defect in libnvshare.so, please report: {info}")));
    client::give_up();
    if !threads::is_ours() {
        // Inside a call of the program: no result could be returned.
        // SAFETY: `abort` ends the process.
        unsafe { libc::abort() };
    }
    loop {
        crate::sys::time::sleep(core::time::Duration::from_secs(3600));
    }
}

// core and alloc were compiled with unwinding and refer to these symbols. They are never called, since the panic
// handler does not return.
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
