//! Attributes of addresses.

use crate::{
    alloc, context, device,
    error::{Done, Error},
    memory::{Backing, GRANULARITY, Mapping, space},
    out,
};
use std::sync::atomic::Ordering;

const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ALL_RIGHTS: u32 = 3;

/// `cuPointerGetAttribute`
pub fn attribute(data: *mut u64, attribute: u32, at: u64) -> Done {
    context::current()?;
    let mapping = space().at(at).cloned().ok_or(Error::INVALID_VALUE)?;
    answer(data, attribute, at, &mapping)
}

fn answer(data: *mut u64, attribute: u32, at: u64, mapping: &Mapping) -> Done {
    let host = matches!(mapping.backing, Backing::Host { .. });
    let managed = matches!(mapping.backing, Backing::Managed(_));
    let (shareable, rdma) = match &mapping.backing {
        // Imported memory cannot be exported again.
        Backing::Chunk { chunk, legacy: false, .. } => (chunk.is_exportable(), chunk.rdma.load(Ordering::Relaxed)),
        _ => (false, false),
    };
    let is_mapped = matches!(mapping.backing, Backing::Chunk { legacy: false, .. });
    // For a mapping of `cuMemMap`, driver 580 returns the whole reservation.
    let reserved = if is_mapped { space().reservation(at) } else { None };
    let (base, len) = reserved.or_else(|| alloc::range(at)).unwrap_or((mapping.at, mapping.len));
    let rights = if is_mapped { mapping.rights(mapping.gpu().unwrap_or(0)) } else { ALL_RIGHTS };
    // Small allocations share a mapping.
    let start = mapping.at - mapping.at % GRANULARITY;
    let pool = crate::pool::owner(mapping.at);
    let (as_u32, as_i32) = (data.cast::<u32>(), data.cast::<i32>());
    match attribute {
        // Flags are 4 bytes, and memory of `cuMemMap` has no context (driver 580). Memory of pools has no
        // context either.
        1 if mapping.context == 0 && !is_mapped && pool.is_none() => Err(Error::INVALID_VALUE),
        1 => out(data, mapping.context as u64),
        2 => out(as_u32, if host { HOST } else { DEVICE }),
        3 if rights == 0 => Err(Error::INVALID_VALUE),
        3 => out(data, at),
        4 if host || managed => out(data, at),
        4 => Err(Error::INVALID_VALUE),
        5 if !host => out(data.cast::<[u64; 2]>(), [mapping.id, 1]),
        6 => out(as_u32, u32::from(!host)),
        10 => out(as_u32, u32::from(!host && !managed && !is_mapped && pool.is_none())),
        21 => out(as_u32, 0),
        15 => out(as_u32, u32::from(rdma)),
        7 | 20 => out(data, mapping.id),
        8 => out(as_u32, u32::from(managed)),
        9 => {
            let gpu = match mapping.gpu() {
                Some(gpu) => gpu,
                None => context::of(mapping.context)?.gpu,
            };
            out(as_i32, device::ordinal(gpu))
        }
        11 => out(data, base),
        12 => out(data, len),
        13 => out(as_u32, 1),
        14 => out(data, u64::from(shareable)),
        16 => out(as_u32, rights),
        17 => out(data, pool.unwrap_or(0) as u64),
        18 => out(data, mapping.end().next_multiple_of(GRANULARITY) - start),
        19 => out(data, start),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// `cuPointerGetAttributes`: returns zeros for an unknown address.
pub fn attributes(count: u32, attributes: *const u32, data: *const *mut u64, at: u64) -> Done {
    context::current()?;
    if attributes.is_null() || data.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    let mapping = space().at(at).cloned();
    for i in 0..count as usize {
        // SAFETY: by the API's contract, both lists have `count` entries.
        let (attribute, to) = unsafe { (*attributes.add(i), *data.add(i)) };
        let known = mapping.as_ref().is_some_and(|m| answer(to, attribute, at, m).is_ok());
        if !known {
            match attribute {
                2 | 6 | 8 | 10 | 13 | 15 | 16 | 21 => out(to.cast::<u32>(), 0)?,
                9 => out(to.cast::<i32>(), -2)?,
                _ => out(to, 0)?,
            }
        }
    }
    Ok(())
}

/// `cuPointerSetAttribute`: supports only `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`, which changes
/// nothing, because all operations are synchronous anyway.
pub fn set_attribute(_value: *const u8, attribute: u32, at: u64) -> Done {
    let known = space().at(at).is_some();
    if known && attribute == 6 { Ok(()) } else { Err(Error::INVALID_VALUE) }
}
