//! What is known of GPUs' health, and from whom: `nvml` asks the driver, in a thread; `faults` (pure) says when what it says
//! makes a GPU unhealthy and when it is healthy again; `scheduler` asks the scheduler.

pub mod faults;
pub mod nvml;
pub mod scheduler;

use crate::devices::{NvmlGpu, SchedulerView};

/// What one of them has found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// `None`: there has been no NVML so far.
    Nvml(Option<Vec<NvmlGpu>>),
    Scheduler(SchedulerView),
}
