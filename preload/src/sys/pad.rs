//! The first bytes of exported functions. Some programs, such as ComfyUI's memory manager, redirect
//! functions of the driver that they find: they replace the first bytes of a function by a jump, and
//! move the replaced instructions elsewhere. In such a program, these functions are this library's.
//! So every exported function begins with instructions that work at any address and that no branch
//! targets. They have 14 bytes, which is the longest usual jump.

/// The body of a naked function that does nothing but jump to `$function`, or to an address that is
/// `$at` bytes behind it.
macro_rules! pad_and_jump {
    ($function:path) => {
        $crate::sys::pad::pad_and_jump!($function, 0);
    };
    ($function:path, $at:expr) => {
        #[cfg(target_arch = "x86_64")]
        core::arch::naked_asm!(
            // One NOP of 14 bytes, as assemblers pad code with: five operand-size prefixes, a segment prefix,
            // and a NOP of eight bytes.
            ".byte 0x66, 0x66, 0x66, 0x66, 0x66, 0x2e, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0",
            "jmp {function} + {at}",
            function = sym $function,
            at = const $at,
        );
        #[cfg(target_arch = "aarch64")]
        core::arch::naked_asm!(
            "nop", "nop", "nop", "nop",
            "b {function} + {at}",
            function = sym $function,
            at = const $at,
        );
    };
}

pub(crate) use pad_and_jump;
