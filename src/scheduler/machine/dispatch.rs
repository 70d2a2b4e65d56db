//! Which method handles each event. The compiler checks that each event has one.

use super::Machine;
use crate::api::*;

impl Machine {
    pub(super) fn dispatch(&mut self, event: Event) {
        // Any message from a client proves that its process runs.
        if let Some(client) = event.sender() {
            self.alive(client);
        }
        match event {
            // Clients' memory and locks.
            Event::Attached { client, gpu, engine } => self.attach(client, gpu, engine),
            Event::Detached { client, gpu } => self.detach(client, gpu),
            Event::Memory { client, gpu, report } => self.report(client, gpu, report),
            Event::LimitRequested { client, gpu, bytes } => self.sharing().request_limit(client, gpu, bytes),
            Event::ReservationRequested { client, gpu, bytes } => {
                self.change_gpu(gpu, |gpu, cx, fx| gpu.request_reservation(cx, fx, client, bytes))
            }
            Event::Utilization { client, gpu, permille } => {
                self.change_gpu(gpu, |gpu, _, fx| gpu.utilization(fx, client, permille))
            }
            Event::Requested { client, gpus } => self.sharing().request(client, gpus),
            Event::Cancelled { client, gpus } => self.sharing().cancel(client, &gpus),
            Event::Released { client, gpus, reason, busy } => self.released(client, &gpus, reason, busy),
            Event::Held { client, gpus } => self.sharing().held(client, &gpus),
            Event::Stuck { client, gpus, reason } => self.sharing().stuck(client, &gpus, reason),
            Event::Stopped { client, stopped } => self.stopped(client, stopped),

            // Membership, rules and placement.
            Event::Connected { client, gang, tenant } => self.connected(client, gang, tenant),
            Event::Disconnected { client } => self.disconnected(client),
            Event::GangChanged { client, gang } => self.gang_changed(client, gang),
            Event::Groups { groups } => self.grouped(&groups),
            Event::EnvLimits { client, limits } => self.set_env_limits(client, limits),
            Event::Labels { labels } => self.places.label(&labels),
            Event::Kinds { kinds } => self.places.set_kinds(kinds),
            Event::Allowed { allowed } => self.places.allow(allowed),
            Event::PlacementRequested { client, request } => {
                self.with_places(|places, cx, fx| places.request(cx, fx, client, &request))
            }
            Event::PlacementTaken { client, from } => {
                self.with_places(|places, cx, _| places.take_over(cx, client, from))
            }

            // GPUs, the host and settings.
            Event::GpuFound { gpu, total } => self.gpu_found(gpu, total),
            Event::GpuGone { gpu } => self.sharing().gpu_gone(gpu),
            Event::GpuLink { gpu, rate } => self.change_gpu(gpu, |gpu, _, fx| gpu.link_found(fx, rate)),
            Event::GpuOverhead { gpu, begun, bytes, others, complete } => {
                self.change_gpu(gpu, |gpu, cx, fx| gpu.overhead_measured(cx, fx, begun, bytes, others, complete))
            }
            Event::OtherPrograms { gpu, present } => self.change_gpu(gpu, |gpu, _, fx| gpu.other_programs(fx, present)),
            Event::Failing { gpu, failing } => self.change_gpu(gpu, |gpu, _, _| gpu.failing = failing),
            Event::Drain { gpu, drained } => self.drain(gpu, drained),
            Event::Measured { gpu, begun, free, evicted, found } => {
                self.sharing().measured(gpu, begun, (free, evicted), &found);
            }
            Event::ContextSizes { gpu, bytes } => {
                self.with_quota(|quota, cx, _| quota.contexts_measured(cx, gpu, &bytes))
            }
            Event::HostMemory { bytes } => self.quota.host_memory(bytes),
            Event::HostAhead { bytes } => self.sharing().host_ahead(bytes),
            Event::RoomRequested { room, gpu, bytes, until } => self.make_room(room, gpu, bytes, until),
            Event::RoomClosed { room } => self.gpus.end_room(&mut self.effects, room),
            Event::Configure(settings) => self.configure(settings),
            Event::Suspend { suspended } => self.suspend(suspended),
            Event::Tick => {}

            // Sleep.
            Event::SleepWanted { client, paused } => self.change_known(client, |it| it.want(client, paused)),
            Event::FoundAsleep { client } => self.change_known(client, |it| it.found(client)),
            Event::SleepReady { client } => self.change_sleep(client, |it| it.ready(client)),
            Event::SleepRefused { client, why } => self.change_sleep(client, |it| it.refused(client, why)),
            Event::WakeRequested { client } => self.change_sleep(client, |it| it.wake(client, false)),
            Event::Resumed { client } => self.change_sleep(client, |it| it.wake(client, true)),
            Event::Checkpointed { client, outcome } => self.change_sleep(client, |it| it.checkpointed(client, outcome)),
            Event::ForeignCheckpoint { client, state } => self.change_known(client, |it| it.foreign(client, state)),
            Event::RestoreRequested { client } => self.change_known(client, |it| it.restore_requested(client)),
            Event::Migrate { client, from, to } => {
                self.change_known(client, |it| it.migrate(client, Move { from, to }))
            }
        }
    }
}
