//! Allocations that the driver serves. No engine can move them. They are permitted within the limit,
//! and counted ([`crate::registry::driver_memory`]).

use crate::{
    driver::types::*,
    env::settings,
    gpu::{Gpu, reservation::retry_on},
    registry::driver_memory::{self, Kind},
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
    if !driver_memory::fits(gpu, size) && !settings::get().oversubscribe {
        gpu.inspect(|gpu| gpu.count_refusal());
        return ERROR_OUT_OF_MEMORY;
    }
    let result = retry_on(|| gpu, real);
    // SAFETY: the driver has just written the address or handle there.
    if let (SUCCESS, Some(name)) = (result, unsafe { place.as_ref() }) {
        driver_memory::add(gpu, kind, *name, size);
    }
    result
}

/// Makes a call that frees the allocation with this address or handle.
pub fn free(kind: Kind, name: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let taken = driver_memory::take(kind, name);
    let result = real();
    if let Some(taken) = taken {
        if result == SUCCESS { taken.release() } else { taken.restore() }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::fake::{Driver, TOTAL, until},
        gpu::fake,
        memory::engine::GRANULE,
    };
    use nvshare_wire::ClientMessage;
    use std::thread;

    #[test]
    fn managed_memory_that_the_driver_serves_is_reported() {
        let driver = Driver::new();
        let (gpu, _, scheduler) = fake::attach_to_scheduler(&driver);
        let reported = || {
            let newest = scheduler.sent().pop();
            let Some(ClientMessage::Memory { pinned, managed, .. }) = newest else { panic!("{newest:?}") };
            (pinned / GRANULE, managed / GRANULE)
        };
        assert_eq!(allocate(Some(gpu), Kind::Managed, &7, 2 * GRANULE, || SUCCESS), SUCCESS);
        assert_eq!(reported(), (2, 2));
        assert_eq!(allocate(Some(gpu), Kind::Address, &8, GRANULE, || SUCCESS), SUCCESS);
        assert_eq!(reported(), (3, 2));
        assert_eq!(free(Kind::Address, 7, || SUCCESS), SUCCESS);
        assert_eq!(reported(), (1, 0));
        assert_eq!(allocate(Some(gpu), Kind::Managed, &9, GRANULE, || SUCCESS), SUCCESS);
        driver_memory::drop_context(gpu, core::ptr::null_mut(), true);
        assert_eq!(reported(), (0, 0));
    }

    #[test]
    fn room_is_requested_on_the_gpu_of_the_memory() {
        let driver = Driver::new();
        let (gpu, _) = fake::attach(&driver);
        let (_, _, scheduler) = fake::attach_to_scheduler(&driver); // the context of this GPU is current
        gpu.introduce(false, |_| {});
        gpu.space().expect("a space").lock().limit(1, TOTAL, TOTAL, 0);
        scheduler.sent();
        thread::scope(|scope| {
            let full = || ERROR_OUT_OF_MEMORY;
            let call = scope.spawn(move || allocate(Some(gpu), Kind::Chunk, &0, GRANULE, full));
            let is_request = |message| matches!(message, ClientMessage::Reserve { slot, .. } if slot == gpu.index);
            until(|| scheduler.next().is_some_and(is_request));
            gpu.reservation_answers.room(0);
            assert_eq!(call.join().expect("no panic"), ERROR_OUT_OF_MEMORY);
        });
    }
}
