//! The log of clients. Which lines were logged before is known only here.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tracing::info;

use super::model::{Client, Model};
use crate::config::rules::GpuHours;
use crate::config::units;
use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::identity::{Identity, Pod, printable};
use crate::scheduler::{ClientId, Event, GpuId, Time};

/// Logs a line about a client, with the fields common to all such lines.
macro_rules! log_client {
    ($level:ident, name: $event:literal, $client:expr, $identity:expr, $($rest:tt)+) => {{
        let identity: &$crate::identity::Identity = $identity;
        tracing::$level!(
            name: $event,
            client = $client.0,
            pid = identity.pid,
            uid = identity.uid,
            unit = identity.unit.as_str(),
            $($rest)+
        );
    }};
}
pub(super) use log_client;

/// Minimum time between two equal lines about the same client and GPU.
const REPEAT: Duration = Duration::from_secs(10);

/// The lines that were logged.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// Time at which each line about a client and a GPU was last logged, by client, and by GPU and the line's
    /// name.
    lines: BTreeMap<ClientId, BTreeMap<(GpuId, &'static str), Time>>,
    limit: LogRateLimit,
    /// The log already says that clients' reports cannot be verified.
    says_unverified: bool,
    pub refusals: Refusals,
}

/// Maximum number of refusals kept for users. Only the newest refusal of each process is kept.
const MAX_KEPT: usize = 256;

/// A process that was refused memory.
#[derive(Debug, Clone)]
pub(super) struct Refusal {
    pub pid: i32,
    pub text: String,
    pub at: Time,
}

/// The processes that were refused memory, newest last. An entry is kept after its process has ended.
#[derive(Debug, Clone, Default)]
pub(super) struct Refusals(VecDeque<Refusal>);

impl Refusals {
    /// A sentence with the time and reason of the process's last refusal. The process's user may not be
    /// allowed to read the journal.
    pub(super) fn sentence(&self, pid: u32, now: Time) -> Option<String> {
        let refusal = self.0.iter().find(|refusal| u32::try_from(refusal.pid) == Ok(pid))?;
        let ago = units::duration(now.saturating_sub(refusal.at));
        Some(format!("Refused {ago} ago: {}.", printable(&refusal.text)))
    }

    /// Keeps a refusal for the user of its process.
    pub(super) fn keep(&mut self, refusal: Refusal) {
        self.0.retain(|other| other.pid != refusal.pid);
        if self.0.len() >= MAX_KEPT {
            self.0.pop_front();
        }
        self.0.push_back(refusal);
    }
}

/// Formats the process's pod as a suffix to append to the client's name in log lines. Leaves out
/// parts of the pod's name that the agent has not reported.
fn of_pod(identity: &Identity) -> String {
    let Pod { uid, namespace, name, container } = &identity.pod;
    match (&**uid, &**name, &**container) {
        ("", ..) => String::new(),
        (uid, "", _) => format!(" of pod {uid}"),
        (_, name, "") => format!(" of pod {namespace}/{name}"),
        (_, name, container) => format!(" of pod {namespace}/{name}, container {container},"),
    }
}

/// True if this library name belongs to `nvsharectl`. `nvsharectl run` queries GPUs for a command and
/// uses none itself. The name only affects a log line, so a client gains nothing by a false name.
fn asks_for_a_command(library: &str) -> bool {
    library == "nvsharectl"
}

impl Log {
    /// True if a line with this name about a client and a GPU may be logged now. In this case, records the
    /// line as logged.
    pub(super) fn may_log(&mut self, name: &'static str, client: ClientId, gpu: GpuId, now: Time) -> bool {
        let lines = self.lines.entry(client).or_default();
        let is_recent = lines.get(&(gpu, name)).is_some_and(|at| now < *at + REPEAT);
        if !is_recent {
            lines.insert((gpu, name), now);
        }
        !is_recent
    }

    /// True if another line about this topic may be logged for the client's tenant.
    pub(super) fn allows(&mut self, topic: &'static str, identity: &Identity) -> bool {
        self.limit.allows(topic, &identity.tenant)
    }

    /// Allows the lines about a client and a GPU again once the client has detached the GPU.
    pub(super) fn forget(&mut self, event: &Event) {
        match event {
            Event::Detached { client, gpu } => {
                self.lines.get_mut(client).into_iter().for_each(|lines| lines.retain(|(at, _), _| at != gpu));
            }
            Event::Disconnected { client } => drop(self.lines.remove(client)),
            _ => {}
        }
    }

    /// `is_resumed`: the client was taken over from an earlier daemon.
    pub(super) fn log_arrival(&mut self, client: ClientId, identity: &Identity, library: &str, is_resumed: bool) {
        if !self.allows("connected", identity) {
            return;
        }
        let (shown, name, of, tenant) = (printable(library), &identity.name, of_pod(identity), &identity.tenant);
        if is_resumed {
            log_client!(info, name: "client-resumed", client, identity, %tenant, library = shown, "{name}{of} continues");
        } else if asks_for_a_command(library) {
            log_client!(info, name: "gpus-asked", client, identity, %tenant, "{name}{of} asks which GPUs a command may use");
        } else {
            log_client!(info, name: "client-connected", client, identity, %tenant, library = shown, "{name}{of} connected");
        }
    }

    /// `why` completes the log line "NAME ...".
    pub(super) fn log_departure(&mut self, client: ClientId, gone: &Client, why: &str) {
        let identity = &*gone.identity;
        let only_asked = asks_for_a_command(&gone.library) && gone.gpus.is_empty();
        if !only_asked && self.allows("gone", identity) {
            let (name, of, tenant) = (&identity.name, of_pod(identity), &identity.tenant);
            log_client!(info, name: "client-gone", client, identity, %tenant, "{name}{of} {why}");
        }
    }

    /// Logs that a client requests more than its tenant's budget allows.
    pub(super) fn log_over_budget(&mut self, client: ClientId, identity: &Identity, what: &str) {
        if self.allows("over-budget", identity) {
            let Identity { name, tenant, .. } = identity;
            log_client!(warn, name: "over-budget", client, identity, %tenant, "{name} {what}. Further imports by {tenant} \
                are refused");
        }
    }

    pub(super) fn log_unplaced(&mut self, model: &Model, client: ClientId, why: &str, label: &str) {
        let Some(identity) = model.identity(client) else { return };
        let Identity { pid, uid, unit, name, .. } = &**identity;
        if self.allows("not-placed", identity) {
            let rule = model.rule_name(client);
            let by = if rule.is_empty() { String::new() } else { format!(" (rule {rule})") };
            info!(name: "not-placed", client = client.0, pid, uid, unit, rule, label, "cannot place {name} on a GPU: \
                {why}{by}");
        }
    }

    /// Logs that a client named a GPU that NVML does not list.
    pub(super) fn log_unlisted(&mut self, model: &Model, client: ClientId, gpu: GpuId) {
        let Some((identity, entry)) = model.identity(client).zip(model.gpus.get(&gpu)) else { return };
        if self.allows("gpu-found", identity) {
            info!(name: "gpu-found", gpu = entry.label(gpu), bytes = entry.total, "a program uses {}, which NVML does \
                not list", entry.name);
        }
    }

    /// Logs that a client's group has used up its GPU time, or has GPU time again.
    pub(super) fn log_hours(&mut self, model: &Model, client: ClientId) {
        let Some((GpuHours { time, window }, used)) = model.hours_of(client) else { return };
        let Some(identity) = model.identity(client) else { return };
        let (name, now) = match used >= time {
            true => (identity.label(), "so other programs run first"),
            false => (identity.label(), "so they take normal turns again"),
        };
        let (used, time, window) = (units::duration(used), units::duration(time), units::duration(window.time()));
        if self.allows("hours", identity) {
            info!(
                client = client.0,
                "{name} and its group have used {used} of {time} GPU time in the last {window}, {now}"
            );
        }
    }

    /// Logs, once, that clients' reports cannot be verified.
    pub(super) fn log_unverified(&mut self) {
        if !std::mem::replace(&mut self.says_unverified, true) {
            info!(
                "cannot verify programs' reports of freed memory without NVML. The scheduler may grant that memory to \
                 another user's programs without verification"
            );
        }
    }
}
