//! What decisions lead to. Components do not call each other: each writes here what is to be sent, which GPUs have to be settled
//! again, and when to look again, and the machine carries on from that.

use crate::{
    api::*,
    timers::{Timers, Wake},
};
use std::collections::BTreeSet;

#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Effects {
    commands: Vec<Command>,
    touched: BTreeSet<GpuId>,
    timers: Timers,
    counter: u64,
}

impl Effects {
    pub fn command(&mut self, command: Command) {
        self.commands.push(command);
    }

    pub fn take_commands(&mut self) -> Vec<Command> {
        std::mem::take(&mut self.commands)
    }

    /// Something changed on that GPU: it is settled before the event is over.
    pub fn touch(&mut self, gpu: GpuId) {
        self.touched.insert(gpu);
    }

    pub fn touch_all(&mut self, gpus: impl IntoIterator<Item = GpuId>) {
        self.touched.extend(gpus);
    }

    /// That GPU is being settled.
    pub fn untouch(&mut self, gpu: GpuId) {
        self.touched.remove(&gpu);
    }

    /// The next GPU to settle.
    pub fn take_touched(&mut self) -> Option<GpuId> {
        self.touched.pop_first()
    }

    /// Looks again at that time, for that reason. One time for each reason: the newest replaces those before.
    pub fn wake(&mut self, wake: Wake, at: Option<Time>) {
        self.timers.set(wake, at);
    }

    pub fn wakes_at(&self, wake: Wake) -> Option<Time> {
        self.timers.get(wake)
    }

    /// When the machine has to look again.
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// A reason to look again that is due.
    pub fn take_due(&mut self, now: Time) -> Option<Wake> {
        self.timers.pop(now)
    }

    /// Numbers arrivals and grants, so that they have an order.
    pub fn number(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }
}
