//! The current list of devices. `devices` computes the list from the configuration and the reports
//! of NVML, the scheduler and CDI. This module publishes each change of the list, and logs changes
//! of a GPU's health.

use std::collections::{BTreeMap, BTreeSet};
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

/// Time that the first list waits for missing reports. If the driver must wake its GPUs, NVML's
/// report takes seconds per GPU.
const START: Duration = Duration::from_secs(30);

/// Delay after which a new GPU that no CDI file names becomes unhealthy. The container `cdi` learns
/// of a GPU at the same time as the plugin, and writes its file one or two seconds later. Without
/// this delay, each start of a node would begin with a warning, a taint and an unhealthy device.
const NAMING: Duration = Duration::from_secs(10);

/// The senders of the list's two parts. Both parts come from the same list, so no GPU is in both.
#[derive(Debug)]
pub struct Offered {
    pub by_plugin: watch::Sender<Arc<Devices>>,
    pub by_dra: watch::Sender<Arc<Devices>>,
}

/// Keeps the list up to date until no sender of reports remains. Notifies `complete` when the first
/// list is published.
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
        let unnamed = known.unnamed_until;
        tokio::select! {
            report = reports.recv() => match report {
                Some(report) => known.receive(report),
                None => return,
            },
            Ok(()) = config.changed() => {}
            () = sleep_until(unnamed.unwrap_or(late)), if unnamed.is_some() => {}
            () = sleep_until(late), if complete.is_some() => {
                warn!("NVML or the scheduler is slow to answer, listing the GPUs known so far");
                known.complete();
            }
        }
        let Some(devices) = known.devices(&config.borrow_and_update().clone(), Instant::now()) else { continue };
        if complete.is_some() && known.unnamed_until.is_some() {
            continue;
        }
        known.publish(devices, &offered);
        if let Some(complete) = complete.take() {
            let _ = complete.send(());
        }
    }
}

/// The newest reports, if any.
#[derive(Debug, Default)]
struct Known {
    nvml: Option<Option<Vec<NvmlGpu>>>,
    scheduler: Option<SchedulerView>,
    cdi: Option<CdiView>,
    /// The most recently published list.
    published: Devices,
    /// GPUs that a CDI file has named earlier. If no file names such a GPU any more, the GPU
    /// becomes unhealthy without a delay.
    named: BTreeSet<String>,
    /// New GPUs whose only problem is that no CDI file names them, each with the time at which this
    /// was first seen.
    unnamed: BTreeMap<String, Instant>,
    /// The time at which the earliest wait for a CDI file ends.
    unnamed_until: Option<Instant>,
}

impl Known {
    fn receive(&mut self, report: Report) {
        match report {
            Report::Nvml(gpus) => self.nvml = Some(gpus),
            Report::Scheduler(view) => self.scheduler = Some(view),
            Report::Cdi(view) => self.cdi = Some(view),
        }
    }

    /// Replaces missing reports.
    fn complete(&mut self) {
        self.nvml.get_or_insert(None);
        self.cdi.get_or_insert_default();
        self.scheduler.get_or_insert_with(|| SchedulerView {
            silence: Some("the scheduler has not answered yet".into()),
            ..SchedulerView::default()
        });
    }

    /// Returns the list to publish, or `None` until each kind of report has arrived. A GPU for
    /// which the CDI file may still be pending keeps its published state.
    fn devices(&mut self, config: &Config, now: Instant) -> Option<Devices> {
        let (nvml, scheduler, cdi) = (self.nvml.as_ref()?, self.scheduler.as_ref()?, self.cdi.as_ref()?);
        let mut devices = Devices::new(config, nvml.as_deref(), scheduler, cdi);
        self.unnamed_until = None;
        devices.gpus.retain_mut(|gpu| {
            if cdi.names(&config.cdi_kind, &gpu.uuid) {
                self.named.insert(gpu.uuid.clone());
            }
            let lacks_name = gpu.problem.is_some() && gpu.problem == cdi.unnamed(&config.cdi_kind, &gpu.uuid);
            if !lacks_name || self.named.contains(&gpu.uuid) {
                return true;
            }
            let until = *self.unnamed.entry(gpu.uuid.clone()).or_insert(now) + NAMING;
            if until <= now {
                return true;
            }
            self.unnamed_until = Some(self.unnamed_until.map_or(until, |other| other.min(until)));
            let before = self.published.gpus.iter().find(|before| before.uuid == gpu.uuid);
            gpu.problem = before.and_then(|before| before.problem.clone());
            before.is_some()
        });
        Some(devices)
    }

    fn publish(&mut self, new: Devices, offered: &Offered) {
        tell(&self.published, &new);
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
        self.published = new;
    }
}

/// Logs the differences.
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
        info!("{uuid} is no longer offered");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cdi::Paths;
    use crate::devices::SchedulerGpu;

    fn listed(uuids: &[&str]) -> SchedulerView {
        let gpu = |uuid: &&str| SchedulerGpu { uuid: (*uuid).into(), ..SchedulerGpu::default() };
        SchedulerView { gpus: uuids.iter().map(gpu).collect(), silence: None }
    }

    /// A node whose CDI file the test changes.
    struct Node {
        paths: Paths,
        known: Known,
    }

    impl Node {
        fn new(name: &str) -> Self {
            let directory = std::env::temp_dir().join(format!("nvshare-plugin-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&directory).expect("a directory");
            let paths = Paths { containerd: directory.join("config.toml"), directories: vec![directory] };
            let known = Known { nvml: Some(None), ..Known::default() };
            Self { paths, known }
        }

        fn name(&mut self, uuids: &[&str]) {
            let devices: Vec<String> = uuids.iter().map(|uuid| format!(r#"{{"name": "{uuid}"}}"#)).collect();
            let text =
                format!(r#"{{"cdiVersion": "0.5.0", "kind": "nvshare.com/gpu", "devices": [{}]}}"#, devices.join(","));
            std::fs::write(self.paths.directories[0].join("nvshare.json"), text).expect("a file");
            self.known.receive(Report::Cdi(CdiView::read(&self.paths)));
        }

        /// Publishes the list and returns each GPU's health.
        fn healthy(&mut self, now: Instant) -> Vec<(String, bool)> {
            let devices = self.known.devices(&Config::default(), now).expect("all have reported");
            self.known.published = devices.clone();
            devices.gpus.into_iter().map(|gpu| (gpu.uuid, gpu.problem.is_none())).collect()
        }
    }

    impl Drop for Node {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.paths.directories[0]);
        }
    }

    fn list<const N: usize>(gpus: [(&str, bool); N]) -> Vec<(String, bool)> {
        gpus.map(|(uuid, is_healthy)| (uuid.to_owned(), is_healthy)).into()
    }

    #[test]
    fn a_new_gpu_is_listed_once_cdi_names_it_or_after_a_timeout() {
        let (mut node, start) = (Node::new("naming"), Instant::now());
        node.known.receive(Report::Scheduler(listed(&["GPU-a"])));
        node.name(&[]);
        assert_eq!(node.healthy(start), []);
        node.name(&["GPU-a"]);
        assert_eq!(node.healthy(start), list([("GPU-a", true)]));

        node.known.receive(Report::Scheduler(listed(&["GPU-a", "GPU-b"])));
        assert_eq!(node.healthy(start), list([("GPU-a", true)]));
        assert_eq!(node.known.unnamed_until, Some(start + NAMING));
        assert_eq!(node.healthy(start + NAMING), list([("GPU-a", true), ("GPU-b", false)]));
        assert_eq!(node.known.unnamed_until, None);
        node.name(&["GPU-a", "GPU-b"]);
        assert_eq!(node.healthy(start + NAMING), list([("GPU-a", true), ("GPU-b", true)]));
    }

    #[test]
    fn a_gpu_becomes_unhealthy_when_no_cdi_file_names_it_anymore() {
        let (mut node, start) = (Node::new("named"), Instant::now());
        node.known.receive(Report::Scheduler(listed(&["GPU-a"])));
        node.name(&["GPU-a"]);
        assert_eq!(node.healthy(start), list([("GPU-a", true)]));
        node.name(&[]);
        assert_eq!(node.healthy(start), list([("GPU-a", false)]));
    }

    #[test]
    fn an_unhealthy_gpu_stays_unhealthy_until_a_cdi_file_names_it() {
        let (mut node, start) = (Node::new("fault"), Instant::now());
        node.known.receive(Report::Scheduler(SchedulerView { silence: Some("starts".into()), ..listed(&["GPU-a"]) }));
        node.name(&[]);
        assert_eq!(node.healthy(start), list([("GPU-a", false)]));
        node.known.receive(Report::Scheduler(listed(&["GPU-a"])));
        assert_eq!(node.healthy(start), list([("GPU-a", false)]));
        assert_eq!(node.known.published.gpus[0].problem.as_deref(), Some("starts"));
        node.name(&["GPU-a"]);
        assert_eq!(node.healthy(start), list([("GPU-a", true)]));
    }
}
