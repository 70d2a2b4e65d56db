//! Driver calls that may wait for running work: unregistering host buffers, and loading the fingerprint kernel. A
//! thread that holds no lock makes them for one GPU, and ends when none are left.
//!
//! A call is made once the driver says that the work submitted to its context before is done. Otherwise the driver
//! itself might wait for work that ends only after the program's next call, and that call might have to wait inside the
//! driver too.

use super::{file::HostCopy, fingerprint::Fingerprinter};
use crate::{
    connection,
    driver::{self, types::*},
    gate::threads,
    sys::{
        sync::{Mutex, Rank},
        time::{self, Instant},
    },
    work::{Passing, Work},
};
use alloc::{collections::VecDeque, sync::Arc, vec::Vec};
use core::time::Duration;

/// The interval between polls of the awaited work. It doubles while no job finishes, up to the longest: a kernel may
/// run until its program ends.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);
const LONGEST_RETRY_INTERVAL: Duration = Duration::from_millis(32);

/// For this time after a context's work was seen done, calls do not wait for later work: a program that is never idle
/// queues less work than this.
const PASSED_FOR: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct Waiter(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    work: &'static Work,
    state: Mutex<WaiterState>,
}

#[derive(Debug, Default)]
struct WaiterState {
    jobs: VecDeque<Job>,
    /// A thread is doing jobs.
    is_running: bool,
    /// Bytes of buffers that have been freed.
    freed: u64,
    returned: Vec<(Place, HostCopy)>,
    /// `None` if fingerprints cannot be computed.
    loaded: Vec<(usize, Option<Fingerprinter>)>,
}

#[derive(Debug)]
enum Job {
    /// Unregisters a buffer, and then returns or frees it.
    Unregister(HostCopy, Option<Place>),
    /// Loads the fingerprint kernel into this context.
    Load(usize),
}

/// The chunk that a copy belongs to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub base: u64,
    pub offset: u64,
    /// The copy is the chunk's only contents, and the chunk is in flight until the copy is returned.
    pub is_away: bool,
}

/// The results of the thread.
#[derive(Debug, Default)]
pub(super) struct Finished {
    /// Bytes of buffers that have been freed.
    pub freed: u64,
    pub returned: Vec<(Place, HostCopy)>,
}

impl Waiter {
    pub fn new(work: &'static Work) -> Self {
        Self(Arc::new(Queue { work, state: Mutex::new(Rank::WaitingCalls, WaiterState::default()) }))
    }

    pub fn work(&self) -> &'static Work {
        self.0.work
    }

    /// Queues the unregistering of a copy's buffer, which is then freed or returned.
    pub fn unregister(&self, copy: HostCopy, back_to: Option<Place>) {
        self.0.state.lock().jobs.push_back(Job::Unregister(copy, back_to));
        self.start();
    }

    /// Queues loading the fingerprint kernel into this context, unless that is in progress.
    pub fn load(&self, context: usize) {
        {
            let mut state = self.0.state.lock();
            // The job in progress is in no list, but `is_running` is set.
            if state.is_running || state.jobs.iter().any(|job| matches!(job, Job::Load(other) if *other == context)) {
                return;
            }
            state.jobs.push_back(Job::Load(context));
        }
        self.start();
    }

    /// The outcome of [`load`](Self::load); `None` while it is pending.
    pub fn take_loaded(&self, context: usize) -> Option<Option<Fingerprinter>> {
        let mut state = self.0.state.lock();
        let at = state.loaded.iter().position(|(other, _)| *other == context)?;
        Some(state.loaded.swap_remove(at).1)
    }

    /// Starts the thread if there are jobs and it isn't running.
    pub fn start(&self) {
        {
            let mut state = self.0.state.lock();
            if state.is_running || state.jobs.is_empty() {
                return;
            }
            state.is_running = true;
        }
        let queue = self.0.clone();
        if !threads::spawn(c"nvshare-host", move || queue.run()) {
            self.0.state.lock().is_running = false;
        }
    }

    /// Whether jobs are pending or in progress.
    pub fn is_busy(&self) -> bool {
        let state = self.0.state.lock();
        state.is_running || !state.jobs.is_empty()
    }

    pub fn take_finished(&self) -> Finished {
        let mut state = self.0.state.lock();
        Finished { freed: core::mem::take(&mut state.freed), returned: core::mem::take(&mut state.returned) }
    }

    /// Called when a context is gone, and the code loaded into it. Jobs detect this themselves.
    pub fn forget_context(&self, context: usize) {
        let of_context = |(other, _): &mut (usize, _)| *other == context;
        let loaded: Vec<_> = self.0.state.lock().loaded.extract_if(.., of_context).collect();
        loaded.into_iter().filter_map(|(_, loaded)| loaded).for_each(|loaded| loaded.forget_context(context));
    }
}

impl Queue {
    fn run(&self) {
        let mut mode = STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` outlives the call. Nothing that this thread does may invalidate a stream capture of the
        // program's threads.
        unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
        let mut passing = Vec::new();
        let mut retry = RETRY_INTERVAL;
        loop {
            let job = {
                let mut state = self.state.lock();
                let Some(job) = state.jobs.pop_front() else {
                    state.is_running = false;
                    break;
                };
                job
            };
            match self.carry_out(job, &mut passing) {
                None => {
                    retry = RETRY_INTERVAL;
                    connection::wake();
                }
                Some(job) => {
                    self.state.lock().jobs.push_back(job);
                    time::sleep(retry);
                    retry = LONGEST_RETRY_INTERVAL.min(retry * 2);
                }
            }
        }
        connection::wake();
    }

    /// Carries out a job, or returns it if it has to wait.
    fn carry_out(&self, job: Job, passing: &mut Vec<InContext>) -> Option<Job> {
        match job {
            Job::Unregister(mut copy, back_to) => {
                // A registration ends with its context.
                copy.buffer.registered_with().filter(|context| !self.work.knows(*context)).inspect(|context| {
                    copy.buffer.forget_context(*context);
                });
                if let Some(context) = copy.buffer.registered_with() {
                    let has_passed = self.has_passed(context, passing);
                    if !has_passed || self.work.enter(context, || copy.buffer.unregister()).is_none() {
                        return Some(Job::Unregister(copy, back_to));
                    }
                }
                match back_to {
                    Some(place) => self.state.lock().returned.push((place, copy)),
                    None => {
                        let len = copy.buffer.len();
                        drop(copy); // first, as it takes long
                        self.state.lock().freed += len;
                    }
                }
            }
            Job::Load(context) => {
                let load = || {
                    let loaded = Fingerprinter::new(context).ok();
                    // Inside the context, so that the context is not destroyed before the result is stored.
                    self.state.lock().loaded.push((context, loaded));
                };
                let has_passed = self.has_passed(context, passing);
                if (!has_passed || self.work.enter(context, load).is_none()) && self.work.knows(context) {
                    return Some(Job::Load(context));
                }
            }
        }
        None
    }

    /// Whether the work given to this context before the first query is done.
    fn has_passed(&self, context: usize, passing: &mut Vec<InContext>) -> bool {
        passing.retain(|other| other.passed_at.is_none_or(|at| at.elapsed() < PASSED_FOR));
        let known = passing.iter().position(|other| other.context == context);
        let at = known.unwrap_or_else(|| {
            passing.push(InContext { context, passing: Passing::default(), passed_at: None });
            passing.len() - 1
        });
        let Some(in_context) = passing.get_mut(at) else { return false };
        if in_context.passed_at.is_none() && self.work.has_passed(context, &mut in_context.passing) {
            in_context.passed_at = Some(Instant::now());
        }
        in_context.passed_at.is_some()
    }
}

/// The awaited work of a context.
#[derive(Debug)]
struct InContext {
    context: usize,
    passing: Passing,
    passed_at: Option<Instant>,
}
