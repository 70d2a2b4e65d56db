//! polkit, which knows what users other than root may do. It is asked about the sender of a message, by its name on the
//! bus: that never is somebody else's, as a process id can be. The actions are in `dbus/org.nvshare.Scheduler1.policy`.
//!
//! An answer can take as long as somebody types a password, and polkit can hang. So questions are few at a time, each has
//! its limit, and one whose sender has left the bus is withdrawn.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Deserialize;
use zbus::export::futures_core::Stream;
use zbus::fdo::{self, DBusProxy};
use zbus::names::OwnedUniqueName;
use zbus::{Connection, MatchRule, Message, MessageStream, Type, Variant, message};

const NAME: &str = "org.freedesktop.PolicyKit1";
const PATH: &str = "/org/freedesktop/PolicyKit1/Authority";
const INTERFACE: &str = "org.freedesktop.PolicyKit1.Authority";
/// Flag of CheckAuthorization: a password can be asked for.
const ALLOW_USER_INTERACTION: u32 = 1;

/// Time enough to find a password and to type it.
const PATIENCE: Duration = Duration::from_secs(120);
/// For what has to be answered quickly, by what is known already.
const QUICK: Duration = Duration::from_millis(500);

/// Questions at a time.
const MOST_OF_SENDER: usize = 16;
/// A user can have many connections to the bus.
const MOST_OF_USER: usize = 32;
const MOST: usize = 128;

/// What somebody may or may not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    ChangeSettings,
    AcquireLock,
    SeeCommands,
    Debug,
}

impl Action {
    #[cfg(test)]
    const ALL: [Self; 4] = [Self::ChangeSettings, Self::AcquireLock, Self::SeeCommands, Self::Debug];

    fn id(self) -> &'static str {
        match self {
            Self::ChangeSettings => "org.nvshare.Scheduler1.change-settings",
            Self::AcquireLock => "org.nvshare.Scheduler1.acquire-lock",
            Self::SeeCommands => "org.nvshare.Scheduler1.see-commands",
            Self::Debug => "org.nvshare.Scheduler1.debug",
        }
    }
}

/// Who is asked about.
#[derive(Debug)]
pub struct Subject {
    pub sender: OwnedUniqueName,
    pub uid: u32,
}

/// How long an answer may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// As long as a password takes; it may be asked for.
    Interactive,
    /// As long, but for nobody's password.
    Patient,
    /// At once.
    Quick,
}

/// What polkit says.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Yes,
    /// No; why, in words that follow a colon.
    No(String),
    /// Not without a password, which could not be asked for.
    Challenge,
    /// Nothing: this system has no polkit.
    Absent,
}

/// The polkit of one bus, and the questions that it has not answered.
#[derive(Debug, Default)]
pub struct Authority {
    asked: AtomicU64,
    pending: Mutex<Vec<(OwnedUniqueName, u32)>>,
}

/// The reply of CheckAuthorization.
#[derive(Debug, Deserialize, Type)]
struct Outcome {
    authorized: bool,
    challenge: bool,
    details: HashMap<String, String>,
}

impl Authority {
    /// Asks. The error is that too much is being asked already.
    pub async fn check(
        &self,
        connection: &Connection,
        subject: &Subject,
        action: Action,
        manner: Manner,
    ) -> fdo::Result<Answer> {
        let _place = self.place(subject)?;
        let question = Question {
            connection,
            sender: subject.sender.as_str(),
            action,
            interactive: manner == Manner::Interactive,
            id: format!("nvshare-{}", self.asked.fetch_add(1, Ordering::Relaxed)),
        };
        let limit = if manner == Manner::Quick { QUICK } else { PATIENCE };
        let gone = || Answer::No("the caller has left the bus".into());
        let Ok(Some(leaving)) = question.watch().await else { return Ok(gone()) };
        let answer = tokio::select! {
            answer = question.ask() => return Ok(answer),
            () = leaving => gone(),
            () = tokio::time::sleep(limit) => Answer::No(format!("there was no answer for {limit:?}")),
        };
        question.withdraw().await;
        Ok(answer)
    }

    fn pending(&self) -> MutexGuard<'_, Vec<(OwnedUniqueName, u32)>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place<'a>(&'a self, subject: &'a Subject) -> fdo::Result<Place<'a>> {
        let mut pending = self.pending();
        let of_sender = pending.iter().filter(|(sender, _)| *sender == subject.sender).count();
        let of_user = pending.iter().filter(|(_, uid)| *uid == subject.uid).count();
        if of_sender >= MOST_OF_SENDER || of_user >= MOST_OF_USER || pending.len() >= MOST {
            let text = "too many calls wait for polkit's answer: try again when some of them have it";
            return Err(fdo::Error::LimitsExceeded(text.into()));
        }
        pending.push((subject.sender.clone(), subject.uid));
        Ok(Place { authority: self, subject })
    }
}

/// A question that counts, until it is dropped.
struct Place<'a> {
    authority: &'a Authority,
    subject: &'a Subject,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut pending = self.authority.pending();
        if let Some(at) = pending.iter().position(|(sender, _)| *sender == self.subject.sender) {
            pending.swap_remove(at);
        }
    }
}

struct Question<'a> {
    connection: &'a Connection,
    sender: &'a str,
    action: Action,
    interactive: bool,
    /// By which it can be withdrawn.
    id: String,
}

impl Question<'_> {
    /// What is returned ends when the sender leaves; nothing where it has left.
    async fn watch(&self) -> zbus::Result<Option<impl Future<Output = ()> + use<>>> {
        let rule = MatchRule::builder()
            .msg_type(message::Type::Signal)
            .sender("org.freedesktop.DBus")
            .interface("org.freedesktop.DBus")
            .member("NameOwnerChanged")
            .arg(0, self.sender)
            .build()?;
        let mut changes = MessageStream::for_match_rule(rule, self.connection, None).await?;
        if !DBusProxy::new(self.connection).await?.name_has_owner(self.sender.try_into()?).await? {
            return Ok(None);
        }
        // A unique name changes its owner once, to nobody.
        Ok(Some(async move {
            let _ = std::future::poll_fn(|cx| Pin::new(&mut changes).poll_next(cx)).await;
        }))
    }

    async fn ask(&self) -> Answer {
        let subject = ("system-bus-name", HashMap::from([("name", Variant::from(self.sender))]));
        let details: HashMap<&str, &str> = HashMap::new();
        let flags = if self.interactive { ALLOW_USER_INTERACTION } else { 0 };
        let body = (subject, self.action.id(), details, flags, self.id.as_str());
        let reply = self.connection.call_method(Some(NAME), PATH, Some(INTERFACE), "CheckAuthorization", &body).await;
        match reply.and_then(|reply| reply.body().deserialize()) {
            Ok(outcome) => self.read(&outcome),
            Err(e) if is_absent(&e) => Answer::Absent,
            Err(e) => Answer::No(format!("polkit does not say ({e})")),
        }
    }

    fn read(&self, outcome: &Outcome) -> Answer {
        match outcome {
            Outcome { authorized: true, .. } => Answer::Yes,
            Outcome { challenge: true, .. } if !self.interactive => Answer::Challenge,
            Outcome { challenge: true, .. } => Answer::No("there is no polkit agent to ask for a password".into()),
            outcome if outcome.details.contains_key("polkit.dismissed") => Answer::No("no password was given".into()),
            _ => Answer::No("polkit does not allow it".into()),
        }
    }

    /// Says that nobody waits for the answer any more, and so that no password need be given.
    async fn withdraw(&self) {
        let message = Message::method_call(PATH, "CancelCheckAuthorization")
            .destination(NAME)
            .interface(INTERFACE)
            .with_flags(message::Flags::NO_REPLY_EXPECTED | message::Flags::NO_AUTO_START)
            .build(&self.id.as_str());
        // A polkit that is gone has nothing to cancel.
        if let Ok(message) = message {
            let _ = self.connection.send(&message).await;
        }
    }
}

/// Whether there is no polkit, and none can be started.
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
    fn questions_are_few_at_a_time() {
        let authority = Authority::default();
        let subject = |connection: usize, uid| {
            let sender = OwnedUniqueName::try_from(format!(":1.{connection}")).expect("a name");
            Subject { sender, uid }
        };
        let subjects: Vec<Subject> = (0..MOST).map(|n| subject(n, u32::try_from(n / 2).expect("few"))).collect();
        let mut places = Vec::new();
        for subject in &subjects {
            for _ in 0..MOST_OF_SENDER {
                places.extend(authority.place(subject));
            }
        }
        assert_eq!(places.len(), MOST);
        places.clear();
        for (connection, places_left) in [(0, MOST_OF_SENDER), (1, MOST_OF_USER - MOST_OF_SENDER), (2, 0)] {
            let subject: &'static Subject = Box::leak(Box::new(subject(connection, 1000)));
            let got: Vec<_> = (0..MOST).map_while(|_| authority.place(subject).ok()).collect();
            assert_eq!(got.len(), places_left, "of connection {connection}");
            places.extend(got);
        }
        drop(places);
        assert!(authority.pending().is_empty());
    }

    #[test]
    fn the_bus_lets_every_method_through() {
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
    fn the_policy_has_the_actions_that_are_asked_for() {
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
            let defaults = ["allow_any", "allow_inactive", "allow_active"].map(text);
            let expected = match action.attribute("id") {
                Some("org.nvshare.Scheduler1.acquire-lock") => ["yes"; 3],
                _ => ["auth_admin", "auth_admin", "auth_admin_keep"],
            };
            assert_eq!(defaults, expected);
            // Without this, polkit answers no question of a service that is not root.
            let owner = action.descendants().find(|node| node.has_tag_name("annotate")).expect("an owner");
            assert_eq!(owner.attribute("key"), Some("org.freedesktop.policykit.owner"));
            assert_eq!(owner.text(), Some("unix-user:nvshare"));
        }
    }
}
