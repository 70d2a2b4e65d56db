//! Log lines about refused memory. Each line gives the reason and a remedy.

use super::event_log::log_client;
use super::state::Core;
use super::view::View;
use crate::config::units;
use crate::identity::printable;
use crate::scheduler::{ClientId, Denial, GpuId, Time};

/// Maximum number of clients that a line names. The clients with the most memory are named.
const MAX_NAMED: usize = 5;

/// Maximum number of refusals kept for users. Only the newest refusal of each process is kept.
const MAX_KEPT: usize = 256;

/// A process that was refused memory.
#[derive(Debug, Clone)]
pub struct Refusal {
    pid: i32,
    text: String,
    at: Time,
}

impl View {
    /// A sentence with the time and reason of the process's last refusal. The process's user may not be
    /// allowed to read the journal.
    pub(super) fn refusal_sentence(&self, pid: u32) -> Option<String> {
        let refusal = self.refusals.iter().find(|refusal| u32::try_from(refusal.pid) == Ok(pid))?;
        let ago = units::duration(self.now.saturating_sub(refusal.at));
        Some(format!("Refused {ago} ago: {}.", printable(&refusal.text)))
    }
}

impl Core {
    /// Logs that a client is refused memory, and why. Keeps the text for the client's user.
    pub(super) fn note_refusal(&mut self, client: ClientId, gpu: GpuId, bytes: u64, why: Denial, now: Time) {
        if !self.may_log("memory-refused", client, gpu, now) {
            return;
        }
        // A client that detaches and attaches its GPU is a new client for `may_log`.
        let Some(entry) = self.clients.get(&client) else { return };
        if !self.log_limit.allows("memory-refused", &entry.identity.tenant) {
            return;
        }
        let text = match why {
            Denial::NoContext => self.log_no_context(client, gpu, bytes),
            Denial::Unmappable => self.log_unmappable(client, gpu, bytes),
            Denial::EnvLimit => self.log_env_limit(client, gpu, bytes),
            Denial::NoRoom => self.log_no_room(client, gpu, bytes),
            _ => self.log_rule_limit(client, gpu, bytes, why),
        };
        let pid = self.identity(client).map_or(0, |identity| identity.pid);
        if let Some(text) = text.filter(|_| pid > 0) {
            self.refusals.retain(|refusal| refusal.pid != pid);
            if self.refusals.len() >= MAX_KEPT {
                self.refusals.pop_front();
            }
            self.refusals.push_back(Refusal { pid, text, at: now });
        }
    }

    /// Logs that neither the GPU nor host memory has room for the request.
    fn log_no_room(&self, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
        let demand = |attachments: &[crate::scheduler::AttachmentView]| -> u64 {
            attachments.iter().filter(|attachment| attachment.gpu == gpu).map(|attachment| attachment.demand).sum()
        };
        let views = self.machine.clients();
        let mut users: Vec<(u64, ClientId)> =
            views.iter().map(|view| (demand(&view.attachments), view.client)).collect();
        users.sort_unstable_by(|a, b| b.cmp(a));
        let named = users.iter().filter(|(demand, _)| *demand > 0).take(MAX_NAMED).filter_map(|(demand, client)| {
            let identity = self.identity(*client)?;
            Some(format!("{} (pid {}) {}", identity.label(), identity.pid, units::size(*demand)))
        });
        let named: Vec<String> = named.collect();
        let identity = self.identity(client)?;
        let capacity = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
        let (host, promised) = self.machine.host();
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
            gpu = self.label(gpu),
            bytes,
            capacity,
            host,
            host_promised = promised,
            "{text}"
        );
        Some(text)
    }

    /// Logs that the GPU has no room for another context, because of other programs' memory.
    fn log_no_context(&self, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
        let identity = self.identity(client)?;
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
            gpu = self.label(gpu),
            bytes,
            "{text}"
        );
        Some(text)
    }

    /// Logs that the client has allocated more memory than the driver can map.
    fn log_unmappable(&self, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
        let identity = self.identity(client)?;
        let capacity = self.machine.gpu(gpu).map_or(0, |view| view.capacity);
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
            gpu = self.label(gpu),
            bytes,
            "{text}"
        );
        Some(text)
    }

    /// Logs that a rule limits the client's group.
    fn log_rule_limit(&self, client: ClientId, gpu: GpuId, bytes: u64, why: Denial) -> Option<String> {
        let (Some(entry), Some(rule)) = (self.clients.get(&client), self.rule_of(client)) else { return None };
        let everywhere = why == Denial::SwapMax;
        let (key, max) = match why {
            Denial::SwapMax => ("swap-max", rule.limits.swap_max.unwrap_or(0)),
            _ => ("memory-max", self.machine.memory_max(client, gpu).unwrap_or(0)),
        };
        let group = self.clients.iter().filter(|(id, other)| **id != client && other.rule == entry.rule);
        let views = group.filter_map(|(id, _)| self.machine.client(*id)).flat_map(|view| view.attachments);
        let used = views.filter(|attachment| everywhere || attachment.gpu == gpu).map(|attachment| attachment.demand);
        let used = used.fold(0, u64::saturating_add);
        // Contexts use no host memory.
        let contexts = match everywhere {
            true => String::new(),
            false => {
                format!(" and the group's contexts {}", units::size(self.machine.contexts_of_group(client, gpu)))
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
            gpu = self.label(gpu),
            bytes,
            rule = rule.to_string(),
            memory_max = max,
            "{text}"
        );
        Some(text)
    }

    /// Logs the limits that a client's own environment sets.
    fn log_env_limit(&self, client: ClientId, gpu: GpuId, bytes: u64) -> Option<String> {
        let entry = self.clients.get(&client)?;
        let limits = entry.env_limits.in_words(self.rule_of(client));
        let text = format!(
            "{} is refused memory: it requests {} in total, and its context uses {}. Its environment sets {limits}",
            entry.identity.label(),
            units::size(bytes),
            units::size(self.machine.counted_context(client, gpu))
        );
        log_client!(
            info,
            name: "memory-refused",
            client,
            &entry.identity,
            gpu = self.label(gpu),
            bytes,
            "{text}"
        );
        Some(text)
    }

    /// Logs that the driver could not map a client's memory after a grant. Only the first of consecutive
    /// failures is logged.
    pub(super) fn log_mapping_failure(&self, client: ClientId, gpu: GpuId, bytes: u64, failures: u32, now: Time) {
        if failures > 1 || !self.may_log("mapping-failed", client, gpu, now) {
            return;
        }
        let Some(identity) = self.identity(client) else { return };
        log_client!(
            warn,
            name: "mapping-failed",
            client,
            identity,
            gpu = self.label(gpu),
            bytes,
            "the driver could not map {} of {}, although the memory should be free. Evicting memory of other programs",
            units::size(bytes),
            identity.label()
        );
    }
}
