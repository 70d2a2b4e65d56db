//! Authorization of users other than root by polkit. The subject is the sender of a message, identified
//! by its unique name on the bus. Unlike a process ID, that name is never reused. The actions are
//! declared in `dbus/org.nvshare.Scheduler1.policy`.
//!
//! A check can wait for a user to type a password, and polkit can hang. So each check has a
//! timeout, and is cancelled if its sender leaves the bus. `gate` limits the number of calls, and
//! therefore the number of checks.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zbus::export::futures_core::Stream;
use zbus::fdo::{self, DBusProxy};
use zbus::names::OwnedUniqueName;
use zbus::proxy::{CacheProperties, MethodFlags};
use zbus::{Connection, MatchRule, MessageStream, message};
use zbus_polkit::policykit1::{self as polkit, AuthorityProxy, AuthorizationResult, CheckAuthorizationFlags};

/// Timeout of checks in which the user may have to look up and type a password.
const INTERACTIVE_TIMEOUT: Duration = Duration::from_secs(120);
/// Timeout of checks that must not delay the caller.
const QUICK_TIMEOUT: Duration = Duration::from_millis(500);

/// An action that polkit authorizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    ChangeSettings,
    AcquireLock,
    MakeRoom,
    SeeCommands,
    Debug,
}

/// Details of a check for polkit's dialogues and rules: `program`, and the names used in the
/// messages of `dbus/org.nvshare.Scheduler1.policy`. If a message uses a name, the details must
/// contain that name.
pub type Details<'a> = HashMap<&'a str, &'a str>;

impl Action {
    pub const ALL: [Self; 5] =
        [Self::ChangeSettings, Self::AcquireLock, Self::MakeRoom, Self::SeeCommands, Self::Debug];

    /// The end of the action's id, which is its name in `ListPermissions`.
    pub fn name(self) -> &'static str {
        self.id().rsplit('.').next().unwrap_or_default()
    }

    /// Details that the action's message uses, for a check that concerns no particular call.
    pub fn details(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::ChangeSettings => &[("change", "change settings")],
            Self::AcquireLock | Self::MakeRoom => &[("gpu", "a GPU")],
            Self::SeeCommands | Self::Debug => &[],
        }
    }

    pub fn uses_gpu(self) -> bool {
        matches!(self, Self::AcquireLock | Self::MakeRoom)
    }

    fn id(self) -> &'static str {
        match self {
            Self::ChangeSettings => "org.nvshare.Scheduler1.change-settings",
            Self::AcquireLock => "org.nvshare.Scheduler1.acquire-lock",
            Self::MakeRoom => "org.nvshare.Scheduler1.make-room",
            Self::SeeCommands => "org.nvshare.Scheduler1.see-commands",
            Self::Debug => "org.nvshare.Scheduler1.debug",
        }
    }
}

/// The sender of a message.
#[derive(Debug)]
pub struct Subject {
    sender: OwnedUniqueName,
    polkit: polkit::Subject,
}

impl Subject {
    /// Creates the subject. `None` if the message has no sender.
    pub fn new(header: &message::Header<'_>) -> Option<Self> {
        let polkit = polkit::Subject::new_for_message_header(header).ok()?;
        Some(Self { sender: header.sender()?.to_owned().into(), polkit })
    }

    /// A future that completes when the sender leaves the bus. `None` if the sender has already left.
    ///
    /// # Errors
    /// The bus does not answer.
    pub async fn leaves(&self, connection: &Connection) -> zbus::Result<Option<impl Future<Output = ()> + use<>>> {
        let rule = MatchRule::builder()
            .msg_type(message::Type::Signal)
            .sender("org.freedesktop.DBus")
            .interface("org.freedesktop.DBus")
            .member("NameOwnerChanged")
            .arg(0, self.sender.as_str())
            .build()?;
        let mut changes = MessageStream::for_match_rule(rule, connection, None).await?;
        if !DBusProxy::new(connection).await?.name_has_owner(self.sender.clone().into()).await? {
            return Ok(None);
        }
        // The owner of a unique name changes only if its connection closes.
        Ok(Some(async move {
            let _ = std::future::poll_fn(|cx| Pin::new(&mut changes).poll_next(cx)).await;
        }))
    }
}

/// polkit's decision.
#[derive(Debug, PartialEq, Eq)]
pub enum Authorization {
    Yes,
    /// Not authorized. The reason follows a colon in the error message.
    No(String),
    /// Authorization requires a password, but polkit was not allowed to ask for it.
    Challenge,
    /// This system has no polkit.
    Absent,
}

/// The polkit service on one bus.
#[derive(Debug, Default)]
pub struct Authority {
    asked: AtomicU64,
}

impl Authority {
    /// Asks polkit whether the subject may perform an action. `interactive`: polkit may ask for a password.
    /// `is_quick`: the timeout is too short to type one.
    pub async fn check<'a>(
        &self,
        connection: &'a Connection,
        subject: &'a Subject,
        action: Action,
        details: Details<'a>,
        interactive: bool,
        is_quick: bool,
    ) -> Authorization {
        let check = Check {
            connection,
            subject,
            action,
            details,
            interactive,
            id: format!("nvshare-{}", self.asked.fetch_add(1, Ordering::Relaxed)),
        };
        let limit = if is_quick { QUICK_TIMEOUT } else { INTERACTIVE_TIMEOUT };
        let gone = || Authorization::No("the caller has left the bus".into());
        let Ok(Some(leaving)) = check.subject.leaves(connection).await else { return gone() };
        let answer = tokio::select! {
            answer = check.run() => return answer,
            () = leaving => gone(),
            () = tokio::time::sleep(limit) => Authorization::No(format!("polkit did not answer within {limit:?}")),
        };
        check.cancel().await;
        answer
    }
}

/// One check by polkit.
struct Check<'a> {
    connection: &'a Connection,
    subject: &'a Subject,
    action: Action,
    details: Details<'a>,
    interactive: bool,
    /// The ID for cancelling the check.
    id: String,
}

impl Check<'_> {
    async fn polkit(&self) -> zbus::Result<AuthorityProxy<'_>> {
        // The daemon reads none of polkit's properties, so it does not cache them.
        AuthorityProxy::builder(self.connection).cache_properties(CacheProperties::No).build().await
    }

    async fn run(&self) -> Authorization {
        let mut flags = CheckAuthorizationFlags::empty();
        flags.set(CheckAuthorizationFlags::ALLOW_USER_INTERACTION, self.interactive);
        let result = async {
            let polkit = self.polkit().await?;
            polkit.check_authorization(&self.subject.polkit, self.action.id(), &self.details, flags, &self.id).await
        };
        match result.await {
            Ok(result) => self.answer(&result),
            Err(e) if is_absent(&e) => Authorization::Absent,
            Err(e) => Authorization::No(format!("polkit does not answer: {e}")),
        }
    }

    fn answer(&self, result: &AuthorizationResult) -> Authorization {
        match result {
            AuthorizationResult { is_authorized: true, .. } => Authorization::Yes,
            AuthorizationResult { is_challenge: true, .. } if !self.interactive => Authorization::Challenge,
            AuthorizationResult { is_challenge: true, .. } => {
                Authorization::No("there is no polkit agent to ask for a password".into())
            }
            result if result.details.contains_key("polkit.dismissed") => {
                Authorization::No("no password was given".into())
            }
            _ => Authorization::No("polkit does not allow it".into()),
        }
    }

    /// Cancels the check, so that polkit stops asking for a password. Does not wait for a reply.
    async fn cancel(&self) {
        let flags = MethodFlags::NO_REPLY_EXPECTED | MethodFlags::NO_AUTO_START;
        if let Ok(polkit) = self.polkit().await {
            // If polkit is not running, there is nothing to cancel.
            let id = self.id.as_str();
            let _ = polkit.inner().call_with_flags::<_, _, ()>("CancelCheckAuthorization", flags, &id).await;
        }
    }
}

/// True if polkit does not run and cannot be activated.
fn is_absent(error: &zbus::Error) -> bool {
    match error {
        zbus::Error::FDO(error) => matches!(**error, fdo::Error::ServiceUnknown(_) | fdo::Error::NameHasNoOwner(_)),
        zbus::Error::MethodError(name, ..) => name.as_str() == "org.freedesktop.systemd1.NoSuchUnit",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bus_policy_permits_every_method() {
        let read = |path: &str| std::fs::read_to_string(path).expect("the file");
        let (interface, rules) = (read("dbus/org.nvshare.Scheduler1.xml"), read("dbus/org.nvshare.Scheduler1.conf"));
        let names = |text: &str, tag: &str, key: &str, wanted: &dyn Fn(roxmltree::Node<'_, '_>) -> bool| {
            let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
            let document = roxmltree::Document::parse_with_options(text, options).expect("it is well-formed");
            let nodes = document.descendants().filter(|node| node.has_tag_name(tag) && wanted(*node));
            nodes.filter_map(|node| node.attribute(key).map(str::to_owned)).collect::<std::collections::BTreeSet<_>>()
        };
        let methods = names(&interface, "method", "name", &|_| true);
        let own = |node: roxmltree::Node<'_, '_>| node.attribute("send_interface") == Some("org.nvshare.Scheduler1");
        assert_eq!(methods, names(&rules, "allow", "send_member", &own));
        assert!(methods.contains("ListGpus"));
    }

    #[test]
    fn the_polkit_policy_defines_every_requested_action() {
        let text = std::fs::read_to_string("dbus/org.nvshare.Scheduler1.policy").expect("the file");
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let policy = roxmltree::Document::parse_with_options(&text, options).expect("it is well-formed");
        let actions: Vec<_> = policy.descendants().filter(|node| node.has_tag_name("action")).collect();
        let ids: Vec<_> = actions.iter().map(|action| action.attribute("id").expect("an id")).collect();
        assert_eq!(ids, Action::ALL.map(Action::id));
        for action in actions {
            let text = |name: &str| {
                let node = action.descendants().find(|node| node.has_tag_name(name));
                node.and_then(|node| node.text()).unwrap_or_default()
            };
            assert!(!text("description").is_empty() && !text("message").is_empty());
            let named: Vec<_> = text("message").split("$(").skip(1).filter_map(|rest| rest.split_once(')')).collect();
            let known = |name: &str| ["program", "gpu", "change"].contains(&name);
            assert!(named.iter().all(|(name, _)| known(name)), "{named:?}");
            let defaults = ["allow_any", "allow_inactive", "allow_active"].map(text);
            let expected = match action.attribute("id") {
                Some("org.nvshare.Scheduler1.acquire-lock" | "org.nvshare.Scheduler1.make-room") => {
                    ["auth_admin", "auth_admin", "yes"]
                }
                _ => ["auth_admin", "auth_admin", "auth_admin_keep"],
            };
            assert_eq!(defaults, expected);
            // Without this annotation, polkit refuses all checks requested by services that do not run as root.
            let owner = action.descendants().find(|node| node.has_tag_name("annotate")).expect("an owner");
            assert_eq!(owner.attribute("key"), Some("org.freedesktop.policykit.owner"));
            assert_eq!(owner.text(), Some("unix-user:nvshare"));
        }
    }
}
