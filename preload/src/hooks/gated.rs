//! Calls that give the GPU work: they wait at the gate of the calling thread's GPU, and count as submitted.

use crate::{
    capture, client,
    cuda::*,
    gate::Gate,
    gpu,
    hooks::hooks,
    threads::{self, OUTSIDE},
};
use core::{ffi::c_void, sync::atomic::Ordering};

type P = *mut c_void;

/// A kernel, a memset, a small copy.
pub(super) const ONE: u32 = 1;
/// A graph is many kernels.
const GRAPH: u32 = 4;

/// A copy of so many bytes weighs as much as that many kernels.
fn bytes(n: usize) -> u32 {
    1 + u32::try_from(n >> 24).unwrap_or(u32::MAX).min(1 << 10)
}

/// Passes the gate, makes the call, and counts it.
#[inline]
pub(super) fn gated(stream: CUstream, weight: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    if !client::is_on() {
        return call();
    }
    let Some(gpu) = gpu::current() else { return call() };
    let slot = threads::mine();
    // A call from inside another, or one that goes into a graph, gives the GPU nothing now.
    if slot.inside.load(Ordering::Relaxed) != OUTSIDE || (capture::any() && capture::is_capturing(stream)) {
        return call();
    }
    while !gpu.gate.try_enter(gpu.index, slot) {
        gpu.wait();
        if !client::is_on() {
            return call();
        }
    }
    let result = call();
    Gate::leave(gpu.index, slot);
    gpu.work.submitted(slot, weight, stream);
    result
}

/// The stream of calls that name none.
const NULL: CUstream = CTX_DEFAULT_STREAM;

hooks! { real, flavour;
    // ---- kernels ----
    [cuLaunchKernel | cuLaunchKernel_ptsz] (
        f: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: P, extra: P,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz] (
        f: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: P,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuLaunchKernelEx | cuLaunchKernelEx_ptsz] (config: *const LaunchConfig, f: CUfunction, params: P, extra: P) {
        // SAFETY: the driver reads it too; NULL is its error to give.
        let stream = unsafe { config.as_ref() }.map_or(NULL, |c| c.stream);
        gated(flavour.stream(stream), ONE, real)
    }
    [cuLaunchCooperativeKernelMultiDevice] (list: P, devices: u32, flags: u32) { gated(flavour.stream(NULL), ONE, real) }
    [cuLaunch] (f: CUfunction) { gated(flavour.stream(NULL), ONE, real) }
    [cuLaunchGrid] (f: CUfunction, width: i32, height: i32) { gated(flavour.stream(NULL), ONE, real) }
    [cuLaunchGridAsync] (f: CUfunction, width: i32, height: i32, stream: CUstream) { gated(flavour.stream(stream), ONE, real) }
    [cuGraphLaunch | cuGraphLaunch_ptsz] (graph: CUgraphExec, stream: CUstream) { gated(flavour.stream(stream), GRAPH, real) }
    [cuGraphUpload | cuGraphUpload_ptsz] (graph: CUgraphExec, stream: CUstream) { gated(flavour.stream(stream), ONE, real) }

    // ---- copies ----
    [cuMemcpy | cuMemcpy_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyPeer | cuMemcpyPeer_ptds] (to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size) {
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds] (to: CUdeviceptr, from: P, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds] (to: P, from: CUdeviceptr, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds] (to: CUarray, at: Size, from: CUdeviceptr, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds] (to: CUdeviceptr, from: CUarray, at: Size, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyHtoA_v2 | cuMemcpyHtoA_v2_ptds] (to: CUarray, at: Size, from: P, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyAtoH_v2 | cuMemcpyAtoH_v2_ptds] (to: P, from: CUarray, at: Size, n: Size) { gated(flavour.stream(NULL), bytes(n), real) }
    [cuMemcpyAtoA_v2 | cuMemcpyAtoA_v2_ptds] (to: CUarray, at: Size, from: CUarray, from_at: Size, n: Size) {
        gated(flavour.stream(NULL), bytes(n), real)
    }
    [cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds | cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds | cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds | cuMemcpy3DPeer | cuMemcpy3DPeer_ptds] (copy: P) { gated(flavour.stream(NULL), ONE, real) }
    [cuMemcpyAsync | cuMemcpyAsync_ptsz] (to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz] (
        to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size, stream: CUstream,
    ) { gated(flavour.stream(stream), bytes(n), real) }
    [cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz] (to: CUdeviceptr, from: P, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz] (to: P, from: CUdeviceptr, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz] (to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyHtoAAsync_v2 | cuMemcpyHtoAAsync_v2_ptsz] (to: CUarray, at: Size, from: P, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpyAtoHAsync_v2 | cuMemcpyAtoHAsync_v2_ptsz] (to: P, from: CUarray, at: Size, n: Size, stream: CUstream) {
        gated(flavour.stream(stream), bytes(n), real)
    }
    [cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz | cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz | cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz] (copy: P, stream: CUstream) { gated(flavour.stream(stream), ONE, real) }
    [cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz] (
        to: P, from: P, sizes: P, count: Size, attributes: P, indexes: P, n: Size, failed: P, stream: CUstream,
    ) { gated(flavour.stream(stream), GRAPH, real) }
    [cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz] (
        to: P, from: P, sizes: P, count: Size, attributes: P, indexes: P, n: Size, stream: CUstream,
    ) { gated(flavour.stream(stream), GRAPH, real) }
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

    // ---- stream memory operations: they read and write device memory in stream order ----
    [cuStreamWaitValue32 | cuStreamWaitValue32_ptsz | cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz | cuStreamWriteValue32 | cuStreamWriteValue32_ptsz | cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u32, flags: u32,
    ) { gated(flavour.stream(stream), ONE, real) }
    [cuStreamWaitValue64 | cuStreamWaitValue64_ptsz | cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz | cuStreamWriteValue64 | cuStreamWriteValue64_ptsz | cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz] (
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
