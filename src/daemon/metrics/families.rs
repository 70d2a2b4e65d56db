//! The table of all metrics: name, unit, type and meaning of each, and the function that reads its
//! value from a snapshot. Dashboards and alerts depend on names and types, so these never change.
//! nvshare.service(8) has the same table for users.

use std::time::Duration;

use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::snapshot::{OfClient, OfGpu, OfGroup, OfWorkload, Waits};

/// A metric that each `T` has. All of them share one name and differ in their labels.
#[derive(Debug)]
pub struct Family<T: 'static> {
    /// The name without the suffixes for unit and type.
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

const SECONDS: Option<Unit> = Some(Unit::Seconds);
const BYTES: Option<Unit> = Some(Unit::Bytes);

pub static OF_GPUS: [Family<OfGpu>; 24] = [
    family("nvshare_gpu_held", SECONDS, Time(|gpu| gpu.held), "Time in which any program had the GPU lock."),
    family(
        "nvshare_gpu_lock",
        SECONDS,
        Time(|gpu| gpu.counted.lock_time),
        "Time for which programs had the GPU lock, summed over programs.",
    ),
    family(
        "nvshare_gpu_wait",
        SECONDS,
        Value::Waits(|gpu| &gpu.waits),
        "How long programs waited for the GPU lock before they had it.",
    ),
    family(
        "nvshare_gpu_grants",
        None,
        Counter(|gpu| gpu.counted.grants),
        "Times that the GPU lock was given to a program.",
    ),
    family(
        "nvshare_gpu_hand_overs",
        None,
        Counter(|gpu| gpu.counted.hand_overs),
        "Times that it was given to another program than the time before.",
    ),
    family(
        "nvshare_gpu_swapped_out",
        BYTES,
        Counter(|gpu| gpu.counted.swapped_out),
        "Bytes evicted from the GPU to host memory.",
    ),
    family(
        "nvshare_gpu_swapped_in",
        BYTES,
        Counter(|gpu| gpu.counted.swapped_in),
        "Bytes restored from host memory to the GPU.",
    ),
    family(
        "nvshare_gpu_unmoved",
        BYTES,
        Counter(|gpu| gpu.counted.unmoved),
        "Bytes evicted or restored without a copy: constant, or still in host memory.",
    ),
    family(
        "nvshare_gpu_refused_allocations",
        None,
        Counter(|gpu| gpu.counted.refused),
        "Allocations that failed since there was to be no memory for them.",
    ),
    family(
        "nvshare_gpu_mapping_failures",
        None,
        Counter(|gpu| gpu.counted.mapping_failures),
        "Times that a program released the GPU lock because the driver could not map memory within the allowance.",
    ),
    family(
        "nvshare_gpu_gone",
        None,
        Gauge(|gpu| Some(gpu.gone.into())),
        "Whether NVML no longer lists the GPU although programs still use it: 1 or 0.",
    ),
    family("nvshare_gpu_total", BYTES, Gauge(|gpu| Some(gpu.total)), "Memory of the GPU."),
    family("nvshare_gpu_capacity", BYTES, Gauge(|gpu| gpu.capacity), "Memory of the GPU that programs can have."),
    family(
        "nvshare_gpu_overhead",
        BYTES,
        Gauge(|gpu| Some(gpu.overhead)),
        "Memory of the GPU that is put aside: for contexts, and for what others use.",
    ),
    family(
        "nvshare_gpu_kept",
        BYTES,
        Gauge(|gpu| Some(gpu.kept)),
        "Memory of the GPU that is kept free for programs that do not use nvshare: rooms, and headroom ahead of those that grow.",
    ),
    family(
        "nvshare_gpu_shortfall",
        BYTES,
        Gauge(|gpu| Some(gpu.shortfall)),
        "The most that any program needs beyond its demand, because it could not map memory that is measured as free.",
    ),
    family(
        "nvshare_gpu_committed",
        BYTES,
        Gauge(|gpu| Some(gpu.committed)),
        "What the demands of its programs can come to.",
    ),
    family(
        "nvshare_gpu_demand",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.demand)),
        "What its programs need on the GPU in order to run.",
    ),
    family(
        "nvshare_gpu_resident",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.resident)),
        "Memory of its programs that is on the GPU.",
    ),
    family(
        "nvshare_gpu_swapped",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.swapped)),
        "Memory of its programs that is in host memory.",
    ),
    family(
        "nvshare_gpu_pinned",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.pinned)),
        "Memory of its programs that cannot leave the GPU.",
    ),
    family("nvshare_gpu_clients", None, Gauge(|gpu| Some(gpu.clients)), "Programs that use the GPU."),
    family("nvshare_gpu_holders", None, Gauge(|gpu| Some(gpu.holders)), "Programs that have the GPU lock."),
    family("nvshare_gpu_waiters", None, Gauge(|gpu| Some(gpu.waiters)), "Programs that wait for the GPU lock."),
];

pub static OF_GROUPS: [Family<OfGroup>; 2] = [
    family(
        "nvshare_pressure_some",
        SECONDS,
        Time(|group| group.some),
        "Time in which at least one program of the group waited for a GPU or for memory there.",
    ),
    family(
        "nvshare_pressure_full",
        SECONDS,
        Time(|group| group.full),
        "Time in which at least one program of the group waited for a GPU or for memory there, and none had a GPU lock.",
    ),
];

pub static OF_WORKLOADS: [Family<OfWorkload>; 17] = [
    family(
        "nvshare_workload_programs",
        None,
        Gauge(|workload| Some(workload.programs)),
        "Programs of the workload that use the GPU.",
    ),
    family(
        "nvshare_workload_lock",
        SECONDS,
        Time(|workload| workload.counted.lock_time),
        "Time for which its programs had the GPU lock, summed over programs.",
    ),
    family(
        "nvshare_workload_wait",
        SECONDS,
        Time(|workload| workload.counted.wait_time),
        "Time for which its programs waited for the GPU lock before they had it, summed over programs.",
    ),
    family(
        "nvshare_workload_waiting",
        SECONDS,
        Age(|workload| Some(workload.waits)),
        "For how long the program has been waiting for the GPU lock that has waited the longest; 0: none is waiting.",
    ),
    family(
        "nvshare_workload_grants",
        None,
        Counter(|workload| workload.counted.grants),
        "Times that its programs were given the GPU lock.",
    ),
    family(
        "nvshare_workload_hand_overs",
        None,
        Counter(|workload| workload.counted.hand_overs),
        "Times that one of its programs was given the GPU lock after another program.",
    ),
    family(
        "nvshare_workload_swapped_out",
        BYTES,
        Counter(|workload| workload.counted.swapped_out),
        "Bytes of its programs evicted from the GPU to host memory.",
    ),
    family(
        "nvshare_workload_swapped_in",
        BYTES,
        Counter(|workload| workload.counted.swapped_in),
        "Bytes of its programs restored from host memory to the GPU.",
    ),
    family(
        "nvshare_workload_unmoved",
        BYTES,
        Counter(|workload| workload.counted.unmoved),
        "Bytes of its programs evicted or restored without a copy.",
    ),
    family(
        "nvshare_workload_refused_allocations",
        None,
        Counter(|workload| workload.counted.refused),
        "Its programs' allocations that failed since there was to be no memory for them.",
    ),
    family(
        "nvshare_workload_mapping_failures",
        None,
        Counter(|workload| workload.counted.mapping_failures),
        "Times that its programs released the GPU lock because the driver could not map memory within the allowance.",
    ),
    family(
        "nvshare_workload_demand",
        BYTES,
        Gauge(|workload| Some(workload.memory.demand)),
        "What its programs need on the GPU in order to run.",
    ),
    family(
        "nvshare_workload_resident",
        BYTES,
        Gauge(|workload| Some(workload.memory.resident)),
        "Memory of its programs that is on the GPU.",
    ),
    family(
        "nvshare_workload_swapped",
        BYTES,
        Gauge(|workload| Some(workload.memory.swapped)),
        "Memory of its programs that is in host memory.",
    ),
    family(
        "nvshare_workload_pinned",
        BYTES,
        Gauge(|workload| Some(workload.memory.pinned)),
        "Memory of its programs that cannot leave the GPU.",
    ),
    family(
        "nvshare_workload_limit",
        BYTES,
        Gauge(|workload| Some(workload.limit)),
        "The most that the demands of its programs can come to now.",
    ),
    family(
        "nvshare_workload_memory_max",
        BYTES,
        Gauge(|workload| workload.memory_max),
        "What a rule allows its programs of the GPU, together with those that count with them.",
    ),
];

pub static OF_CLIENTS: [Family<OfClient>; 16] = [
    family(
        "nvshare_client_lock",
        SECONDS,
        Time(|client| client.counted.lock_time),
        "Time for which the program had the GPU lock.",
    ),
    family(
        "nvshare_client_wait",
        SECONDS,
        Time(|client| client.counted.wait_time),
        "Time for which it waited for the GPU lock before it had it.",
    ),
    family(
        "nvshare_client_waiting",
        SECONDS,
        Age(|client| client.attachment.map(|attachment| attachment.waits)),
        "For how long it has been waiting for the GPU lock; 0: it is not.",
    ),
    family(
        "nvshare_client_grants",
        None,
        Counter(|client| client.counted.grants),
        "Times that it was given the GPU lock.",
    ),
    family(
        "nvshare_client_hand_overs",
        None,
        Counter(|client| client.counted.hand_overs),
        "Times that it was given the GPU lock after another program.",
    ),
    family(
        "nvshare_client_swapped_out",
        BYTES,
        Counter(|client| client.counted.swapped_out),
        "Bytes evicted from the GPU to host memory.",
    ),
    family(
        "nvshare_client_swapped_in",
        BYTES,
        Counter(|client| client.counted.swapped_in),
        "Bytes restored from host memory to the GPU.",
    ),
    family(
        "nvshare_client_unmoved",
        BYTES,
        Counter(|client| client.counted.unmoved),
        "Bytes evicted or restored without a copy.",
    ),
    family(
        "nvshare_client_refused_allocations",
        None,
        Counter(|client| client.counted.refused),
        "Its allocations that failed since there was to be no memory for them.",
    ),
    family(
        "nvshare_client_mapping_failures",
        None,
        Counter(|client| client.counted.mapping_failures),
        "Times that it released the GPU lock because the driver could not map memory within the allowance.",
    ),
    family(
        "nvshare_client_demand",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.demand)),
        "What it needs on the GPU in order to run.",
    ),
    family(
        "nvshare_client_resident",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.resident)),
        "Its memory that is on the GPU.",
    ),
    family(
        "nvshare_client_swapped",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.swapped)),
        "Its memory that is in host memory.",
    ),
    family(
        "nvshare_client_pinned",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.pinned)),
        "Its memory that cannot leave the GPU.",
    ),
    family(
        "nvshare_client_limit",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.limit)),
        "The most that its demand can be now.",
    ),
    family(
        "nvshare_client_memory_max",
        BYTES,
        Gauge(|client| client.attachment?.memory_max),
        "What a rule allows it of the GPU, together with those that count with it.",
    ),
];
