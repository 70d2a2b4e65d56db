//! Unregistering host buffers. The driver may wait for running work in this call. One thread per GPU makes the
//! calls. The thread holds no lock, and ends when no calls are left.
//!
//! The thread makes a call only after events show that all earlier work of the GPU's contexts is done.
//! Otherwise the driver might wait for work that ends only after the program's next call, and the driver
//! might block that call too.

use super::file::HostCopy;
use crate::{
    connection,
    submit::{Work, captures, threads},
    sys::{
        sync::{Mutex, Rank},
        time::{self, Instant},
    },
};
use alloc::{collections::VecDeque, sync::Arc, vec::Vec};
use core::time::Duration;

/// The interval between polls of the awaited work. The interval doubles, up to
/// `LONGEST_RETRY_INTERVAL`: a kernel may run until its program ends.
const RETRY_INTERVAL: Duration = Duration::from_millis(2);
const LONGEST_RETRY_INTERVAL: Duration = Duration::from_millis(32);

/// How long work counts as done after it was found done. Jobs may then wait for later work, but a program
/// never queues more GPU time than this.
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
}

/// A buffer to be unregistered. It is then returned to the given chunk, or freed if there is none.
type Job = (HostCopy, Option<Place>);

/// The chunk to which a copy belongs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub base: u64,
    pub offset: u64,
    /// Whether the chunk has no other contents. The chunk then counts as in flight until the copy is
    /// returned.
    pub is_away: bool,
}

/// The results of finished jobs.
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

    /// Queues the unregistering of a copy's buffer. The copy then returns to `back_to`, or is freed if that
    /// is `None`.
    pub fn unregister(&self, copy: HostCopy, back_to: Option<Place>) {
        self.0.state.lock().jobs.push_back((copy, back_to));
        self.start();
    }

    /// Starts the thread if jobs are queued and the thread is not running.
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
}

impl Queue {
    fn run(&self) {
        captures::relax_thread();
        let mut passed_at = None;
        loop {
            let job = {
                let mut state = self.state.lock();
                let Some(job) = state.jobs.pop_front() else {
                    state.is_running = false;
                    break;
                };
                job
            };
            if self.context_of(&job.0).is_some() && passed_at.is_none_or(|at: Instant| at.elapsed() >= PASSED_FOR) {
                self.await_work();
                passed_at = Some(Instant::now());
            }
            if let Some(job) = self.carry_out(job) {
                self.state.lock().jobs.push_back(job);
                time::sleep(RETRY_INTERVAL);
            }
            connection::wake();
        }
        connection::wake();
    }

    /// The context in which a copy's buffer is registered, unless the context no longer exists.
    fn context_of(&self, copy: &HostCopy) -> Option<usize> {
        copy.buffer.registration().filter(|context| self.work.knows(*context))
    }

    /// Waits for the work that is running now.
    fn await_work(&self) {
        let (mut fence, mut retry) = (None, RETRY_INTERVAL);
        while !self.work.has_ended(&mut fence, || self.work.fence_for_waiting()) {
            time::sleep(retry);
            retry = LONGEST_RETRY_INTERVAL.min(retry * 2);
        }
    }

    /// Carries out a job. Returns the job if the buffer's context is being destroyed.
    fn carry_out(&self, (mut copy, back_to): Job) -> Option<Job> {
        match self.context_of(&copy) {
            Some(context) if self.work.enter(context, || copy.buffer.unregister()).is_none() => {
                return Some((copy, back_to));
            }
            Some(_) => {}
            // A registration ends when its context is destroyed.
            None => copy.buffer.forget_registration(),
        }
        match back_to {
            Some(place) => self.state.lock().returned.push((place, copy)),
            None => {
                let len = copy.buffer.len();
                drop(copy); // before locking, because unmapping takes long
                self.state.lock().freed += len;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::{
            fake::{Driver, until},
            types::*,
        },
        memory::{engine::GRANULE, staging::Buffer},
        submit::fake,
    };

    const UNREGISTER: &str = "cuMemHostUnregister";

    fn copy(context: CUcontext) -> HostCopy {
        let mut buffer = Buffer::new(GRANULE).expect("host memory");
        buffer.register(context as usize);
        HostCopy { buffer, fingerprint: None, file: None }
    }

    /// Waits for all jobs, and returns their results.
    fn finished(waiter: &Waiter) -> Finished {
        until(|| !waiter.is_busy());
        waiter.take_finished()
    }

    #[test]
    fn a_buffer_is_unregistered_without_locks_after_earlier_work_of_its_context() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let waiter = Waiter::new(work);
        let stream = driver.new_stream(context);
        driver.keep_busy(stream);
        waiter.unregister(copy(context), None);
        driver.wait_for_calls("cuEventQuery", 2);
        assert_eq!((driver.count(UNREGISTER), waiter.is_busy(), waiter.take_finished().freed), (0, true, 0));
        driver.finish(stream);
        assert_eq!(finished(&waiter).freed, GRANULE);
        assert_eq!((driver.count(UNREGISTER), driver.was_any_lock_held(UNREGISTER)), (1, false));
    }

    /// The driver may wait for running work in this call.
    #[test]
    fn no_thread_waits_for_a_call_that_blocks_in_the_driver() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let waiter = Waiter::new(work);
        driver.block(UNREGISTER);
        waiter.unregister(copy(context), None);
        driver.wait_for_calls(UNREGISTER, 1);
        assert!(waiter.is_busy() && work.fence_of_contexts().is_some() && work.knows(context as usize));
        waiter.unregister(copy(context), None);
        driver.unblock(UNREGISTER);
        assert_eq!(finished(&waiter).freed, 2 * GRANULE);
    }

    #[test]
    fn an_unregistered_copy_returns_to_its_chunk() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let waiter = Waiter::new(work);
        let place = Place { base: 3, offset: 4, is_away: true };
        waiter.unregister(copy(context), Some(place));
        let Finished { freed, returned } = finished(&waiter);
        let [(returned_to, copy)] = &returned[..] else { panic!("{returned:?}") };
        assert_eq!((freed, returned_to.base, returned_to.offset), (0, 3, 4));
        assert_eq!(copy.buffer.registration(), None);
    }

    #[test]
    fn a_registration_ends_with_its_context_without_a_call() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let waiter = Waiter::new(work);
        let copy = copy(context);
        assert!(work.begin_destroying(context));
        waiter.unregister(copy, None);
        std::thread::sleep(RETRY_INTERVAL);
        assert!(waiter.is_busy(), "the context may stay");
        work.end_of_destroying(context, true, SUCCESS);
        assert_eq!((finished(&waiter).freed, driver.count(UNREGISTER)), (GRANULE, 0));
    }
}
