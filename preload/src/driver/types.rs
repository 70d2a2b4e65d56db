//! Types and constants of the CUDA driver API that this library uses, with NVIDIA's names.
#![allow(non_camel_case_types, non_upper_case_globals)]

use core::ffi::c_void;

pub type CUresult = i32;
pub type CUdevice = i32;
pub type CUdeviceptr = u64;
pub type CUcontext = *mut c_void;
pub type CUstream = *mut c_void;
pub type CUevent = *mut c_void;
pub type CUfunction = *mut c_void;
pub type CUmodule = *mut c_void;
pub type CUgraph = *mut c_void;
pub type CUgraphExec = *mut c_void;
pub type CUarray = *mut c_void;
pub type CUmemoryPool = *mut c_void;
/// `CUmemGenericAllocationHandle`.
pub type Handle = u64;
/// `size_t`.
pub type Size = usize;

pub const SUCCESS: CUresult = 0;
pub const ERROR_INVALID_VALUE: CUresult = 1;
pub const ERROR_OUT_OF_MEMORY: CUresult = 2;
pub const ERROR_DEINITIALIZED: CUresult = 4;
pub const ERROR_DEVICE_UNAVAILABLE: CUresult = 46;
pub const ERROR_INVALID_DEVICE: CUresult = 101;
pub const ERROR_INVALID_CONTEXT: CUresult = 201;
pub const ERROR_ECC_UNCORRECTABLE: CUresult = 214;
pub const ERROR_MAP_FAILED: CUresult = 205;
pub const ERROR_OPERATING_SYSTEM: CUresult = 304;
pub const ERROR_INVALID_HANDLE: CUresult = 400;
pub const ERROR_TIMEOUT: CUresult = 909;
pub const ERROR_STREAM_DETACHED: CUresult = 917;
pub const ERROR_NOT_FOUND: CUresult = 500;
pub const ERROR_NOT_READY: CUresult = 600;

pub const ERROR_NOT_SUPPORTED: CUresult = 801;
pub const ERROR_UNKNOWN: CUresult = 999;
pub const ERROR_NO_DEVICE: CUresult = 100;
pub const ERROR_SYSTEM_NOT_READY: CUresult = 802;

pub const CTX_DEFAULT_STREAM: CUstream = core::ptr::null_mut();
/// `CU_STREAM_LEGACY`.
pub const STREAM_LEGACY: CUstream = core::ptr::without_provenance_mut(1);
/// `CU_STREAM_PER_THREAD`.
pub const STREAM_PER_THREAD: CUstream = core::ptr::without_provenance_mut(2);
pub const STREAM_NON_BLOCKING: u32 = 1;
pub const EVENT_DISABLE_TIMING: u32 = 2;
pub const STREAM_CAPTURE_MODE_RELAXED: i32 = 2;
pub const STREAM_CAPTURE_STATUS_NONE: i32 = 0;

pub const MEM_ATTACH_GLOBAL: u32 = 1;
pub const MEM_LOCATION_TYPE_DEVICE: i32 = 1;
pub const MEM_LOCATION_TYPE_HOST: i32 = 2;
pub const MEM_ALLOCATION_TYPE_PINNED: i32 = 1;
pub const MEM_ACCESS_FLAGS_PROT_READWRITE: i32 = 3;
/// `CU_DEVICE_CPU`: the host, as the destination of a prefetch.
pub const DEVICE_CPU: CUdevice = -1;

pub const DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: i32 = 102;
pub const DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: i32 = 89;
pub const DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: i32 = 103;
pub const DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: i32 = 110;
pub const DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: i32 = 116;
pub const DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES: i32 = 119;
pub const DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: i32 = 128;
pub const DEVICE_ATTRIBUTE_MEM_DECOMPRESS_ALGORITHM_MASK: i32 = 136;
/// `CU_MEM_POOL_CREATE_USAGE_HW_DECOMPRESS`.
pub const POOL_USAGE_HW_DECOMPRESS: u16 = 2;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
pub const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: i32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
pub const MEM_HANDLE_TYPE_FABRIC: i32 = 8;

/// `CUmemLocation`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Location {
    pub kind: i32,
    pub id: i32,
}

/// `CUmemAllocationProp`.
#[derive(Debug, Default, Clone, Copy)]
#[repr(C)]
pub struct AllocationProp {
    pub kind: i32,
    pub requested_handle_types: i32,
    pub location: Location,
    /// A pointer that is NULL on Linux.
    pub win32_handle_meta_data: usize,
    pub compression_type: u8,
    pub gpu_direct_rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct AccessDesc {
    pub location: Location,
    pub flags: i32,
}

/// The `CUpointer_attribute`s that this library answers for its own allocations.
pub mod pointer_attribute {
    pub const CONTEXT: i32 = 1;
    pub const MEMORY_TYPE: i32 = 2;
    pub const DEVICE_POINTER: i32 = 3;
    pub const HOST_POINTER: i32 = 4;
    pub const P2P_TOKENS: i32 = 5;
    pub const SYNC_MEMOPS: i32 = 6;
    pub const BUFFER_ID: i32 = 7;
    pub const IS_MANAGED: i32 = 8;
    pub const DEVICE_ORDINAL: i32 = 9;
    pub const IS_LEGACY_CUDA_IPC_CAPABLE: i32 = 10;
    pub const RANGE_START_ADDR: i32 = 11;
    pub const RANGE_SIZE: i32 = 12;
    pub const MAPPED: i32 = 13;
    pub const ALLOWED_HANDLE_TYPES: i32 = 14;
    pub const IS_GPU_DIRECT_RDMA_CAPABLE: i32 = 15;
    pub const ACCESS_FLAGS: i32 = 16;
    pub const MEMPOOL_HANDLE: i32 = 17;
    pub const MAPPING_SIZE: i32 = 18;
    pub const MAPPING_BASE_ADDR: i32 = 19;
    pub const MEMORY_BLOCK_ID: i32 = 20;
    pub const IS_HW_DECOMPRESS_CAPABLE: i32 = 21;
}
/// `CU_MEMORYTYPE_DEVICE`.
pub const MEMORYTYPE_DEVICE: u32 = 2;
