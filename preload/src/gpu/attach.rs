//! A GPU that the program begins to use: this library learns what it is, introduces it to the scheduler, and waits until
//! there is room for a CUDA context.

use super::{Gpu, find, info::Info, memory_limits, now_in_use, unsupported};
use crate::{
    connection,
    driver::types::*,
    env::trace::trace,
    gate::{self, closed},
    memory::space::Space,
    sys::{futex, sync::Mutex, time::Instant},
};
use core::{sync::atomic::Ordering, time::Duration};
use nvshare_wire::{ClientMessage, client as wire};

/// Tells the scheduler what memory of a GPU this process has imported. It runs when the GPU has been introduced, before the
/// first report of its memory. The registry of what is imported is in a layer above.
pub type TellImports = fn(&Gpu);

/// What is known of the room for a context.
mod admission {
    pub const UNKNOWN: u32 = 0;
    pub const ADMITTED: u32 = 1;
    /// The scheduler says that it takes as long as it takes.
    pub const DEFERRED: u32 = 2;
    /// There is none, and there will be none before others need less.
    pub const REFUSED: u32 = 3;
}
/// How long a program waits for room to be made before it creates a context, where the scheduler says nothing.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(3);

impl Gpu {
    /// Before the program creates a context on this GPU: makes it known to the scheduler, and waits for room. `false`: there
    /// is none.
    pub fn attach(device: CUdevice, tell_imports: TellImports) -> bool {
        let Some(gpu) = find(device) else { return true };
        let Some(info) = gpu.identify(device) else { return true };
        let mut first = false;
        gpu.attached.get_or_init(|| {
            first = true;
            if let Some(engine) = info.engine {
                let mut space = Space::new(device, engine, info.total, info.env_max);
                space.account.max = memory_limits::of(info.uuid);
                let _ = gpu.space.set(Mutex::new(space));
            }
        });
        if !first {
            // Where there is one already, its work goes on: another is not refused.
            return gpu.work.has_contexts() || gpu.attach_again(tell_imports);
        }
        now_in_use(gpu.index);
        if !connection::is_connected() {
            return true;
        }
        // From here on the lock and the allowance are the scheduler's to give.
        gpu.gate.close(closed::LOCK);
        gpu.introduce(tell_imports);
        gpu.wait_for_admission()
    }

    /// The same for a GPU that was attached before, and has no context. One that was refused is asked for anew.
    fn attach_again(&self, tell_imports: TellImports) -> bool {
        let asks_anew = {
            let _one = self.introducing.lock();
            let asked = self.admission.compare_exchange(
                admission::REFUSED,
                admission::UNKNOWN,
                Ordering::SeqCst,
                Ordering::SeqCst,
            );
            asked.is_ok()
        };
        if !connection::is_connected() {
            return true;
        }
        if asks_anew {
            self.gate.close(closed::LOCK);
            self.introduce(tell_imports);
        }
        self.wait_for_admission()
    }

    /// Until there is room for a context, or the scheduler says nothing of it. Also while the scheduler is away for a moment:
    /// who comes back to it is introduced anew, and who stays without one has room. `false`: it is refused.
    fn wait_for_admission(&self) -> bool {
        let begin = Instant::now();
        while gate::is_active() {
            let state = self.admission.load(Ordering::SeqCst);
            if state == admission::ADMITTED || (state == admission::UNKNOWN && begin.elapsed() >= ADMISSION_TIMEOUT) {
                return true;
            }
            if state == admission::REFUSED {
                self.withdraw();
                return false;
            }
            futex::wait(&self.admission, state, Duration::from_millis(100));
        }
        true
    }

    /// Gives up a context that was refused: the scheduler forgets this client on this GPU until it asks again. Until then
    /// the driver says of each call that there is no context, so nothing waits at the gate.
    fn withdraw(&self) {
        let _one = self.introducing.lock();
        if !self.is_refused() {
            return; // another thread asks again
        }
        if self.is_introduced() && connection::send(&ClientMessage::Detach { slot: self.index }) {
            self.introduced.store(false, Ordering::SeqCst);
        }
        self.gate.open(closed::LOCK);
    }

    /// A context was refused, and has not been asked for again.
    pub fn is_refused(&self) -> bool {
        self.admission.load(Ordering::SeqCst) == admission::REFUSED
    }

    /// What this GPU is; `None` where this library stands aside. Needs no context.
    pub(super) fn identify(&self, device: CUdevice) -> Option<&Info> {
        let learn = || match unsupported::reason(device) {
            Some(why) => {
                trace!("GPU {device} is left alone: {why}");
                None
            }
            None => Some(Info::learn(device)),
        };
        self.info.get_or_init(learn).as_ref()
    }

    /// Tells the scheduler of this GPU and of the memory this client has there.
    pub fn introduce(&self, tell_imports: TellImports) {
        self.introduce_to(Space::reset_for_scheduler, tell_imports);
    }

    /// The same to a scheduler that has taken the place of the one before, on its connection.
    pub fn introduce_again(&self, tell_imports: TellImports) {
        self.forget_introduction();
        self.introduce_to(Space::reset_for_successor, tell_imports);
    }

    fn introduce_to(&self, meet: fn(&mut Space), tell_imports: TellImports) {
        let Some(info) = self.info() else { return };
        let _one = self.introducing.lock();
        if self.is_introduced() || self.is_refused() {
            return;
        }
        if let Some(space) = self.space.get() {
            meet(&mut space.lock());
        }
        let sent = connection::send(&ClientMessage::Attach {
            slot: self.index,
            uuid: info.uuid,
            kind: wire::GpuKind::Gpu,
            engine: info.engine_kind(),
            total: info.total,
            name: info.name,
            reason: info.reason,
        });
        // Where it did not go, the client's thread tries again.
        self.introduced.store(sent, Ordering::SeqCst);
        tell_imports(self);
        if let Some(space) = self.space.get() {
            self.report(&space.lock().account);
        }
    }

    pub fn is_introduced(&self) -> bool {
        self.introduced.load(Ordering::SeqCst)
    }

    /// The scheduler that it was introduced to is gone.
    pub fn forget_introduction(&self) {
        let _one = self.introducing.lock();
        self.introduced.store(false, Ordering::SeqCst);
        self.request_is_over();
        self.forget_denials();
    }

    /// Says that there is room for a context.
    pub fn admit_context(&self) {
        self.set_admission(admission::ADMITTED);
    }

    /// Says that there will be some only when others need less.
    pub fn defer_context(&self) {
        let _ = self.admission.compare_exchange(
            admission::UNKNOWN,
            admission::DEFERRED,
            Ordering::SeqCst,
            Ordering::SeqCst,
        );
    }

    /// The scheduler says that there is no room for a context, nor will there be any soon.
    pub fn refuse_context(&self) {
        if !self.work.has_contexts() {
            self.set_admission(admission::REFUSED);
        }
    }

    /// What is known of the room for a context, unless that was known already.
    fn set_admission(&self, known: u32) {
        for open in [admission::UNKNOWN, admission::DEFERRED] {
            let _ = self.admission.compare_exchange(open, known, Ordering::SeqCst, Ordering::SeqCst);
        }
        futex::wake_all(&self.admission);
    }
}
