//! Calls that submit work to a GPU. They wait at the gate of their stream's GPU, and count as submitted
//! work.

use super::allocate::wait_beside_capture;
use crate::{
    copies::route::Route,
    driver::{self, types::*},
    gate::{
        self, Gate, closed,
        threads::{self, Slot},
    },
    gpu::{
        self, Gpu,
        reservation::{again, retried_on},
    },
    sys::{errno, thread::stack_pointer},
    work::{self, capture},
};

/// The weight of a kernel, a memset or a small copy.
pub const ONE: u32 = 1;
/// The weight of a graph, which contains many kernels.
pub const GRAPH: u32 = 4;

/// The weight of a call that submits no work.
const NOTHING: u32 = 0;

/// The weight of a copy of `n` bytes, in kernels.
pub fn bytes(n: usize) -> u32 {
    1 + u32::try_from(n >> 24).unwrap_or(u32::MAX).min(1 << 10)
}

/// Makes a call that submits a copy, a memset or a flag write. The call is made inside the gate, and
/// counted.
#[inline(always)]
pub fn gated(stream: CUstream, weight: u32, call: impl Fn() -> CUresult + Copy) -> CUresult {
    pass::<false>(stream, weight, closed::FOR_COPIES, call)
}

/// Makes a call that submits a kernel or a graph.
#[inline(always)]
pub fn launched(stream: CUstream, weight: u32, call: impl Fn() -> CUresult + Copy) -> CUresult {
    // At the first launch the driver may load code or enlarge the stack. Room for both is made outside the
    // gate.
    pass::<true>(stream, weight, closed::FOR_ALL, call)
}

/// Makes a call that submits no work but names memory. The driver looks up that memory, so it must be
/// on the GPU. During a capture the call passes no gate, because memory then stays on the GPU, and
/// allocations are mapped immediately.
#[inline]
pub fn naming(call: impl FnOnce() -> CUresult) -> CUresult {
    naming_for(CTX_DEFAULT_STREAM, call)
}

/// Makes a call that names memory of this stream's GPU.
pub fn naming_for(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if capture::any() {
        gpu::of_stream(stream).inspect(|gpu| errno::preserved(|| wait_beside_capture(gpu)));
        call()
    } else {
        pass_anyhow(stream, NOTHING, closed::MEMORY, call)
    }
}

/// Makes a call that names memory of this GPU, regardless of the current context.
pub fn naming_on(gpu: &'static Gpu, call: impl FnOnce() -> CUresult) -> CUresult {
    if capture::any() {
        errno::preserved(|| wait_beside_capture(gpu));
        call()
    } else {
        inside(gpu, closed::MEMORY, call)
    }
}

/// Makes a call inside the gate of this GPU. The call counts as use of the GPU. No mark follows its
/// work, so the work must be done when the call returns.
pub fn inside(gpu: &'static Gpu, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    let (slot, here) = (threads::mine(), stack_pointer());
    if !gate::is_active() || !slot.is_outside_for(here) {
        return call();
    }
    match wait_at(gpu, slot, here, reasons) {
        Ok(true) => {
            let result = call();
            Gate::leave(gpu.index, slot);
            result
        }
        Ok(false) => call(),
        Err(error) => error,
    }
}

/// Makes a copy along this route.
#[inline]
pub fn routed(route: Route, stream: CUstream, weight: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    match route.gate {
        None => pass_anyhow(stream, weight, closed::FOR_COPIES, call),
        // The library cannot track the stream's work. So the work is completed before the thread leaves the
        // gate.
        Some(gpu) => inside(gpu, closed::FOR_COPIES, || match call() {
            SUCCESS if !capture::is_capturing(stream) => {
                // SAFETY: the program has just used the stream.
                capture::relaxed(|| unsafe { driver::cuStreamSynchronize(stream) })
            }
            result => result,
        }),
    }
}

/// Makes a call that names memory of several GPUs.
pub fn naming_by(route: Route, call: impl FnOnce() -> CUresult) -> CUresult {
    match route.gate {
        None => naming(call),
        Some(gpu) => naming_on(gpu, call),
    }
}

/// Makes a call inside the gate. If a `REPEATED` call runs out of memory and room can be made, the
/// call is repeated.
///
/// Nearly every launch uses the stream of the thread's previous launch and takes this path, so
/// every instruction counts. The function is therefore inlined into each hook, so the hook's
/// arguments stay in their registers and stack slots. The function calls only the driver. After
/// that call it needs only the slot, which contains the GPU and the stream. All slower paths are
/// closures, which are stored to memory only when needed. If the driver's call itself were in such
/// a closure, the closure would be stored before each launch.
#[inline(always)]
pub fn pass<const REPEATED: bool>(
    stream: CUstream,
    weight: u32,
    reasons: u32,
    call: impl Fn() -> CUresult + Copy,
) -> CUresult {
    let here = stack_pointer();
    let gpu = move || gpu::of_stream(stream);
    let pass_anyhow = move || pass_from(here, stream, weight, reasons, call);
    let Some(slot) = threads::known().filter(|slot| enter_as_before(slot, here, stream as usize, reasons)) else {
        return out_of_line(move || if REPEATED { retried_on(gpu, pass_anyhow) } else { pass_anyhow() });
    };
    let result = call();
    // Checked before the thread leaves the gate, because `result` is available here.
    if REPEATED && result == ERROR_OUT_OF_MEMORY {
        return out_of_line(move || {
            // SAFETY: the thread has entered the gate of its last launch, in `enter_as_before`.
            let gpu_of_call = unsafe { Gpu::of_last_launch(slot) };
            again(gpu_of_call.leave(slot, weight, stream, ERROR_OUT_OF_MEMORY), gpu, pass_anyhow)
        });
    }
    // SAFETY: the thread has entered the gate of its last launch, in `enter_as_before`.
    unsafe { Gpu::leave_as_before(slot, weight, || slot.stream.get() as CUstream, result) }
}

#[inline(never)]
pub fn out_of_line(call: impl FnOnce() -> CUresult) -> CUresult {
    call()
}

/// Makes a call that cannot take the fast path of [`pass`]. If the program has had several contexts,
/// calls in the legacy stream never take the fast path, because only the driver knows the context of
/// that stream.
#[inline]
pub fn pass_anyhow(stream: CUstream, weight: u32, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    pass_from(stack_pointer(), stream, weight, reasons, call)
}

/// Does the same as [`pass_anyhow`], for a calling function with the stack pointer `here`.
#[inline]
pub fn pass_from(
    here: usize,
    stream: CUstream,
    weight: u32,
    reasons: u32,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let known = threads::known().filter(|slot| slot.is_current());
    let enters = |slot: &Slot| work::name_of(stream).is_some_and(|name| enter_as_before(slot, here, name, reasons));
    if let Some(slot) = known.filter(|slot| enters(slot)) {
        let result = call();
        // SAFETY: the thread has entered the gate of its last launch, in `enter_as_before`.
        return unsafe { Gpu::leave_as_before(slot, weight, || stream, result) };
    }
    match enter(stream, here, reasons) {
        Ok(Some((gpu, slot))) => gpu.leave(slot, weight, stream, call()),
        Ok(None) => call(),
        Err(error) => error,
    }
}

/// Enters the gate of this thread's last launch if three conditions hold: that launch used the stream
/// `name`, nothing has changed since, and the gate is open.
#[inline(always)]
pub fn enter_as_before(slot: &Slot, here: usize, name: usize, reasons: u32) -> bool {
    if !slot.is_outside() {
        return false;
    }
    // Marks the thread as inside before it reads the last launch. A signal handler may launch at any time,
    // but it does not change the last launch of a thread that is inside.
    Gate::approach(slot, here);
    // SAFETY: `is_as_before` has checked that the slot has a last launch.
    let entered = Gpu::is_as_before(slot, name) && unsafe { Gpu::of_last_launch(slot) }.gate.lets_in(reasons);
    if !entered {
        Gate::turn_back(slot);
    }
    entered
}

type Entered = Option<(&'static Gpu, &'static Slot)>;

/// Waits until the thread may enter the gate. Returns `None` if the call does not concern the gate.
///
/// # Errors
/// Returns an error if memory that the program has allocated but never used cannot be mapped, or if
/// contents are lost.
#[inline(never)]
pub fn enter(stream: CUstream, here: usize, reasons: u32) -> Result<Entered, CUresult> {
    if !gate::is_active() {
        return Ok(None);
    }
    let slot = threads::mine();
    // A nested call submits nothing of its own, and a captured call submits nothing now.
    if !slot.is_outside_for(here) || (capture::any() && capture::is_capturing(stream)) {
        return Ok(None);
    }
    let Some(gpu) = gpu::of_stream(stream) else { return Ok(None) };
    if stream == STREAM_PER_THREAD {
        errno::preserved(Gpu::expect_blocking_streams);
    }
    gpu.work.throttle(stream);
    Ok(wait_at(gpu, slot, here, reasons)?.then_some((gpu, slot)))
}

/// Waits until this thread is inside the gate of this GPU. Returns `false` if the library has stopped
/// gating.
///
/// # Errors
/// Returns an error if memory that the program has allocated but never used cannot be mapped, or if
/// contents are lost.
pub fn wait_at(gpu: &'static Gpu, slot: &Slot, here: usize, reasons: u32) -> Result<bool, CUresult> {
    loop {
        let closed = if gpu.gate.try_enter(gpu.index, slot, here, reasons) {
            // The work may also access memory of peers.
            gpu.peers().find(|other| other.gate.is_closed_for(reasons))
        } else {
            Some(gpu)
        };
        let Some(closed) = closed else { return Ok(true) };
        Gate::turn_back(slot);
        if closed.has_lost_memory() {
            return Err(ERROR_ECC_UNCORRECTABLE);
        }
        closed.wait(reasons);
        if !gate::is_active() {
            return Ok(false);
        }
        if closed.is_mapping_denied() {
            return Err(ERROR_OUT_OF_MEMORY);
        }
    }
}
