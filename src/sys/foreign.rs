//! Descriptors that other processes chose. Closing such a descriptor can wait without end, for example
//! for a socket with `SO_LINGER`, or for a file system in user space. So separate threads close these
//! descriptors, and the thread that received them never waits.
//!
//! Each tenant has one thread, so that no tenant's descriptors wait for another tenant's. If a tenant's
//! descriptors pile up, its packets stay unread ([`is_behind`]). Packets in a socket use no descriptors of
//! this process. The kernel counts the descriptors that they contain against the sender's
//! `RLIMIT_NOFILE`.

use std::collections::{BTreeMap, VecDeque};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;

use super::socket;

/// While more descriptors of a tenant than this wait to be closed, its packets are not read.
const MAX_WAITING: usize = 1024;

/// A descriptor that another process chose, or a connection whose unread packets may contain such
/// descriptors. A thread closes it after this value has been dropped.
#[derive(Debug)]
pub struct Foreign {
    descriptor: ManuallyDrop<OwnedFd>,
    /// The number of the tenant that sent the descriptor, or 0.
    owner: u64,
    is_connection: bool,
}

impl Foreign {
    /// Takes a descriptor that a tenant sent. `owner`: the tenant's number, or 0 for a trusted process.
    pub fn new(descriptor: OwnedFd, owner: u64) -> Self {
        Self { descriptor: ManuallyDrop::new(descriptor), owner, is_connection: false }
    }

    /// Takes the scheduler's end of a connection to a tenant. `owner`: as for [`new`](Self::new).
    pub fn connection(socket: OwnedFd, owner: u64) -> Self {
        Self { descriptor: ManuallyDrop::new(socket), owner, is_connection: true }
    }

    /// The number of the tenant that sent the descriptor, or 0.
    pub fn owner(&self) -> u64 {
        self.owner
    }

    /// True if closing cannot wait: no unread packet contains a descriptor, and no more packets can come.
    /// Otherwise a tenant whose thread waits could use up this process's descriptors by connecting.
    fn is_empty_connection(&self) -> bool {
        self.is_connection && socket::has_ended(self.as_fd()) && socket::unread_descriptors(self.as_fd()) == Some(0)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let is_empty = self.is_empty_connection();
        // SAFETY: nothing uses the field after `drop`.
        let descriptor = unsafe { ManuallyDrop::take(&mut self.descriptor) };
        if is_empty {
            return;
        }
        let mut closers = closers();
        let closer = closers.entry(self.owner).or_default();
        closer.waiting.push_back(descriptor);
        if !closer.has_thread {
            let owner = self.owner;
            // If no thread can be started, the tenant's next dropped descriptor tries again.
            closer.has_thread = thread::Builder::new().name("closer".into()).spawn(move || close_all(owner)).is_ok();
        }
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl AsRawFd for Foreign {
    fn as_raw_fd(&self) -> RawFd {
        self.descriptor.as_raw_fd()
    }
}

/// True while too many descriptors of a tenant wait to be closed. `owner`: the tenant's number.
pub fn is_behind(owner: u64) -> bool {
    closers().get(&owner).is_some_and(|closer| closer.waiting.len() > MAX_WAITING)
}

/// The descriptors of one tenant that wait to be closed.
#[derive(Debug, Default)]
struct Closer {
    waiting: VecDeque<OwnedFd>,
    has_thread: bool,
}

fn closers() -> MutexGuard<'static, BTreeMap<u64, Closer>> {
    static CLOSERS: Mutex<BTreeMap<u64, Closer>> = Mutex::new(BTreeMap::new());
    CLOSERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes a tenant's descriptors until none is left.
fn close_all(owner: u64) {
    let next = || {
        let mut closers = closers();
        let next = closers.get_mut(&owner).and_then(|closer| closer.waiting.pop_front());
        if next.is_none() {
            closers.remove(&owner);
        }
        next
    };
    while let Some(descriptor) = next() {
        drop(descriptor);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A socket and its peer. Closing the socket waits, because the peer reads nothing and the send queue
    /// is full.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a socket");
        let mut stream = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
        let peer = listener.accept().expect("a connection").0;
        let linger = libc::linger { l_onoff: 1, l_linger: 600 };
        let size = size_of_val(&linger) as libc::socklen_t;
        let value = (&raw const linger).cast();
        // SAFETY: `value` leads to `size` bytes of a live `linger`.
        let set = unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, size) };
        assert_eq!(set, 0);
        stream.set_nonblocking(true).expect("a flag");
        while stream.write(&[0; 65536]).is_ok() {}
        stream.set_nonblocking(false).expect("a flag");
        (stream, peer)
    }

    #[test]
    fn a_close_that_waits_delays_no_other_tenant_and_stops_its_own_from_piling_up() {
        crate::sys::descriptors::raise_limit().expect("the hard limit");
        let (slow, peer) = lingering();
        drop(Foreign::new(slow.into(), 1));
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        drop(Foreign::new(ours.into(), 2));
        theirs.set_read_timeout(Some(PATIENCE)).expect("a flag");
        assert_eq!(theirs.read(&mut [0]).ok(), Some(0), "the other tenant's descriptor is closed");
        assert!(!is_behind(1));

        // An empty connection is closed without the thread.
        let (ours, theirs) = socket::packet_pair().expect("a pair");
        socket::stop_receiving(ours.as_fd());
        drop(Foreign::connection(ours, 1));
        assert!(socket::has_ended(theirs.as_fd()));
        // A connection is not closed here if it contains a descriptor, or could get one.
        for has_descriptor in [true, false] {
            let (ours, theirs) = socket::packet_pair().expect("a pair");
            if has_descriptor {
                socket::send_with(theirs.as_fd(), b"x", &[theirs.as_fd()]).expect("room");
                socket::stop_receiving(ours.as_fd());
            }
            drop(Foreign::connection(ours, 1));
            assert!(!socket::has_ended(theirs.as_fd()));
        }

        let null = || std::fs::File::open("/dev/null").expect("a file").into();
        (0..=MAX_WAITING).for_each(|_| drop(Foreign::new(null(), 1)));
        assert!(is_behind(1) && !is_behind(2));
        // Without the peer, the close returns, and the thread closes the others.
        drop(peer);
        let begin = Instant::now();
        while closers().contains_key(&1) {
            assert!(begin.elapsed() < PATIENCE, "{:?}", closers());
            thread::sleep(Duration::from_millis(5));
        }
        assert!(!is_behind(1));
    }
}
