//! This process as a client of the scheduler: whether it is one, and its connection.

use crate::{
    barrier, gpu, link,
    link::Start,
    settings, socket,
    socket::Socket,
    sys::{c, sync::Mutex},
    threads, trace,
};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use nvshare_wire::ClientMessage;

/// Before CUDA is initialised, when disabled, and in a forked child (where the driver does not work either): every hook
/// passes through.
const OFF: u8 = 0;
const ON: u8 = 1;
static STATE: AtomicU8 = AtomicU8::new(OFF);

static CONNECTION: Mutex<Option<Connection>> = Mutex::new(None);
static CONNECTED: AtomicBool = AtomicBool::new(false);
/// The connection's descriptor, or -1.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

#[inline]
pub fn is_on() -> bool {
    STATE.load(Ordering::Relaxed) == ON
}

/// The program has initialised CUDA: begins to take part, once a process. `false` if it must not go on without a scheduler,
/// and there is none.
pub fn start() -> bool {
    // Not a lock: a fork of another thread's would leave it taken in the child for ever.
    static STARTED: AtomicBool = AtomicBool::new(false);
    if settings::get().disabled || STARTED.swap(true, Ordering::SeqCst) {
        return true;
    }
    barrier::init();
    threads::init();
    c::at_fork_in_child(in_child);
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
    gpu::open_all();
}

/// In the child of a fork: a CUDA context does not survive it, and the connection is the parent's.
extern "C" fn in_child() {
    STATE.store(OFF, Ordering::SeqCst);
    socket::close_in_child(DESCRIPTOR.load(Ordering::SeqCst));
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

pub fn is_connected() -> bool {
    CONNECTED.load(Ordering::Acquire)
}

/// The link's thread has made or lost the connection.
pub fn set_connection(connection: Option<Connection>) {
    let mut guard = CONNECTION.lock();
    DESCRIPTOR.store(connection.as_ref().map_or(-1, |c| c.socket.descriptor()), Ordering::SeqCst);
    CONNECTED.store(connection.is_some(), Ordering::Release);
    *guard = connection;
}
