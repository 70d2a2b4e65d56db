//! Batches of copies, and copies with attributes. The simulator ignores the attributes, because a
//! stream-ordered copy satisfies all of them.

use super::*;

/// Submits the copies one after another.
fn batch(flavour: Flavour, to: *const u64, from: *const u64, sizes: *const usize, count: usize, stream: usize) -> Done {
    if to.is_null() || from.is_null() || sizes.is_null() || stream == 0 {
        return Err(Error::INVALID_VALUE);
    }
    for i in 0..count {
        // SAFETY: the program passes `count` entries in each list.
        let (to, from, size) = unsafe { (*to.add(i), *from.add(i), *sizes.add(i)) };
        any_async(flavour, to, from, size, stream)?;
    }
    Ok(())
}

/// `cuMemcpyBatchAsync`
#[allow(clippy::too_many_arguments)]
pub fn batch_12080(
    flavour: Flavour,
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    _attributes: *const u8,
    _indices: *const usize,
    _attribute_count: usize,
    _failed: *mut usize,
    stream: usize,
) -> Done {
    batch(flavour, to, from, sizes, count, stream)
}

/// `cuMemcpyBatchAsync_v2`
#[allow(clippy::too_many_arguments)]
pub fn batch_13000(
    flavour: Flavour,
    to: *const u64,
    from: *const u64,
    sizes: *const usize,
    count: usize,
    _attributes: *const u8,
    _indices: *const usize,
    _attribute_count: usize,
    stream: usize,
) -> Done {
    batch(flavour, to, from, sizes, count, stream)
}

/// One side of a 3D copy of a batch: `CUmemcpy3DOperand`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchOperand {
    kind: u32,
    /// For an address: the address, the lengths of a row and of a layer in elements, and a hint.
    /// For an array: the array and an offset.
    what: [u64; 4],
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchCopy3D {
    from: BatchOperand,
    to: BatchOperand,
    extent: [usize; 3],
    order: u32,
    flags: u32,
}

impl BatchOperand {
    const POINTER: u32 = 1;
    const UNIFIED: u32 = 4;

    /// Returns the operand of a 3D copy. For addresses, an element is one byte.
    fn operand(&self) -> Result<Operand3D, Error> {
        let [device, pitch, height, _] = self.what;
        match self.kind {
            Self::POINTER => Ok(Operand3D {
                kind: Self::UNIFIED,
                device,
                pitch: pitch as usize,
                height: height as usize,
                ..Operand3D::default()
            }),
            _ => Err(Error::NOT_SUPPORTED),
        }
    }
}

/// `cuMemcpyWithAttributesAsync`
pub fn with_attributes(
    flavour: Flavour,
    to: u64,
    from: u64,
    len: usize,
    _attributes: *const u8,
    stream: usize,
) -> Done {
    any_async(flavour, to, from, len, stream)
}

/// `cuMemcpy3DWithAttributesAsync`
pub fn cuboid_with_attributes(flavour: Flavour, copy: *const BatchCopy3D, flags: u64, stream: usize) -> Done {
    let copy = crate::arg(copy)?;
    let [width, height, depth] = copy.extent;
    if flags != 0 || copy.extent.contains(&0) {
        return Err(Error::INVALID_VALUE);
    }
    let described = Copy3D { from: copy.from.operand()?, to: copy.to.operand()?, width, height, depth };
    boxed(flavour, described, stream, false)
}

/// `cuMemcpy3DBatchAsync_v2`
pub fn cuboids_13000(flavour: Flavour, count: usize, list: *const BatchCopy3D, flags: u64, stream: usize) -> Done {
    if list.is_null() || stream == 0 {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passes `count` entries.
    (0..count).try_for_each(|i| cuboid_with_attributes(flavour, unsafe { list.add(i) }, flags, stream))
}

/// `cuMemcpy3DBatchAsync`
pub fn cuboids_12080(
    flavour: Flavour,
    count: usize,
    list: *const BatchCopy3D,
    _failed: *mut usize,
    flags: u64,
    stream: usize,
) -> Done {
    cuboids_13000(flavour, count, list, flags, stream)
}
