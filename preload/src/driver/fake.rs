//! A driver for unit tests, in place of `libcuda.so.1`. It records each call with the locks that the
//! calling thread holds. A test can let calls fail or block, and decides when the work of a stream
//! is done. Each chunk of GPU memory has one word of contents.

use crate::{driver::types::*, sys::rank};
use alloc::{collections::BTreeMap, vec::Vec};
use core::{
    cell::RefCell,
    ffi::{CStr, c_char, c_void},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use nvshare_wire::MAX_SLOTS;
use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

static IS_USED: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<Scene> = Mutex::new(Scene::new());
static CHANGED: Condvar = Condvar::new();

std::thread_local! {
    /// The calling thread's stack of current contexts.
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The size of each GPU in bytes.
pub const TOTAL: u64 = 16 << 30;

/// The attributes that are 1 on each GPU.
const SUPPORTED: [i32; 2] = [
    DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
    DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
];

/// The size of a chunk of another process.
const IMPORTED: u64 = 2 << 20;

/// The longest time that a call blocks. A test that has failed does not unblock its calls.
const BLOCKED: Duration = Duration::from_secs(30);

#[derive(Debug)]
struct Scene {
    calls: Vec<Call>,
    failures: Vec<InjectedFailure>,
    /// Functions that block, in one context or in any.
    blocked: Vec<(&'static str, Option<usize>)>,
    next: usize,
    next_device: CUdevice,
    /// UUIDs and attributes of devices that differ from the defaults.
    uuids: Vec<(CUdevice, [u8; 16])>,
    attributes: Vec<(CUdevice, i32, i32)>,
    /// The device of each context, and the context of each stream.
    contexts: BTreeMap<usize, CUdevice>,
    streams: BTreeMap<usize, usize>,
    capturing: Vec<(usize, u64)>,
    /// Streams whose work is not done, and the streams that each event waits for.
    busy: Vec<usize>,
    events: BTreeMap<usize, Vec<usize>>,
    /// GPU memory by its handle. Addresses with their size and handle.
    chunks: BTreeMap<u64, Chunk>,
    mapped: BTreeMap<u64, (u64, u64)>,
    next_address: u64,
    room: u64,
    has_kernel: bool,
}

#[derive(Debug)]
struct Chunk {
    len: u64,
    word: u32,
    /// Whether each word of the chunk is `word`.
    is_constant: bool,
    is_released: bool,
}

/// The calls after the next `skip` calls of a function fail.
#[derive(Debug)]
struct InjectedFailure {
    name: &'static str,
    skip: usize,
    times: usize,
    error: CUresult,
}

#[derive(Debug, Clone)]
struct Call {
    name: &'static str,
    arguments: Vec<u64>,
    locks: u64,
}

impl Scene {
    const fn new() -> Self {
        Self {
            calls: Vec::new(),
            failures: Vec::new(),
            blocked: Vec::new(),
            next: 0x1000,
            next_device: 0,
            uuids: Vec::new(),
            attributes: Vec::new(),
            contexts: BTreeMap::new(),
            streams: BTreeMap::new(),
            capturing: Vec::new(),
            busy: Vec::new(),
            events: BTreeMap::new(),
            chunks: BTreeMap::new(),
            mapped: BTreeMap::new(),
            next_address: 0x7_0000_0000,
            room: TOTAL,
            has_kernel: false,
        }
    }

    fn handle(&mut self) -> usize {
        self.next += 0x10;
        self.next
    }

    fn used(&self) -> u64 {
        let is_mapped = |handle: &u64| self.mapped.values().any(|(_, mapped)| mapped == handle);
        self.chunks.iter().filter(|(handle, chunk)| !chunk.is_released || is_mapped(handle)).map(|(_, c)| c.len).sum()
    }

    fn add_chunk(&mut self, len: u64) -> u64 {
        let handle = self.handle() as u64;
        self.chunks.insert(handle, Chunk { len, word: 0xdead, is_constant: false, is_released: false });
        handle
    }

    /// The chunk that is mapped at this address.
    fn at(&mut self, address: u64) -> Option<&mut Chunk> {
        let (_, handle) = self.mapped.get(&address)?;
        self.chunks.get_mut(handle)
    }

    fn capture_of(&self, stream: CUstream) -> Option<u64> {
        self.capturing.iter().find(|(capturing, _)| *capturing == stream as usize).map(|(_, id)| *id)
    }
}

fn state() -> MutexGuard<'static, Scene> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The locks that the calling thread holds, as bits of their ranks.
fn locks() -> u64 {
    #[cfg(debug_assertions)]
    return rank::ranks_of_thread();
    #[cfg(not(debug_assertions))]
    0
}

fn current() -> usize {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Records a call, and carries it out unless the test lets it fail. Blocks first if the test says so.
fn call(name: &'static str, arguments: &[u64], body: impl FnOnce(&mut Scene) -> CUresult) -> CUresult {
    let mut state = state();
    state.calls.push(Call { name, arguments: arguments.to_vec(), locks: locks() });
    CHANGED.notify_all();
    let blocks = |state: &Scene| {
        state.blocked.iter().any(|(blocked, context)| *blocked == name && context.is_none_or(|of| of == current()))
    };
    let deadline = Instant::now() + BLOCKED;
    while blocks(&state) && Instant::now() < deadline {
        (state, _) = CHANGED.wait_timeout(state, BLOCKED).unwrap_or_else(PoisonError::into_inner);
    }
    let Scene { failures, .. } = &mut *state;
    if let Some(failure) = failures.iter_mut().find(|failure| failure.name == name && failure.times > 0) {
        if failure.skip == 0 {
            failure.times -= 1;
            return failure.error;
        }
        failure.skip -= 1;
    }
    body(&mut state)
}

/// Waits until the condition holds. Fails after a deadline.
#[track_caller]
pub fn until(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "the condition never holds");
        std::thread::yield_now();
    }
}

/// The fake driver. Like all statics of the library, it serves one test, so each test needs its own process.
#[derive(Debug)]
pub struct Driver(());

impl Driver {
    pub fn new() -> Self {
        let is_used = IS_USED.swap(true, Ordering::SeqCst);
        assert!(!is_used, "this test needs its own process: run it with `cargo nextest run`");
        Self(())
    }

    /// The names of the recorded calls of these functions, in order.
    pub fn calls(&self, of: &[&str]) -> Vec<&'static str> {
        state().calls.iter().map(|call| call.name).filter(|name| of.contains(name)).collect()
    }

    pub fn count(&self, name: &str) -> usize {
        self.calls(&[name]).len()
    }

    /// The arguments of the recorded calls of a function, in order.
    pub fn arguments(&self, name: &str) -> Vec<Vec<u64>> {
        state().calls.iter().filter(|call| call.name == name).map(|call| call.arguments.clone()).collect()
    }

    /// Whether a lock of this rank was held during any recorded call of a function.
    pub fn was_held(&self, rank: rank::Rank, name: &str) -> bool {
        let is_of = |call: &&Call| call.name == name;
        state().calls.iter().filter(is_of).any(|call| call.locks >> rank as u32 & 1 == 1)
    }

    /// Whether any lock was held during any recorded call of a function.
    pub fn was_any_lock_held(&self, name: &str) -> bool {
        state().calls.iter().any(|call| call.name == name && call.locks != 0)
    }

    pub fn forget_calls(&self) {
        state().calls.clear();
    }

    /// The next `times` calls of a function return an error, without effect.
    pub fn fail(&self, name: &'static str, times: usize, error: CUresult) {
        self.fail_later(name, 0, times, error);
    }

    /// Like [`fail`](Self::fail), after `skip` calls that succeed.
    pub fn fail_later(&self, name: &'static str, skip: usize, times: usize, error: CUresult) {
        state().failures.push(InjectedFailure { name, skip, times, error });
    }

    /// Calls of a function succeed again.
    pub fn mend(&self, name: &str) {
        state().failures.retain(|failure| failure.name != name);
    }

    /// Calls of a function block until [`unblock`](Self::unblock).
    pub fn block(&self, name: &'static str) {
        state().blocked.push((name, None));
    }

    /// Like [`block`](Self::block), for calls while this context is current.
    pub fn block_in(&self, context: CUcontext, name: &'static str) {
        state().blocked.push((name, Some(context as usize)));
    }

    pub fn unblock(&self, name: &str) {
        state().blocked.retain(|(blocked, _)| *blocked != name);
        CHANGED.notify_all();
    }

    /// Waits until a function has been called `count` times.
    #[track_caller]
    pub fn wait_for_calls(&self, name: &str, count: usize) {
        until(|| self.count(name) >= count);
    }

    /// The ordinal of a GPU that the test does not use yet.
    pub fn new_device(&self) -> CUdevice {
        let mut state = state();
        state.next_device += 1;
        state.next_device - 1
    }

    /// Replaces a device by another, as a restore of the process may do.
    pub fn set_uuid(&self, device: CUdevice, uuid: [u8; 16]) {
        state().uuids.push((device, uuid));
    }

    pub fn set_attribute(&self, device: CUdevice, attribute: i32, value: i32) {
        state().attributes.push((device, attribute, value));
    }

    /// Creates a context.
    pub fn new_context(&self, device: CUdevice) -> CUcontext {
        let mut state = state();
        let context = state.handle();
        state.contexts.insert(context, device);
        context as CUcontext
    }

    /// Makes a context current on the calling thread.
    pub fn set_current(&self, context: CUcontext) {
        CURRENT.set(Vec::from([context as usize]));
    }

    /// Creates a stream.
    pub fn new_stream(&self, context: CUcontext) -> CUstream {
        let mut state = state();
        let stream = state.handle();
        state.streams.insert(stream, context as usize);
        stream as CUstream
    }

    /// The streams of a context, in the order of their creation.
    pub fn streams_of(&self, context: CUcontext) -> Vec<CUstream> {
        let state = state();
        state.streams.iter().filter(|(_, of)| **of == context as usize).map(|(stream, _)| *stream as CUstream).collect()
    }

    /// From now on, work in this stream is not done until [`finish`](Self::finish).
    pub fn keep_busy(&self, stream: CUstream) {
        state().busy.push(stream as usize);
    }

    /// Ends the work in this stream.
    pub fn finish(&self, stream: CUstream) {
        let mut state = state();
        state.busy.retain(|busy| *busy != stream as usize);
        state.events.values_mut().for_each(|pending| pending.retain(|pending| *pending != stream as usize));
    }

    /// Ends the work that this event waits for.
    pub fn finish_event(&self, event: u64) {
        if let Some(pending) = state().events.get_mut(&(event as usize)) {
            pending.clear();
        }
    }

    /// Begins or ends the driver's capture of a stream.
    pub fn set_capturing(&self, stream: CUstream, id: Option<u64>) {
        let mut state = state();
        state.capturing.retain(|(capturing, _)| *capturing != stream as usize);
        state.capturing.extend(id.map(|id| (stream as usize, id)));
    }

    /// Limits the bytes of GPU memory that can be created.
    pub fn set_room(&self, bytes: u64) {
        state().room = bytes;
    }

    /// Adds the fingerprint kernel, which can then be loaded.
    pub fn add_kernel(&self) {
        state().has_kernel = true;
    }

    /// Whether GPU memory is mapped at this address.
    pub fn is_mapped(&self, address: u64) -> bool {
        state().mapped.contains_key(&address)
    }

    /// Bytes of GPU memory in use.
    pub fn used(&self) -> u64 {
        state().used()
    }

    /// The first word of the chunk at this address.
    pub fn word(&self, address: u64) -> Option<u32> {
        state().at(address).map(|chunk| chunk.word)
    }

    /// Writes the first word of the chunk at this address. Other words have another value.
    pub fn write(&self, address: u64, word: u32) {
        if let Some(chunk) = state().at(address) {
            (chunk.word, chunk.is_constant) = (word, false);
        }
    }

    /// Writes each word of the chunk at this address.
    pub fn fill(&self, address: u64, word: u32) {
        if let Some(chunk) = state().at(address) {
            (chunk.word, chunk.is_constant) = (word, true);
        }
    }
}

/// Writes a result of a call.
///
/// # Safety
/// `place` is NULL or valid for a `T`.
unsafe fn put<T>(place: *mut T, value: T) -> CUresult {
    // SAFETY: the caller's contract.
    unsafe { super::put(place, value) };
    SUCCESS
}

fn found(is_so: bool) -> CUresult {
    if is_so { SUCCESS } else { ERROR_INVALID_VALUE }
}

fn ready(is_so: bool) -> CUresult {
    if is_so { SUCCESS } else { ERROR_NOT_READY }
}

/// Declares the functions of the fake driver. In the body, `$state` is the locked state.
macro_rules! fakes {
    ($state:ident; $( $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $body:expr; )*) => {
        /// Returns the address of the fake of this name.
        pub fn find(name: &CStr) -> Option<usize> {
            match name.to_str().ok()? {
                $( stringify!($name) => Some($name as *const () as usize), )*
                _ => None,
            }
        }
        $(
            #[allow(non_snake_case, unused_variables, unused_unsafe, clippy::too_many_arguments)]
            unsafe extern "C" fn $name($($arg: $type),*) -> CUresult {
                // SAFETY: the callers of the driver pass valid pointers.
                call(stringify!($name), &[$($arg as u64),*], |$state| unsafe { $body })
            }
        )*
    };
}

fakes! { state;
    cuDeviceGetCount(count: *mut i32) put(count, MAX_SLOTS as i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: CUdevice) {
        let set = state.attributes.iter().find(|(of, name, _)| (*of, *name) == (device, attribute));
        put(value, set.map_or_else(|| i32::from(SUPPORTED.contains(&attribute)), |(_, _, value)| *value))
    };
    cuDeviceGetName(name: *mut c_char, len: i32, device: CUdevice) put(name.cast(), *b"Fake\0");
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: CUdevice) {
        let set = state.uuids.iter().rev().find(|(of, _)| *of == device);
        put(uuid, set.map_or([device as u8 + 1; 16], |(_, uuid)| *uuid))
    };
    cuDeviceTotalMem_v2(bytes: *mut Size, device: CUdevice) put(bytes, TOTAL as Size);
    cuCtxGetCurrent(context: *mut CUcontext) put(context, current() as CUcontext);
    cuCtxGetDevice(device: *mut CUdevice) match state.contexts.get(&current()) {
        Some(found) => put(device, *found),
        None => ERROR_INVALID_CONTEXT,
    };
    cuCtxPushCurrent_v2(context: CUcontext) {
        CURRENT.with_borrow_mut(|stack| stack.push(context as usize));
        SUCCESS
    };
    cuCtxPopCurrent_v2(context: *mut CUcontext) {
        put(context, CURRENT.with_borrow_mut(Vec::pop).unwrap_or(0) as CUcontext)
    };
    cuCtxSynchronize() SUCCESS;
    cuCtxRecordEvent(context: CUcontext, event: CUevent) {
        let pending = state.busy.clone();
        found(state.events.insert(event as usize, pending).is_some())
    };
    cuEventCreate(event: *mut CUevent, flags: u32) {
        let handle = state.handle();
        state.events.insert(handle, Vec::new());
        put(event, handle as CUevent)
    };
    cuEventDestroy_v2(event: CUevent) found(state.events.remove(&(event as usize)).is_some());
    cuEventQuery(event: CUevent) match state.events.get(&(event as usize)) {
        Some(pending) => ready(pending.is_empty()),
        None => ERROR_INVALID_HANDLE,
    };
    cuEventRecord(event: CUevent, stream: CUstream) {
        let pending = state.busy.iter().copied().filter(|busy| *busy == stream as usize).collect();
        found(state.events.insert(event as usize, pending).is_some())
    };
    cuStreamCreate(stream: *mut CUstream, flags: u32) {
        let handle = state.handle();
        state.streams.insert(handle, current());
        put(stream, handle as CUstream)
    };
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) match state.streams.get(&(stream as usize)) {
        Some(found) => put(context, *found as CUcontext),
        None => ERROR_INVALID_HANDLE,
    };
    cuStreamQuery(stream: CUstream) ready(!state.busy.contains(&(stream as usize)));
    cuStreamIsCapturing(stream: CUstream, status: *mut i32) put(status, state.capture_of(stream).is_some().into());
    cuStreamGetCaptureInfo(stream: CUstream, status: *mut i32, id: *mut u64) {
        put(id, state.capture_of(stream).unwrap_or(0));
        put(status, state.capture_of(stream).is_some().into())
    };
    cuThreadExchangeStreamCaptureMode(mode: *mut i32) put(mode, 0);
    cuMemGetInfo_v2(free: *mut Size, total: *mut Size) {
        put(free, state.room.saturating_sub(state.used()) as Size);
        put(total, TOTAL as Size)
    };
    cuMemAddressReserve(address: *mut CUdeviceptr, size: Size, alignment: Size, at: CUdeviceptr, flags: u64) {
        let start = state.next_address;
        state.next_address += size as u64;
        put(address, start)
    };
    cuMemAddressFree(address: CUdeviceptr, size: Size) SUCCESS;
    cuMemCreate(handle: *mut Handle, size: Size, prop: *const AllocationProp, flags: u64) {
        if state.used() + size as u64 > state.room {
            return ERROR_OUT_OF_MEMORY;
        }
        put(handle, state.add_chunk(size as u64))
    };
    cuMemRelease(handle: Handle) match state.chunks.get_mut(&handle) {
        Some(chunk) => {
            chunk.is_released = true;
            SUCCESS
        }
        None => ERROR_INVALID_VALUE,
    };
    cuMemMap(address: CUdeviceptr, size: Size, offset: Size, handle: Handle, flags: u64) {
        let is_free = !state.mapped.contains_key(&address) && state.chunks.contains_key(&handle);
        if is_free {
            state.mapped.insert(address, (size as u64, handle));
        }
        found(is_free)
    };
    cuMemUnmap(address: CUdeviceptr, size: Size) {
        let inside = address..address + size as u64;
        let before = state.mapped.len();
        state.mapped.retain(|at, _| !inside.contains(at));
        found(state.mapped.len() < before)
    };
    cuMemSetAccess(address: CUdeviceptr, size: Size, desc: *const AccessDesc, count: Size)
        found(state.mapped.contains_key(&address));
    cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: Handle) {
        let device = state.contexts.get(&current()).copied().unwrap_or(0);
        let location = Location { kind: MEM_LOCATION_TYPE_DEVICE, id: device };
        put(prop, AllocationProp { location, ..AllocationProp::default() })
    };
    cuMemImportFromShareableHandle(handle: *mut Handle, shareable: *mut c_void, kind: i32) {
        put(handle, state.add_chunk(IMPORTED))
    };
    cuMemHostRegister_v2(host: *mut c_void, size: Size, flags: u32) SUCCESS;
    cuMemHostUnregister(host: *mut c_void) SUCCESS;
    cuMemHostGetDevicePointer_v2(on_gpu: *mut CUdeviceptr, host: *mut c_void, flags: u32) put(on_gpu, host as u64);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, size: Size, stream: CUstream) match state.at(from) {
        Some(chunk) => put(to.cast(), chunk.word),
        None => ERROR_INVALID_VALUE,
    };
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, size: Size, stream: CUstream) match state.at(to) {
        Some(chunk) => {
            (chunk.word, chunk.is_constant) = (from.cast::<u32>().read(), false);
            SUCCESS
        }
        None => ERROR_INVALID_VALUE,
    };
    cuMemsetD32Async(to: CUdeviceptr, value: u32, count: Size, stream: CUstream) match state.at(to) {
        Some(chunk) => {
            (chunk.word, chunk.is_constant) = (value, true);
            SUCCESS
        }
        None => ERROR_INVALID_VALUE,
    };
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void) match state.has_kernel {
        true => put(module, state.handle() as CUmodule),
        false => ERROR_NOT_SUPPORTED,
    };
    cuModuleUnload(module: CUmodule) SUCCESS;
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) {
        put(function, state.handle() as CUfunction)
    };
    cuFuncLoad(function: CUfunction) SUCCESS;
    // The fingerprint kernel, whose list and results have the layout that `memory/fingerprint.rs` describes.
    cuLaunchKernel(
        function: CUfunction,
        grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        let list = (*params).cast::<*const [u64; 2]>().read();
        let out = (*params.add(1)).cast::<*mut [u64; 4]>().read();
        for chunk in 0..grid_y as usize {
            let [address, _] = list.add(1 + chunk).read();
            let Some(Chunk { word, is_constant, .. }) = state.at(address) else { return ERROR_INVALID_VALUE };
            for part in 0..grid_x as usize {
                let sums = [u64::from(*word), 0, u64::from(!*is_constant), u64::from(*word)];
                out.add(chunk * grid_x as usize + part).write(sums);
            }
        }
        SUCCESS
    };
}
