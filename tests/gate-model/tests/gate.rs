//! The gate's guarantees, checked in every order of the threads' steps.
//!
//! A plain memory cell for each thread models the work that the thread submits to the GPU. If
//! another thread reads the cell without a guaranteed order between the read and the write, loom
//! reports a *causality violation*. Sleeps have no timeout, and all threads are joined at the end.
//! If a thread would sleep for ever, loom reports a *deadlock*.

use gate_model::{
    driver::types::{CUstream, SUCCESS},
    submit::{
        self, CLOSED, GPUS, Gate,
        barrier::{self, Fences},
        closed, fast, lane,
        threads::{self, THREADS, Waits},
    },
    sys::futex,
};
use loom::{
    cell::UnsafeCell,
    sync::{
        Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};
use std::{collections::BTreeSet, sync::Arc, time::Duration};

const GPU: u32 = 0;
const OTHER_GPU: u32 = 1;
/// The number of times that threads may be preempted. This number finds nearly all errors and takes
/// seconds. `NVSHARE_GATE_PREEMPTIONS` is added to it.
const FEW: usize = 2;
const SOME: usize = 3;

/// Checks a scenario in every order with at most `most_preemptions` preemptions.
fn check(fences: Fences, most_preemptions: usize, scenario: impl Fn() + Sync + Send + 'static) {
    barrier::choose(fences);
    let mut model = loom::model::Builder::new();
    let more = std::env::var("NVSHARE_GATE_PREEMPTIONS").map_or(0, |text| text.parse().expect("a number"));
    model.preemption_bound = Some(most_preemptions + more);
    model.check(move || {
        submit::begin();
        scenario();
    });
}

/// Checks that a scenario ends with threads that wait for ever. loom cannot unwind from a deadlock,
/// so the scenario runs in another process. That process runs this test again, selected by an
/// environment variable.
fn check_for_deadlock(test: &str, scenario: impl Fn() + Sync + Send + 'static) {
    const ALONE: &str = "GATE_MODEL_ALONE";
    if std::env::var_os(ALONE).is_some() {
        std::panic::set_hook(Box::new(|why| {
            println!("{why}");
            std::process::exit(1);
        }));
        return check(Fences::Ordinary, FEW, scenario);
    }
    let mut this = std::process::Command::new(std::env::current_exe().unwrap());
    let output = this.args(["--exact", test, "--nocapture"]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains("deadlock; threads"), "{said}");
}

/// The library's two kinds of fences.
const BOTH: &[Fences] = &[Fences::Membarrier, Fences::Ordinary];
/// Both kinds, and the change from one to the other. The change matters to threads inside the gate.
/// For waiting threads it is only another spurious wake-up.
const ALL: &[Fences] = &[Fences::Membarrier, Fences::Ordinary, Fences::Refused];

/// Checks the scenario with each of these fences.
fn check_each(kinds: &[Fences], most_preemptions: usize, scenario: impl Fn() + Sync + Send + Copy + 'static) {
    kinds.iter().for_each(|fences| check(*fences, most_preemptions, scenario));
}

/// The work that each thread has submitted to each GPU.
struct Gpus {
    given: [[UnsafeCell<u64>; THREADS]; GPUS],
}

fn gate(gpu: u32) -> &'static Gate {
    &lane(gpu).gate
}

// SAFETY: the gates guard the cells, which loom checks.
unsafe impl Sync for Gpus {}
// SAFETY: the value owns all its fields.
unsafe impl Send for Gpus {}

impl Gpus {
    fn new() -> Arc<Self> {
        futex::interrupt();
        if barrier::is_known_to_be_missing() {
            [GPU, OTHER_GPU].map(gate).iter().for_each(|gate| {
                gate.close(closed::LOCK);
                gate.open(closed::LOCK);
            });
        }
        Arc::new(Self { given: Default::default() })
    }

    /// Tries once to launch, from the thread with this index. If the thread's last launch was to the
    /// same GPU, the launch takes the fast path.
    fn submit(&self, gpu: u32, index: usize) -> bool {
        threads::take(index);
        let submit = || {
            // SAFETY: only this thread writes, and loom checks that no other thread reads at the same time.
            self.given[gpu as usize][index].with_mut(|given| unsafe { *given += 1 });
            SUCCESS
        };
        fast::launch(gpu as usize as CUstream, fast::ONE, submit, |result| result) != CLOSED
    }

    /// Retries until the submission succeeds.
    fn submit_patiently(&self, gpu: u32, index: usize, before: impl Fn()) {
        while !self.submit(gpu, index) {
            gate(gpu).wait(gpu, threads::take(index), Waits::WithWork, closed::FOR_ALL, Duration::MAX, &before);
        }
    }

    /// Returns the submitted work of a GPU. The calling thread believes that no thread is
    /// submitting at the moment.
    fn given(&self, gpu: u32) -> u64 {
        // SAFETY: no thread writes at the same time, which loom checks.
        self.given[gpu as usize].iter().map(|given| given.with(|given| unsafe { *given })).sum()
    }
}

/// The different outcomes of a scenario, over all orders of its steps.
type Seen = std::sync::Mutex<BTreeSet<u64>>;

// ---- no submission passes a closed gate ----

/// Two threads submit while a third closes the gate. If the third thread sees no thread inside, it
/// reads the work so far, checks that all work has been counted, and opens the gate again.
fn close_look_open(seen: &Seen) {
    let gpus = Gpus::new();
    let submitters: [_; THREADS] = std::array::from_fn(|index| {
        let gpus = gpus.clone();
        thread::spawn(move || {
            gpus.submit(GPU, index);
            if index == 0 {
                gpus.submit(GPU, index);
            }
        })
    });
    let gate = gate(GPU);
    gate.close(closed::LOCK);
    if Gate::is_quiet(GPU) {
        let counted = threads::submitted(GPU);
        assert_eq!(gpus.given(GPU), counted);
        seen.lock().unwrap().insert(counted);
        gate.open(closed::LOCK);
    }
    submitters.into_iter().for_each(|submitter| submitter.join().unwrap());
    assert_eq!(gpus.given(GPU), threads::submitted(GPU));
}

fn nothing_is_submitted_while_closed(fences: Fences, most_preemptions: usize) {
    static SEEN: Seen = Seen::new(BTreeSet::new());
    check(fences, most_preemptions, || close_look_open(&SEEN));
    assert_eq!(*SEEN.lock().unwrap(), [0, 1, 2, 3].into(), "what was given before the gate closed");
}

#[test]
fn a_closed_gate_admits_no_submission_with_membarrier() {
    nothing_is_submitted_while_closed(Fences::Membarrier, SOME);
}
#[test]
fn a_closed_gate_admits_no_submission_with_ordinary_fences() {
    nothing_is_submitted_while_closed(Fences::Ordinary, SOME);
}

#[test]
fn a_closed_gate_admits_no_submission_if_membarrier_is_refused() {
    nothing_is_submitted_while_closed(Fences::Refused, FEW);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_light_fence_a_submission_slips_out() {
    check(Fences::NoLight, FEW, || close_look_open(&Seen::default()));
}
#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_heavy_fence_a_submission_slips_out() {
    check(Fences::NoHeavy, FEW, || close_look_open(&Seen::default()));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_fence_of_the_entering_thread_a_submission_slips_out() {
    check(Fences::NoPassing, FEW, || close_look_open(&Seen::default()));
}
#[test]
#[should_panic(expected = "Causality violation")]
fn without_the_wait_after_a_refusal_a_submission_slips_out() {
    check(Fences::NoWait, FEW, || close_look_open(&Seen::default()));
}

/// A thread that is seen at another gate has finished and counted its work at this gate.
#[test]
fn work_of_a_thread_at_another_gate_has_been_counted() {
    check_each(ALL, SOME, || {
        let gpus = Gpus::new();
        let submitter = thread::spawn({
            let gpus = gpus.clone();
            move || {
                gpus.submit(GPU, 0);
                gpus.submit(OTHER_GPU, 0);
            }
        });
        gate(GPU).close(closed::LOCK);
        if Gate::is_quiet(GPU) {
            assert_eq!(gpus.given(GPU), threads::submitted(GPU));
        }
        submitter.join().unwrap();
    });
}

/// An early release uses a count from a moment when no work ran, and closes the gate afterwards.
/// Only an unchanged count shows that no work was submitted since that moment.
#[test]
fn an_early_release_misses_no_submission() {
    static SEEN: Seen = Seen::new(BTreeSet::new());
    check_each(ALL, FEW, || {
        let gpus = Gpus::new();
        let submitters: [_; THREADS] = std::array::from_fn(|index| {
            let gpus = gpus.clone();
            thread::spawn(move || gpus.submit(GPU, index))
        });
        let gate = gate(GPU);
        let count = threads::submitted(GPU);
        gate.close(closed::LOCK);
        if Gate::is_quiet(GPU) {
            let new = threads::submitted(GPU) - count;
            assert_eq!(gpus.given(GPU), count + new);
            SEEN.lock().unwrap().insert(new);
        }
        gate.open(closed::LOCK);
        for submitter in submitters {
            submitter.join().unwrap();
        }
    });
    assert_eq!(*SEEN.lock().unwrap(), [0, 1, 2].into(), "what came between the count and the closing");
}

// ---- two reasons ----

/// Closes the gate for a reason and opens it again. Between the two steps it may read the work.
fn close_and_open(gpus: &Gpus, why: u32) {
    let gate = gate(GPU);
    gate.close(why);
    if Gate::is_quiet(GPU) {
        gpus.given(GPU);
    }
    assert!(gate.is_closed_for(why) && gate.is_closed_for(closed::FOR_ALL));
    gate.open(why);
}

#[test]
fn a_gate_opens_when_its_last_reason_is_removed() {
    check_each(ALL, FEW, || {
        let gpus = Gpus::new();
        let [submitter, other] = [0, 1].map(|who| {
            let gpus = gpus.clone();
            thread::spawn(move || {
                if who == 0 {
                    gpus.submit(GPU, 0);
                } else {
                    close_and_open(&gpus, closed::MEMORY);
                }
            })
        });
        close_and_open(&gpus, closed::LOCK);
        submitter.join().unwrap();
        other.join().unwrap();
        assert!(!gate(GPU).is_closed_for(closed::FOR_ALL));
    });
}

// ---- no thread sleeps for ever ----

/// Two reasons close a gate. One thread waits to enter, and two threads each remove a reason.
fn wait_for_two_reasons() {
    let gpus = Gpus::new();
    let gate = gate(GPU);
    gate.close(closed::LOCK);
    gate.close(closed::MEMORY);
    let submitter = thread::spawn({
        let gpus = gpus.clone();
        move || gpus.submit_patiently(GPU, 0, || {})
    });
    let other = thread::spawn(move || gate.open(closed::MEMORY));
    gate.open(closed::LOCK);
    submitter.join().unwrap();
    other.join().unwrap();
    assert_eq!((threads::waiting(GPU), gpus.given(GPU)), (0, 1));
}

#[test]
fn opening_a_gate_wakes_its_waiters() {
    check_each(BOTH, SOME, wait_for_two_reasons);
}

#[test]
fn a_futex_wait_without_a_check_can_deadlock() {
    futex::make_blind();
    check_for_deadlock("a_futex_wait_without_a_check_can_deadlock", wait_for_two_reasons);
}

/// The GPU lock of one client, as the scheduler sees it. A request by the present holder tells the
/// scheduler nothing new, so the scheduler forgets that request.
struct Lock {
    scheduler: Mutex<Scheduler>,
    changed: Condvar,
    /// Whether the client believes that the scheduler has its request.
    requested: AtomicBool,
}

struct Scheduler {
    held: bool,
    wanted: bool,
}

impl Lock {
    fn held() -> Self {
        let scheduler = Mutex::new(Scheduler { held: true, wanted: false });
        Self { scheduler, changed: Condvar::new(), requested: AtomicBool::new(false) }
    }

    /// Models `Gpu::request`.
    fn request(&self) {
        if !self.requested.swap(true, Ordering::SeqCst) {
            let mut scheduler = self.scheduler.lock().unwrap();
            scheduler.wanted |= !scheduler.held;
            self.changed.notify_all();
        }
    }

    /// Models `Gpu::request_is_over`.
    fn request_is_over(&self) {
        self.requested.swap(false, Ordering::SeqCst);
    }

    /// Waits until the scheduler grants the lock again.
    fn granted(&self) {
        let mut scheduler = self.scheduler.lock().unwrap();
        while !scheduler.wanted {
            scheduler = self.changed.wait(scheduler).unwrap();
        }
    }
}

/// When a release of the lock resets `Lock::requested`. The request may have been sent before the
/// release, and the scheduler may have forgotten it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Forgets {
    Always,
    OnlyWhereThreadsWait,
}

/// The holder releases the lock as `Turn` does, while a thread arrives at the gate, which may also
/// be closed for `reason`. A `signal` may wake the thread once spuriously. Finally the thread must
/// be able to enter. `seen` records whether a release saw the thread waiting.
fn release_while_a_thread_comes(reason: Option<u32>, signal: bool, forgets: Forgets, seen: &Seen) {
    let (gpus, lock) = (Gpus::new(), Arc::new(Lock::held()));
    let gate = gate(GPU);
    if let Some(why) = reason {
        gate.close(why);
    }
    let submitter = thread::spawn({
        let (gpus, lock) = (gpus.clone(), lock.clone());
        move || {
            gpus.submit_patiently(GPU, 0, || {
                if gate.is_closed_for(closed::LOCK) {
                    lock.request();
                }
            });
        }
    });
    let signal = signal.then(|| thread::spawn(futex::interrupt));
    gate.close(closed::LOCK);
    if Gate::is_quiet(GPU) && threads::submitted(GPU) == 0 {
        lock.scheduler.lock().unwrap().held = false;
        if forgets == Forgets::Always {
            lock.request_is_over();
        }
        let waits = threads::waiting(GPU) > 0;
        if waits {
            lock.request_is_over();
            lock.request();
        }
        seen.lock().unwrap().insert(waits.into());
        lock.granted();
    }
    lock.request_is_over();
    if let Some(why) = reason {
        gate.open(why);
    }
    gate.open(closed::LOCK);
    submitter.join().unwrap();
    signal.into_iter().for_each(|signal| signal.join().unwrap());
}

fn no_request_is_lost(most_preemptions: usize, reason: Option<u32>, signal: bool) {
    let seen = Arc::new(Seen::default());
    for fences in BOTH {
        let seen = seen.clone();
        check(*fences, most_preemptions, move || release_while_a_thread_comes(reason, signal, Forgets::Always, &seen));
    }
    assert_eq!(*seen.lock().unwrap(), [0, 1].into(), "the thread asks, or the release sees it waiting");
}

#[test]
fn a_thread_arriving_during_a_release_causes_a_request() {
    no_request_is_lost(SOME, None, false);
}
#[test]
fn a_thread_waiting_for_memory_during_a_release_causes_a_request() {
    no_request_is_lost(SOME, Some(closed::MEMORY), false);
}
#[test]
fn a_signal_during_a_release_loses_no_request() {
    no_request_is_lost(FEW, None, true);
}

/// For a moment the thread isn't counted as waiting, and the release checks the count at that
/// moment. The scheduler has forgotten the request, but the client still believes that the
/// scheduler has it. So the client never sends another request.
#[test]
fn resetting_the_request_only_if_threads_wait_can_lose_a_request() {
    check_for_deadlock("resetting_the_request_only_if_threads_wait_can_lose_a_request", || {
        release_while_a_thread_comes(None, true, Forgets::OnlyWhereThreadsWait, &Seen::default())
    });
}
