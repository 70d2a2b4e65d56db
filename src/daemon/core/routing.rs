//! [`Core`] passes events, requests and reports to the component that owns the matter, and carries out
//! what results from it. Each component changes only its own state, and reads the [`Model`]. Whatever
//! changes two components is in this file.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::time::Duration;

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{SchedulerMessage, SlotSet, Text};
use tracing::{debug, warn};

use super::containers::Containers;
use super::host::Host;
use super::io::{Io, Problems, replace};
use super::measure::{allowed, reporter, unmeasured};
use super::model::{Arrival, Gpu, Model, Wanted};
use super::moves;
use super::observe::Observe;
use super::placement::{self, NoGpu};
use super::{other_hosts, pressure, recording, settings, sleep};
use crate::config::Config;
use crate::config::rules::Rules;
use crate::daemon::checkpoint::{HelperAnswer, Operation, Outcome};
use crate::daemon::gpu::nvml::{GpuDescription, Listing, NvmlState, Query, Report, Sample};
use crate::daemon::swap_files;
use crate::daemon::systemd::fd_store::EntryName;
use crate::daemon::tenants::Slice;
use crate::daemon::transport::session::{ClientAction, PlacementQuery, Violation};
use crate::daemon::usage::HoursUsed;
use crate::identity::printable;
use crate::scheduler::{ClientId, Command, Event, GpuId, Settings, Time};
use crate::sys::clock;
use crate::sys::device_file::DeviceFile;
use crate::sys::foreign::Foreign;

/// Minimum time between two measurements of host memory for limit requests.
const HOST_PERIOD: Duration = Duration::from_millis(10);

/// The scheduler, and all the state that its decisions depend on.
pub struct Core {
    pub model: Model,
    pub io: Io,
    pub observe: Observe,
    pub host: Host,
    pub containers: Containers,
}

impl Core {
    /// Creates the state. `record`: the file for the scheduler's recording.
    ///
    /// # Errors
    /// The process has no file descriptors left, or the record cannot be written.
    pub fn new(config: Config, record: Option<File>) -> std::io::Result<Self> {
        let model = Model::new(config);
        Ok(Self {
            io: Io::new(model.machine.settings().clone())?,
            observe: Observe::new(&model, record)?,
            host: Host::default(),
            containers: Containers::default(),
            model,
        })
    }

    /// Handles the scheduler's deadline. The watchdog for systemd also calls `tick`, to prove that the loop
    /// works.
    pub fn tick(&mut self) {
        self.io.ticked();
        self.apply(Event::Tick);
    }

    /// Passes an event to the scheduler, and carries out the resulting commands. A command can yield
    /// another event, which is handled next.
    fn apply(&mut self, event: Event) {
        let now = clock::now();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.observe.note_event(&self.model, &event, now);
            self.model.note_event(&event, now);
            let reporter = reporter(&event);
            let concerned = pressure::client_of(&event);
            self.observe.recorder.begin(&self.model.machine, now, &event);
            let commands = self.model.machine.handle(now, event);
            self.observe.recorder.finish(&commands);
            self.observe.pressure.note(&self.model, concerned, &commands, now);
            let allowed = commands.iter().filter_map(allowed);
            reporter.into_iter().chain(allowed).for_each(|(client, gpu)| self.note_extent(client, gpu, now));
            for command in commands {
                events.extend(self.carry_out(&command, now));
            }
            self.observe.counts.count_held(&self.model, now);
        }
        self.model.forgotten().into_iter().for_each(|gpu| self.forget_gpu(gpu));
        self.io.signals.events.send_replace(());
        self.io.arm(self.model.machine.deadline());
    }

    fn apply_all(&mut self, events: impl IntoIterator<Item = Event>) {
        events.into_iter().for_each(|event| self.apply(event));
    }

    /// Carries out a command, usually by sending a message to its client. Returns the resulting event if
    /// the daemon can answer the command immediately.
    fn carry_out(&mut self, command: &Command, now: Time) -> Option<Event> {
        let Self { model, io, observe, host, .. } = self;
        observe.note_command(model, command, now);
        match command {
            Command::Probe { client } => {
                let probed = model.probe(*client);
                match probed {
                    Some(Event::Stopped { stopped: true, .. }) => io.signals.stopped.notify_one(),
                    _ => host.inspect(model, *client),
                }
                return probed;
            }
            Command::Undrainable { client, .. } => host.inspect(model, *client),
            Command::RestoreAllowed { client } => host.foreign.allow(model, *client),
            Command::Measure { gpu } => return self.remeasure(*gpu, now),
            Command::Placed { client, gpus } => placement::placed(model, *client, gpus),
            Command::Unplaced { client, why } => self.refuse_place(*client, &NoGpu::from(why)),
            Command::PrepareSleep { client, .. } => {
                if let Err(why) = host.sleep.prepare(model, *client, now) {
                    return Some(Event::SleepRefused { client: *client, why });
                }
            }
            Command::Checkpoint { client, operation, moves } => {
                return host.sleep.request(model, *client, *operation, moves::pairs_of(model, moves));
            }
            Command::Migrated { client, to, why, .. } => host.moves.ended(model, *client, *to, *why),
            Command::Moved { client, from, to } => self.moved(*client, *from, *to, now),
            Command::RoomReady { room, .. } => host.rooms.ready(model, *room),
            Command::RoomRefused { room, gpu, why } => host.rooms.refused(model, *room, *gpu, *why),
            Command::RoomEnded { room, gpu } => host.rooms.ended(model, *room, *gpu),
            _ => {}
        }
        self.model.tell(command);
        None
    }

    /// Requests a new measurement of a GPU for the scheduler. If NVML cannot measure the GPU, returns an
    /// event that accepts clients' reports as measured.
    fn remeasure(&mut self, gpu: GpuId, now: Time) -> Option<Event> {
        if self.model.gpus.get(&gpu).is_some_and(|entry| self.model.is_measured(entry)) {
            self.io.query_nvml(Query::Sample);
            return None;
        }
        self.observe.log.log_unverified();
        Some(unmeasured(gpu, now))
    }

    /// Handles the move of a client's memory to another GPU.
    fn moved(&mut self, client: ClientId, from: GpuId, to: GpuId, now: Time) {
        self.model.move_client(client, from, to);
        let lock_seconds = self.observe.note_move(&self.model, client, from, to, now);
        self.model.count_hours(vec![(client, lock_seconds)]);
        self.note_extent(client, to, now);
    }

    /// Records the present bounds on a client's mapped memory, and its usage.
    fn note_extent(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        self.observe.counts.note_bytes(&self.model, client, gpu, now);
        self.model.note_extent(client, gpu, now);
    }

    // ---- clients -------------------------------------------------------------------------------------------------

    /// Welcomes a client that has sent Hello.
    pub fn connect(&mut self, arrival: Arrival) -> ClientId {
        let absent = self.host.departures.on_return(&self.model, &arrival.identity);
        absent.into_iter().for_each(|client| self.disconnect(client, "is back"));
        let client = self.model.new_id();
        self.add(client, arrival, None);
        let placement = self.host.placements.take(&self.model, client);
        self.apply_all(placement);
        client
    }

    /// Takes over a client of an earlier daemon. The client keeps its ID.
    pub fn resume(&mut self, client: ClientId, arrival: Arrival, name: EntryName) {
        self.add(client, arrival, Some(name));
    }

    fn add(&mut self, client: ClientId, mut arrival: Arrival, stored_as: Option<EntryName>) {
        self.containers.name_arrival(&mut arrival);
        let (version, is_resumed) = (arrival.version, stored_as.is_some());
        self.observe.log.log_arrival(client, &arrival.identity, &arrival.library, is_resumed);
        self.observe.recorder.name(|| recording::process(client, &arrival.identity, is_resumed));
        let connected = self.model.add_client(client, arrival, stored_as);
        self.io.mark_active();
        if !is_resumed {
            self.model.send(client, SchedulerMessage::Welcome { version, client: client.0 });
        }
        self.apply(connected);
        self.apply_all(self.host.sleep.restore(&self.model, client));
        if let Some(group) = self.model.assign_group(client) {
            self.apply(Event::Groups { groups: BTreeMap::from([(client, Some(group))]) });
            self.apply(placement::labels(&self.model, [client]));
        }
        self.apply_all(placement::allowed(&self.model, [client]));
        self.model.announce_rules([client]);
    }

    /// Handles a client's report about the locks that an earlier daemon granted to the client.
    pub fn resume_locks(&mut self, client: ClientId, slots: SlotSet) {
        self.apply_all(self.model.held(client, slots));
    }

    /// Removes a client. `why` completes the log line "NAME ...".
    pub fn disconnect(&mut self, client: ClientId, why: &str) {
        let now = clock::now();
        let used = self.observe.record_usage_of(&self.model, client, now);
        self.model.count_hours(used);
        let Some(gone) = self.model.remove_client(client, now) else { return };
        self.observe.log.log_departure(client, &gone, why);
        self.io.mark_active();
        self.host.forget_client(client, &gone.identity.tenant);
        let restored = self.host.foreign.leave(&self.model, client);
        // Must precede `Event::Disconnected`, which frees the client's memory. Memory that other clients have
        // open stays in use.
        let adopters = self.host.sharing.leave(&self.model, client);
        self.report(adopters);
        self.apply(Event::Disconnected { client });
        restored.into_iter().for_each(|target| self.host.inspect(&self.model, target));
        self.observe.end(&self.model, client, &gone.identity, now);
        gone.gpus.keys().for_each(|gpu| self.forget_unlisted(*gpu));
    }

    /// Handles one packet from a client, and the file descriptors received with it. All packets reach the
    /// core here. Spends a token of the tenant, and returns true if the time slice may continue.
    /// `descriptors`: `None` for a client that has ended. Only the counters in its packets still matter.
    ///
    /// # Errors
    /// The client broke the protocol. The caller must then close the connection.
    pub fn receive(
        &mut self,
        client: ClientId,
        packet: &[u8],
        descriptors: Option<Vec<Foreign>>,
        slice: &Slice<'_>,
    ) -> Result<bool, Violation> {
        let handled = self.handle_packet(client, packet, descriptors);
        let may_continue = slice.spend(1);
        handled.map(|()| may_continue)
    }

    fn handle_packet(
        &mut self,
        client: ClientId,
        packet: &[u8],
        descriptors: Option<Vec<Foreign>>,
    ) -> Result<(), Violation> {
        let now = clock::now();
        let Some(entry) = self.model.clients.get_mut(&client) else { return Ok(()) };
        let action = entry.session.receive(packet)?;
        let Some(descriptors) = descriptors else {
            self.observe.note_last(client, &action);
            return Ok(());
        };
        self.io.mark_active();
        match action {
            ClientAction::Event(event) => self.client_event(event, now),
            ClientAction::Attach { .. } => {
                self.model.prove(client, descriptors.iter().filter_map(DeviceFile::opened));
                drop(descriptors);
                self.attach(client, action, now)?;
            }
            ClientAction::Memory { gpu, report, device_free, host, in_file, managed, counts } => {
                self.observe.counts.report(client, gpu, counts);
                self.model.set_report(client, gpu, report, managed, (host, in_file));
                self.host.sharing.reported(client, gpu);
                self.report([(client, gpu)]);
                let sample = device_free.and_then(|free| self.model.reported_sample(gpu, free, now));
                sample.into_iter().for_each(|sample| self.measure(&sample));
            }
            ClientAction::Incomplete => {}
            ClientAction::JoinGang { gang } => {
                let changed = self.model.join_gang(client, gang);
                self.apply_all(changed);
            }
            ClientAction::ForeignCheckpoint { step, ticket } => {
                let pidfd = descriptors.first();
                let request = self.host.foreign_checkpoint(&self.model, client, pidfd, (step, ticket));
                self.apply_all(request);
            }
            ClientAction::Leaving(answer) => self.host.departures.on_answer(client, answer),
            ClientAction::UseSwapFile { ram_max } => self.host.files.accepted(client, ram_max),
            ClientAction::EnvLimit { limit, text } => self.set_env_limit(client, limit, &text),
            ClientAction::RequestPlacement(request) => self.place(client, &request),
            ClientAction::SharedMemory { message, gpu } => {
                let shared = self.host.sharing.receive(&self.model, client, message, gpu, &descriptors, now);
                self.report(shared.changed);
                if let Some((identity, what)) = self.model.identity(client).zip(shared.excess) {
                    self.observe.log.log_over_budget(client, identity, what);
                }
            }
        }
        let overdue = self.host.sharing.overdue(&self.model, client, now);
        self.report(overdue);
        if self.model.machine.is_foreign(client) {
            self.host.inspect(&self.model, client); // the process may run again
        }
        Ok(())
    }

    fn client_event(&mut self, event: Event, now: Time) {
        if let Event::LimitRequested { client, gpu, bytes } = event {
            if now >= self.host.figures.sampled + HOST_PERIOD {
                self.sample_host(); // the decision needs current figures
            }
            if self.model.config.swap_file.is_some() {
                let wanted = (client, gpu, bytes);
                if self.host.files.hold(&self.model, &self.host.figures, wanted) {
                    return;
                }
                self.promise(Some(wanted));
            }
        }
        let detached = if let Event::Detached { gpu, .. } = &event { Some(*gpu) } else { None };
        self.apply(event);
        detached.into_iter().for_each(|gpu| self.forget_unlisted(gpu));
    }

    /// Attaches a GPU to a client.
    ///
    /// # Errors
    /// The client's tenant has named too many GPUs that NVML does not list, or the client has not proven
    /// that it may use the GPU.
    fn attach(&mut self, client: ClientId, attach: ClientAction, now: Time) -> Result<(), Violation> {
        let ClientAction::Attach { event, slot, gpu, kind, total, name, reason } = attach else { return Ok(()) };
        self.host.files.offer(&self.model, client);
        self.add_unlisted(client, gpu, Gpu::new(kind, printable(&name), total))?;
        if !self.model.may_use(client, gpu) {
            return Err(self.refuse_unproven(client, gpu));
        }
        self.observe.unproven.remove(&self.model, client, gpu);
        self.model.attach(client, gpu, reason, now);
        self.io.query_nvml(Query::Attach);
        debug!(client = client.0, slot, gpu = %gpu.0, ?event, "attached");
        self.apply(event);
        let foreign = other_hosts::attached(&mut self.model, gpu);
        self.apply_all(foreign);
        // A client that reconnects may still use limits that an earlier daemon sent.
        let reconnects = self.model.clients.get(&client).is_some_and(|entry| entry.reconnects);
        if reconnects || self.model.gpus.get(&gpu).is_some_and(|gpu| gpu.has_display) {
            self.model.limit_run_ahead(client, gpu);
        }
        Ok(())
    }

    /// Passes clients' memory on GPUs to the scheduler, with the adopted memory that their own reports do not
    /// include yet.
    fn report(&mut self, attachments: impl IntoIterator<Item = (ClientId, GpuId)>) {
        for (client, gpu) in attachments {
            let report = self.model.report(client, gpu, self.host.sharing.uncounted(client, gpu));
            self.apply_all(report);
        }
    }

    /// Disconnects clients that use a GPU without proof. Clients may attach a GPU before NVML lists it.
    fn disconnect_unproven(&mut self, gpu: GpuId) {
        let users = self.model.users_of_gpu(gpu).filter(|client| !self.model.may_use(*client, gpu));
        for client in users.collect::<Vec<_>>() {
            let why = self.refuse_unproven(client, gpu);
            self.model.close_connection(client, &why);
        }
    }

    /// Tells a client that it is refused for lack of a proof, so that its library does not take the end of
    /// the connection for a restart of the scheduler.
    fn refuse_unproven(&mut self, client: ClientId, gpu: GpuId) -> Violation {
        self.observe.unproven.add(&self.model, client, gpu);
        let violation = Violation::Unproven { gpu: self.model.label(gpu).unwrap_or_default() };
        let text = Text::new(&violation.to_string());
        self.model.send(client, SchedulerMessage::Refused { reason: Refusal::Device, text });
        violation
    }

    fn set_env_limit(&mut self, client: ClientId, limit: LimitName, text: &str) {
        if let Some(event) = self.model.set_env_limit(client, limit, text) {
            self.apply(event);
            self.model.announce_rules([client]);
        }
        if limit == LimitName::AllowedGpus {
            self.apply_all(placement::allowed(&self.model, [client]));
        }
    }

    /// Sends a client the GPUs that it may see.
    fn place(&mut self, client: ClientId, query: &PlacementQuery) {
        if query.ahead {
            self.host.placements.add(&self.model, client);
        }
        match placement::place(&self.model, client, query) {
            Ok(request) => self.apply_all(request),
            Err(refusal) => self.refuse_place(client, &refusal),
        }
    }

    fn refuse_place(&mut self, client: ClientId, NoGpu { why, label }: &NoGpu) {
        placement::refuse(&self.model, client, why);
        self.observe.log.log_unplaced(&self.model, client, why, label);
    }

    /// Tells the scheduler which stopped processes have continued. Returns true if any process is still
    /// stopped.
    pub fn check_stopped(&mut self) -> bool {
        let (continued, is_any_stopped) = self.model.continued();
        self.apply_all(continued);
        is_any_stopped
    }

    // ---- GPUs ----------------------------------------------------------------------------------------------------

    pub fn use_nvml(&mut self, queries: std::sync::mpsc::Sender<Query>) {
        self.io.nvml = Some(queries);
        self.model.nvml = Some(NvmlState::Usable);
    }

    /// Handles a report of the NVML thread.
    pub fn nvml_report(&mut self, report: Report) {
        match report {
            Report::Gpus(listing) => self.gpus_listed(listing),
            Report::State(state) => {
                self.model.set_nvml_state(state);
                self.io.publish_problems(&self.model);
                self.apply_all(self.model.unmeasured(clock::now()));
            }
            Report::Used(used) => {
                for sample in used {
                    let changed = self.model.changed_processes(&sample);
                    changed.into_iter().for_each(|client| self.host.measured(&self.model, client));
                    self.measure(&sample);
                    self.model.keep_sample(sample);
                }
            }
            Report::Driver(versions) => {
                self.model.driver = versions;
                self.set_settings(|_, _| {});
            }
        }
    }

    fn gpus_listed(&mut self, Listing { gpus, failing, is_complete }: Listing) {
        let listed: BTreeSet<GpuId> = gpus.iter().map(|found| found.gpu).collect();
        for found in gpus {
            let gpu = found.gpu;
            self.gpu_found(found);
            let change = self.model.set_failing(gpu, failing.get(&gpu));
            self.apply_all(change);
        }
        for gpu in self.model.missing(&listed).into_iter().filter(|_| is_complete) {
            let gone = self.model.lose(gpu);
            self.apply(gone);
        }
        let changes = other_hosts::listed(&mut self.model, is_complete);
        self.apply_all(changes);
    }

    fn gpu_found(&mut self, found: GpuDescription) {
        let GpuDescription { gpu, total, link, .. } = found;
        self.apply_all(other_hosts::returned(&self.model, &self.host.moves, gpu));
        let changes = self.model.found(found);
        if changes.is_new {
            self.containers.lock_files.create(gpu);
        }
        if changes.is_resized {
            self.apply(Event::GpuFound { gpu, total });
            self.apply_all(self.host.moves.drain_again(&self.model, gpu));
        }
        if changes.is_resized || changes.fabric_changed {
            self.model.announce_rules(self.model.all_clients());
        }
        if changes.is_listed {
            self.disconnect_unproven(gpu);
        }
        if changes.display_changed {
            self.model.users_of_gpu(gpu).for_each(|client| self.model.limit_run_ahead(client, gpu));
        }
        if let Some(rate) = link.filter(|_| changes.is_listed || changes.is_resized) {
            self.apply(Event::GpuLink { gpu, rate });
        }
    }

    /// Adds a GPU that a client named, if NVML does not list it.
    fn add_unlisted(&mut self, client: ClientId, gpu: GpuId, named: Gpu) -> Result<(), Violation> {
        let total = named.total;
        if !self.model.add_unlisted(client, gpu, named)? {
            return Ok(());
        }
        self.observe.log.log_unlisted(&self.model, client, gpu);
        if self.model.is_known(gpu) {
            self.containers.lock_files.create(gpu);
        }
        self.apply(Event::GpuFound { gpu, total });
        self.apply_all(self.host.moves.drain_again(&self.model, gpu));
        self.model.announce_rules([client]);
        self.io.signals.limits.notify_one();
        // The GPU may be a newly created MIG slice.
        self.io.query_nvml(Query::Scan);
        Ok(())
    }

    /// Removes a GPU that NVML does not list if no client uses it any more.
    fn forget_unlisted(&mut self, gpu: GpuId) {
        if self.model.is_superfluous(gpu) {
            debug!(gpu = %gpu.0, "removing a GPU: no program uses it, and NVML does not list it");
            self.apply(Event::GpuGone { gpu });
            self.forget_gpu(gpu);
        }
    }

    /// Removes a GPU that the scheduler has forgotten.
    fn forget_gpu(&mut self, gpu: GpuId) {
        self.record_usage();
        self.model.gpus.remove(&gpu);
        self.containers.lock_files.remove(gpu);
        self.observe.forget(gpu);
    }

    /// Handles a measurement of the memory in use on a GPU, by NVML or by a client.
    fn measure(&mut self, sample: &Sample) {
        let gpu = sample.gpu;
        let events = self.model.measure(sample, |client| self.host.sharing.adopted_by(client, gpu));
        let is_measured = events.iter().any(|event| matches!(event, Event::Measured { .. }));
        self.apply_all(events);
        if is_measured {
            let now = clock::now();
            self.model.all_clients().into_iter().for_each(|client| self.note_extent(client, gpu, now));
        }
    }

    // ---- host memory ---------------------------------------------------------------------------------------------

    /// Measures host memory.
    pub fn sample_host(&mut self) {
        let ahead = self.host.figures.sample(&self.model);
        self.apply_all(ahead);
        self.balance_host();
    }

    /// Adapts reservations, promises and the clients' shares of RAM to the present use of memory.
    fn balance_host(&mut self) {
        if !self.host.files.are_used(&self.model.config) {
            return self.promise(None);
        }
        let needs = self.host.files.reserve(&self.model, &self.host.figures, None);
        self.promise(None);
        self.host.files.divide_ram(&self.model, &self.host.figures, &needs);
        self.host.files.check();
        self.release_held();
    }

    /// Sends the scheduler the bytes that it can promise beyond the GPUs' memory. `wanted`: the next request.
    fn promise(&mut self, wanted: Option<Wanted>) {
        let promise = self.host.files.promise(&self.model, &self.host.figures, wanted);
        self.apply_all(promise);
    }

    /// Passes queued requests on once they need not wait for the disk any more.
    fn release_held(&mut self) {
        for (client, gpu, bytes) in self.host.files.take_due(&self.model) {
            self.promise(Some((client, gpu, bytes)));
            self.apply(Event::LimitRequested { client, gpu, bytes });
        }
    }

    /// Handles a report of the file thread.
    pub fn swap_file_report(&mut self, report: swap_files::Report) {
        self.host.files.report(&self.model, report);
        self.balance_host();
    }

    // ---- settings, rules and usage -------------------------------------------------------------------------------

    /// Applies a configuration. `by`: the author of the change, for the log.
    pub fn configure(&mut self, config: Config, by: &str) {
        let before = std::mem::replace(&mut self.model.config, config);
        self.containers.put_rules(&mut self.model.config.rules);
        self.model.budgets.set_clients(self.model.config.max_clients_per_tenant);
        if before.rules != self.model.config.rules {
            self.reapply_rules(&before.rules);
        }
        if before.swap_file != self.model.config.swap_file {
            self.host.files.offer_to_all(&self.model);
        }
        if before.keep_usage != self.model.config.keep_usage {
            self.observe.usage.keep(self.model.config.keep_usage);
        }
        if before.metrics != self.model.config.metrics {
            warn!("[metrics] listen changed; restart the scheduler to apply it");
        }
        self.set_settings(|before, now| settings::log_changes(before, now, by));
        self.sample_host();
    }

    /// Puts the configuration's settings into effect. `log`: logs a change of the settings.
    fn set_settings(&mut self, log: impl FnOnce(&Settings, &Settings)) {
        let settings = settings::in_effect(&self.model.config, self.model.driver.driver.as_deref());
        let before = self.io.published.borrow().settings.clone();
        if before != settings {
            log(&before, &settings);
            self.apply(Event::Configure(settings.clone()));
            self.io.publish(|published| replace(&mut published.settings, settings));
        }
    }

    /// Changes the lists of this node's pods and claims. `change` is passed the rules in effect, and returns
    /// whether a list has changed.
    pub fn change_containers<T>(&mut self, change: impl FnOnce(&mut Containers, &Rules) -> (T, bool)) -> T {
        let (result, has_changed) = change(&mut self.containers, &self.model.config.rules);
        if has_changed {
            self.model.clients.values_mut().for_each(|client| self.containers.name(&mut client.identity));
            let before = self.model.config.rules.clone();
            self.containers.put_rules(&mut self.model.config.rules);
            self.reapply_rules(&before);
        }
        result
    }

    /// Changes the problems that the status shows.
    pub fn set_problems(&mut self, change: impl FnOnce(&mut Problems)) {
        change(&mut self.io.problems);
        self.io.publish_problems(&self.model);
    }

    /// Applies changed rules to all clients at the same time.
    fn reapply_rules(&mut self, before: &Rules) {
        let groups = self.model.regroup(before);
        self.apply(groups);
        let clients = self.model.all_clients();
        self.model.announce_rules(clients.iter().copied());
        self.apply(placement::labels(&self.model, clients.iter().copied()));
        self.apply_all(placement::allowed(&self.model, clients));
    }

    /// Sends the usage of all clients up to now to the recording thread.
    pub fn record_usage(&mut self) {
        let used = self.observe.record_usage(&self.model, clock::now());
        self.model.count_hours(used);
        self.observe.usage.give(self.model.groups.hours.take_pending());
    }

    /// Adds the GPU time that earlier daemons counted and saved.
    pub fn load_hours(&mut self, saved: Result<HoursUsed, String>) {
        if let Err(why) = saved.map(|saved| self.model.groups.hours.load(saved)) {
            warn!("{why}");
            self.set_problems(|problems| problems.usage = Some(why));
        }
        self.check_hours();
    }

    /// Updates which programs have used up their `gpu-hours`.
    pub fn check_hours(&mut self) {
        let groups = self.model.check_hours();
        if !groups.is_empty() {
            groups.keys().for_each(|client| self.observe.log.log_hours(&self.model, *client));
            self.apply(Event::Groups { groups });
        }
    }

    /// Carries out a user's request with `act`, and passes the events that `act` adds to the list to the
    /// scheduler.
    pub fn with_host<T>(&mut self, act: impl FnOnce(&mut Host, &Model, &mut Vec<Event>) -> T) -> T {
        let mut events = Vec::new();
        let result = act(&mut self.host, &self.model, &mut events);
        self.apply_all(events);
        result
    }

    /// Handles the result of an operation on a client's process.
    pub fn checkpointed(&mut self, client: ClientId, operation: Operation, answer: &HelperAnswer) {
        let Some(identity) = self.model.identity(client) else { return };
        sleep::log_failure(&mut self.observe.log, client, identity, operation, answer);
        debug!(client = client.0, ?operation, outcome = ?answer.outcome, "checkpoint");
        self.host.sleep.note_helper(answer);
        if operation == Operation::Inspect {
            let events = self.host.inspected(&mut self.model, client, answer);
            return self.apply_all(events);
        }
        self.apply(Event::Checkpointed { client, outcome: sleep::outcome(answer.outcome) });
        // The client claimed to be asleep, and is not.
        if operation == Operation::Settle && answer.outcome == Outcome::Runs {
            self.model.clients.get_mut(&client).into_iter().for_each(|entry| entry.is_exempt = false);
            self.model.gpus_of(client).into_iter().for_each(|gpu| self.disconnect_unproven(gpu));
        }
    }
}
