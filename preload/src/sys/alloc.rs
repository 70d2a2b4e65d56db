//! The heap: the program's own `malloc`.

use core::alloc::{GlobalAlloc, Layout};

/// The alignment of `malloc` on the 64-bit platforms that CUDA supports.
const MALLOC_ALIGNMENT: usize = 16;

#[derive(Debug)]
struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

// SAFETY: malloc and its kin do what is asked for here; alignment beyond theirs is asked for by name.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the size is not 0.
        unsafe {
            if layout.align() <= MALLOC_ALIGNMENT {
                return libc::malloc(layout.size()).cast();
            }
            let mut place = core::ptr::null_mut();
            match libc::posix_memalign(&mut place, layout.align(), layout.size()) {
                0 => place.cast(),
                _ => core::ptr::null_mut(),
            }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        // SAFETY: it came from one of the functions above.
        unsafe { libc::free(block.cast()) };
    }
}
