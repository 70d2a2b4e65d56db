//! Modules and libraries: PTX texts and fat binaries. The simulator reads only the names of the
//! kernels.

use crate::{
    context::{self, Context},
    error::{Done, Error},
    kernels::{self, Kernel},
    out,
    registry::{Registry, handle_of},
};
use cuda_sim_gpus::Config;
use std::{
    ffi::{CStr, CString, c_char},
    fs,
    sync::{Arc, Mutex},
};

/// A loaded module, or a library.
#[derive(Debug)]
pub struct Module {
    /// `None` for a library, which belongs to no context.
    context: Option<usize>,
    functions: Vec<Arc<Function>>,
    /// Modules that `cuLibraryGetModule` created from a library.
    modules: Mutex<Vec<Arc<Module>>>,
}

/// A kernel of a module, or of a library.
#[derive(Debug)]
pub struct Function {
    pub kernel: &'static Kernel,
    name: CString,
    module: Mutex<usize>,
}

static MODULES: Registry<Module> = Registry::new();
static LIBRARIES: Registry<Module> = Registry::new();
static FUNCTIONS: Registry<Function> = Registry::new();

/// Returns the function, or the kernel of a library, behind a handle.
pub fn function(handle: usize) -> Result<Arc<Function>, Error> {
    FUNCTIONS.get(handle)
}

fn read(image: *const c_char) -> Result<Vec<Arc<Function>>, Error> {
    if image.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: by the API's contract, an image is a NUL-terminated text, or a binary that starts with a
    // magic number and contains its length in the header.
    let text = unsafe {
        let start = std::slice::from_raw_parts(image.cast::<u8>(), 4);
        if start == b"\x7fELF" {
            return Err(Error::INVALID_IMAGE);
        }
        if start == [0x50, 0xed, 0x55, 0xba] {
            let (header, contents) =
                (image.add(6).cast::<u16>().read_unaligned(), image.add(8).cast::<u64>().read_unaligned());
            return read_fat_binary(std::slice::from_raw_parts(image.cast(), usize::from(header) + contents as usize));
        }
        CStr::from_ptr(image)
    };
    let text = text.to_str().map_err(|_| Error::INVALID_IMAGE)?;
    if !text.contains(".version") || !text.contains(".target") {
        return Err(Error::INVALID_IMAGE);
    }
    let names = text
        .split(".entry")
        .skip(1)
        .filter_map(|rest| rest.trim_start().split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '$')).next());
    Ok(names.filter_map(kernels::find).map(Function::new).collect())
}

/// Returns the known kernels whose names occur in a fat binary. Compression keeps the first occurrence
/// of a name intact.
fn read_fat_binary(image: &[u8]) -> Result<Vec<Arc<Function>>, Error> {
    if !Config::get().fat_binaries {
        return Err(Error::NO_BINARY_FOR_GPU);
    }
    let is_seen = |kernel: &&Kernel| image.windows(kernel.name.len()).any(|bytes| bytes == kernel.name.as_bytes());
    Ok(kernels::all().filter(is_seen).map(Function::new).collect())
}

impl Function {
    fn new(kernel: &'static Kernel) -> Arc<Self> {
        Arc::new(Self { kernel, name: CString::new(kernel.name).unwrap_or_default(), module: Mutex::new(0) })
    }
}

fn load_text(image: *const c_char, context: Option<usize>) -> Result<Arc<Module>, Error> {
    let functions = read(image)?;
    functions.iter().for_each(|f| {
        FUNCTIONS.add(f.clone());
    });
    let module = Arc::new(Module { context, functions, modules: Mutex::default() });
    for function in &module.functions {
        *function.module.lock().unwrap_or_else(|e| e.into_inner()) = handle_of(&module);
    }
    Ok(module)
}

impl Module {
    fn find(&self, name: *const c_char) -> Result<usize, Error> {
        if name.is_null() {
            return Err(Error::INVALID_VALUE);
        }
        // SAFETY: the program passes a C string.
        let name = unsafe { CStr::from_ptr(name) };
        let function = self.functions.iter().find(|f| f.name.as_c_str() == name).ok_or(Error::NOT_FOUND)?;
        Ok(handle_of(function))
    }

    fn unload(&self) {
        for function in &self.functions {
            let _ = FUNCTIONS.remove(handle_of(function));
        }
        for module in self.modules.lock().unwrap_or_else(|e| e.into_inner()).drain(..) {
            let _ = MODULES.remove(handle_of(&module));
            module.unload();
        }
    }
}

/// Unloads a context's modules.
pub fn forget_context(context: &Arc<Context>) {
    for module in MODULES.all().iter().filter(|m| m.context == Some(context.handle())) {
        let _ = MODULES.remove(handle_of(module));
        module.unload();
    }
}

/// `cuModuleLoadData`
pub fn load(module: *mut usize, image: *const c_char) -> Done {
    let context = context::healthy()?;
    context.wait();
    context.grow()?;
    out(module, MODULES.add(load_text(image, Some(context.handle()))?))
}

/// `cuModuleLoadDataEx`: ignores the options.
pub fn load_ex(module: *mut usize, image: *const c_char, _count: u32, _options: *mut u32, _values: *mut usize) -> Done {
    load(module, image)
}

/// `cuModuleLoad`
pub fn load_file(module: *mut usize, path: *const c_char) -> Done {
    let text = file(path)?;
    load(module, text.as_ptr())
}

fn file(path: *const c_char) -> Result<CString, Error> {
    if path.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passes a C string.
    let path = unsafe { CStr::from_ptr(path) }.to_string_lossy().into_owned();
    CString::new(fs::read(path).map_err(|_| Error::FILE_NOT_FOUND)?).map_err(|_| Error::INVALID_IMAGE)
}

/// `cuModuleUnload`
pub fn unload(module: usize) -> Done {
    let module = MODULES.remove(module)?;
    if let Ok(context) = context::current() {
        context.synchronise()?;
    }
    module.unload();
    Ok(())
}

/// `cuModuleGetLoadingMode`: returns eager loading.
pub fn loading_mode(mode: *mut u32) -> Done {
    out(mode, 1)
}

/// `cuModuleGetFunction`
pub fn get_function(function: *mut usize, module: usize, name: *const c_char) -> Done {
    context::healthy()?;
    out(function, MODULES.get(module)?.find(name)?)
}

/// `cuModuleGetFunctionCount`
pub fn function_count(count: *mut u32, module: usize) -> Done {
    out(count, MODULES.get(module)?.functions.len() as u32)
}

/// `cuModuleGetGlobal`: fails, because the simulator keeps no variables of modules.
pub fn get_global(_at: *mut u64, _len: *mut usize, module: usize, _name: *const c_char) -> Done {
    MODULES.get(module)?;
    Err(Error::NOT_FOUND)
}

/// `cuLibraryLoadData`
#[allow(clippy::too_many_arguments)]
pub fn library_load(
    library: *mut usize,
    image: *const c_char,
    _jit: *mut u32,
    _jit_values: *mut usize,
    _jit_count: u32,
    _options: *mut u32,
    _values: *mut usize,
    _count: u32,
) -> Done {
    out(library, LIBRARIES.add(load_text(image, None)?))
}

/// `cuLibraryLoadFromFile`
#[allow(clippy::too_many_arguments)]
pub fn library_load_file(
    library: *mut usize,
    path: *const c_char,
    _jit: *mut u32,
    _jit_values: *mut usize,
    _jit_count: u32,
    _options: *mut u32,
    _values: *mut usize,
    _count: u32,
) -> Done {
    let text = file(path)?;
    out(library, LIBRARIES.add(load_text(text.as_ptr(), None)?))
}

/// `cuLibraryUnload`
pub fn library_unload(library: usize) -> Done {
    LIBRARIES.remove(library)?.unload();
    Ok(())
}

/// `cuLibraryGetKernel`
pub fn library_kernel(kernel: *mut usize, library: usize, name: *const c_char) -> Done {
    out(kernel, LIBRARIES.get(library)?.find(name)?)
}

/// `cuLibraryGetKernelCount`
pub fn library_kernel_count(count: *mut u32, library: usize) -> Done {
    out(count, LIBRARIES.get(library)?.functions.len() as u32)
}

/// `cuLibraryEnumerateKernels`
pub fn library_kernels(kernels: *mut usize, count: u32, library: usize) -> Done {
    if kernels.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    for (i, function) in LIBRARIES.get(library)?.functions.iter().take(count as usize).enumerate() {
        // SAFETY: by the API's contract, the array has room for `count` handles.
        unsafe { kernels.add(i).write(handle_of(function)) };
    }
    Ok(())
}

/// `cuLibraryGetModule`
pub fn library_module(module: *mut usize, library: usize) -> Done {
    let library = LIBRARIES.get(library)?;
    let context = context::healthy()?;
    let mut modules = library.modules.lock().unwrap_or_else(|e| e.into_inner());
    if let Some(known) = modules.iter().find(|m| m.context == Some(context.handle())) {
        return out(module, handle_of(known));
    }
    let functions: Vec<_> = library
        .functions
        .iter()
        .map(|f| Arc::new(Function { kernel: f.kernel, name: f.name.clone(), module: Mutex::new(0) }))
        .collect();
    let new = Arc::new(Module { context: Some(context.handle()), functions, modules: Mutex::default() });
    for function in &new.functions {
        *function.module.lock().unwrap_or_else(|e| e.into_inner()) = handle_of(&new);
        FUNCTIONS.add(function.clone());
    }
    MODULES.add(new.clone());
    modules.push(new.clone());
    out(module, handle_of(&new))
}

/// `cuLibraryGetGlobal`, `cuLibraryGetManaged`: fail, because the simulator keeps no variables of
/// modules.
pub fn library_global(_at: *mut u64, _len: *mut usize, library: usize, _name: *const c_char) -> Done {
    LIBRARIES.get(library)?;
    Err(Error::NOT_FOUND)
}

/// `cuKernelGetFunction`: a kernel and its function have the same handle.
pub fn kernel_function(function: *mut usize, kernel: usize) -> Done {
    context::healthy()?;
    self::function(kernel)?;
    out(function, kernel)
}

/// `cuKernelGetLibrary`, `cuFuncGetModule`
pub fn home(home: *mut usize, function: usize) -> Done {
    let function = self::function(function)?;
    let module = *function.module.lock().unwrap_or_else(|e| e.into_inner());
    out(home, module)
}

/// `cuFuncGetName`, `cuKernelGetName`
pub fn name(name: *mut *const c_char, function: usize) -> Done {
    out(name, self::function(function)?.name.as_ptr())
}

/// `cuFuncGetParamInfo`, `cuKernelGetParamInfo`
pub fn param_info(function: usize, index: usize, offset: *mut usize, size: *mut usize) -> Done {
    let (at, len) = self::function(function)?.kernel.layout().nth(index).ok_or(Error::INVALID_VALUE)?;
    out(offset, at)?;
    crate::out_if(size, len);
    Ok(())
}

fn attribute_of(attribute: u32) -> Result<i32, Error> {
    Ok(match attribute {
        0 => 1024,
        4 => 16,
        5 | 6 => 90,
        8 => 48 << 10,
        9 => -1,
        1..=15 => 0,
        _ => return Err(Error::INVALID_VALUE),
    })
}

/// `cuFuncGetAttribute`
pub fn get_attribute(value: *mut i32, attribute: u32, function: usize) -> Done {
    self::function(function)?;
    out(value, attribute_of(attribute)?)
}

/// `cuFuncSetAttribute`: has no effect.
pub fn set_attribute(function: usize, attribute: u32, _value: i32) -> Done {
    self::function(function)?;
    attribute_of(attribute).map(drop)
}

/// `cuFuncSetCacheConfig`, `cuFuncSetSharedMemConfig`: have no effect.
pub fn set_config(function: usize, _config: u32) -> Done {
    self::function(function).map(drop)
}

/// `cuKernelGetAttribute`
pub fn kernel_get_attribute(value: *mut i32, attribute: u32, kernel: usize, _device: i32) -> Done {
    get_attribute(value, attribute, kernel)
}

/// `cuKernelSetAttribute`: has no effect.
pub fn kernel_set_attribute(attribute: u32, value: i32, kernel: usize, _device: i32) -> Done {
    set_attribute(kernel, attribute, value)
}

/// `cuKernelSetCacheConfig`: has no effect.
pub fn kernel_set_config(kernel: usize, config: u32, _device: i32) -> Done {
    set_config(kernel, config)
}

/// `cuFuncIsLoaded`
pub fn is_loaded(state: *mut u32, function: usize) -> Done {
    self::function(function)?;
    out(state, 1)
}

/// `cuFuncLoad`
pub fn load_function(function: usize) -> Done {
    self::function(function).map(drop)
}

/// `cuOccupancyMaxActiveBlocksPerMultiprocessor`
pub fn occupancy(blocks: *mut i32, function: usize, size: i32, _shared: usize) -> Done {
    self::function(function)?;
    if !(1..=1024).contains(&size) {
        return Err(Error::INVALID_VALUE);
    }
    out(blocks, (2048 / size).min(32))
}

/// `cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags`
pub fn occupancy_with_flags(blocks: *mut i32, function: usize, size: i32, shared: usize, _flags: u32) -> Done {
    occupancy(blocks, function, size, shared)
}
