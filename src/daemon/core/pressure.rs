//! Pressure: the share of time for which clients are stalled on a GPU, modelled on the kernel's
//! pressure stall information (PSI). A client is stalled while it waits for the lock, for memory, or
//! for room to restore its memory to the GPU.
//!
//! - *some*: at least one client of a group is stalled.
//! - *full*: at least one client of a group is stalled, and none of its clients holds a lock.
//!
//! Each GPU has a group with its clients. Each tenant and each systemd unit has a group with its
//! clients on all GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::model::Model;
use crate::bus;
use crate::identity::{Identity, Tenant};
use crate::scheduler::{Activity, ClientId, Command, Event, GpuId, Time};
use crate::sys::clock;

/// Windows of the averages, in seconds. The kernel's PSI uses the same windows.
pub const WINDOWS: [f64; 3] = [10.0, 60.0, 300.0];
/// Time after which a group without clients is forgotten: the longest window. Without this limit,
/// clients could fill memory with invented names of units and GPUs.
const FORGOTTEN: Duration = Duration::from_secs(300);

/// The time for which a condition has held: its total, and recent averages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stall {
    is_so: bool,
    at: Time,
    pub total: Duration,
    /// Exponentially weighted share of time, for each window. The condition is constant between two events,
    /// so the averages are exact. A period `t` in which the condition holds has the weight `1 - exp(-t /
    /// window)`.
    averages: [f64; 3],
}

impl Stall {
    fn advanced(mut self, now: Time) -> Self {
        let passed = now.saturating_sub(self.at);
        let part = if self.is_so { 1.0 } else { 0.0 };
        for (average, window) in self.averages.iter_mut().zip(WINDOWS) {
            *average = part + (*average - part) * (-passed.as_secs_f64() / window).exp();
        }
        if self.is_so {
            self.total = self.total.saturating_add(passed);
        }
        self.at = self.at.max(now);
        self
    }

    fn set(&mut self, now: Time, is_so: bool) {
        if self.is_so != is_so {
            *self = Self { is_so, ..self.advanced(now) };
        }
    }
}

/// The attribute that all clients of a group share.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Subject {
    Gpu(GpuId),
    Tenant(Tenant),
    Unit(String),
}

#[derive(Debug, Default)]
struct Group {
    /// Number of attachments of the group's clients. `stalled` and `running` are parts of this number.
    members: usize,
    stalled: usize,
    running: usize,
    some: Stall,
    full: Stall,
    /// When an attachment last left the group.
    left: Time,
}

impl Group {
    /// True if the group has clients or recently had some.
    fn is_known(&self, now: Time) -> bool {
        self.members > 0 || now.saturating_sub(self.left) < FORGOTTEN
    }

    /// Updates the group after a change of a client's activity on a GPU. `None`: the GPU is not attached.
    fn changes(&mut self, now: Time, before: Option<Activity>, after: Option<Activity>) {
        let count = |is_so: fn(&Activity) -> bool, of: usize| {
            of + usize::from(after.as_ref().is_some_and(is_so)) - usize::from(before.as_ref().is_some_and(is_so))
        };
        self.members = count(|_| true, self.members);
        self.stalled = count(|activity| activity.is_stalled, self.stalled);
        self.running = count(|activity| activity.runs, self.running);
        if after.is_none() {
            self.left = now;
        }
        self.some.set(now, self.stalled > 0);
        self.full.set(now, self.stalled > 0 && self.running == 0);
    }
}

/// The times for which a group's clients were stalled.
#[derive(Debug, Clone)]
pub struct GroupStall {
    pub kind: &'static str,
    pub name: String,
    pub some: Stall,
    pub full: Stall,
}

#[derive(Debug)]
struct Member {
    identity: Arc<Identity>,
    gpus: BTreeMap<GpuId, Activity>,
}

#[derive(Debug, Default)]
pub struct Pressure {
    groups: BTreeMap<Subject, Group>,
    members: BTreeMap<ClientId, Member>,
}

impl Pressure {
    fn subjects(gpu: GpuId, identity: &Identity) -> impl Iterator<Item = Subject> {
        let unit =
            Some(identity.counted_unit()).filter(|unit| !unit.is_empty()).map(|unit| Subject::Unit(unit.to_owned()));
        [Subject::Gpu(gpu), Subject::Tenant(identity.tenant.clone())].into_iter().chain(unit)
    }

    /// Sets a client's activity on each of its GPUs. GPUs missing from `gpus` count as detached. `identity`
    /// is used only for a new client.
    fn set(&mut self, now: Time, client: ClientId, identity: &Arc<Identity>, gpus: BTreeMap<GpuId, Activity>) {
        let new = || Member { identity: identity.clone(), gpus: BTreeMap::new() };
        let Member { identity, gpus: before } = self.members.remove(&client).unwrap_or_else(new);
        if !gpus.is_empty() {
            self.members.insert(client, Member { identity: identity.clone(), gpus: gpus.clone() });
        }
        let both: BTreeSet<GpuId> = before.keys().chain(gpus.keys()).copied().collect();
        for gpu in both {
            let (before, after) = (before.get(&gpu).copied(), gpus.get(&gpu).copied());
            if before == after {
                continue;
            }
            if before.is_none() {
                self.groups.retain(|_, group| group.is_known(now));
            }
            for subject in Self::subjects(gpu, &identity) {
                self.groups.entry(subject).or_default().changes(now, before, after);
            }
        }
    }
}

/// The client whose activity this event may change.
pub(super) fn client_of(event: &Event) -> Option<ClientId> {
    match event {
        Event::Attached { client, .. }
        | Event::Detached { client, .. }
        | Event::Disconnected { client }
        | Event::LimitRequested { client, .. }
        | Event::Requested { client, .. }
        | Event::Cancelled { client, .. }
        | Event::Released { client, .. }
        | Event::Held { client, .. }
        | Event::Stopped { client, .. }
        | Event::SleepWanted { client, .. }
        | Event::Resumed { client }
        | Event::WakeRequested { client }
        | Event::ForeignCheckpoint { client, .. }
        | Event::Checkpointed { client, .. } => Some(*client),
        _ => None,
    }
}

impl Pressure {
    /// Updates the pressure after an event and its resulting commands.
    pub(super) fn note(&mut self, model: &Model, event: Option<ClientId>, commands: &[Command], now: Time) {
        let concerned: BTreeSet<ClientId> =
            event.into_iter().chain(commands.iter().filter_map(Command::client)).collect();
        for client in concerned {
            let gpus = model.machine.activities(client).collect();
            let identity = model.identity(client).cloned().unwrap_or_default();
            self.set(now, client, &identity, gpus);
        }
    }

    /// The stall times of each GPU's, tenant's and unit's clients.
    pub(super) fn stalls(&self, model: &Model) -> Vec<GroupStall> {
        let now = clock::now();
        let known = self.groups.iter().filter(|(_, group)| group.is_known(now));
        let stall = |(subject, group): (&Subject, &Group)| {
            let (kind, name) = match subject {
                Subject::Gpu(gpu) => ("gpu", model.label(*gpu)?),
                Subject::Tenant(tenant) => ("tenant", tenant.to_string()),
                Subject::Unit(unit) => ("unit", unit.clone()),
            };
            Some(GroupStall { kind, name, some: group.some.advanced(now), full: group.full.advanced(now) })
        };
        known.filter_map(stall).collect()
    }
}

/// The pressure on each GPU, and of each tenant and unit.
pub(super) fn present(stalls: &[GroupStall]) -> Vec<bus::Pressure> {
    let view = |GroupStall { kind, name, some, full }: &GroupStall| {
        let [some_avg10, some_avg60, some_avg300] = some.averages.map(|part| part * 100.0);
        let [full_avg10, full_avg60, full_avg300] = full.averages.map(|part| part * 100.0);
        let (some_total, full_total) = (some.total.as_secs_f64(), full.total.as_secs_f64());
        let (kind, name) = ((*kind).into(), name.clone());
        bus::Pressure {
            kind,
            name,
            some_avg10,
            some_avg60,
            some_avg300,
            some_total,
            full_avg10,
            full_avg60,
            full_avg300,
            full_total,
        }
    };
    stalls.iter().map(view).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Uuid;

    const GPU: GpuId = GpuId(Uuid([1; 16]));
    const OTHER: GpuId = GpuId(Uuid([2; 16]));
    const IDLE: Activity = Activity { is_stalled: false, runs: false };
    const WAITS: Activity = Activity { is_stalled: true, runs: false };
    const RUNS: Activity = Activity { is_stalled: false, runs: true };

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    fn of(user: u32) -> Arc<Identity> {
        let unit = format!("{user}.service");
        Arc::new(Identity { tenant: Tenant::User(user), unit, ..Identity::default() })
    }

    /// Seconds of the stalls *some* and *full*.
    fn seconds(pressure: &Pressure, subject: &Subject, now: u64) -> (f64, f64) {
        let group = &pressure.groups[subject];
        let total = |stall: Stall| stall.advanced(at(now)).total.as_secs_f64();
        (total(group.some), total(group.full))
    }

    #[test]
    fn pressure_is_full_while_a_client_waits_and_none_runs() {
        let mut pressure = Pressure::default();
        let (one, other) = (of(1), of(2));
        let mut set = |now, client, identity, activity| {
            pressure.set(at(now), ClientId(client), identity, BTreeMap::from([(GPU, activity)]));
        };
        set(0, 1, &one, RUNS);
        set(0, 2, &other, WAITS);
        set(4, 1, &one, IDLE); // its memory is restored before the other client gets the lock
        set(5, 2, &other, RUNS);
        set(7, 1, &one, WAITS);
        let units = [1, 2].map(|user| Subject::Unit(format!("{user}.service")));
        let tenants = [1, 2].map(|user| Subject::Tenant(Tenant::User(user)));
        assert_eq!(seconds(&pressure, &Subject::Gpu(GPU), 10), (8.0, 1.0));
        for subjects in [units, tenants] {
            assert_eq!(subjects.map(|subject| seconds(&pressure, &subject, 10)), [(3.0, 3.0), (5.0, 5.0)]);
        }
    }

    #[test]
    fn a_program_running_on_one_gpu_adds_no_full_pressure_for_its_tenant() {
        let mut pressure = Pressure::default();
        pressure.set(at(0), ClientId(1), &of(1), BTreeMap::from([(GPU, RUNS), (OTHER, WAITS)]));
        assert_eq!(seconds(&pressure, &Subject::Tenant(Tenant::User(1)), 3), (3.0, 0.0));
        assert_eq!(seconds(&pressure, &Subject::Gpu(OTHER), 3), (3.0, 3.0));
        assert_eq!(seconds(&pressure, &Subject::Gpu(GPU), 3), (0.0, 0.0));
        // The client detaches the other GPU.
        pressure.set(at(3), ClientId(1), &of(1), BTreeMap::from([(GPU, RUNS)]));
        assert_eq!(seconds(&pressure, &Subject::Tenant(Tenant::User(1)), 9), (3.0, 0.0));
    }

    #[test]
    fn averages_are_exponentially_weighted() {
        let mut stall = Stall::default();
        stall.set(at(0), true);
        stall.set(at(5), true);
        let risen = stall.advanced(at(10)).averages;
        for (average, window) in risen.into_iter().zip(WINDOWS) {
            assert!((average - (1.0 - (-10.0 / window).exp())).abs() < 1e-9, "{average} over {window} s");
        }
        stall.set(at(10), false);
        let fallen = stall.advanced(at(70)).averages;
        for ((average, before), window) in fallen.into_iter().zip(risen).zip(WINDOWS) {
            assert!((average - before * (-60.0 / window).exp()).abs() < 1e-9, "{average} over {window} s");
        }
        assert_eq!(stall.advanced(at(70)).total, at(10));
    }

    #[test]
    fn a_group_is_dropped_some_time_after_its_last_client_leaves() {
        let mut pressure = Pressure::default();
        let tenant = |user| Subject::Tenant(Tenant::User(user));
        pressure.set(at(0), ClientId(1), &of(1), BTreeMap::from([(GPU, WAITS)]));
        pressure.set(at(2), ClientId(1), &of(1), BTreeMap::new());
        pressure.set(at(301), ClientId(2), &of(2), BTreeMap::from([(OTHER, RUNS)]));
        assert_eq!(seconds(&pressure, &tenant(1), 301), (2.0, 2.0));
        pressure.set(at(302), ClientId(3), &of(2), BTreeMap::from([(OTHER, RUNS)]));
        assert!(!pressure.groups.contains_key(&tenant(1)) && pressure.groups.contains_key(&tenant(2)));
        assert_eq!(pressure.members.len(), 2);
    }
}
