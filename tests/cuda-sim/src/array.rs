//! Arrays: device memory with an opaque layout. In the simulator, the layout is plain rows.

use crate::{
    alloc, capture, context, copy,
    error::{Done, Error},
    out,
    registry::Registry,
    stream::Flavour,
};
use std::sync::Arc;

/// An array: rows of `pitch` bytes.
#[derive(Debug)]
pub struct Array {
    pub at: u64,
    pub pitch: u64,
    pub rows: u64,
    descriptor: Descriptor3D,
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Descriptor {
    width: usize,
    height: usize,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Descriptor3D {
    width: usize,
    height: usize,
    depth: usize,
    format: u32,
    channels: u32,
    flags: u32,
}

static ARRAYS: Registry<Array> = Registry::new();

/// Returns the array behind a handle.
pub fn of(handle: usize) -> Result<Arc<Array>, Error> {
    ARRAYS.get(handle)
}

/// `cuArrayCreate`
pub fn create(array: *mut usize, descriptor: *const Descriptor) -> Done {
    let d = crate::arg(descriptor)?;
    make(
        array,
        Descriptor3D { width: d.width, height: d.height, depth: 0, format: d.format, channels: d.channels, flags: 0 },
    )
}

/// `cuArray3DCreate`
pub fn create_3d(array: *mut usize, descriptor: *const Descriptor3D) -> Done {
    make(array, crate::arg(descriptor)?)
}

fn make(array: *mut usize, descriptor: Descriptor3D) -> Done {
    let context = context::healthy()?;
    capture::forbid()?;
    let element = match descriptor.format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(Error::INVALID_VALUE),
    };
    if descriptor.width == 0 || !matches!(descriptor.channels, 1 | 2 | 4) {
        return Err(Error::INVALID_VALUE);
    }
    let pitch = (descriptor.width as u64 * element * u64::from(descriptor.channels)).next_multiple_of(512);
    let rows = descriptor.height.max(1) as u64;
    let len = pitch
        .checked_mul(rows)
        .and_then(|n| n.checked_mul(descriptor.depth.max(1) as u64))
        .ok_or(Error::OUT_OF_MEMORY)?;
    let at = alloc::allocate(&context, len)?;
    out(array, ARRAYS.add(Arc::new(Array { at, pitch, rows, descriptor })))
}

/// `cuArrayDestroy`
pub fn destroy(array: usize) -> Done {
    context::healthy()?;
    capture::forbid()?;
    alloc::free(ARRAYS.remove(array)?.at)
}

/// `cuArrayGetDescriptor`
pub fn descriptor(descriptor: *mut Descriptor, array: usize) -> Done {
    let d = of(array)?.descriptor;
    out(descriptor, Descriptor { width: d.width, height: d.height, format: d.format, channels: d.channels })
}

/// `cuArray3DGetDescriptor`
pub fn descriptor_3d(descriptor: *mut Descriptor3D, array: usize) -> Done {
    out(descriptor, of(array)?.descriptor)
}

/// `cuMemcpyDtoA`, `cuMemcpyHtoA`
pub fn copy_in(flavour: Flavour, array: usize, offset: usize, from: u64, len: usize) -> Done {
    copy::between(flavour, of(array)?.at + offset as u64, from, len, 0, true)
}

/// `cuMemcpyAtoD`, `cuMemcpyAtoH`
pub fn copy_out(flavour: Flavour, to: u64, array: usize, offset: usize, len: usize) -> Done {
    copy::between(flavour, to, of(array)?.at + offset as u64, len, 0, true)
}

/// `cuMemcpyHtoAAsync`
pub fn copy_in_async(flavour: Flavour, array: usize, offset: usize, from: u64, len: usize, stream: usize) -> Done {
    copy::between(flavour, of(array)?.at + offset as u64, from, len, stream, false)
}

/// `cuMemcpyAtoHAsync`
pub fn copy_out_async(flavour: Flavour, to: u64, array: usize, offset: usize, len: usize, stream: usize) -> Done {
    copy::between(flavour, to, of(array)?.at + offset as u64, len, stream, false)
}
