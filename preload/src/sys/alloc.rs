//! The heap: the program's own `malloc`, and a small pool in the library for the case that `malloc`
//! fails.
//!
//! A failed allocation would panic, and a panic on one of the program's threads would end the
//! program. A program at the limit of its address space must get the driver's error instead. The
//! library's allocations in such a call are small, and come from the pool. Pool memory is never
//! reused, so the pool lasts only for a short time. After that, allocations fail.

use core::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The alignment of `malloc` on the 64-bit platforms that CUDA supports.
const MALLOC_ALIGNMENT: usize = 16;

/// The size of the pool in bytes. Pages that are never touched take no memory.
const POOL_SIZE: usize = 256 << 10;

#[derive(Debug)]
struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

#[repr(align(64))]
struct Pool {
    bytes: UnsafeCell<[u8; POOL_SIZE]>,
    used: AtomicUsize,
}

// SAFETY: `take` returns each byte only once.
unsafe impl Sync for Pool {}

static POOL: Pool = Pool { bytes: UnsafeCell::new([0; POOL_SIZE]), used: AtomicUsize::new(0) };

impl Pool {
    fn take(&self, layout: Layout) -> *mut u8 {
        let place = |used: usize| {
            let at = used.checked_next_multiple_of(layout.align())?;
            let end = at.checked_add(layout.size())?;
            (layout.align() <= align_of::<Self>() && end <= POOL_SIZE).then_some((at, end))
        };
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| Some(place(used)?.1));
        match taken.ok().and_then(place) {
            Some((at, _)) => self.bytes.get().cast::<u8>().wrapping_add(at),
            None => ptr::null_mut(),
        }
    }

    fn has(&self, block: *const u8) -> bool {
        (block as usize).wrapping_sub(self.bytes.get() as usize) < POOL_SIZE
    }
}

// SAFETY: `malloc` and `posix_memalign`, which serves larger alignments, fulfil this contract. The
// pool returns each byte only once.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the size is not 0, by the contract of `GlobalAlloc`.
        let block: *mut u8 = unsafe {
            if layout.align() <= MALLOC_ALIGNMENT {
                libc::malloc(layout.size()).cast()
            } else {
                let mut place = ptr::null_mut();
                match libc::posix_memalign(&mut place, layout.align(), layout.size()) {
                    0 => place.cast(),
                    _ => ptr::null_mut(),
                }
            }
        };
        if block.is_null() { POOL.take(layout) } else { block }
    }

    unsafe fn dealloc(&self, block: *mut u8, _: Layout) {
        if !POOL.has(block) {
            // SAFETY: the block is not from the pool, so `alloc` got it from `malloc` or `posix_memalign`.
            unsafe { libc::free(block.cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pool_returns_aligned_disjoint_blocks_until_exhausted() {
        let pool = Pool { bytes: UnsafeCell::new([0; POOL_SIZE]), used: AtomicUsize::new(0) };
        let layout = |size, align| Layout::from_size_align(size, align).expect("a layout");
        let mut end = 0;
        for (size, align) in [(1, 1), (32, 8), (3, 1), (64, 64), (POOL_SIZE / 2, 16)] {
            let block = pool.take(layout(size, align)) as usize;
            assert!(block >= end && block.is_multiple_of(align) && pool.has(block as *const u8), "{size} {align}");
            end = block + size;
        }
        assert!(pool.take(layout(POOL_SIZE / 2, 1)).is_null());
        assert!(pool.take(layout(1, 128)).is_null());
        assert!(pool.take(layout(usize::MAX / 4, 1)).is_null());
        assert!(!pool.take(layout(1, 1)).is_null(), "what is left is not lost");
        assert!(!pool.has(ptr::null()) && !pool.has(&raw const end as *const u8));
    }
}
