//! Callers of the D-Bus object, and their authorization.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use tracing::debug;
use zbus::Connection;
use zbus::fdo::{self, DBusProxy};
use zbus::message::{Flags, Header};

use super::authority::{Action, Authority, Authorization, Details, Manner, Subject};
use super::gate::{Gate, Place, Senders};
use crate::daemon::connections::lock::Lockable;
use crate::daemon::core::views::NamedGpu;
use crate::daemon::transport::peer::{self, Process, Where};
use crate::identity::{Identity, printable, user_in_words};
use crate::sys::access;

/// How callers are identified.
#[derive(Debug)]
pub enum Callers {
    /// The bus identifies each sender, and polkit authorizes it.
    Bus { authority: Authority, senders: Senders, gate: Gate },
    /// The peer of the socket is the only caller. The kernel identifies it.
    Peer { process: Arc<Process>, groups: Vec<u32>, gate: Arc<Gate> },
}

/// The bus's credentials of a connection.
#[derive(Debug)]
pub struct Known {
    pub uid: u32,
    /// 0 if unknown.
    pid: i32,
    process: Arc<Process>,
    groups: Vec<u32>,
}

/// The sender of a message.
#[derive(Debug)]
pub struct Caller<'a> {
    pub uid: u32,
    /// 0 if unknown.
    pub pid: i32,
    process: Arc<Process>,
    /// All groups of the caller, as far as they are known.
    groups: Vec<u32>,
    from: From<'a>,
}

#[derive(Debug)]
enum From<'a> {
    Bus {
        authority: &'a Authority,
        connection: &'a Connection,
        subject: Subject,
        /// True if the call's flags let polkit ask for a password.
        interactive: bool,
    },
    Peer,
}

impl Callers {
    pub fn bus() -> Self {
        Self::Bus { authority: Authority::default(), senders: Senders::default(), gate: Gate::default() }
    }

    /// Applies the limits of the sender's connection. Sends no request to the bus.
    ///
    /// # Errors
    /// `LimitsExceeded`
    pub fn admit_sender(&self, header: Option<&Header<'_>>) -> fdo::Result<Option<Place>> {
        let sender = header.and_then(|header| header.sender());
        match (self, sender) {
            (Self::Bus { senders, .. }, Some(sender)) => senders.of(&sender.to_owned().into()).admit(),
            _ => Ok(None),
        }
    }

    /// Identifies the calling user, and applies the user's limits.
    ///
    /// # Errors
    /// `LimitsExceeded`
    pub async fn admit(&self, header: Option<&Header<'_>>, connection: &Connection) -> fdo::Result<Place> {
        match self {
            Self::Bus { senders, gate, .. } => {
                gate.admit(known(senders, header, connection).await.map(|known| known.uid))
            }
            Self::Peer { process, gate, .. } => gate.admit(Some(process.uid)),
        }
    }

    /// Applies the user's limit of calls that queue for records or a timeline.
    ///
    /// # Errors
    /// `LimitsExceeded`
    pub fn admit_long(&self, uid: u32) -> fdo::Result<Place> {
        match self {
            Self::Bus { gate, .. } => gate.admit_long(uid),
            Self::Peer { gate, .. } => gate.admit_long(uid),
        }
    }

    /// Identifies the sender of a message.
    ///
    /// # Errors
    /// If the bus does not know the sender.
    pub async fn identify<'a>(
        &'a self,
        header: Option<&Header<'_>>,
        connection: &'a Connection,
    ) -> fdo::Result<Caller<'a>> {
        let (authority, senders) = match self {
            Self::Bus { authority, senders, .. } => (authority, senders),
            Self::Peer { process, groups, .. } => {
                let (uid, pid) = (process.uid, process.pid);
                return Ok(Caller { uid, pid, process: process.clone(), groups: groups.clone(), from: From::Peer });
            }
        };
        let known = known(senders, header, connection).await;
        let caller = header.zip(known).and_then(|(header, known)| {
            let Known { uid, pid, process, groups } = &*known;
            let subject = Subject::new(header)?;
            let interactive = header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
            let from = From::Bus { authority, connection, subject, interactive };
            Some(Caller { uid: *uid, pid: *pid, process: process.clone(), groups: groups.clone(), from })
        });
        caller.ok_or_else(|| denied("the bus does not identify the caller"))
    }
}

/// The bus's credentials of the sender of a message, requested once for each connection.
async fn known(senders: &Senders, header: Option<&Header<'_>>, connection: &Connection) -> Option<Arc<Known>> {
    let name = header?.sender()?.to_owned();
    let sender = senders.of(&name.clone().into());
    let ask = async {
        let bus = DBusProxy::new(connection).await.ok()?;
        let known = bus.get_connection_credentials(name.into()).await.ok()?;
        let uid = known.unix_user_id()?;
        let pid = known.process_id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0);
        let process = Arc::new(Process::named(pid, uid, known.process_fd().map(AsFd::as_fd)));
        let groups = known.unix_group_ids().cloned().unwrap_or_default();
        Some(Arc::new(Known { uid, pid, process, groups }))
    };
    sender.known.get_or_try_init(|| async { ask.await.ok_or(()) }).await.ok().cloned()
}

fn denied(text: impl Into<String>) -> fdo::Error {
    fdo::Error::AccessDenied(text.into())
}

impl Caller<'_> {
    /// # Errors
    /// If the caller may not see other users' clients.
    pub fn may_see_others(&self) -> fdo::Result<()> {
        self.is_of_the_host("see other users' activity")
    }

    /// Refuses processes in containers, even if they run as root. A process may pass its connection on, so the process that
    /// opened the connection must still exist, and be on the host.
    fn is_of_the_host(&self, what: &str) -> fdo::Result<()> {
        let text = match self.process.place() {
            Where::Host => return Ok(()),
            Where::Elsewhere => format!("a process in a container, or in another PID namespace, may not {what}"),
            Where::Ended => {
                format!("this process may not {what}, because the process that connected has ended. Connect again.")
            }
            Where::Hidden => {
                peer::log_hidden();
                format!(
                    "cannot {what}: /proc hides processes from the scheduler (mount option hidepid). See \
                     nvshare.service(8)."
                )
            }
        };
        Err(denied(text))
    }

    /// The identity of the caller, in the same form as a client's.
    ///
    /// # Errors
    /// If the caller is not on the host.
    pub fn identity(&self, what: &str) -> fdo::Result<Identity> {
        self.is_of_the_host(what)?;
        let identity = Identity { groups: self.groups.clone(), ..self.process.describe() };
        if !identity.container.is_empty() || !identity.pod.uid.is_empty() {
            // The process is in the host's PID namespace, but may still be in a container that lacks the host's devices.
            return Err(denied(format!("a process in a container may not {what}")));
        }
        Ok(identity)
    }

    /// # Errors
    /// If the caller may not change settings. `what` completes the message's "may not ..."; `rule` is the name of the changed
    /// rule, or empty.
    pub async fn may_change(&self, what: &str, rule: &str) -> fdo::Result<()> {
        self.may_administer(Action::ChangeSettings, what, rule).await
    }

    /// # Errors
    /// If the caller may not create a debug bundle, which shows all users' clients.
    pub async fn may_debug(&self) -> fdo::Result<()> {
        self.may_administer(Action::Debug, "create a debug bundle", "").await
    }

    /// # Errors
    /// If the caller may not pause and resume this user's programs. Callers on the host may pause their own.
    pub async fn may_pause(&self, user: u32, what: &str) -> fdo::Result<()> {
        match user == self.uid {
            true => self.is_of_the_host(what),
            false => self.may_change(what, "").await,
        }
    }

    async fn may_administer(&self, action: Action, what: &str, rule: &str) -> fdo::Result<()> {
        self.is_of_the_host(what)?;
        let only_root = |why: &str| format!("{} may not {what}: {why}only root may", self.user());
        match self.from {
            _ if self.uid == 0 => Ok(()),
            From::Peer if self.uid == rustix::process::geteuid().as_raw() => Ok(()),
            From::Peer => Err(denied(only_root("on the control socket "))),
            From::Bus { .. } => {
                let program = self.program();
                let details = HashMap::from([("program", program.as_str()), ("change", what), ("rule", rule)]);
                match self.ask(action, details).await {
                    Authorization::Absent => Err(denied(only_root("there is no polkit, so "))),
                    answer => self.heed(answer, what),
                }
            }
        }
    }

    /// # Errors
    /// If the caller may not acquire this lock: it must be able to use the GPU.
    pub async fn may_lock(&self, Lockable { gpu, rule }: &Lockable) -> fdo::Result<()> {
        self.may_use(Action::AcquireLock, gpu, rule, &format!("acquire the lock of {}", gpu.label)).await
    }

    /// # Errors
    /// If the caller may not reserve memory of this GPU: it must be able to use the GPU.
    pub async fn may_make_room(&self, gpu: &NamedGpu) -> fdo::Result<()> {
        self.may_use(Action::MakeRoom, gpu, "", &format!("have memory of {} kept free", gpu.label)).await
    }

    async fn may_use(&self, action: Action, gpu: &NamedGpu, rule: &str, what: &str) -> fdo::Result<()> {
        // The user that runs the scheduler controls the GPUs anyway. A simulated GPU on a machine without GPUs has no device
        // file.
        if self.uid != 0 && self.uid != rustix::process::geteuid().as_raw() {
            // The device file is only known for GPUs that NVML lists.
            if let Some(minor) = gpu.minor {
                self.may_open(&format!("/dev/nvidia{minor}"), what)?;
            }
        }
        match self.from {
            _ if self.uid == 0 => Ok(()),
            From::Peer => Ok(()),
            From::Bus { .. } => {
                let program = self.program();
                let details =
                    HashMap::from([("program", program.as_str()), ("gpu", gpu.title.as_str()), ("rule", rule)]);
                match self.ask(action, details).await {
                    Authorization::Absent => Err(denied(format!(
                        "{} may not {what}: polkit is not running. Without polkit, only root and, on the control \
                         socket, the group nvshare may do this.",
                        self.user()
                    ))),
                    answer => self.heed(answer, what),
                }
            }
        }
    }

    fn may_open(&self, device: &str, what: &str) -> fdo::Result<()> {
        let why = match access::may_read_and_write(Path::new(device), self.uid, &self.groups) {
            Ok(true) => return Ok(()),
            Ok(false) => format!("it may not read and write {device}"),
            Err(e) => format!("cannot examine {device}: {e}"),
        };
        Err(denied(format!("{} may not {what}: {why}", self.user())))
    }

    fn user(&self) -> String {
        user_in_words(self.uid)
    }

    /// The caller as log lines show it: `user root (nvsharectl, process 77)`.
    pub fn label(&self) -> String {
        format!("{} ({}, process {})", self.user(), printable(&self.program()), self.pid)
    }

    /// The short name of the caller's process, as users see it.
    fn program(&self) -> String {
        peer::name(self.pid).unwrap_or_else(|| "a program".into())
    }

    /// True if the caller may see other users' command lines. Answers quickly, and never asks for a password.
    pub async fn sees_all(&self) -> bool {
        let From::Bus { authority, connection, subject, .. } = &self.from else { return self.uid == 0 };
        if self.uid == 0 {
            return true;
        }
        let program = self.program();
        let details = HashMap::from([("program", program.as_str())]);
        let answer = authority.check(connection, subject, Action::SeeCommands, details, Manner::Quick).await;
        answer == Authorization::Yes
    }

    async fn ask(&self, action: Action, details: Details<'_>) -> Authorization {
        match &self.from {
            From::Bus { authority, connection, subject, interactive } => {
                let manner = if *interactive { Manner::Interactive } else { Manner::Patient };
                authority.check(connection, subject, action, details, manner).await
            }
            From::Peer => Authorization::Absent,
        }
    }

    fn heed(&self, answer: Authorization, what: &str) -> fdo::Result<()> {
        let why = match answer {
            Authorization::Yes => return Ok(()),
            Authorization::Challenge => {
                let text = format!("{} may not {what} without a password, which the call does not allow", self.user());
                return Err(fdo::Error::InteractiveAuthorizationRequired(text));
            }
            Authorization::No(why) => why,
            Authorization::Absent => "there is no polkit".into(),
        };
        debug!("{} may not {what}: {why}", self.user());
        Err(denied(format!("{} may not {what}: {why}", self.user())))
    }
}
