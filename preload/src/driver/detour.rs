//! Code that runs between a call and the called function, and preserves the arguments. Also thunks:
//! functions whose only code is such a call.

/// The arguments of a call, as [`detour`] saves them on the stack.
#[derive(Debug)]
#[repr(C)]
pub struct Arguments {
    /// `xmm0` to `xmm7`; `rax`, `r9`, `r8`, `rcx`, `rdx`, `rsi` and `rdi`. The arguments on the stack
    /// follow the return address.
    #[cfg(target_arch = "x86_64")]
    registers: ([u64; 16], [usize; 7]),
    #[cfg(target_arch = "x86_64")]
    return_address: usize,
    /// `x29` and `x30`; `x0` to `x7`; `x8` and a word that is not used; `q0` to `q7`.
    #[cfg(target_arch = "aarch64")]
    registers: ([usize; 2], [usize; 8], [usize; 2], [u64; 16]),
}

impl Arguments {
    /// Returns the integer argument that is passed in the register with this index.
    pub fn integer(&self, at: usize) -> usize {
        #[cfg(target_arch = "x86_64")]
        let at = 6 - at;
        self.registers.1.get(at).copied().unwrap_or(0)
    }
}

/// Declares a function that entries and thunks jump to, with a number in `r11` or `x16`. The
/// function passes the number and the arguments to `$called`, which is an `unsafe extern "C"
/// fn(usize, *const Arguments) -> usize`, and continues at the returned address. It preserves the
/// stack and all registers that may contain arguments.
macro_rules! detour {
    ($name:ident, $called:path) => {
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "push rax",
                "sub rsp, 128", // keeps the stack aligned for the call
                "movups [rsp], xmm0",
                "movups [rsp + 16], xmm1",
                "movups [rsp + 32], xmm2",
                "movups [rsp + 48], xmm3",
                "movups [rsp + 64], xmm4",
                "movups [rsp + 80], xmm5",
                "movups [rsp + 96], xmm6",
                "movups [rsp + 112], xmm7",
                "mov rdi, r11",
                "mov rsi, rsp",
                "call {called}",
                "mov r11, rax",
                "movups xmm0, [rsp]",
                "movups xmm1, [rsp + 16]",
                "movups xmm2, [rsp + 32]",
                "movups xmm3, [rsp + 48]",
                "movups xmm4, [rsp + 64]",
                "movups xmm5, [rsp + 80]",
                "movups xmm6, [rsp + 96]",
                "movups xmm7, [rsp + 112]",
                "add rsp, 128",
                "pop rax",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jmp r11",
                called = sym $called,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "stp x29, x30, [sp, #-224]!",
                "mov x29, sp",
                "stp x0, x1, [sp, #16]",
                "stp x2, x3, [sp, #32]",
                "stp x4, x5, [sp, #48]",
                "stp x6, x7, [sp, #64]",
                "str x8, [sp, #80]",
                "stp q0, q1, [sp, #96]",
                "stp q2, q3, [sp, #128]",
                "stp q4, q5, [sp, #160]",
                "stp q6, q7, [sp, #192]",
                "mov x0, x16",
                "mov x1, sp",
                "bl {called}",
                "mov x16, x0",
                "ldp q6, q7, [sp, #192]",
                "ldp q4, q5, [sp, #160]",
                "ldp q2, q3, [sp, #128]",
                "ldp q0, q1, [sp, #96]",
                "ldr x8, [sp, #80]",
                "ldp x6, x7, [sp, #64]",
                "ldp x4, x5, [sp, #48]",
                "ldp x2, x3, [sp, #32]",
                "ldp x0, x1, [sp, #16]",
                "ldp x29, x30, [sp], #224",
                "br x16",
                called = sym $called,
            )
        }
    };
}

/// The distance between two thunks, in bytes.
pub const STRIDE: usize = 16;

/// Declares `$count` thunks. Each passes an address inside itself and the arguments of its call to
/// `$called` ([`detour`]), which returns the address of the thunk's function. Declares `thunk_at`,
/// which returns the address of a thunk, and `thunk_of`, which returns the number of the thunk with
/// an address inside it.
macro_rules! thunks {
    ($count:expr, $called:path) => {
        $crate::driver::detour::detour!(enter, $called);

        /// Not a function. Contains the thunks, one after another.
        #[unsafe(naked)]
        unsafe extern "C" fn thunks() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                ".rept {thunks}",
                ".balign {stride}",
                "lea r11, [rip]", // identifies the thunk by its own address; r11 is free at a call
                "jmp {enter}",
                ".endr",
                thunks = const $count,
                stride = const $crate::driver::detour::STRIDE,
                enter = sym enter,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                ".rept {thunks}",
                ".balign {stride}",
                "adr x16, .", // identifies the thunk by its own address; x16 is free at a call
                "b {enter}",
                ".endr",
                thunks = const $count,
                stride = const $crate::driver::detour::STRIDE,
                enter = sym enter,
            );
        }

        fn thunk_at(thunk: usize) -> usize {
            thunks as *const () as usize + thunk * $crate::driver::detour::STRIDE
        }

        fn thunk_of(inside: usize) -> usize {
            inside.wrapping_sub(thunk_at(0)) / $crate::driver::detour::STRIDE
        }
    };
}

pub(crate) use {detour, thunks};
