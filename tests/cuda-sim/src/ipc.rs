//! Plain memory that other processes use. A handle names the file behind the chunk. The exporter
//! keeps the file open until the exporter frees the memory.

use crate::{
    alloc,
    context::{self, Context},
    error::{Done, Error},
    memory::{self, Backing, GRANULARITY, Mapping, space, space_mut},
    out, vmm,
};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    fs::{self, File},
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    process,
    sync::{Arc, Mutex, MutexGuard},
};

const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
/// Magic number that distinguishes handles of memory from other handles.
const IPC_MEMORY: u64 = 0x6d65_6d6f_7279;

/// `CUipcMemHandle`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Handle {
    kind: u64,
    pid: u64,
    fd: u64,
    inode: u64,
    offset: u64,
    _rest: [u64; 3],
}

/// The memory that this process has opened, by the exporter and the file.
static OPEN: Mutex<BTreeMap<(u64, u64), Open>> = Mutex::new(BTreeMap::new());

struct Open {
    at: u64,
    len: u64,
    context: usize,
    /// Reference counts by returned address.
    references: BTreeMap<u64, u32>,
}

fn table() -> MutexGuard<'static, BTreeMap<(u64, u64), Open>> {
    OPEN.lock().unwrap_or_else(|e| e.into_inner())
}

/// `cuIpcGetMemHandle`
pub fn export(handle: *mut Handle, at: u64) -> Done {
    context::healthy()?;
    let (start, _) = alloc::range(at).ok_or(Error::INVALID_VALUE)?;
    let (chunk, base) = match space().at(at).map(|m| (&m.backing, m.at)) {
        Some((Backing::Chunk { chunk, legacy: true, .. }, base)) => (chunk.clone(), base),
        _ => return Err(Error::INVALID_VALUE),
    };
    if is_open(base) {
        return Err(Error::INVALID_VALUE);
    }
    let (fd, inode) = chunk.file_name()?;
    let (pid, offset) = (u64::from(process::id()), start - base);
    out(handle, Handle { kind: IPC_MEMORY, pid, fd, inode, offset, _rest: [0; 3] })
}

/// `cuIpcOpenMemHandle`
pub fn open(at: *mut u64, handle: Handle, flags: u32) -> Done {
    let context = context::healthy()?;
    if at.is_null() || handle.kind != IPC_MEMORY || flags != LAZY_ENABLE_PEER_ACCESS {
        return Err(Error::INVALID_VALUE);
    }
    if handle.pid == u64::from(process::id()) {
        return Err(Error::INVALID_CONTEXT);
    }
    let mut table = table();
    let name = (handle.pid, handle.inode);
    let open = match table.entry(name) {
        Entry::Occupied(open) => open.into_mut(),
        Entry::Vacant(vacant) => vacant.insert(bring_in(&context, &handle)?),
    };
    if open.context != context.handle() {
        return Err(Error::INVALID_HANDLE);
    }
    let given = open.at + handle.offset;
    *open.references.entry(given).or_default() += 1;
    out(at, given)
}

fn bring_in(context: &Arc<Context>, handle: &Handle) -> Result<Open, Error> {
    let path = format!("/proc/{}/fd/{}", handle.pid, handle.fd);
    let file = File::options().read(true).write(true).open(path).map_err(|_| Error::INVALID_VALUE)?;
    if fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).map(|m| m.ino()).ok() != Some(handle.inode) {
        return Err(Error::INVALID_VALUE);
    }
    let chunk = vmm::imported(file.as_raw_fd())?;
    let len = chunk.len;
    let at = memory::reserve(len, GRANULARITY, 0)?;
    let backing = Backing::Chunk { chunk, offset: 0, legacy: true };
    space_mut().insert(Mapping::new(at, len, backing, context.handle()).for_gpus(1 << context.gpu));
    Ok(Open { at, len, context: context.handle(), references: BTreeMap::new() })
}

/// Whether the memory that is mapped at this address belongs to another process.
pub fn is_open(base: u64) -> bool {
    table().values().any(|open| open.at == base)
}

/// `cuIpcCloseMemHandle`: waits for the work that uses the memory.
pub fn close(at: u64) -> Done {
    context::healthy()?.synchronise()?;
    let mut table = table();
    let (name, open) = table.iter_mut().find(|(_, o)| o.references.contains_key(&at)).ok_or(Error::INVALID_VALUE)?;
    let name = *name;
    let references = open.references.get_mut(&at).ok_or(Error::UNKNOWN)?;
    *references -= 1;
    if *references == 0 {
        open.references.remove(&at);
    }
    if open.references.is_empty()
        && let Some(open) = table.remove(&name)
    {
        let mapping = space_mut().remove(open.at);
        drop(mapping);
        memory::unreserve(open.at, open.len);
    }
    Ok(())
}
