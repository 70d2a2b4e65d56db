//! Determines which driver calls wait for a running kernel. Each call is made in a separate thread,
//! and the kernel ends after one second. The library's assumptions are in
//! `preload/coverage/waiting.tsv`. Run the program without nvshare, because the library replaces
//! some of the calls.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Gpu, Kind, Mapped, Stream, api, cu, late::late_cu},
    report::Report,
};
use std::{
    ffi::c_void,
    mem,
    sync::mpsc::{RecvTimeoutError, channel},
    thread,
    time::Duration,
};

const LEN: usize = 16 << 20;
/// More launches than the queue of a stream can hold.
const MANY: u32 = 3000;

/// Calls a driver function by its symbol's name. Arguments are integers or addresses. A function
/// ignores excess arguments.
fn call(symbol: &str, arguments: &[u64]) -> u32 {
    type Function = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> u32;
    let function = api::dlsym(symbol);
    let at = |i: usize| arguments.get(i).copied().unwrap_or(0);
    // SAFETY: the symbol is a function of the driver, and the arguments meet the requirements of
    // the CUDA headers.
    unsafe { mem::transmute::<*mut c_void, Function>(function)(at(0), at(1), at(2), at(3), at(4), at(5)) }
}

/// Leaks memory for a result and returns its address.
fn place() -> u64 {
    Box::leak(Box::new([0u64; 64])).as_ptr() as u64
}

fn value(place: u64) -> u64 {
    // SAFETY: the address comes from `place`.
    unsafe { (place as *const u64).read_volatile() }
}

/// Makes a call whose first argument is a result pointer, and returns the result.
fn got(symbol: &str, rest: &[u64]) -> u64 {
    let at = place();
    let arguments: Vec<u64> = [at].iter().chain(rest).copied().collect();
    call(symbol, &arguments);
    value(at)
}

type Calls = Vec<(&'static str, Box<dyn Fn() -> u32 + Send>)>;

pub fn run(_: &Args, report: &mut Report) -> Outcome {
    let gpu = Gpu::open(0)?;
    let flag: &'static Mapped = Box::leak(Box::new(Mapped::new(4)?));
    let (busy, other) = (Stream::new()?, Stream::new()?);
    gpu.empty(other.0)?;
    gpu.synchronise()?;
    for (name, call) in calls(&gpu, &busy, &other)? {
        try_beside(&gpu, flag, &busy, name, call, 0, report)?;
    }
    // These calls use other streams or the whole context, and are made while the queue of the busy
    // stream is full.
    let event = got("cuEventCreate", &[2]);
    let (stream, context) = (other.0 as u64, gpu.context as u64);
    let full: Calls = vec![
        ("cuEventRecord, another queue is full", Box::new(move || call("cuEventRecord", &[event, stream]))),
        ("cuCtxRecordEvent, a queue is full", Box::new(move || call("cuCtxRecordEvent", &[context, event]))),
        ("cuEventQuery, a queue is full", Box::new(move || call("cuEventQuery", &[event]))),
    ];
    for (name, call) in full {
        try_beside(&gpu, flag, &busy, name, call, MANY, report)?;
    }
    Ok(())
}

/// Makes a call while a kernel runs, with `launches` queued launches behind the kernel.
fn try_beside(
    gpu: &Gpu,
    flag: &'static Mapped,
    busy: &Stream,
    name: &str,
    call: Box<dyn Fn() -> u32 + Send>,
    behind: u32,
    report: &mut Report,
) -> Outcome {
    flag.set(0);
    gpu.spin_until(flag.at, busy.0)?;
    thread::scope(|scope| {
        let launches = scope.spawn(move || {
            gpu.enter()?;
            (0..behind).try_for_each(|_| gpu.empty(busy.0))
        });
        thread::sleep(Duration::from_millis(if behind > 0 { 1000 } else { 50 }));
        let (tell, told) = channel();
        let context = gpu.context;
        let caller = scope.spawn(move || {
            let _ = cu!(cuCtxSetCurrent(context));
            let _ = tell.send(call());
        });
        let result = told.recv_timeout(Duration::from_secs(1));
        flag.set(1);
        let said = match result {
            Ok(code) => format!("returns {code}"),
            Err(RecvTimeoutError::Timeout) => format!("waits, {}", told.recv().unwrap_or(u32::MAX)),
            Err(RecvTimeoutError::Disconnected) => "ends its thread".into(),
        };
        report.text(name, &said);
        let _ = caller.join();
        launches.join().map_err(|_| "a thread panicked")??;
        gpu.synchronise()?;
        Ok(())
    })
}

/// The calls and their arguments.
fn calls(gpu: &Gpu, busy: &Stream, other: &Stream) -> Result<Calls, Box<dyn std::error::Error>> {
    const PORTABLE_AND_MAPPED: u64 = 3;
    let (context, device) = (gpu.context as u64, gpu.device as u64);
    let (busy, other) = (busy.0 as u64, other.0 as u64);
    let host = || vec![1u8; LEN].leak().as_ptr() as u64;
    let (registered, unregistered) = (host(), host());
    call("cuMemHostRegister_v2", &[registered, LEN as u64, PORTABLE_AND_MAPPED]);
    let memory = |kind| Ok::<_, crate::cuda::Error>(mem::ManuallyDrop::new(crate::cuda::Buffer::new(kind, LEN)?).at);
    let (plain, freed, mapped) = (memory(Kind::Alloc)?, memory(Kind::Alloc)?, memory(Kind::Vmm)?);
    let image = std::ffi::CString::new(include_str!("../kernels.ptx"))?.into_raw() as u64;
    let (module, unloaded) = (got("cuModuleLoadData", &[image]), got("cuModuleLoadData", &[image]));
    let function = got("cuModuleGetFunction", &[module, c"mix_u32".as_ptr() as u64]);
    let event = got("cuEventCreate", &[2]);
    call("cuEventRecord", &[event, other]);
    let pinned = got("cuMemHostAlloc", &[LEN as u64, 0]);
    let mut plain_context = 0;
    late_cu!(cuCtxCreate_v2(&mut plain_context, 0, gpu.device))?;
    gpu.enter()?;
    let is_set = place();
    // SAFETY: the address comes from `place`.
    unsafe { (is_set as *mut u32).write(1) };
    let location = [1u32, gpu.device as u32].to_vec().leak().as_ptr() as u64;
    let managed = memory(Kind::Managed)?;
    let (pool, capturing) = (got("cuDeviceGetMemPool", &[device]), got("cuStreamCreate", &[1]));
    let (handle, relaxed) = (got("cuMemRetainAllocationHandle", &[mapped]), [2u32].to_vec().leak().as_ptr() as u64);
    let (attribute, answers) = ([2u32].to_vec().leak().as_ptr() as u64, [place()].to_vec().leak().as_ptr() as u64);
    let mut calls: Calls = Vec::new();
    let mut add = |symbol: &'static str, arguments: Vec<u64>| {
        calls.push((symbol, Box::new(move || call(symbol, &arguments))));
    };
    add("cuDeviceGetCount", vec![place()]);
    add("cuDeviceGetAttribute", vec![place(), 16, device]);
    add("cuDeviceGetName", vec![place(), 64, device]);
    add("cuDeviceGetUuid", vec![place(), device]);
    add("cuDeviceGetUuid_v2", vec![place(), device]);
    add("cuDeviceTotalMem_v2", vec![place(), device]);
    add("cuDeviceCanAccessPeer", vec![place(), device, device]);
    add("cuCtxGetCurrent", vec![place()]);
    add("cuCtxPushCurrent_v2", vec![context]);
    add("cuCtxPopCurrent_v2", vec![place()]);
    add("cuCtxGetDevice", vec![place()]);
    add("cuDevicePrimaryCtxRetain", vec![place(), device]);
    add("cuDevicePrimaryCtxGetState", vec![device, place(), place()]);
    add("cuStreamGetCtx", vec![busy, place()]);
    add("cuStreamGetFlags", vec![busy, place()]);
    add("cuStreamGetId", vec![busy, place()]);
    add("cuStreamGetCaptureInfo", vec![busy, place(), place()]);
    add("cuStreamIsCapturing", vec![busy, place()]);
    add("cuThreadExchangeStreamCaptureMode", vec![relaxed]);
    add("cuStreamQuery", vec![busy]);
    add("cuStreamCreate", vec![place(), 1]);
    add("cuEventCreate", vec![place(), 2]);
    add("cuEventQuery", vec![event]);
    add("cuEventRecord", vec![event, busy]);
    add("cuCtxRecordEvent", vec![context, event]);
    add("cuStreamWaitEvent", vec![other, event, 0]);
    add("cuMemsetD32Async", vec![plain, 0, 16, other]);
    add("cuMemcpyAsync", vec![plain, pinned, 4096, other]);
    add("cuMemPrefetchAsync", vec![managed, LEN as u64, device, other]);
    add("cuMemcpyHtoDAsync_v2", vec![plain, pinned, 4096, other]);
    add("cuMemcpyDtoHAsync_v2", vec![pinned, plain, 4096, other]);
    add("cuMemGetInfo_v2", vec![place(), place()]);
    add("cuMemAlloc_v2", vec![place(), LEN as u64]);
    add("cuMemAllocManaged", vec![place(), LEN as u64, 1]);
    add("cuMemAddressReserve", vec![place(), LEN as u64, 0, 0, 0]);
    add("cuMemGetAccess", vec![place(), location, mapped]);
    add("cuMemGetAllocationPropertiesFromHandle", vec![place(), handle]);
    add("cuMemExportToShareableHandle", vec![place(), handle, 1, 0]);
    add("cuMemGetAddressRange_v2", vec![place(), place(), plain]);
    add("cuPointerGetAttribute", vec![place(), 2, plain]);
    add("cuPointerGetAttributes", vec![1, attribute, answers, plain]);
    add("cuPointerSetAttribute", vec![is_set, 6, plain]);
    add("cuMemHostGetDevicePointer_v2", vec![place(), registered, 0]);
    add("cuMemHostRegister_v2", vec![unregistered, LEN as u64, PORTABLE_AND_MAPPED]);
    add("cuDeviceGetDefaultMemPool", vec![place(), device]);
    add("cuDeviceGetMemPool", vec![place(), device]);
    add("cuMemPoolGetAttribute", vec![pool, 4, place()]);
    add("cuMemPoolGetAccess", vec![place(), pool, location]);
    add("cuModuleGetFunction", vec![place(), module, c"unmix_u32".as_ptr() as u64]);
    add("cuFuncLoad", vec![function]);
    add("cuModuleLoadData", vec![place(), image]);
    add("cuModuleUnload", vec![unloaded]);
    add("cuMemHostUnregister", vec![registered]);
    add("cuMemFreeHost", vec![pinned]);
    add("cuMemUnmap", vec![mapped, LEN as u64]);
    add("cuMemFree_v2", vec![freed]);
    add("cuCtxDestroy_v2", vec![plain_context as u64]);
    let begin =
        move || call("cuStreamBeginCapture_v2", &[capturing, 2]) + call("cuStreamEndCapture", &[capturing, place()]);
    calls.insert(0, ("cuStreamBeginCapture_v2", Box::new(begin)));
    Ok(calls)
}
