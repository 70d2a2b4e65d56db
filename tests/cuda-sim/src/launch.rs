//! Launches of kernels and of host functions.

use crate::{
    context,
    error::{Done, Error},
    kernels::{Launch, Shape},
    module,
    stream::{self, Flavour},
    work::{Callback, HostFn, Work},
};

/// `CUlaunchConfig`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    attributes: usize,
    attribute_count: u32,
}

const END: usize = 0;
const BUFFER: usize = 1;
const BUFFER_SIZE: usize = 2;

/// Prepares a launch. Copies its arguments either from `params` or from the buffer in `extra`.
pub fn prepare(shape: Shape, params: *const *const u8, extra: *const usize) -> Result<Launch, Error> {
    let function = module::function(shape.function)?;
    let threads = shape.block.iter().try_fold(1_u32, |n, d| n.checked_mul(*d));
    if shape.grid.contains(&0)
        || shape.block.contains(&0)
        || threads.is_none_or(|n| n > 1024)
        || shape.shared > 227 << 10
    {
        return Err(Error::INVALID_VALUE);
    }
    if extra.is_null() {
        // SAFETY: by the API's contract, `params` contains a pointer to a value for each parameter.
        return unsafe { Launch::from_params(function.kernel, shape, params) };
    }
    let (mut buffer, mut size) = (0, 0);
    let mut at = extra;
    // SAFETY: by the API's contract, `extra` is a list of pairs that ends with END, and the buffer has the
    // size that the list points to.
    unsafe {
        while *at != END {
            match *at {
                BUFFER => buffer = *at.add(1),
                BUFFER_SIZE => size = *(*at.add(1) as *const usize),
                _ => return Err(Error::INVALID_VALUE),
            }
            at = at.add(2);
        }
        if buffer == 0 {
            return Err(Error::INVALID_VALUE);
        }
        Launch::from_buffer(function.kernel, shape, std::slice::from_raw_parts(buffer as *const u8, size))
    }
}

/// `cuLaunchKernel`
#[allow(clippy::too_many_arguments)]
pub fn kernel(
    flavour: Flavour,
    function: usize,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: usize,
    params: *const *const u8,
    extra: *const usize,
) -> Done {
    context::healthy()?.grow()?;
    let stream = stream::of(stream, flavour)?;
    let shape = Shape { function, grid: [gx, gy, gz], block: [bx, by, bz], shared };
    stream.submit(Work::Kernel(prepare(shape, params, extra)?)).map(drop)
}

/// `cuLaunchCooperativeKernel`
#[allow(clippy::too_many_arguments)]
pub fn cooperative(
    flavour: Flavour,
    function: usize,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: usize,
    params: *const *const u8,
) -> Done {
    kernel(flavour, function, gx, gy, gz, bx, by, bz, shared, stream, params, std::ptr::null())
}

/// `CUDA_LAUNCH_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Params {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: usize,
    params: *const *const u8,
}

/// `cuLaunchCooperativeKernelMultiDevice`: launches each kernel in its stream. Unlike on GPUs, the
/// kernels do not wait for each other.
pub fn cooperative_on_devices(list: *const Params, count: u32, _flags: u32) -> Done {
    context::healthy()?;
    if list.is_null() || count == 0 {
        return Err(Error::INVALID_VALUE);
    }
    let mut launches = Vec::new();
    for i in 0..count as usize {
        // SAFETY: by the API's contract, the list has `count` entries.
        let Params { function, grid, block, shared, stream, params } = unsafe { *list.add(i) };
        let stream = stream::of(stream, Flavour::Legacy)?;
        let shape = Shape { function, grid, block, shared };
        launches.push((stream, Work::Kernel(prepare(shape, params, std::ptr::null())?)));
    }
    launches.into_iter().try_for_each(|(stream, work)| stream.submit(work).map(drop))
}

/// `cuLaunchKernelEx`: ignores the attributes.
pub fn kernel_ex(
    flavour: Flavour,
    config: *const Config,
    function: usize,
    params: *const *const u8,
    extra: *const usize,
) -> Done {
    let Config { grid, block, shared, stream, .. } = crate::arg(config)?;
    kernel(flavour, function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared, stream, params, extra)
}

/// `cuLaunchHostFunc`
pub fn host(flavour: Flavour, stream: usize, call: Option<HostFn>, data: usize) -> Done {
    let call = call.ok_or(Error::INVALID_VALUE)?;
    stream::of(stream, flavour)?.submit(Work::Host { call, data }).map(drop)
}

/// `cuStreamAddCallback`: fails in a capturing stream.
pub fn callback(flavour: Flavour, stream: usize, call: Option<Callback>, data: usize, flags: u32) -> Done {
    let call = call.filter(|_| flags == 0).ok_or(Error::INVALID_VALUE)?;
    let queue = stream::of(stream, flavour)?;
    crate::capture::forbid_on(&queue)?;
    queue.submit(Work::Callback { call, stream, data }).map(drop)
}
