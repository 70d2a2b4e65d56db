//! One GPU as this client uses it: its gate, its work, its memory. The table of all of them, by the driver's ordinal.

use crate::{
    capture, client,
    cuda::*,
    driver, environment, epoch, futex,
    gate::{Gate, closed},
    info::Info,
    limit::Answers,
    link,
    memory::{
        mover::Mover,
        shared,
        space::{Account, Space},
    },
    squeeze, story,
    sys::{
        sync::{Mutex, OnceLock},
        time::Instant,
    },
    threads::{self, Slot},
    trace::trace,
    work::{self, Work, with_current},
};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use nvshare_wire::{ClientMessage, MAX_SLOTS, Uuid, client as wire};

/// What is known of the room for a context.
mod room {
    pub const UNKNOWN: u32 = 0;
    pub const MADE: u32 = 1;
    /// The scheduler says that it takes as long as it takes.
    pub const AWAITED: u32 = 2;
    /// There is none, and there will be none before others need less.
    pub const REFUSED: u32 = 3;
}
/// How long a program waits for room to be made before it creates a context, where the scheduler says nothing.
const ROOM_PATIENCE: Duration = Duration::from_secs(3);
/// How long a waiting thread sleeps before it looks around again, whatever happens.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub struct Gpu {
    /// The driver's ordinal in this process, and the slot the scheduler knows it by.
    pub index: u32,
    pub gate: Gate,
    pub work: Work,
    /// Made when it is first asked for; `None` in it where this library stands aside.
    info: OnceLock<Option<Info>>,
    /// Set when the program first creates a context here.
    attached: OnceLock<()>,
    space: OnceLock<Mutex<Space>>,
    /// What moves the memory. A context that it works in must not go before it has left.
    pub moving: Mutex<Mover>,
    primary: AtomicUsize,
    /// The scheduler of this connection knows this GPU.
    introduced: AtomicBool,
    introducing: Mutex<()>,
    /// A request is with the scheduler.
    requested: AtomicBool,
    /// When that was, in microseconds.
    requested_at: AtomicU64,
    /// Whether there is room for a context: see [`room`].
    room: AtomicU32,
    /// Nothing of this client runs: the gate has been closed and everything has drained since.
    drained: AtomicBool,
    unreported: AtomicBool,
    /// What the scheduler says to wishes for a higher limit.
    pub answers: Answers,
    /// So many bytes cannot be mapped, the scheduler says; 0: it has said nothing of that.
    unmappable: AtomicU64,
    /// And to calls in which the driver found no memory.
    pub squeezed: squeeze::Answers,
    /// When this client last gave the lock of this GPU back after using it, in milliseconds; 0 before.
    used_until: AtomicU64,
    /// Of the threads that wait at the gate, those that only allocate.
    allocating: AtomicU32,
}

const NONE: i32 = -1;
const SEVERAL: i32 = -2;
/// The only GPU this process uses, if there is just one: then a launch need not ask the driver where it goes.
static ONLY: AtomicI32 = AtomicI32::new(NONE);

static GPUS: [Gpu; MAX_SLOTS as usize] = {
    let mut gpus = [const { Gpu::new() }; MAX_SLOTS as usize];
    let mut i = 0;
    while i < gpus.len() {
        gpus[i].index = i as u32;
        i += 1;
    }
    gpus
};

/// The GPU of that ordinal, once a context was created there.
pub fn by_ordinal(device: CUdevice) -> Option<&'static Gpu> {
    GPUS.get(usize::try_from(device).ok()?).filter(|g| g.is_attached())
}

/// The GPU of that ordinal, whether it is used or not, where its memory is in this library's hands or will be.
pub fn managed(device: CUdevice) -> Option<&'static Gpu> {
    let gpu = GPUS.get(usize::try_from(device).ok()?)?;
    gpu.get_acquainted(device).filter(|info| info.engine.is_some()).map(|_| gpu)
}

/// The same by what it is known by outside of this process.
pub fn managed_by_uuid(uuid: Uuid) -> Option<&'static Gpu> {
    let mut count = 0;
    // SAFETY: a valid place.
    unsafe { driver::cuDeviceGetCount(&mut count) };
    (0..count.min(MAX_SLOTS as i32)).filter_map(managed).find(|gpu| gpu.uuid() == Some(uuid))
}

/// Those that this process uses.
pub fn attached() -> impl Iterator<Item = &'static Gpu> {
    GPUS.iter().filter(|g| g.is_attached())
}

/// The GPU of the calling thread's current context.
#[inline]
pub fn current() -> Option<&'static Gpu> {
    match ONLY.load(Ordering::Relaxed) {
        NONE => None,
        SEVERAL => {
            let mut device = 0;
            // SAFETY: a valid place.
            (unsafe { driver::cuCtxGetDevice(&mut device) } == SUCCESS).then(|| by_ordinal(device)).flatten()
        }
        only => GPUS.get(only as usize),
    }
}

/// Whether this process uses more than one GPU.
pub fn are_several() -> bool {
    ONLY.load(Ordering::Relaxed) == SEVERAL
}

/// Opens every gate for good.
pub fn open_all() {
    GPUS.iter().for_each(|gpu| gpu.gate.open(closed::FOR_ALL));
}

impl Gpu {
    const fn new() -> Self {
        Self {
            index: 0,
            gate: Gate::new(),
            work: Work::new(),
            info: OnceLock::new(),
            attached: OnceLock::new(),
            space: OnceLock::new(),
            moving: Mutex::new(Mover::new()),
            primary: AtomicUsize::new(0),
            introduced: AtomicBool::new(false),
            introducing: Mutex::new(()),
            requested: AtomicBool::new(false),
            requested_at: AtomicU64::new(0),
            room: AtomicU32::new(0),
            drained: AtomicBool::new(true),
            unreported: AtomicBool::new(false),
            answers: Answers::new(),
            unmappable: AtomicU64::new(0),
            squeezed: squeeze::Answers::new(),
            used_until: AtomicU64::new(0),
            allocating: AtomicU32::new(0),
        }
    }

    fn info(&self) -> Option<&Info> {
        self.info.get()?.as_ref()
    }

    pub fn is_attached(&self) -> bool {
        self.attached.get().is_some()
    }

    /// Before the program creates a context on this GPU: makes it known to the scheduler, and waits for room. `false`: there
    /// is none.
    pub fn attach(device: CUdevice) -> bool {
        let Some(gpu) = usize::try_from(device).ok().and_then(|i| GPUS.get(i)) else { return true };
        let Some(info) = gpu.get_acquainted(device) else { return true };
        let mut first = false;
        gpu.attached.get_or_init(|| {
            first = true;
            if let Some(engine) = info.engine {
                let mut space = Space::new(device, engine, info.total, info.own_max);
                space.account.max = story::ruled(info.uuid);
                let _ = gpu.space.set(Mutex::new(space));
            }
        });
        if !first {
            // Where there is one already, its work goes on: another is not refused.
            return gpu.work.has_contexts() || gpu.attach_again();
        }
        let _ = ONLY.compare_exchange(NONE, gpu.index as i32, Ordering::AcqRel, Ordering::Acquire).map_err(|_| {
            ONLY.store(SEVERAL, Ordering::Release);
        });
        if !client::is_connected() {
            return true;
        }
        // From here on the lock and the allowance are the scheduler's to give.
        gpu.gate.close(closed::LOCK);
        gpu.introduce();
        gpu.wait_for_room()
    }

    /// The same for a GPU that was attached before, and has no context. One that was refused is asked for anew.
    fn attach_again(&self) -> bool {
        let asks_anew = {
            let _one = self.introducing.lock();
            let asked = self.room.compare_exchange(room::REFUSED, room::UNKNOWN, Ordering::SeqCst, Ordering::SeqCst);
            asked.is_ok()
        };
        if !client::is_connected() {
            return true;
        }
        if asks_anew {
            self.gate.close(closed::LOCK);
            self.introduce();
        }
        self.wait_for_room()
    }

    /// Until there is room for a context, or the scheduler says nothing of it. Also while the scheduler is away for a moment:
    /// who comes back to it is introduced anew, and who stays without one has room. `false`: it is refused.
    fn wait_for_room(&self) -> bool {
        let begin = Instant::now();
        while client::is_on() {
            let room = self.room.load(Ordering::SeqCst);
            if room == room::MADE || (room == room::UNKNOWN && begin.elapsed() >= ROOM_PATIENCE) {
                return true;
            }
            if room == room::REFUSED {
                self.withdraw();
                return false;
            }
            futex::wait(&self.room, room, Duration::from_millis(100));
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
        if self.is_introduced() && client::send(&ClientMessage::Detach { slot: self.index }) {
            self.introduced.store(false, Ordering::SeqCst);
        }
        self.gate.open(closed::LOCK);
    }

    /// A context was refused, and has not been asked for again.
    pub fn is_refused(&self) -> bool {
        self.room.load(Ordering::SeqCst) == room::REFUSED
    }

    /// What this GPU is; `None` where this library stands aside. Needs no context.
    fn get_acquainted(&self, device: CUdevice) -> Option<&Info> {
        let learn = || match environment::unsupported(device) {
            Some(why) => {
                trace!("GPU {device} is left alone: {why}");
                None
            }
            None => Some(Info::learn(device)),
        };
        self.info.get_or_init(learn).as_ref()
    }

    /// Tells the scheduler of this GPU and of the memory this client has there.
    pub fn introduce(&self) {
        self.introduce_to(Space::meet_scheduler);
    }

    /// The same to a scheduler that has taken the place of the one before, on its connection.
    pub fn introduce_again(&self) {
        self.forget_introduction();
        self.introduce_to(Space::meet_successor);
    }

    fn introduce_to(&self, meet: fn(&mut Space)) {
        let Some(info) = self.info() else { return };
        let _one = self.introducing.lock();
        if self.is_introduced() || self.is_refused() {
            return;
        }
        if let Some(space) = self.space.get() {
            meet(&mut space.lock());
        }
        let sent = client::send(&ClientMessage::Attach {
            slot: self.index,
            uuid: info.uuid,
            kind: wire::GpuKind::Gpu,
            engine: info.engine_kind(),
            total: info.total,
            name: info.name,
            reason: info.reason,
        });
        // Where it did not go, the link tries again.
        self.introduced.store(sent, Ordering::SeqCst);
        shared::introduce(self);
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

    pub fn uuid(&self) -> Option<Uuid> {
        self.info().map(|i| i.uuid)
    }

    pub fn total(&self) -> u64 {
        self.info().map_or(0, |i| i.total)
    }

    /// How the program's bytes stand here, once it uses this GPU and an engine can move them.
    pub fn account(&self) -> Option<Account> {
        self.space().map(|space| space.lock().account)
    }

    /// The most of this GPU's memory that anybody lets the program have; `u64::MAX` where nobody says.
    pub fn bound(&self) -> u64 {
        if let Some(account) = self.account() {
            return account.at_most(u64::MAX);
        }
        let Some(info) = self.info() else { return u64::MAX };
        let ruled = story::ruled(info.uuid);
        info.own_max.min(if ruled == 0 { u64::MAX } else { ruled })
    }

    /// The memory of this GPU, where an engine can move it.
    pub fn space(&self) -> Option<&Mutex<Space>> {
        self.space.get()
    }

    /// Whether other devices may be given its allocations.
    pub fn is_rdma_capable(&self) -> bool {
        self.space().is_some_and(|space| space.lock().is_rdma_capable())
    }

    /// The primary context, if the program has retained it.
    pub fn primary(&self) -> Option<CUcontext> {
        match self.primary.load(Ordering::Acquire) {
            0 => None,
            context => Some(context as CUcontext),
        }
    }

    pub fn set_primary(&self, context: CUcontext) {
        self.primary.store(context as usize, Ordering::Release);
    }

    /// Says that there is room for a context.
    pub fn make_room(&self) {
        self.leave_room_at(room::MADE);
    }

    /// Says that there will be some only when others need less.
    pub fn await_room(&self) {
        let _ = self.room.compare_exchange(room::UNKNOWN, room::AWAITED, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// A thread found the gate closed: asks for the lock and waits for a while.
    #[cold]
    pub fn wait(&self, reasons: u32) {
        self.gate.wait(reasons, LOOK_AGAIN, || {
            if self.gate.is_closed_for(closed::LOCK) {
                self.request();
            }
        });
    }

    /// The same for a thread that waits for memory that it allocates.
    #[cold]
    pub fn wait_to_allocate(&self) {
        self.allocating.fetch_add(1, Ordering::SeqCst);
        self.wait(closed::MEMORY);
        self.allocating.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether a thread waits at this gate that has work, which what runs may wait for.
    pub fn has_work_waiting(&self) -> bool {
        self.gate.waiting() > self.allocating.load(Ordering::SeqCst)
    }

    /// During a submission, after the driver has it: notes which stream it went to, unless that is known.
    #[inline]
    pub fn note(&'static self, slot: &Slot, stream: CUstream) {
        let epoch = epoch::now();
        if slot.way.load(Ordering::Relaxed) != epoch || slot.stream.load(Ordering::Relaxed) != work::name_of(stream) {
            self.note_anew(slot, stream, epoch);
        }
    }

    /// The GPU that a stream runs on, which need not be that of the current context.
    fn owner_of(&'static self, stream: CUstream) -> &'static Gpu {
        if !are_several() {
            return self;
        }
        let context = work::context_of(stream);
        let owner = context.and_then(|context| attached().find(|gpu| gpu.work.has_context(context)));
        owner.unwrap_or(self)
    }

    #[inline(never)]
    fn note_anew(&'static self, slot: &Slot, stream: CUstream, epoch: u64) {
        self.owner_of(stream).work.note(stream);
        // Nobody else can record a point in a per-thread stream, so each submission records its own.
        let may_last = stream != STREAM_PER_THREAD
            && !capture::any()
            && !self.work.is_full()
            && self.work.companions() == 0
            && client::is_on();
        slot.stream.store(work::name_of(stream), Ordering::Relaxed);
        slot.gpu.store(core::ptr::from_ref(self).cast_mut(), Ordering::Relaxed);
        slot.way.store(if may_last { epoch } else { epoch::NONE }, Ordering::Relaxed);
    }

    /// Asks the scheduler for the lock, unless that has been done.
    pub fn request(&self) {
        // One after the other: a request replaces the one before it, so the newest must be the one that knows most.
        static ONE: Mutex<()> = Mutex::new(());
        let _one = ONE.lock();
        if !self.introduced.load(Ordering::SeqCst) || self.requested.swap(true, Ordering::SeqCst) {
            return;
        }
        self.requested_at.store(Instant::now().since_start().as_micros() as u64, Ordering::Relaxed);
        if !client::send(&ClientMessage::Request { gpus: wanted_with(self) }) {
            self.requested.store(false, Ordering::SeqCst);
        }
    }

    /// The scheduler says that there is no room for a context, nor will there be any soon.
    pub fn refuse_context(&self) {
        if !self.work.has_contexts() {
            self.leave_room_at(room::REFUSED);
        }
    }

    /// What is known of the room for a context, unless that was known already.
    fn leave_room_at(&self, known: u32) {
        for open in [room::UNKNOWN, room::AWAITED] {
            let _ = self.room.compare_exchange(open, known, Ordering::SeqCst, Ordering::SeqCst);
        }
        futex::wake_all(&self.room);
    }

    /// The scheduler says that so many bytes cannot be mapped at once, which this client needs.
    pub fn cannot_map(&self, bytes: u64) {
        self.unmappable.store(bytes, Ordering::SeqCst);
    }

    /// Whether memory that was allocated and never used will not come: what waits for it fails with out of memory.
    #[cold]
    pub fn is_hopeless(&self) -> bool {
        let bytes = self.unmappable.load(Ordering::SeqCst);
        if bytes == 0 {
            return false;
        }
        let needs = |account: Account| account.demand + account.pinned - account.freeing;
        let is = self.account().is_some_and(|account| account.is_unproven() && needs(account) >= bytes);
        if !is {
            self.forget_denial(bytes);
        }
        is
    }

    /// That denial has been acted on, or no longer holds.
    fn forget_denial(&self, bytes: u64) {
        let _ = self.unmappable.compare_exchange(bytes, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// An allocation that will not come was undone, or the scheduler has something else to say.
    pub fn forget_denials(&self) {
        self.forget_denial(self.unmappable.load(Ordering::SeqCst));
    }

    /// The turn is over; `used`: something was submitted during it.
    pub fn turn_is_over(&self, used: bool) {
        if used {
            self.used_until.store(clock(), Ordering::Relaxed);
        }
    }

    pub fn request_is_over(&self) {
        // A swap, so that whoever found it still set is seen waiting.
        self.requested.swap(false, Ordering::SeqCst);
    }

    /// When the lock was last asked for, in the time since the clock began.
    pub fn requested_at(&self) -> Duration {
        Duration::from_micros(self.requested_at.load(Ordering::Relaxed))
    }

    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::SeqCst)
    }

    /// GPUs whose work may touch memory of this one, and the other way round.
    pub fn companions(&self) -> impl Iterator<Item = &'static Gpu> + use<> {
        let set = self.work.companions();
        let last = u64::BITS - set.leading_zeros();
        GPUS.iter().take(last as usize).filter(move |gpu| set >> gpu.index & 1 == 1)
    }

    pub fn is_companion_of(&self, other: &Gpu) -> bool {
        self.work.companions() >> other.index & 1 == 1
    }

    /// Submissions of all threads to this GPU and its companions so far.
    pub fn submitted(&self) -> u64 {
        self.companions()
            .fold(threads::submitted(self.index), |sum, gpu| sum.wrapping_add(threads::submitted(gpu.index)))
    }

    /// Whether no thread is inside the gate of this GPU, or of one whose work may touch its memory.
    pub fn is_quiet(&self) -> bool {
        Gate::is_quiet(self.index) && self.companions().all(|gpu| Gate::is_quiet(gpu.index))
    }

    /// Threads that wait at its gate, or at one of its companions'.
    pub fn waiting(&self) -> u32 {
        self.companions().fold(self.gate.waiting(), |sum, gpu| sum.saturating_add(gpu.gate.waiting()))
    }

    pub fn set_drained(&self, drained: bool) {
        self.drained.store(drained, Ordering::SeqCst);
    }

    /// Whether this client has nothing running here, nor anything that touches memory here, and cannot start any.
    pub fn is_drained(&self) -> bool {
        // Closed for the lock: what is closed for memory alone may have work that was submitted before.
        let is_shut = |gpu: &Gpu| gpu.drained.load(Ordering::SeqCst) && gpu.gate.is_closed_for(closed::LOCK);
        is_shut(self) && self.companions().all(is_shut) && self.is_quiet() && !capture::any()
    }

    /// Tells the scheduler how the account of bytes stands. Called with the space locked where it just changed, so that
    /// the newest report is the last.
    pub fn report(&self, account: &Account) {
        self.send_report(account, u64::MAX);
    }

    /// The same with what is free on the whole GPU just now: where the scheduler has no NVML, it learns from this what
    /// others use.
    pub fn report_measured(&self, account: &Account, context: CUcontext) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places.
        let result = with_current(context as usize, || unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) });
        self.send_report(account, if result == Ok(SUCCESS) { free as u64 } else { u64::MAX });
    }

    fn send_report(&self, account: &Account, device_free: u64) {
        // Not before it: of a GPU that it does not know, a scheduler wants to hear nothing.
        let sent = self.is_introduced()
            && shared::flush()
            && client::send(&ClientMessage::Memory {
                slot: self.index,
                ack: account.ack,
                demand: account.demand + account.pinned,
                mapped: account.mapped + account.pinned,
                swapped: account.swapped,
                pinned: account.pinned + if account.frozen { account.mapped } else { 0 },
                device_free,
                limit_ack: account.limit_seq,
                host: account.swapped + account.spare,
                counts: account.counts,
            });
        self.unreported.store(!sent, Ordering::SeqCst);
    }

    /// Whether the newest state of the account has yet to reach the scheduler.
    pub fn is_unreported(&self) -> bool {
        self.unreported.load(Ordering::SeqCst)
    }

    /// Nothing of the program can move any more: it gives this GPU work that passes no gate.
    pub fn freeze(&self) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        if !core::mem::replace(&mut guard.account.frozen, true) {
            trace!("GPU {}: work comes unseen from now on, so its memory stays", self.index);
            if self.is_introduced() {
                client::send(&ClientMessage::Stuck { gpus: 1 << self.index, reason: wire::StuckReason::Unseen });
            }
            self.report(&guard.account);
        }
    }

    /// The program has more or less memory that cannot move.
    pub fn pin(&self, change: impl FnOnce(u64) -> u64) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        let before = guard.account;
        guard.account.pinned = change(before.pinned);
        let after = guard.account;
        self.account_changed(&before, &after);
    }

    /// An allocation here fails since there is to be no memory for it.
    pub fn count_refusal(&self) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        let before = guard.account;
        guard.account.counts.refused += 1;
        let after = guard.account;
        self.account_changed(&before, &after);
    }

    /// Before the lock's part of the gate opens: the memory's part must be as the account is.
    pub fn close_if_lacking(&self) {
        if let Some(space) = self.space()
            && !space.lock().account.can_run()
        {
            self.gate.close(closed::MEMORY);
        }
    }

    /// After the account changed by an allocation or a free: closes the gate if memory is lacking, and reports. Only the
    /// link's thread opens it again, which knows of the copies under way.
    pub fn account_changed(&self, before: &Account, after: &Account) {
        if !after.can_run() {
            self.gate.close(closed::MEMORY);
            if after.may_grow() {
                link::wake(); // the scheduler has nothing more to say: mapping failed where it should not have
            }
        } else if self.gate.is_closed_for(closed::MEMORY) {
            link::wake();
        }
        if before != after {
            self.report(after);
            if self.is_unreported() && client::is_connected() {
                link::wake();
            }
        }
    }
}

/// How long after its last turn on a GPU a program still counts as using it.
const LATELY: Duration = Duration::from_secs(2);

/// The GPUs whose locks this client needs at once: this one, those where threads wait, those it used lately, and all that
/// are companions of one of them.
fn wanted_with(gpu: &Gpu) -> u64 {
    let wanted = attached().filter(|g| {
        let used_until = g.used_until.load(Ordering::Relaxed);
        g.gate.waiting() > 0 || (used_until != 0 && clock().saturating_sub(used_until) < LATELY.as_millis() as u64)
    });
    let together = |gpu: &Gpu| 1 << gpu.index | gpu.work.companions();
    let wanted = wanted.fold(together(gpu), |set, g| set | together(g));
    // Of others the scheduler knows nothing.
    attached().filter(|gpu| !gpu.is_introduced()).fold(wanted, |set, gpu| set & !(1 << gpu.index))
}

/// Milliseconds since some time in the past, never 0.
fn clock() -> u64 {
    Instant::now().since_start().as_millis() as u64 + 1
}
