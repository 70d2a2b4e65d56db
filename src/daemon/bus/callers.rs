//! Callers of the D-Bus object, and their authorization.

use std::collections::{BTreeSet, HashMap};
use std::future::{pending, poll_fn};
use std::os::fd::AsFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

use tracing::debug;
use zbus::export::futures_core::Stream;
use zbus::fdo::{self, DBusProxy};
use zbus::message::{Flags, Header};
use zbus::{Connection, MessageStream};

use super::authority::{Action, Authority, Authorization, Subject};
use super::gate::{self, Place, Senders};
use crate::daemon::connections::lock::Lockable;
use crate::daemon::core::NamedGpu;
use crate::daemon::gpu::device_files;
use crate::daemon::tenants::{Budget, Budgets, Share, What};
use crate::daemon::transport::peer::{self, Process, Where};
use crate::identity::{Identity, accountable, printable, user_in_words};
use crate::sys::access;

/// The source of calls, with the means to identify the callers.
#[derive(Debug)]
pub enum Callers {
    /// Callers on the bus. The bus identifies each sender, and polkit authorizes it.
    ///
    /// `asker` is another connection to the bus, for questions about callers. On the connection that serves
    /// calls, the answers would queue behind the calls of a flood.
    Bus { asker: Connection, authority: Authority, senders: Senders, budgets: Arc<Budgets> },
    /// The peer of a control socket connection. The peer is the connection's only caller, and the
    /// kernel identifies it.
    Peer(Arc<Known>),
}

/// The process that opened a connection, as the bus or the kernel reports it.
#[derive(Debug)]
pub struct Known {
    pub budget: Arc<Budget>,
    /// With PID 0 if the PID is unknown.
    process: Process,
    /// The known groups of the process.
    groups: Vec<u32>,
}

impl Known {
    pub fn new(process: Process, groups: Vec<u32>, budgets: &Budgets) -> Arc<Self> {
        Arc::new(Self { budget: budgets.of_caller(process.uid), process, groups })
    }

    pub fn uid(&self) -> u32 {
        self.process.uid
    }
}

/// The sender of a message.
#[derive(Debug)]
pub struct Caller<'a> {
    known: Arc<Known>,
    from: From<'a>,
}

#[derive(Debug)]
enum From<'a> {
    Bus {
        authority: &'a Authority,
        asker: &'a Connection,
        subject: Subject,
        /// True if the message's flags allow polkit to ask for a password.
        interactive: bool,
    },
    Peer,
}

impl Callers {
    pub fn bus(asker: Connection, budgets: Arc<Budgets>) -> Self {
        Self::Bus { asker, authority: Authority::default(), senders: Senders::default(), budgets }
    }

    /// Admits a call, as far as the caller is known. Neither waits nor queries the bus.
    ///
    /// # Errors
    /// `LimitsExceeded` if the connection or its tenant has too many calls in progress, or calls too often.
    pub fn admit(&self, header: Option<&Header<'_>>) -> fdo::Result<Place> {
        let sender = header.and_then(|header| header.sender());
        match (self, sender) {
            (Self::Bus { senders, .. }, Some(sender)) => {
                let sender = senders.of(&sender.to_owned().into());
                let of_sender = sender.admit()?;
                let of_tenant = sender.known.get().map(|known| gate::admit(&known.budget, What::BusCalls));
                Ok(Place { _of_sender: of_sender, of_tenant: of_tenant.transpose()? })
            }
            (Self::Bus { .. }, None) => Ok(Place::default()),
            (Self::Peer(known), _) => {
                Ok(Place { _of_sender: None, of_tenant: Some(gate::admit(&known.budget, What::ControlCalls)?) })
            }
        }
    }

    /// Identifies the caller of an admitted call if it was unknown, and applies its tenant's limits. All
    /// callers that the bus cannot identify share the limits of one user.
    ///
    /// # Errors
    /// `LimitsExceeded` if the tenant has too many calls in progress, or calls too often.
    pub async fn admit_unknown(&self, place: &mut Place, header: Option<&Header<'_>>) -> fdo::Result<()> {
        if let (Self::Bus { asker, senders, budgets, .. }, None) = (self, &place.of_tenant) {
            let known = known(asker, senders, budgets, header).await;
            let budget = known.map_or_else(|| budgets.of_caller(u32::MAX), |known| known.budget.clone());
            place.of_tenant = Some(gate::admit(&budget, What::BusCalls)?);
        }
        Ok(())
    }

    /// Identifies the sender of a message.
    ///
    /// # Errors
    /// The bus does not know the sender.
    pub async fn identify(&self, header: Option<&Header<'_>>) -> fdo::Result<Caller<'_>> {
        let (known, from) = match self {
            Self::Peer(known) => (Some(known.clone()), Some(From::Peer)),
            Self::Bus { asker, authority, senders, budgets } => {
                let from = header.and_then(|header| {
                    let subject = Subject::new(header)?;
                    let interactive = header.primary().flags().contains(Flags::ALLOW_INTERACTIVE_AUTH);
                    Some(From::Bus { authority, asker, subject, interactive })
                });
                (known(asker, senders, budgets, header).await, from)
            }
        };
        let caller = known.zip(from).map(|(known, from)| Caller { known, from });
        caller.ok_or_else(|| denied("the bus does not identify the caller"))
    }
}

/// The sender's credentials, as reported by the bus. The bus is asked once for each connection.
async fn known(
    asker: &Connection,
    senders: &Senders,
    budgets: &Budgets,
    header: Option<&Header<'_>>,
) -> Option<Arc<Known>> {
    let name = header?.sender()?.to_owned();
    let sender = senders.of(&name.clone().into());
    let ask = async {
        let bus = DBusProxy::new(asker).await.ok()?;
        let known = bus.get_connection_credentials(name.into()).await.ok()?;
        let uid = known.unix_user_id()?;
        let pid = known.process_id().and_then(|pid| i32::try_from(pid).ok()).unwrap_or(0);
        let process = Process::named(pid, uid, known.process_fd().map(AsFd::as_fd));
        Some(Known::new(process, known.unix_group_ids().cloned().unwrap_or_default(), budgets))
    };
    sender.known.get_or_try_init(|| async { ask.await.ok_or(()) }).await.ok().cloned()
}

fn denied(text: impl Into<String>) -> fdo::Error {
    fdo::Error::AccessDenied(text.into())
}

impl Caller<'_> {
    /// Admits a call that queues for usage records or a timeline.
    ///
    /// # Errors
    /// `LimitsExceeded` if too many of the tenant's calls are in that queue.
    pub fn admit_query(&self) -> fdo::Result<Share> {
        let what = if matches!(self.from, From::Peer) { What::ControlQueries } else { What::BusQueries };
        gate::admit_query(self.budget(), what)
    }

    /// The budget of the caller's tenant.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.known.budget
    }

    pub fn uid(&self) -> u32 {
        self.known.uid()
    }

    /// Checks that the caller may see other users' clients.
    ///
    /// # Errors
    /// The caller may not see other users' clients.
    pub fn may_see_others(&self) -> fdo::Result<()> {
        self.is_of_the_host("see other users' activity")
    }

    /// Refuses processes in containers, even if they run as root. A process may pass its connection on to
    /// other processes. So the process that opened the connection must still exist, and must be on the
    /// host.
    fn is_of_the_host(&self, what: &str) -> fdo::Result<()> {
        let text = match self.known.process.place() {
            Where::Host => return Ok(()),
            Where::Elsewhere => format!("processes in containers and in other PID namespaces may not {what}"),
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

    /// The caller's identity, with the same fields as a client's identity.
    ///
    /// # Errors
    /// The caller is not on the host.
    pub fn identity(&self, what: &str) -> fdo::Result<Identity> {
        self.is_of_the_host(what)?;
        let identity = self.known.process.describe(self.known.groups.clone());
        if !identity.container.is_empty() || !identity.pod.uid.is_empty() {
            // A process in the host's PID namespace may still be in a container without access to the host's
            // devices.
            return Err(denied(format!("a process in a container may not {what}")));
        }
        Ok(identity)
    }

    /// Checks that the caller may change settings. `what`: completes the message "may not ...". `rule`: the
    /// name of the changed rule, or empty.
    ///
    /// # Errors
    /// The caller may not change settings.
    pub async fn may_change(&self, what: &str, rule: &str) -> fdo::Result<()> {
        self.may_administer(Action::ChangeSettings, what, rule).await
    }

    /// Checks that the caller may create a debug bundle, which shows all users' clients.
    ///
    /// # Errors
    /// The caller may not create a debug bundle.
    pub async fn may_debug(&self) -> fdo::Result<()> {
        self.may_administer(Action::Debug, "create a debug bundle", "").await
    }

    /// Checks that the caller may pause and resume these users' programs. Callers on the host may pause
    /// their own programs.
    ///
    /// # Errors
    /// The caller may not pause the users' programs.
    pub async fn may_pause(&self, users: &BTreeSet<u32>, what: &str) -> fdo::Result<()> {
        for user in users {
            match *user == self.own_user() {
                true => self.is_of_the_host(what)?,
                false => self.may_change(what, "").await?,
            }
        }
        Ok(())
    }

    /// Returns when the caller has closed its connection. `connection`: carries the call.
    pub async fn leaves(&self, connection: &Connection) {
        match &self.from {
            From::Bus { asker, subject, .. } => match subject.leaves(asker).await {
                Ok(Some(leaving)) => leaving.await,
                Ok(None) => {}
                // Without an answer of the bus, the caller counts as present.
                Err(_) => pending().await,
            },
            From::Peer => {
                let mut messages = MessageStream::from(connection);
                while poll_fn(|cx| Pin::new(&mut messages).poll_next(cx)).await.is_some_and(|message| message.is_ok()) {
                }
            }
        }
    }

    /// The user whose programs and images the caller owns.
    pub fn own_user(&self) -> u32 {
        accountable(self.uid())
    }

    async fn may_administer(&self, action: Action, what: &str, rule: &str) -> fdo::Result<()> {
        self.is_of_the_host(what)?;
        self.authorize(action, &[("change", what), ("rule", rule)], what).await
    }

    /// Checks that the caller may acquire this lock. The caller must be able to use the lock's GPU.
    ///
    /// # Errors
    /// The caller may not acquire the lock.
    pub async fn may_lock(&self, Lockable { gpu, rule }: &Lockable) -> fdo::Result<()> {
        self.may_use(Action::AcquireLock, gpu, rule, &format!("acquire the lock of {}", gpu.label)).await
    }

    /// Checks that the caller may reserve memory of this GPU. The caller must be able to use the GPU.
    ///
    /// # Errors
    /// The caller may not reserve memory.
    pub async fn may_make_room(&self, gpu: &NamedGpu) -> fdo::Result<()> {
        self.may_use(Action::MakeRoom, gpu, "", &format!("reserve memory of {}", gpu.label)).await
    }

    async fn may_use(&self, action: Action, gpu: &NamedGpu, rule: &str, what: &str) -> fdo::Result<()> {
        // The daemon's own user needs no check, because it controls the GPUs anyway.
        if self.uid() != 0 && !self.is_daemon() {
            // The device file is known only for GPUs that NVML lists.
            if let Some(minor) = gpu.minor {
                self.may_open(&device_files::path(minor), what)?;
            }
        }
        self.authorize(action, &[("gpu", &gpu.title), ("rule", rule)], what).await
    }

    /// True if the caller has the daemon's own user.
    fn is_daemon(&self) -> bool {
        self.uid() == rustix::process::geteuid().as_raw()
    }

    fn may_open(&self, device: &Path, what: &str) -> fdo::Result<()> {
        let why = match access::may_read_and_write(device, self.uid(), &self.known.groups) {
            Ok(true) => return Ok(()),
            Ok(false) => format!("it may not read and write {}", device.display()),
            Err(e) => format!("cannot examine {}: {e}", device.display()),
        };
        Err(denied(format!("{} may not {what}: {why}", self.user())))
    }

    fn user(&self) -> String {
        user_in_words(self.uid())
    }

    /// Describes the caller for log lines, such as `user root (nvsharectl, process 77)`.
    pub fn label(&self) -> String {
        format!("{} ({}, process {})", self.user(), printable(&self.program()), self.known.process.pid)
    }

    /// The short name of the caller's process, as users see it.
    fn program(&self) -> String {
        peer::name(self.known.process.pid).unwrap_or_else(|| "a program".into())
    }

    /// True if the caller may see other users' command lines. The check takes little time, and polkit never
    /// asks for a password.
    pub async fn sees_all(&self) -> bool {
        self.ask(Action::SeeCommands, &[], true).await == Authorization::Yes
    }

    /// Whether the caller may perform each action without a password, by the end of the action's name.
    /// polkit never asks for a password. Rules of polkit that depend on a call's details may decide
    /// otherwise.
    pub async fn permissions(&self) -> HashMap<String, bool> {
        let is_of_host = self.may_see_others().is_ok();
        let mut permissions = HashMap::new();
        for action in Action::ALL {
            let may = is_of_host && self.ask(action, action.details(), true).await == Authorization::Yes;
            permissions.insert(action.name().to_owned(), may);
        }
        permissions
    }

    /// Asks whether the caller may perform an action. Root may perform all. On the control socket, its group
    /// may use the GPUs, and the daemon's user may perform all. `is_quick`: polkit must answer quickly, and
    /// not ask for a password.
    async fn ask(&self, action: Action, details: &[(&str, &str)], is_quick: bool) -> Authorization {
        match &self.from {
            _ if self.uid() == 0 => Authorization::Yes,
            From::Peer if action.uses_gpu() || self.is_daemon() => Authorization::Yes,
            From::Peer => Authorization::No("on the control socket, only root may do this".into()),
            From::Bus { authority, asker, subject, interactive } => {
                let program = self.program();
                let details = details.iter().copied().chain([("program", program.as_str())]).collect();
                authority.check(asker, subject, action, details, *interactive && !is_quick, is_quick).await
            }
        }
    }

    /// Checks that the caller may perform an action. `what`: completes the message "may not ...".
    async fn authorize(&self, action: Action, details: &[(&str, &str)], what: &str) -> fdo::Result<()> {
        let user = self.user();
        let why = match self.ask(action, details, false).await {
            Authorization::Yes => return Ok(()),
            Authorization::Challenge => {
                let text =
                    format!("{user} may not {what} without a password, and the call does not allow a password prompt");
                return Err(fdo::Error::InteractiveAuthorizationRequired(text));
            }
            Authorization::No(why) => why,
            Authorization::Absent if action.uses_gpu() => {
                "polkit is not running. Without polkit, only root and the group nvshare (on the control socket) may do \
                 this."
                    .into()
            }
            Authorization::Absent => "polkit is not running, so only root may do this".into(),
        };
        debug!("{user} may not {what}: {why}");
        Err(denied(format!("{user} may not {what}: {why}")))
    }
}
