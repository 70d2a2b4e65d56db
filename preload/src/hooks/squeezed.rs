//! Calls in which the driver takes memory of the GPU for itself, for code, stacks and streams: where it finds none, room is
//! made and they are made again ([`crate::squeeze`]).

use crate::{cuda::*, hooks::hooks, squeeze::retried};
use core::ffi::{c_char, c_void};

type P = *mut c_void;

hooks! { real, flavour;
    [cuModuleLoad] (module: P, path: *const c_char) { retried(real) }
    [cuModuleLoadData | cuModuleLoadFatBinary] (module: P, image: P) { retried(real) }
    [cuModuleLoadDataEx] (module: P, image: P, n: u32, options: P, values: P) { retried(real) }
    [cuLibraryLoadData] (
        library: P, image: P, jit_options: P, jit_values: P, jit_n: u32, options: P, values: P, n: u32,
    ) { retried(real) }
    [cuLibraryLoadFromFile] (
        library: P, path: *const c_char, jit_options: P, jit_values: P, jit_n: u32, options: P, values: P, n: u32,
    ) { retried(real) }
    // With lazy loading, code is loaded when it is first asked for.
    [cuModuleGetFunction] (function: P, module: P, name: *const c_char) { retried(real) }
    [cuLibraryGetModule | cuKernelGetFunction] (place: P, of: P) { retried(real) }
    [cuCtxSetLimit] (limit: i32, value: Size) { retried(real) }
    [cuStreamCreate] (stream: P, flags: u32) { retried(real) }
    [cuStreamCreateWithPriority] (stream: P, flags: u32, priority: i32) { retried(real) }
}
