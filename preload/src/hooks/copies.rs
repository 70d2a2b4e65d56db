//! Hooks of copies. Copies wait at the gate like all work ([`super::launch`]). A copy between two GPUs
//! is work of both GPUs, and is staged if necessary ([`crate::copies::stage`]).

use crate::{
    calls::access::{bytes, copy_along},
    copies::{
        route::{Side, Way, contexts, many, route},
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

/// Copies in the default stream.
#[inline]
fn copy(flavour: Flavour, ends: Ends, n: Size, real: impl FnOnce() -> CUresult) -> CUresult {
    let stream = flavour.stream(CTX_DEFAULT_STREAM);
    let route = route(stream, ends.map(Side::Address));
    copy_along(route, stream, bytes(n), || match route.way {
        Way::Direct => real(),
        Way::Peers(contexts) => stage::linear(flavour, ends, n, contexts),
        Way::Owner(context) => stage::as_owner(context, flavour, real),
    })
}

/// Copies in stream order. `again` makes the same copy in another stream.
#[inline]
fn copy_async(
    stream: CUstream,
    ends: Ends,
    n: Size,
    real: impl FnOnce() -> CUresult,
    again: impl FnOnce(CUstream) -> CUresult,
) -> CUresult {
    let route = route(stream, ends.map(Side::Address));
    copy_along(route, stream, bytes(n), || match route.way {
        Way::Direct => real(),
        Way::Peers(contexts) => stage::linear_async(ends, n, contexts, stream),
        Way::Owner(context) => stage::as_owner_async(context, stream, again),
    })
}

/// Makes a two- or three-dimensional copy in the default stream. If the description is NULL, the driver
/// reports the error.
#[inline]
fn copy_3d(flavour: Flavour, copy: Option<Copy3D>, real: impl FnOnce() -> CUresult) -> CUresult {
    let Some(copy) = copy else { return real() };
    let stream = flavour.stream(CTX_DEFAULT_STREAM);
    let route = route(stream, copy.sides());
    copy_along(route, stream, ONE, || match route.way {
        Way::Direct => real(),
        Way::Peers(contexts) => stage::copy_3d(flavour, &copy, contexts),
        Way::Owner(context) => stage::as_owner(context, flavour, real),
    })
}

/// Makes a two- or three-dimensional copy in stream order.
#[inline]
fn copy_3d_async(
    stream: CUstream,
    copy: Option<Copy3D>,
    real: impl FnOnce() -> CUresult,
    again: impl FnOnce(CUstream) -> CUresult,
) -> CUresult {
    let Some(copy) = copy else { return real() };
    let route = route(stream, copy.sides());
    copy_along(route, stream, ONE, || match route.way {
        Way::Direct => real(),
        Way::Peers(contexts) => stage::copy_3d_async(&copy, contexts, stream),
        Way::Owner(context) => stage::as_owner_async(context, stream, again),
    })
}

/// Copies to or from an array in the default stream.
#[inline]
fn by_array(flavour: Flavour, sides: [Side; 2], n: Size, real: impl FnOnce() -> CUresult) -> CUresult {
    let stream = flavour.stream(CTX_DEFAULT_STREAM);
    copy_along(many(stream, || sides.into_iter()), stream, bytes(n), real)
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
    [cuMemcpy | cuMemcpy_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) { copy(flavour, [to, from], n, real) }
    [cuMemcpyHtoD_v2 | cuMemcpyHtoD_v2_ptds] (to: CUdeviceptr, from: P, n: Size) { copy(flavour, [to, HOST], n, real) }
    [cuMemcpyDtoH_v2 | cuMemcpyDtoH_v2_ptds] (to: P, from: CUdeviceptr, n: Size) { copy(flavour, [HOST, from], n, real) }
    [cuMemcpyDtoD_v2 | cuMemcpyDtoD_v2_ptds] (to: CUdeviceptr, from: CUdeviceptr, n: Size) {
        copy(flavour, [to, from], n, real)
    }
    [cuMemcpyAsync | cuMemcpyAsync_ptsz] (to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream) {
        // SAFETY: the driver rejects or accepts these arguments of the program as in the program's own call.
        let again = |stream| unsafe { driver::cuMemcpyAsync(to, from, n, stream) };
        copy_async(flavour.stream(stream), [to, from], n, real, again)
    }
    [cuMemcpyHtoDAsync_v2 | cuMemcpyHtoDAsync_v2_ptsz] (to: CUdeviceptr, from: P, n: Size, stream: CUstream) {
        // SAFETY: the driver rejects or accepts these arguments of the program as in the program's own call.
        let again = |stream| unsafe { driver::cuMemcpyHtoDAsync_v2(to, from, n, stream) };
        copy_async(flavour.stream(stream), [to, HOST], n, real, again)
    }
    [cuMemcpyDtoHAsync_v2 | cuMemcpyDtoHAsync_v2_ptsz] (to: P, from: CUdeviceptr, n: Size, stream: CUstream) {
        // SAFETY: the driver rejects or accepts these arguments of the program as in the program's own call.
        let again = |stream| unsafe { driver::cuMemcpyDtoHAsync_v2(to, from, n, stream) };
        copy_async(flavour.stream(stream), [HOST, from], n, real, again)
    }
    [cuMemcpyDtoDAsync_v2 | cuMemcpyDtoDAsync_v2_ptsz] (to: CUdeviceptr, from: CUdeviceptr, n: Size, stream: CUstream) {
        // SAFETY: the driver rejects or accepts these arguments of the program as in the program's own call.
        let again = |stream| unsafe { driver::cuMemcpyAsync(to, from, n, stream) };
        copy_async(flavour.stream(stream), [to, from], n, real, again)
    }

    // ---- rows and layers ----
    [cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds | cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds] (copy: Option<&Copy2D>) {
        copy_3d(flavour, copy.map(Copy3D::from), real)
    }
    [cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds] (copy: Option<&Copy3D>) { copy_3d(flavour, copy.copied(), real) }
    [cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz] (copy: Option<&Copy2D>, stream: CUstream) {
        // SAFETY: the driver rejects or accepts these arguments of the program as in the program's own call.
        let again = |stream| unsafe { driver::cuMemcpy2DAsync_v2(address(copy), stream) };
        copy_3d_async(flavour.stream(stream), copy.map(Copy3D::from), real, again)
    }
    [cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz] (copy: Option<&Copy3D>, stream: CUstream) {
        // SAFETY: the driver rejects or accepts these arguments of the program as in the program's own call.
        let again = |stream| unsafe { driver::cuMemcpy3DAsync_v2(address(copy), stream) };
        copy_3d_async(flavour.stream(stream), copy.copied(), real, again)
    }

    // ---- between contexts ----
    [cuMemcpyPeer | cuMemcpyPeer_ptds] (to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size) {
        let stream = flavour.stream(CTX_DEFAULT_STREAM);
        copy_along(contexts(stream, || Some([to_context, from_context])), stream, bytes(n), real)
    }
    [cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz] (
        to: CUdeviceptr, to_context: P, from: CUdeviceptr, from_context: P, n: Size, stream: CUstream,
    ) {
        let stream = flavour.stream(stream);
        copy_along(contexts(stream, || Some([to_context, from_context])), stream, bytes(n), real)
    }
    [cuMemcpy3DPeer | cuMemcpy3DPeer_ptds] (copy: Option<&Copy3D>) {
        let stream = flavour.stream(CTX_DEFAULT_STREAM);
        copy_along(contexts(stream, || copy.map(Copy3D::contexts)), stream, ONE, real)
    }
    [cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz] (copy: Option<&Copy3D>, stream: CUstream) {
        let stream = flavour.stream(stream);
        copy_along(contexts(stream, || copy.map(Copy3D::contexts)), stream, ONE, real)
    }

    // ---- arrays ----
    [cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds] (to: CUarray, at: Size, from: CUdeviceptr, n: Size) {
        by_array(flavour, [Side::Array(to), Side::Address(from)], n, real)
    }
    [cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds] (to: CUdeviceptr, from: CUarray, at: Size, n: Size) {
        by_array(flavour, [Side::Address(to), Side::Array(from)], n, real)
    }
    [cuMemcpyHtoA_v2 | cuMemcpyHtoA_v2_ptds] (to: CUarray, at: Size, from: P, n: Size) {
        by_array(flavour, [Side::Array(to), Side::Host], n, real)
    }
    [cuMemcpyAtoH_v2 | cuMemcpyAtoH_v2_ptds] (to: P, from: CUarray, at: Size, n: Size) {
        by_array(flavour, [Side::Host, Side::Array(from)], n, real)
    }
    [cuMemcpyAtoA_v2 | cuMemcpyAtoA_v2_ptds] (to: CUarray, at: Size, from: CUarray, from_at: Size, n: Size) {
        by_array(flavour, [Side::Array(to), Side::Array(from)], n, real)
    }
    [cuMemcpyHtoAAsync_v2 | cuMemcpyHtoAAsync_v2_ptsz] (to: CUarray, at: Size, from: P, n: Size, stream: CUstream) {
        let stream = flavour.stream(stream);
        copy_along(many(stream, || [Side::Array(to)].into_iter()), stream, bytes(n), real)
    }
    [cuMemcpyAtoHAsync_v2 | cuMemcpyAtoHAsync_v2_ptsz] (to: P, from: CUarray, at: Size, n: Size, stream: CUstream) {
        let stream = flavour.stream(stream);
        copy_along(many(stream, || [Side::Array(from)].into_iter()), stream, bytes(n), real)
    }

    // ---- batches, and copies with attributes ----
    [cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz] (
        to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: P, count: Size, attributes: P, indexes: P, n: Size, failed: P, stream: CUstream,
    ) {
        let stream = flavour.stream(stream);
        // SAFETY: each array has as many entries as the program states.
        copy_along(many(stream, || unsafe { sides_of_arrays(to, from, count) }), stream, GRAPH, real)
    }
    [cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz] (
        to: *const CUdeviceptr, from: *const CUdeviceptr, sizes: P, count: Size, attributes: P, indexes: P, n: Size, stream: CUstream,
    ) {
        let stream = flavour.stream(stream);
        // SAFETY: each array has as many entries as the program states.
        copy_along(many(stream, || unsafe { sides_of_arrays(to, from, count) }), stream, GRAPH, real)
    }
    [cuMemcpy3DBatchAsync | cuMemcpy3DBatchAsync_ptsz] (n: Size, list: *const BatchCopy3D, failed: P, flags: u64, stream: CUstream) {
        let stream = flavour.stream(stream);
        // SAFETY: each array has as many entries as the program states.
        copy_along(many(stream, || unsafe { sides_of_list(list, n) }), stream, GRAPH, real)
    }
    [cuMemcpy3DBatchAsync_v2 | cuMemcpy3DBatchAsync_v2_ptsz] (n: Size, list: *const BatchCopy3D, flags: u64, stream: CUstream) {
        let stream = flavour.stream(stream);
        // SAFETY: each array has as many entries as the program states.
        copy_along(many(stream, || unsafe { sides_of_list(list, n) }), stream, GRAPH, real)
    }
    [cuMemcpyWithAttributesAsync | cuMemcpyWithAttributesAsync_ptsz] (
        to: CUdeviceptr, from: CUdeviceptr, n: Size, attributes: P, stream: CUstream,
    ) {
        let stream = flavour.stream(stream);
        copy_along(many(stream, || [to, from].map(Side::Address).into_iter()), stream, bytes(n), real)
    }
    [cuMemcpy3DWithAttributesAsync | cuMemcpy3DWithAttributesAsync_ptsz] (copy: Option<&BatchCopy3D>, flags: u64, stream: CUstream) {
        let stream = flavour.stream(stream);
        copy_along(many(stream, || copy.map(BatchCopy3D::sides).into_iter().flatten()), stream, ONE, real)
    }
    [cuFabricCpyBatchAsync | cuFabricCpyBatchAsync_ptsz] (n: Size, list: P, flags: u64, stream: CUstream) {
        enqueue(flavour.stream(stream), GRAPH, real)
    }
}
