//! What is remembered of events and commands, for people: the log, the trace, times.

use std::time::Duration;

use nvshare_wire::client::StuckReason;
use tracing::{debug, info, warn};

use super::state::Core;
use crate::bus;
use crate::config::units;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Command, Denial, Event, GpuId, GpuSet, Time, WaitReason};

/// A client that is refused memory over and over is in the log so often, and those that hold most are named.
const REFUSAL_PAUSE: Duration = Duration::from_secs(10);
const MOST_NAMED: usize = 5;

impl Core {
    pub(super) fn note_event(&mut self, event: &Event, now: Time) {
        use Event::{Connected, Disconnected, Held, Released, Requested};
        if let Connected { .. } | Disconnected { .. } | Held { .. } | Released { .. } | Requested { .. } = event {
            self.signals.turns.notify_one();
            self.signals.holders.notify_one();
        }
        if let Held { .. } = event {
            self.signals.grants.notify_one();
        }
        match event {
            Event::Requested { client, gpus } => self.trace_all(now, *client, gpus, "request"),
            Event::Cancelled { client, gpus } => {
                self.trace_all(now, *client, gpus, "cancel");
                self.idle(*client, gpus, now);
            }
            Event::Released { client, gpus, reason, busy } => {
                debug!(client = client.0, ?gpus, ?reason, ?busy, "release");
                self.trace_all(now, *client, gpus, "release");
                self.idle(*client, gpus, now);
            }
            Event::Stuck { client, gpus, reason: StuckReason::UntrackedWork } => {
                self.trace_all(now, *client, gpus, "untracked-work");
                let mut is_new = false;
                for gpu in gpus {
                    if let Some(stats) = self.stats(*client, *gpu) {
                        is_new |= !std::mem::replace(&mut stats.untracked_work, true);
                    }
                }
                let entry = self.clients.get(client).filter(|_| is_new);
                let Some(Identity { pid, uid, unit, name, .. }) = entry.map(|c| &*c.identity) else { return };
                info!(
                    name: "untracked-work",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = self.labels(gpus),
                    "{name} gives the GPU work that nvshare does not see: its memory stays there"
                );
            }
            Event::Stuck { client, gpus, reason } => {
                debug!(client = client.0, ?gpus, ?reason, "cannot drain");
                self.trace_all(now, *client, gpus, "stuck");
            }
            Event::Detached { client, gpu } => {
                self.trace(now, *client, Some(*gpu), "detach", None);
                if let Some(entry) = self.clients.get_mut(client) {
                    entry.gpus.remove(gpu);
                }
            }
            Event::Memory { client, gpu, report } => {
                let Some(stats) = self.stats(*client, *gpu) else { return };
                let before = std::mem::replace(&mut stats.mapped, report.mapped);
                if report.mapped < before {
                    self.trace(now, *client, Some(*gpu), "freed", Some(before - report.mapped));
                } else if report.mapped > before {
                    self.trace(now, *client, Some(*gpu), "mapped", Some(report.mapped - before));
                }
            }
            _ => {}
        }
    }

    pub(super) fn note_command(&mut self, command: &Command, now: Time) {
        match command {
            Command::Reserved { client, gpu, bytes } => {
                debug!(client = client.0, gpu = %gpu.0, bytes, "reserved");
                self.trace(now, *client, Some(*gpu), "reserved", Some(*bytes));
            }
            Command::Prepare { client, gpu, bytes } => debug!(client = client.0, gpu = %gpu.0, bytes, "prepare"),
            Command::Denied { client, gpu, bytes, why } => self.note_refusal(*client, *gpu, *bytes, *why, now),
            Command::Limit { client, gpu, bytes, .. } => {
                if let Some(stats) = self.stats(*client, *gpu) {
                    stats.limit = Some(*bytes);
                }
            }
            Command::Allowance { client, gpu, bytes, .. } => {
                let Some(stats) = self.stats(*client, *gpu) else { return };
                let before = std::mem::replace(&mut stats.allowance, *bytes);
                let (what, by) = match *bytes {
                    bytes if bytes < stats.mapped.min(before) => ("evict", before - bytes),
                    bytes if bytes < before => ("take-back", before - bytes), // nothing has to leave
                    bytes => ("credit", bytes - before),
                };
                debug!(client = client.0, gpu = %gpu.0, bytes, "{what}");
                self.trace(now, *client, Some(*gpu), what, Some(by));
            }
            Command::Grant { client, gpus } => {
                self.signals.holders.notify_one();
                self.signals.grants.notify_one();
                debug!(client = client.0, ?gpus, "grant");
                self.trace_all(now, *client, gpus, "grant");
            }
            Command::Revoke { client, gpus } => {
                debug!(client = client.0, ?gpus, "revoke");
                self.trace_all(now, *client, gpus, "revoke");
            }
            Command::Contended { client, gpus, waiters, grace } => {
                debug!(client = client.0, ?gpus, waiters, ?grace, "contended");
            }
            Command::MappingFailed { client, gpu, bytes, failures } => {
                self.trace(now, *client, Some(*gpu), "mapping-failed", Some(*bytes));
                debug!(client = client.0, gpu = %gpu.0, bytes, failures, "mapping failed");
                self.note_failure(*client, *gpu, *bytes, *failures, now);
            }
            Command::Undrainable { client, gpus } => {
                self.trace_all(now, *client, gpus, "undrainable");
                let Some(identity) = self.clients.get(client).map(|entry| &entry.identity) else { return };
                let Identity { pid, uid, unit, name, .. } = &**identity;
                warn!(
                    name: "undrainable",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = self.labels(gpus),
                    "{name} cannot be drained: others run beside it"
                );
            }
            Command::EvictionBlocked { client, gpu, why } => {
                self.trace(now, *client, Some(*gpu), "eviction-blocked", None);
                let label = self.gpus.get(gpu).map(|entry| entry.label(*gpu));
                let Some(stats) = self.stats(*client, *gpu) else { return };
                if stats.eviction_block_logged.is_some_and(|at| now < at + REFUSAL_PAUSE) {
                    return;
                }
                stats.eviction_block_logged = Some(now);
                let Some(Identity { pid, uid, unit, name, .. }) = self.clients.get(client).map(|c| &*c.identity) else {
                    return;
                };
                warn!(
                    name: "eviction-blocked",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = label,
                    "the memory of {name} stays on the GPU: {}; others make room",
                    bus::eviction_block_name(*why)
                );
            }
            Command::Waiting { client, gpus, why: WaitReason::Context } => {
                let Some(identity) = self.clients.get(client).map(|entry| &entry.identity) else { return };
                let Identity { pid, uid, unit, name, .. } = &**identity;
                info!(
                    name: "context-waits",
                    client = client.0,
                    pid,
                    uid,
                    unit,
                    gpu = self.labels(gpus),
                    "{name} waits with its context: beside it, a program that has nearly all of the GPU could not run"
                );
            }
            Command::Thrashing { gpu, begins, demand } => self.note_thrashing(*gpu, *begins, *demand, now),
            Command::Waiting { client, gpus, why } => debug!(client = client.0, ?gpus, ?why, "waits"),
            Command::Attached { .. }
            | Command::Probe { .. }
            | Command::Measure { .. }
            | Command::Placed { .. }
            | Command::Unplaced { .. } => {}
        }
    }

    /// Says who has what somebody else could not get.
    fn note_refusal(&mut self, client: ClientId, gpu: GpuId, bytes: u64, why: Denial, now: Time) {
        debug!(client = client.0, gpu = %gpu.0, bytes, "denied");
        let Some(stats) = self.stats(client, gpu) else { return };
        if stats.refusal_logged.is_some_and(|at| now < at + REFUSAL_PAUSE) {
            return;
        }
        stats.refusal_logged = Some(now);
        if matches!(why, Denial::NoContext | Denial::Unmappable) {
            return self.note_impossible(client, gpu, bytes, why);
        }
        if why == Denial::EnvLimit {
            return self.note_beyond_own(client, gpu, bytes);
        }
        if why != Denial::NoRoom {
            return self.note_beyond(client, gpu, bytes, why);
        }
        let mut holders: Vec<(u64, ClientId)> = Vec::new();
        for view in self.machine.clients() {
            let demand = view
                .attachments
                .iter()
                .filter(|attachment| attachment.gpu == gpu)
                .map(|attachment| attachment.demand)
                .sum();
            holders.push((demand, view.client));
        }
        holders.sort_unstable_by(|a, b| b.cmp(a));
        let named = holders.iter().filter(|(demand, _)| *demand > 0).take(MOST_NAMED);
        let named: Vec<String> = named
            .filter_map(|(demand, client)| {
                let identity = &self.clients.get(client)?.identity;
                Some(format!("{} (pid {}) {}", identity.name, identity.pid, units::size(*demand)))
            })
            .collect();
        let Some(entry) = self.clients.get(&client) else { return };
        let Identity { pid, uid, unit, name, .. } = &*entry.identity;
        let capacity = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
        let (host, promised) = self.machine.host();
        let host = host.unwrap_or(0);
        warn!(
            name: "memory-refused",
            client = client.0,
            pid,
            uid,
            unit,
            gpu = self.gpus.get(&gpu).map(|entry| entry.label(gpu)),
            bytes,
            capacity,
            host,
            host_promised = promised,
            "{name} is refused memory: it wants {} in all, and what does not fit on the GPU ({}) has no place in host \
             memory ({}); most is held by {}: end one of them, or raise max in [swap]",
            units::size(bytes),
            units::size(capacity),
            units::size(host),
            if named.is_empty() { "nobody".into() } else { named.join(", ") }
        );
    }

    /// Says that a client was granted a GPU and could not use it, once until it can.
    fn note_failure(&mut self, client: ClientId, gpu: GpuId, bytes: u64, failures: u32, now: Time) {
        let label = self.gpus.get(&gpu).map(|entry| entry.label(gpu));
        let Some(stats) = self.stats(client, gpu) else { return };
        if failures > 1 || stats.failure_logged.is_some_and(|at| now < at + REFUSAL_PAUSE) {
            return;
        }
        stats.failure_logged = Some(now);
        let Some(Identity { pid, uid, unit, name, .. }) = self.clients.get(&client).map(|c| &*c.identity) else {
            return;
        };
        warn!(
            name: "mapping-failed",
            client = client.0,
            pid,
            uid,
            unit,
            gpu = label,
            bytes,
            "the driver had no room for {} of {name} that should have fitted: memory of others is evicted to make room",
            units::size(bytes)
        );
    }

    /// Says that the GPU has no room for a context, or for memory that was allocated.
    fn note_impossible(&self, client: ClientId, gpu: GpuId, bytes: u64, why: Denial) {
        let Some(entry) = self.clients.get(&client) else { return };
        let label = self.gpus.get(&gpu).map(|entry| entry.label(gpu));
        let Identity { pid, uid, unit, name, .. } = &*entry.identity;
        let what = if why == Denial::NoContext {
            "a CUDA context: beside it, a program that needs nearly all of the GPU could not run; on-memory-full = \"wait\" \
             in its rule has it wait until that one has ended"
                .to_owned()
        } else {
            let most = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
            format!(
                "memory: it needs {} in all, and the driver maps no more than {}, though no other program of nvshare has any \
                 memory there",
                units::size(bytes),
                units::size(most)
            )
        };
        warn!(
            name: "memory-refused",
            client = client.0,
            pid,
            uid,
            unit,
            gpu = label,
            bytes,
            "{name} is refused {what}"
        );
    }

    /// Says which rule somebody met.
    fn note_beyond(&self, client: ClientId, gpu: GpuId, bytes: u64, why: Denial) {
        let (Some(entry), Some(rule)) = (self.clients.get(&client), self.rule_of(client)) else { return };
        let label = self.gpus.get(&gpu).map(|entry| entry.label(gpu));
        let everywhere = why == Denial::SwapMax;
        let (key, max) = match why {
            Denial::SwapMax => ("swap-max", rule.limits.swap_max.unwrap_or(0)),
            _ => ("memory-max", self.machine.memory_max(client, gpu).unwrap_or(0)),
        };
        let fellows = self.clients.iter().filter(|(id, other)| **id != client && other.rule == entry.rule);
        let views = fellows.filter_map(|(id, _)| self.machine.client(*id)).flat_map(|view| view.attachments);
        let held = views.filter(|attachment| everywhere || attachment.gpu == gpu).map(|attachment| attachment.demand);
        let held = held.fold(0, u64::saturating_add);
        let Identity { pid, uid, unit, name, .. } = &*entry.identity;
        warn!(
            name: "memory-refused",
            client = client.0,
            pid,
            uid,
            unit,
            gpu = label,
            bytes,
            rule = rule.to_string(),
            memory_max = max,
            "{name} is refused memory: it wants {} in all, others that count with it have {}, and {key} of rule {rule} \
             allows {} together, contexts included",
            units::size(bytes),
            units::size(held),
            units::size(max)
        );
    }

    /// Says that somebody met what it allows itself.
    fn note_beyond_own(&self, client: ClientId, gpu: GpuId, bytes: u64) {
        let Some(entry) = self.clients.get(&client) else { return };
        let label = self.gpus.get(&gpu).map(|entry| entry.label(gpu));
        let own = entry.env_limits.in_words(self.rule_of(client));
        let Identity { pid, uid, unit, name, .. } = &*entry.identity;
        info!(
            name: "memory-refused",
            client = client.0,
            pid,
            uid,
            unit,
            gpu = label,
            bytes,
            "{name} is refused memory: it wants {} in all, and its own environment says {own}, contexts included",
            units::size(bytes)
        );
    }

    /// GPUs as people know them.
    pub(super) fn labels(&self, gpus: &GpuSet) -> String {
        let labels: Vec<String> = gpus.iter().filter_map(|id| Some(self.gpus.get(id)?.label(*id))).collect();
        labels.join(" ")
    }

    pub(super) fn idle(&mut self, client: ClientId, gpus: &GpuSet, now: Time) {
        for gpu in gpus {
            if let Some(stats) = self.stats(client, *gpu) {
                stats.idle_since = now;
            }
        }
    }

    pub(super) fn trace_all(&mut self, now: Time, client: ClientId, gpus: &GpuSet, what: &str) {
        if self.trace.is_some() {
            for gpu in gpus {
                self.trace(now, client, Some(*gpu), what, None);
            }
        }
    }

    pub(super) fn trace(&mut self, now: Time, client: ClientId, gpu: Option<GpuId>, what: &str, bytes: Option<u64>) {
        if let Some(trace) = &mut self.trace {
            let pid = self.clients.get(&client).map_or(0, |c| c.identity.pid);
            trace.write(now, client, pid, gpu, what, bytes);
        }
    }
}
