//! Calls that few programs make and that older drivers lack. Each function is looked up at its
//! first call.

use super::api::{Access, Location, Properties, dlsym};
use std::{ffi::c_void, mem};

/// `CUipcEventHandle`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct EventHandle(pub [u64; 8]);

/// `CUipcMemHandle`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct MemHandle(pub [u8; 64]);

impl Default for MemHandle {
    fn default() -> Self {
        Self([0; 64])
    }
}

/// `CUstreamBatchMemOpParams`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BatchOp {
    pub operation: u32,
    pub at: u64,
    pub value: u64,
    pub flags: u32,
    pub alias: u64,
    pub padding: u64,
}

/// `CU_STREAM_MEM_OP_WRITE_VALUE_32`
pub const WRITE: u32 = 2;

/// `CUmulticastObjectProp`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct MulticastProperties {
    pub devices: u32,
    pub size: usize,
    pub handle_types: u64,
    pub flags: u64,
}

/// `CUarrayMapInfo`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ArrayMap {
    pub place: [u64; 7],
    pub operation: u32,
    pub handle_kind: u32,
    pub memory: u64,
    pub offset: u64,
    pub devices: u32,
    pub flags: u32,
    pub reserved: [u32; 2],
}

/// `CUdevResource`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Resource(pub [u64; 18]);

/// `CUmemPoolProps`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PoolProperties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub security: usize,
    pub max_size: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

/// One side of [`Copy2D`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Side2D {
    pub x: usize,
    pub y: usize,
    pub kind: u32,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Copy2D {
    pub from: Side2D,
    pub to: Side2D,
    pub width: usize,
    pub height: usize,
}

/// One side of [`Copy3D`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Side3D {
    pub at: [usize; 4],
    pub kind: u32,
    pub host: usize,
    pub device: u64,
    pub array: usize,
    pub context: usize,
    pub pitch: usize,
    pub height: usize,
}

/// `CUDA_MEMCPY3D`, `CUDA_MEMCPY3D_PEER`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Copy3D {
    pub from: Side3D,
    pub to: Side3D,
    pub extent: [usize; 3],
}

/// `CUmemcpy3DOperand` for an address.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Operand {
    pub kind: u32,
    pub at: u64,
    pub row: usize,
    pub layer: usize,
    pub hint: Location,
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct BatchCopy3D {
    pub from: Operand,
    pub to: Operand,
    pub extent: [usize; 3],
    pub order: u32,
    pub flags: u32,
}

/// `CUmemcpyAttributes`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct CopyAttributes {
    pub order: u32,
    pub hints: [Location; 2],
    pub flags: u32,
}

/// `CUgraphNodeParams` for a copy.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CopyNode {
    pub kind: u32,
    pub reserved: [u32; 3],
    pub flags: [u32; 2],
    pub context: usize,
    pub copy: Copy3D,
    pub rest: [u64; 5],
}

impl CopyNode {
    pub fn new(copy: Copy3D, context: usize) -> CopyNode {
        CopyNode { kind: 1, reserved: [0; 3], flags: [0; 2], context, copy, rest: [0; 5] }
    }
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ArrayDescriptor {
    pub width: usize,
    pub height: usize,
    pub format: u32,
    pub channels: u32,
}

/// `CUDA_LAUNCH_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LaunchParams {
    pub function: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: usize,
    pub params: *mut *mut c_void,
}

/// `CUstreamCallback`
pub type Callback = unsafe extern "C" fn(usize, u32, *mut c_void);

/// `CUcheckpointLockArgs`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct LockArgs {
    pub timeout_ms: u32,
    pub reserved: [u32; 15],
}

/// `CUDA_MEMSET_NODE_PARAMS`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FillNode {
    pub at: u64,
    pub pitch: usize,
    pub value: u32,
    pub element: u32,
    pub width: usize,
    pub height: usize,
}

/// `CUcheckpointRestoreArgs`, with pairs of the old and the new UUID of each GPU.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RestoreArgs {
    pub pairs: *const [[u8; 16]; 2],
    pub count: u32,
    pub reserved: [u32; 13],
}

macro_rules! late {
    ($($symbol:ident($($arg:ident: $type:ty),*);)*) => {$(
        /// The driver's function with the same name.
        ///
        /// # Safety
        /// The arguments must meet the requirements of the CUDA headers.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $symbol($($arg: $type),*) -> u32 {
            // SAFETY: the type is the declaration of the CUDA headers. The arguments are the
            // caller's contract.
            unsafe {
                mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(dlsym(stringify!($symbol)))($($arg),*)
            }
        }
    )*};
}

late! {
    cuDeviceGetAttribute(value: *mut i32, attribute: u32, device: i32);
    cuStreamWaitValue32_v2(stream: usize, at: u64, value: u32, flags: u32);
    cuStreamWriteValue32_v2(stream: usize, at: u64, value: u32, flags: u32);
    cuStreamBatchMemOp_v2(stream: usize, count: u32, operations: *const BatchOp, flags: u32);
    cuStreamAddCallback(stream: usize, call: Callback, data: *mut c_void, flags: u32);
    cuMemcpyHtoD_v2(to: u64, from: *const u8, len: usize);
    cuMemHostRegister_v2(at: *mut u8, len: usize, flags: u32);
    cuMemHostUnregister(at: *mut u8);
    cuIpcGetEventHandle(handle: *mut EventHandle, event: usize);
    cuIpcOpenEventHandle(event: *mut usize, handle: EventHandle);
    cuIpcGetMemHandle(handle: *mut MemHandle, at: u64);
    cuIpcOpenMemHandle_v2(at: *mut u64, handle: MemHandle, flags: u32);
    cuIpcCloseMemHandle(at: u64);
    cuCtxEnablePeerAccess(peer: usize, flags: u32);
    cuMemcpy(to: u64, from: u64, len: usize);
    cuMemcpy_ptds(to: u64, from: u64, len: usize);
    cuMemcpyAsync(to: u64, from: u64, len: usize, stream: usize);
    cuMemcpyAsync_ptsz(to: u64, from: u64, len: usize, stream: usize);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: usize);
    cuMemcpy2D_v2(copy: *const Copy2D);
    cuMemcpy2DAsync_v2(copy: *const Copy2D, stream: usize);
    cuMemcpy3D_v2(copy: *const Copy3D);
    cuMemcpy3DAsync_v2(copy: *const Copy3D, stream: usize);
    cuMemcpyDtoA_v2(array: usize, offset: usize, from: u64, len: usize);
    cuMemcpyAtoD_v2(to: u64, array: usize, offset: usize, len: usize);
    cuArrayCreate_v2(array: *mut usize, descriptor: *const ArrayDescriptor);
    cuArrayDestroy(array: usize);
    cuMemcpyBatchAsync_v2(to: *const u64, from: *const u64, sizes: *const usize, count: usize, attributes: *const CopyAttributes, indexes: *const usize, n: usize, stream: usize);
    cuMemcpy3DBatchAsync_v2(count: usize, list: *const BatchCopy3D, flags: u64, stream: usize);
    cuMemcpyWithAttributesAsync(to: u64, from: u64, len: usize, attributes: *const CopyAttributes, stream: usize);
    cuMemcpy3DWithAttributesAsync(copy: *const BatchCopy3D, flags: u64, stream: usize);
    cuGraphCreate(graph: *mut usize, flags: u32);
    cuGraphAddMemsetNode(node: *mut usize, graph: usize, after: *const usize, count: usize, params: *const FillNode, context: usize);
    cuGraphAddMemcpyNode(node: *mut usize, graph: usize, after: *const usize, count: usize, copy: *const Copy3D, context: usize);
    cuGraphAddNode(node: *mut usize, graph: usize, after: *const usize, count: usize, params: *const CopyNode);
    cuGraphMemcpyNodeSetParams(node: usize, copy: *const Copy3D);
    cuGraphExecMemcpyNodeSetParams(exec: usize, node: usize, copy: *const Copy3D, context: usize);
    cuMemsetD32Async(at: u64, value: u32, count: usize, stream: usize);
    cuStreamWriteValue32(stream: usize, at: u64, value: u32, flags: u32);
    cuLibraryLoadData(library: *mut usize, image: *const u8, jit: *const u32, jit_values: *const usize, jit_count: u32, options: *const u32, values: *const usize, count: u32);
    cuFuncLoad(function: usize);
    cuLibraryGetKernel(kernel: *mut usize, library: usize, name: *const u8);
    cuCheckpointProcessLock(pid: i32, args: *const LockArgs);
    cuCheckpointProcessCheckpoint(pid: i32, args: *const u64);
    cuCheckpointProcessRestore(pid: i32, args: *const RestoreArgs);
    cuCheckpointProcessUnlock(pid: i32, args: *const u64);
    cuLaunchCooperativeKernelMultiDevice(list: *const LaunchParams, count: u32, flags: u32);
    cuMemcpyPeer(to: u64, to_context: usize, from: u64, from_context: usize, len: usize);
    cuMemcpyPeerAsync(to: u64, to_context: usize, from: u64, from_context: usize, len: usize, stream: usize);
    cuGraphicsGLRegisterBuffer(resource: *mut usize, buffer: u32, flags: u32);
    cuImportExternalSemaphore(semaphore: *mut usize, description: *const u8);
    cuMulticastCreate(object: *mut u64, properties: *const MulticastProperties);
    cuMulticastAddDevice(object: u64, device: i32);
    cuMulticastBindMem(object: u64, at: usize, memory: u64, offset: usize, size: usize, flags: u64);
    cuMulticastBindAddr(object: u64, at: usize, address: u64, size: usize, flags: u64);
    cuMulticastUnbind(object: u64, device: i32, at: usize, size: usize);
    cuLogicalEndpointBindMem(id: u32, device: i32, at: u64, memory: u64, offset: u64, size: u64, flags: u64);
    cuMemMapArrayAsync(list: *const ArrayMap, count: u32, stream: usize);
    cuMemRetainAllocationHandle(handle: *mut u64, at: u64);
    cuMemGetAccess(flags: *mut u64, location: *const Location, at: u64);
    cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64);
    cuMemExportToShareableHandle(shareable: *mut i32, handle: u64, kind: u32, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, shareable: usize, kind: u32);
    cuMemGetHandleForAddressRange(handle: *mut i32, at: u64, size: usize, kind: u32, flags: u64);
    cuPointerSetAttribute(value: *const u32, which: u32, at: u64);
    cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, at: u64);
    cuPointerGetAttribute(data: *mut u64, which: u32, at: u64);
    cuPointerGetAttributes(count: u32, which: *const u32, data: *const *mut u64, at: u64);
    cuDeviceGetDefaultMemPool(pool: *mut usize, device: i32);
    cuDeviceGetMemPool(pool: *mut usize, device: i32);
    cuDeviceSetMemPool(device: i32, pool: usize);
    cuMemPoolCreate(pool: *mut usize, properties: *const PoolProperties);
    cuMemPoolSetAccess(pool: usize, list: *const Access, count: usize);
    cuMemPoolDestroy(pool: usize);
    cuMemPoolTrimTo(pool: usize, keep: usize);
    cuMemPoolSetAttribute(pool: usize, which: u32, value: *const u64);
    cuMemPoolGetAttribute(pool: usize, which: u32, value: *mut u64);
    cuMemAllocFromPoolAsync(at: *mut u64, len: usize, pool: usize, stream: usize);
    cuMemAllocAsync_ptsz(at: *mut u64, len: usize, stream: usize);
    cuDevicePrimaryCtxReset_v2(device: i32);
    cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32);
    cuCtxDestroy_v2(context: usize);
    cuDeviceGetDevResource(device: i32, resource: *mut Resource, kind: u32);
    cuDevSmResourceSplitByCount(groups: *mut Resource, count: *mut u32, from: *const Resource, rest: *mut Resource, flags: u32, least: u32);
    cuDevResourceGenerateDesc(description: *mut usize, resources: *const Resource, count: u32);
    cuGreenCtxCreate(green: *mut usize, description: usize, device: i32, flags: u32);
    cuGreenCtxDestroy(green: usize);
    cuCtxFromGreenCtx(context: *mut usize, green: usize);
    cuGreenCtxStreamCreate(stream: *mut usize, green: usize, flags: u32, priority: i32);
}

/// Makes a call, and names it in the error.
macro_rules! late_cu {
    ($call:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the arguments meet the requirements of the CUDA headers; pointers are to live
        // values of the right type.
        match unsafe { $crate::cuda::late::$call($($arg),*) } {
            0 => Ok(()),
            code => Err($crate::cuda::Error { call: stringify!($call), code }),
        }
    }};
}
pub(crate) use late_cu;
