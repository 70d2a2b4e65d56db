//! [`Io`]: the timer, the NVML thread's queue, and the signals and values that other tasks follow.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Notify, watch};

use super::gpus::Present;
use super::model::Model;
use crate::daemon::gpu::nvml::Query;
use crate::scheduler::{Event, Settings, Time};
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
    /// Clients connected or left, or a lock changed hands. Updates systemd's status line.
    pub turns: Notify,
    /// Clients connected or left, or a lock changed hands. Updates the D-Bus property `Holders`.
    pub holders: Notify,
    /// The scheduler has handled an event. Triggers the signal `GpuChanged`.
    pub state: Notify,
    /// Clients connected or left. Triggers the signals on D-Bus.
    pub arrivals: Notify,
    /// A new GPU was found. Limits on that GPU must be sent to the clients.
    pub limits: Notify,
    /// A client sent a message after at least [`SAMPLE_QUIET`] without messages.
    pub activity: Notify,
    pub last_activity: Cell<Time>,
    /// Number of clients.
    pub clients: Cell<usize>,
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
    pub(super) settings: watch::Sender<Settings>,
    pub(super) problems: Problems,
    published_problems: watch::Sender<Vec<String>>,
    present: watch::Sender<Present>,
    attached: watch::Sender<bool>,
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
            settings: watch::Sender::new(settings),
            problems: Problems::default(),
            published_problems: watch::Sender::default(),
            present: watch::Sender::default(),
            attached: watch::Sender::default(),
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

    /// Wakes the jobs and followers that an event concerns.
    pub(super) fn note_event(&self, model: &Model, event: &Event) {
        use Event::{Connected, Detached, Disconnected, Held, Released, Requested};
        match event {
            Connected { .. } | Disconnected { .. } | Held { .. } | Released { .. } | Requested { .. } => {
                self.signals.turns.notify_one();
                self.signals.holders.notify_one();
            }
            Detached { .. } => self.publish_attached(model),
            _ => {}
        }
    }

    /// Handles a client that has connected or left.
    pub(super) fn clients_changed(&self, model: &Model) {
        self.signals.clients.set(model.clients.len());
        self.signals.arrivals.notify_one();
        self.mark_active();
    }

    /// Publishes the GPUs that programs can use. Called after a change of the model's GPUs.
    pub(super) fn publish_gpus(&self, model: &Model) {
        send_if_new(&self.present, model.present_gpus());
    }

    /// Publishes whether any program has a GPU attached.
    pub(super) fn publish_attached(&self, model: &Model) {
        send_if_new(&self.attached, model.has_attachments());
    }

    /// Publishes the problems after a change.
    pub(super) fn publish_problems(&self, model: &Model) {
        let Problems { configuration, metrics, usage } = &self.problems;
        let configuration = configuration.as_ref();
        let configuration = configuration.map(|error| format!("the configuration has an error: {error}"));
        let all = [configuration, metrics.clone(), usage.clone(), model.driver_problem()];
        if send_if_new(&self.published_problems, all.into_iter().flatten().collect()) {
            self.signals.turns.notify_one(); // updates the status line
        }
    }

    /// A receiver of the settings in effect.
    pub fn follow_settings(&self) -> watch::Receiver<Settings> {
        self.settings.subscribe()
    }

    pub fn follow_gpus(&self) -> watch::Receiver<Present> {
        self.present.subscribe()
    }

    /// A receiver whose value is true while any program has a GPU attached.
    pub fn follow_attached(&self) -> watch::Receiver<bool> {
        self.attached.subscribe()
    }

    /// Sentences about why the scheduler does not work as configured.
    pub fn problems(&self) -> watch::Receiver<Vec<String>> {
        self.published_problems.subscribe()
    }
}

/// Publishes a value if it differs from the present one.
pub fn send_if_new<T: PartialEq>(published: &watch::Sender<T>, now: T) -> bool {
    published.send_if_modified(|before| {
        let is_new = *before != now;
        *before = now;
        is_new
    })
}
