//! Calls that show which GPUs reach each other's memory ([`crate::gpu::peers`]).

use crate::{
    driver::types::*,
    gate,
    gpu::{self, peers::couple},
    registry,
    sys::errno,
};

/// Whether this process uses several GPUs. Otherwise there is nothing to do here.
fn are_several() -> bool {
    gate::is_active() && gpu::are_several()
}

/// The program gives its current context access to another.
pub fn enabled(context: CUcontext) {
    if !are_several() {
        return;
    }
    let other = gpu::attached().find(|gpu| gpu.work.has_context(context));
    if let (Some(gpu), Some(other)) = (gpu::current(), other) {
        errno::preserved(|| couple(gpu, other));
    }
}

/// The program copies between contexts.
pub fn copying(contexts: [CUcontext; 2]) {
    contexts.into_iter().filter(|context| !context.is_null()).for_each(enabled);
}

/// The program copies from or to these addresses.
pub fn touching(addresses: [CUdeviceptr; 2]) {
    if !are_several() {
        return;
    }
    let Some(gpu) = gpu::current() else { return };
    for other in addresses.into_iter().filter(|address| *address != 0).filter_map(registry::gpu_of) {
        errno::preserved(|| couple(gpu, other));
    }
}

/// The same for calls whose addresses must be read from their arguments.
pub fn touching_by(addresses: impl FnOnce() -> Option<[CUdeviceptr; 2]>) {
    if are_several() {
        addresses().inspect(|addresses| touching(*addresses));
    }
}

pub fn copying_by(contexts: impl FnOnce() -> Option<[CUcontext; 2]>) {
    if are_several() {
        contexts().inspect(|contexts| copying(*contexts));
    }
}

/// The program copies `count` times, from and to these addresses.
///
/// # Safety
/// Both are NULL or have that many entries.
pub unsafe fn touching_all(to: *const CUdeviceptr, from: *const CUdeviceptr, count: Size) {
    if are_several() && !to.is_null() && !from.is_null() {
        // SAFETY: the caller's promise.
        (0..count).for_each(|i| touching(unsafe { [*to.add(i), *from.add(i)] }));
    }
}
