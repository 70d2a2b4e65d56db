//! The list of the program's threads. Each thread has a [`Thread`] value, which only that thread
//! writes. Values are never freed, only reused by other threads, so a reader of the list never follows
//! a dangling pointer.

use super::fast::{NOWHERE, OUTSIDE, Thread, epoch, this_thread};
use crate::sys::{c, once::OnceBox, thread, time::Instant};
use alloc::boxed::Box;
use core::{
    ffi::{CStr, c_void},
    ptr,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
    time::Duration,
};

/// The reason why a thread waits at a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waits {
    /// The thread has work for the GPU. Running work may depend on that work.
    WithWork,
    /// The thread is allocating memory.
    ToAllocate,
}

/// A bit of [`Thread::waits_at`], set in addition to the GPU's index if the thread is allocating.
const ALLOCATES: u32 = 1 << 30;

/// A thread returns from a wait at most this time after the wait's timeout. A thread that does not
/// return was killed, or has left the wait by a `longjmp`.
const COMES_BACK: Duration = Duration::from_secs(1);

static THREADS: AtomicPtr<Thread> = AtomicPtr::new(ptr::null_mut());

/// The common value of this library's own threads. It is not in the list.
static OURS: Thread = Thread::new();

/// The key whose destructor returns a value when its thread ends.
static KEY: OnceBox<libc::pthread_key_t> = OnceBox::new();

/// Called once, before the first value is taken.
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

/// Makes the value available to other threads when its thread ends.
unsafe extern "C" fn give_back(thread: *mut c_void) {
    thread::set_mine(ptr::null());
    // SAFETY: the key only ever has a pointer to a value, which is never freed.
    if let Some(thread) = unsafe { thread.cast::<Thread>().as_ref() } {
        thread.inside.store(OUTSIDE, Ordering::Release);
        thread.waits_at.store(NOWHERE, Ordering::Release);
        thread.taken.store(false, Ordering::Release);
    }
}

/// Returns the calling thread's value, and assigns one if necessary.
#[inline]
pub fn mine() -> &'static Thread {
    this_thread().unwrap_or_else(take)
}

impl Thread {
    /// Counts the calling thread as waiting at the gate of this GPU. The value must be the calling
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
}

#[cold]
fn take() -> &'static Thread {
    let free = all().find(|s| s.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok());
    let thread = free.unwrap_or_else(publish);
    static TAKEN: AtomicU64 = AtomicU64::new(0);
    thread.number.store(TAKEN.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    thread.between_marks.set(0);
    thread.unmarked_left.set(0);
    thread.epoch.set(epoch::NONE);
    thread::set_mine(ptr::from_ref(thread).cast());
    if let (Some(key), Some(set)) = (KEY.get(), c::pthread_setspecific()) {
        // SAFETY: this library created the key. If the call fails for lack of memory, the value is never
        // reused.
        unsafe { set(*key, ptr::from_ref(thread).cast()) };
    }
    thread
}

fn publish() -> &'static Thread {
    let thread = Box::into_raw(Box::new(Thread::new()));
    let mut head = THREADS.load(Ordering::Acquire);
    loop {
        // SAFETY: no other thread sees the value yet.
        unsafe { (*thread).next = head };
        match THREADS.compare_exchange_weak(head, thread, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the value is now shared, and is never freed.
            Ok(_) => return unsafe { &*thread },
            Err(now) => head = now,
        }
    }
}

/// Iterates over all values, including those of threads that have ended.
pub fn all() -> impl Iterator<Item = &'static Thread> {
    // SAFETY: values are never freed.
    let mut next = unsafe { THREADS.load(Ordering::Acquire).as_ref() };
    core::iter::from_fn(move || {
        let thread = next?;
        // SAFETY: values are never freed.
        next = unsafe { thread.next.as_ref() };
        Some(thread)
    })
}

/// Returns the number of threads that wait at the gate of this GPU, for the given reason or for any.
pub fn waiters(gpu: u32, what: Option<Waits>) -> u32 {
    let now = Instant::now().since_start().as_micros() as u64;
    all().filter(|thread| thread.waits_at(gpu, what, now)).count() as u32
}

/// Returns the number of submissions of all threads to this GPU.
pub fn submissions(gpu: u32) -> u64 {
    let counts = all().filter_map(|thread| thread.submitted.get(gpu as usize));
    counts.fold(0, |sum, count| sum.wrapping_add(count.load(Ordering::Acquire)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::thread::stack_pointer;
    use core::{hint::black_box, sync::atomic::AtomicU32};
    use std::vec;

    const GPU: u32 = 9;

    /// Simulates a driver call: enters the gate, runs `within`, and leaves. If `comes_back` is false, the
    /// call ends without leaving, as after a `longjmp`.
    #[inline(never)]
    fn simulate(thread: &Thread, comes_back: bool, within: impl FnOnce()) -> bool {
        let here = stack_pointer();
        let was_outside = thread.is_outside_for(here);
        if was_outside {
            thread.approach(here);
            thread.move_to(GPU);
        }
        within();
        if was_outside && comes_back {
            thread.leave(GPU);
        }
        was_outside
    }

    fn call(thread: &Thread, within: impl FnOnce()) -> bool {
        simulate(thread, true, within)
    }

    #[test]
    fn a_call_abandoned_by_longjmp_ends_with_the_next_call() {
        let thread = Thread::new();
        let call = |comes_back| simulate(&thread, comes_back, || {});
        assert!(call(false) && !thread.is_outside());
        assert!(call(true), "the next call counts");
        assert!(thread.is_outside());
        assert_eq!(
            thread.submitted[GPU as usize].load(Ordering::Relaxed),
            2,
            "the one that was left may have submitted"
        );
    }

    #[test]
    fn a_nested_call_does_not_enter_again() {
        let thread = Thread::new();
        call(&thread, || assert!(!call(&thread, || {})));
        assert!(thread.is_outside());
    }

    static THREAD: Thread = Thread::new();
    static NESTED: AtomicU32 = AtomicU32::new(0);

    fn call_within() {
        assert!(!call(&THREAD, || {}), "a call within another counts as outside");
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
            call(&THREAD, || on_signal_stack(stack));
            call(&THREAD, || in_coroutine(stack));
        }
        assert_eq!(NESTED.load(Ordering::Relaxed), 4);
        assert!(THREAD.is_outside());
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
        let thread = mine();
        let count = || (waiters(GPU, None), waiters(GPU, Some(Waits::WithWork)), waiters(GPU, Some(Waits::ToAllocate)));
        thread.begin_waiting(GPU, Waits::ToAllocate, Duration::from_secs(60));
        assert_eq!(count(), (1, 0, 1));
        // In a signal handler.
        thread.begin_waiting(GPU, Waits::WithWork, Duration::from_secs(60));
        assert_eq!(count(), (1, 1, 0));
        thread.end_waiting();
        assert_eq!(count(), (0, 0, 0));
        // Left by a `longjmp`: no call ends this wait.
        thread.begin_waiting(GPU, Waits::WithWork, Duration::ZERO);
        assert_eq!(count(), (1, 1, 0));
        std::thread::sleep(COMES_BACK + Duration::from_millis(100));
        assert_eq!(count(), (0, 0, 0));
        // The abandoned wait does not reappear at the end of the next one.
        thread.begin_waiting(GPU + 1, Waits::WithWork, Duration::from_secs(60));
        thread.end_waiting();
        assert_eq!(count(), (0, 0, 0));
    }
}
