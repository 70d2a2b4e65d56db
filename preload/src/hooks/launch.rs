//! Hooks of launches, memsets and other work that waits at the gate, and of calls that refer to memory.

use crate::{
    calls::access::{bytes, with_memory, with_memory_along},
    copies::shapes::{Copy3D, Fill, NodeParams, any_node, copy_node, fill_node},
    driver::types::*,
    gpu::{
        self,
        peers::couple,
        reservation::{repeat, retry},
    },
    submit::{
        self, Lane, closed,
        fast::{self, GRAPH, ONE, enqueue},
    },
    sys::{errno, thread::stack_pointer},
};
use core::{cell::UnsafeCell, ffi::c_void};
use nvshare_wire::MAX_SLOTS;

type P = *mut c_void;

/// Makes a call that submits a kernel or a graph.
#[inline(always)]
fn launch(stream: CUstream, weight: u32, call: impl Fn() -> CUresult + Copy) -> CUresult {
    fast::launch(stream, weight, call, move |result| {
        let pass = move || Lane::pass(stack_pointer(), stream, weight, closed::FOR_ALL, call);
        repeat(result, move || gpu::of_stream(stream), pass)
    })
}

/// Makes one call that launches a kernel in each of several streams on different GPUs. The kernels may
/// wait for each other, so the locks of these GPUs must be held together.
///
/// # Safety
/// `list` is NULL or has `count` entries.
unsafe fn launch_on_all(list: *const LaunchParams, count: u32, call: impl Fn() -> CUresult) -> CUresult {
    // SAFETY: `list` has `count` entries: the caller's contract. The driver rejects more entries than
    // there are GPUs.
    let at = |i: u32| unsafe { list.add(i as usize).as_ref() }.map(|launch| launch.stream);
    let streams = (0..count.min(MAX_SLOTS)).map_while(at);
    let mut known = streams.filter_map(|stream| Some((gpu::of_stream(stream)?, stream)));
    let Some((gpu, first)) = known.next().filter(|_| submit::is_active()) else { return call() };
    known.clone().for_each(|(other, _)| errno::preserve(|| couple(gpu, other)));
    launch(first, ONE, || {
        let result = call();
        // The streams are recorded inside the gate that all of the kernels have passed.
        known.clone().for_each(|(other, stream)| errno::preserve(|| other.work.note(stream)));
        result
    })
}

hooks! { always real, flavour;
    // ---- kernels ----
    [cuLaunchKernel | cuLaunchKernel_ptsz] (
        f: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: P, extra: P,
    ) { launch(flavour.stream(stream), ONE, real) }
    [cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz] (
        f: CUfunction, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: P,
    ) { launch(flavour.stream(stream), ONE, real) }
    [cuLaunchKernelEx | cuLaunchKernelEx_ptsz] (config: Option<&LaunchConfig>, f: CUfunction, params: P, extra: P) {
        let stream = config.map_or(CTX_DEFAULT_STREAM, |c| c.stream);
        launch(flavour.stream(stream), ONE, real)
    }
    [cuLaunchCooperativeKernelMultiDevice] (list: *const LaunchParams, devices: u32, flags: u32) {
        // SAFETY: `list` has `devices` entries, as the program states.
        unsafe { launch_on_all(list, devices, real) }
    }
    [cuLaunch] (f: CUfunction) { launch(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuLaunchGrid] (f: CUfunction, width: i32, height: i32) { launch(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuLaunchGridAsync] (f: CUfunction, width: i32, height: i32, stream: CUstream) { launch(flavour.stream(stream), ONE, real) }
    [cuGraphLaunch | cuGraphLaunch_ptsz] (graph: CUgraphExec, stream: CUstream) { launch(flavour.stream(stream), GRAPH, real) }
    [cuGraphUpload | cuGraphUpload_ptsz] (graph: CUgraphExec, stream: CUstream) {
        retry(|| enqueue(flavour.stream(stream), ONE, real))
    }

    // ---- memsets ----
    [cuMemsetD8_v2 | cuMemsetD8_v2_ptds] (to: CUdeviceptr, value: u8, n: Size) { enqueue(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuMemsetD16_v2 | cuMemsetD16_v2_ptds] (to: CUdeviceptr, value: u16, n: Size) { enqueue(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuMemsetD32_v2 | cuMemsetD32_v2_ptds] (to: CUdeviceptr, value: u32, n: Size) { enqueue(flavour.stream(CTX_DEFAULT_STREAM), ONE, real) }
    [cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u8, width: Size, height: Size) {
        enqueue(flavour.stream(CTX_DEFAULT_STREAM), ONE, real)
    }
    [cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u16, width: Size, height: Size) {
        enqueue(flavour.stream(CTX_DEFAULT_STREAM), ONE, real)
    }
    [cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds] (to: CUdeviceptr, pitch: Size, value: u32, width: Size, height: Size) {
        enqueue(flavour.stream(CTX_DEFAULT_STREAM), ONE, real)
    }
    [cuMemsetD8Async | cuMemsetD8Async_ptsz] (to: CUdeviceptr, value: u8, n: Size, stream: CUstream) { enqueue(flavour.stream(stream), ONE, real) }
    [cuMemsetD16Async | cuMemsetD16Async_ptsz] (to: CUdeviceptr, value: u16, n: Size, stream: CUstream) { enqueue(flavour.stream(stream), ONE, real) }
    [cuMemsetD32Async | cuMemsetD32Async_ptsz] (to: CUdeviceptr, value: u32, n: Size, stream: CUstream) { enqueue(flavour.stream(stream), ONE, real) }
    [cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz] (
        to: CUdeviceptr, pitch: Size, value: u8, width: Size, height: Size, stream: CUstream,
    ) { enqueue(flavour.stream(stream), ONE, real) }
    [cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz] (
        to: CUdeviceptr, pitch: Size, value: u16, width: Size, height: Size, stream: CUstream,
    ) { enqueue(flavour.stream(stream), ONE, real) }
    [cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz] (
        to: CUdeviceptr, pitch: Size, value: u32, width: Size, height: Size, stream: CUstream,
    ) { enqueue(flavour.stream(stream), ONE, real) }

    // ---- migration of managed memory ----
    [cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz] (at: CUdeviceptr, n: Size, device: CUdevice, stream: CUstream) {
        enqueue(flavour.stream(stream), bytes(n), real)
    }
    [cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz] (
        at: CUdeviceptr, n: Size, location: Location, flags: u32, stream: CUstream,
    ) { enqueue(flavour.stream(stream), bytes(n), real) }
    [cuMemPrefetchBatchAsync | cuMemPrefetchBatchAsync_ptsz | cuMemDiscardAndPrefetchBatchAsync | cuMemDiscardAndPrefetchBatchAsync_ptsz] (
        at: P, sizes: P, count: Size, locations: P, indexes: P, n: Size, flags: u64, stream: CUstream,
    ) { enqueue(flavour.stream(stream), GRAPH, real) }
    [cuMemDiscardBatchAsync | cuMemDiscardBatchAsync_ptsz] (at: P, sizes: P, count: Size, flags: u64, stream: CUstream) {
        enqueue(flavour.stream(stream), ONE, real)
    }

    // ---- decompression ----
    [cuMemBatchDecompressAsync | cuMemBatchDecompressAsync_ptsz] (
        list: P, n: Size, flags: u32, failed: P, stream: CUstream,
    ) { enqueue(flavour.stream(stream), GRAPH, real) }

    // ---- calls that refer to memory ----
    // The driver looks the memory up, so it must be on the GPU. The calls submit no work.
    [cuGraphAddMemcpyNode] (
        node: P, graph: CUgraph, after: P, n: Size, params: Option<&Copy3D>, context: CUcontext,
    ) {
        with_memory_along(copy_node(params), real)
    }
    [cuGraphAddMemsetNode] (
        node: P, graph: CUgraph, after: P, n: Size, params: Option<&Fill>, context: CUcontext,
    ) {
        with_memory_along(fill_node(params), real)
    }
    [cuGraphAddBatchMemOpNode] (node: P, graph: CUgraph, after: P, n: Size, params: P) { with_memory(real) }
    [cuGraphAddNode] (node: P, graph: CUgraph, after: P, n: Size, params: Option<&NodeParams>) {
        with_memory_along(any_node(params), real)
    }
    [cuGraphAddNode_v2 | cuGraphAddNode_v3] (node: P, graph: CUgraph, after: P, edges: P, n: Size, params: Option<&NodeParams>) {
        with_memory_along(any_node(params), real)
    }
    [cuGraphMemcpyNodeSetParams] (node: P, params: Option<&Copy3D>) {
        with_memory_along(copy_node(params), real)
    }
    [cuGraphMemsetNodeSetParams] (node: P, params: Option<&Fill>) {
        with_memory_along(fill_node(params), real)
    }
    [cuGraphBatchMemOpNodeSetParams] (node: P, params: P) { with_memory(real) }
    [cuGraphNodeSetParams | cuGraphNodeSetParams_v2] (node: P, params: Option<&NodeParams>) {
        with_memory_along(any_node(params), real)
    }
    [cuGraphExecMemcpyNodeSetParams] (graph: CUgraphExec, node: P, params: Option<&Copy3D>, context: CUcontext) {
        with_memory_along(copy_node(params), real)
    }
    [cuGraphExecMemsetNodeSetParams] (graph: CUgraphExec, node: P, params: Option<&Fill>, context: CUcontext) {
        with_memory_along(fill_node(params), real)
    }
    [cuGraphExecNodeSetParams] (graph: CUgraphExec, node: P, params: Option<&NodeParams>) {
        with_memory_along(any_node(params), real)
    }
    [cuGraphExecBatchMemOpNodeSetParams | cuGraphExecChildGraphNodeSetParams] (
        graph: CUgraphExec, node: P, params: P,
    ) { with_memory(real) }
    [cuGraphExecUpdate] (graph: CUgraphExec, from: CUgraph, node: P, outcome: P) { with_memory(real) }
    [cuGraphExecUpdate_v2] (graph: CUgraphExec, from: CUgraph, outcome: P) { with_memory(real) }
    [cuGraphInstantiate | cuGraphInstantiate_v2] (place: P, graph: CUgraph, node: P, log: P, size: Size) {
        retry(|| with_memory(real))
    }
    [cuGraphInstantiateWithFlags] (place: P, graph: CUgraph, flags: u64) { retry(|| with_memory(real)) }
    [cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz] (place: P, graph: CUgraph, params: Option<&InstantiateParams>) {
        match params {
            Some(p) if p.flags & GRAPH_INSTANTIATE_UPLOAD != 0 => retry(|| enqueue(flavour.stream(p.upload_stream), ONE, real)),
            _ => retry(|| with_memory(real)),
        }
    }
    [cuTexObjectCreate] (place: P, resource: P, texture: P, view: P) { with_memory(real) }
    [cuTexRefSetAddress_v2] (offset: *mut Size, texture: P, at: CUdeviceptr, n: Size) { with_memory(real) }
    [cuTexRefSetAddress2D_v2 | cuTexRefSetAddress2D_v3] (texture: P, descriptor: P, at: CUdeviceptr, pitch: Size) {
        with_memory(real)
    }

    // A stream that waits for a value does not help running work to end, so these calls wait at the
    // gate like kernels.
    [cuStreamWaitValue32 | cuStreamWaitValue32_ptsz | cuStreamWaitValue32_v2 | cuStreamWaitValue32_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u32, flags: u32,
    ) { launch(flavour.stream(stream), ONE, real) }
    [cuStreamWaitValue64 | cuStreamWaitValue64_ptsz | cuStreamWaitValue64_v2 | cuStreamWaitValue64_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u64, flags: u32,
    ) { launch(flavour.stream(stream), ONE, real) }
    [cuStreamWriteValue32 | cuStreamWriteValue32_ptsz | cuStreamWriteValue32_v2 | cuStreamWriteValue32_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u32, flags: u32,
    ) { enqueue(flavour.stream(stream), ONE, real) }
    [cuStreamWriteValue64 | cuStreamWriteValue64_ptsz | cuStreamWriteValue64_v2 | cuStreamWriteValue64_v2_ptsz] (
        stream: CUstream, at: CUdeviceptr, value: u64, flags: u32,
    ) { enqueue(flavour.stream(stream), ONE, real) }
    [cuStreamBatchMemOp | cuStreamBatchMemOp_ptsz | cuStreamBatchMemOp_v2 | cuStreamBatchMemOp_v2_ptsz] (
        stream: CUstream, count: u32, params: P, flags: u32,
    ) { enqueue(flavour.stream(stream), ONE, real) }
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

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`
#[derive(Debug)]
#[repr(C)]
pub struct InstantiateParams {
    flags: u64,
    upload_stream: CUstream,
    /// Written by the driver: the node that failed, and the result.
    _written: UnsafeCell<[u64; 2]>,
}
