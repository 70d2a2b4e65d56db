//! The clients' listening socket. Accepts connections even if the process has no free file descriptors.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{MAX_LEN, SchedulerMessage, Text};
use tracing::error;

use super::Connections;
use super::client::{self, Incoming};
use crate::daemon::core::Core;
use crate::daemon::tenants::What;
use crate::daemon::transport::peer::PresumedTenants;
use crate::identity::Tenant;
use crate::sys::descriptors::{self, Spare};
use crate::sys::foreign::{self, Foreign};
use crate::sys::socket;

/// Maximum number of connections that are accepted before other tasks run. Accepting a connection
/// takes less time than a tenant's slice. If each connection waited for a slice of every tenant,
/// one tenant's connections could delay the connections behind them.
const BATCH: u32 = 16;

/// Pause after a failure to accept that may be temporary.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Accepts connections until the daemon exits. `claim`: the UID of the claim that the socket
/// belongs to, or empty.
///
/// # Errors
/// The runtime cannot watch the listening socket.
pub async fn accept(
    core: Rc<RefCell<Core>>,
    listener: OwnedFd,
    connections: Rc<Connections>,
    claim: &str,
) -> io::Result<()> {
    let listener = descriptors::watch(listener)?;
    let (mut spare, mut tenants) = (Spare::new(), PresumedTenants::default());
    let log_limit = &connections.log_limit;
    let mut batch = 0;
    loop {
        let mut ready = listener.readable().await?;
        let accepted = match ready.try_io(|l| socket::accept(l.as_fd())) {
            Ok(accepted) => accepted,
            Err(_would_block) => continue,
        };
        match accepted {
            Ok(socket) => {
                // Drops connections that arrive faster than their processes can be identified.
                let tenant = tenants.of(socket.as_fd());
                let (socket, budget) = (Foreign::connection(socket, tenant.number()), connections.budgets.of(&tenant));
                match budget.take(What::Arrivals, 1) {
                    Some(arrival) => {
                        let client = Incoming { socket, claim: claim.to_owned(), budget, arrival };
                        tokio::task::spawn_local(client::serve(core.clone(), client, connections.clone()));
                    }
                    None => socket::stop_receiving(socket.as_fd()),
                }
                batch += 1;
                if batch == BATCH {
                    batch = 0;
                    tokio::task::yield_now().await;
                }
            }
            // Linux reports this error before it checks for a pending connection, so there may be no connection to
            // refuse.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                if log_limit.borrow_mut().allows("descriptors", &Tenant::Root) {
                    error!(name: "no-descriptors", "cannot accept new programs until connected programs end: \
                        no file descriptors are left ({e})");
                }
                let refused = spare.accept(listener.as_fd()).map(|socket| {
                    let owner = tenants.of(socket.as_fd()).number();
                    let socket = Foreign::connection(socket, owner);
                    socket::stop_receiving(socket.as_fd());
                    // Without room for a packet's descriptors, the kernel closes them in the
                    // receiving call.
                    if socket::unread_descriptors(socket.as_fd()) == Some(0) {
                        let text = "no file descriptors are left in the scheduler";
                        refuse(socket.as_fd(), owner, Refusal::TooMany, text);
                    }
                });
                // Reserves descriptors again before any other task runs, because another task
                // could take and keep the free descriptors.
                spare.refill();
                match refused {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
            // The client disconnected before it was accepted.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {}
            Err(e) => {
                if log_limit.borrow_mut().allows("accept", &Tenant::Root) {
                    error!("cannot accept a connection: {e}");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Discards the unread packets of a connection on which no more packets can arrive. If a socket is closed
/// with unread packets, the peer's next receive fails, and the peer misses the messages that it has not read.
/// `owner`: the tenant's number.
pub(super) fn discard_unread(socket: BorrowedFd<'_>, owner: u64) {
    let mut buffer = [0; MAX_LEN];
    while !foreign::is_behind(owner)
        && socket::receive(socket, &mut buffer, owner, &mut Vec::new()).is_ok_and(|length| length > 0)
    {}
}

/// Sends a client the reason why it is refused. `owner`: the tenant's number.
pub(super) fn refuse(socket: BorrowedFd<'_>, owner: u64, reason: Refusal, text: &str) {
    socket::stop_receiving(socket);
    discard_unread(socket, owner);
    let message = SchedulerMessage::Refused { reason, text: Text::new(text) };
    let _ = socket::send(socket, message.encode(0).as_bytes());
}
