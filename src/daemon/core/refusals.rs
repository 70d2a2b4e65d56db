//! Log lines about refused memory. Each line gives the reason and a remedy.

use super::log::{Log, Refusal, log_client};
use super::model::{Client, Model, Wanted};
use crate::config::units;
use crate::scheduler::{ClientId, Denial, GpuId, Time};

/// Maximum number of clients that a line names. The clients with the most memory are named.
const MAX_NAMED: usize = 5;

impl Log {
    /// Logs that a client is refused memory, and why. Keeps the text for the client's user.
    pub(super) fn note_refusal(&mut self, model: &Model, request: Wanted, why: Denial, now: Time) {
        let (client, gpu, bytes) = request;
        if !model.is_attached(client, gpu) || !self.may_log("memory-refused", client, gpu, now) {
            return;
        }
        // A client that detaches and attaches its GPU is a new client for `may_log`.
        let Some(entry) = model.clients.get(&client).filter(|entry| self.allows("memory-refused", &entry.identity))
        else {
            return;
        };
        let line = match why {
            Denial::NoContext => Some(no_context()),
            Denial::Unmappable => Some(unmappable(model, gpu, bytes)),
            Denial::EnvLimit => Some(env_limit(model, entry, request)),
            Denial::NoRoom => Some(no_room(model, gpu, bytes)),
            _ => rule_limit(model, entry, request, why),
        };
        let Some(line) = line else { return };
        let (label, identity) = (model.label(gpu), &entry.identity);
        let Line { why: reason, capacity, host, host_promised, rule, memory_max } = line;
        let text = format!("{} is refused {reason}", identity.label());
        if why == Denial::EnvLimit {
            log_client!(info, name: "memory-refused", client, identity, gpu = label, bytes, "{text}");
        } else {
            log_client!(warn, name: "memory-refused", client, identity, gpu = label, bytes, capacity, host, host_promised,
                rule, memory_max, "{text}");
        }
        if identity.pid > 0 {
            self.refusals.keep(Refusal { pid: identity.pid, text, at: now });
        }
    }

    /// Logs that the driver could not map a client's memory after a grant. Only the first of consecutive
    /// failures is logged.
    pub(super) fn log_mapping_failure(&mut self, model: &Model, failed: Wanted, failures: u32, now: Time) {
        let (client, gpu, bytes) = failed;
        if failures > 1 || !model.is_attached(client, gpu) || !self.may_log("mapping-failed", client, gpu, now) {
            return;
        }
        let Some(identity) = model.identity(client) else { return };
        let (label, shown) = (identity.label(), units::size(bytes));
        log_client!(warn, name: "mapping-failed", client, identity, gpu = model.label(gpu), bytes, "the driver could not \
            map {shown} of {label}, although the memory should be free. Evicting memory of other programs");
    }
}

/// A log line about refused memory: the words after "is refused", and further fields.
#[derive(Default)]
struct Line {
    why: String,
    capacity: Option<u64>,
    host: Option<u64>,
    host_promised: Option<u64>,
    rule: Option<String>,
    memory_max: Option<u64>,
}

/// Neither the GPU nor host memory has room for the request.
fn no_room(model: &Model, gpu: GpuId, bytes: u64) -> Line {
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
    let capacity = model.machine.gpu(gpu).map_or(0, |view| view.capacity);
    let (host, promised) = model.machine.host();
    let host = host.unwrap_or(0);
    let why = format!(
        "memory: its total of {} and the memory of other programs do not fit into the GPU ({}) plus the host memory \
         for swapping ({}). To solve this, {}",
        units::size(bytes),
        units::size(capacity),
        units::size(host),
        match named.collect::<Vec<_>>().join(", ").as_str() {
            "" => "raise max in [swap]".to_owned(),
            named => format!("end one of the largest users ({named}), or raise max in [swap]"),
        }
    );
    Line { why, capacity: Some(capacity), host: Some(host), host_promised: Some(promised), ..Line::default() }
}

/// The GPU has no room for another context, because of other programs' memory.
fn no_context() -> Line {
    let why = "a CUDA context: the memory of a large program on the GPU would no longer fit. To make the refused \
        program wait until the large program ends, set on-memory-full = \"wait\" in the rule of the refused program";
    Line { why: why.to_owned(), ..Line::default() }
}

/// The client has allocated more memory than the driver can map.
fn unmappable(model: &Model, gpu: GpuId, bytes: u64) -> Line {
    let capacity = model.machine.gpu(gpu).map_or(0, |view| view.capacity);
    let (bytes, capacity) = (units::size(bytes), units::size(capacity));
    let why = format!(
        "memory: it requests {bytes} in total, but the driver cannot map more than {capacity}, although no other \
         program has memory on the GPU"
    );
    Line { why, ..Line::default() }
}

/// A rule limits the client's group.
fn rule_limit(model: &Model, entry: &Client, (client, gpu, bytes): Wanted, why: Denial) -> Option<Line> {
    let rule = model.rule_of(client)?;
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
        false => format!(" and the group's contexts {}", units::size(model.machine.contexts_of_group(client, gpu))),
    };
    let (bytes, used, allowed) = (units::size(bytes), units::size(used), units::size(max));
    let why = format!(
        "memory: it requests {bytes} in total, and other programs of its group use {used}{contexts}. {key} of rule \
         {rule} allows the group {allowed}"
    );
    Some(Line { why, rule: Some(rule.to_string()), memory_max: Some(max), ..Line::default() })
}

/// The client's own environment limits its memory.
fn env_limit(model: &Model, entry: &Client, (client, gpu, bytes): Wanted) -> Line {
    let limits = entry.env_limits.in_words(model.rule_of(client));
    let (bytes, context) = (units::size(bytes), units::size(model.machine.counted_context(client, gpu)));
    let why =
        format!("memory: it requests {bytes} in total, and its context uses {context}. Its environment sets {limits}");
    Line { why, ..Line::default() }
}
