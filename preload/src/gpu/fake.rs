//! GPUs of the fake driver.

use super::{Gpu, by_ordinal};
use crate::{
    connection::fake::Scheduler,
    driver::{
        fake::{Driver, TOTAL},
        types::*,
    },
    submit::{self, barrier},
};

/// Attaches this process to another GPU, without a scheduler. Creates a context there, which is current.
pub fn attach(driver: &Driver) -> (&'static Gpu, CUcontext) {
    barrier::init();
    submit::set_active(true);
    let device = driver.new_device();
    assert!(Gpu::attach(device, |_| {}), "the GPU admits a context");
    let gpu = by_ordinal(device).expect("an attached GPU");
    let context = driver.new_context(device);
    gpu.add_context(context);
    driver.set_current(context);
    (gpu, context)
}

/// Does the same, and introduces the GPU to a scheduler, which allows the whole GPU.
pub fn attach_to_scheduler(driver: &Driver) -> (&'static Gpu, CUcontext, Scheduler) {
    let (gpu, context) = attach(driver);
    let scheduler = Scheduler::connect();
    gpu.introduce(false, |_| {});
    assert_eq!(scheduler.sent().len(), 2, "`Attach` and `Memory`");
    if let Some(space) = gpu.space() {
        space.lock().allow(0, TOTAL);
    }
    (gpu, context, scheduler)
}

/// A stream of this GPU with work that is not done.
pub fn busy_stream(driver: &Driver, gpu: &Gpu, context: CUcontext) -> CUstream {
    let stream = driver.new_stream(context);
    gpu.work.note(stream);
    driver.keep_busy(stream);
    stream
}
