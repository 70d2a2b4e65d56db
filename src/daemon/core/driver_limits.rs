//! The memory limits that the driver is to enforce, computed from rules and clients.

use std::collections::BTreeMap;

use tokio::sync::oneshot;

use super::state::{Client, Core};
use crate::config::rules::Instance;
use crate::daemon::gpu::driver_limits::{self, Program, Wanted};
use crate::daemon::gpu::nvml::Query;
use crate::scheduler::{Amount, AttachmentView, ClientId};

impl Core {
    /// Has the NVML thread set the limits, if they have changed.
    pub fn update_driver_limits(&mut self) {
        let wanted = if self.config.driver_limits { self.wanted_driver_limits() } else { Wanted::new() };
        if self.driver_limits.as_ref() != Some(&wanted) {
            self.query_nvml(Query::Limits(wanted.clone()));
            self.driver_limits = Some(wanted);
        }
    }

    /// Has all limits removed from the driver. The receiver is notified when that is done.
    pub fn lift_driver_limits(&self) -> oneshot::Receiver<()> {
        let (done, lifted) = oneshot::channel();
        self.query_nvml(Query::Lift(done));
        lifted
    }

    fn wanted_driver_limits(&self) -> Wanted {
        let margin = |total| self.config.settings.context_on(total);
        let gpus = self.gpus.iter().filter(|(_, gpu)| gpu.index.is_some());
        let gpus = gpus.map(|(id, gpu)| (*id, driver_limits::Gpu { total: gpu.total, margin: margin(gpu.total) }));
        let mut attachments: BTreeMap<ClientId, Vec<AttachmentView>> =
            self.machine.clients().into_iter().map(|view| (view.client, view.attachments)).collect();
        let programs = self.clients.iter().filter(|(_, entry)| entry.is_program).map(|(id, entry)| {
            let has = attachments
                .remove(id)
                .unwrap_or_default()
                .into_iter()
                .map(|attachment| (attachment.gpu, self.reach(*id, &attachment)));
            Program { cgroup: &entry.identity.cgroup, rule: self.limits(entry), has: has.collect() }
        });
        let programs: Vec<Program<'_>> = programs.collect();
        driver_limits::wanted(&gpus.collect(), &programs)
    }

    /// The group of a client, and the memory that its rule allows it.
    fn limits<'a>(&'a self, entry: &'a Client) -> Option<(&'a Instance, Amount)> {
        let instance = entry.rule.as_ref()?;
        Some((instance, self.config.rules.get(instance.rule)?.limits.memory_max))
    }

    /// The most bytes that a client can have on a GPU: its committed memory, and its context.
    fn reach(&self, client: ClientId, attachment: &AttachmentView) -> u64 {
        let gpu = self.gpus.get(&attachment.gpu);
        let measured = gpu.and_then(|gpu| gpu.accounting.contexts().get(&client).copied());
        let context = measured.unwrap_or_else(|| self.config.settings.context_on(gpu.map_or(0, |gpu| gpu.total)));
        attachment.committed.max(attachment.mapped).saturating_add(context)
    }
}
