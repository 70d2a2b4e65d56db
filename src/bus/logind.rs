//! The proxy of logind: delays of the host's suspends and shutdowns, and their announcements.

use zbus::OwnedFd;

#[zbus::proxy(
    interface = "org.freedesktop.login1.Manager",
    default_service = "org.freedesktop.login1",
    default_path = "/org/freedesktop/login1"
)]
pub trait Logind {
    /// Takes an inhibitor, which ends when the descriptor is closed. `what`: "sleep" or "shutdown".
    /// `mode`: with "delay", logind waits for the end for at most `InhibitDelayMaxUSec`.
    fn inhibit(&self, what: &str, who: &str, why: &str, mode: &str) -> zbus::Result<OwnedFd>;

    /// The longest delay by inhibitors, in microseconds.
    #[zbus(property, name = "InhibitDelayMaxUSec")]
    fn inhibit_delay_max_usec(&self) -> zbus::Result<u64>;

    /// `start`: the host is about to suspend. Otherwise it has resumed.
    #[zbus(signal)]
    fn prepare_for_sleep(&self, start: bool) -> zbus::Result<()>;

    /// `start`: the host is about to shut down. Otherwise the shutdown was cancelled.
    #[zbus(signal)]
    fn prepare_for_shutdown(&self, start: bool) -> zbus::Result<()>;
}
