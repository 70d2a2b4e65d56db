//! The program's memory on all GPUs, by the addresses, handles and IPC handles that the program uses.
//!
//! - [`driver_memory`]: memory that no engine can move. [`virtual_memory`]: memory that the program reserves,
//!   creates and maps itself.
//! - [`graphics`]: resources of graphics APIs.
//! - [`pools`]: memory pools, by the driver's handles.
//! - [`checkpoints`]: other processes that this program checkpoints.
//! - [`shared`]: memory exported to other processes and imported from them.

pub mod checkpoints;
pub mod driver_memory;
pub mod graphics;
pub mod pools;
pub mod shared;
pub mod virtual_memory;

use crate::{
    driver::types::{CUdeviceptr, Size},
    gpu::{self, Gpu},
    memory::space::Allocation,
};

/// Returns the allocation that contains this address, and its GPU. Returns `None` for the program's
/// managed memory, because the driver answers for it.
pub fn find(address: CUdeviceptr) -> Option<(&'static Gpu, Allocation)> {
    let found = gpu::in_use().find_map(|gpu| Some((gpu, gpu.space()?.lock().find(address)?)));
    found.or_else(|| shared::find(address)).filter(|(_, allocation)| !allocation.managed)
}

/// Does the same as [`find`], but only for allocations of this process.
pub fn find_own(address: CUdeviceptr) -> Option<(&'static Gpu, Allocation)> {
    find(address).filter(|(_, allocation)| !allocation.is_foreign())
}

/// Whether the address belongs to an allocation of this library.
pub fn is_ours(address: CUdeviceptr) -> bool {
    find(address).is_some()
}

/// Whether this library has reserved any of these addresses. The program can neither map memory there
/// nor free the addresses, even while no memory is mapped there and the driver would permit it.
pub fn are_ours(address: CUdeviceptr, size: Size) -> bool {
    let overlap = |gpu: &Gpu| gpu.space().is_some_and(|space| space.lock().overlaps(address, size as u64));
    gpu::in_use().any(overlap) || shared::find(address).is_some()
}
