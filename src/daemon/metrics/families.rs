//! The table of all metrics: name, unit, type and meaning of each, and the function that reads its
//! value from a snapshot. Dashboards and alerts depend on names and types, so these never change.
//! nvshare.service(8) has the same table for users.

use std::time::Duration;

use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Unit;

use super::snapshot::{OfClient, OfGpu, OfGroup, OfWorkload, Waits};

/// A metric that each `T` has. The metrics of all `T` share one name and differ in their labels.
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
    family("nvshare_gpu_held", SECONDS, Time(|gpu| gpu.held), "Time in which at least one program held the GPU lock."),
    family(
        "nvshare_gpu_lock",
        SECONDS,
        Time(|gpu| gpu.counted.lock_time),
        "Time for which programs held the GPU lock, summed over programs.",
    ),
    family(
        "nvshare_gpu_wait",
        SECONDS,
        Value::Waits(|gpu| &gpu.waits),
        "Time that programs waited before they were granted the GPU lock.",
    ),
    family(
        "nvshare_gpu_grants",
        None,
        Counter(|gpu| gpu.counted.grants),
        "Number of times that a program was granted the GPU lock.",
    ),
    family(
        "nvshare_gpu_hand_overs",
        None,
        Counter(|gpu| gpu.counted.hand_overs),
        "Number of times that the GPU lock was granted to a different program than before.",
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
        "Bytes evicted or restored without a copy, because they are one repeated value or still valid in host memory.",
    ),
    family(
        "nvshare_gpu_refused_allocations",
        None,
        Counter(|gpu| gpu.counted.refused),
        "Allocations that were refused for lack of memory.",
    ),
    family(
        "nvshare_gpu_mapping_failures",
        None,
        Counter(|gpu| gpu.counted.mapping_failures),
        "Number of times that a program released the GPU lock because the driver could not map memory within the \
         program's allowance.",
    ),
    family(
        "nvshare_gpu_gone",
        None,
        Gauge(|gpu| Some(gpu.gone.into())),
        "Whether NVML no longer lists the GPU although programs still use it: 1 or 0.",
    ),
    family("nvshare_gpu_total", BYTES, Gauge(|gpu| Some(gpu.total)), "Memory of the GPU."),
    family("nvshare_gpu_capacity", BYTES, Gauge(|gpu| gpu.capacity), "GPU memory available to programs."),
    family(
        "nvshare_gpu_overhead",
        BYTES,
        Gauge(|gpu| Some(gpu.overhead)),
        "GPU memory set aside for contexts and for programs that do not use nvshare.",
    ),
    family(
        "nvshare_gpu_kept",
        BYTES,
        Gauge(|gpu| Some(gpu.kept)),
        "GPU memory kept free for programs that do not use nvshare: rooms, and headroom for their growth.",
    ),
    family(
        "nvshare_gpu_shortfall",
        BYTES,
        Gauge(|gpu| Some(gpu.shortfall)),
        "Largest shortfall of any program: memory that it needs beyond its demand, because the driver could not map \
         memory that NVML showed as free.",
    ),
    family(
        "nvshare_gpu_committed",
        BYTES,
        Gauge(|gpu| Some(gpu.committed)),
        "Largest possible sum of the demands of the GPU's programs.",
    ),
    family(
        "nvshare_gpu_demand",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.demand)),
        "GPU memory that the GPU's programs need to run.",
    ),
    family(
        "nvshare_gpu_resident",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.resident)),
        "Memory of the GPU's programs on the GPU itself.",
    ),
    family(
        "nvshare_gpu_swapped",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.swapped)),
        "Memory of the GPU's programs in host memory.",
    ),
    family(
        "nvshare_gpu_pinned",
        BYTES,
        Gauge(|gpu| Some(gpu.memory.pinned)),
        "Memory that cannot be evicted from the GPU, summed over the GPU's programs.",
    ),
    family("nvshare_gpu_clients", None, Gauge(|gpu| Some(gpu.clients)), "Programs that use the GPU."),
    family("nvshare_gpu_holders", None, Gauge(|gpu| Some(gpu.holders)), "Programs that hold the GPU lock."),
    family("nvshare_gpu_waiters", None, Gauge(|gpu| Some(gpu.waiters)), "Programs that wait for the GPU lock."),
];

pub static OF_GROUPS: [Family<OfGroup>; 2] = [
    family(
        "nvshare_pressure_some",
        SECONDS,
        Time(|group| group.some),
        "Time in which at least one program of the group waited for a GPU or for its memory.",
    ),
    family(
        "nvshare_pressure_full",
        SECONDS,
        Time(|group| group.full),
        "Time in which at least one program of the group waited for a GPU or for its memory, and none held a GPU lock.",
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
        "Time for which the workload's programs held the GPU lock, summed over programs.",
    ),
    family(
        "nvshare_workload_wait",
        SECONDS,
        Time(|workload| workload.counted.wait_time),
        "Time that the workload's programs waited before they were granted the GPU lock, summed over programs.",
    ),
    family(
        "nvshare_workload_waiting",
        SECONDS,
        Age(|workload| Some(workload.waits)),
        "Time that the longest-waiting program has been waiting for the GPU lock. 0 if no program is waiting.",
    ),
    family(
        "nvshare_workload_grants",
        None,
        Counter(|workload| workload.counted.grants),
        "Number of times that the workload's programs were granted the GPU lock.",
    ),
    family(
        "nvshare_workload_hand_overs",
        None,
        Counter(|workload| workload.counted.hand_overs),
        "Number of times that a program of the workload was granted the GPU lock after a different program.",
    ),
    family(
        "nvshare_workload_swapped_out",
        BYTES,
        Counter(|workload| workload.counted.swapped_out),
        "Bytes of the workload's programs evicted from the GPU to host memory.",
    ),
    family(
        "nvshare_workload_swapped_in",
        BYTES,
        Counter(|workload| workload.counted.swapped_in),
        "Bytes of the workload's programs restored from host memory to the GPU.",
    ),
    family(
        "nvshare_workload_unmoved",
        BYTES,
        Counter(|workload| workload.counted.unmoved),
        "Bytes of the workload's programs evicted or restored without a copy.",
    ),
    family(
        "nvshare_workload_refused_allocations",
        None,
        Counter(|workload| workload.counted.refused),
        "Allocations of the workload's programs that were refused for lack of memory.",
    ),
    family(
        "nvshare_workload_mapping_failures",
        None,
        Counter(|workload| workload.counted.mapping_failures),
        "Number of times that a program of the workload released the GPU lock because the driver could not map \
         memory within the program's allowance.",
    ),
    family(
        "nvshare_workload_demand",
        BYTES,
        Gauge(|workload| Some(workload.memory.demand)),
        "GPU memory that the workload's programs need to run.",
    ),
    family(
        "nvshare_workload_resident",
        BYTES,
        Gauge(|workload| Some(workload.memory.resident)),
        "Memory of the workload's programs on the GPU.",
    ),
    family(
        "nvshare_workload_swapped",
        BYTES,
        Gauge(|workload| Some(workload.memory.swapped)),
        "Memory of the workload's programs in host memory.",
    ),
    family(
        "nvshare_workload_pinned",
        BYTES,
        Gauge(|workload| Some(workload.memory.pinned)),
        "Memory that cannot be evicted from the GPU, summed over the workload's programs.",
    ),
    family(
        "nvshare_workload_limit",
        BYTES,
        Gauge(|workload| Some(workload.limit)),
        "Largest sum that the demands of the workload's programs can reach now.",
    ),
    family(
        "nvshare_workload_memory_max",
        BYTES,
        Gauge(|workload| workload.memory_max),
        "Highest limit on GPU memory that a rule sets for the workload's programs. Other programs can count toward it.",
    ),
];

pub static OF_CLIENTS: [Family<OfClient>; 16] = [
    family(
        "nvshare_client_lock",
        SECONDS,
        Time(|client| client.counted.lock_time),
        "Time for which the program held the GPU lock.",
    ),
    family(
        "nvshare_client_wait",
        SECONDS,
        Time(|client| client.counted.wait_time),
        "Time that the program waited before it was granted the GPU lock.",
    ),
    family(
        "nvshare_client_waiting",
        SECONDS,
        Age(|client| client.attachment.map(|attachment| attachment.waits)),
        "Time that the program has been waiting for the GPU lock. 0 if it is not waiting.",
    ),
    family(
        "nvshare_client_grants",
        None,
        Counter(|client| client.counted.grants),
        "Number of times that the program was granted the GPU lock.",
    ),
    family(
        "nvshare_client_hand_overs",
        None,
        Counter(|client| client.counted.hand_overs),
        "Number of times that the program was granted the GPU lock after a different program.",
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
        "Allocations of the program that were refused for lack of memory.",
    ),
    family(
        "nvshare_client_mapping_failures",
        None,
        Counter(|client| client.counted.mapping_failures),
        "Number of times that the program released the GPU lock because the driver could not map memory within the \
         program's allowance.",
    ),
    family(
        "nvshare_client_demand",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.demand)),
        "GPU memory that the program needs to run.",
    ),
    family(
        "nvshare_client_resident",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.resident)),
        "Memory of the program on the GPU.",
    ),
    family(
        "nvshare_client_swapped",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.swapped)),
        "Memory of the program in host memory.",
    ),
    family(
        "nvshare_client_pinned",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.memory.pinned)),
        "The program's memory that cannot be evicted from the GPU.",
    ),
    family(
        "nvshare_client_limit",
        BYTES,
        Gauge(|client| client.attachment.map(|attachment| attachment.limit)),
        "Largest demand that the program can reach now.",
    ),
    family(
        "nvshare_client_memory_max",
        BYTES,
        Gauge(|client| client.attachment?.memory_max),
        "GPU memory that a rule allows the program and the other programs of its group together.",
    ),
];
