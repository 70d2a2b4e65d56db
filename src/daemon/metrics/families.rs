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

const fn age<T>(name: &'static str, of: fn(&T) -> Option<Duration>, help: &'static str) -> Family<T> {
    family(name, Some(Unit::Seconds), Age(of), help)
}

const fn waits<T>(name: &'static str, of: fn(&T) -> &Waits, help: &'static str) -> Family<T> {
    family(name, Some(Unit::Seconds), Value::Waits(of), help)
}

#[rustfmt::skip] // a table
pub static OF_GPUS: [Family<OfGpu>; 24] = [
    time("nvshare_gpu_held", |gpu| gpu.held, "Time in which at least one program held the GPU lock."),
    time("nvshare_gpu_lock", |gpu| gpu.counted.lock_time,
        "Time for which programs held the GPU lock, summed over programs."),
    waits("nvshare_gpu_wait", |gpu| &gpu.waits, "Time that programs waited before they were granted the GPU lock."),
    counter("nvshare_gpu_grants", |gpu| gpu.counted.grants, "Number of times that a program was granted the GPU lock."),
    counter("nvshare_gpu_hand_overs", |gpu| gpu.counted.hand_overs,
        "Number of times that the GPU lock was granted to a different program than before."),
    bytes_counter("nvshare_gpu_swapped_out", |gpu| gpu.counted.swapped_out,
        "Bytes evicted from the GPU to host memory."),
    bytes_counter("nvshare_gpu_swapped_in", |gpu| gpu.counted.swapped_in,
        "Bytes restored from host memory to the GPU."),
    bytes_counter("nvshare_gpu_unmoved", |gpu| gpu.counted.unmoved,
        "Bytes evicted or restored without a copy, because they are one repeated value or still valid in host memory."),
    counter("nvshare_gpu_refused_allocations", |gpu| gpu.counted.refused,
        "Allocations that were refused for lack of memory."),
    counter("nvshare_gpu_mapping_failures", |gpu| gpu.counted.mapping_failures,
        "Number of times that a program released the GPU lock because the driver could not map memory within the \
         program's allowance."),
    gauge("nvshare_gpu_gone", |gpu| Some(gpu.gone.into()),
        "Whether NVML no longer lists the GPU although programs still use it: 1 or 0."),
    bytes("nvshare_gpu_total", |gpu| Some(gpu.total), "Memory of the GPU."),
    bytes("nvshare_gpu_capacity", |gpu| gpu.capacity, "GPU memory available to programs."),
    bytes("nvshare_gpu_overhead", |gpu| Some(gpu.overhead),
        "GPU memory set aside for contexts and for programs that do not use nvshare."),
    bytes("nvshare_gpu_kept", |gpu| Some(gpu.kept),
        "GPU memory kept free for programs that do not use nvshare: rooms, and headroom for their growth."),
    bytes("nvshare_gpu_shortfall", |gpu| Some(gpu.shortfall),
        "Largest shortfall of any program: memory that it needs beyond its demand, because the driver could not map \
         memory that NVML showed as free."),
    bytes("nvshare_gpu_committed", |gpu| Some(gpu.committed),
        "Largest possible sum of the demands of the GPU's programs."),
    bytes("nvshare_gpu_demand", |gpu| Some(gpu.memory.demand), "GPU memory that the GPU's programs need to run."),
    bytes("nvshare_gpu_resident", |gpu| Some(gpu.memory.resident), "Memory of the GPU's programs on the GPU itself."),
    bytes("nvshare_gpu_swapped", |gpu| Some(gpu.memory.swapped), "Memory of the GPU's programs in host memory."),
    bytes("nvshare_gpu_pinned", |gpu| Some(gpu.memory.pinned),
        "Memory that cannot be evicted from the GPU, summed over the GPU's programs."),
    gauge("nvshare_gpu_clients", |gpu| Some(gpu.clients), "Programs that use the GPU."),
    gauge("nvshare_gpu_holders", |gpu| Some(gpu.holders), "Programs that hold the GPU lock."),
    gauge("nvshare_gpu_waiters", |gpu| Some(gpu.waiters), "Programs that wait for the GPU lock."),
];

#[rustfmt::skip] // a table
pub static OF_GROUPS: [Family<OfGroup>; 2] = [
    time("nvshare_pressure_some", |group| group.some,
        "Time in which at least one program of the group waited for a GPU or for its memory."),
    time("nvshare_pressure_full", |group| group.full,
        "Time in which at least one program of the group waited for a GPU or for its memory, and none held a GPU \
         lock."),
];

#[rustfmt::skip] // a table
pub static OF_WORKLOADS: [Family<OfWorkload>; 17] = [
    gauge("nvshare_workload_programs", |workload| Some(workload.programs),
        "Programs of the workload that use the GPU."),
    time("nvshare_workload_lock", |workload| workload.counted.lock_time,
        "Time for which the workload's programs held the GPU lock, summed over programs."),
    time("nvshare_workload_wait", |workload| workload.counted.wait_time,
        "Time that the workload's programs waited before they were granted the GPU lock, summed over programs."),
    age("nvshare_workload_waiting", |workload| Some(workload.waits),
        "Time that the longest-waiting program has been waiting for the GPU lock. 0 if no program is waiting."),
    counter("nvshare_workload_grants", |workload| workload.counted.grants,
        "Number of times that the workload's programs were granted the GPU lock."),
    counter("nvshare_workload_hand_overs", |workload| workload.counted.hand_overs,
        "Number of times that a program of the workload was granted the GPU lock after a different program."),
    bytes_counter("nvshare_workload_swapped_out", |workload| workload.counted.swapped_out,
        "Bytes of the workload's programs evicted from the GPU to host memory."),
    bytes_counter("nvshare_workload_swapped_in", |workload| workload.counted.swapped_in,
        "Bytes of the workload's programs restored from host memory to the GPU."),
    bytes_counter("nvshare_workload_unmoved", |workload| workload.counted.unmoved,
        "Bytes of the workload's programs evicted or restored without a copy."),
    counter("nvshare_workload_refused_allocations", |workload| workload.counted.refused,
        "Allocations of the workload's programs that were refused for lack of memory."),
    counter("nvshare_workload_mapping_failures", |workload| workload.counted.mapping_failures,
        "Number of times that a program of the workload released the GPU lock because the driver could not map \
         memory within the program's allowance."),
    bytes("nvshare_workload_demand", |workload| Some(workload.memory.demand),
        "GPU memory that the workload's programs need to run."),
    bytes("nvshare_workload_resident", |workload| Some(workload.memory.resident),
        "Memory of the workload's programs on the GPU."),
    bytes("nvshare_workload_swapped", |workload| Some(workload.memory.swapped),
        "Memory of the workload's programs in host memory."),
    bytes("nvshare_workload_pinned", |workload| Some(workload.memory.pinned),
        "Memory that cannot be evicted from the GPU, summed over the workload's programs."),
    bytes("nvshare_workload_limit", |workload| Some(workload.limit),
        "Largest sum that the demands of the workload's programs can reach now."),
    bytes("nvshare_workload_memory_max", |workload| workload.memory_max,
        "Highest limit on GPU memory that a rule sets for the workload's programs. Other programs can count toward \
         it."),
];

#[rustfmt::skip] // a table
pub static OF_CLIENTS: [Family<OfClient>; 16] = [
    time("nvshare_client_lock", |client| client.counted.lock_time, "Time for which the program held the GPU lock."),
    time("nvshare_client_wait", |client| client.counted.wait_time,
        "Time that the program waited before it was granted the GPU lock."),
    age("nvshare_client_waiting", |client| client.attachment.map(|attachment| attachment.waits),
        "Time that the program has been waiting for the GPU lock. 0 if it is not waiting."),
    counter("nvshare_client_grants", |client| client.counted.grants,
        "Number of times that the program was granted the GPU lock."),
    counter("nvshare_client_hand_overs", |client| client.counted.hand_overs,
        "Number of times that the program was granted the GPU lock after a different program."),
    bytes_counter("nvshare_client_swapped_out", |client| client.counted.swapped_out,
        "Bytes evicted from the GPU to host memory."),
    bytes_counter("nvshare_client_swapped_in", |client| client.counted.swapped_in,
        "Bytes restored from host memory to the GPU."),
    bytes_counter("nvshare_client_unmoved", |client| client.counted.unmoved,
        "Bytes evicted or restored without a copy."),
    counter("nvshare_client_refused_allocations", |client| client.counted.refused,
        "Allocations of the program that were refused for lack of memory."),
    counter("nvshare_client_mapping_failures", |client| client.counted.mapping_failures,
        "Number of times that the program released the GPU lock because the driver could not map memory within the \
         program's allowance."),
    bytes("nvshare_client_demand", |client| client.attachment.map(|attachment| attachment.memory.demand),
        "GPU memory that the program needs to run."),
    bytes("nvshare_client_resident", |client| client.attachment.map(|attachment| attachment.memory.resident),
        "Memory of the program on the GPU."),
    bytes("nvshare_client_swapped", |client| client.attachment.map(|attachment| attachment.memory.swapped),
        "Memory of the program in host memory."),
    bytes("nvshare_client_pinned", |client| client.attachment.map(|attachment| attachment.memory.pinned),
        "The program's memory that cannot be evicted from the GPU."),
    bytes("nvshare_client_limit", |client| client.attachment.map(|attachment| attachment.limit),
        "Largest demand that the program can reach now."),
    bytes("nvshare_client_memory_max", |client| client.attachment?.memory_max,
        "GPU memory that a rule allows the program and the other programs of its group together."),
];
