//! The table of all metrics: name, unit, type and meaning of each, and the function that reads its
//! value from a snapshot. Dashboards and alerts depend on names and types, so these never change.
//! nvshare.service(8) has the same table for users, with full names. Here, names lack the prefix of the
//! things that have the metric, such as `nvshare_gpu`.

use std::time::Duration;

use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::snapshot::{OfGpu, OfWorkload, Used};
use crate::daemon::core::{GroupStall, Waits};

/// A metric that each `T` has. The metrics of all `T` share one name and differ in their labels.
#[derive(Debug)]
pub struct Family<T: 'static> {
    /// The name without the prefix, and without the suffixes for unit and type.
    pub name: &'static str,
    pub unit: Option<Unit>,
    pub value: Value<T>,
    pub help: &'static str,
}

/// The type of a metric's value, and the function that reads it from a snapshot.
#[derive(Debug)]
pub enum Value<T: 'static> {
    Counter(fn(&T) -> u64),
    /// A counter of seconds.
    Time(fn(&T) -> Duration),
    /// A gauge. `None` if this `T` has no such value.
    Gauge(fn(&T) -> Option<u64>),
    /// A gauge of seconds.
    Age(fn(&T) -> Option<Duration>),
    Waits(fn(&T) -> &Waits),
}

use Value::{Age, Counter, Gauge, Time};

impl<T> Value<T> {
    pub fn kind(&self) -> MetricType {
        match self {
            Counter(_) | Time(_) => MetricType::Counter,
            Gauge(_) | Age(_) => MetricType::Gauge,
            Self::Waits(_) => MetricType::Histogram,
        }
    }

    pub fn is_there(&self, one: &T) -> bool {
        match self {
            Gauge(of) => of(one).is_some(),
            Age(of) => of(one).is_some(),
            Counter(_) | Time(_) | Self::Waits(_) => true,
        }
    }
}

const fn family<T>(name: &'static str, unit: Option<Unit>, value: Value<T>, help: &'static str) -> Family<T> {
    Family { name, unit, value, help }
}

const fn counter<T>(name: &'static str, of: fn(&T) -> u64, help: &'static str) -> Family<T> {
    family(name, None, Counter(of), help)
}

const fn bytes_counter<T>(name: &'static str, of: fn(&T) -> u64, help: &'static str) -> Family<T> {
    family(name, Some(Unit::Bytes), Counter(of), help)
}

const fn time<T>(name: &'static str, of: fn(&T) -> Duration, help: &'static str) -> Family<T> {
    family(name, Some(Unit::Seconds), Time(of), help)
}

const fn gauge<T>(name: &'static str, of: fn(&T) -> Option<u64>, help: &'static str) -> Family<T> {
    family(name, None, Gauge(of), help)
}

const fn bytes<T>(name: &'static str, of: fn(&T) -> Option<u64>, help: &'static str) -> Family<T> {
    family(name, Some(Unit::Bytes), Gauge(of), help)
}

/// The metrics that GPUs, workloads and programs have.
#[rustfmt::skip] // a table
pub static COMMON: [Family<Used>; 12] = [
    time("lock", |used| used.counted.lock_time, "Time for which programs held the GPU lock, summed over programs."),
    counter("grants", |used| used.counted.grants, "Number of times that a program was granted the GPU lock."),
    counter("hand_overs", |used| used.counted.hand_overs,
        "Number of times that a program was granted the GPU lock after a different program."),
    bytes_counter("swapped_out", |used| used.counted.swapped_out, "Bytes evicted from the GPU to host memory."),
    bytes_counter("swapped_in", |used| used.counted.swapped_in, "Bytes restored from host memory to the GPU."),
    bytes_counter("unmoved", |used| used.counted.unmoved,
        "Bytes evicted or restored without a copy, because they are one repeated value or still valid in host memory."),
    counter("refused_allocations", |used| used.counted.refused,
        "Allocations that were refused for lack of memory."),
    counter("mapping_failures", |used| used.counted.mapping_failures,
        "Number of times that a program released the GPU lock because the driver could not map memory within the \
         program's allowance."),
    bytes("demand", |used| Some(used.attached?.demand), "GPU memory that programs need to run."),
    bytes("resident", |used| Some(used.attached?.resident), "Memory of programs on the GPU itself."),
    bytes("swapped", |used| Some(used.attached?.swapped), "Memory of programs in host memory."),
    bytes("pinned", |used| Some(used.attached?.pinned),
        "Memory of programs that cannot be evicted from the GPU."),
];

/// The metrics that only workloads and programs have.
#[rustfmt::skip] // a table
pub static OF_PROGRAMS: [Family<Used>; 4] = [
    time("wait", |used| used.counted.wait_time,
        "Time that programs waited before they were granted the GPU lock, summed over programs."),
    family("waiting", Some(Unit::Seconds), Age(|used| Some(used.attached?.waits)),
        "Time that the longest-waiting program has been waiting for the GPU lock. 0 if no program is waiting."),
    bytes("limit", |used| Some(used.attached?.limit), "Largest sum that the demands of programs can reach now."),
    bytes("memory_max", |used| used.attached?.memory_max,
        "Highest limit on GPU memory that a rule sets. Other programs can count toward it."),
];

pub static OF_WORKLOADS: [Family<OfWorkload>; 1] =
    [gauge("programs", |workload| Some(workload.programs), "Programs of the workload that use the GPU.")];

#[rustfmt::skip] // a table
pub static OF_GPUS: [Family<OfGpu>; 12] = [
    time("held", |gpu| gpu.held, "Time in which at least one program held the GPU lock."),
    family("wait", Some(Unit::Seconds), Value::Waits(|gpu| &gpu.waits), "Time that programs waited before they were granted the GPU lock."),
    gauge("gone", |gpu| Some(gpu.seen.gone.into()),
        "Whether NVML no longer lists the GPU although programs still use it: 1 or 0."),
    bytes("total", |gpu| Some(gpu.seen.total), "Memory of the GPU."),
    bytes("capacity", |gpu| (!gpu.seen.gone).then_some(gpu.seen.capacity), "GPU memory available to programs."),
    bytes("overhead", |gpu| Some(gpu.seen.overhead),
        "GPU memory set aside for contexts and for programs that do not use nvshare."),
    bytes("kept", |gpu| Some(gpu.seen.kept),
        "GPU memory kept free for programs that do not use nvshare: rooms, and headroom for their growth."),
    bytes("shortfall", |gpu| Some(gpu.seen.shortfall),
        "Largest shortfall of any program: memory that it needs beyond its demand, because the driver could not map \
         memory that NVML showed as free."),
    bytes("committed", |gpu| Some(gpu.seen.committed), "Largest possible sum of the demands of the GPU's programs."),
    gauge("clients", |gpu| Some(gpu.clients), "Programs that use the GPU."),
    gauge("holders", |gpu| Some(gpu.seen.holders.len() as u64), "Programs that hold the GPU lock."),
    gauge("waiters", |gpu| Some(gpu.seen.waiters.len() as u64), "Programs that wait for the GPU lock."),
];

#[rustfmt::skip] // a table
pub static OF_GROUPS: [Family<GroupStall>; 2] = [
    time("some", |group| group.some.total,
        "Time in which at least one program of the group waited for a GPU or for its memory."),
    time("full", |group| group.full.total,
        "Time in which at least one program of the group waited for a GPU or for its memory, and none held a GPU \
         lock."),
];
