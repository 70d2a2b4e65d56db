//! Rooms requested over D-Bus. `nvsharectl make-room` calls the D-Bus method `MakeRoom`.
//!
//! When the memory has been freed, the caller receives one end of a socket pair. Writing to this
//! end renews the room. Closing the last copy of this end ends the room. If the room ends first,
//! the caller reads end-of-file. Rooms end with the daemon: its end of the pair is not passed on to
//! the next daemon.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::select;
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use zbus::fdo;

use crate::daemon::core::{Core, PendingRoom, RoomRequest};
use crate::daemon::gpu::nvml::Query;
use crate::scheduler::RoomId;
use crate::sys::socket;

/// Minimum time between two renewals of a room. A renewal takes time on the scheduling loop,
/// proportional to the number of clients.
const RENEWAL_PERIOD: Duration = Duration::from_millis(500);

/// Maximum number of reads before each renewal. A socket buffer holds less data.
const MAX_READS: usize = 256;

/// Makes a room. When the memory has been freed, sends the caller its end of the socket pair.
pub fn make(core: &Rc<RefCell<Core>>, request: RoomRequest, reply: oneshot::Sender<fdo::Result<OwnedFd>>) {
    // The decision needs current figures of the memory that other programs use.
    core.borrow().io.query_nvml(Query::Sample);
    core.borrow().io.signals.activity.notify_one();
    let pending = core.borrow_mut().with_host(|host, model, events| host.rooms.add(model, events, request));
    let PendingRoom { room, ready, ended } = match pending {
        Ok(pending) => pending,
        Err(e) => return drop(reply.send(Err(e))),
    };
    let core = core.clone();
    spawn_local(async move {
        let kept = Kept { core, room };
        let answer = ready.await.unwrap_or_else(|_| Err(fdo::Error::Failed("the scheduler is stopping".into())));
        let pair = || {
            let (own, theirs) = std::os::unix::net::UnixStream::pair()?;
            own.set_nonblocking(true)?;
            Ok((UnixStream::from_std(own)?, theirs))
        };
        let failed = |e: io::Error| fdo::Error::Failed(format!("cannot make a descriptor for the room: {e}"));
        let (own, theirs) = match answer.and_then(|()| pair().map_err(failed)) {
            Ok(pair) => pair,
            Err(e) => return drop(reply.send(Err(e))),
        };
        // If the caller has stopped waiting, the send fails and closes the caller's end.
        drop(reply.send(Ok(theirs.into())));
        select! {
            () = kept.serve(&own) => {}
            () = ended.notified() => {}
        }
        socket::shut_down(own.as_fd());
    });
}

/// A room. Dropping it ends the room.
struct Kept {
    core: Rc<RefCell<Core>>,
    room: RoomId,
}

impl Kept {
    /// Renews the room whenever its owner writes. Returns when the last copy of the owner's end is closed.
    async fn serve(&self, own: &UnixStream) {
        let mut buffer = [0; 4096];
        while own.readable().await.is_ok() {
            let mut wrote = false;
            for _ in 0..MAX_READS {
                match own.try_read(&mut buffer) {
                    Ok(1..) => wrote = true,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    _ => return,
                }
            }
            if wrote {
                self.core.borrow_mut().with_host(|host, _, events| host.rooms.renew(events, self.room));
                // All writes during the pause together cause one renewal.
                tokio::time::sleep(RENEWAL_PERIOD).await;
            }
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.core.borrow_mut().with_host(|host, model, events| host.rooms.close(model, events, self.room));
    }
}
