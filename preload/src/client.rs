//! This process as a client of the scheduler: whether it is one, and its connection.

use crate::{barrier, errno, link, lock::lock, settings, trace};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use nvshare_wire::ClientMessage;
use std::{
    os::fd::{AsRawFd, OwnedFd},
    sync::Mutex,
};

/// Before CUDA is initialised, when disabled, and in a forked child (where the driver does not work either): every hook
/// passes through.
const OFF: u8 = 0;
const ON: u8 = 1;
static STATE: AtomicU8 = AtomicU8::new(OFF);

static CONNECTION: Mutex<Option<Connection>> = Mutex::new(None);
static CONNECTED: AtomicBool = AtomicBool::new(false);

#[inline]
pub fn is_on() -> bool {
    STATE.load(Ordering::Relaxed) == ON
}

/// The program has initialised CUDA: begins to take part. Once a process.
pub fn start() {
    static STARTED: AtomicBool = AtomicBool::new(false);
    if settings::get().disabled || STARTED.swap(true, Ordering::SeqCst) {
        return;
    }
    barrier::init();
    // SAFETY: the handler only stores to an atomic and closes a descriptor.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    if link::start() {
        STATE.store(ON, Ordering::SeqCst);
    } else {
        set_connection(None); // without a thread nobody would listen
    }
}

/// In the child of a fork: a CUDA context does not survive it, and the connection is the parent's.
extern "C" fn in_child() {
    STATE.store(OFF, Ordering::SeqCst);
    let descriptor = link::descriptor();
    if descriptor >= 0 {
        // SAFETY: the child's copy, which nothing in the child uses from here on.
        unsafe { libc::close(descriptor) };
    }
}

/// An established connection: packets go out through it; the link's thread reads from it.
#[derive(Debug)]
pub struct Connection {
    pub socket: OwnedFd,
    pub version: u16,
}

/// Sends one message without waiting; `false` if it did not go. Then either the scheduler is behind and the caller tries
/// again later, or the connection is lost, which the link's thread sees for itself.
pub fn send(message: &ClientMessage) -> bool {
    if !is_connected() {
        return false;
    }
    let guard = lock(&CONNECTION);
    let Some(connection) = &*guard else { return false };
    let packet = message.encode(connection.version);
    let bytes = packet.as_bytes();
    let (flags, socket) = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT, connection.socket.as_raw_fd());
    // SAFETY: a valid buffer.
    let sent = errno::preserved(|| unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), flags) });
    trace::trace!("→ {message:?}{}", if sent < 0 { " (not sent)" } else { "" });
    sent >= 0
}

pub fn is_connected() -> bool {
    CONNECTED.load(Ordering::Acquire)
}

/// The link's thread has made or lost the connection.
pub fn set_connection(connection: Option<Connection>) {
    let mut guard = lock(&CONNECTION);
    CONNECTED.store(connection.is_some(), Ordering::Release);
    *guard = connection;
}
