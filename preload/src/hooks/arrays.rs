//! Hooks of arrays, which no engine can move.

use crate::{
    calls::driver_memory::{allocate, free},
    driver::types::*,
    gpu,
    registry::driver_memory::Kind,
};

/// `CUDA_ARRAY_DESCRIPTOR`
#[derive(Debug)]
#[repr(C)]
pub struct Array {
    width: Size,
    height: Size,
    format: i32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Array3D {
    width: Size,
    height: Size,
    depth: Size,
    format: i32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING`.
const ARRAY3D_UNBACKED: u32 = 0x40 | 0x80;

impl From<&Array> for Array3D {
    fn from(a: &Array) -> Self {
        Self { width: a.width, height: a.height, depth: 1, format: a.format, channels: a.channels, flags: 0 }
    }
}

impl Array3D {
    /// Returns the size of the texels in bytes, without the driver's padding; 0 if the array has no memory
    /// of its own.
    fn bytes(&self) -> u64 {
        if self.flags & ARRAY3D_UNBACKED != 0 {
            return 0;
        }
        let each = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            _ => 4, // 32-bit integers and floats; no other format (compressed, planar) has larger texels
        };
        let [width, height, depth] = [self.width, self.height, self.depth].map(|n| n.max(1) as u64);
        width.saturating_mul(height).saturating_mul(depth).saturating_mul(u64::from(self.channels) * each)
    }
}

/// Creates an array with `levels` mipmap levels, each half as large per dimension as the previous
/// level. If the description is NULL, the driver reports the error.
fn make_array(place: *const CUarray, array: Option<Array3D>, levels: u32, real: impl Fn() -> CUresult) -> CUresult {
    let bytes = array.map_or(0, |array| array.bytes());
    // Each level has at most half the bytes of the previous level.
    let bytes = if levels > 1 { bytes.saturating_mul(2) } else { bytes };
    allocate(gpu::current(), Kind::Array, place.cast(), bytes, real)
}

hooks! { real, flavour;
    [cuArrayCreate_v2] (array: *mut CUarray, descriptor: Option<&Array>) { make_array(array, descriptor.map(Array3D::from), 1, real) }
    [cuArray3DCreate_v2] (array: *mut CUarray, descriptor: Option<&Array3D>) { make_array(array, descriptor.copied(), 1, real) }
    [cuMipmappedArrayCreate] (array: *mut CUarray, descriptor: Option<&Array3D>, levels: u32) {
        make_array(array, descriptor.copied(), levels, real)
    }
    [cuArrayDestroy | cuMipmappedArrayDestroy] (array: CUarray) { free(Kind::Array, array as u64, real) }
}
