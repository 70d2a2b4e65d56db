//! Copies in two and three dimensions, as the driver has them described.

use super::{
    gated::NULL,
    peer_access::{Route, Side, many},
};
use crate::driver::types::*;
use core::ptr::null_mut;

/// `CUmemorytype`
const MEMORYTYPE_DEVICE: i32 = 2;
const MEMORYTYPE_ARRAY: i32 = 3;
const MEMORYTYPE_UNIFIED: i32 = 4;

/// One side of a `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Side2D {
    at: [Size; 2],
    kind: i32,
    host: usize,
    device: CUdeviceptr,
    array: CUarray,
    pitch: Size,
}

/// `CUDA_MEMCPY2D`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Copy2D {
    from: Side2D,
    to: Side2D,
    extent: [Size; 2],
}

/// One side of a `CUDA_MEMCPY3D` or a `CUDA_MEMCPY3D_PEER`; only the latter has a context.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Side3D {
    at: [Size; 4],
    kind: i32,
    host: usize,
    device: CUdeviceptr,
    array: CUarray,
    context: CUcontext,
    pitch: Size,
    /// Rows from one layer to the next.
    height: Size,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Copy3D {
    from: Side3D,
    to: Side3D,
    extent: [Size; 3],
}

impl From<&Copy2D> for Copy3D {
    fn from(copy: &Copy2D) -> Self {
        let [width, height] = copy.extent;
        let side = |side: &Side2D| {
            let Side2D { at: [x, y], kind, host, device, array, pitch } = *side;
            let rows = y.saturating_add(height);
            Side3D { at: [x, y, 0, 0], kind, host, device, array, context: null_mut(), pitch, height: rows }
        };
        Self { from: side(&copy.from), to: side(&copy.to), extent: [width, height, 1] }
    }
}

impl Side3D {
    fn named(&self) -> Side {
        match self.kind {
            MEMORYTYPE_DEVICE | MEMORYTYPE_UNIFIED => Side::Address(self.device),
            MEMORYTYPE_ARRAY => Side::Array(self.array),
            _ => Side::Host,
        }
    }

    /// The same memory, which is that context's.
    fn of(self, context: CUcontext) -> Self {
        let kind = if self.kind == MEMORYTYPE_UNIFIED { MEMORYTYPE_DEVICE } else { self.kind };
        Self { context, kind, ..self }
    }
}

impl Copy3D {
    /// Destination and source.
    pub fn sides(&self) -> [Side; 2] {
        [self.to.named(), self.from.named()]
    }

    /// The contexts of destination and source, in a copy between contexts.
    pub fn contexts(&self) -> [CUcontext; 2] {
        [self.to.context, self.from.context]
    }

    /// The same copy between contexts: those of destination and source.
    pub fn between(&self, [to, from]: [CUcontext; 2]) -> Self {
        Self { from: self.from.of(from), to: self.to.of(to), extent: self.extent }
    }
}

/// The route of a node that copies.
///
/// # Safety
/// NULL, or what the driver is given for such a node.
pub unsafe fn copy_node(params: *const Copy3D) -> Route {
    // SAFETY: the caller's promise.
    many(NULL, || unsafe { params.as_ref() }.map(Copy3D::sides).into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn descriptions_are_laid_out_as_the_driver_has_them() {
        assert_eq!((size_of::<Copy2D>(), size_of::<Copy3D>()), (128, 200));
        assert_eq!((offset_of!(Copy3D, to), offset_of!(Side3D, context)), (88, 64));
    }

    #[test]
    fn rows_are_one_layer() {
        let side =
            |device, y| Side2D { at: [8, y], kind: MEMORYTYPE_UNIFIED, host: 0, device, array: null_mut(), pitch: 512 };
        let copy = Copy3D::from(&Copy2D { from: side(1 << 21, 3), to: side(1 << 22, 0), extent: [64, 10] });
        assert_eq!(copy.extent, [64, 10, 1]);
        assert_eq!((copy.from.at, copy.from.pitch, copy.from.height), ([8, 3, 0, 0], 512, 13));
        let contexts = [1usize as CUcontext, 2usize as CUcontext];
        let between = copy.between(contexts);
        assert_eq!(between.contexts(), contexts);
        assert_eq!((between.to.kind, between.to.device), (MEMORYTYPE_DEVICE, 1 << 22));
    }
}
