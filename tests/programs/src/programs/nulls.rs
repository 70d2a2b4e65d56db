//! Reports the results of calls with NULL or invalid arguments. Programs are known to pass each of
//! these arguments.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Stream, api},
    report::Report,
};
use std::{
    ffi::{CStr, c_void},
    mem, ptr,
};

type P = *mut c_void;

/// Calls a function of the driver with words as arguments.
macro_rules! call {
    ($symbol:ident($($arg:expr),*)) => {{
        // SAFETY: the symbol is a function of the driver, and all its parameters are words in
        // registers.
        let function = unsafe {
            mem::transmute::<P, unsafe extern "C" fn($(call!(@word $arg)),*) -> u32>(api::dlsym(stringify!($symbol)))
        };
        // SAFETY: the driver checks pointers that must not be NULL.
        (stringify!($symbol), unsafe { function($($arg as usize),*) })
    }};
    (@word $arg:expr) => { usize };
}

pub fn run(_: &Args, report: &mut Report) -> Outcome {
    let gpu = Gpu::open(0)?;
    let (buffer, stream) = (Buffer::new(Kind::Alloc, 4096)?, Stream::new()?);
    gpu.synchronise()?;
    let null = ptr::null_mut::<u64>();
    let nonsense = 0x1234_5678_usize;
    let mut word = 0_u64;
    let to = ptr::from_mut(&mut word);
    let name = |name: &'static CStr| name.as_ptr();
    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE, and an attribute that does not exist.
    let which = [2_i32, 4711];
    let mut values = [to.cast::<c_void>(), to.cast()];
    let access = api::Access { location: api::Location { kind: 1, id: 0 }, flags: 3 };

    let answers = [
        call!(cuMemGetInfo_v2(null, to)),
        call!(cuMemGetInfo_v2(to, null)),
        call!(cuMemGetInfo_v2(null, null)),
        call!(cuMemAlloc_v2(null, 4096)),
        call!(cuMemAlloc_v2(to, 0)),
        call!(cuMemAllocPitch_v2(to, null, 64, 64, 4)),
        call!(cuMemAllocPitch_v2(null, to, 64, 64, 4)),
        call!(cuMemFree_v2(0)),
        call!(cuMemFree_v2(nonsense)),
        call!(cuMemFree_v2(buffer.at + 4)),
        call!(cuMemGetAddressRange_v2(null, to, buffer.at)),
        call!(cuMemGetAddressRange_v2(to, null, buffer.at)),
        call!(cuMemGetAddressRange_v2(null, null, buffer.at)),
        call!(cuMemGetAddressRange_v2(to, to, nonsense)),
        call!(cuPointerGetAttribute(null, 2, buffer.at)),
        call!(cuPointerGetAttribute(to, 2, buffer.at)),
        call!(cuPointerGetAttribute(to, 4, buffer.at)),
        call!(cuPointerGetAttribute(to, 2, nonsense)),
        call!(cuPointerGetAttributes(1, which.as_ptr(), values.as_mut_ptr(), buffer.at)),
        call!(cuPointerGetAttributes(1, null, values.as_mut_ptr(), buffer.at)),
        call!(cuPointerGetAttributes(1, which.as_ptr(), null, buffer.at)),
        call!(cuPointerGetAttributes(2, which.as_ptr(), values.as_mut_ptr(), nonsense)),
        // The program has not reserved or mapped this range itself.
        call!(cuMemUnmap(buffer.at, 2 << 20)),
        call!(cuMemUnmap(buffer.at & !0x1f_ffff, 2 << 20)),
        call!(cuMemSetAccess(buffer.at, 2 << 20, ptr::from_ref(&access), 1)),
        call!(cuMemAddressFree(buffer.at, 2 << 20)),
        call!(cuMemAddressFree(buffer.at & !0x1f_ffff, 2 << 20)),
        call!(cuMemsetD8_v2(buffer.at, 0, 4096)),
        call!(cuMemcpyDtoH_v2(null, buffer.at, 0)),
        call!(cuMemsetD8_v2(nonsense, 0, 0)),
        call!(cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)),
        call!(cuGraphLaunch(0, stream.0)),
        call!(cuStreamBeginCapture_v2(stream.0, 99)),
        call!(cuStreamEndCapture(stream.0, null)),
        call!(cuDeviceTotalMem_v2(null, 0)),
        call!(cuDeviceTotalMem_v2(to, 99)),
        call!(cuDevicePrimaryCtxRetain(null, 0)),
        call!(cuDevicePrimaryCtxRetain(to, 99)),
        call!(cuDevicePrimaryCtxRetain(to, -1_isize)),
        call!(cuCtxCreate_v2(null, 0, 0)),
        call!(cuCtxCreate_v2(to, 0, 99)),
        call!(cuCtxDestroy_v2(0)),
        call!(cuGetProcAddress_v2(null, to, 12000, 0, null)),
        call!(cuGetProcAddress_v2(name(c"cuMemAlloc"), null, 12000, 0, null)),
        call!(cuGetProcAddress_v2(name(c"cuMemAlloc"), to, 12000, 0, null)),
        call!(cuGetProcAddress_v2(name(c"cuMemAlloc"), to, 1, 0, null)),
        call!(cuGetProcAddress_v2(name(c""), to, 12000, 0, null)),
        call!(cuGetProcAddress_v2(name(c"cuNoSuchCall"), to, 12000, 0, null)),
        call!(cuGetProcAddress(name(c"cuNoSuchCall"), to, 12000, 0)),
        call!(cuMemGetInfo_v2(to, to)),
    ];
    for (i, (call, code)) in answers.iter().enumerate() {
        report.integer(&format!("{i:02} {call}"), (*code).into());
    }
    Ok(())
}
