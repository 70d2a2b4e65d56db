//! What systemd gives the daemon and wants to hear from it. Without systemd all of this does nothing.

use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::Duration;

use libsystemd::activation;
use sd_notify::NotifyState;
use tracing::warn;

use super::socket::{self, Kind};

/// The names of the descriptors in `nvshare.socket` (`FileDescriptorName=`).
const CLIENTS: &str = "clients";
const CONTROL: &str = "control";

/// The listening sockets that systemd opened for us.
#[derive(Debug, Default)]
pub struct Activated {
    pub clients: Option<OwnedFd>,
    pub control: Option<OwnedFd>,
}

/// Takes over the sockets. Call it once, before there are other threads: it changes the environment.
pub fn activated() -> Result<Activated, String> {
    let given = activation::receive_descriptors_with_names(true)
        .map_err(|e| format!("cannot take over the sockets that systemd passed: {e}"))?;
    let mut sockets = Activated::default();
    for (descriptor, name) in given {
        // SAFETY: systemd passed this descriptor to this process, and nothing else here knows of it.
        let fd = unsafe { OwnedFd::from_raw_fd(descriptor.into_raw_fd()) };
        let (place, kind) = match name.as_str() {
            CLIENTS => (&mut sockets.clients, Kind::Packets),
            CONTROL => (&mut sockets.control, Kind::Stream),
            _ => {
                warn!("systemd passed a descriptor named {name:?}, which is neither {CLIENTS:?} nor {CONTROL:?}");
                continue;
            }
        };
        if !socket::is_listening(fd.as_fd(), kind) {
            return Err(format!(
                "the socket {name:?} that systemd passed is not a listening one of the right kind: see nvshare.socket"
            ));
        }
        socket::prepare(fd.as_fd()).map_err(|e| format!("cannot use the socket {name:?} that systemd passed: {e}"))?;
        *place = Some(fd);
    }
    Ok(sockets)
}

pub fn ready(status: &str) {
    tell(&[NotifyState::Ready, NotifyState::Status(status)]);
}

pub fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => tell(&[NotifyState::Reloading, now]),
        Err(_) => tell(&[NotifyState::Reloading]),
    }
}

pub fn stopping() {
    tell(&[NotifyState::Stopping]);
}

pub fn watchdog() {
    tell(&[NotifyState::Watchdog]);
}

/// How often systemd has to hear from the scheduling loop: twice as often as it would give up.
pub fn watchdog_period() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|limit| limit / 2)
}

fn tell(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        warn!("cannot notify systemd: {e}");
    }
}
