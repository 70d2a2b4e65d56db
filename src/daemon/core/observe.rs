//! [`Observe`]: everything that the daemon logs, counts, records and accounts. It reads the model. Of
//! its results, only the time with the lock affects decisions: `hours` counts it.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::io;
use std::sync::Arc;

use super::counts::{Counts, Workload};
use super::log::Log;
use super::model::Model;
use super::pressure::Pressure;
use super::recording;
use super::unproven::UnprovenPrograms;
use super::usage::Usage;
use crate::daemon::gpu::nvml::DriverVersions;
use crate::daemon::transport::session::ClientAction;
use crate::identity::Identity;
use crate::recorder::Recorder;
use crate::scheduler::{ClientId, Command, Event, GpuId, Time};
use crate::sys::clock;

/// Maximum number of ended clients whose names are kept for timelines and bundles.
const MAX_ENDED: usize = 1024;

pub struct Observe {
    pub(super) recorder: Recorder,
    pub(super) log: Log,
    pub(super) counts: Counts,
    pub(super) pressure: Pressure,
    pub usage: Usage,
    pub(super) unproven: UnprovenPrograms,
    /// Identities of the clients that ended most recently. The recording contains only client IDs.
    pub(super) ended: VecDeque<(ClientId, Arc<Identity>)>,
}

impl Observe {
    /// `record`: the file for the scheduler's recording.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn new(model: &Model, record: Option<File>) -> io::Result<Self> {
        let mut recorder = Recorder::new(&model.machine);
        if let Some(file) = record {
            let header = recording::header(clock::now(), DriverVersions::default(), true);
            recorder.write_to(file, &header, &model.machine)?;
        }
        Ok(Self {
            recorder,
            log: Log::default(),
            counts: Counts::default(),
            pressure: Pressure::default(),
            usage: Usage::default(),
            unproven: UnprovenPrograms::default(),
            ended: VecDeque::new(),
        })
    }

    /// Counts what a client reported before it ended.
    pub fn note_last(&mut self, client: ClientId, action: &ClientAction) {
        if let ClientAction::Memory { gpu, counts, .. } = action {
            self.counts.report(client, *gpu, *counts);
        }
    }

    /// Logs and counts an event before the scheduler handles it.
    pub fn note_event(&mut self, model: &Model, event: &Event, now: Time) {
        self.log.log_event(model, event);
        self.log.forget(event);
        self.counts.count_event(model, event, now);
    }

    /// Logs and counts a command of the scheduler.
    pub fn note_command(&mut self, model: &Model, command: &Command, now: Time) {
        self.log.log_command(model, command, now);
        self.counts.count_command(model, command, now);
    }

    /// Records the usage of all clients up to now. Returns each client's time with the lock, in seconds.
    pub fn record_usage(&mut self, model: &Model, now: Time) -> Vec<(ClientId, f64)> {
        let all: Vec<(ClientId, GpuId)> = self.counts.clients().map(|(client, gpu, _)| (client, gpu)).collect();
        let record = |of: (ClientId, GpuId)| (of.0, self.usage.record(model, &mut self.counts, of, of.1, now));
        all.into_iter().map(record).collect()
    }

    /// Like [`Self::record_usage`], for one client.
    pub fn record_usage_of(&mut self, model: &Model, client: ClientId, now: Time) -> Vec<(ClientId, f64)> {
        let gpus = self.counts.gpus_of(client);
        let record = |gpu| (client, self.usage.record(model, &mut self.counts, (client, gpu), gpu, now));
        gpus.into_iter().map(record).collect()
    }

    /// Handles the end of a client.
    pub fn end(&mut self, model: &Model, client: ClientId, identity: &Arc<Identity>, now: Time) {
        if self.ended.len() >= MAX_ENDED {
            self.ended.pop_front();
        }
        self.ended.push_back((client, identity.clone()));
        self.counts.end(client, &Workload::of(identity), now);
        let living =
            || model.clients.values().map(|other| Workload::of(&other.identity)).collect::<BTreeSet<Workload>>();
        self.counts.forget_ended(now, living);
    }

    /// Handles a client's move between GPUs. Returns the client's time with the lock on the old GPU, in
    /// seconds.
    pub fn note_move(&mut self, model: &Model, client: ClientId, from: GpuId, to: GpuId, now: Time) -> f64 {
        let lock_seconds = self.usage.record(model, &mut self.counts, (client, from), to, now);
        let turns = model.machine.turns(client, to, now).unwrap_or_default();
        self.counts.moved(client, from, to, &turns, now);
        lock_seconds
    }

    /// Forgets a GPU.
    pub fn forget(&mut self, gpu: GpuId) {
        self.counts.forget(gpu);
    }
}
