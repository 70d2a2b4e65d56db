//! Copies, which wait at the gate as all work does ([`super::gated`]).

use super::{
    gated::{GRAPH, NULL, ONE, bytes, gated},
    hooks, peer_access,
};
use crate::driver::types::*;
use core::ffi::c_void;

type P = *mut c_void;

hooks! { real, flavour;
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

    // ---- of CUDA 13 ----
    [cuMemcpyWithAttributesAsync | cuMemcpyWithAttributesAsync_ptsz] (
        to: CUdeviceptr, from: CUdeviceptr, n: Size, attributes: P, stream: CUstream,
    ) { gated(flavour.stream(stream), bytes(n), real) }
    [cuMemcpy3DWithAttributesAsync | cuMemcpy3DWithAttributesAsync_ptsz] (copy: P, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), ONE, real)
    }
    [cuFabricCpyBatchAsync | cuFabricCpyBatchAsync_ptsz] (n: Size, list: P, flags: u64, stream: CUstream) {
        gated(flavour.stream(stream), GRAPH, real)
    }
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
