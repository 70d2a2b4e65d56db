//! Hooks of copies. Copies wait at the gate like all work ([`super::launch`]). A copy between two GPUs
//! is work of both GPUs, and is staged if necessary ([`crate::copies::stage`]).

use crate::{
    calls::access::{bytes, copy_along},
    copies::{
        route::{Side, contexts, many, route},
        shapes::{BatchCopy3D, Copy2D, Copy3D},
        stage,
    },
    driver::{self, hook::Flavour, types::*},
    submit::fast::{GRAPH, ONE, enqueue},
};
use core::ffi::c_void;

type P = *mut c_void;

/// Destination and source of a copy by address. A side in host memory may be [`HOST`].
type Ends = [CUdeviceptr; 2];

/// A placeholder for an address in host memory.
const HOST: CUdeviceptr = 0;

/// Makes a copy in stream order, or in the default stream if `stream` is `None`. In the default stream, the copy
/// is done on return. `between` makes the copy in a stream, between the contexts of destination and source.
/// `again` makes the same copy in another stream.
#[inline]
fn copy(
    (flavour, stream): (Flavour, Option<CUstream>),
    (sides, weight): ([Side; 2], u32),
    real: impl FnOnce() -> CUresult,
    between: impl FnOnce([CUcontext; 2], CUstream) -> CUresult,
    again: impl FnOnce(CUstream) -> CUresult,
) -> CUresult {
    let (is_awaited, stream) = (stream.is_none(), flavour.stream(stream.unwrap_or(CTX_DEFAULT_STREAM)));
    let route = route(stream, sides);
    let between = |contexts| between(contexts, stream);
    copy_along(route, stream, weight, || stage::copy(route.way, stream, is_awaited, real, between, again))
}

/// Copies `n` bytes.
#[inline]
fn copy_bytes(
    order: (Flavour, Option<CUstream>),
    [to, from]: Ends,
    n: Size,
    real: impl FnOnce() -> CUresult,
    again: impl FnOnce(CUstream) -> CUresult,
) -> CUresult {
    // SAFETY: the arguments and both contexts are the program's own.
    let between =
        |[there, here]: [_; 2], stream| unsafe { driver::cuMemcpyPeerAsync(to, there, from, here, n, stream) };
    copy(order, ([to, from].map(Side::Address), bytes(n)), real, between, again)
}

/// Makes a two- or three-dimensional copy. If the description is NULL, the driver reports the error.
#[inline]
fn copy_3d(
    order: (Flavour, Option<CUstream>),
    description: Option<Copy3D>,
    real: impl FnOnce() -> CUresult,
    again: impl FnOnce(CUstream) -> CUresult,
) -> CUresult {
    let Some(description) = description else { return real() };
    let between = |contexts, stream| {
        let description = description.between(contexts);
        // SAFETY: the description and both contexts are the program's own.
        unsafe { driver::cuMemcpy3DPeerAsync((&raw const description).cast(), stream) }
    };
    copy(order, (description.sides(), ONE), real, between, again)
}

/// Makes a call that copies between many sides.
#[inline]
fn sides<I: Iterator<Item = Side>>(
    stream: CUstream,
    weight: u32,
    sides: impl FnOnce() -> I,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    copy_along(many(stream, sides), stream, weight, real)
}

/// Makes a call that copies between contexts.
#[inline]
fn peers(
    stream: CUstream,
    weight: u32,
    named: impl FnOnce() -> Option<[CUcontext; 2]>,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    copy_along(contexts(stream, named), stream, weight, real)
}

// The driver rejects or accepts the arguments of these copies as in the program's own call.

fn memcpy(to: CUdeviceptr, from: CUdeviceptr, n: Size) -> impl FnOnce(CUstream) -> CUresult {
    // SAFETY: the arguments are the program's own.
    move |stream| unsafe { driver::cuMemcpyAsync(to, from, n, stream) }
}

fn to_gpu(to: CUdeviceptr, from: P, n: Size) -> impl FnOnce(CUstream) -> CUresult {
    // SAFETY: the arguments are the program's own.
    move |stream| unsafe { driver::cuMemcpyHtoDAsync_v2(to, from, n, stream) }
}

fn to_host(to: P, from: CUdeviceptr, n: Size) -> impl FnOnce(CUstream) -> CUresult {
    // SAFETY: the arguments are the program's own.
    move |stream| unsafe { driver::cuMemcpyDtoHAsync_v2(to, from, n, stream) }
}

fn rows(copy: Option<&Copy2D>) -> impl FnOnce(CUstream) -> CUresult {
    let copy = address(copy);
    // SAFETY: the description is the program's own.
    move |stream| unsafe { driver::cuMemcpy2DAsync_v2(copy, stream) }
}

fn layers(copy: Option<&Copy3D>) -> impl FnOnce(CUstream) -> CUresult {
    let copy = address(copy);
    // SAFETY: the description is the program's own.
    move |stream| unsafe { driver::cuMemcpy3DAsync_v2(copy, stream) }
}

/// Returns the address of a program's description of a copy.
fn address<T>(copy: Option<&T>) -> *const c_void {
    copy.map_or(core::ptr::null(), |copy| core::ptr::from_ref(copy).cast())
}

/// Returns the sides of copies that are listed in two arrays.
///
/// # Safety
/// Each array is NULL or has `count` entries.
unsafe fn sides_of_arrays(to: *const CUdeviceptr, from: *const CUdeviceptr, count: Size) -> impl Iterator<Item = Side> {
    let count = if to.is_null() || from.is_null() { 0 } else { count };
    // SAFETY: both arrays have `count` entries: the caller's contract.
    (0..count).flat_map(move |i| unsafe { [*to.add(i), *from.add(i)] }).map(Side::Address)
}

/// Returns the sides of copies in a list of descriptions.
///
/// # Safety
/// `list` is NULL or has `count` entries.
unsafe fn sides_of_list(list: *const BatchCopy3D, count: Size) -> impl Iterator<Item = Side> {
    let count = if list.is_null() { 0 } else { count };
    // SAFETY: `list` has `count` entries: the caller's contract.
    (0..count).flat_map(move |i| unsafe { &*list.add(i) }.sides())
}

hooks! { always real, flavour;
    [cuMemcpy | cuMemcpy_ptds | cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) {
        copy_bytes((flavour, None), [to, from], n, real, memcpy(to, from, n))
    }
    [cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds] (to: CUdeviceptr, from: P, n: Size) {
        copy_bytes((flavour, None), [to, HOST], n, real, to_gpu(to, from, n))
    }
    [cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds] (to: P, from: CUdeviceptr, n: Size) {
        copy_bytes((flavour, None), [HOST, from], n, real, to_host(to, from, n))
    }
    [cuMemcpyAsync | cuMemcpyAsync_ptsz | cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz] (
        to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream,
    ) { copy_bytes((flavour, Some(stream)), [to, from], n, real, memcpy(to, from, n)) }
    [cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz] (to: CUdeviceptr, from: P, n: Size, stream: CUstream) {
        copy_bytes((flavour, Some(stream)), [to, HOST], n, real, to_gpu(to, from, n))
    }
    [cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz] (to: P, from: CUdeviceptr, n: Size, stream: CUstream) {
        copy_bytes((flavour, Some(stream)), [HOST, from], n, real, to_host(to, from, n))
    }

    // ---- rows and layers ----
    [cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds | cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds] (copy: Option<&Copy2D>) {
        copy_3d((flavour, None), copy.map(Copy3D::from), real, rows(copy))
    }
    [cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds] (copy: Option<&Copy3D>) {
        copy_3d((flavour, None), copy.copied(), real, layers(copy))
    }
    [cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz] (copy: Option<&Copy2D>, stream: CUstream) {
        copy_3d((flavour, Some(stream)), copy.map(Copy3D::from), real, rows(copy))
    }
    [cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz] (copy: Option<&Copy3D>, stream: CUstream) {
        copy_3d((flavour, Some(stream)), copy.copied(), real, layers(copy))
    }

    // ---- between contexts ----
    [cuMemcpyPeer | cuMemcpyPeer_ptds] (to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size) {
        peers(flavour.stream(CTX_DEFAULT_STREAM), bytes(n), || Some([to_context, from_context]), real)
    }
    [cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz] (
        to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size, stream: CUstream,
    ) { peers(flavour.stream(stream), bytes(n), || Some([to_context, from_context]), real) }
    [cuMemcpy3DPeer | cuMemcpy3DPeer_ptds] (copy: Option<&Copy3D>) {
        peers(flavour.stream(CTX_DEFAULT_STREAM), ONE, || copy.map(Copy3D::contexts), real)
    }
    [cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz] (copy: Option<&Copy3D>, stream: CUstream) {
        peers(flavour.stream(stream), ONE, || copy.map(Copy3D::contexts), real)
    }

    // ---- arrays ----
    [cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds] (to: CUarray, at: Size, from: CUdeviceptr, n: Size) {
        let sides_of = || [Side::Array(to), Side::Address(from)].into_iter();
        sides(flavour.stream(CTX_DEFAULT_STREAM), bytes(n), sides_of, real)
    }
    [cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds] (to: CUdeviceptr, from: CUarray, at: Size, n: Size) {
        let sides_of = || [Side::Address(to), Side::Array(from)].into_iter();
        sides(flavour.stream(CTX_DEFAULT_STREAM), bytes(n), sides_of, real)
    }
    [cuMemcpyHtoA_v2 | cuMemcpyHtoA_v2_ptds] (to: CUarray, at: Size, from: P, n: Size) {
        sides(flavour.stream(CTX_DEFAULT_STREAM), bytes(n), || [Side::Array(to)].into_iter(), real)
    }
    [cuMemcpyAtoH_v2 | cuMemcpyAtoH_v2_ptds] (to: P, from: CUarray, at: Size, n: Size) {
        sides(flavour.stream(CTX_DEFAULT_STREAM), bytes(n), || [Side::Array(from)].into_iter(), real)
    }
    [cuMemcpyAtoA_v2 | cuMemcpyAtoA_v2_ptds] (to: CUarray, at: Size, from: CUarray, from_at: Size, n: Size) {
        sides(flavour.stream(CTX_DEFAULT_STREAM), bytes(n), || [to, from].map(Side::Array).into_iter(), real)
    }
    [cuMemcpyHtoAAsync_v2 | cuMemcpyHtoAAsync_v2_ptsz] (to: CUarray, at: Size, from: P, n: Size, stream: CUstream) {
        sides(flavour.stream(stream), bytes(n), || [Side::Array(to)].into_iter(), real)
    }
    [cuMemcpyAtoHAsync_v2 | cuMemcpyAtoHAsync_v2_ptsz] (to: P, from: CUarray, at: Size, n: Size, stream: CUstream) {
        sides(flavour.stream(stream), bytes(n), || [Side::Array(from)].into_iter(), real)
    }

    // ---- batches, and copies with attributes ----
    [cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz] (
        to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: P, count: Size, attributes: P, indexes: P, n: Size, failed: P, stream: CUstream,
    ) {
        // SAFETY: each array has as many entries as the program states.
        sides(flavour.stream(stream), GRAPH, || unsafe { sides_of_arrays(to, from, count) }, real)
    }
    [cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz] (
        to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: P, count: Size, attributes: P, indexes: P, n: Size, stream: CUstream,
    ) {
        // SAFETY: each array has as many entries as the program states.
        sides(flavour.stream(stream), GRAPH, || unsafe { sides_of_arrays(to, from, count) }, real)
    }
    [cuMemcpy3DBatchAsync | cuMemcpy3DBatchAsync_ptsz] (n: Size, list: *const BatchCopy3D, failed: P, flags: u64, stream: CUstream) {
        // SAFETY: each array has as many entries as the program states.
        sides(flavour.stream(stream), GRAPH, || unsafe { sides_of_list(list, n) }, real)
    }
    [cuMemcpy3DBatchAsync_v2 | cuMemcpy3DBatchAsync_v2_ptsz] (n: Size, list: *const BatchCopy3D, flags: u64, stream: CUstream) {
        // SAFETY: each array has as many entries as the program states.
        sides(flavour.stream(stream), GRAPH, || unsafe { sides_of_list(list, n) }, real)
    }
    [cuMemcpyWithAttributesAsync | cuMemcpyWithAttributesAsync_ptsz] (
        to: CUdeviceptr, from: CUdeviceptr, n: Size, attributes: P, stream: CUstream,
    ) { sides(flavour.stream(stream), bytes(n), || [to, from].map(Side::Address).into_iter(), real) }
    [cuMemcpy3DWithAttributesAsync | cuMemcpy3DWithAttributesAsync_ptsz] (copy: Option<&BatchCopy3D>, flags: u64, stream: CUstream) {
        sides(flavour.stream(stream), ONE, || copy.map(BatchCopy3D::sides).into_iter().flatten(), real)
    }
    [cuFabricCpyBatchAsync | cuFabricCpyBatchAsync_ptsz] (n: Size, list: P, flags: u64, stream: CUstream) {
        enqueue(flavour.stream(stream), GRAPH, real)
    }
}
