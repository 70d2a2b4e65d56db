//! Calls that need authorization. On a terminal, polkit may ask for a password. Without a terminal,
//! unauthorized calls are refused immediately.

use std::io::{IsTerminal, Read};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Pid, Signal, kill_process};
use zbus::proxy::{CacheProperties, MethodFlags};
use zbus::wire::{DynamicDeserialize, DynamicType};
use zbus::{Proxy, Variant};

use crate::bus::{NAME, SchedulerProxy};

const PASSWORD_NEEDED: &str = "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired";

/// Calls a method.
pub(super) async fn call<R>(
    scheduler: &SchedulerProxy<'_>,
    method: &str,
    body: &(impl serde::Serialize + DynamicType),
) -> zbus::Result<R>
where
    R: for<'d> DynamicDeserialize<'d>,
{
    call_at(scheduler.inner(), method, body).await
}

/// Sets a property.
pub(super) async fn set(scheduler: &SchedulerProxy<'_>, property: &str, value: Variant<'_>) -> zbus::Result<()> {
    let scheduler = scheduler.inner();
    let properties: Proxy<'_> = zbus::proxy::Builder::new(scheduler.connection())
        .destination(scheduler.destination())
        .path(scheduler.path())
        .interface("org.freedesktop.DBus.Properties")
        .cache_properties(CacheProperties::No)
        .build()
        .await?;
    call_at(&properties, "Set", &(NAME, property, value)).await
}

async fn call_at<R>(proxy: &Proxy<'_>, method: &str, body: &(impl serde::Serialize + DynamicType)) -> zbus::Result<R>
where
    R: for<'d> DynamicDeserialize<'d>,
{
    let reply = match proxy.call_with_flags(method, MethodFlags::empty(), body).await {
        Err(e) if needs_password(&e) && std::io::stdin().is_terminal() => {
            let _question = Question::begin();
            let _agent = Agent::start();
            proxy.call_with_flags(method, MethodFlags::ALLOW_INTERACTIVE_AUTH, body).await?
        }
        reply => reply?,
    };
    reply.ok_or_else(|| zbus::Error::Failure("the call has no reply".into()))
}

fn needs_password(error: &zbus::Error) -> bool {
    match error {
        zbus::Error::MethodError(name, ..) => *name == PASSWORD_NEEDED,
        zbus::Error::FDO(error) => matches!(**error, zbus::fdo::Error::InteractiveAuthorizationRequired(_)),
        _ => false,
    }
}

static ASKS: AtomicBool = AtomicBool::new(false);

/// Returns true if polkit may be asking for a password on the terminal. A progress line would
/// overwrite the password prompt.
pub(super) fn asks() -> bool {
    ASKS.load(Ordering::Relaxed)
}

/// While a value of this type exists, polkit may be using the terminal.
struct Question;

impl Question {
    fn begin() -> Self {
        ASKS.store(true, Ordering::Relaxed);
        Self
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        ASKS.store(false, Ordering::Relaxed);
    }
}

/// polkit's terminal agent. The agent asks for passwords until this value is dropped.
struct Agent(Child);

impl Agent {
    /// Starts an agent and waits until the agent is registered. Without an agent on the terminal,
    /// only a desktop's agent can ask for a password.
    fn start() -> Option<Self> {
        let mut command = Command::new("pkttyagent");
        // The agent uses the terminal directly, and closes the notify descriptor once it is
        // registered. With `--fallback` a desktop's agent takes precedence.
        command.args(["--notify-fd", "1", "--fallback"]).stdout(Stdio::piped());
        let mut child = command.spawn().ok()?;
        let registered = child.stdout.take().map(|mut end| end.read_to_end(&mut Vec::new()));
        debug_assert!(registered.is_some_and(|read| read.is_ok()));
        Some(Self(child))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // The signal is SIGTERM rather than SIGKILL, so that the agent restores the terminal.
        if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::TERM);
        }
        let _ = self.0.wait();
    }
}
