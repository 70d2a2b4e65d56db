//! Attaching to a GPU when the program begins to use it. The library identifies the GPU, introduces it
//! to the scheduler, and waits until a CUDA context is admitted.

use super::{Gpu, find, identity, info::Info, proof, rules, support};
use crate::{
    connection::{self, presence::Patience},
    driver::{query, types::*},
    env::trace::trace,
    memory::{mover::Mover, space::Space},
    submit::{self, captures, closed, target},
    sys::{
        futex,
        sync::{Mutex, Rank, await_client_thread},
        time,
    },
};
use alloc::boxed::Box;
use core::{sync::atomic::Ordering, time::Duration};
use nvshare_wire::{ClientMessage, client as wire};
use rustix::fd::BorrowedFd;

/// Tells the scheduler which memory of a GPU this process has imported. Called after the GPU has been
/// introduced and before the first report of its memory. A callback, because the registry of imports is
/// in a higher layer.
pub type TellImports = fn(&Gpu);

/// The scheduler's answer to the request for a context.
mod admission {
    pub const UNKNOWN: u32 = 0;
    pub const ADMITTED: u32 = 1;
    /// The GPU will have room when other clients need less memory. The wait is unlimited.
    pub const DEFERRED: u32 = 2;
    /// The GPU has no room before other clients need less memory, so the context is refused.
    pub const REFUSED: u32 = 3;
}
/// The longest wait for an answer. After this time, the program creates its context anyway.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(3);

/// The interval between checks whether another thread has finished destroying a context.
const DYING_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Whether the driver has a GPU with that ordinal.
fn exists(device: CUdevice) -> bool {
    (0..query::device_count()).contains(&device)
}

impl Gpu {
    /// Called before the program creates a context on this GPU. Introduces the GPU to the scheduler and
    /// waits for admission. Returns `false` if the context is refused.
    pub fn attach(device: CUdevice, tell_imports: TellImports) -> bool {
        if !exists(device) {
            return true; // the driver's call returns the error
        }
        let Some((gpu, info)) = find(device).and_then(|gpu| Some((gpu, gpu.identify(device)?))) else {
            target::add_gpu(None);
            return true;
        };
        let is_first = gpu.prepare(info);
        target::add_gpu(Some(gpu));
        if !is_first {
            // If a context exists already, a further context is not refused.
            return gpu.work.has_contexts() || gpu.attach_again(tell_imports);
        }
        if connection::is_connected() {
            // From now on, the program needs the scheduler's lock and allowance.
            gpu.gate.close(closed::LOCK);
            gpu.introduce(false, tell_imports);
        }
        gpu.wait_for_admission()
    }

    /// Creates the state of a GPU on its first use. Returns `false` if the state already exists.
    fn prepare(&'static self, info: &Info) -> bool {
        let _one = self.attaching.lock();
        if self.is_attached() {
            return false;
        }
        if let Some(engine) = info.engine {
            let mut space = Space::new(self.index as CUdevice, engine, info.total, info.env_max, &self.work);
            space.account.max = rules::memory_max(info.identity.get());
            let _ = self.space.set(Box::new(Mutex::new(Rank::Space, space)));
        }
        self.update_permissions();
        self.set_attached();
        true
    }

    /// Implements [`attach`](Self::attach) for a GPU that was attached before and has no context. If the
    /// last context was refused, requests admission again.
    fn attach_again(&self, tell_imports: TellImports) -> bool {
        let asks_anew = {
            let _one = self.introducing.lock();
            self.answer(admission::REFUSED, admission::UNKNOWN)
        };
        if asks_anew && connection::is_connected() {
            self.gate.close(closed::LOCK);
            self.introduce(false, tell_imports);
        }
        self.wait_for_admission()
    }

    /// Waits for the scheduler's answer. An unanswered request times out after [`ADMISSION_TIMEOUT`] and
    /// counts as admitted. The wait continues during a short absence of the scheduler. After a reconnect,
    /// the GPU is introduced again; without a scheduler, the context is admitted. Returns `false` if the
    /// context is refused.
    ///
    /// The answer is final when this function returns. So no GPU on which the program has been allowed a
    /// context becomes refused, which would hide the GPU from the scheduler.
    fn wait_for_admission(&self) -> bool {
        let _waiting = await_client_thread();
        let mut patience = Patience::new(if connection::is_connected() { ADMISSION_TIMEOUT } else { Duration::ZERO });
        loop {
            let state = self.admission.load(Ordering::SeqCst);
            let is_unanswered = state == admission::UNKNOWN && patience.is_over();
            match state {
                admission::ADMITTED => return true,
                admission::REFUSED => {
                    self.withdraw();
                    return false;
                }
                _ if is_unanswered || !submit::is_active() => self.admit_context(),
                _ => patience.wait_at_most(&self.admission, state, Duration::from_millis(100)),
            }
        }
    }

    /// Withdraws the request for a refused context. The scheduler then forgets this client on this GPU
    /// until the next request. Until then, the driver reports that no context exists, so no thread waits at
    /// the gate.
    fn withdraw(&self) {
        let _one = self.introducing.lock();
        if !self.is_refused() {
            return; // another thread has requested the context again
        }
        if self.is_introduced() && connection::send(&ClientMessage::Detach { slot: self.index }) {
            self.set_introduced(false);
        }
        self.gate.open(closed::LOCK);
    }

    /// Whether a context was refused and has not been requested again.
    pub fn is_refused(&self) -> bool {
        self.admission.load(Ordering::SeqCst) == admission::REFUSED
    }

    /// Called when the program has created a context or has retained it again. Creates the mover's objects
    /// in a new context, before the program or any other thread of this library knows the context.
    pub fn add_context(&self, context: CUcontext) {
        if self.work.use_context(context) {
            return;
        }
        // The driver reuses the handle of a destroyed context, perhaps before the destroying thread has
        // recorded the destruction.
        while self.work.is_dying(context) {
            time::sleep(DYING_POLL_INTERVAL);
        }
        let add = || self.work.add_context(context);
        let Some(space) = self.space() else { return add() };
        let copies = space.lock().engine().copies();
        // Uses relaxed mode, because another thread may be capturing.
        captures::in_relaxed_mode(|| Mover::make_ready(&self.moving, context, copies, add));
    }

    /// Returns the properties of this GPU, or `None` if this library does not support it. Needs no context.
    pub(super) fn identify(&self, device: CUdevice) -> Option<&Info> {
        let learn = || match support::reason(device) {
            Some(why) => {
                trace!("GPU {device} is not supported: {why}");
                None
            }
            None => Some(Info::learn(device)),
        };
        if self.info.get().is_none() {
            let publish = || Some(&self.info.get_or_init(|| Box::new(learn())).as_ref()?.identity);
            identity::learn(publish, |identity| {
                identity.ask(device);
            });
        }
        self.info()
    }

    /// Introduces this GPU to the scheduler and reports this client's memory on it. With `is_named`, the
    /// scheduler already knows the GPU.
    pub fn introduce(&self, is_named: bool, tell_imports: TellImports) {
        self.introduce_to(is_named, Space::reset_for_scheduler, tell_imports);
    }

    /// Introduces this GPU to a new scheduler on the same connection.
    pub fn introduce_again(&self, is_named: bool, tell_imports: TellImports) {
        self.forget_introduction();
        self.introduce_to(is_named, Space::reset_for_successor, tell_imports);
    }

    /// Returns the message that introduces this GPU to the scheduler. Takes no lock.
    fn name(&self) -> Option<ClientMessage> {
        self.info().map(|info| ClientMessage::Attach {
            slot: self.index,
            uuid: info.identity.get(),
            kind: wire::GpuKind::Gpu,
            engine: info.engine_kind(),
            total: info.total,
            name: info.name,
            reason: info.reason,
        })
    }

    /// Calls `send` with the message that introduces this GPU, and with the proof that this process may use it.
    /// A process that is off its GPUs has no proof, and the scheduler needs none.
    pub fn name_to(&self, send: impl FnOnce(&ClientMessage, &[BorrowedFd<'_>]) -> bool) -> bool {
        self.name().is_some_and(|attach| proof::with_device_files(|files| send(&attach, files)))
    }

    fn introduce_to(&self, is_named: bool, meet: fn(&mut Space), tell_imports: TellImports) {
        let _one = self.introducing.lock();
        if self.is_introduced() || self.is_refused() {
            return;
        }
        if let Some(space) = self.space.get() {
            meet(&mut space.lock());
        }
        let sent = is_named || self.name_to(connection::send_with);
        // If the message could not be sent, the client's thread tries again.
        self.set_introduced(sent);
        tell_imports(self);
        if let Some(space) = self.space.get() {
            let guard = space.lock();
            if let Some(reason) = guard.account.unevictable {
                self.explain_unevictable(reason);
            }
            self.report(&guard.account);
        }
    }

    /// Called when the scheduler that knew this GPU has ended.
    pub fn forget_introduction(&self) {
        let _one = self.introducing.lock();
        self.set_introduced(false);
        self.request_is_over();
        self.forget_denials();
    }

    /// Called when the scheduler has room for a context.
    pub fn admit_context(&self) {
        self.set_admission(admission::ADMITTED);
    }

    /// Called when the scheduler defers the context until other clients need less memory.
    pub fn defer_context(&self) {
        self.answer(admission::UNKNOWN, admission::DEFERRED);
    }

    /// Called when the scheduler has no room for a context and expects none soon.
    pub fn refuse_context(&self) {
        self.set_admission(admission::REFUSED);
    }

    /// Stores the answer, unless a final answer is already stored.
    fn set_admission(&self, known: u32) {
        for open in [admission::UNKNOWN, admission::DEFERRED] {
            self.answer(open, known);
        }
        futex::wake_all(&self.admission);
    }

    /// Replaces one answer by another. Returns `false` if the answer is not `from`.
    fn answer(&self, from: u32, to: u32) -> bool {
        self.admission.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::fake::Scheduler,
        driver::fake::{Driver, until},
        gpu::{by_ordinal, fake},
    };
    use alloc::vec::Vec;
    use core::sync::atomic::AtomicBool;
    use std::thread;

    /// Attaches to a new GPU on another thread, while `scheduler` acts. Returns the outcome.
    fn attach_while(device: CUdevice, scheduler: impl FnOnce(&'static Gpu)) -> bool {
        submit::set_active(true);
        thread::scope(|scope| {
            let attaching = scope.spawn(move || Gpu::attach(device, |_| {}));
            until(|| by_ordinal(device).is_some_and(|gpu| gpu.is_introduced()));
            scheduler(by_ordinal(device).expect("an attached GPU"));
            attaching.join().expect("no panic")
        })
    }

    fn attaches(messages: &[ClientMessage]) -> usize {
        messages.iter().filter(|message| matches!(message, ClientMessage::Attach { .. })).count()
    }

    #[test]
    fn a_context_waits_until_the_scheduler_admits_it() {
        let (driver, scheduler) = (Driver::new(), Scheduler::connect());
        let is_admitted = AtomicBool::new(false);
        let device = driver.new_device();
        let admit = |gpu: &Gpu| {
            assert!(gpu.gate.is_closed_for(closed::LOCK), "the program has no lock yet");
            gpu.defer_context();
            assert_eq!(gpu.admission.load(Ordering::SeqCst), admission::DEFERRED);
            is_admitted.store(true, Ordering::SeqCst);
            gpu.admit_context();
        };
        assert!(attach_while(device, admit) && is_admitted.load(Ordering::SeqCst));
        let sent = scheduler.sent();
        assert!(matches!(sent[..], [ClientMessage::Attach { .. }, ClientMessage::Memory { .. }]), "{sent:?}");
        assert!(!by_ordinal(device).expect("an attached GPU").is_refused());
    }

    #[test]
    fn a_refused_context_is_withdrawn_and_can_be_requested_again() {
        let (driver, scheduler) = (Driver::new(), Scheduler::connect());
        let device = driver.new_device();
        assert!(!attach_while(device, Gpu::refuse_context));
        let gpu = by_ordinal(device).expect("an attached GPU");
        let sent = scheduler.sent();
        assert!(matches!(sent[..], [.., ClientMessage::Detach { .. }]), "{sent:?}");
        assert!(gpu.is_refused() && !gpu.is_introduced() && !gpu.gate.is_closed_for(closed::LOCK));
        gpu.introduce(false, |_| {});
        assert_eq!(scheduler.sent().len(), 0, "the scheduler has forgotten this client on this GPU");
        assert!(attach_while(device, Gpu::admit_context));
        assert_eq!((attaches(&scheduler.sent()), gpu.gate.is_closed_for(closed::LOCK)), (1, true));
    }

    #[test]
    fn a_further_context_is_not_refused() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = fake::attach_to_scheduler(&driver);
        gpu.refuse_context();
        assert!(!gpu.is_refused() && Gpu::attach(gpu.index as CUdevice, |_| {}));
        assert_eq!(scheduler.sent().len(), 0);
    }

    /// A scheduler that appears between the attachment and the creation of the context may refuse it.
    #[test]
    fn a_context_that_a_thread_is_about_to_create_is_not_refused() {
        let driver = Driver::new();
        submit::set_active(true);
        let device = driver.new_device();
        assert!(Gpu::attach(device, |_| {}));
        let scheduler = Scheduler::connect();
        let gpu = by_ordinal(device).expect("an attached GPU");
        gpu.introduce(false, |_| {});
        gpu.refuse_context();
        assert!(!gpu.is_refused() && gpu.is_introduced());
        gpu.forget_introduction();
        gpu.introduce(false, |_| {});
        assert_eq!(attaches(&scheduler.sent()), 2);
    }

    #[test]
    fn without_a_scheduler_no_context_waits() {
        let driver = Driver::new();
        let (gpu, context) = fake::attach(&driver);
        assert!(gpu.work.has_context(context) && !gpu.gate.is_closed_for(closed::FOR_ALL) && !gpu.is_introduced());
        assert!(Gpu::attach(1000, |_| unreachable!("there is no such GPU")));
    }

    #[test]
    fn an_unsupported_gpu_is_left_alone() {
        const MPS_ENABLED: i32 = 133;
        let (driver, scheduler) = (Driver::new(), Scheduler::connect());
        submit::set_active(true);
        let device = driver.new_device();
        driver.set_attribute(device, MPS_ENABLED, 1);
        assert!(Gpu::attach(device, |_| unreachable!("the scheduler does not share it")));
        assert!(by_ordinal(device).is_none() && scheduler.sent().is_empty());
    }

    #[test]
    fn imports_are_introduced_between_the_gpu_and_its_memory() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = fake::attach_to_scheduler(&driver);
        gpu.forget_introduction();
        gpu.introduce(false, |gpu| {
            connection::send(&ClientMessage::Withdrawn { range: gpu.index });
        });
        let sent = scheduler.sent();
        let [ClientMessage::Attach { .. }, ClientMessage::Withdrawn { .. }, ClientMessage::Memory { .. }] = sent[..]
        else {
            panic!("{sent:?}")
        };
        gpu.introduce(false, |_| unreachable!("the scheduler knows the GPU"));
    }

    #[test]
    fn an_introduction_that_cannot_be_sent_is_repeated() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = fake::attach_to_scheduler(&driver);
        gpu.forget_introduction();
        scheduler.stop_reading();
        gpu.introduce(false, |_| {});
        assert!(!gpu.is_introduced() && gpu.is_unreported());
        scheduler.sent();
        gpu.introduce(false, |_| {});
        assert!(gpu.is_introduced() && !gpu.is_unreported());
        assert_eq!(attaches(&scheduler.sent()), 1);
    }

    /// The driver may return the handle of a context whose destruction has not been recorded yet.
    #[test]
    fn a_context_is_added_after_an_earlier_context_with_its_handle_has_ended() {
        let driver = Driver::new();
        let (gpu, context) = fake::attach(&driver);
        let handle = context as usize;
        assert!(gpu.work.begin_destroying(context));
        let adds = AtomicBool::new(false);
        thread::scope(|scope| {
            let adding = scope.spawn(|| {
                adds.store(true, Ordering::SeqCst);
                gpu.add_context(handle as CUcontext);
            });
            until(|| adds.load(Ordering::SeqCst));
            thread::sleep(Duration::from_millis(2));
            assert!(!adding.is_finished() && !gpu.work.has_context(context));
            gpu.work.end_of_destroying(context, true, SUCCESS);
            adding.join().expect("no panic");
        });
        assert!(gpu.work.has_context(context));
        let contexts: Vec<_> = gpu.work.contexts();
        assert_eq!(contexts, [context]);
    }

    #[test]
    fn the_objects_of_a_context_are_created_in_relaxed_capture_mode() {
        let driver = Driver::new();
        let (gpu, _) = fake::attach(&driver);
        driver.forget_calls();
        let context = driver.new_context(gpu.index as CUdevice);
        gpu.add_context(context);
        let mode = "cuThreadExchangeStreamCaptureMode";
        assert_eq!(driver.calls(&[mode, "cuStreamCreate"]), [mode, "cuStreamCreate", mode]);
        driver.forget_calls();
        gpu.add_context(context);
        assert_eq!(driver.count("cuStreamCreate"), 0, "the context is known");
    }
}
