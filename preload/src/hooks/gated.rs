//! Calls that give a GPU work: they wait at the gate of the GPU of their stream, and count as submitted.

use crate::{
    copies::{
        route::Route,
        shapes::{Copy3D, Fill, NodeParams, any_node, copy_node, fill_node},
    },
    driver::{self, hook::hooks, types::*},
    gate::{
        self, Gate, closed,
        threads::{self, Slot},
    },
    gpu::{
        self, Gpu,
        peers::couple,
        reservation::{again, retried, retried_on},
    },
    hooks::memory::wait_beside_capture,
    sys::{errno, thread::stack_pointer},
    work::{self, capture},
};
use core::ffi::c_void;
use nvshare_wire::MAX_SLOTS;

type P = *mut c_void;

/// The weight of a kernel, a memset or a small copy.
pub(super) const ONE: u32 = 1;
/// The weight of a graph, which is many kernels.
pub(super) const GRAPH: u32 = 4;

/// The weight of a call that gives the GPU no work.
const NOTHING: u32 = 0;

/// The weight of a copy of `n` bytes, in kernels.
pub(super) fn bytes(n: usize) -> u32 {
    1 + u32::try_from(n >> 24).unwrap_or(u32::MAX).min(1 << 10)
}

/// Makes a call that submits a copy, a memset or a flag: inside the gate, and counted.
#[inline(always)]
pub(super) fn gated(stream: CUstream, weight: u32, call: impl Fn() -> CUresult + Copy) -> CUresult {
    pass::<false>(stream, weight, closed::FOR_COPIES, call)
}

/// Makes a call that submits a kernel or a graph.
#[inline(always)]
fn launched(stream: CUstream, weight: u32, call: impl Fn() -> CUresult + Copy) -> CUresult {
    // The driver may load code at the first launch or enlarge the stack. Room for that is made outside the gate.
    pass::<true>(stream, weight, closed::FOR_ALL, call)
}

/// Makes one call that launches a kernel in each of several streams, which are of different GPUs: the kernels may wait for each
/// other, so the GPUs are held together.
///
/// # Safety
/// `list` is NULL or has that many entries.
unsafe fn launched_on_all(list: *const LaunchParams, count: u32, call: impl Fn() -> CUresult) -> CUresult {
    // SAFETY: the caller's promise; the driver refuses more entries than GPUs.
    let at = |i: u32| unsafe { list.add(i as usize).as_ref() }.map(|launch| launch.stream);
    let streams = (0..count.min(MAX_SLOTS)).map_while(at);
    let mut known = streams.filter_map(|stream| Some((gpu::of_stream(stream)?, stream)));
    let Some((gpu, first)) = known.next().filter(|_| gate::is_active()) else { return call() };
    known.clone().for_each(|(other, _)| errno::preserved(|| couple(gpu, other)));
    launched(first, ONE, || {
        let result = call();
        // Inside the gate, through which all of them have passed.
        known.clone().for_each(|(other, stream)| errno::preserved(|| other.work.note(stream)));
        result
    })
}

/// Makes a call that gives the GPU no work but names memory, which must be on the GPU because the driver looks it up. Beside a
/// capture memory stays, and what is allocated comes at once.
#[inline]
pub(super) fn naming(call: impl FnOnce() -> CUresult) -> CUresult {
    naming_for(CTX_DEFAULT_STREAM, call)
}

/// The same for memory of the GPU of this stream.
pub(super) fn naming_for(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if capture::any() {
        gpu::of_stream(stream).inspect(|gpu| errno::preserved(|| wait_beside_capture(gpu)));
        call()
    } else {
        pass_anyhow(stream, NOTHING, closed::MEMORY, call)
    }
}

/// The same for memory of this GPU, whichever context is current.
pub(super) fn naming_on(gpu: &'static Gpu, call: impl FnOnce() -> CUresult) -> CUresult {
    if capture::any() {
        errno::preserved(|| wait_beside_capture(gpu));
        call()
    } else {
        inside(gpu, closed::MEMORY, call)
    }
}

/// Makes a call inside the gate of this GPU, which must be done when it returns: its work is not counted.
fn inside(gpu: &'static Gpu, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
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

/// Makes a call that copies by this route.
#[inline]
pub(super) fn routed(route: Route, stream: CUstream, weight: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    match route.gate {
        None => pass_anyhow(stream, weight, closed::FOR_COPIES, call),
        // The stream's work cannot be followed, so nothing remains of it when the gate is left.
        Some(gpu) => inside(gpu, closed::FOR_COPIES, || match call() {
            SUCCESS if !capture::is_capturing(stream) => {
                // SAFETY: the program has just used it.
                capture::relaxed(|| unsafe { driver::cuStreamSynchronize(stream) })
            }
            result => result,
        }),
    }
}

/// Makes a call that names memory of several GPUs.
pub(super) fn naming_by(route: Route, call: impl FnOnce() -> CUresult) -> CUresult {
    match route.gate {
        None => naming(call),
        Some(gpu) => naming_on(gpu, call),
    }
}

/// Makes a call inside the gate; one that is `REPEATED` is made again where it runs out of memory and room can be made. Nearly every
/// launch goes to the stream of the one before: it is here where instructions count, so this is a part of each hook, whose arguments
/// stay where they are. It calls nothing but the driver, and after that call it needs nothing but the slot, in which the GPU and the
/// stream are. Whatever else happens is a closure of its own, which is put into memory where it is needed; the call itself would be
/// before each launch.
#[inline(always)]
fn pass<const REPEATED: bool>(
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
    // Before it leaves, as the result is at hand here.
    if REPEATED && result == ERROR_OUT_OF_MEMORY {
        return out_of_line(move || {
            // SAFETY: it has entered as before.
            let gpu_of_call = unsafe { Gpu::of_last_launch(slot) };
            again(gpu_of_call.leave(slot, weight, stream, ERROR_OUT_OF_MEMORY), gpu, pass_anyhow)
        });
    }
    // SAFETY: as above.
    unsafe { Gpu::leave_as_before(slot, weight, || slot.stream.get() as CUstream, result) }
}

#[inline(never)]
fn out_of_line(call: impl FnOnce() -> CUresult) -> CUresult {
    call()
}

/// The same for a call of which nothing is known yet. The legacy stream also comes here each time if the program has had several
/// contexts, as the driver must say of which one it is.
#[inline]
fn pass_anyhow(stream: CUstream, weight: u32, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    pass_from(stack_pointer(), stream, weight, reasons, call)
}

/// The same for a function with this stack pointer.
#[inline]
fn pass_from(here: usize, stream: CUstream, weight: u32, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    let known = threads::known().filter(|slot| slot.is_current());
    let enters = |slot: &Slot| work::name_of(stream).is_some_and(|name| enter_as_before(slot, here, name, reasons));
    if let Some(slot) = known.filter(|slot| enters(slot)) {
        let result = call();
        // SAFETY: it has entered as before.
        return unsafe { Gpu::leave_as_before(slot, weight, || stream, result) };
    }
    match enter(stream, here, reasons) {
        Ok(Some((gpu, slot))) => gpu.leave(slot, weight, stream, call()),
        Ok(None) => call(),
        Err(error) => error,
    }
}

/// Enters the gate of this thread's last launch, if the launch was to the stream of this name, nothing has changed, and the gate is
/// open.
#[inline(always)]
fn enter_as_before(slot: &Slot, here: usize, name: usize, reasons: u32) -> bool {
    if !slot.is_outside() {
        return false;
    }
    // Before it looks at the last launch: a signal handler may launch at any time, and changes nothing of that from here on.
    Gate::approach(slot, here);
    // SAFETY: there has been a launch if one is as before.
    let entered = Gpu::is_as_before(slot, name) && unsafe { Gpu::of_last_launch(slot) }.gate.lets_in(reasons);
    if !entered {
        Gate::turn_back(slot);
    }
    entered
}

type Entered = Option<(&'static Gpu, &'static Slot)>;

/// Waits until it may enter. `None` if the call does not concern the gate.
///
/// # Errors
/// Memory that the program has allocated and never used cannot be mapped, or contents are lost.
#[inline(never)]
fn enter(stream: CUstream, here: usize, reasons: u32) -> Result<Entered, CUresult> {
    if !gate::is_active() {
        return Ok(None);
    }
    let slot = threads::mine();
    // A call from within another, or one that is captured into a graph, submits nothing now.
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

/// Waits until this thread is inside the gate of this GPU. `false` if the gates are no more.
///
/// # Errors
/// Memory that the program has allocated and never used cannot be mapped, or contents are lost.
fn wait_at(gpu: &'static Gpu, slot: &Slot, here: usize, reasons: u32) -> Result<bool, CUresult> {
    loop {
        let closed = if gpu.gate.try_enter(gpu.index, slot, here, reasons) {
            // The work may also touch memory of peers.
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

hooks! { real, flavour;
    // ---- kernels ----
    [cuLaunchKernel | cuLaunchKernel_ptsz] (
        f: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: P, extra: P,
    ) { launched(flavour.stream(stream), ONE, real) }
    [cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz] (
        f: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: P,
    ) { launched(flavour.stream(stream), ONE, real) }
    [cuLaunchKernelEx | cuLaunchKernelEx_ptsz] (config: *const LaunchConfig, f: CUfunction, params: P, extra: P) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        let stream = unsafe { config.as_ref() }.map_or(CTX_DEFAULT_STREAM, |c| c.stream);
        launched(flavour.stream(stream), ONE, real)
    }
    [cuLaunchCooperativeKernelMultiDevice] (list: *const LaunchParams, devices: u32, flags: u32) {
        // SAFETY: the program passes that many entries.
        unsafe { launched_on_all(list, devices, real) }
    }
    [cuLaunch] (f: CUfunction) { launched(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuLaunchGrid] (f: CUfunction, width: i32, height: i32) { launched(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuLaunchGridAsync] (f: CUfunction, width: i32, height: i32, stream: CUstream) { launched(flavour.stream(stream), ONE, real) }
    [cuGraphLaunch | cuGraphLaunch_ptsz] (graph: CUgraphExec, stream: CUstream) { launched(flavour.stream(stream), GRAPH, real) }
    [cuGraphUpload | cuGraphUpload_ptsz] (graph: CUgraphExec, stream: CUstream) {
        retried(|| gated(flavour.stream(stream), ONE, real))
    }

    // ---- memsets ----
    [cuMemsetD8_v2 | cuMemsetD8_v2_ptds] (to: CUdeviceptr, value: u8, n: Size) { gated(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuMemsetD16_v2 | cuMemsetD16_v2_ptds] (to: CUdeviceptr, value: u16, n: Size) { gated(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuMemsetD32_v2 | cuMemsetD32_v2_ptds] (to: CUdeviceptr, value: u32, n: Size) { gated(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u8, width: Size, height: Size) {
        gated(flavour.stream(CTX_DEFAULT_STREAM), ONE, real)
    }
    [cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u16, width: Size, height: Size) {
        gated(flavour.stream(CTX_DEFAULT_STREAM), ONE, real)
    }
    [cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u32, width: Size, height: Size) {
        gated(flavour.stream(CTX_DEFAULT_STREAM), ONE, real)
    }
    [cuMemsetD8Async | cuMemsetD8Async_ptsz] (to: CUdeviceptr, value: u8, n: Size, stream: CUstream) { gated(flavour.stream(stream), ONE, real) }
    [cuMemsetD16Async | cuMemsetD16Async_ptsz] (to: CUdeviceptr, value: u16, n: Size, stream: CUstream) { gated(flavour.stream(stream), ONE, real) }
    [cuMemsetD32Async | cuMemsetD32Async_ptsz] (to: CUdeviceptr, value: u32, n: Size, stream: CUstream) { gated(flavour.stream(stream), ONE, real) }
    [cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz] (
        to: CUdeviceptr, pitch: Size, value: u8, width: Size, height: Size, stream: CUstream,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz] (
        to: CUdeviceptr, pitch: Size, value: u16, width: Size, height: Size, stream: CUstream,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz] (
        to: CUdeviceptr, pitch: Size, value: u32, width: Size, height: Size, stream: CUstream,
    ) { gated(flavour.stream(stream), ONE, real) }

    // ---- migration of managed memory ----
    [cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz] (at: CUdeviceptr, n: Size, device: CUdevice, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz] (
        at: CUdeviceptr, n: Size, location: Location, flags: u32, stream: CUstream,
    ) { gated(flavour.stream(stream), bytes(n), real) }
    [cuMemPrefetchBatchAsync | cuMemPrefetchBatchAsync_ptsz | cuMemDiscardAndPrefetchBatchAsync | cuMemDiscardAndPrefetchBatchAsync_ptsz] (
        at: P, sizes: P, count: Size, locations: P, indexes: P, n: Size, flags: u64, stream: CUstream,
    ) { gated(flavour.stream(stream), GRAPH, real) }
    [cuMemDiscardBatchAsync | cuMemDiscardBatchAsync_ptsz] (at: P, sizes: P, count: Size, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), ONE, real)
    }

    // ---- decompression ----
    [cuMemBatchDecompressAsync | cuMemBatchDecompressAsync_ptsz] (
        list: P, n: Size, flags: u32, failed: P, stream: CUstream,
    ) { gated(flavour.stream(stream), GRAPH, real) }

    // ---- calls that name memory: the driver looks at what is there now, so it must be there; they give the GPU nothing ----
    [cuGraphAddMemcpyNode] (
        node: P, graph: CUgraph, after: P, n: Size, params: *const Copy3D, context: CUcontext,
    ) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        naming_by(unsafe { copy_node(params) }, real)
    }
    [cuGraphAddMemsetNode] (
        node: P, graph: CUgraph, after: P, n: Size, params: *const Fill, context: CUcontext,
    ) {
        // SAFETY: as above.
        naming_by(unsafe { fill_node(params) }, real)
    }
    [cuGraphAddBatchMemOpNode] (node: P, graph: CUgraph, after: P, n: Size, params: P) { naming(real) }
    [cuGraphAddNode] (node: P, graph: CUgraph, after: P, n: Size, params: *const NodeParams) {
        // SAFETY: as above.
        naming_by(unsafe { any_node(params) }, real)
    }
    [cuGraphAddNode_v2 | cuGraphAddNode_v3] (node: P, graph: CUgraph, after: P, edges: P, n: Size, params: *const NodeParams) {
        // SAFETY: as above.
        naming_by(unsafe { any_node(params) }, real)
    }
    [cuGraphMemcpyNodeSetParams] (node: P, params: *const Copy3D) {
        // SAFETY: as above.
        naming_by(unsafe { copy_node(params) }, real)
    }
    [cuGraphMemsetNodeSetParams] (node: P, params: *const Fill) {
        // SAFETY: as above.
        naming_by(unsafe { fill_node(params) }, real)
    }
    [cuGraphBatchMemOpNodeSetParams] (node: P, params: P) { naming(real) }
    [cuGraphNodeSetParams | cuGraphNodeSetParams_v2] (node: P, params: *const NodeParams) {
        // SAFETY: as above.
        naming_by(unsafe { any_node(params) }, real)
    }
    [cuGraphExecMemcpyNodeSetParams] (graph: CUgraphExec, node: P, params: *const Copy3D, context: CUcontext) {
        // SAFETY: as above.
        naming_by(unsafe { copy_node(params) }, real)
    }
    [cuGraphExecMemsetNodeSetParams] (graph: CUgraphExec, node: P, params: *const Fill, context: CUcontext) {
        // SAFETY: as above.
        naming_by(unsafe { fill_node(params) }, real)
    }
    [cuGraphExecNodeSetParams] (graph: CUgraphExec, node: P, params: *const NodeParams) {
        // SAFETY: as above.
        naming_by(unsafe { any_node(params) }, real)
    }
    [cuGraphExecBatchMemOpNodeSetParams | cuGraphExecChildGraphNodeSetParams] (
        graph: CUgraphExec, node: P, params: P,
    ) { naming(real) }
    [cuGraphExecUpdate] (graph: CUgraphExec, from: CUgraph, node: P, outcome: P) { naming(real) }
    [cuGraphExecUpdate_v2] (graph: CUgraphExec, from: CUgraph, outcome: P) { naming(real) }
    [cuGraphInstantiate | cuGraphInstantiate_v2] (place: P, graph: CUgraph, node: P, log: P, size: Size) {
        retried(|| naming(real))
    }
    [cuGraphInstantiateWithFlags] (place: P, graph: CUgraph, flags: u64) { retried(|| naming(real)) }
    [cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz] (place: P, graph: CUgraph, params: *const InstantiateParams) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        match unsafe { params.as_ref() } {
            Some(p) if p.flags & GRAPH_INSTANTIATE_UPLOAD != 0 => retried(|| gated(flavour.stream(p.upload_stream), ONE, real)),
            _ => retried(|| naming(real)),
        }
    }
    [cuTexObjectCreate] (place: P, resource: P, texture: P, view: P) { naming(real) }
    [cuTexRefSetAddress_v2] (offset: *mut Size, texture: P, at: CUdeviceptr, n: Size) { naming(real) }
    [cuTexRefSetAddress2D_v2 | cuTexRefSetAddress2D_v3] (texture: P, descriptor: P, at: CUdeviceptr, pitch: Size) {
        naming(real)
    }

    // ---- stream memory operations: they read and write device memory in stream order ----
    // A wait gives what runs no help to end, so it waits with the kernels.
    [cuStreamWaitValue32 | cuStreamWaitValue32_ptsz | cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u32, flags: u32,
    ) { launched(flavour.stream(stream), ONE, real) }
    [cuStreamWaitValue64 | cuStreamWaitValue64_ptsz | cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u64, flags: u32,
    ) { launched(flavour.stream(stream), ONE, real) }
    [cuStreamWriteValue32 | cuStreamWriteValue32_ptsz | cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u32, flags: u32,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuStreamWriteValue64 | cuStreamWriteValue64_ptsz | cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u64, flags: u32,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuStreamBatchMemOp | cuStreamBatchMemOp_ptsz | cuStreamBatchMemOp_v2 | cuStreamBatchMemOp_v2_ptsz] (
        stream: CUstream, count: u32, params: P, flags: u32,
    ) { gated(flavour.stream(stream), ONE, real) }
}

/// The beginning of `CUlaunchConfig`.
#[derive(Debug)]
#[repr(C)]
pub struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: CUstream,
}

/// `CUDA_LAUNCH_PARAMS`.
#[derive(Debug)]
#[repr(C)]
pub struct LaunchParams {
    function: CUfunction,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: CUstream,
    arguments: P,
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const GRAPH_INSTANTIATE_UPLOAD: u64 = 2;

/// The beginning of `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Debug)]
#[repr(C)]
pub struct InstantiateParams {
    flags: u64,
    upload_stream: CUstream,
}
