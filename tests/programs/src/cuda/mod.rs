//! The part of CUDA that the programs use: one GPU, its kernels, and several kinds of memory.

pub mod api;
pub mod late;
pub mod nvml;

pub use api::Api;
use api::{Access, Location, Properties};
use std::{
    ffi::{CStr, CString, c_void},
    fmt, ptr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// A call that did not succeed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Error {
    pub call: &'static str,
    pub code: u32,
}

impl Error {
    pub const OUT_OF_MEMORY: u32 = 2;
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = ptr::null();
        // SAFETY: the result pointer is to a live value; the name is a static C string.
        let name = unsafe {
            (Api::get().cuGetErrorName)(self.code, &mut name);
            if name.is_null() { "?".into() } else { CStr::from_ptr(name).to_string_lossy() }
        };
        write!(f, "{}: {name} ({})", self.call, self.code)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

/// Calls the driver, and names the call in the error.
macro_rules! cu {
    ($call:ident($($arg:expr),* $(,)?)) => {{
        // SAFETY: the arguments meet the requirements of the CUDA headers; pointers are to live
        // values of the right type.
        match unsafe { ($crate::cuda::Api::get().$call)($($arg),*) } {
            0 => Ok(()),
            code => Err($crate::cuda::Error { call: stringify!($call), code }),
        }
    }};
}
pub(crate) use cu;

/// Threads per block, and blocks, of grid-stride kernels.
const BLOCK: u32 = 256;
const GRID: u32 = 1024;
const GRANULARITY: usize = 2 << 20;

/// A GPU with its primary context, which is current in the thread that opened it.
#[derive(Debug)]
pub struct Gpu {
    pub device: i32,
    pub context: usize,
    fill: usize,
    add: usize,
    mix: usize,
    unmix: usize,
    sum: usize,
    spin_ns: usize,
    spin_until: usize,
    empty: usize,
    launch: api::Launch,
}

impl Gpu {
    pub fn open(ordinal: i32) -> Result<Arc<Gpu>> {
        cu!(cuInit(0))?;
        let (mut device, mut context) = (0, 0);
        cu!(cuDeviceGet(&mut device, ordinal))?;
        patiently(|| cu!(cuDevicePrimaryCtxRetain(&mut context, device)))?;
        cu!(cuCtxSetCurrent(context))?;
        Gpu::in_current(device, context)
    }

    /// Opens a GPU whose context is already current.
    pub fn in_current(device: i32, context: usize) -> Result<Arc<Gpu>> {
        let mut module = 0;
        let image = CString::new(include_str!("../kernels.ptx")).expect("no NUL in PTX");
        cu!(cuModuleLoadData(&mut module, image.as_ptr()))?;
        let function = |name: &CStr| {
            let mut function = 0;
            cu!(cuModuleGetFunction(&mut function, module, name.as_ptr())).map(|()| function)
        };
        Ok(Arc::new(Gpu {
            device,
            context,
            fill: function(c"fill_u32")?,
            add: function(c"add_u32")?,
            mix: function(c"mix_u32")?,
            unmix: function(c"unmix_u32")?,
            sum: function(c"sum_u32")?,
            spin_ns: function(c"spin_ns")?,
            spin_until: function(c"spin_until")?,
            empty: function(c"empty")?,
            launch: Api::get().cuLaunchKernel,
        }))
    }

    /// Loads the code of a kernel before its first launch.
    pub fn load(&self) -> Result<()> {
        late::late_cu!(cuFuncLoad(self.add))
    }

    /// Makes the GPU's context current in the calling thread.
    pub fn enter(&self) -> Result<()> {
        cu!(cuCtxSetCurrent(self.context))
    }

    pub fn synchronise(&self) -> Result<()> {
        cu!(cuCtxSynchronize())
    }

    /// Free and total bytes.
    pub fn memory(&self) -> Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        cu!(cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free, total))
    }

    /// The UUID as `nvidia-smi` prints it.
    pub fn uuid(&self) -> Result<String> {
        let mut uuid = [0; 16];
        cu!(cuDeviceGetUuid_v2(&mut uuid, self.device))?;
        let hex: Vec<String> = uuid.iter().map(|b| format!("{b:02x}")).collect();
        Ok(format!(
            "GPU-{}-{}-{}-{}-{}",
            hex[..4].concat(),
            hex[4..6].concat(),
            hex[6..8].concat(),
            hex[8..10].concat(),
            hex[10..].concat()
        ))
    }

    /// Returns the same GPU, with another function for launching kernels.
    ///
    /// # Safety
    /// `launch` must be `cuLaunchKernel`.
    pub unsafe fn launching_by(&self, launch: api::Launch) -> Gpu {
        Gpu { launch, ..*self }
    }

    fn launch(&self, function: usize, grid: u32, block: u32, stream: usize, args: &mut [*mut c_void]) -> Result<()> {
        // SAFETY: the arguments match the kernel's parameters, and the driver copies them.
        let code =
            unsafe { (self.launch)(function, grid, 1, 1, block, 1, 1, 0, stream, args.as_mut_ptr(), ptr::null_mut()) };
        if code == 0 { Ok(()) } else { Err(Error { call: "cuLaunchKernel", code }) }
    }

    fn over(&self, function: usize, at: u64, count: u64, mut value: u32, stream: usize) -> Result<()> {
        let (mut at, mut count) = (at, count);
        self.launch(
            function,
            GRID,
            BLOCK,
            stream,
            &mut [ptr::from_mut(&mut at).cast(), ptr::from_mut(&mut count).cast(), ptr::from_mut(&mut value).cast()],
        )
    }

    /// `at[i] = value`
    pub fn fill(&self, at: u64, count: u64, value: u32, stream: usize) -> Result<()> {
        self.over(self.fill, at, count, value, stream)
    }

    /// `at[i] += value`
    pub fn add(&self, at: u64, count: u64, value: u32, stream: usize) -> Result<()> {
        self.over(self.add, at, count, value, stream)
    }

    /// Mixes each element with its index and `seed`. A later check thus reveals the order of the
    /// steps.
    pub fn mix(&self, at: u64, count: u64, seed: u32, stream: usize) -> Result<()> {
        self.over(self.mix, at, count, seed, stream)
    }

    /// Undoes [`Gpu::mix`].
    pub fn unmix(&self, at: u64, count: u64, seed: u32, stream: usize) -> Result<()> {
        self.over(self.unmix, at, count, seed, stream)
    }

    /// Computes the sum of all elements, and waits for it.
    pub fn sum(&self, at: u64, count: u64) -> Result<u64> {
        let result = Buffer::new(Kind::Alloc, 8)?;
        cu!(cuMemsetD8_v2(result.at, 0, 8))?;
        let (mut at, mut count, mut to) = (at, count, result.at);
        self.launch(
            self.sum,
            GRID,
            BLOCK,
            0,
            &mut [ptr::from_mut(&mut at).cast(), ptr::from_mut(&mut count).cast(), ptr::from_mut(&mut to).cast()],
        )?;
        let mut sum = 0_u64;
        cu!(cuMemcpyDtoH_v2(ptr::from_mut(&mut sum).cast(), result.at, 8))?;
        Ok(sum)
    }

    /// Adds the sum of all elements to the 8 bytes at `to`.
    pub fn add_sum(&self, mut at: u64, mut count: u64, mut to: u64, stream: usize) -> Result<()> {
        let args =
            &mut [ptr::from_mut(&mut at).cast(), ptr::from_mut(&mut count).cast(), ptr::from_mut(&mut to).cast()];
        self.launch(self.sum, GRID, BLOCK, stream, args)
    }

    /// Keeps the GPU busy for `ns` nanoseconds.
    pub fn spin(&self, mut ns: u64, stream: usize) -> Result<()> {
        self.launch(self.spin_ns, 1, 1, stream, &mut [ptr::from_mut(&mut ns).cast()])
    }

    /// Keeps the GPU busy until the host writes to `flag`, an address in mapped host memory.
    pub fn spin_until(&self, mut flag: u64, stream: usize) -> Result<()> {
        self.launch(self.spin_until, 1, 1, stream, &mut [ptr::from_mut(&mut flag).cast()])
    }

    pub fn empty(&self, stream: usize) -> Result<()> {
        self.launch(self.empty, 1, 1, stream, &mut [])
    }
}

/// The time for which [`patiently`] retries a call.
const PATIENCE: Duration = Duration::from_secs(30);

/// Retries a call that fails for lack of memory, if `CUDA_PATIENT` is set. Memory of a killed
/// process, or memory that is being evicted, may soon be free.
fn patiently(mut call: impl FnMut() -> Result<()>) -> Result<()> {
    let begin = Instant::now();
    loop {
        match call() {
            Err(error)
                if error.code == Error::OUT_OF_MEMORY
                    && std::env::var_os("CUDA_PATIENT").is_some()
                    && begin.elapsed() < PATIENCE =>
            {
                thread::sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

/// Copies one element to the host.
pub fn read(at: u64) -> Result<u32> {
    let mut value = 0_u32;
    cu!(cuMemcpyDtoH_v2(ptr::from_mut(&mut value).cast(), at, 4))?;
    Ok(value)
}

/// How memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `cuMemAlloc`
    Alloc,
    /// `cuMemCreate`, `cuMemMap`
    Vmm,
    /// `cuMemAllocManaged`
    Managed,
    /// `cuMemAllocAsync`
    Async,
}

impl Kind {
    pub fn parse(text: &str) -> Option<Kind> {
        match text {
            "alloc" => Some(Kind::Alloc),
            "vmm" => Some(Kind::Vmm),
            "managed" => Some(Kind::Managed),
            "async" => Some(Kind::Async),
            _ => None,
        }
    }
}

/// Device memory, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    pub at: u64,
    len: usize,
    kind: Kind,
}

impl Buffer {
    pub fn new(kind: Kind, len: usize) -> Result<Buffer> {
        let mut at = 0;
        match kind {
            Kind::Alloc => patiently(|| cu!(cuMemAlloc_v2(&mut at, len)))?,
            Kind::Managed => cu!(cuMemAllocManaged(&mut at, len, 1))?,
            Kind::Async => cu!(cuMemAllocAsync(&mut at, len, 0))?,
            Kind::Vmm => return Buffer::mapped(len.next_multiple_of(GRANULARITY)),
        }
        Ok(Buffer { at, len, kind })
    }

    fn mapped(len: usize) -> Result<Buffer> {
        let location = Location { kind: 1, id: 0 };
        let (mut at, mut handle) = (0, 0);
        cu!(cuMemCreate(&mut handle, len, &Properties { kind: 1, location, ..Properties::default() }, 0))?;
        cu!(cuMemAddressReserve(&mut at, len, 0, 0, 0))?;
        cu!(cuMemMap(at, len, 0, handle, 0))?;
        cu!(cuMemRelease(handle))?;
        cu!(cuMemSetAccess(at, len, &Access { location, flags: 3 }, 1))?;
        Ok(Buffer { at, len, kind: Kind::Vmm })
    }

    /// The number of elements of four bytes.
    pub fn count(&self) -> u64 {
        self.len as u64 / 4
    }

    /// Frees the memory, and returns an error if that fails.
    pub fn free(self) -> Result<()> {
        let result = self.give_back();
        std::mem::forget(self);
        result
    }

    fn give_back(&self) -> Result<()> {
        match self.kind {
            Kind::Alloc | Kind::Managed => cu!(cuMemFree_v2(self.at)),
            Kind::Async => cu!(cuMemFreeAsync(self.at, 0)),
            Kind::Vmm => {
                // Unmapping does not wait for work, so the program waits.
                cu!(cuCtxSynchronize())?;
                cu!(cuMemUnmap(self.at, self.len))?;
                cu!(cuMemAddressFree(self.at, self.len))
            }
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.give_back();
    }
}

/// Pinned, zeroed host memory that kernels can access. It is freed when this value is dropped.
#[derive(Debug)]
pub struct Mapped {
    pub host: *mut u8,
    /// The device address.
    pub at: u64,
}

// SAFETY: threads access the memory only by volatile reads and writes of whole words.
unsafe impl Send for Mapped {}
// SAFETY: threads access the memory only by volatile reads and writes of whole words.
unsafe impl Sync for Mapped {}

impl Mapped {
    pub fn new(len: usize) -> Result<Mapped> {
        const MAPPED: u32 = 2;
        let (mut host, mut at) = (ptr::null_mut(), 0);
        cu!(cuMemHostAlloc(&mut host, len.max(4096), MAPPED))?;
        // SAFETY: the driver has allocated `len` bytes, which have no other users yet.
        unsafe { ptr::write_bytes(host, 0, len) };
        cu!(cuMemHostGetDevicePointer_v2(&mut at, host, 0))?;
        Ok(Mapped { host, at })
    }

    /// The first word, which a kernel may be writing.
    pub fn get(&self) -> u32 {
        // SAFETY: the memory has at least one word.
        unsafe { self.host.cast::<u32>().read_volatile() }
    }

    /// Writes the first word, which a kernel may be reading.
    pub fn set(&self, value: u32) {
        // SAFETY: the memory has at least one word.
        unsafe { self.host.cast::<u32>().write_volatile(value) };
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = cu!(cuMemFreeHost(self.host));
    }
}

/// A stream, destroyed when dropped.
#[derive(Debug)]
pub struct Stream(pub usize);

impl Stream {
    /// A stream that does not synchronize with the legacy default stream.
    pub fn new() -> Result<Stream> {
        Stream::with(1)
    }

    /// A stream that synchronizes with the legacy default stream, like a stream of
    /// `cudaStreamCreate`.
    pub fn blocking() -> Result<Stream> {
        Stream::with(0)
    }

    fn with(flags: u32) -> Result<Stream> {
        let mut stream = 0;
        cu!(cuStreamCreate(&mut stream, flags))?;
        Ok(Stream(stream))
    }

    pub fn synchronise(&self) -> Result<()> {
        cu!(cuStreamSynchronize(self.0))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = cu!(cuStreamDestroy_v2(self.0));
    }
}
