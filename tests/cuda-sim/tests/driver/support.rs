//! Runs each test in a separate process with a separate simulated machine. The library reads its
//! environment only once, and a broken context stays broken.

use std::{
    env,
    ffi::{CString, c_void},
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

const CHILD: &str = "SIM_TEST";

/// Runs `body` in a new process. The test fails if that process fails.
pub fn isolated(test: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    if env::var(CHILD).is_ok_and(|name| name == test) {
        body();
        if role().is_none() {
            fs::write(simulated_machine().join("passed"), "").expect("say that it passed");
        }
        return;
    }
    let dir = env::temp_dir().join(format!("cuda-sim-test-{}-{}", std::process::id(), test.replace("::", "-")));
    fs::create_dir_all(&dir).expect("a directory for the simulated machine");
    let status = again(test).env("CUDA_SIM_DIR", &dir).envs(env.iter().copied()).status().expect("run the test again");
    let passed = dir.join("passed").exists();
    let _ = fs::remove_dir_all(&dir);
    assert!(status.success(), "{test}: {status}");
    assert!(passed, "{test} did not run: is that its name?");
}

/// The directory of this test's simulated machine.
pub fn simulated_machine() -> PathBuf {
    env::var_os("CUDA_SIM_DIR").expect("only in the process of a test").into()
}

/// Starts another process of the same simulated machine. `test` must check its [`role`].
pub fn companion(test: &str, role: &str) -> Child {
    again(test).env("SIM_ROLE", role).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start a companion")
}

/// The role of a companion, or `None` in the first process of a test.
pub fn role() -> Option<String> {
    env::var("SIM_ROLE").ok()
}

fn again(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("the test's own path"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(CHILD, test);
    command
}

fn library() -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    *LIBRARY.get_or_init(|| {
        let exe = env::current_exe().expect("the test's own path");
        let path: PathBuf = exe.parent().and_then(|deps| deps.parent()).expect("target directory").join("libcuda.so");
        let path = CString::new(path.to_str().expect("UTF-8")).expect("no NUL");
        // SAFETY: the path is a C string, and the library stays loaded.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "no {path:?}");
        library as usize
    }) as *mut c_void
}

/// Returns the address of a symbol, or null without that symbol.
pub fn symbol(name: &str) -> *mut c_void {
    let text = CString::new(name).expect("no NUL");
    // SAFETY: the library is open, and the name is a C string.
    unsafe { libc::dlsym(library(), text.as_ptr()) }
}

/// Calls the driver. Every argument is an integer or an address.
pub fn cu(name: &str, args: &[usize]) -> u32 {
    let at = symbol(name);
    assert!(!at.is_null(), "no symbol {name}");
    let mut a = [0; 11];
    a[..args.len()].copy_from_slice(args);
    type Call = extern "C" fn(usize, usize, usize, usize, usize, usize, usize, usize, usize, usize, usize) -> u32;
    // SAFETY: integers and pointers use the same registers and stack slots. A function ignores
    // arguments beyond its parameters.
    let call = unsafe { std::mem::transmute::<*mut c_void, Call>(at) };
    call(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])
}

/// Makes a call whose first argument is a result pointer, and returns the result.
pub fn get(name: &str, args: &[usize]) -> usize {
    let mut answer = 0_usize;
    let mut all = vec![ptr::from_mut(&mut answer) as usize];
    all.extend(args);
    assert_eq!(cu(name, &all), 0, "{name}{args:?}");
    answer
}

/// The first GPU's primary context, and a module with the kernels.
pub struct Gpu {
    module: usize,
    pub context: usize,
}

impl Gpu {
    pub fn open() -> Gpu {
        assert_eq!(cu("cuInit", &[0]), 0);
        let context = get("cuDevicePrimaryCtxRetain", &[0]);
        assert_eq!(cu("cuCtxSetCurrent", &[context]), 0);
        let image = CString::new(include_str!("../../../programs/src/kernels.ptx")).expect("no NUL");
        Gpu { module: get("cuModuleLoadData", &[image.as_ptr() as usize]), context }
    }

    /// Launches a kernel. Its arguments are 64-bit words, and a narrower argument is the lower part
    /// of its word.
    pub fn launch(&self, kernel: &str, stream: usize, args: &[u64]) -> u32 {
        let name = CString::new(kernel).expect("no NUL");
        let function = get("cuModuleGetFunction", &[self.module, name.as_ptr() as usize]);
        let pointers: Vec<usize> = args.iter().map(|a| ptr::from_ref(a) as usize).collect();
        cu("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, stream, pointers.as_ptr() as usize, 0])
    }
}

/// Opens memory that another process exported. Unlike all other arguments in these tests, the
/// handle is passed by value, in memory.
pub fn open_handle(handle: [usize; 8]) -> usize {
    #[repr(C)]
    struct Handle([usize; 8]);
    // SAFETY: the type is the function's signature.
    let open = unsafe {
        std::mem::transmute::<*mut c_void, extern "C" fn(*mut usize, Handle, u32) -> u32>(symbol(
            "cuIpcOpenMemHandle_v2",
        ))
    };
    let mut at = 0;
    assert_eq!(open(&raw mut at, Handle(handle), 1), 0);
    at
}

pub fn alloc(len: usize) -> u64 {
    get("cuMemAlloc_v2", &[len]) as u64
}

pub fn stream(flags: usize) -> usize {
    get("cuStreamCreate", &[flags])
}

pub fn event() -> usize {
    get("cuEventCreate", &[0])
}

pub fn free_memory() -> usize {
    get("cuMemGetInfo_v2", &[0])
}

/// One element of device memory.
pub fn read(at: u64) -> u32 {
    let mut value = 0_u32;
    assert_eq!(cu("cuMemcpyDtoH_v2", &[ptr::from_mut(&mut value) as usize, at as usize, 4]), 0);
    value
}

/// A word of mapped host memory for which `spin_until` waits.
pub struct Flag(&'static AtomicU32);

impl Flag {
    pub fn new() -> Self {
        let host = get("cuMemHostAlloc", &[4096, 2]);
        assert_eq!(get("cuMemHostGetDevicePointer_v2", &[host, 0]), host);
        // SAFETY: the memory is aligned, zeroed and never freed. The host and the GPU read and
        // write it only as a whole word.
        Self(unsafe { AtomicU32::from_ptr(host as *mut u32) })
    }

    pub fn at(&self) -> u64 {
        self.0.as_ptr() as u64
    }

    pub fn value(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }

    pub fn write(&self) {
        self.0.store(1, Ordering::SeqCst);
    }
}

/// Creates a chunk with `CUmemAllocationProp` for the first GPU.
pub fn chunk(len: usize) -> Result<usize, u32> {
    let properties: [u32; 8] = [1, 0, 1, 0, 0, 0, 0, 0];
    let mut handle = 0_usize;
    match cu("cuMemCreate", &[ptr::from_mut(&mut handle) as usize, len, properties.as_ptr() as usize, 0]) {
        0 => Ok(handle),
        code => Err(code),
    }
}

/// Maps a chunk and lets the first GPU read and write it.
pub fn map(at: usize, len: usize, handle: usize) {
    assert_eq!(cu("cuMemMap", &[at, len, 0, handle, 0]), 0);
    let access: [u32; 3] = [1, 0, 3];
    assert_eq!(cu("cuMemSetAccess", &[at, len, access.as_ptr() as usize, 1]), 0);
}
