//! Hooks of arrays, which no engine can move.

use crate::{
    calls::driver_memory::{allocate, free},
    driver::{hook::hooks, types::*},
    gpu,
    registry::driver_memory::Kind,
};

/// The dimensions and format that a `CUDA_ARRAY_DESCRIPTOR` or a `CUDA_ARRAY3D_DESCRIPTOR` describes.
#[derive(Debug)]
struct Texels {
    width: u64,
    height: u64,
    depth: u64,
    format: i32,
    channels: u32,
    /// Whether the array has no memory of its own. Memory is mapped to such an array later.
    unbacked: bool,
}

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
#[derive(Debug)]
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

impl Texels {
    /// Returns the size of the texels in bytes, without the driver's padding.
    fn bytes(&self) -> u64 {
        let each = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            _ => 4, // 32-bit integers and floats; no other format (compressed, planar) has larger texels
        };
        let [width, height, depth] = [self.width, self.height, self.depth].map(|n| n.max(1));
        let texels = width.saturating_mul(height).saturating_mul(depth);
        if self.unbacked { 0 } else { texels.saturating_mul(u64::from(self.channels) * each) }
    }
}

impl From<&Array> for Texels {
    fn from(a: &Array) -> Self {
        let (width, height) = (a.width as u64, a.height as u64);
        Self { width, height, depth: 1, format: a.format, channels: a.channels, unbacked: false }
    }
}

impl From<&Array3D> for Texels {
    fn from(a: &Array3D) -> Self {
        let (width, height, depth) = (a.width as u64, a.height as u64, a.depth as u64);
        let unbacked = a.flags & ARRAY3D_UNBACKED != 0;
        Self { width, height, depth, format: a.format, channels: a.channels, unbacked }
    }
}

/// Creates an array with `levels` mipmap levels, each half as large per dimension as the previous
/// level.
fn make_array<D>(place: *const CUarray, descriptor: *const D, levels: u32, real: impl Fn() -> CUresult) -> CUresult
where
    Texels: for<'a> From<&'a D>,
{
    // SAFETY: `descriptor` is NULL or valid: the driver dereferences it too, and rejects NULL.
    let bytes = unsafe { descriptor.as_ref() }.map_or(0, |d| Texels::from(d).bytes());
    // Each level has at most half the bytes of the previous level.
    let bytes = if levels > 1 { bytes.saturating_mul(2) } else { bytes };
    allocate(gpu::current(), Kind::Array, place.cast(), bytes, real)
}

hooks! { real, flavour;
    [cuArrayCreate_v2] (array: *mut CUarray, descriptor: *const Array) { make_array(array, descriptor, 1, real) }
    [cuArray3DCreate_v2] (array: *mut CUarray, descriptor: *const Array3D) { make_array(array, descriptor, 1, real) }
    [cuMipmappedArrayCreate] (array: *mut CUarray, descriptor: *const Array3D, levels: u32) {
        make_array(array, descriptor, levels, real)
    }
    [cuArrayDestroy | cuMipmappedArrayDestroy] (array: CUarray) { free(Kind::Array, array as u64, real) }
}
