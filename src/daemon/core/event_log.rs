//! Log lines about events and commands.

use nvshare_wire::client::StuckReason;
use tracing::debug;

use super::log::{Log, log_client};
use super::model::{Model, Use};
use crate::bus;
use crate::scheduler::{Command, Event, Time, WaitReason};

impl Log {
    /// Logs an event before the scheduler handles it.
    pub(super) fn log_event(&self, model: &Model, event: &Event) {
        let Event::Stuck { client, gpus, reason } = event else {
            if let Event::Released { .. } = event {
                debug!("{event:?}");
            }
            return;
        };
        let (why, is_known): (_, fn(&Use) -> bool) = match reason {
            StuckReason::UntrackedWork => ("it submits work that nvshare cannot track", |shown| shown.untracked_work),
            StuckReason::OtherDevice => (bus::OTHER_DEVICE, |shown| shown.other_device),
            _ => return debug!("{event:?}"),
        };
        let Some(entry) = model.clients.get(client) else { return };
        if gpus.iter().filter_map(|gpu| entry.gpus.get(gpu)).all(|stats| is_known(&stats.shown)) {
            return;
        }
        let (identity, label) = (&entry.identity, entry.identity.label());
        log_client!(info, name: "untracked-work", client, identity, gpu = model.labels(gpus), "keeping the memory of \
            {label} on the GPU, because {why}");
    }

    /// Logs a command.
    pub(super) fn log_command(&mut self, model: &Model, command: &Command, now: Time) {
        debug!("{command:?}");
        match command {
            Command::Denied { client, gpu, bytes, why } => {
                self.note_refusal(model, (*client, *gpu, *bytes), *why, now);
            }
            Command::MappingFailed { client, gpu, bytes, failures } => {
                self.log_mapping_failure(model, (*client, *gpu, *bytes), *failures, now);
            }
            Command::Undrainable { client, gpus } => {
                let Some(identity) = model.identity(*client) else { return };
                let label = identity.label();
                log_client!(warn, name: "undrainable", client, identity, gpu = model.labels(gpus), "cannot interrupt the \
                    work of {label}: other programs run at the same time");
            }
            Command::EvictionBlocked { client, gpu, why } => {
                let Some(identity) = model.identity(*client) else { return };
                if model.is_attached(*client, *gpu) && self.may_log("eviction-blocked", *client, *gpu, now) {
                    let (label, why) = (identity.label(), bus::eviction_block_name(*why));
                    log_client!(warn, name: "eviction-blocked", client, identity, gpu = model.label(*gpu), "cannot evict \
                        the memory of {label}: {why}. Evicting the memory of other programs instead");
                }
            }
            Command::Waiting { client, gpus, why: WaitReason::Context } => {
                let Some(identity) = model.identity(*client) else { return };
                let label = identity.label();
                log_client!(info, name: "context-waits", client, identity, gpu = model.labels(gpus), "delaying the CUDA \
                    context of {label}, because another program's memory would no longer fit");
            }
            _ => {}
        }
    }
}
