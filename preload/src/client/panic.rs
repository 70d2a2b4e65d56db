//! What must not happen: a panic. Nothing in this library is meant to be able to, and what of the program runs is worth
//! more than an answer to why, so a thread of ours just stops, and nobody waits at a gate for it.

use crate::{client, env::trace, gate::threads, sys::errno};

#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    errno::preserved(|| trace::line(format_args!("defect, please report: {info}")));
    client::give_up();
    if !threads::is_ours() {
        // In the middle of a call of the program's: there is no result to give it.
        // SAFETY: ends the process.
        unsafe { libc::abort() };
    }
    loop {
        crate::sys::time::sleep(core::time::Duration::from_secs(3600));
    }
}

// core and alloc were compiled to be unwound through and refer to these, which nobody calls: a panic ends above.
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
