//! The effects of decisions. Components do not call each other. Each component records here the
//! commands to send, the GPUs to settle and the times of wake-ups, and the machine acts on these
//! records.

use crate::{
    api::*,
    entity::Entity,
    timers::{Timers, Wake},
};
use std::collections::BTreeSet;

#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Effects {
    commands: Vec<Command>,
    touched: BTreeSet<GpuId>,
    timers: Timers,
    counter: u64,
    /// Requests that joined the queues and may need no turn. Empty between events.
    #[serde(skip)]
    needless: Vec<Entity>,
}

impl Effects {
    pub fn command(&mut self, command: Command) {
        self.commands.push(command);
    }

    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Marks a GPU on which something changed. The GPU is settled before `Machine::handle` returns.
    pub fn touch(&mut self, gpu: GpuId) {
        self.touched.insert(gpu);
    }

    pub fn touch_all(&mut self, gpus: impl IntoIterator<Item = GpuId>) {
        self.touched.extend(gpus);
    }

    /// Removes and returns the next GPU to settle.
    pub fn take_touched(&mut self) -> Option<GpuId> {
        self.touched.pop_first()
    }

    /// Notes a request that has joined the queues. It is granted if it needs no turn.
    pub fn may_need_no_turn(&mut self, entity: Entity) {
        self.needless.push(entity);
    }

    /// Removes and returns the requests noted by `may_need_no_turn`, in the order of their arrival.
    pub fn take_needless(&mut self) -> Vec<Entity> {
        std::mem::take(&mut self.needless)
    }

    /// Sets the time of a wake-up, replacing an earlier time. `None` cancels the wake-up.
    pub fn wake(&mut self, wake: Wake, at: Option<Time>) {
        self.timers.set(wake, at);
    }

    pub fn wakes_at(&self, wake: Wake) -> Option<Time> {
        self.timers.get(wake)
    }

    /// The time of the next wake-up.
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Removes and returns a wake-up that is due.
    pub fn take_due(&mut self, now: Time) -> Option<Wake> {
        self.timers.pop(now)
    }

    /// Cancels the pending work for a GPU.
    pub fn forget(&mut self, gpu: GpuId) {
        self.touched.remove(&gpu);
        let all = [Wake::Gpu, Wake::Verification, Wake::Failures, Wake::HeldRequests];
        all.into_iter().for_each(|wake| self.wake(wake(gpu), None));
    }

    /// Cancels the pending work for a client that has left a GPU.
    pub fn forget_client(&mut self, client: ClientId, gpu: GpuId) {
        [Wake::Eviction, Wake::Ahead].into_iter().for_each(|wake| self.wake(wake(client, gpu), None));
    }

    /// Returns the next number. Numbers order arrivals and grants.
    pub fn number(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }
}
