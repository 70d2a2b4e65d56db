//! The list of devices as it changes: reports of NVML, the scheduler and CDI and the configuration, combined by `devices`
//! and published when it differs. Changes of a GPU's health are logged here.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};

use crate::cdi::CdiView;
use crate::config::{Config, Offer};
use crate::devices::{Devices, Gpu, NvmlGpu, SchedulerView};
use crate::health::Report;

/// Time that the first list waits for both: a driver that must wake its GPUs takes seconds for each.
const START: Duration = Duration::from_secs(30);

/// Where the list is published. It is one list, so no GPU is in both parts.
#[derive(Debug)]
pub struct Offered {
    pub by_plugin: watch::Sender<Arc<Devices>>,
    pub by_dra: watch::Sender<Arc<Devices>>,
}

/// Keeps the list until no sender of reports remains. `complete` is notified of the first list.
pub async fn keep(
    mut reports: UnboundedReceiver<Report>,
    mut config: watch::Receiver<Arc<Config>>,
    offered: Offered,
    complete: oneshot::Sender<()>,
) {
    let mut known = Known::default();
    let mut complete = Some(complete);
    let late = Instant::now() + START;
    loop {
        let reported = tokio::select! {
            report = reports.recv() => report,
            Ok(()) = config.changed() => { known.publish(&config, &offered, complete.is_none()); continue },
            () = sleep_until(late), if complete.is_some() => {
                warn!("NVML or the scheduler takes long to answer: GPUs are listed as far as they are known");
                known.nvml.get_or_insert(None);
                known.cdi.get_or_insert_default();
                known.scheduler.get_or_insert_with(|| SchedulerView {
                    silence: Some("the scheduler has not answered yet".into()),
                    ..SchedulerView::default()
                });
                None
            }
        };
        match reported {
            Some(Report::Nvml(gpus)) => known.nvml = Some(gpus),
            Some(Report::Scheduler(view)) => known.scheduler = Some(view),
            Some(Report::Cdi(view)) => known.cdi = Some(view),
            None if complete.is_none() => return,
            None => {}
        }
        if known.nvml.is_some() && known.scheduler.is_some() && known.cdi.is_some() {
            known.publish(&config, &offered, true);
            if let Some(complete) = complete.take() {
                let _ = complete.send(());
            }
        }
    }
}

/// The newest reports, if there are any.
#[derive(Debug, Default)]
struct Known {
    nvml: Option<Option<Vec<NvmlGpu>>>,
    scheduler: Option<SchedulerView>,
    cdi: Option<CdiView>,
    /// What was published last.
    devices: Devices,
}

impl Known {
    fn publish(&mut self, config: &watch::Receiver<Arc<Config>>, offered: &Offered, is_whole: bool) {
        let (Some(nvml), Some(scheduler), Some(cdi), true) = (&self.nvml, &self.scheduler, &self.cdi, is_whole) else {
            return;
        };
        let new = Devices::new(&config.borrow().clone(), nvml.as_deref(), scheduler, cdi);
        tell(&self.devices, &new);
        for (offer, devices) in [(Offer::DevicePlugin, &offered.by_plugin), (Offer::Dra, &offered.by_dra)] {
            let new = new.offered_by(offer);
            devices.send_if_modified(|old| {
                let is_new = **old != new;
                if is_new {
                    *old = Arc::new(new);
                }
                is_new
            });
        }
        self.devices = new;
    }
}

/// Logs what is different.
fn tell(old: &Devices, new: &Devices) {
    let by_uuid = |devices: &Devices| -> BTreeMap<String, (u32, Option<String>)> {
        let entry = |gpu: &Gpu| (gpu.uuid.clone(), (gpu.slots, gpu.problem.clone()));
        devices.gpus.iter().map(entry).collect()
    };
    let (before, now) = (by_uuid(old), by_uuid(new));
    for (uuid, (slots, problem)) in &now {
        match (before.get(uuid), problem) {
            (Some((_, same)), _) if same == problem => {}
            (Some(_), None) => info!("{uuid} is healthy again"),
            (None, None) => info!("{uuid} has {slots} slots"),
            (_, Some(why)) => warn!("{uuid} is unhealthy: {why}"),
        }
    }
    for uuid in before.keys().filter(|uuid| !now.contains_key(*uuid)) {
        info!("{uuid} is not offered any more");
    }
}
