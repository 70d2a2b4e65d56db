//! The driver's structures that describe two- and three-dimensional copies, and graph nodes.

use super::route::{Route, Side, many};
use crate::driver::types::*;
use core::{cell::UnsafeCell, ffi::c_void, ptr::null_mut};

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

/// One side of a `CUDA_MEMCPY3D` or a `CUDA_MEMCPY3D_PEER`. Only the latter uses the context.
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
    /// The number of rows per layer.
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
    fn place(&self) -> Side {
        match self.kind {
            MEMORYTYPE_DEVICE | MEMORYTYPE_UNIFIED => Side::Address(self.device),
            MEMORYTYPE_ARRAY => Side::Array(self.array),
            _ => Side::Host,
        }
    }

    /// Returns the same side with this context.
    fn of(self, context: CUcontext) -> Self {
        let kind = if self.kind == MEMORYTYPE_UNIFIED { MEMORYTYPE_DEVICE } else { self.kind };
        Self { context, kind, ..self }
    }
}

impl Copy3D {
    /// Returns destination and source.
    pub fn sides(&self) -> [Side; 2] {
        [self.to.place(), self.from.place()]
    }

    /// Returns the contexts of destination and source. They are set only in a copy between contexts.
    pub fn contexts(&self) -> [CUcontext; 2] {
        [self.to.context, self.from.context]
    }

    /// Converts the copy to a copy between contexts, with these contexts of destination and source.
    pub fn between(&self, [to, from]: [CUcontext; 2]) -> Self {
        Self { from: self.from.of(from), to: self.to.of(to), extent: self.extent }
    }
}

/// `CUmemcpy3DOperand`
#[derive(Debug)]
#[repr(C)]
struct Operand {
    kind: i32,
    /// The address of memory, or the handle of an array.
    name: u64,
    rest: [u64; 3],
}

impl Operand {
    fn place(&self) -> Side {
        const POINTER: i32 = 1;
        const ARRAY: i32 = 2;
        match self.kind {
            POINTER => Side::Address(self.name),
            ARRAY => Side::Array(self.name as CUarray),
            _ => Side::Host,
        }
    }
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[derive(Debug)]
#[repr(C)]
pub struct BatchCopy3D {
    from: Operand,
    to: Operand,
    extent: [Size; 3],
    order: i32,
    flags: u32,
}

impl BatchCopy3D {
    pub fn sides(&self) -> [Side; 2] {
        [self.to.place(), self.from.place()]
    }
}

/// The first field of `CUDA_MEMSET_NODE_PARAMS`, in all its versions.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Fill {
    to: CUdeviceptr,
}

/// `CUgraphNodeParams`
#[repr(C)]
pub struct NodeParams {
    kind: i32,
    reserved: [i32; 3],
    /// The driver writes results here, for example the graphs of a conditional node.
    of_kind: UnsafeCell<OfKind>,
}

/// The parameters of a node, by the node's kind.
#[repr(C)]
union OfKind {
    copy: CopyNode,
    fill: Fill,
    all: [u64; 30],
}

/// `CUDA_MEMCPY_NODE_PARAMS`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct CopyNode {
    flags: [i32; 2],
    context: *mut c_void,
    copy: Copy3D,
}

/// Returns the route of a memcpy node.
pub fn copy_node(params: Option<&Copy3D>) -> Route {
    many(CTX_DEFAULT_STREAM, || params.map(Copy3D::sides).into_iter().flatten())
}

/// Returns the route of a memset node.
pub fn fill_node(params: Option<&Fill>) -> Route {
    many(CTX_DEFAULT_STREAM, || params.map(|fill| Side::Address(fill.to)).into_iter())
}

/// Returns the route of a node of any kind.
pub fn any_node(params: Option<&NodeParams>) -> Route {
    const COPY: i32 = 1;
    const FILL: i32 = 2;
    match params {
        // SAFETY: the program has set the parameters of a node of this kind.
        Some(node) if node.kind == COPY => copy_node(Some(unsafe { &(*node.of_kind.get()).copy.copy })),
        // SAFETY: the program has set the parameters of a node of this kind.
        Some(node) if node.kind == FILL => fill_node(Some(unsafe { &(*node.of_kind.get()).fill })),
        _ => many(CTX_DEFAULT_STREAM, core::iter::empty),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::offset_of;

    #[test]
    fn copy_parameters_have_the_drivers_layout() {
        assert_eq!((size_of::<Copy2D>(), size_of::<Copy3D>()), (128, 200));
        assert_eq!((offset_of!(Copy3D, to), offset_of!(Side3D, context)), (88, 64));
        assert_eq!((size_of::<Operand>(), size_of::<BatchCopy3D>()), (40, 112));
        assert_eq!((size_of::<NodeParams>(), offset_of!(NodeParams, of_kind)), (256, 16));
        assert_eq!(offset_of!(CopyNode, copy), 16);
    }

    #[test]
    fn a_2d_copy_converts_to_a_3d_copy_of_one_layer() {
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
