//! GPUs and memory, measured by NVML, the driver and the kernel.
//!
//! - [`nvml`]: the thread that talks to NVML.
//! - [`accounting`]: reconciles clients' reports with measurements: the overhead, and bounds on clients' memory.
//! - [`host_memory`]: host memory that is available for swapped memory.
pub mod accounting;
pub mod host_memory;
pub mod nvml;
