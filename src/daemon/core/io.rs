//! [`Io`]: the timer, the NVML thread's queue, and the signals and values that other tasks follow.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Notify, watch};

use super::gpus::Present;
use super::model::{ClientPids, GpuStates, Holders, Model};
use crate::daemon::gpu::nvml::Query;
use crate::scheduler::{Settings, Time};
use crate::sys::clock::{self, Timer};

/// Clients count as idle if no client has sent a message for this long. While they are idle, memory is
/// sampled less often.
pub const SAMPLE_QUIET: Duration = Duration::from_secs(2);
/// Minimum time between two ticks, so that a bug in the scheduler cannot use up a whole CPU.
const MIN_TICK: Duration = Duration::from_micros(100);

/// Wakes the periodic jobs.
#[derive(Debug, Default)]
pub struct Signals {
    /// A client's process is stopped. The job then checks the process until it continues.
    pub stopped: Notify,
    /// Changes with each event that the scheduler has handled.
    pub events: watch::Sender<()>,
    /// A new GPU was found. Limits on that GPU must be sent to the clients.
    pub limits: Notify,
    /// A client sent a message after at least [`SAMPLE_QUIET`] without messages.
    pub activity: Notify,
    pub last_activity: Cell<Time>,
}

/// The values that other threads follow.
#[derive(Debug, Clone, PartialEq)]
pub struct Published {
    pub settings: Settings,
    /// Sentences about why the scheduler does not work as configured.
    pub problems: Vec<String>,
    pub holders: Holders,
    pub clients: ClientPids,
    pub states: GpuStates,
    /// The GPUs that programs can use.
    pub gpus: Present,
    /// True if any program has a GPU attached.
    pub attached: bool,
}

impl Published {
    /// The values before the first event.
    pub fn new(settings: Settings) -> Self {
        let (problems, holders, clients, states, gpus, attached) = Default::default();
        Self { settings, problems, holders, clients, states, gpus, attached }
    }
}

/// Why the scheduler does not work as configured.
#[derive(Debug, Default)]
pub struct Problems {
    /// The error found in the configuration files when they were last read, and the configuration that is
    /// in effect instead.
    pub configuration: Option<String>,
    /// Why metrics are not served on the configured address.
    pub metrics: Option<String>,
    /// Why the GPU time that programs used earlier is unknown.
    pub usage: Option<String>,
}

pub struct Io {
    /// Expires at the scheduler's next deadline.
    pub timer: Rc<Timer>,
    /// The deadline that the timer is set to.
    armed: Option<Time>,
    /// Time of the scheduler's last tick.
    ticked: Time,
    pub(super) nvml: Option<std::sync::mpsc::Sender<Query>>,
    pub signals: Rc<Signals>,
    pub(super) problems: Problems,
    pub published: watch::Sender<Published>,
}

impl Io {
    /// `settings`: the settings in effect.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub(super) fn new(settings: Settings) -> std::io::Result<Self> {
        Ok(Self {
            timer: Rc::new(Timer::new()?),
            armed: None,
            ticked: Time::ZERO,
            nvml: None,
            signals: Rc::default(),
            problems: Problems::default(),
            published: watch::Sender::new(Published::new(settings)),
        })
    }

    pub fn query_nvml(&self, query: Query) {
        if let Some(nvml) = &self.nvml {
            let _ = nvml.send(query);
        }
    }

    /// Records that the timer has expired.
    pub(super) fn ticked(&mut self) {
        self.armed = None;
        self.ticked = clock::now();
    }

    /// Sets the timer to the scheduler's next deadline.
    pub(super) fn arm(&mut self, deadline: Option<Time>) {
        let deadline = deadline.map(|at| at.max(self.ticked + MIN_TICK));
        if deadline != self.armed {
            self.timer.set(deadline);
            self.armed = deadline;
        }
    }

    /// Handles the activity of a client.
    pub(super) fn mark_active(&self) {
        let now = clock::now();
        let before = self.signals.last_activity.replace(now);
        if now.saturating_sub(before) > SAMPLE_QUIET {
            self.signals.activity.notify_one();
        }
    }

    /// Publishes values if `change` has changed any, and so returns true: see [`replace`].
    pub fn publish(&self, change: impl FnOnce(&mut Published) -> bool) {
        self.published.send_if_modified(change);
    }

    /// Publishes the problems after a change.
    pub(super) fn publish_problems(&self, model: &Model) {
        let Problems { configuration, metrics, usage } = &self.problems;
        let configuration = configuration.as_ref();
        let configuration = configuration.map(|error| format!("the configuration has an error: {error}"));
        let all = [configuration, metrics.clone(), usage.clone(), model.driver_problem()];
        self.publish(|published| replace(&mut published.problems, all.into_iter().flatten().collect()));
    }
}

/// Replaces a value. Returns whether it has changed.
pub fn replace<T: PartialEq>(value: &mut T, now: T) -> bool {
    let is_new = *value != now;
    *value = now;
    is_new
}
