//! Multicast objects. Programs access no data through multicast objects. The simulator only decides
//! whether memory can be bound.

use crate::{
    device,
    error::{Done, Error},
    memory::{Backing, space},
    out,
    registry::Registry,
    stream::Flavour,
    vmm,
};
use std::sync::{Arc, Mutex};

/// `CUmulticastObjectProp`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Properties {
    devices: u32,
    size: usize,
    handle_types: u64,
    flags: u64,
}

/// A multicast object, and the ranges bound to it.
#[derive(Debug)]
struct Object {
    size: u64,
    bound: Mutex<Vec<(u64, u64)>>,
}

static OBJECTS: Registry<Object> = Registry::new();

impl Object {
    fn bind(&self, at: u64, len: u64) -> Done {
        let mut bound = self.bound.lock().unwrap_or_else(|e| e.into_inner());
        let overlaps = bound.iter().any(|(start, size)| at < start + size && *start < at + len);
        if overlaps || at.checked_add(len).is_none_or(|end| end > self.size) {
            return Err(Error::INVALID_VALUE);
        }
        bound.push((at, len));
        Ok(())
    }
}

/// `cuMulticastCreate`
pub fn create(object: *mut u64, properties: *const Properties) -> Done {
    let size = crate::arg(properties)?.size as u64;
    vmm::whole(size)?;
    out(object, OBJECTS.add(Arc::new(Object { size, bound: Mutex::default() })) as u64)
}

/// `cuMulticastAddDevice`
pub fn add_device(object: u64, device: i32) -> Done {
    device::gpu(device)?;
    OBJECTS.get(object as usize).map(drop)
}

/// `cuMulticastBindMem`
pub fn bind_memory(object: u64, at: usize, memory: u64, offset: usize, size: usize, _flags: u64) -> Done {
    let object = OBJECTS.get(object as usize)?;
    vmm::part(memory, offset as u64, size as u64)?;
    object.bind(at as u64, size as u64)
}

/// `cuMulticastBindAddr`: all addresses must belong to one chunk.
pub fn bind_address(object: u64, at: usize, address: u64, size: usize, _flags: u64) -> Done {
    let object = OBJECTS.get(object as usize)?;
    vmm::whole(size as u64)?;
    let is_within = |m: &crate::memory::Mapping| address + size as u64 <= m.at + m.len;
    match space().at(address).filter(|m| is_within(m)).map(|m| &m.backing) {
        Some(Backing::Chunk { legacy: false, .. }) => object.bind(at as u64, size as u64),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// `cuMulticastUnbind`
pub fn unbind(object: u64, device: i32, at: usize, size: usize) -> Done {
    device::gpu(device)?;
    let object = OBJECTS.get(object as usize)?;
    let (at, end) = (at as u64, (at + size) as u64);
    object.bound.lock().unwrap_or_else(|e| e.into_inner()).retain(|(start, len)| *start < at || start + len > end);
    Ok(())
}

/// `cuLogicalEndpointBindMem`: accepts any number as an endpoint with enough room.
pub fn bind_to_endpoint(_id: u32, device: i32, _at: u64, memory: u64, offset: u64, size: u64, _flags: u64) -> Done {
    device::gpu(device)?;
    vmm::part(memory, offset, size)
}

/// `cuMemMapArrayAsync`: checks only the handles, because sparse arrays are not supported.
pub fn map_array(_flavour: Flavour, list: *const ArrayMap, count: u32, _stream: usize) -> Done {
    for i in 0..count as usize {
        // SAFETY: by the API's contract, the list has `count` entries.
        let entry = crate::arg(unsafe { list.add(i) })?;
        // The simulator's handles are addresses. Any other handle ends the process, because the
        // driver may crash with such a handle.
        assert_eq!(entry.memory >> 48, 0, "no handle of the driver");
    }
    Err(Error::NOT_SUPPORTED)
}

/// `CUarrayMapInfo`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrayMap {
    _place: [u64; 7],
    _operation: u32,
    _handle_kind: u32,
    memory: u64,
    _rest: [u64; 3],
}
