//! Allocations that the driver serves. No engine can move them. They are permitted within the limit,
//! and counted ([`crate::registry::driver_memory`]).

use crate::{
    driver::types::*,
    env::settings,
    gpu::{Gpu, reservation::retry},
    registry::driver_memory::{self, Kind},
    submit,
};

/// Makes an allocation of `size` bytes. The driver writes the allocation's address or handle to
/// `place`.
pub fn allocate(
    gpu: Option<&'static Gpu>,
    kind: Kind,
    place: *const u64,
    size: u64,
    real: impl Fn() -> CUresult,
) -> CUresult {
    if !submit::is_active() {
        return real();
    }
    if !driver_memory::fits(gpu, size) && !settings::get().oversubscribe {
        crate::sys::errno::preserve(|| gpu.inspect(|gpu| gpu.count_refusal()));
        return ERROR_OUT_OF_MEMORY;
    }
    let result = retry(real);
    // SAFETY: the driver has just written the address or handle there.
    if let (SUCCESS, Some(name)) = (result, unsafe { place.as_ref() }) {
        crate::sys::errno::preserve(|| driver_memory::add(gpu, kind, *name, size));
    }
    result
}

/// Makes a call that frees the allocation with this address or handle.
pub fn free(kind: Kind, name: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let taken =
        if submit::is_active() { crate::sys::errno::preserve(|| driver_memory::take(kind, name)) } else { None };
    let result = real();
    if let Some(taken) = taken {
        crate::sys::errno::preserve(|| if result == SUCCESS { taken.release() } else { taken.restore() });
    }
    result
}
