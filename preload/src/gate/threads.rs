//! The program's threads. Each thread has a [`Slot`], which only that thread writes.
//!
//! A slot contains the GPU whose gate its thread is inside, and the number of the thread's submissions.
//! Slots are never freed, only reused by other threads, so a reader of the list never follows a
//! dangling pointer.

use crate::{
    gate::{Gate, epoch},
    sys::{c, once::OnceBox, thread, time::Instant},
};
use alloc::boxed::Box;
use core::{
    cell::Cell,
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    time::Duration,
};
use nvshare_wire::MAX_SLOTS;

/// The reason why a thread waits at a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// The thread has work for the GPU. Running work may depend on that work.
    WithWork,
    /// The thread is allocating memory.
    ToAllocate,
}

/// [`Slot::inside`] of a thread that is inside no gate.
pub const OUTSIDE: usize = 0;

/// [`Slot::waits_at`] of a thread that waits at no gate.
const NOWHERE: u32 = u32::MAX;

/// A bit of [`Slot::waits_at`], set in addition to the GPU's index if the thread is allocating.
const ALLOCATES: u32 = 1 << 30;

/// A thread returns from a wait at most this time after the wait's timeout. A thread that does not
/// return was killed, or has left the wait by a `longjmp`.
const COMES_BACK: Duration = Duration::from_secs(1);

/// The minimum stack use of a driver call below the frame of its caller, in bytes.
const CALL_STACK: usize = 4096;

#[derive(Debug)]
pub struct Slot {
    /// If this thread is inside the gate of GPU `at`, the stack pointer of the function that calls the
    /// driver. A later call uses it to detect that this call was left by a `longjmp`.
    pub inside: AtomicUsize,
    /// The GPU at whose closed gate this thread waits, and the latest end of the wait in microseconds on
    /// the monotonic clock.
    waits_at: AtomicU32,
    waits_until: AtomicU64,
    /// The index of the GPU whose gate this thread is inside or was inside last. Changes only while the
    /// thread counts as inside.
    pub at: AtomicU32,
    /// The number of submissions of this thread to each GPU.
    pub submitted: [AtomicU64; MAX_SLOTS as usize],
    /// The epoch, the stream's [name](crate::work::name_of) and the GPU of this thread's last
    /// launch. If a launch uses the same stream in the same epoch, the stream is already recorded,
    /// and `at` is still the GPU of the last launch.
    ///
    /// Only the thread itself uses these three fields and the next two. The thread changes these
    /// three fields only while it counts as inside. So a signal handler that launches work during a
    /// change finds the thread inside, and leaves the fields alone.
    pub way: Cell<u64>,
    pub stream: Cell<usize>,
    pub gpu: Cell<*const c_void>,
    /// The number of submissions of this thread between two marks, and how many are left until the next
    /// mark.
    pub between_marks: Cell<i32>,
    pub unmarked_left: Cell<i32>,
    /// Identifies the thread among all threads that have ever had a slot.
    pub number: AtomicU64,
    taken: AtomicBool,
    next: *const Slot,
}

// SAFETY: `next` is written once, before the slot is published, and points to a slot that is never
// freed. Only the thread that owns the slot uses the cells. `taken` orders the accesses of successive
// owners.
unsafe impl Sync for Slot {}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(ptr::null_mut());

/// The common slot of this library's own threads. It is not in the list.
static OURS: Slot = Slot::new();

/// The key whose destructor returns a slot when its thread ends.
static KEY: OnceBox<libc::pthread_key_t> = OnceBox::new();

/// Called once, before the first slot is taken.
pub fn init() {
    let Some(create) = c::pthread_key_create().filter(|_| KEY.get().is_none()) else { return };
    let mut key = 0;
    // SAFETY: `key` outlives the call, and `give_back` accepts the pointer that `take` sets.
    if unsafe { create(&mut key, Some(give_back)) } == 0 {
        let _ = KEY.set(Box::new(key));
    }
}

/// Marks the calling thread as one of this library.
fn mark_as_ours() {
    thread::set_mine((&raw const OURS).cast());
}

/// Starts a thread of this library. Returns `false` if that fails.
pub fn spawn(name: &'static CStr, main: impl FnOnce() + Send + 'static) -> bool {
    thread::spawn(name, move || {
        mark_as_ours();
        main();
    })
}

pub fn is_ours() -> bool {
    ptr::eq(thread::mine(), (&raw const OURS).cast())
}

/// Makes the slot available to other threads when its thread ends.
unsafe extern "C" fn give_back(slot: *mut c_void) {
    thread::set_mine(ptr::null());
    // SAFETY: slots are never freed.
    if let Some(slot) = unsafe { slot.cast::<Slot>().as_ref() } {
        slot.inside.store(OUTSIDE, Ordering::Release);
        slot.waits_at.store(NOWHERE, Ordering::Release);
        slot.taken.store(false, Ordering::Release);
    }
}

/// Returns the calling thread's slot, if it has one.
#[inline]
pub fn known() -> Option<&'static Slot> {
    // SAFETY: slots are never freed, and `thread::mine` only ever returns a slot or NULL.
    unsafe { thread::mine().cast::<Slot>().as_ref() }
}

/// Returns the calling thread's slot, and assigns one if necessary.
#[inline]
pub fn mine() -> &'static Slot {
    known().unwrap_or_else(take)
}

impl Slot {
    const fn new() -> Self {
        Self {
            inside: AtomicUsize::new(OUTSIDE),
            waits_at: AtomicU32::new(NOWHERE),
            waits_until: AtomicU64::new(0),
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

    /// Whether the calling thread is inside no gate. The slot must be the calling thread's.
    #[inline]
    pub fn is_outside(&self) -> bool {
        // SAFETY: only this thread writes `inside`, so a plain read does not race. Unlike an atomic load, it
        // compiles to a comparison in memory.
        unsafe { self.inside.as_ptr().read() == OUTSIDE }
    }

    /// Like [`is_outside`](Self::is_outside), for a call made by a function with the stack pointer `here`.
    /// Also detects that the call marked as inside was left by a `longjmp`, for example out of a signal
    /// handler, and then ends that call.
    ///
    /// The frame of a call in progress is at `inside` and above. If `inside` is at `here` or
    /// directly below, the earlier call has ended, because the new call uses that part of the
    /// stack. Anywhere else, the earlier call may still be in progress. Its frame is above `here`
    /// if the new call is nested in the earlier call. Its frame is on another stack if the new call
    /// is made by a coroutine, or by a signal handler with its own stack.
    pub fn is_outside_for(&self, here: usize) -> bool {
        let inside = self.inside.load(Ordering::Relaxed);
        let was_left = inside <= here && here - inside < CALL_STACK;
        if inside != OUTSIDE && was_left {
            // The abandoned call may have submitted work.
            Gate::leave(self.at.load(Ordering::Relaxed), self);
        }
        inside == OUTSIDE || was_left
    }

    /// Counts the calling thread as waiting at the gate of this GPU. The slot must be the calling
    /// thread's. The thread counts until it calls [`end_waiting`](Self::end_waiting), but at most
    /// until [`COMES_BACK`] after the timeout.
    ///
    /// A signal handler may wait too, during a wait of its thread. When the handler's wait ends,
    /// the thread does not count as waiting until it renews the interrupted wait. The renewal
    /// follows soon, because the signal ends the interrupted wait early.
    pub fn begin_waiting(&self, gpu: u32, what: Waits, timeout: Duration) {
        let until = Instant::now().since_start() + timeout + COMES_BACK;
        self.waits_until.store(until.as_micros() as u64, Ordering::SeqCst);
        self.waits_at.store(gpu | if what == Waits::ToAllocate { ALLOCATES } else { 0 }, Ordering::SeqCst);
    }

    pub fn end_waiting(&self) {
        self.waits_at.store(NOWHERE, Ordering::SeqCst);
    }

    fn waits_at(&self, gpu: u32, what: Option<Waits>, now: u64) -> bool {
        let at = self.waits_at.load(Ordering::SeqCst);
        let allocates = at & ALLOCATES != 0;
        at & !ALLOCATES == gpu
            && what.is_none_or(|what| (what == Waits::ToAllocate) == allocates)
            && self.waits_until.load(Ordering::SeqCst) > now
    }

    /// Whether the current epoch is the epoch of this thread's last launch.
    #[inline(always)]
    pub fn is_current(&self) -> bool {
        self.way.get() == epoch::now()
    }

    /// Moves the calling thread to the gate of this GPU. The slot must be the caller's, and the caller
    /// counts as inside. Returns whether the thread was at another gate before.
    pub fn turn_to(&self, gpu: u32) -> bool {
        let turns = self.at.load(Ordering::Relaxed) != gpu;
        if turns {
            self.at.store(gpu, Ordering::Release);
            self.way.set(epoch::NONE); // the last launch was at the other gate
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
    if let (Some(key), Some(set)) = (KEY.get(), c::pthread_setspecific()) {
        // SAFETY: this library created the key. If the call fails for lack of memory, the slot is never
        // reused.
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
            // SAFETY: the slot is now shared, and is never freed.
            Ok(_) => return unsafe { &*slot },
            Err(now) => head = now,
        }
    }
}

/// Iterates over all slots, including the slots of threads that have ended.
pub fn all() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: slots are never freed.
    let mut next = unsafe { SLOTS.load(Ordering::Acquire).as_ref() };
    core::iter::from_fn(move || {
        let slot = next?;
        // SAFETY: slots are never freed.
        next = unsafe { slot.next.as_ref() };
        Some(slot)
    })
}

/// Returns the number of threads that wait at the gate of this GPU, for the given reason or for any.
pub fn waiting(gpu: u32, what: Option<Waits>) -> u32 {
    let now = Instant::now().since_start().as_micros() as u64;
    all().filter(|slot| slot.waits_at(gpu, what, now)).count() as u32
}

/// Returns the number of submissions of all threads to this GPU.
pub fn submitted(gpu: u32) -> u64 {
    let counts = all().filter_map(|slot| slot.submitted.get(gpu as usize));
    counts.fold(0, |sum, count| sum.wrapping_add(count.load(Ordering::Acquire)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::hint::black_box;
    use std::vec;

    const GPU: u32 = 9;

    /// Simulates a driver call: enters the gate, runs `within`, and leaves. If `comes_back` is false, the
    /// call ends without leaving, as after a `longjmp`.
    #[inline(never)]
    fn made(slot: &Slot, comes_back: bool, within: impl FnOnce()) -> bool {
        let here = thread::stack_pointer();
        let was_outside = slot.is_outside_for(here);
        if was_outside {
            Gate::approach(slot, here);
            slot.turn_to(GPU);
        }
        within();
        if was_outside && comes_back {
            Gate::leave(GPU, slot);
        }
        was_outside
    }

    fn call(slot: &Slot, within: impl FnOnce()) -> bool {
        made(slot, true, within)
    }

    #[test]
    fn a_call_abandoned_by_longjmp_ends_with_the_next_call() {
        let slot = Slot::new();
        let call = |comes_back| made(&slot, comes_back, || {});
        assert!(call(false) && !slot.is_outside());
        assert!(call(true), "the next call counts");
        assert!(slot.is_outside());
        assert_eq!(slot.submitted[GPU as usize].load(Ordering::Relaxed), 2, "the one that was left may have submitted");
    }

    #[test]
    fn a_nested_call_does_not_enter_again() {
        let slot = Slot::new();
        call(&slot, || assert!(!call(&slot, || {})));
        assert!(slot.is_outside());
    }

    static SLOT: Slot = Slot::new();
    static NESTED: AtomicU32 = AtomicU32::new(0);

    fn call_within() {
        assert!(!call(&SLOT, || {}), "a call within another counts as outside");
        NESTED.fetch_add(1, Ordering::Relaxed);
    }

    extern "C" fn handler(_: i32) {
        call_within();
    }

    /// Tests signal handlers with their own stack, and coroutines. The stacks are on the heap and in the
    /// frame of a caller, directly above the frame of the interrupted call. The interrupted call counts as
    /// inside all the time.
    #[test]
    fn a_nested_call_on_another_stack_does_not_enter_again() {
        const LEN: usize = 64 << 10;
        let mut in_frame = [0_u8; LEN];
        let mut on_heap = vec![0_u8; LEN];
        for stack in [black_box(&mut in_frame[..]), black_box(&mut on_heap[..])] {
            call(&SLOT, || on_signal_stack(stack));
            call(&SLOT, || in_coroutine(stack));
        }
        assert_eq!(NESTED.load(Ordering::Relaxed), 4);
        assert!(SLOT.is_outside());
    }

    fn on_signal_stack(stack: &mut [u8]) {
        let wanted = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: stack.len() };
        // SAFETY: the objects outlive the calls, and the handler is async-signal-safe.
        unsafe {
            let (mut before, mut action) = (core::mem::zeroed(), core::mem::zeroed::<libc::sigaction>());
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_ONSTACK;
            assert_eq!(libc::sigaltstack(&wanted, &mut before), 0);
            assert_eq!(libc::sigaction(libc::SIGUSR2, &action, ptr::null_mut()), 0);
            libc::raise(libc::SIGUSR2);
            assert_eq!(libc::sigaltstack(&before, ptr::null_mut()), 0);
        }
    }

    fn in_coroutine(stack: &mut [u8]) {
        extern "C" fn run() {
            call_within();
        }
        // SAFETY: both contexts exist until the coroutine has ended. Execution then continues in `back`.
        unsafe {
            let (mut back, mut there) = (core::mem::zeroed::<libc::ucontext_t>(), core::mem::zeroed());
            assert_eq!(libc::getcontext(&mut there), 0);
            there.uc_stack = libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: stack.len() };
            there.uc_link = &mut back;
            libc::makecontext(&mut there, run, 0);
            assert_eq!(libc::swapcontext(&mut back, &there), 0);
        }
    }

    #[test]
    fn a_wait_expires_unless_renewed() {
        let slot = mine();
        let count = || (waiting(GPU, None), waiting(GPU, Some(Waits::WithWork)), waiting(GPU, Some(Waits::ToAllocate)));
        slot.begin_waiting(GPU, Waits::ToAllocate, Duration::from_secs(60));
        assert_eq!(count(), (1, 0, 1));
        // In a signal handler.
        slot.begin_waiting(GPU, Waits::WithWork, Duration::from_secs(60));
        assert_eq!(count(), (1, 1, 0));
        slot.end_waiting();
        assert_eq!(count(), (0, 0, 0));
        // Left by a `longjmp`: no call ends this wait.
        slot.begin_waiting(GPU, Waits::WithWork, Duration::ZERO);
        assert_eq!(count(), (1, 1, 0));
        std::thread::sleep(COMES_BACK + Duration::from_millis(100));
        assert_eq!(count(), (0, 0, 0));
        // The abandoned wait does not reappear at the end of the next one.
        slot.begin_waiting(GPU + 1, Waits::WithWork, Duration::from_secs(60));
        slot.end_waiting();
        assert_eq!(count(), (0, 0, 0));
    }
}
