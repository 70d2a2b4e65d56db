//! NVML: the existing GPUs and MIG slices, and their memory in use. Runs in a separate thread: calls
//! can take long, and the daemon must start without waiting for them.
//!
//! Hosts without NVML work too. On such hosts, GPUs are known only from the clients that use them.
//! While NVML is open, it uses the driver. The driver then cannot be unloaded, and GPUs cannot be
//! reset. So NVML is open only while it is needed.
//!
//! - `schedule`: decides when NVML is opened and closed.
//! - `driver`: state of the driver that files show without NVML.
//! - `devices`: calls of NVML. `fabric`: a call that the wrapper lacks.

mod devices;
mod driver;
mod fabric;
mod schedule;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{EventSet, Nvml};
use nvshare_wire::client::GpuKind;
use self_cell::self_cell;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::mpsc::error::SendError;
use tokio::sync::oneshot;
use tracing::debug;

use crate::gpu_faults::{Faults, nvml as nvml_faults};
use crate::scheduler::{GpuId, Time};
use crate::sys::clock;
use devices::Devices;
use driver::Driver;
use schedule::{Due, Schedule};

/// A query from the scheduling loop.
#[derive(Debug)]
pub enum Query {
    /// Requests the existing GPUs and their memory in use. If NVML is released, ends the release.
    Scan,
    /// Requests the memory in use.
    Sample,
    /// A client attaches a GPU. Requests the memory in use. If NVML is released, ends the release.
    Attach,
    /// Closes NVML, and keeps it closed for this time or until a client attaches.
    Release(Duration, oneshot::Sender<()>),
}

/// Queries that have not been answered yet. Queries that arrive during a slow call are merged.
#[derive(Debug, Default)]
struct Asked {
    scan: bool,
    sample: bool,
}

impl Asked {
    fn is_any(&self) -> bool {
        self.scan || self.sample
    }
}

/// Interval of the checks of GPUs for errors, while queries arrive. After a fault event from the
/// driver, the next query triggers a check immediately.
const FAILING_PERIOD: Duration = Duration::from_secs(10);

/// A report to the scheduling loop.
#[derive(Debug)]
pub enum Report {
    Gpus(Listing),
    Used(Vec<Sample>),
    Driver(DriverVersions),
    /// NVML's new state.
    State(NvmlState),
}

/// NVML's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NvmlState {
    /// NVML is open, or will be opened for the next query.
    Usable,
    /// An administrator released the driver.
    Released,
    /// NVML cannot be used, because of this error.
    Failed(String),
}

/// The GPUs that exist.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub gpus: Vec<GpuDescription>,
    /// GPUs with errors, and the errors. For example, a GPU needs a reset, or the driver has
    /// reported a fault of the GPU.
    pub failing: BTreeMap<GpuId, String>,
    /// True if all GPUs that are not listed are gone. If false, NVML may have failed to list some.
    pub is_complete: bool,
}

/// Versions of the NVIDIA driver and of NVML. `None` if NVML does not report them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DriverVersions {
    pub driver: Option<String>,
    pub nvml: Option<String>,
}

/// The memory in use on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    pub gpu: GpuId,
    /// Time when sampling began.
    pub begun: Time,
    /// True if the memory in use did not change during the sample. The sample's figures are then
    /// consistent.
    pub steady: bool,
    /// Total bytes in use, including the driver's own memory.
    pub used: u64,
    /// The part of `used` that the driver always uses.
    pub reserved: u64,
    /// Bytes in use by processes that use the GPU for graphics only. They are not in `processes`.
    pub graphics: u64,
    /// Bytes in use by each process that uses CUDA, by PID. `None` if NVML has no such figures, or reports PIDs of another
    /// PID namespace.
    pub processes: Option<BTreeMap<u32, u64>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuDescription {
    pub gpu: GpuId,
    pub kind: GpuKind,
    pub name: String,
    pub total: u64,
    /// NVML's index of the GPU. A slice has the index of its physical GPU.
    pub index: u32,
    /// Minor number of the GPU's device file. A slice has the number of its physical GPU.
    pub minor: Option<u32>,
    /// Compute capability.
    pub capability: Option<(i32, i32)>,
    /// Achievable rate of copies over the PCIe link, in bytes per second. Computed for the fastest link
    /// that both ends support.
    pub link: Option<u64>,
    /// A display is attached, or is initialised without a monitor.
    pub has_display: bool,
    /// A fabric connects the GPU to GPUs of other hosts.
    pub has_fabric: bool,
}

/// Starts the thread. The thread's first reports are the GPUs and their memory in use, or the failure
/// of NVML.
pub fn start(reports: UnboundedSender<Report>) -> mpsc::Sender<Query> {
    let (ask, queries) = mpsc::channel();
    let supervisor = Supervisor::new(reports.clone());
    // After the scheduling loop has ended, the thread cannot send its next report and ends.
    let started = thread::Builder::new().name("nvml".into()).spawn(move || drop(supervisor.serve(&queries)));
    if let Err(e) = started {
        let _ = reports.send(Report::State(NvmlState::Failed(format!("cannot start its thread: {e}"))));
    }
    ask
}

type Events<'nvml> = Option<EventSet<'nvml>>;

self_cell! {
    /// An open NVML and, if the driver supports events, a subscription to the driver's events about
    /// its GPUs.
    struct Opened {
        owner: Nvml,
        #[covariant]
        dependent: Events,
    }
}

/// The thread's state.
struct Supervisor {
    reports: UnboundedSender<Report>,
    nvml: Option<Opened>,
    schedule: Schedule,
    driver: Driver,
    asked: Asked,
    /// The GPUs in the last report.
    listed: BTreeSet<GpuId>,
    /// GPUs with errors, and the time of the last check.
    failing: BTreeMap<GpuId, String>,
    asked_failing: Option<Time>,
    faults: Faults,
    /// The last reported state.
    state: NvmlState,
}

type Sent = Result<(), SendError<Report>>;

impl Supervisor {
    fn new(reports: UnboundedSender<Report>) -> Self {
        let asked = Asked { scan: true, sample: true };
        Self {
            reports,
            nvml: None,
            schedule: Schedule::new(clock::now()),
            driver: Driver::new(),
            asked,
            listed: BTreeSet::new(),
            failing: BTreeMap::new(),
            asked_failing: None,
            faults: Faults::default(),
            state: NvmlState::Usable,
        }
    }

    /// Runs until the scheduling loop ends.
    fn serve(mut self, queries: &mpsc::Receiver<Query>) -> Sent {
        loop {
            while let Some(due) = self.schedule.due(clock::now()) {
                self.carry_out(due)?;
            }
            self.answer()?;
            let wait = self.schedule.next().saturating_sub(clock::now());
            match queries.recv_timeout(wait) {
                Ok(first) => {
                    self.take(first)?;
                    queries.try_iter().try_for_each(|next| self.take(next))?;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    fn take(&mut self, query: Query) -> Sent {
        let now = clock::now();
        match query {
            Query::Scan => {
                (self.asked.scan, self.asked.sample) = (true, true);
                self.attach(now)?;
            }
            Query::Sample => self.asked.sample = true,
            Query::Attach => {
                self.asked.sample = true;
                self.attach(now)?;
            }
            Query::Release(lasts, done) => {
                self.close();
                self.schedule.release(now, lasts);
                self.say(NvmlState::Released)?;
                let _ = done.send(()); // the receiver may have been dropped
                return Ok(());
            }
        }
        self.schedule.ask(now);
        Ok(())
    }

    fn attach(&mut self, now: Time) -> Sent {
        if self.schedule.attach(now) { self.say(NvmlState::Usable) } else { Ok(()) }
    }

    fn carry_out(&mut self, due: Due) -> Sent {
        let now = clock::now();
        match due {
            Due::Look => {
                let has_changed = self.driver.has_changed();
                if self.driver.is_unloaded() {
                    self.close();
                    self.schedule.closed();
                    return self.driver_is_gone();
                }
                if has_changed {
                    // NVML finds new GPUs only during its initialisation.
                    debug!("reopening NVML: the driver or its GPUs have changed");
                    self.close();
                    self.schedule.closed();
                    self.schedule.need(now);
                }
                self.asked.scan |= has_changed || self.nvml.is_some();
            }
            Due::Open => self.open()?,
            Due::Close => {
                debug!("closing NVML: no program uses a GPU");
                self.close();
                self.schedule.closed();
            }
            Due::ReleaseEnds => self.say(NvmlState::Usable)?,
        }
        Ok(())
    }

    fn open(&mut self) -> Sent {
        if self.driver.is_unloaded() {
            self.schedule.failed(clock::now());
            return self.driver_is_gone();
        }
        match Nvml::init() {
            Ok(nvml) => {
                self.nvml = Some(Opened::new(nvml, watched));
                self.schedule.opened(clock::now());
                self.asked.scan = true;
                Ok(())
            }
            Err(e) => {
                self.schedule.failed(clock::now());
                match e {
                    NvmlError::DriverNotLoaded => self.driver_is_gone(),
                    e => self.fails(&e),
                }
            }
        }
    }

    fn close(&mut self) {
        if let Some(Err(e)) = self.nvml.take().map(|opened| opened.into_owner().shutdown()) {
            debug!("cannot shut down NVML: {e}");
        }
    }

    /// Reports that no GPUs exist, because the driver is not loaded.
    fn driver_is_gone(&mut self) -> Sent {
        self.faults.only_there(&BTreeSet::new());
        if !std::mem::take(&mut self.listed).is_empty() {
            self.reports.send(Report::Gpus(Listing { is_complete: true, ..Listing::default() }))?;
        }
        self.fails(&NvmlError::DriverNotLoaded)
    }

    fn fails(&mut self, why: &NvmlError) -> Sent {
        self.asked = Asked::default();
        match self.schedule.is_released() {
            true => Ok(()),
            // Removes a prefix that a Rust crate adds and that means nothing to users.
            false => {
                self.say(NvmlState::Failed(why.to_string().trim_start_matches("a libloading error occurred: ").into()))
            }
        }
    }

    fn say(&mut self, state: NvmlState) -> Sent {
        if self.state != state {
            self.state = state.clone();
            self.reports.send(Report::State(state))?;
        }
        Ok(())
    }

    /// Answers pending queries, the slowest last. While NVML is closed, queries are dropped.
    fn answer(&mut self) -> Sent {
        let asked = std::mem::take(&mut self.asked);
        let Some(opened) = self.nvml.as_ref().filter(|_| asked.is_any()) else { return Ok(()) };
        let nvml = opened.borrow_owner();
        let has_failed = opened.borrow_dependent().as_ref().is_some_and(|events| take_faults(events, &mut self.faults));
        let mut devices = Devices::list(nvml);
        if let Some(e) = devices.broken() {
            self.close();
            self.schedule.failed(clock::now());
            return self.fails(&e);
        }
        let reports = &self.reports;
        let listed: BTreeSet<GpuId> = devices.found.iter().map(|found| found.gpu).collect();
        let (now, is_known) = (clock::now(), self.failing.clone());
        if asked.scan || has_failed || self.asked_failing.is_none_or(|at| now >= at + FAILING_PERIOD) {
            self.asked_failing = Some(now);
            self.failing = devices.failing(nvml, &mut self.faults);
        }
        if asked.scan || listed != self.listed || self.failing != is_known {
            let gpus = devices.describe();
            let (failing, is_complete) = (self.failing.clone(), devices.error.is_none());
            if is_complete {
                self.listed.clear();
            }
            self.listed.extend(listed);
            reports.send(Report::Gpus(Listing { gpus, failing, is_complete }))?;
        }
        if asked.sample {
            reports.send(Report::Used(devices.sample()))?;
        }
        if asked.scan {
            let (driver, nvml) = (nvml.sys_driver_version().ok(), nvml.sys_nvml_version().ok());
            reports.send(Report::Driver(DriverVersions { driver, nvml }))?;
        }
        self.schedule.works();
        self.say(NvmlState::Usable)
    }
}

/// Subscribes to the driver's fault events for all GPUs, if the driver supports them.
fn watched(nvml: &Nvml) -> Events<'_> {
    let devices = (0..nvml.device_count().unwrap_or(0)).filter_map(|index| nvml.device_by_index(index).ok());
    nvml_faults::watch(nvml, devices.collect()).0
}

/// Records the faults that the driver has reported. Returns true if there is a new fault.
fn take_faults(events: &EventSet<'_>, faults: &mut Faults) -> bool {
    let mut has_failed = false;
    // If no event is pending, `wait` fails with a timeout.
    while let Ok(told) = events.wait(0) {
        let (Some(event), Ok(uuid)) = (nvml_faults::event(&told), told.device.uuid()) else { continue };
        let is_fault = faults.happened(&uuid, event, &BTreeSet::new(), Instant::now());
        debug!("{uuid}: {event:?}{}", if is_fault { "" } else { ", an error of a program" });
        has_failed |= is_fault;
    }
    has_failed
}
