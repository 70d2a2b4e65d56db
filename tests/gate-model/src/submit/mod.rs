//! The library's gate, and models of the modules around it. In this model, a stream's handle is the
//! index of its GPU.

pub mod atomic;
pub mod barrier;
pub mod threads;

// The library's own tests are excluded. The library's list of threads uses more of the fields.
#[cfg(not(test))]
#[allow(dead_code)]
#[path = "../../../../preload/src/submit/fast.rs"]
pub mod fast;
// `Gate::new` is for statics.
#[cfg(not(test))]
#[allow(clippy::new_without_default)]
#[path = "../../../../preload/src/submit/gate.rs"]
mod gate;

pub use fast::{Gate, closed};

use crate::driver::types::{CUresult, CUstream};
use atomic::Ordering;
use fast::{Thread, epoch};

/// The number of GPUs to which threads may submit.
pub const GPUS: usize = 2;

/// The result of a launch at a closed gate, which the library would repeat after a wait.
pub const CLOSED: CUresult = -1;

#[derive(Debug)]
pub struct Lane {
    index: u32,
    pub gate: Gate,
}

loom::lazy_static! {
    static ref LANES: [Lane; GPUS] = [0, 1].map(|index| Lane { index, gate: Gate::new() });
}

/// Called when the execution of a scenario begins. Creates all atomics, because creating them in the
/// scenario's threads would multiply the number of orders.
pub fn begin() {
    atomic::begin();
    epoch::now();
    assert!(LANES.iter().all(|lane| !lane.gate.is_closed_for(closed::FOR_ALL)));
    assert!(threads::all().all(|thread| thread.is_outside_for(0) && thread.at.load(Ordering::SeqCst) == u32::MAX));
    assert_eq!(
        LANES.each_ref().map(|lane| (threads::waiting(lane.index), threads::submitted(lane.index))),
        [(0, 0); GPUS]
    );
}

/// Returns the lane of a GPU.
pub fn lane(gpu: u32) -> &'static Lane {
    &LANES[gpu as usize]
}

impl Lane {
    /// The path of a launch that cannot take the fast path. Tries once to enter.
    pub fn pass(here: usize, stream: CUstream, weight: u32, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
        let (lane, thread) = (lane(stream as u32), threads::mine().expect("a submitting thread"));
        if !lane.gate.try_enter(lane.index, thread, here, reasons) {
            return CLOSED;
        }
        let result = call();
        lane.leave(thread, weight, stream, result)
    }

    /// As in the library: records the launch, and leaves.
    fn leave(&'static self, thread: &Thread, _: u32, stream: CUstream, result: CUresult) -> CUresult {
        thread.record(self, stream as usize, epoch::now());
        thread.leave(self.index);
        result
    }

    /// Never called, because no mark is due.
    fn mark(&self, _: &Thread, _: CUstream, _: CUresult) -> CUresult {
        unreachable!("marks are not modelled")
    }
}
