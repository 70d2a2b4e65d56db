//! The program's threads as the gate sees them: each has a [`Slot`], which only that thread writes.
//!
//! A slot says which GPU's gate its thread is inside of, and how much it has submitted. Slots are never freed, only handed on
//! to other threads, so a reader of the list never meets a dangling pointer.

use crate::{
    gate::epoch,
    sys::{
        c,
        sync::{OnceLock, Rank},
        thread,
    },
};
use alloc::boxed::Box;
use core::{
    cell::Cell,
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering},
};
use nvshare_wire::MAX_SLOTS;

#[derive(Debug)]
pub struct Slot {
    /// Whether this thread is inside a gate, which is that of the GPU it is `at`.
    pub inside: AtomicBool,
    /// The index of the GPU at whose gate this thread is, or was last. Changes only while it counts as inside.
    pub at: AtomicU32,
    /// The number of submissions of this thread to each GPU.
    pub submitted: [AtomicU64; MAX_SLOTS as usize],
    /// The epoch, stream (by its [name](crate::work::name_of)) and GPU of this thread's last launch. A launch to the same stream
    /// in the same epoch is known to be noted, see `crate::work`, and the thread is still at the gate of that GPU. Only the thread
    /// itself uses these and the next two. It changes these only while it counts as inside: a signal handler that launches finds
    /// it so, and leaves them alone.
    pub way: Cell<u64>,
    pub stream: Cell<usize>,
    pub gpu: Cell<*const c_void>,
    /// How many submissions this thread makes between two that it marks, and how many of these are left.
    pub between_marks: Cell<i32>,
    pub unmarked_left: Cell<i32>,
    /// Identifies the thread among all that have had a slot.
    pub number: AtomicU64,
    taken: AtomicBool,
    next: *const Slot,
}

// SAFETY: `next` is written once, before the slot is published, and points to a slot that is never freed. The cells are used by
// the thread that has the slot; `taken` orders them between one such thread and the next.
unsafe impl Sync for Slot {}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// The slot of this library's own threads. It is not in the list.
static OURS: Slot = Slot::new();

/// The key whose destructor returns a slot when its thread ends.
static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new(Rank::ThreadKey);

/// Called once, before the first slot is taken.
pub fn init() {
    KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: a valid place, and a function that takes what `take` sets.
        (unsafe { c::pthread_key_create()?(&mut key, Some(give_back)) } == 0).then_some(key)
    });
}

/// Marks the calling thread as one of this library.
fn mark_as_ours() {
    thread::set_mine((&raw const OURS).cast());
}

/// Starts a thread of this library; `false` if that fails.
pub fn spawn(name: &'static CStr, main: impl FnOnce() + Send + 'static) -> bool {
    thread::spawn(name, move || {
        mark_as_ours();
        main();
    })
}

pub fn is_ours() -> bool {
    ptr::eq(thread::mine(), (&raw const OURS).cast())
}

/// Runs when the thread ends.
unsafe extern "C" fn give_back(slot: *mut c_void) {
    thread::set_mine(ptr::null());
    // SAFETY: slots are never freed.
    if let Some(slot) = unsafe { slot.cast::<Slot>().as_ref() } {
        slot.inside.store(false, Ordering::Release);
        slot.taken.store(false, Ordering::Release);
    }
}

/// This thread's slot, if it has one.
#[inline]
pub fn known() -> Option<&'static Slot> {
    // SAFETY: slots are never freed, and the word is set to nothing else.
    unsafe { thread::mine().cast::<Slot>().as_ref() }
}

/// This thread's slot.
#[inline]
pub fn mine() -> &'static Slot {
    known().unwrap_or_else(take)
}

impl Slot {
    const fn new() -> Self {
        Self {
            inside: AtomicBool::new(false),
            at: AtomicU32::new(u32::MAX),
            submitted: [const { AtomicU64::new(0) }; MAX_SLOTS as usize],
            way: Cell::new(epoch::NONE),
            stream: Cell::new(0),
            gpu: Cell::new(ptr::null()),
            between_marks: Cell::new(0),
            unmarked_left: Cell::new(0),
            number: AtomicU64::new(0),
            taken: AtomicBool::new(true),
            next: ptr::null(),
        }
    }

    /// Whether this thread, whose slot it must be, is inside no gate.
    #[inline]
    pub fn is_outside(&self) -> bool {
        // SAFETY: only this thread writes it, so a plain read races with nothing, and is compared where it lies.
        unsafe { !self.inside.as_ptr().read() }
    }

    /// Whether the epoch is still that of this thread's last launch.
    #[inline(always)]
    pub fn is_current(&self) -> bool {
        self.way.get() == epoch::now()
    }

    /// This thread, whose slot it must be and which counts as inside, is at the gate of this GPU from now on. Returns whether it was
    /// at another before.
    pub fn turn_to(&self, gpu: u32) -> bool {
        let turns = self.at.load(Ordering::Relaxed) != gpu;
        if turns {
            self.at.store(gpu, Ordering::Release);
            self.way.set(epoch::NONE); // it led to the other gate
        }
        turns
    }
}

#[cold]
fn take() -> &'static Slot {
    let free = all().find(|s| s.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    let slot = free.unwrap_or_else(publish);
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    slot.number.store(TAKEN.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    slot.between_marks.set(0);
    slot.unmarked_left.set(0);
    slot.way.set(epoch::NONE);
    thread::set_mine(ptr::from_ref(slot).cast());
    if let (Some(Some(key)), Some(set)) = (KEY.get(), c::pthread_setspecific()) {
        // SAFETY: a key of ours. Where there is no memory for it, the slot is kept for good.
        unsafe { set(*key, ptr::from_ref(slot).cast()) };
    }
    slot
}

fn publish() -> &'static Slot {
    let slot = Box::into_raw(Box::new(Slot::new()));
    let mut head = SLOTS.load(Ordering::Acquire);
    loop {
        // SAFETY: no other thread sees the slot yet.
        unsafe { (*slot).next = head };
        match SLOTS.compare_exchange_weak(head, slot, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: from here on it is shared and never freed.
            Ok(_) => return unsafe { &*slot },
            Err(now) => head = now,
        }
    }
}

/// All slots, including those of threads that have ended.
pub fn all() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: slots are never freed.
    let mut next = unsafe { SLOTS.load(Ordering::Acquire).as_ref() };
    core::iter::from_fn(move || {
        let slot = next?;
        // SAFETY: as above.
        next = unsafe { slot.next.as_ref() };
        Some(slot)
    })
}

/// The number of submissions of all threads to this GPU.
pub fn submitted(gpu: u32) -> u64 {
    let counts = all().filter_map(|slot| slot.submitted.get(gpu as usize));
    counts.fold(0, |sum, count| sum.wrapping_add(count.load(Ordering::Acquire)))
}
