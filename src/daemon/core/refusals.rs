//! Log lines about refused memory. Each line gives the reason and a remedy.

use std::collections::VecDeque;

use super::log::{Log, log_client};
use super::model::Model;
use crate::config::units;
use crate::identity::printable;
use crate::scheduler::{ClientId, Denial, GpuId, Time};

/// Maximum number of clients that a line names. The clients with the most memory are named.
const MAX_NAMED: usize = 5;

/// Maximum number of refusals kept for users. Only the newest refusal of each process is kept.
const MAX_KEPT: usize = 256;

/// A process that was refused memory.
#[derive(Debug, Clone)]
struct Refusal {
    pid: i32,
    text: String,
    at: Time,
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
    fn keep(&mut self, refusal: Refusal) {
        self.0.retain(|other| other.pid != refusal.pid);
        if self.0.len() >= MAX_KEPT {
            self.0.pop_front();
        }
        self.0.push_back(refusal);
    }
}

impl Log {
    /// Logs that a client is refused memory, and why. Keeps the text for the client's user.
    pub(super) fn note_refusal(
        &mut self,
        model: &Model,
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
        why: Denial,
        now: Time,
    ) {
        if !model.is_attached(client, gpu) || !self.may_log("memory-refused", client, gpu, now) {
            return;
        }
        // A client that detaches and attaches its GPU is a new client for `may_log`.
        let Some(identity) = model.identity(client).filter(|identity| self.allows("memory-refused", identity)) else {
            return;
        };
        let text = match why {
            Denial::NoContext => log_no_context(model, client, gpu, bytes),
            Denial::Unmappable => log_unmappable(model, client, gpu, bytes),
            Denial::EnvLimit => log_env_limit(model, client, gpu, bytes),
            Denial::NoRoom => log_no_room(model, client, gpu, bytes),
            _ => log_rule_limit(model, client, gpu, bytes, why),
        };
        if let Some(text) = text.filter(|_| identity.pid > 0) {
            self.refusals.keep(Refusal { pid: identity.pid, text, at: now });
        }
    }

    /// Logs that the driver could not map a client's memory after a grant. Only the first of consecutive
    /// failures is logged.
    pub(super) fn log_mapping_failure(
        &mut self,
        model: &Model,
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
        failures: u32,
        now: Time,
    ) {
        if failures > 1 || !model.is_attached(client, gpu) || !self.may_log("mapping-failed", client, gpu, now) {
            return;
        }
        let Some(identity) = model.identity(client) else { return };
        log_client!(
            warn,
            name: "mapping-failed",
            client,
            identity,
            gpu = model.label(gpu),
            bytes,
            "the driver could not map {} of {}, although the memory should be free. Evicting memory of other programs",
            units::size(bytes),
            identity.label()
        );
    }
}

/// Logs that neither the GPU nor host memory has room for the request.
fn log_no_room(model: &Model, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
    let demand = |attachments: &[crate::scheduler::AttachmentView]| -> u64 {
        attachments.iter().filter(|attachment| attachment.gpu == gpu).map(|attachment| attachment.demand).sum()
    };
    let views = model.machine.clients();
    let mut users: Vec<(u64, ClientId)> = views.iter().map(|view| (demand(&view.attachments), view.client)).collect();
    users.sort_unstable_by(|a, b| b.cmp(a));
    let named = users.iter().filter(|(demand, _)| *demand > 0).take(MAX_NAMED).filter_map(|(demand, client)| {
        let identity = model.identity(*client)?;
        Some(format!("{} (pid {}) {}", identity.label(), identity.pid, units::size(*demand)))
    });
    let named: Vec<String> = named.collect();
    let identity = model.identity(client)?;
    let capacity = model.machine.gpu(gpu).map_or(0, |view| view.capacity);
    let (host, promised) = model.machine.host();
    let host = host.unwrap_or(0);
    let text = format!(
        "{} is refused memory: its total of {} and the memory of other programs do not fit into the GPU ({}) plus \
         the host memory for swapping ({}). To solve this, {}",
        identity.label(),
        units::size(bytes),
        units::size(capacity),
        units::size(host),
        match named.join(", ").as_str() {
            "" => "raise max in [swap]".to_owned(),
            named => format!("end one of the largest users ({named}), or raise max in [swap]"),
        }
    );
    log_client!(
        warn,
        name: "memory-refused",
        client,
        identity,
        gpu = model.label(gpu),
        bytes,
        capacity,
        host,
        host_promised = promised,
        "{text}"
    );
    Some(text)
}

/// Logs that the GPU has no room for another context, because of other programs' memory.
fn log_no_context(model: &Model, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
    let identity = model.identity(client)?;
    let text = format!(
        "{} is refused a CUDA context: the memory of a large program on the GPU would no longer fit. To make the \
         refused program wait until the large program ends, set on-memory-full = \"wait\" in the rule of the \
         refused program",
        identity.label()
    );
    log_client!(
        warn,
        name: "memory-refused",
        client,
        identity,
        gpu = model.label(gpu),
        bytes,
        "{text}"
    );
    Some(text)
}

/// Logs that the client has allocated more memory than the driver can map.
fn log_unmappable(model: &Model, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
    let identity = model.identity(client)?;
    let capacity = model.machine.gpu(gpu).map_or(0, |view| view.capacity);
    let text = format!(
        "{} is refused memory: it requests {} in total, but the driver cannot map more than {}, although no other \
         program has memory on the GPU",
        identity.label(),
        units::size(bytes),
        units::size(capacity)
    );
    log_client!(
        warn,
        name: "memory-refused",
        client,
        identity,
        gpu = model.label(gpu),
        bytes,
        "{text}"
    );
    Some(text)
}

/// Logs that a rule limits the client's group.
fn log_rule_limit(model: &Model, client: ClientId, gpu: GpuId, bytes: u64, why: Denial) -> Option<String> {
    let (Some(entry), Some(rule)) = (model.clients.get(&client), model.rule_of(client)) else { return None };
    let everywhere = why == Denial::SwapMax;
    let (key, max) = match why {
        Denial::SwapMax => ("swap-max", rule.limits.swap_max.unwrap_or(0)),
        _ => ("memory-max", model.machine.memory_max(client, gpu).unwrap_or(0)),
    };
    let group = model.clients.iter().filter(|(id, other)| **id != client && other.rule == entry.rule);
    let views = group.filter_map(|(id, _)| model.machine.client(*id)).flat_map(|view| view.attachments);
    let used = views.filter(|attachment| everywhere || attachment.gpu == gpu).map(|attachment| attachment.demand);
    let used = used.fold(0, u64::saturating_add);
    // Contexts use no host memory.
    let contexts = match everywhere {
        true => String::new(),
        false => {
            format!(" and the group's contexts {}", units::size(model.machine.contexts_of_group(client, gpu)))
        }
    };
    let text = format!(
        "{} is refused memory: it requests {} in total, and other programs of its group use {}{contexts}. {key} of \
         rule {rule} allows the group {}",
        entry.identity.label(),
        units::size(bytes),
        units::size(used),
        units::size(max)
    );
    log_client!(
        warn,
        name: "memory-refused",
        client,
        &entry.identity,
        gpu = model.label(gpu),
        bytes,
        rule = rule.to_string(),
        memory_max = max,
        "{text}"
    );
    Some(text)
}

/// Logs the limits that a client's own environment sets.
fn log_env_limit(model: &Model, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
    let entry = model.clients.get(&client)?;
    let limits = entry.env_limits.in_words(model.rule_of(client));
    let text = format!(
        "{} is refused memory: it requests {} in total, and its context uses {}. Its environment sets {limits}",
        entry.identity.label(),
        units::size(bytes),
        units::size(model.machine.counted_context(client, gpu))
    );
    log_client!(
        info,
        name: "memory-refused",
        client,
        &entry.identity,
        gpu = model.label(gpu),
        bytes,
        "{text}"
    );
    Some(text)
}
