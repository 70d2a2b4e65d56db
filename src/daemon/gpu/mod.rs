//! GPUs and memory, as NVML, the driver and the kernel measure them.
//!
//! - [`nvml`]: the thread that talks to NVML.
//! - [`accounting`]: reconciles clients' reports with measurements: overhead, and the memory that clients really have.
//! - [`host_memory`]: host memory that is available for swapped memory.
pub mod accounting;
pub mod host_memory;
pub mod nvml;
