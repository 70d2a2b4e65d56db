//! This process as a client of the scheduler: whether it is one, and its connection.

use crate::{
    barrier, epoch, gpu, link,
    link::Start,
    settings, socket,
    socket::Socket,
    sys::{c, file::Name, lock_file, sync::Mutex},
    threads, trace, visible,
};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use nvshare_wire::ClientMessage;
use rustix::fd::BorrowedFd;

/// Before CUDA is initialised, when disabled, and in a forked child (where the driver does not work either): every hook
/// passes through.
const OFF: u8 = 0;
const ON: u8 = 1;
static STATE: AtomicU8 = AtomicU8::new(OFF);

static CONNECTION: Mutex<Option<Connection>> = Mutex::new(None);
static CONNECTED: AtomicBool = AtomicBool::new(false);
static SCHEDULERS_MET: AtomicU32 = AtomicU32::new(0);
/// The connection's descriptor.
static DESCRIPTOR: Name = Name::none();

#[inline]
pub fn is_on() -> bool {
    STATE.load(Ordering::Relaxed) == ON
}

/// The program is about to initialise CUDA: sees to it that it sees the GPUs that it is to see. `false` if there are none.
pub fn choose() -> bool {
    visible::settle(&link::hello())
}

/// CUDA could not be initialised: nobody is to be counted as a client that is none.
pub fn forget_choice() {
    drop(visible::take_connection());
}

/// The program has initialised CUDA: begins to take part, once a process. `false` if it must not go on without a scheduler,
/// and there is none.
pub fn start() -> bool {
    // Not a lock: a fork of another thread's would leave it taken in the child for ever.
    static STARTED: AtomicBool = AtomicBool::new(false);
    static AT_FORK: AtomicBool = AtomicBool::new(false);
    if settings::get().disabled || STARTED.swap(true, Ordering::SeqCst) {
        return true;
    }
    if settings::get().memory_max_is_unread {
        trace::trace!(
            "NVSHARE_MEMORY_MAX bounds nothing: it is neither a size of 2M or more, like 8G, nor a part, like 25%"
        );
    }
    barrier::init();
    threads::init();
    if !AT_FORK.swap(true, Ordering::SeqCst) {
        c::at_fork_in_child(in_child);
    }
    match link::start() {
        Start::Started => STATE.store(ON, Ordering::SeqCst),
        Start::NoThread => set_connection(None), // nobody would listen
        Start::NoScheduler => {
            STARTED.store(false, Ordering::SeqCst); // the next cuInit tries again
            return false;
        }
    }
    true
}

/// From now on nothing is gated or moved: this library is no longer able to.
#[cfg_attr(test, expect(dead_code, reason = "for panics, which end a test"))]
pub fn give_up() {
    STATE.store(OFF, Ordering::SeqCst);
    epoch::end();
    gpu::open_all();
}

/// In the child of a fork: a CUDA context does not survive it, and the connection is the parent's.
extern "C" fn in_child() {
    STATE.store(OFF, Ordering::SeqCst);
    epoch::end();
    if let Some((descriptor, identity)) = DESCRIPTOR.get() {
        socket::close_in_child(descriptor, identity);
    }
    lock_file::close_in_child();
}

/// An established connection: packets go out through it; the link's thread reads from it.
#[derive(Debug)]
pub struct Connection {
    pub socket: Arc<Socket>,
    pub version: u16,
}

/// Sends one message without waiting; `false` if it did not go. Then either the scheduler is behind and the caller tries
/// again later, or the connection is lost, which the link's thread sees for itself.
pub fn send(message: &ClientMessage) -> bool {
    if !is_connected() {
        return false;
    }
    let guard = CONNECTION.lock();
    let Some(connection) = &*guard else { return false };
    let sent = connection.socket.send(message.encode(connection.version).as_bytes());
    trace::trace!("→ {message:?}{}", if sent { "" } else { " (not sent)" });
    sent
}

/// The same with descriptors.
pub fn send_with(message: &ClientMessage, descriptors: &[BorrowedFd<'_>]) -> bool {
    let guard = CONNECTION.lock();
    let Some(connection) = &*guard else { return false };
    let sent = connection.socket.send_with(message.encode(connection.version).as_bytes(), descriptors);
    trace::trace!("→ {message:?} with {}{}", descriptors.len(), if sent { "" } else { " (not sent)" });
    sent
}

/// Whether the connection is of that protocol version or a later one.
pub fn speaks(version: u16) -> bool {
    CONNECTION.lock().as_ref().is_some_and(|connection| connection.version >= version)
}

pub fn is_connected() -> bool {
    CONNECTED.load(Ordering::Acquire)
}

/// Counts the schedulers that this process has been introduced to: what was asked of an earlier one is not answered.
pub fn schedulers_met() -> u32 {
    SCHEDULERS_MET.load(Ordering::SeqCst)
}

/// All that it is to know has been said to a scheduler which knew nothing.
pub fn met_scheduler() {
    SCHEDULERS_MET.fetch_add(1, Ordering::SeqCst);
}

/// The link's thread has made or lost the connection.
pub fn set_connection(connection: Option<Connection>) {
    let mut guard = CONNECTION.lock();
    DESCRIPTOR.set(connection.as_ref().map(|c| c.socket.name()));
    CONNECTED.store(connection.is_some(), Ordering::Release);
    *guard = connection;
}
