//! GPUs and memory, measured through NVML, the driver and the kernel.
//!
//! - [`nvml`]: the thread that calls NVML.
//! - [`device_files`]: the GPUs' device files, which clients open to prove that they may use a GPU.
//! - [`accounting`]: compares clients' reports with measurements, and derives the overhead and bounds
//!   on clients' memory.
//! - [`host_memory`]: host memory that may hold swapped memory.
pub mod accounting;
pub mod device_files;
pub mod host_memory;
pub mod nvml;
