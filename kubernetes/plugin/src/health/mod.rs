//! The health of GPUs. `nvml` queries the driver in a thread, and `nvshare::gpu_faults` decides when a GPU becomes unhealthy
//! and when it is healthy again. `scheduler` queries the scheduler.

pub mod nvml;
pub mod scheduler;

use crate::cdi::CdiView;
use crate::devices::{NvmlGpu, SchedulerView};

/// A report of NVML, the scheduler or CDI.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The GPUs. `None` if NVML has not been available so far.
    Nvml(Option<Vec<NvmlGpu>>),
    Scheduler(SchedulerView),
    Cdi(CdiView),
}
