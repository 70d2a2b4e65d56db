//! A process's device addresses: the table of mappings and access rights. All work accesses memory
//! through this table.
//!
//! Device addresses are reserved, inaccessible addresses of the process. The bytes are at another
//! address of the process, the chunk's *alias*. So a program that dereferences a device pointer on the
//! host crashes, as it should. Remapping only changes a table. Work that accesses unmapped memory gets
//! an error instead of a signal.

use crate::{
    error::{Done, Error},
    managed::Managed,
};
use cuda_sim_gpus::{Account, Config, place, shared::Shared};
use std::{
    collections::BTreeMap,
    ops::Bound,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    ptr,
    sync::{
        Arc, Mutex, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// Granularity of physical memory and of mappings.
pub const GRANULARITY: u64 = 2 << 20;
/// The size in bytes of the pieces in which work accesses memory. Small pieces keep the table from
/// being locked for long.
pub const PIECE: u64 = 4 << 20;

/// Physical memory of one GPU.
#[derive(Debug)]
pub struct Chunk {
    pub gpu: usize,
    pub len: u64,
    alias: *mut u8,
    /// Whether the chunk may be exported.
    pub shareable: bool,
    /// The file that shares the chunk with other processes. Created at the first export.
    file: OnceLock<ChunkFile>,
    /// Whether the chunk was created for access by other devices.
    pub rdma: AtomicBool,
    /// True if this process allocated the chunk, false if it imported the chunk.
    is_own: bool,
}

#[derive(Debug)]
struct ChunkFile {
    fd: OwnedFd,
    inode: u64,
}

impl ChunkFile {
    fn new(fd: OwnedFd) -> Result<Self, Error> {
        let meta = std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd()));
        Ok(Self { inode: meta.map_err(|_| Error::OPERATING_SYSTEM)?.ino(), fd })
    }
}

// SAFETY: this object owns the mapping `alias`. Races on the mapping's bytes are races of the
// simulated program, as in any memory that several kernels write to.
unsafe impl Send for Chunk {}
// SAFETY: this object owns the mapping `alias`. Races on the mapping's bytes are races of the
// simulated program.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// Allocates memory of a GPU. Returns out of memory if the GPU has no room. Only `shareable` chunks can
    /// be exported.
    pub fn new(gpu: usize, len: u64, shareable: bool) -> Result<Arc<Chunk>, Error> {
        if !Account::get().take(gpu, len) {
            return Err(Error::OUT_OF_MEMORY);
        }
        let chunk = Self::anonymous(gpu, len, shareable);
        chunk.inspect_err(|_| Account::get().give(gpu, len)).map(Arc::new)
    }

    fn anonymous(gpu: usize, len: u64, shareable: bool) -> Result<Chunk, Error> {
        let alias = match Kept::take(len) {
            Some(alias) => alias,
            None => {
                let alias = map(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
                // SAFETY: the hints apply to a mapping of this size that was just made. A forked
                // child does not use the mapping.
                unsafe {
                    libc::madvise(alias.cast(), len as usize, libc::MADV_HUGEPAGE);
                    libc::madvise(alias.cast(), len as usize, libc::MADV_DONTFORK);
                }
                alias
            }
        };
        let (file, rdma) = (OnceLock::new(), AtomicBool::new(false));
        Ok(Chunk { gpu, len, alias, shareable, file, rdma, is_own: true })
    }

    /// Returns a descriptor for other processes. The bytes move into a file only at the first export,
    /// because few chunks are exported and anonymous memory is faster.
    pub fn export(&self) -> Result<OwnedFd, Error> {
        self.shared()?.fd.try_clone().map_err(|_| Error::OPERATING_SYSTEM)
    }

    /// Returns the number of this process's own descriptor, and the file's inode.
    pub fn file_name(&self) -> Result<(u64, u64), Error> {
        let file = self.shared()?;
        Ok((file.fd.as_raw_fd() as u64, file.inode))
    }

    fn shared(&self) -> Result<&ChunkFile, Error> {
        // While the table is locked, no work accesses memory.
        let _table = space_mut();
        if let Some(file) = self.file.get() {
            return Ok(file);
        }
        let file = ChunkFile::new(self.move_into_file()?)?;
        if !Account::get().share(self.as_shared(&file)) {
            return Err(Error::OPERATING_SYSTEM);
        }
        Ok(self.file.get_or_init(|| file))
    }

    fn as_shared(&self, file: &ChunkFile) -> Shared {
        Shared { inode: file.inode, gpu: place(self.gpu), bytes: self.len, is_owner: self.is_own }
    }

    /// Replaces the chunk's memory by a mapped file with the same contents.
    fn move_into_file(&self) -> Result<OwnedFd, Error> {
        let (gpu, len) = (place(self.gpu), self.len);
        let name = std::ffi::CString::new(format!("cuda-sim-gpu{gpu}")).map_err(|_| Error::UNKNOWN)?;
        // SAFETY: the name is a C string. The descriptor is new, so no other value owns it.
        let fd = unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 || libc::ftruncate(fd, len as i64) != 0 {
                return Err(Error::OPERATING_SYSTEM);
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: the alias has `len` bytes, and the table's lock excludes writes.
        let bytes = unsafe { std::slice::from_raw_parts(self.alias, len as usize) };
        let file = std::fs::File::from(fd);
        file.write_all_at(bytes, 0).map_err(|_| Error::OPERATING_SYSTEM)?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: this object owns the alias. The mapping replaces it by a file of the same length and
        // contents.
        let at = unsafe { libc::mmap(self.alias.cast(), len as usize, prot, flags, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(Error::OUT_OF_MEMORY) } else { Ok(file.into()) }
    }

    /// Whether the chunk can be exported. Imported chunks cannot be exported (driver 580).
    pub fn is_exportable(&self) -> bool {
        self.shareable && self.is_own
    }

    /// Returns the chunk behind a descriptor that another process has exported.
    pub fn import(gpu: usize, len: u64, fd: OwnedFd) -> Result<Arc<Chunk>, Error> {
        let alias = map(len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, fd.as_raw_fd())?;
        let (file, rdma) = (OnceLock::new(), AtomicBool::new(false));
        let chunk = Chunk { gpu, len, alias, shareable: true, file, rdma, is_own: false };
        let file = ChunkFile::new(fd)?;
        if !Account::get().share(chunk.as_shared(&file)) {
            return Err(Error::OPERATING_SYSTEM);
        }
        chunk.file.get_or_init(|| file);
        Ok(Arc::new(chunk))
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !(self.is_own && self.file.get().is_none() && Kept::keep(self.alias, self.len)) {
            // SAFETY: the mapping has this length. No work can reach the chunk, because work locks
            // the table and uses only mappings in the table, which keep their chunks alive.
            unsafe { libc::munmap(self.alias.cast(), self.len as usize) };
        }
        match self.file.get() {
            Some(file) => Account::get().give_shared(self.as_shared(file)),
            None if self.is_own => Account::get().give(self.gpu, self.len),
            None => {}
        }
    }
}

/// Host pages of freed chunks. With `CUDA_SIM_KEEP_MEMORY`, later chunks reuse these pages, because
/// a real GPU does not need to allocate host pages either.
#[derive(Debug, Default)]
struct Kept(Mutex<Vec<(usize, u64)>>);

static KEPT: Kept = Kept(Mutex::new(Vec::new()));

impl Kept {
    fn take(len: u64) -> Option<*mut u8> {
        let mut kept = KEPT.0.lock().unwrap_or_else(|e| e.into_inner());
        let at = kept.iter().position(|(_, other)| *other == len)?;
        let alias = kept.swap_remove(at).0 as *mut u8;
        // SAFETY: the mapping has this length, and no chunk uses it.
        unsafe { alias.write_bytes(0, len as usize) };
        Some(alias)
    }

    /// Keeps a mapping for later chunks. Returns false if keeping is not configured.
    fn keep(alias: *mut u8, len: u64) -> bool {
        let keeps = Config::get().keep_memory;
        if keeps {
            KEPT.0.lock().unwrap_or_else(|e| e.into_inner()).push((alias as usize, len));
        }
        keeps
    }
}

fn map(len: u64, prot: i32, flags: i32, fd: i32) -> Result<*mut u8, Error> {
    // SAFETY: the kernel chooses an unused address for the new mapping.
    let at = unsafe { libc::mmap(ptr::null_mut(), len as usize, prot, flags | libc::MAP_NORESERVE, fd, 0) };
    if at == libc::MAP_FAILED { Err(Error::OUT_OF_MEMORY) } else { Ok(at.cast()) }
}

/// Reserves unused addresses of the process, aligned to `align`. Uses `hint` if those addresses are
/// free.
pub fn reserve(len: u64, align: u64, hint: u64) -> Result<u64, Error> {
    let align = align.max(GRANULARITY);
    if hint != 0 && hint.is_multiple_of(align) {
        // SAFETY: without MAP_FIXED the hint never replaces a mapping.
        let at = unsafe {
            libc::mmap(
                hint as *mut _,
                len as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if at as u64 == hint {
            return Ok(hint);
        }
        if at != libc::MAP_FAILED {
            unreserve(at as u64, len);
        }
    }
    let span = len.checked_add(align).ok_or(Error::OUT_OF_MEMORY)?;
    let start = map(span, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)? as u64;
    let at = start.next_multiple_of(align);
    if at > start {
        unreserve(start, at - start);
    }
    if start + span > at + len {
        unreserve(at + len, start + span - at - len);
    }
    Ok(at)
}

/// Releases reserved addresses.
pub fn unreserve(at: u64, len: u64) {
    // SAFETY: the caller owns these addresses. `reserve` has returned the addresses, and the table
    // no longer contains them.
    unsafe { libc::munmap(at as *mut _, len as usize) };
}

/// The memory behind a mapping.
#[derive(Clone, Debug)]
pub enum Backing {
    /// A chunk or a part of it, beginning at `offset`. Memory of `cuMemAlloc` and related calls is
    /// `legacy`, and other GPUs access it by peer access between contexts. For memory of `cuMemMap`,
    /// `cuMemSetAccess` grants access.
    Chunk { chunk: Arc<Chunk>, offset: u64, legacy: bool },
    /// Host memory that the GPU can access. The device address equals the host address.
    Host { flags: u32, owned: bool },
    /// Managed memory. The device address equals the host address.
    Managed(Arc<Managed>),
}

/// One entry of the table.
#[derive(Clone, Debug)]
pub struct Mapping {
    pub at: u64,
    pub len: u64,
    pub backing: Backing,
    /// Bit *n* is set if GPU *n* may read (`read`) or write (`write`).
    pub read: u64,
    pub write: u64,
    /// Distinguishes this mapping from earlier and later mappings at the same address.
    pub id: u64,
    /// The context that created the mapping; 0 for none.
    pub context: usize,
}

impl Mapping {
    /// Returns the access rights of a GPU, as `CUmemAccess_flags`.
    pub fn rights(&self, gpu: usize) -> u32 {
        u32::from(self.read >> gpu & 1 != 0) | if self.write >> gpu & 1 != 0 { 2 } else { 0 }
    }

    /// Creates a mapping without access rights.
    pub fn new(at: u64, len: u64, backing: Backing, context: usize) -> Mapping {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Mapping { at, len, backing, read: 0, write: 0, id: NEXT.fetch_add(1, Ordering::Relaxed), context }
    }

    pub fn for_gpus(mut self, gpus: u64) -> Mapping {
        (self.read, self.write) = (gpus, gpus);
        self
    }

    pub fn end(&self) -> u64 {
        self.at + self.len
    }

    /// Returns the GPU that contains the bytes, or `None` for host and managed memory.
    pub fn gpu(&self) -> Option<usize> {
        match &self.backing {
            Backing::Chunk { chunk, .. } => Some(chunk.gpu),
            _ => None,
        }
    }

    fn bytes(&self, addr: u64) -> *mut u8 {
        match &self.backing {
            Backing::Chunk { chunk, offset, .. } => chunk.alias.wrapping_add((offset + addr - self.at) as usize),
            _ => addr as *mut u8,
        }
    }

    fn permits(&self, touch: Touch) -> bool {
        let bit = 1 << touch.gpu;
        let granted = if touch.write { self.write } else { self.read };
        match &self.backing {
            Backing::Chunk { chunk, legacy: true, .. } => {
                // Memory of pools belongs to no context. The pool determines the access rights.
                granted & bit != 0 || touch.copy || (self.context != 0 && crate::peer::enabled(touch.gpu, chunk.gpu))
            }
            _ => granted & bit != 0,
        }
    }
}

/// The GPU that accesses memory, and the kind of access.
#[derive(Clone, Copy, Debug)]
pub struct Touch {
    pub gpu: usize,
    pub write: bool,
    /// True if the access is a copy. Copies can access memory of other GPUs that kernels cannot.
    pub copy: bool,
}

/// The table of one process.
#[derive(Debug, Default)]
pub struct Space {
    pub reserved: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
}

static SPACE: RwLock<Space> = RwLock::new(Space { reserved: BTreeMap::new(), mappings: BTreeMap::new() });

/// Locks the table for reading. The caller must not sleep while it holds the lock.
pub fn space() -> RwLockReadGuard<'static, Space> {
    SPACE.read().unwrap_or_else(|e| e.into_inner())
}

/// Locks the table for changes.
pub fn space_mut() -> RwLockWriteGuard<'static, Space> {
    SPACE.write().unwrap_or_else(|e| e.into_inner())
}

impl Space {
    pub fn insert(&mut self, mapping: Mapping) {
        self.mappings.insert(mapping.at, mapping);
    }

    pub fn remove(&mut self, at: u64) -> Option<Mapping> {
        self.mappings.remove(&at)
    }

    pub fn exact(&self, at: u64) -> Option<&Mapping> {
        self.mappings.get(&at)
    }

    pub fn exact_mut(&mut self, at: u64) -> Option<&mut Mapping> {
        self.mappings.get_mut(&at)
    }

    /// Returns the mapping that contains `addr`.
    pub fn at(&self, addr: u64) -> Option<&Mapping> {
        let (_, mapping) = self.mappings.range(..=addr).next_back()?;
        (addr < mapping.end()).then_some(mapping)
    }

    /// Returns the reservation that contains `addr`.
    pub fn reservation(&self, addr: u64) -> Option<(u64, u64)> {
        let (at, len) = self.reserved.range(..=addr).next_back()?;
        (addr < at + len).then_some((*at, *len))
    }

    /// Returns the mappings that overlap a range, in the order of their addresses.
    pub fn overlapping(&self, at: u64, len: u64) -> Vec<u64> {
        if len == 0 {
            return Vec::new();
        }
        let first = self.at(at).map(|m| m.at);
        let rest =
            self.mappings.range((Bound::Excluded(at), Bound::Excluded(at.saturating_add(len)))).map(|(at, _)| *at);
        first.into_iter().chain(rest.filter(|at| Some(*at) != first)).collect()
    }

    /// Whether mappings cover all bytes of the range.
    pub fn covers(&self, at: u64, len: u64) -> bool {
        let mut from = at;
        while from < at.saturating_add(len) {
            match self.at(from) {
                Some(mapping) => from = mapping.end(),
                None => return false,
            }
        }
        true
    }

    /// Returns the bytes of a range, as one run per mapping. The runs are valid while the table is locked.
    pub fn runs(&self, at: u64, len: u64, touch: Touch) -> Result<Vec<(*mut u8, u64)>, Error> {
        let end = at.checked_add(len).ok_or(Error::ILLEGAL_ADDRESS)?;
        let mut runs = Vec::with_capacity(2);
        let mut from = at;
        while from < end {
            let mapping = self.at(from).filter(|m| m.permits(touch)).ok_or(Error::ILLEGAL_ADDRESS)?;
            let run = mapping.end().min(end) - from;
            runs.push((mapping.bytes(from), run));
            from += run;
        }
        Ok(runs)
    }

    /// Whether the process has managed memory.
    pub fn has_managed(&self) -> bool {
        self.mappings.values().any(|mapping| matches!(mapping.backing, Backing::Managed(_)))
    }

    /// Frees a destroyed context's plain allocations, host memory and managed memory.
    pub fn forget_context(&mut self, context: usize) {
        let ours: Vec<u64> =
            self.mappings.values().filter(|m| m.context == context && context != 0).map(|m| m.at).collect();
        for mapping in ours.into_iter().filter_map(|at| self.mappings.remove(&at)) {
            match &mapping.backing {
                Backing::Chunk { .. } => unreserve(mapping.at, mapping.len),
                Backing::Host { owned: true, .. } => unreserve(mapping.at, mapping.len),
                Backing::Host { owned: false, .. } => {}
                Backing::Managed(managed) => crate::managed::free(&mapping, managed),
            }
        }
    }
}

/// Accesses a range of at most one [`PIECE`]. Calls `each` for each run of bytes. Returns illegal
/// address if a part of the range is unmapped or the access is not permitted.
pub fn touch(at: u64, len: u64, touch: Touch, mut each: impl FnMut(*mut u8, u64)) -> Done {
    let space = space();
    space.runs(at, len, touch)?.into_iter().for_each(|(at, len)| each(at, len));
    Ok(())
}

/// Reads one value.
pub fn read<T: Copy + Default>(at: u64, gpu: usize) -> Result<T, Error> {
    let mut value = T::default();
    let mut done = 0;
    touch(at, size_of::<T>() as u64, Touch { gpu, write: false, copy: false }, |from, len| {
        // SAFETY: `from` has `len` readable bytes while the table is locked, and `value` has that many bytes
        // left.
        unsafe { ptr::copy_nonoverlapping(from, ptr::from_mut(&mut value).cast::<u8>().add(done), len as usize) };
        done += len as usize;
    })?;
    Ok(value)
}

/// Writes one value.
pub fn write<T: Copy>(at: u64, gpu: usize, value: T) -> Done {
    let mut done = 0;
    touch(at, size_of::<T>() as u64, Touch { gpu, write: true, copy: false }, |to, len| {
        // SAFETY: `to` has `len` writable bytes while the table is locked, and `value` has that many bytes
        // left.
        unsafe { ptr::copy_nonoverlapping(ptr::from_ref(&value).cast::<u8>().add(done), to, len as usize) };
        done += len as usize;
    })
}
