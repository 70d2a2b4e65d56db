//! Calls that give the GPU work: they wait at the gate of the current GPU, and count as submitted.

use crate::{
    driver::types::*,
    gate::{
        self, Gate, closed,
        threads::{self, OUTSIDE, Slot},
    },
    gpu::{self, Gpu, reservation::retried},
    hooks::{hooks, peer_access},
    work::capture,
};
use core::{ffi::c_void, sync::atomic::Ordering};

type P = *mut c_void;

/// The weight of a kernel, a memset or a small copy.
pub(super) const ONE: u32 = 1;
/// The weight of a graph, which is many kernels.
const GRAPH: u32 = 4;

/// The weight of a call that gives the GPU no work.
const NOTHING: u32 = 0;

/// The weight of a copy of `n` bytes, in kernels.
fn bytes(n: usize) -> u32 {
    1 + u32::try_from(n >> 24).unwrap_or(u32::MAX).min(1 << 10)
}

/// Makes a call that submits a copy, a memset or a flag: inside the gate, and counted.
#[inline]
pub(super) fn gated(stream: CUstream, weight: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    pass(stream, weight, closed::FOR_COPIES, call)
}

/// Makes a call that submits a kernel or a graph.
#[inline]
fn launched(stream: CUstream, weight: u32, call: impl Fn() -> CUresult) -> CUresult {
    // The driver may load code at the first launch or enlarge the stack. Room for that is made outside the gate.
    retried(|| pass(stream, weight, closed::FOR_ALL, &call))
}

/// Makes a call that gives the GPU no work but names memory, which must be on the GPU because the driver looks it up. Beside a
/// capture memory is there, and stays.
#[inline]
pub(super) fn naming(call: impl FnOnce() -> CUresult) -> CUresult {
    if capture::any() { call() } else { pass(NULL, NOTHING, closed::MEMORY, call) }
}

/// The same for memory of this GPU, whichever context is current.
pub(super) fn naming_on(gpu: &'static Gpu, call: impl FnOnce() -> CUresult) -> CUresult {
    let slot = threads::mine();
    if !gate::is_active() || capture::any() || slot.inside.load(Ordering::Relaxed) != OUTSIDE {
        return call();
    }
    while !gpu.gate.try_enter(gpu.index, slot, closed::MEMORY) {
        gpu.wait(closed::MEMORY);
        if !gate::is_active() {
            return call();
        }
        if gpu.is_mapping_denied() {
            return ERROR_OUT_OF_MEMORY;
        }
    }
    let result = call();
    Gate::leave(gpu.index, slot);
    result
}

#[inline]
fn pass(stream: CUstream, weight: u32, reasons: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    let entered = match enter_as_before(stream, reasons) {
        None => match enter(stream, reasons) {
            Ok(entered) => entered,
            Err(error) => return error,
        },
        entered => entered,
    };
    let result = call();
    if let Some((gpu, slot)) = entered {
        if weight > NOTHING {
            gpu.note(slot, stream);
        }
        Gate::leave(gpu.index, slot);
        if weight > NOTHING {
            gpu.work.submitted(slot, weight, stream);
        }
    }
    result
}

type Entered = Option<(&'static Gpu, &'static Slot)>;

/// Enters the gate of this thread's last launch, if the launch was to the same stream, nothing has changed, and the gate is
/// open.
#[inline]
fn enter_as_before(stream: CUstream, reasons: u32) -> Entered {
    let slot = threads::known()?;
    let gpu = Gpu::of_last_launch(slot, stream)?;
    gpu.gate.try_enter(gpu.index, slot, reasons).then_some((gpu, slot))
}

/// Waits until it may enter. `None` if the call does not concern the gate.
///
/// # Errors
/// Memory that the program has allocated and never used cannot be mapped.
#[inline(never)]
fn enter(stream: CUstream, reasons: u32) -> Result<Entered, CUresult> {
    let Some(gpu) = gate::is_active().then(gpu::current).flatten() else { return Ok(None) };
    let slot = threads::mine();
    // A call from within another, or one that is captured into a graph, submits nothing now.
    if slot.inside.load(Ordering::Relaxed) != OUTSIDE || (capture::any() && capture::is_capturing(stream)) {
        return Ok(None);
    }
    gpu.work.throttle(stream);
    loop {
        let closed = if gpu.gate.try_enter(gpu.index, slot, reasons) {
            // The work may also touch memory of peers.
            gpu.peers().find(|other| other.gate.is_closed_for(reasons))
        } else {
            Some(gpu)
        };
        let Some(closed) = closed else { return Ok(Some((gpu, slot))) };
        slot.inside.store(OUTSIDE, Ordering::Release);
        closed.wait(reasons);
        if !gate::is_active() {
            return Ok(None);
        }
        if closed.is_mapping_denied() {
            return Err(ERROR_OUT_OF_MEMORY);
        }
    }
}

/// The stream of calls that have no stream argument.
const NULL: CUstream = CTX_DEFAULT_STREAM;

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
        let stream = unsafe { config.as_ref() }.map_or(NULL, |c| c.stream);
        launched(flavour.stream(stream), ONE, real)
    }
    [cuLaunchCooperativeKernelMultiDevice] (list: P, devices: u32, flags: u32) { launched(flavour.stream(NULL), ONE, real) }
    [cuLaunch] (f: CUfunction) { launched(flavour.stream(NULL), ONE, real) }
    [cuLaunchGrid] (f: CUfunction, width: i32, height: i32) { launched(flavour.stream(NULL), ONE, real) }
    [cuLaunchGridAsync] (f: CUfunction, width: i32, height: i32, stream: CUstream) { launched(flavour.stream(stream), ONE, real) }
    [cuGraphLaunch | cuGraphLaunch_ptsz] (graph: CUgraphExec, stream: CUstream) { launched(flavour.stream(stream), GRAPH, real) }
    [cuGraphUpload | cuGraphUpload_ptsz] (graph: CUgraphExec, stream: CUstream) {
        retried(|| gated(flavour.stream(stream), ONE, real))
    }

    // ---- copies ----
    [cuMemcpy | cuMemcpy_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) {
        peer_access::touching([to, from]);
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpyPeer | cuMemcpyPeer_ptds] (to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size) {
        peer_access::copying([to_context, from_context]);
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds] (to: CUdeviceptr, from: P, n: Size) {
        peer_access::touching([to, 0]);
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds] (to: P, from: CUdeviceptr, n: Size) {
        peer_access::touching([0, from]);
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) {
        peer_access::touching([to, from]);
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds] (to: CUarray, at: Size, from: CUdeviceptr, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds] (to: CUdeviceptr, from: CUarray, at: Size, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyHtoA_v2 | cuMemcpyHtoA_v2_ptds] (to: CUarray, at: Size, from: P, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyAtoH_v2 | cuMemcpyAtoH_v2_ptds] (to: P, from: CUarray, at: Size, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyAtoA_v2 | cuMemcpyAtoA_v2_ptds] (to: CUarray, at: Size, from: CUarray, from_at: Size, n: Size) {
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds | cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds] (copy: *const Copy2D) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        peer_access::touching_by(|| unsafe { copy.as_ref() }.map(Copy2D::addresses));
        gated(flavour.stream(NULL), ONE, real)
    }
    [cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds] (copy: *const Copy3D) {
        // SAFETY: as above.
        peer_access::touching_by(|| unsafe { copy.as_ref() }.map(Copy3D::addresses));
        gated(flavour.stream(NULL), ONE, real)
    }
    [cuMemcpyAsync | cuMemcpyAsync_ptsz] (to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream) {
        peer_access::touching([to, from]);
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz] (
        to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size, stream: CUstream,
    ) {
        peer_access::copying([to_context, from_context]); gated(flavour.stream(stream), bytes(n), real) }
    [cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz] (to: CUdeviceptr, from: P, n: Size, stream: CUstream) {
        peer_access::touching([to, 0]);
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz] (to: P, from: CUdeviceptr, n: Size, stream: CUstream) {
        peer_access::touching([0, from]);
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz] (to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream) {
        peer_access::touching([to, from]);
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyHtoAAsync_v2 | cuMemcpyHtoAAsync_v2_ptsz] (to: CUarray, at: Size, from: P, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyAtoHAsync_v2 | cuMemcpyAtoHAsync_v2_ptsz] (to: P, from: CUarray, at: Size, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz] (copy: *const Copy2D, stream: CUstream) {
        // SAFETY: as above.
        peer_access::touching_by(|| unsafe { copy.as_ref() }.map(Copy2D::addresses));
        gated(flavour.stream(stream), ONE, real)
    }
    [cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz] (copy: *const Copy3D, stream: CUstream) {
        // SAFETY: as above.
        peer_access::touching_by(|| unsafe { copy.as_ref() }.map(Copy3D::addresses));
        gated(flavour.stream(stream), ONE, real)
    }
    [cuMemcpy3DPeer | cuMemcpy3DPeer_ptds] (copy: *const Copy3D) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        peer_access::copying_by(|| unsafe { copy.as_ref() }.map(|copy| [copy.to.context, copy.from.context]));
        gated(flavour.stream(NULL), ONE, real)
    }
    [cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz] (copy: *const Copy3D, stream: CUstream) {
        // SAFETY: as above.
        peer_access::copying_by(|| unsafe { copy.as_ref() }.map(|copy| [copy.to.context, copy.from.context]));
        gated(flavour.stream(stream), ONE, real)
    }
    [cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz] (
        to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: P, count: Size, attributes: P, indexes: P, n: Size, failed: P, stream: CUstream,
    ) {
        // SAFETY: the program passes that many of each.
        unsafe { peer_access::touching_all(to, from, count) };
        gated(flavour.stream(stream), GRAPH, real)
    }
    [cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz] (
        to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: P, count: Size, attributes: P, indexes: P, n: Size, stream: CUstream,
    ) {
        // SAFETY: the program passes that many of each.
        unsafe { peer_access::touching_all(to, from, count) };
        gated(flavour.stream(stream), GRAPH, real)
    }
    [cuMemcpy3DBatchAsync | cuMemcpy3DBatchAsync_ptsz] (n: Size, list: P, failed: P, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), GRAPH, real)
    }
    [cuMemcpy3DBatchAsync_v2 | cuMemcpy3DBatchAsync_v2_ptsz] (n: Size, list: P, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), GRAPH, real)
    }

    // ---- memsets ----
    [cuMemsetD8_v2 | cuMemsetD8_v2_ptds] (to: CUdeviceptr, value: u8, n: Size) { gated(flavour.stream(NULL), ONE, real) }
    [cuMemsetD16_v2 | cuMemsetD16_v2_ptds] (to: CUdeviceptr, value: u16, n: Size) { gated(flavour.stream(NULL), ONE, real) }
    [cuMemsetD32_v2 | cuMemsetD32_v2_ptds] (to: CUdeviceptr, value: u32, n: Size) { gated(flavour.stream(NULL), ONE, real) }
    [cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u8, width: Size, height: Size) {
        gated(flavour.stream(NULL), ONE, real)
    }
    [cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u16, width: Size, height: Size) {
        gated(flavour.stream(NULL), ONE, real)
    }
    [cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u32, width: Size, height: Size) {
        gated(flavour.stream(NULL), ONE, real)
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

    // ---- copies (13.x) ----
    [cuMemcpyWithAttributesAsync | cuMemcpyWithAttributesAsync_ptsz] (
        to: CUdeviceptr, from: CUdeviceptr, n: Size, attributes: P, stream: CUstream,
    ) { gated(flavour.stream(stream), bytes(n), real) }
    [cuMemcpy3DWithAttributesAsync | cuMemcpy3DWithAttributesAsync_ptsz] (copy: P, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), ONE, real)
    }
    [cuFabricCpyBatchAsync | cuFabricCpyBatchAsync_ptsz] (n: Size, list: P, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), GRAPH, real)
    }
    [cuMemBatchDecompressAsync | cuMemBatchDecompressAsync_ptsz] (
        list: P, n: Size, flags: u32, failed: P, stream: CUstream,
    ) { gated(flavour.stream(stream), GRAPH, real) }
    [cuMemMapArrayAsync | cuMemMapArrayAsync_ptsz] (list: P, n: u32, stream: CUstream) {
        gated(flavour.stream(stream), ONE, real)
    }

    // ---- calls that name memory: the driver looks at what is there now, so it must be there; they give the GPU nothing ----
    [cuGraphAddMemcpyNode] (
        node: P, graph: CUgraph, after: P, n: Size, params: *const Copy3D, context: CUcontext,
    ) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        peer_access::touching_by(|| unsafe { params.as_ref() }.map(Copy3D::addresses));
        naming(real)
    }
    [cuGraphAddMemsetNode] (
        node: P, graph: CUgraph, after: P, n: Size, params: P, context: CUcontext,
    ) { naming(real) }
    [cuGraphAddBatchMemOpNode | cuGraphAddNode] (node: P, graph: CUgraph, after: P, n: Size, params: P) {
        naming(real)
    }
    [cuGraphAddNode_v2 | cuGraphAddNode_v3] (node: P, graph: CUgraph, after: P, edges: P, n: Size, params: P) {
        naming(real)
    }
    [cuGraphMemcpyNodeSetParams | cuGraphMemsetNodeSetParams | cuGraphBatchMemOpNodeSetParams | cuGraphNodeSetParams | cuGraphNodeSetParams_v2] (
        node: P, params: P,
    ) { naming(real) }
    [cuGraphExecMemcpyNodeSetParams | cuGraphExecMemsetNodeSetParams] (
        graph: CUgraphExec, node: P, params: P, context: CUcontext,
    ) { naming(real) }
    [cuGraphExecBatchMemOpNodeSetParams | cuGraphExecNodeSetParams | cuGraphExecChildGraphNodeSetParams] (
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

/// One side of a `CUDA_MEMCPY2D`.
#[derive(Debug)]
#[repr(C)]
pub struct Side2D {
    at: [Size; 2],
    kind: i32,
    host: usize,
    device: CUdeviceptr,
    array: CUarray,
    pitch: Size,
}

/// `CUDA_MEMCPY2D`.
#[derive(Debug)]
#[repr(C)]
pub struct Copy2D {
    from: Side2D,
    to: Side2D,
    extent: [Size; 2],
}

impl Copy2D {
    fn addresses(&self) -> [CUdeviceptr; 2] {
        [&self.from, &self.to].map(|side| on_device(side.kind, side.device))
    }
}

/// One side of a `CUDA_MEMCPY3D` or a `CUDA_MEMCPY3D_PEER`; only the latter has a context.
#[derive(Debug)]
#[repr(C)]
pub struct Side3D {
    at: [Size; 4],
    kind: i32,
    host: usize,
    device: CUdeviceptr,
    array: CUarray,
    context: CUcontext,
    pitch: [Size; 2],
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Debug)]
#[repr(C)]
pub struct Copy3D {
    from: Side3D,
    to: Side3D,
    extent: [Size; 3],
}

impl Copy3D {
    pub fn addresses(&self) -> [CUdeviceptr; 2] {
        [&self.from, &self.to].map(|side| on_device(side.kind, side.device))
    }
}

/// The address of one side of a copy, if it may be on a GPU; otherwise 0.
fn on_device(kind: i32, address: CUdeviceptr) -> CUdeviceptr {
    const DEVICE: i32 = 2;
    const UNIFIED: i32 = 4;
    if matches!(kind, DEVICE | UNIFIED) { address } else { 0 }
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

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const GRAPH_INSTANTIATE_UPLOAD: u64 = 2;

/// The beginning of `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Debug)]
#[repr(C)]
pub struct InstantiateParams {
    flags: u64,
    upload_stream: CUstream,
}
