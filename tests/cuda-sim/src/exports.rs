//! All symbols of the library in one table. Each entry contains the name for `cuGetProcAddress`, the
//! CUDA version that introduced this form, the symbol, and the function that implements it.
//!
//! `early` calls work before `cuInit` and while the process is locked. `streams` calls have two
//! flavours. With the plain symbol, stream 0 is the context's legacy stream. With the `_ptsz` or
//! `_ptds` symbol, stream 0 is the thread's own stream.

use crate::{
    alloc, array, capture, checkpoint, context, copy, device, error, event, fill, graph, green, host, interop, ipc,
    launch,
    lookup::{self, Export},
    managed::{self, Location},
    module, multicast, peer, pointer, pool,
    stream::{self, Flavour},
    value, vmm,
    work::{Callback, HostFn},
};
use std::ffi::c_char;

macro_rules! exports {
    (
        early { $($e_name:literal $e_version:literal $e_symbol:ident = $e_do:path, ($($e_arg:ident: $e_type:ty),*);)* }
        plain { $($p_name:literal $p_version:literal $p_symbol:ident = $p_do:path, ($($p_arg:ident: $p_type:ty),*);)* }
        streams { $($s_name:literal $s_version:literal $s_symbol:ident, $t_version:literal $t_symbol:ident = $s_do:path, ($($s_arg:ident: $s_type:ty),*);)* }
    ) => {
        /// The symbols, declared as in the CUDA headers.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        mod symbols {
            use super::*;

            $(#[unsafe(no_mangle)]
            pub extern "C" fn $e_symbol($($e_arg: $e_type),*) -> u32 {
                crate::enter(stringify!($e_symbol), true, || $e_do($($e_arg),*))
            })*
            $(#[unsafe(no_mangle)]
            pub extern "C" fn $p_symbol($($p_arg: $p_type),*) -> u32 {
                crate::enter(stringify!($p_symbol), false, || $p_do($($p_arg),*))
            })*
            $(#[unsafe(no_mangle)]
            pub extern "C" fn $s_symbol($($s_arg: $s_type),*) -> u32 {
                crate::enter(stringify!($s_symbol), false, || $s_do(Flavour::Legacy, $($s_arg),*))
            }
            #[unsafe(no_mangle)]
            pub extern "C" fn $t_symbol($($s_arg: $s_type),*) -> u32 {
                crate::enter(stringify!($t_symbol), false, || $s_do(Flavour::PerThread, $($s_arg),*))
            })*
        }

        /// The table for `cuGetProcAddress`.
        pub static EXPORTS: &[Export] = &[
            $(Export { name: $e_name, version: $e_version, flavour: None, address: || symbols::$e_symbol as *const () as usize },)*
            $(Export { name: $p_name, version: $p_version, flavour: None, address: || symbols::$p_symbol as *const () as usize },)*
            $(Export { name: $s_name, version: $s_version, flavour: Some(Flavour::Legacy), address: || symbols::$s_symbol as *const () as usize },
            Export { name: $s_name, version: $t_version, flavour: Some(Flavour::PerThread), address: || symbols::$t_symbol as *const () as usize },)*
        ];
    };
}

exports! {
    early {
        "cuInit" 2000 cuInit = device::init, (flags: u32);
        "cuDriverGetVersion" 2020 cuDriverGetVersion = device::driver_version, (version: *mut i32);
        "cuGetExportTable" 3000 cuGetExportTable = lookup::export_table, (table: *mut usize, id: *const [u8; 16]);
        "cuGetErrorName" 6000 cuGetErrorName = error::name, (code: u32, text: *mut *const c_char);
        "cuGetErrorString" 6000 cuGetErrorString = error::string, (code: u32, text: *mut *const c_char);
        "cuGetProcAddress" 11030 cuGetProcAddress = lookup::get, (name: *const c_char, to: *mut usize, version: i32, flags: u64);
        "cuGetProcAddress" 12000 cuGetProcAddress_v2 = lookup::get_v2, (name: *const c_char, to: *mut usize, version: i32, flags: u64, status: *mut u32);
        // Checkpoints
        "cuCheckpointProcessGetRestoreThreadId" 12080 cuCheckpointProcessGetRestoreThreadId = checkpoint::thread_id, (pid: i32, thread: *mut i32);
        "cuCheckpointProcessGetState" 12080 cuCheckpointProcessGetState = checkpoint::state, (pid: i32, state: *mut u32);
        "cuCheckpointProcessLock" 12080 cuCheckpointProcessLock = checkpoint::lock, (pid: i32, args: *const checkpoint::LockArgs);
        "cuCheckpointProcessCheckpoint" 12080 cuCheckpointProcessCheckpoint = checkpoint::checkpoint, (pid: i32, args: *const checkpoint::NoArgs);
        "cuCheckpointProcessRestore" 12080 cuCheckpointProcessRestore = checkpoint::restore, (pid: i32, args: *const checkpoint::RestoreArgs);
        "cuCheckpointProcessUnlock" 12080 cuCheckpointProcessUnlock = checkpoint::unlock, (pid: i32, args: *const checkpoint::NoArgs);
    }
    plain {
        // Devices
        "cuDeviceGet" 2000 cuDeviceGet = device::get, (device: *mut i32, ordinal: i32);
        "cuDeviceGetCount" 2000 cuDeviceGetCount = device::count, (count: *mut i32);
        "cuDeviceGetName" 2000 cuDeviceGetName = device::name, (name: *mut c_char, len: i32, device: i32);
        "cuDeviceGetUuid" 9020 cuDeviceGetUuid = device::uuid, (uuid: *mut [u8; 16], device: i32);
        "cuDeviceGetUuid" 11040 cuDeviceGetUuid_v2 = device::uuid, (uuid: *mut [u8; 16], device: i32);
        "cuDeviceTotalMem" 3020 cuDeviceTotalMem_v2 = device::total_memory, (bytes: *mut usize, device: i32);
        "cuDeviceGetAttribute" 2000 cuDeviceGetAttribute = device::attribute, (value: *mut i32, attribute: u32, device: i32);
        "cuDeviceComputeCapability" 2000 cuDeviceComputeCapability = device::compute_capability, (major: *mut i32, minor: *mut i32, device: i32);
        "cuDeviceGetPCIBusId" 4010 cuDeviceGetPCIBusId = device::pci_bus_id, (id: *mut c_char, len: i32, device: i32);
        "cuDeviceGetByPCIBusId" 4010 cuDeviceGetByPCIBusId = device::by_pci_bus_id, (device: *mut i32, id: *const c_char);
        "cuDeviceCanAccessPeer" 4000 cuDeviceCanAccessPeer = peer::can_access, (can: *mut i32, device: i32, peer: i32);
        "cuDeviceGetP2PAttribute" 8000 cuDeviceGetP2PAttribute = peer::attribute, (value: *mut i32, attribute: u32, device: i32, peer: i32);
        "cuCtxEnablePeerAccess" 4000 cuCtxEnablePeerAccess = peer::enable, (peer: usize, flags: u32);
        "cuCtxDisablePeerAccess" 4000 cuCtxDisablePeerAccess = peer::disable, (peer: usize);
        // Contexts
        "cuDevicePrimaryCtxRetain" 7000 cuDevicePrimaryCtxRetain = context::retain_primary, (context: *mut usize, device: i32);
        "cuDevicePrimaryCtxRelease" 7000 cuDevicePrimaryCtxRelease = context::release_primary, (device: i32);
        "cuDevicePrimaryCtxRelease" 11000 cuDevicePrimaryCtxRelease_v2 = context::release_primary, (device: i32);
        "cuDevicePrimaryCtxReset" 7000 cuDevicePrimaryCtxReset = context::reset_primary, (device: i32);
        "cuDevicePrimaryCtxReset" 11000 cuDevicePrimaryCtxReset_v2 = context::reset_primary, (device: i32);
        "cuDevicePrimaryCtxSetFlags" 7000 cuDevicePrimaryCtxSetFlags = context::set_primary_flags, (device: i32, flags: u32);
        "cuDevicePrimaryCtxSetFlags" 11000 cuDevicePrimaryCtxSetFlags_v2 = context::set_primary_flags, (device: i32, flags: u32);
        "cuDevicePrimaryCtxGetState" 7000 cuDevicePrimaryCtxGetState = context::primary_state, (device: i32, flags: *mut u32, active: *mut i32);
        "cuCtxCreate" 3020 cuCtxCreate_v2 = context::create, (context: *mut usize, flags: u32, device: i32);
        "cuCtxCreate" 11040 cuCtxCreate_v3 = context::create_v3, (context: *mut usize, affinity: *mut u8, affinities: i32, flags: u32, device: i32);
        "cuCtxCreate" 12050 cuCtxCreate_v4 = context::create_v4, (context: *mut usize, params: *mut u8, flags: u32, device: i32);
        "cuCtxDestroy" 2000 cuCtxDestroy = context::destroy, (context: usize);
        "cuCtxDestroy" 4000 cuCtxDestroy_v2 = context::destroy, (context: usize);
        "cuCtxAttach" 2000 cuCtxAttach = context::attach, (context: *mut usize, flags: u32);
        "cuCtxDetach" 2000 cuCtxDetach = context::destroy, (context: usize);
        "cuCtxPushCurrent" 2000 cuCtxPushCurrent = context::push, (context: usize);
        "cuCtxPushCurrent" 4000 cuCtxPushCurrent_v2 = context::push, (context: usize);
        "cuCtxPopCurrent" 2000 cuCtxPopCurrent = context::pop, (context: *mut usize);
        "cuCtxPopCurrent" 4000 cuCtxPopCurrent_v2 = context::pop, (context: *mut usize);
        "cuCtxSetCurrent" 4000 cuCtxSetCurrent = context::set, (context: usize);
        "cuCtxGetCurrent" 4000 cuCtxGetCurrent = context::get, (context: *mut usize);
        "cuCtxGetDevice" 2000 cuCtxGetDevice = context::get_device, (device: *mut i32);
        "cuCtxGetDevice" 13000 cuCtxGetDevice_v2 = context::get_device_v2, (device: *mut i32, context: usize);
        "cuCtxGetFlags" 7000 cuCtxGetFlags = context::get_flags, (flags: *mut u32);
        "cuCtxSetFlags" 12010 cuCtxSetFlags = context::set_flags, (flags: u32);
        "cuCtxGetId" 12000 cuCtxGetId = context::get_id, (context: usize, id: *mut u64);
        "cuCtxGetApiVersion" 3020 cuCtxGetApiVersion = context::api_version, (context: usize, version: *mut u32);
        "cuCtxSynchronize" 2000 cuCtxSynchronize = context::synchronise, ();
        "cuCtxSynchronize" 13000 cuCtxSynchronize_v2 = context::synchronise_v2, (context: usize);
        "cuCtxGetLimit" 3010 cuCtxGetLimit = context::get_limit, (value: *mut usize, limit: u32);
        "cuCtxSetLimit" 3010 cuCtxSetLimit = context::set_limit, (limit: u32, value: usize);
        "cuCtxGetCacheConfig" 3020 cuCtxGetCacheConfig = context::get_config, (config: *mut u32);
        "cuCtxSetCacheConfig" 3020 cuCtxSetCacheConfig = context::set_config, (config: u32);
        "cuCtxGetSharedMemConfig" 4020 cuCtxGetSharedMemConfig = context::get_config, (config: *mut u32);
        "cuCtxSetSharedMemConfig" 4020 cuCtxSetSharedMemConfig = context::set_config, (config: u32);
        "cuCtxResetPersistingL2Cache" 11000 cuCtxResetPersistingL2Cache = context::reset_l2, ();
        "cuCtxGetStreamPriorityRange" 5050 cuCtxGetStreamPriorityRange = context::priority_range, (least: *mut i32, greatest: *mut i32);
        "cuCtxRecordEvent" 12050 cuCtxRecordEvent = event::context_record, (context: usize, event: usize);
        "cuCtxWaitEvent" 12050 cuCtxWaitEvent = event::context_wait, (context: usize, event: usize);
        "cuDeviceGetDevResource" 12040 cuDeviceGetDevResource = green::of_device, (device: i32, resource: *mut green::Resource, kind: u32);
        "cuCtxGetDevResource" 12040 cuCtxGetDevResource = green::of_current, (context: usize, resource: *mut green::Resource, kind: u32);
        "cuGreenCtxGetDevResource" 12040 cuGreenCtxGetDevResource = green::of_green, (green: usize, resource: *mut green::Resource, kind: u32);
        "cuDevSmResourceSplitByCount" 12040 cuDevSmResourceSplitByCount = green::split, (groups: *mut green::Resource, count: *mut u32, from: *const green::Resource, rest: *mut green::Resource, flags: u32, least: u32);
        "cuDevResourceGenerateDesc" 12040 cuDevResourceGenerateDesc = green::describe, (description: *mut usize, resources: *const green::Resource, count: u32);
        "cuGreenCtxCreate" 12040 cuGreenCtxCreate = green::create, (green: *mut usize, description: usize, device: i32, flags: u32);
        "cuGreenCtxDestroy" 12040 cuGreenCtxDestroy = green::destroy, (green: usize);
        "cuCtxFromGreenCtx" 12040 cuCtxFromGreenCtx = green::context, (context: *mut usize, green: usize);
        "cuGreenCtxRecordEvent" 12040 cuGreenCtxRecordEvent = green::record, (green: usize, event: usize);
        "cuGreenCtxWaitEvent" 12040 cuGreenCtxWaitEvent = green::wait, (green: usize, event: usize);
        "cuGreenCtxStreamCreate" 12050 cuGreenCtxStreamCreate = green::stream, (stream: *mut usize, green: usize, flags: u32, priority: i32);
        "cuStreamGetGreenCtx" 12040 cuStreamGetGreenCtx = green::of_stream, (stream: usize, green: *mut usize);
        // Memory
        "cuMemGetInfo" 3020 cuMemGetInfo_v2 = alloc::info, (free: *mut usize, total: *mut usize);
        "cuMemAlloc" 3020 cuMemAlloc_v2 = alloc::alloc, (at: *mut u64, len: usize);
        "cuMemAllocPitch" 3020 cuMemAllocPitch_v2 = alloc::alloc_pitch, (at: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32);
        "cuMemFree" 3020 cuMemFree_v2 = alloc::free, (at: u64);
        "cuMemGetAddressRange" 3020 cuMemGetAddressRange_v2 = alloc::address_range, (base: *mut u64, size: *mut usize, at: u64);
        "cuMemAllocHost" 3020 cuMemAllocHost_v2 = host::alloc, (at: *mut u64, len: usize);
        "cuMemHostAlloc" 2020 cuMemHostAlloc = host::alloc_with_flags, (at: *mut u64, len: usize, flags: u32);
        "cuMemFreeHost" 2000 cuMemFreeHost = host::free, (at: u64);
        "cuMemHostRegister" 4000 cuMemHostRegister = host::register, (at: u64, len: usize, flags: u32);
        "cuMemHostRegister" 6050 cuMemHostRegister_v2 = host::register, (at: u64, len: usize, flags: u32);
        "cuMemHostUnregister" 4000 cuMemHostUnregister = host::unregister, (at: u64);
        "cuMemHostGetDevicePointer" 3020 cuMemHostGetDevicePointer_v2 = host::device_pointer, (device: *mut u64, host: u64, flags: u32);
        "cuMemHostGetFlags" 2030 cuMemHostGetFlags = host::get_flags, (flags: *mut u32, host: u64);
        "cuMemAllocManaged" 6000 cuMemAllocManaged = managed::alloc, (at: *mut u64, len: usize, flags: u32);
        "cuMemAdvise" 8000 cuMemAdvise = managed::advise, (at: u64, len: usize, advice: u32, device: i32);
        "cuMemAdvise" 12020 cuMemAdvise_v2 = managed::advise_v2, (at: u64, len: usize, advice: u32, to: Location);
        "cuMemRangeGetAttribute" 8000 cuMemRangeGetAttribute = managed::range_attribute, (data: *mut i32, size: usize, attribute: u32, at: u64, len: usize);
        "cuPointerGetAttribute" 4000 cuPointerGetAttribute = pointer::attribute, (data: *mut u64, attribute: u32, at: u64);
        "cuPointerGetAttributes" 7000 cuPointerGetAttributes = pointer::attributes, (count: u32, attributes: *const u32, data: *const *mut u64, at: u64);
        "cuPointerSetAttribute" 6000 cuPointerSetAttribute = pointer::set_attribute, (value: *const u8, attribute: u32, at: u64);
        // Virtual memory management
        "cuMemGetAllocationGranularity" 10020 cuMemGetAllocationGranularity = vmm::granularity, (granularity: *mut usize, properties: *const vmm::Properties, option: u32);
        "cuMemCreate" 10020 cuMemCreate = vmm::create, (handle: *mut u64, size: usize, properties: *const vmm::Properties, flags: u64);
        "cuMemRelease" 10020 cuMemRelease = vmm::release, (handle: u64);
        "cuMemRetainAllocationHandle" 11000 cuMemRetainAllocationHandle = vmm::retain, (handle: *mut u64, at: u64);
        "cuMemGetAllocationPropertiesFromHandle" 10020 cuMemGetAllocationPropertiesFromHandle = vmm::properties, (properties: *mut vmm::Properties, handle: u64);
        "cuMemAddressReserve" 10020 cuMemAddressReserve = vmm::reserve, (at: *mut u64, size: usize, align: usize, hint: u64, flags: u64);
        "cuMemAddressFree" 10020 cuMemAddressFree = vmm::free, (at: u64, size: usize);
        "cuMemMap" 10020 cuMemMap = vmm::map, (at: u64, size: usize, offset: usize, handle: u64, flags: u64);
        "cuMemUnmap" 10020 cuMemUnmap = vmm::unmap, (at: u64, size: usize);
        "cuMemSetAccess" 10020 cuMemSetAccess = vmm::set_access, (at: u64, size: usize, access: *const vmm::Access, count: usize);
        "cuMemGetAccess" 10020 cuMemGetAccess = vmm::get_access, (flags: *mut u64, location: *const Location, at: u64);
        "cuMemExportToShareableHandle" 10020 cuMemExportToShareableHandle = vmm::export, (shared: *mut i32, handle: u64, kind: u32, flags: u64);
        "cuMulticastCreate" 12010 cuMulticastCreate = multicast::create, (object: *mut u64, properties: *const multicast::Properties);
        "cuMulticastAddDevice" 12010 cuMulticastAddDevice = multicast::add_device, (object: u64, device: i32);
        "cuMulticastBindMem" 12010 cuMulticastBindMem = multicast::bind_memory, (object: u64, at: usize, memory: u64, offset: usize, size: usize, flags: u64);
        "cuMulticastBindAddr" 12010 cuMulticastBindAddr = multicast::bind_address, (object: u64, at: usize, address: u64, size: usize, flags: u64);
        "cuMulticastUnbind" 12010 cuMulticastUnbind = multicast::unbind, (object: u64, device: i32, at: usize, size: usize);
        "cuLogicalEndpointBindMem" 13030 cuLogicalEndpointBindMem = multicast::bind_to_endpoint, (id: u32, device: i32, at: u64, memory: u64, offset: u64, size: u64, flags: u64);
        "cuMemImportFromShareableHandle" 10020 cuMemImportFromShareableHandle = vmm::import, (handle: *mut u64, shared: usize, kind: u32);
        "cuIpcGetMemHandle" 4010 cuIpcGetMemHandle = ipc::export, (handle: *mut ipc::Handle, at: u64);
        "cuIpcOpenMemHandle" 4010 cuIpcOpenMemHandle = ipc::open, (at: *mut u64, handle: ipc::Handle, flags: u32);
        "cuIpcOpenMemHandle" 11000 cuIpcOpenMemHandle_v2 = ipc::open, (at: *mut u64, handle: ipc::Handle, flags: u32);
        "cuIpcCloseMemHandle" 4010 cuIpcCloseMemHandle = ipc::close, (at: u64);
        "cuMemGetHandleForAddressRange" 11070 cuMemGetHandleForAddressRange = vmm::range_handle, (handle: *mut i32, at: u64, size: usize, kind: u32, flags: u64);
        // Graphics
        "cuGraphicsGLRegisterBuffer" 3000 cuGraphicsGLRegisterBuffer = interop::register, (resource: *mut usize, buffer: u32, flags: u32);
        "cuImportExternalSemaphore" 10000 cuImportExternalSemaphore = interop::import, (semaphore: *mut usize, description: *const u8);
        // Pools
        "cuDeviceGetDefaultMemPool" 11020 cuDeviceGetDefaultMemPool = pool::device_default, (pool: *mut usize, device: i32);
        "cuDeviceGetMemPool" 11020 cuDeviceGetMemPool = pool::device_get, (pool: *mut usize, device: i32);
        "cuDeviceSetMemPool" 11020 cuDeviceSetMemPool = pool::device_set, (device: i32, pool: usize);
        "cuMemPoolCreate" 11020 cuMemPoolCreate = pool::create, (pool: *mut usize, properties: *const pool::Properties);
        "cuMemPoolDestroy" 11020 cuMemPoolDestroy = pool::destroy, (pool: usize);
        "cuMemPoolTrimTo" 11020 cuMemPoolTrimTo = pool::trim, (pool: usize, keep: usize);
        "cuMemPoolSetAttribute" 11020 cuMemPoolSetAttribute = pool::set_attribute, (pool: usize, attribute: u32, value: *const u64);
        "cuMemPoolGetAttribute" 11020 cuMemPoolGetAttribute = pool::get_attribute, (pool: usize, attribute: u32, value: *mut u64);
        "cuMemPoolSetAccess" 11020 cuMemPoolSetAccess = pool::set_access, (pool: usize, access: *const vmm::Access, count: usize);
        "cuMemPoolGetAccess" 11020 cuMemPoolGetAccess = pool::get_access, (flags: *mut u32, pool: usize, location: *const Location);
        // Arrays
        "cuArrayCreate" 3020 cuArrayCreate_v2 = array::create, (array: *mut usize, descriptor: *const array::Descriptor);
        "cuArray3DCreate" 3020 cuArray3DCreate_v2 = array::create_3d, (array: *mut usize, descriptor: *const array::Descriptor3D);
        "cuArrayDestroy" 2000 cuArrayDestroy = array::destroy, (array: usize);
        "cuArrayGetDescriptor" 3020 cuArrayGetDescriptor_v2 = array::descriptor, (descriptor: *mut array::Descriptor, array: usize);
        "cuArray3DGetDescriptor" 3020 cuArray3DGetDescriptor_v2 = array::descriptor_3d, (descriptor: *mut array::Descriptor3D, array: usize);
        // Streams and events
        "cuStreamCreate" 2000 cuStreamCreate = stream::create, (stream: *mut usize, flags: u32);
        "cuStreamCreateWithPriority" 5050 cuStreamCreateWithPriority = stream::create_with_priority, (stream: *mut usize, flags: u32, priority: i32);
        "cuStreamDestroy" 2000 cuStreamDestroy = stream::destroy, (stream: usize);
        "cuStreamDestroy" 4000 cuStreamDestroy_v2 = stream::destroy, (stream: usize);
        "cuEventCreate" 2000 cuEventCreate = event::create, (event: *mut usize, flags: u32);
        "cuEventDestroy" 2000 cuEventDestroy = event::destroy, (event: usize);
        "cuEventDestroy" 4000 cuEventDestroy_v2 = event::destroy, (event: usize);
        "cuEventQuery" 2000 cuEventQuery = event::query, (event: usize);
        "cuEventSynchronize" 2000 cuEventSynchronize = event::synchronise, (event: usize);
        "cuEventElapsedTime" 2000 cuEventElapsedTime = event::elapsed, (milliseconds: *mut f32, start: usize, end: usize);
        "cuEventElapsedTime" 12080 cuEventElapsedTime_v2 = event::elapsed, (milliseconds: *mut f32, start: usize, end: usize);
        "cuIpcGetEventHandle" 4010 cuIpcGetEventHandle = event::export, (handle: *mut event::IpcHandle, event: usize);
        "cuIpcOpenEventHandle" 4010 cuIpcOpenEventHandle = event::import, (event: *mut usize, handle: event::IpcHandle);
        "cuThreadExchangeStreamCaptureMode" 10010 cuThreadExchangeStreamCaptureMode = capture::exchange_mode, (mode: *mut u32);
        "cuLaunchCooperativeKernelMultiDevice" 9000 cuLaunchCooperativeKernelMultiDevice = launch::cooperative_on_devices, (list: *const launch::Params, count: u32, flags: u32);
        // Modules
        "cuModuleLoad" 2000 cuModuleLoad = module::load_file, (module: *mut usize, path: *const c_char);
        "cuModuleLoadData" 2000 cuModuleLoadData = module::load, (module: *mut usize, image: *const c_char);
        "cuModuleLoadDataEx" 2010 cuModuleLoadDataEx = module::load_ex, (module: *mut usize, image: *const c_char, count: u32, options: *mut u32, values: *mut usize);
        "cuModuleLoadFatBinary" 2000 cuModuleLoadFatBinary = module::load, (module: *mut usize, image: *const c_char);
        "cuModuleUnload" 2000 cuModuleUnload = module::unload, (module: usize);
        "cuModuleGetLoadingMode" 11070 cuModuleGetLoadingMode = module::loading_mode, (mode: *mut u32);
        "cuModuleGetFunction" 2000 cuModuleGetFunction = module::get_function, (function: *mut usize, module: usize, name: *const c_char);
        "cuModuleGetFunctionCount" 12040 cuModuleGetFunctionCount = module::function_count, (count: *mut u32, module: usize);
        "cuModuleGetGlobal" 3020 cuModuleGetGlobal_v2 = module::get_global, (at: *mut u64, len: *mut usize, module: usize, name: *const c_char);
        "cuLibraryLoadData" 12000 cuLibraryLoadData = module::library_load, (library: *mut usize, image: *const c_char, jit: *mut u32, jit_values: *mut usize, jit_count: u32, options: *mut u32, values: *mut usize, count: u32);
        "cuLibraryLoadFromFile" 12000 cuLibraryLoadFromFile = module::library_load_file, (library: *mut usize, path: *const c_char, jit: *mut u32, jit_values: *mut usize, jit_count: u32, options: *mut u32, values: *mut usize, count: u32);
        "cuLibraryUnload" 12000 cuLibraryUnload = module::library_unload, (library: usize);
        "cuLibraryGetKernel" 12000 cuLibraryGetKernel = module::library_kernel, (kernel: *mut usize, library: usize, name: *const c_char);
        "cuLibraryGetKernelCount" 12040 cuLibraryGetKernelCount = module::library_kernel_count, (count: *mut u32, library: usize);
        "cuLibraryEnumerateKernels" 12040 cuLibraryEnumerateKernels = module::library_kernels, (kernels: *mut usize, count: u32, library: usize);
        "cuLibraryGetModule" 12000 cuLibraryGetModule = module::library_module, (module: *mut usize, library: usize);
        "cuLibraryGetGlobal" 12000 cuLibraryGetGlobal = module::library_global, (at: *mut u64, len: *mut usize, library: usize, name: *const c_char);
        "cuLibraryGetManaged" 12000 cuLibraryGetManaged = module::library_global, (at: *mut u64, len: *mut usize, library: usize, name: *const c_char);
        "cuKernelGetFunction" 12000 cuKernelGetFunction = module::kernel_function, (function: *mut usize, kernel: usize);
        "cuKernelGetLibrary" 12050 cuKernelGetLibrary = module::home, (library: *mut usize, kernel: usize);
        "cuKernelGetName" 12030 cuKernelGetName = module::name, (name: *mut *const c_char, kernel: usize);
        "cuKernelGetParamInfo" 12040 cuKernelGetParamInfo = module::param_info, (kernel: usize, index: usize, offset: *mut usize, size: *mut usize);
        "cuKernelGetAttribute" 12000 cuKernelGetAttribute = module::kernel_get_attribute, (value: *mut i32, attribute: u32, kernel: usize, device: i32);
        "cuKernelSetAttribute" 12000 cuKernelSetAttribute = module::kernel_set_attribute, (attribute: u32, value: i32, kernel: usize, device: i32);
        "cuKernelSetCacheConfig" 12000 cuKernelSetCacheConfig = module::kernel_set_config, (kernel: usize, config: u32, device: i32);
        "cuFuncGetAttribute" 2020 cuFuncGetAttribute = module::get_attribute, (value: *mut i32, attribute: u32, function: usize);
        "cuFuncSetAttribute" 9000 cuFuncSetAttribute = module::set_attribute, (function: usize, attribute: u32, value: i32);
        "cuFuncSetCacheConfig" 3000 cuFuncSetCacheConfig = module::set_config, (function: usize, config: u32);
        "cuFuncSetSharedMemConfig" 4020 cuFuncSetSharedMemConfig = module::set_config, (function: usize, config: u32);
        "cuFuncGetModule" 11000 cuFuncGetModule = module::home, (module: *mut usize, function: usize);
        "cuFuncGetName" 12030 cuFuncGetName = module::name, (name: *mut *const c_char, function: usize);
        "cuFuncGetParamInfo" 12040 cuFuncGetParamInfo = module::param_info, (function: usize, index: usize, offset: *mut usize, size: *mut usize);
        "cuFuncIsLoaded" 12040 cuFuncIsLoaded = module::is_loaded, (state: *mut u32, function: usize);
        "cuFuncLoad" 12040 cuFuncLoad = module::load_function, (function: usize);
        "cuOccupancyMaxActiveBlocksPerMultiprocessor" 6050 cuOccupancyMaxActiveBlocksPerMultiprocessor = module::occupancy, (blocks: *mut i32, function: usize, size: i32, shared: usize);
        "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags" 7000 cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags = module::occupancy_with_flags, (blocks: *mut i32, function: usize, size: i32, shared: usize, flags: u32);
        // Graphs
        "cuGraphCreate" 10000 cuGraphCreate = graph::create, (graph: *mut usize, flags: u32);
        "cuGraphDestroy" 10000 cuGraphDestroy = graph::destroy, (graph: usize);
        "cuGraphClone" 10000 cuGraphClone = graph::clone, (clone: *mut usize, graph: usize);
        "cuGraphAddKernelNode" 10000 cuGraphAddKernelNode = graph::add_kernel, (to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const graph::KernelParams);
        "cuGraphAddKernelNode" 12000 cuGraphAddKernelNode_v2 = graph::add_kernel_v2, (to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const graph::KernelParams2);
        "cuGraphAddMemcpyNode" 10000 cuGraphAddMemcpyNode = graph::add_copy, (to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const copy::Copy3D, context: usize);
        "cuGraphAddNode" 12020 cuGraphAddNode = graph::add_any, (node: *mut usize, graph: usize, after: *const usize, count: usize, params: *const graph::NodeParams);
        "cuGraphAddMemsetNode" 10000 cuGraphAddMemsetNode = graph::add_fill, (to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const graph::FillParams, context: usize);
        "cuGraphAddHostNode" 10000 cuGraphAddHostNode = graph::add_host, (to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const graph::HostParams);
        "cuGraphAddEmptyNode" 10000 cuGraphAddEmptyNode = graph::add_empty, (to: *mut usize, graph: usize, after: *const usize, count: usize);
        "cuGraphAddEventRecordNode" 11010 cuGraphAddEventRecordNode = graph::add_record, (to: *mut usize, graph: usize, after: *const usize, count: usize, event: usize);
        "cuGraphAddEventWaitNode" 11010 cuGraphAddEventWaitNode = graph::add_wait, (to: *mut usize, graph: usize, after: *const usize, count: usize, event: usize);
        "cuGraphAddChildGraphNode" 10000 cuGraphAddChildGraphNode = graph::add_child, (to: *mut usize, graph: usize, after: *const usize, count: usize, child: usize);
        "cuGraphAddDependencies" 10000 cuGraphAddDependencies = graph::add_edges, (graph: usize, from: *const usize, to: *const usize, count: usize);
        "cuGraphAddDependencies" 12030 cuGraphAddDependencies_v2 = graph::add_edges_v2, (graph: usize, from: *const usize, to: *const usize, data: *const u8, count: usize);
        "cuGraphDestroyNode" 10000 cuGraphDestroyNode = graph::destroy_node, (node: usize);
        "cuGraphGetNodes" 10000 cuGraphGetNodes = graph::nodes, (graph: usize, to: *mut usize, count: *mut usize);
        "cuGraphGetRootNodes" 10000 cuGraphGetRootNodes = graph::roots, (graph: usize, to: *mut usize, count: *mut usize);
        "cuGraphGetEdges" 10000 cuGraphGetEdges = graph::edges, (graph: usize, from: *mut usize, to: *mut usize, count: *mut usize);
        "cuGraphGetEdges" 12030 cuGraphGetEdges_v2 = graph::edges_v2, (graph: usize, from: *mut usize, to: *mut usize, data: *mut u8, count: *mut usize);
        "cuGraphNodeGetDependencies" 10000 cuGraphNodeGetDependencies = graph::dependencies, (node: usize, to: *mut usize, count: *mut usize);
        "cuGraphNodeGetDependencies" 12030 cuGraphNodeGetDependencies_v2 = graph::dependencies_v2, (node: usize, to: *mut usize, data: *mut u8, count: *mut usize);
        "cuGraphNodeGetType" 10000 cuGraphNodeGetType = graph::node_type, (node: usize, kind: *mut u32);
        "cuGraphKernelNodeGetParams" 10000 cuGraphKernelNodeGetParams = graph::get_kernel, (node: usize, params: *mut graph::KernelParams);
        "cuGraphKernelNodeGetParams" 12000 cuGraphKernelNodeGetParams_v2 = graph::get_kernel_v2, (node: usize, params: *mut graph::KernelParams2);
        "cuGraphKernelNodeSetParams" 10000 cuGraphKernelNodeSetParams = graph::set_kernel, (node: usize, params: *const graph::KernelParams);
        "cuGraphKernelNodeSetParams" 12000 cuGraphKernelNodeSetParams_v2 = graph::set_kernel_v2, (node: usize, params: *const graph::KernelParams2);
        "cuGraphMemcpyNodeGetParams" 10000 cuGraphMemcpyNodeGetParams = graph::get_copy, (node: usize, params: *mut copy::Copy3D);
        "cuGraphMemcpyNodeSetParams" 10000 cuGraphMemcpyNodeSetParams = graph::set_copy, (node: usize, params: *const copy::Copy3D);
        "cuGraphMemsetNodeGetParams" 10000 cuGraphMemsetNodeGetParams = graph::get_fill, (node: usize, params: *mut graph::FillParams);
        "cuGraphMemsetNodeSetParams" 10000 cuGraphMemsetNodeSetParams = graph::set_fill, (node: usize, params: *const graph::FillParams);
        "cuGraphInstantiate" 10000 cuGraphInstantiate = graph::instantiate, (to: *mut usize, graph: usize, error_node: *mut usize, log: *mut u8, log_size: usize);
        "cuGraphInstantiate" 11000 cuGraphInstantiate_v2 = graph::instantiate, (to: *mut usize, graph: usize, error_node: *mut usize, log: *mut u8, log_size: usize);
        "cuGraphInstantiateWithFlags" 11040 cuGraphInstantiateWithFlags = graph::instantiate_with_flags, (to: *mut usize, graph: usize, flags: u64);
        "cuGraphExecDestroy" 10000 cuGraphExecDestroy = graph::exec_destroy, (exec: usize);
        "cuGraphExecGetFlags" 12000 cuGraphExecGetFlags = graph::exec_flags, (exec: usize, flags: *mut u64);
        "cuGraphExecKernelNodeSetParams" 10010 cuGraphExecKernelNodeSetParams = graph::exec_set_kernel, (exec: usize, node: usize, params: *const graph::KernelParams);
        "cuGraphExecKernelNodeSetParams" 12000 cuGraphExecKernelNodeSetParams_v2 = graph::exec_set_kernel_v2, (exec: usize, node: usize, params: *const graph::KernelParams2);
        "cuGraphExecMemcpyNodeSetParams" 10020 cuGraphExecMemcpyNodeSetParams = graph::exec_set_copy, (exec: usize, node: usize, params: *const copy::Copy3D, context: usize);
        "cuGraphExecMemsetNodeSetParams" 10020 cuGraphExecMemsetNodeSetParams = graph::exec_set_fill, (exec: usize, node: usize, params: *const graph::FillParams, context: usize);
        "cuGraphNodeSetEnabled" 11060 cuGraphNodeSetEnabled = graph::set_enabled, (exec: usize, node: usize, enabled: u32);
        "cuGraphNodeGetEnabled" 11060 cuGraphNodeGetEnabled = graph::get_enabled, (exec: usize, node: usize, enabled: *mut u32);
        "cuGraphExecUpdate" 10020 cuGraphExecUpdate = graph::exec_update, (exec: usize, graph: usize, node: *mut usize, result: *mut u32);
        "cuGraphExecUpdate" 12000 cuGraphExecUpdate_v2 = graph::exec_update_v2, (exec: usize, graph: usize, result: *mut graph::UpdateResult);
    }
    streams {
        "cuMemMapArrayAsync" 11010 cuMemMapArrayAsync, 11010 cuMemMapArrayAsync_ptsz = multicast::map_array, (list: *const multicast::ArrayMap, count: u32, stream: usize);
        "cuStreamQuery" 2000 cuStreamQuery, 7000 cuStreamQuery_ptsz = stream::query, (stream: usize);
        "cuStreamSynchronize" 2000 cuStreamSynchronize, 7000 cuStreamSynchronize_ptsz = stream::synchronise, (stream: usize);
        "cuStreamGetPriority" 5050 cuStreamGetPriority, 7000 cuStreamGetPriority_ptsz = stream::get_priority, (stream: usize, priority: *mut i32);
        "cuStreamGetFlags" 5050 cuStreamGetFlags, 7000 cuStreamGetFlags_ptsz = stream::get_flags, (stream: usize, flags: *mut u32);
        "cuStreamGetId" 12000 cuStreamGetId, 12000 cuStreamGetId_ptsz = stream::get_id, (stream: usize, id: *mut u64);
        "cuStreamGetDevice" 12080 cuStreamGetDevice, 12080 cuStreamGetDevice_ptsz = stream::get_device, (stream: usize, device: *mut i32);
        "cuStreamGetCtx" 9020 cuStreamGetCtx, 9020 cuStreamGetCtx_ptsz = stream::get_context, (stream: usize, context: *mut usize);
        "cuStreamGetCtx" 12050 cuStreamGetCtx_v2, 12050 cuStreamGetCtx_v2_ptsz = stream::get_context_v2, (stream: usize, context: *mut usize, green: *mut usize);
        "cuStreamAttachMemAsync" 6000 cuStreamAttachMemAsync, 7000 cuStreamAttachMemAsync_ptsz = stream::attach, (stream: usize, at: u64, len: usize, flags: u32);
        "cuStreamCopyAttributes" 11000 cuStreamCopyAttributes, 11000 cuStreamCopyAttributes_ptsz = stream::copy_attributes, (to: usize, from: usize);
        "cuStreamGetAttribute" 11000 cuStreamGetAttribute, 11000 cuStreamGetAttribute_ptsz = stream::get_attribute, (stream: usize, attribute: u32, value: *mut [u64; 8]);
        "cuStreamSetAttribute" 11000 cuStreamSetAttribute, 11000 cuStreamSetAttribute_ptsz = stream::set_attribute, (stream: usize, attribute: u32, value: *const u8);
        "cuStreamWaitEvent" 3020 cuStreamWaitEvent, 7000 cuStreamWaitEvent_ptsz = event::stream_wait, (stream: usize, event: usize, flags: u32);
        "cuEventRecord" 2000 cuEventRecord, 7000 cuEventRecord_ptsz = event::record, (event: usize, stream: usize);
        "cuEventRecordWithFlags" 11010 cuEventRecordWithFlags, 11010 cuEventRecordWithFlags_ptsz = event::record_with_flags, (event: usize, stream: usize, flags: u32);
        "cuStreamAddCallback" 5000 cuStreamAddCallback, 7000 cuStreamAddCallback_ptsz = launch::callback, (stream: usize, call: Option<Callback>, data: usize, flags: u32);
        "cuLaunchHostFunc" 10000 cuLaunchHostFunc, 10000 cuLaunchHostFunc_ptsz = launch::host, (stream: usize, call: Option<HostFn>, data: usize);
        // A symbol that no driver exports, so that no table lists it. It behaves like `cuLaunchKernel`.
        "cuUnheardOfLaunch" 12000 cuUnheardOfLaunch, 12000 cuUnheardOfLaunch_ptsz = launch::kernel, (function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *const *const u8, extra: *const usize);
        "cuLaunchKernel" 4000 cuLaunchKernel, 7000 cuLaunchKernel_ptsz = launch::kernel, (function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *const *const u8, extra: *const usize);
        "cuLaunchKernelEx" 11060 cuLaunchKernelEx, 11060 cuLaunchKernelEx_ptsz = launch::kernel_ex, (config: *const launch::Config, function: usize, params: *const *const u8, extra: *const usize);
        "cuLaunchCooperativeKernel" 9000 cuLaunchCooperativeKernel, 9000 cuLaunchCooperativeKernel_ptsz = launch::cooperative, (function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *const *const u8);
        "cuStreamWaitValue32" 8000 cuStreamWaitValue32, 8000 cuStreamWaitValue32_ptsz = value::wait32, (stream: usize, at: u64, value: u32, flags: u32);
        "cuStreamWaitValue32" 11070 cuStreamWaitValue32_v2, 11070 cuStreamWaitValue32_v2_ptsz = value::wait32, (stream: usize, at: u64, value: u32, flags: u32);
        "cuStreamWaitValue64" 9000 cuStreamWaitValue64, 9000 cuStreamWaitValue64_ptsz = value::wait64, (stream: usize, at: u64, value: u64, flags: u32);
        "cuStreamWaitValue64" 11070 cuStreamWaitValue64_v2, 11070 cuStreamWaitValue64_v2_ptsz = value::wait64, (stream: usize, at: u64, value: u64, flags: u32);
        "cuStreamWriteValue32" 8000 cuStreamWriteValue32, 8000 cuStreamWriteValue32_ptsz = value::write32, (stream: usize, at: u64, value: u32, flags: u32);
        "cuStreamWriteValue32" 11070 cuStreamWriteValue32_v2, 11070 cuStreamWriteValue32_v2_ptsz = value::write32, (stream: usize, at: u64, value: u32, flags: u32);
        "cuStreamWriteValue64" 9000 cuStreamWriteValue64, 9000 cuStreamWriteValue64_ptsz = value::write64, (stream: usize, at: u64, value: u64, flags: u32);
        "cuStreamWriteValue64" 11070 cuStreamWriteValue64_v2, 11070 cuStreamWriteValue64_v2_ptsz = value::write64, (stream: usize, at: u64, value: u64, flags: u32);
        "cuStreamBatchMemOp" 8000 cuStreamBatchMemOp, 8000 cuStreamBatchMemOp_ptsz = value::batch, (stream: usize, count: u32, operations: *const value::BatchOp, flags: u32);
        "cuStreamBatchMemOp" 11070 cuStreamBatchMemOp_v2, 11070 cuStreamBatchMemOp_v2_ptsz = value::batch, (stream: usize, count: u32, operations: *const value::BatchOp, flags: u32);
        "cuMemAllocAsync" 11020 cuMemAllocAsync, 11020 cuMemAllocAsync_ptsz = pool::alloc_async, (at: *mut u64, len: usize, stream: usize);
        "cuMemAllocFromPoolAsync" 11020 cuMemAllocFromPoolAsync, 11020 cuMemAllocFromPoolAsync_ptsz = pool::alloc_from, (at: *mut u64, len: usize, pool: usize, stream: usize);
        "cuMemFreeAsync" 11020 cuMemFreeAsync, 11020 cuMemFreeAsync_ptsz = pool::free_async, (at: u64, stream: usize);
        "cuMemPrefetchAsync" 8000 cuMemPrefetchAsync, 8000 cuMemPrefetchAsync_ptsz = managed::prefetch_async, (at: u64, len: usize, device: i32, stream: usize);
        "cuMemPrefetchAsync" 12020 cuMemPrefetchAsync_v2, 12020 cuMemPrefetchAsync_v2_ptsz = managed::prefetch_async_v2, (at: u64, len: usize, to: Location, flags: u32, stream: usize);
        "cuMemcpyAsync" 4000 cuMemcpyAsync, 7000 cuMemcpyAsync_ptsz = copy::any_async, (to: u64, from: u64, len: usize, stream: usize);
        "cuMemcpyHtoDAsync" 3020 cuMemcpyHtoDAsync_v2, 7000 cuMemcpyHtoDAsync_v2_ptsz = copy::to_device_async, (to: u64, from: u64, len: usize, stream: usize);
        "cuMemcpyDtoHAsync" 3020 cuMemcpyDtoHAsync_v2, 7000 cuMemcpyDtoHAsync_v2_ptsz = copy::to_host_async, (to: u64, from: u64, len: usize, stream: usize);
        "cuMemcpyDtoDAsync" 3020 cuMemcpyDtoDAsync_v2, 7000 cuMemcpyDtoDAsync_v2_ptsz = copy::on_device_async, (to: u64, from: u64, len: usize, stream: usize);
        "cuMemcpyPeerAsync" 4000 cuMemcpyPeerAsync, 7000 cuMemcpyPeerAsync_ptsz = copy::peer_async, (to: u64, to_context: usize, from: u64, from_context: usize, len: usize, stream: usize);
        "cuMemcpy2DAsync" 3020 cuMemcpy2DAsync_v2, 7000 cuMemcpy2DAsync_v2_ptsz = copy::rect_async, (copy: *const copy::Copy2D, stream: usize);
        "cuMemcpy3DAsync" 3020 cuMemcpy3DAsync_v2, 7000 cuMemcpy3DAsync_v2_ptsz = copy::cuboid_async, (copy: *const copy::Copy3D, stream: usize);
        "cuMemcpy3DPeerAsync" 4000 cuMemcpy3DPeerAsync, 7000 cuMemcpy3DPeerAsync_ptsz = copy::peer_cuboid_async, (copy: *const copy::Copy3D, stream: usize);
        "cuMemcpyHtoAAsync" 3020 cuMemcpyHtoAAsync_v2, 7000 cuMemcpyHtoAAsync_v2_ptsz = array::copy_in_async, (array: usize, offset: usize, from: u64, len: usize, stream: usize);
        "cuMemcpyAtoHAsync" 3020 cuMemcpyAtoHAsync_v2, 7000 cuMemcpyAtoHAsync_v2_ptsz = array::copy_out_async, (to: u64, array: usize, offset: usize, len: usize, stream: usize);
        "cuMemcpyBatchAsync" 12080 cuMemcpyBatchAsync, 12080 cuMemcpyBatchAsync_ptsz = copy::batch_12080, (to: *const u64, from: *const u64, sizes: *const usize, count: usize, attributes: *const u8, indices: *const usize, attribute_count: usize, failed: *mut usize, stream: usize);
        "cuMemcpyBatchAsync" 13000 cuMemcpyBatchAsync_v2, 13000 cuMemcpyBatchAsync_v2_ptsz = copy::batch_13000, (to: *const u64, from: *const u64, sizes: *const usize, count: usize, attributes: *const u8, indices: *const usize, attribute_count: usize, stream: usize);
        "cuMemcpy3DBatchAsync" 12080 cuMemcpy3DBatchAsync, 12080 cuMemcpy3DBatchAsync_ptsz = copy::cuboids_12080, (count: usize, list: *const copy::BatchCopy3D, failed: *mut usize, flags: u64, stream: usize);
        "cuMemcpy3DBatchAsync" 13000 cuMemcpy3DBatchAsync_v2, 13000 cuMemcpy3DBatchAsync_v2_ptsz = copy::cuboids_13000, (count: usize, list: *const copy::BatchCopy3D, flags: u64, stream: usize);
        "cuMemcpyWithAttributesAsync" 13000 cuMemcpyWithAttributesAsync, 13000 cuMemcpyWithAttributesAsync_ptsz = copy::with_attributes, (to: u64, from: u64, len: usize, attributes: *const u8, stream: usize);
        "cuMemcpy3DWithAttributesAsync" 13000 cuMemcpy3DWithAttributesAsync, 13000 cuMemcpy3DWithAttributesAsync_ptsz = copy::cuboid_with_attributes, (copy: *const copy::BatchCopy3D, flags: u64, stream: usize);
        "cuMemsetD8Async" 3020 cuMemsetD8Async, 7000 cuMemsetD8Async_ptsz = fill::d8_async, (at: u64, value: u8, count: usize, stream: usize);
        "cuMemsetD16Async" 3020 cuMemsetD16Async, 7000 cuMemsetD16Async_ptsz = fill::d16_async, (at: u64, value: u16, count: usize, stream: usize);
        "cuMemsetD32Async" 3020 cuMemsetD32Async, 7000 cuMemsetD32Async_ptsz = fill::d32_async, (at: u64, value: u32, count: usize, stream: usize);
        "cuMemsetD2D8Async" 3020 cuMemsetD2D8Async, 7000 cuMemsetD2D8Async_ptsz = fill::d2_d8_async, (at: u64, pitch: usize, value: u8, width: usize, height: usize, stream: usize);
        "cuMemsetD2D16Async" 3020 cuMemsetD2D16Async, 7000 cuMemsetD2D16Async_ptsz = fill::d2_d16_async, (at: u64, pitch: usize, value: u16, width: usize, height: usize, stream: usize);
        "cuMemsetD2D32Async" 3020 cuMemsetD2D32Async, 7000 cuMemsetD2D32Async_ptsz = fill::d2_d32_async, (at: u64, pitch: usize, value: u32, width: usize, height: usize, stream: usize);
        "cuStreamBeginCapture" 10000 cuStreamBeginCapture, 10000 cuStreamBeginCapture_ptsz = capture::begin_global, (stream: usize);
        "cuStreamBeginCapture" 10010 cuStreamBeginCapture_v2, 10010 cuStreamBeginCapture_v2_ptsz = capture::begin, (stream: usize, mode: u32);
        "cuStreamBeginCaptureToGraph" 12030 cuStreamBeginCaptureToGraph, 12030 cuStreamBeginCaptureToGraph_ptsz = capture::begin_to_graph, (stream: usize, graph: usize, nodes: *const usize, edges: *const u8, count: usize, mode: u32);
        "cuStreamEndCapture" 10000 cuStreamEndCapture, 10000 cuStreamEndCapture_ptsz = capture::end, (stream: usize, graph: *mut usize);
        "cuStreamIsCapturing" 10000 cuStreamIsCapturing, 10000 cuStreamIsCapturing_ptsz = capture::is_capturing, (stream: usize, status: *mut u32);
        "cuStreamGetCaptureInfo" 10010 cuStreamGetCaptureInfo, 10010 cuStreamGetCaptureInfo_ptsz = capture::info, (stream: usize, status: *mut u32, id: *mut u64);
        "cuStreamGetCaptureInfo" 11030 cuStreamGetCaptureInfo_v2, 11030 cuStreamGetCaptureInfo_v2_ptsz = capture::info_v2, (stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, count: *mut usize);
        "cuStreamGetCaptureInfo" 12030 cuStreamGetCaptureInfo_v3, 12030 cuStreamGetCaptureInfo_v3_ptsz = capture::info_v3, (stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, nodes: *mut *const usize, edges: *mut *const u8, count: *mut usize);
        "cuStreamUpdateCaptureDependencies" 11030 cuStreamUpdateCaptureDependencies, 11030 cuStreamUpdateCaptureDependencies_ptsz = capture::update, (stream: usize, nodes: *const usize, count: usize, flags: u32);
        "cuStreamUpdateCaptureDependencies" 12030 cuStreamUpdateCaptureDependencies_v2, 12030 cuStreamUpdateCaptureDependencies_v2_ptsz = capture::update_v2, (stream: usize, nodes: *const usize, edges: *const u8, count: usize, flags: u32);
        "cuGraphInstantiateWithParams" 12000 cuGraphInstantiateWithParams, 12000 cuGraphInstantiateWithParams_ptsz = graph::instantiate_with_params, (to: *mut usize, graph: usize, params: *mut graph::InstantiateParams);
        "cuGraphUpload" 11010 cuGraphUpload, 11010 cuGraphUpload_ptsz = graph::upload, (exec: usize, stream: usize);
        "cuGraphLaunch" 10000 cuGraphLaunch, 10000 cuGraphLaunch_ptsz = graph::launch, (exec: usize, stream: usize);
        "cuMemcpy" 4000 cuMemcpy, 7000 cuMemcpy_ptds = copy::any, (to: u64, from: u64, len: usize);
        "cuMemcpyHtoD" 3020 cuMemcpyHtoD_v2, 7000 cuMemcpyHtoD_v2_ptds = copy::to_device, (to: u64, from: u64, len: usize);
        "cuMemcpyDtoH" 3020 cuMemcpyDtoH_v2, 7000 cuMemcpyDtoH_v2_ptds = copy::to_host, (to: u64, from: u64, len: usize);
        "cuMemcpyDtoD" 3020 cuMemcpyDtoD_v2, 7000 cuMemcpyDtoD_v2_ptds = copy::on_device, (to: u64, from: u64, len: usize);
        "cuMemcpyPeer" 4000 cuMemcpyPeer, 7000 cuMemcpyPeer_ptds = copy::peer, (to: u64, to_context: usize, from: u64, from_context: usize, len: usize);
        "cuMemcpy2D" 3020 cuMemcpy2D_v2, 7000 cuMemcpy2D_v2_ptds = copy::rect, (copy: *const copy::Copy2D);
        "cuMemcpy2DUnaligned" 3020 cuMemcpy2DUnaligned_v2, 7000 cuMemcpy2DUnaligned_v2_ptds = copy::rect, (copy: *const copy::Copy2D);
        "cuMemcpy3D" 3020 cuMemcpy3D_v2, 7000 cuMemcpy3D_v2_ptds = copy::cuboid, (copy: *const copy::Copy3D);
        "cuMemcpy3DPeer" 4000 cuMemcpy3DPeer, 7000 cuMemcpy3DPeer_ptds = copy::peer_cuboid, (copy: *const copy::Copy3D);
        "cuMemcpyDtoA" 3020 cuMemcpyDtoA_v2, 7000 cuMemcpyDtoA_v2_ptds = array::copy_in, (array: usize, offset: usize, from: u64, len: usize);
        "cuMemcpyHtoA" 3020 cuMemcpyHtoA_v2, 7000 cuMemcpyHtoA_v2_ptds = array::copy_in, (array: usize, offset: usize, from: u64, len: usize);
        "cuMemcpyAtoD" 3020 cuMemcpyAtoD_v2, 7000 cuMemcpyAtoD_v2_ptds = array::copy_out, (to: u64, array: usize, offset: usize, len: usize);
        "cuMemcpyAtoH" 3020 cuMemcpyAtoH_v2, 7000 cuMemcpyAtoH_v2_ptds = array::copy_out, (to: u64, array: usize, offset: usize, len: usize);
        "cuMemsetD8" 3020 cuMemsetD8_v2, 7000 cuMemsetD8_v2_ptds = fill::d8, (at: u64, value: u8, count: usize);
        "cuMemsetD16" 3020 cuMemsetD16_v2, 7000 cuMemsetD16_v2_ptds = fill::d16, (at: u64, value: u16, count: usize);
        "cuMemsetD32" 3020 cuMemsetD32_v2, 7000 cuMemsetD32_v2_ptds = fill::d32, (at: u64, value: u32, count: usize);
        "cuMemsetD2D8" 3020 cuMemsetD2D8_v2, 7000 cuMemsetD2D8_v2_ptds = fill::d2_d8, (at: u64, pitch: usize, value: u8, width: usize, height: usize);
        "cuMemsetD2D16" 3020 cuMemsetD2D16_v2, 7000 cuMemsetD2D16_v2_ptds = fill::d2_d16, (at: u64, pitch: usize, value: u16, width: usize, height: usize);
        "cuMemsetD2D32" 3020 cuMemsetD2D32_v2, 7000 cuMemsetD2D32_v2_ptds = fill::d2_d32, (at: u64, pitch: usize, value: u32, width: usize, height: usize);
    }
}
