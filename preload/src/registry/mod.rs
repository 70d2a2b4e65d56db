//! The program's memory by the names that the program knows: addresses, handles and IPC handles, across all GPUs.
//!
//! - [`pinned`]: memory that no engine can move. [`virtual_memory`]: what the program has reserved, made and mapped itself.
//! - [`shared`]: memory that another process uses, or that is another's.

pub mod pinned;
pub mod shared;
pub mod virtual_memory;

use crate::{
    driver::types::{CUdeviceptr, Size},
    gate,
    gpu::{self, Gpu},
    memory::space::Allocation,
};

/// The allocation of ours that holds this address, and its GPU. Of the program's managed memory the driver knows all.
pub fn find(address: CUdeviceptr) -> Option<(&'static Gpu, Allocation)> {
    if !gate::is_active() {
        return None;
    }
    let found = gpu::attached().find_map(|gpu| Some((gpu, gpu.space()?.lock().find(address)?)));
    found.or_else(|| shared::find(address)).filter(|(_, allocation)| !allocation.managed)
}

/// The same of those that are this process's own.
pub fn find_own(address: CUdeviceptr) -> Option<(&'static Gpu, Allocation)> {
    find(address).filter(|(_, allocation)| !allocation.is_foreign())
}

/// The GPU of an allocation of ours that holds this address.
pub fn gpu_of(address: CUdeviceptr) -> Option<&'static Gpu> {
    find(address).map(|(gpu, _)| gpu)
}

/// Whether it points into memory that moves.
pub fn is_ours(address: CUdeviceptr) -> bool {
    find(address).is_some()
}

/// Whether these addresses touch what this library has reserved. The program has not, so it can neither map memory there nor
/// give the addresses back: also while nothing is mapped there, and the driver would let it.
pub fn are_ours(address: CUdeviceptr, size: Size) -> bool {
    let overlap = |gpu: &Gpu| gpu.space().is_some_and(|space| space.lock().overlaps(address, size as u64));
    gate::is_active() && (gpu::attached().any(overlap) || shared::find(address).is_some())
}
