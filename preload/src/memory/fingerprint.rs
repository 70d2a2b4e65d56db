//! Fingerprints of chunks: 128-bit hashes with a random seed, computed on the GPU at the speed of its
//! memory whenever a chunk leaves the GPU. A fingerprint shows whether a chunk consists of one repeated
//! value, or has the same contents as a copy in host memory or in a file. Such a chunk need not be
//! copied over the link, which is eighty times slower than the GPU's memory, nor written to the file.

use super::staging::Buffer;
use crate::{
    driver::{self, check, context::is_dead, query, types::*},
    env::trace::trace,
    sys::time::{self, Instant},
};
use alloc::vec::Vec;
use core::{
    ffi::{CStr, c_void},
    time::Duration,
};

/// The kernel as machine code for current GPUs and as PTX for later GPUs, built by `fingerprint.sh`.
/// Loading machine code is faster than compiling PTX in the driver.
static FAT_BINARY: &Aligned<[u8]> = &Aligned(*include_bytes!("fingerprint.fatbin"));

/// The kernel as NUL-terminated PTX only, for drivers that cannot use the fat binary.
static PTX: &str = concat!(include_str!("fingerprint.ptx"), "\0");

/// Aligns the fat binary to 8 bytes, because the driver reads it in 8-byte words.
#[repr(C, align(8))]
struct Aligned<T: ?Sized>(T);

const THREADS: u32 = 256;
/// The kernel takes milliseconds, even if programs without nvshare use the GPU at the same time. After
/// this time the kernel is considered hung.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of a chunk that one thread block reads.
const PART: u64 = 4 << 20;
/// The most parts and chunks per launch; the table has room for this many.
const MAX_PARTS: usize = 8192;
const MAX_CHUNKS: usize = 1024;
const LIST: usize = (1 + MAX_CHUNKS) * size_of::<[u64; 2]>();
const TABLE: u64 = ((LIST + MAX_PARTS * size_of::<Sums>()) as u64).next_multiple_of(4096);

/// The kernel's result for one part.
type Sums = [u64; 4];

/// The fingerprint of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint {
    sums: [u64; 2],
    /// The value of every 32-bit word of the chunk, if all are equal.
    pub constant: Option<u32>,
}

/// Computes fingerprints in one context. The context must be current during every call.
#[derive(Debug)]
pub struct Fingerprinter {
    module: CUmodule,
    function: CUfunction,
    /// Host memory for the kernel's input and results, and its address on the GPU.
    table: Buffer,
    table_on_gpu: u64,
    seed: u64,
}

// SAFETY: the pointers are driver handles, which any thread may use.
unsafe impl Send for Fingerprinter {}

impl Fingerprinter {
    /// Loads the kernel completely, so that no launch has to load code. The driver may wait for running
    /// work.
    ///
    /// # Errors
    /// `ERROR_OUT_OF_MEMORY` if memory is short. Any other error means that this GPU or driver cannot run
    /// the kernel.
    pub fn new(context: usize) -> Result<Self, CUresult> {
        let mut table = Buffer::new(TABLE).ok_or(ERROR_OUT_OF_MEMORY)?;
        table.register(context);
        let mut fingerprinter = Self {
            module: core::ptr::null_mut(),
            function: core::ptr::null_mut(),
            table,
            table_on_gpu: 0,
            seed: seed(),
        };
        if let Err(error) = fingerprinter.load() {
            fingerprinter.table.unregister();
            return Err(error);
        }
        trace!("fingerprints can be computed in context {context:#x}");
        Ok(fingerprinter)
    }

    fn load(&mut self) -> Result<(), CUresult> {
        // SAFETY: `table_on_gpu` outlives the call, and the buffer stays registered.
        check(unsafe { driver::cuMemHostGetDevicePointer_v2(&mut self.table_on_gpu, self.table.address(), 0) })?;
        self.module = load()?;
        self.find().inspect_err(|_| {
            // SAFETY: no code of the module is running.
            unsafe { driver::cuModuleUnload(self.module) };
        })
    }

    fn find(&mut self) -> Result<(), CUresult> {
        const NAME: &CStr = c"nvshare_fingerprint";
        // SAFETY: `self.function` outlives the call, and `NAME` ends with NUL. With lazy loading, most drivers
        // load the code in `cuModuleGetFunction`; newer drivers load it in `cuFuncLoad`.
        unsafe {
            check(driver::cuModuleGetFunction(&mut self.function, self.module, NAME.as_ptr()))?;
            match driver::cuFuncLoad(self.function) {
                ERROR_NOT_FOUND => Ok(()), // before driver 12.4
                result => check(result),
            }
        }
    }

    /// Returns the table of a broken context. The caller must unregister the table.
    pub fn into_buffer(self) -> Buffer {
        self.table
    }

    /// Drops the fingerprinter of a context that no longer exists. The module and the registration ended
    /// with the context.
    pub fn forget_context(mut self, context: usize) {
        self.table.forget_context(context);
    }

    /// Computes the fingerprints of chunks (address and size). No thread may write to the chunks during
    /// this call.
    ///
    /// # Errors
    /// Errors of the driver; [`ERROR_TIMEOUT`] if the kernel still runs after [`TIMEOUT`]. The kernel may
    /// then write to the table at any later time, so this `Fingerprinter` must be neither used nor dropped.
    pub fn fingerprints(&mut self, chunks: &[(u64, u64)], stream: CUstream) -> Result<Vec<Fingerprint>, CUresult> {
        let mut fingerprints = Vec::with_capacity(chunks.len());
        let mut rest = chunks;
        while !rest.is_empty() {
            let (count, parts) = batch(rest);
            if count * parts > MAX_PARTS {
                return Err(ERROR_INVALID_VALUE); // no chunk is this large
            }
            let (now, later) = rest.split_at(count);
            self.run(now, parts, stream)?;
            fingerprints.extend((0..now.len()).map(|chunk| self.read(chunk, parts)));
            rest = later;
        }
        Ok(fingerprints)
    }

    fn run(&mut self, chunks: &[(u64, u64)], parts: usize, stream: CUstream) -> Result<(), CUresult> {
        let list = self.table.address().cast::<[u64; 2]>();
        // SAFETY: the list is at the start of the table, which is aligned, and is at most LIST bytes long. No
        // kernel is running.
        unsafe {
            list.write([chunks.len() as u64, parts as u64]);
            for (at, (address, len)) in chunks.iter().enumerate().take(MAX_CHUNKS) {
                list.add(1 + at).write([*address, len / 16]);
            }
        }
        let (mut on_gpu, mut out) = (self.table_on_gpu, self.table_on_gpu + LIST as u64);
        let (mut seed, mut part) = (self.seed, (PART / 16) as u32);
        let mut arguments: [*mut c_void; 4] =
            [(&raw mut on_gpu).cast(), (&raw mut out).cast(), (&raw mut seed).cast(), (&raw mut part).cast()];
        // SAFETY: the driver copies the kernel's arguments during the launch. The memory that the kernel reads
        // and writes stays valid until the kernel is done.
        unsafe {
            check(driver::cuLaunchKernel(
                self.function,
                parts as u32,
                chunks.len() as u32,
                1,
                THREADS,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                core::ptr::null_mut(),
            ))?;
            let begin = Instant::now();
            loop {
                match driver::cuStreamQuery(stream) {
                    ERROR_NOT_READY if begin.elapsed() < Duration::from_millis(1) => core::hint::spin_loop(),
                    ERROR_NOT_READY if begin.elapsed() >= TIMEOUT => return Err(ERROR_TIMEOUT),
                    ERROR_NOT_READY => time::sleep(Duration::from_micros(100)),
                    result => return check(result),
                }
            }
        }
    }

    /// Returns the result for a chunk of `parts` parts.
    fn read(&self, chunk: usize, parts: usize) -> Fingerprint {
        // SAFETY: the results follow the list and are aligned, and the kernel has written them.
        let found = unsafe {
            let out = self.table.address().cast::<u8>().add(LIST).cast::<Sums>();
            core::slice::from_raw_parts(out.add(chunk * parts), parts)
        };
        let mut fingerprint = Fingerprint { sums: [0; 2], constant: None };
        let (mut differs, mut constant) = (0, 0);
        for [first, second, different, value] in found {
            fingerprint.sums[0] = fingerprint.sums[0].wrapping_add(*first);
            fingerprint.sums[1] = fingerprint.sums[1].wrapping_add(*second);
            differs |= different;
            constant = *value as u32;
        }
        fingerprint.constant = (differs == 0).then_some(constant);
        fingerprint
    }
}

/// Loads the kernel into the current context.
fn load() -> Result<CUmodule, CUresult> {
    let load = |image: *const c_void| {
        // SAFETY: the place is valid, and `image` is a complete image of the kernel.
        query::handle(|module| unsafe { driver::cuModuleLoadData(module, image) })
    };
    load(FAT_BINARY.0.as_ptr().cast()).or_else(|error| match error {
        ERROR_OUT_OF_MEMORY => Err(error),
        _ if is_dead(error) => Err(error),
        _ => {
            trace!("the fat binary cannot be loaded ({error}), so the driver compiles PTX");
            load(PTX.as_ptr().cast())
        }
    })
}

/// Returns the number of chunks for one launch, and the number of parts of the largest of these
/// chunks. The kernel skips parts beyond the end of a chunk.
///
/// Rejected: one launch per chunk size, which leaves most of the GPU idle. The 209 chunks of a
/// language model, 33 to 90 MB in random order, took 74 ms that way on an H200.
fn batch(chunks: &[(u64, u64)]) -> (usize, usize) {
    let (mut count, mut parts) = (0, 1);
    for (_, len) in chunks.iter().take(MAX_CHUNKS) {
        let wider = parts.max(len.div_ceil(PART) as usize);
        if count > 0 && (count + 1) * wider > MAX_PARTS {
            break;
        }
        (count, parts) = (count + 1, wider);
    }
    (count, parts)
}

/// A random seed, so that a program cannot construct two contents with the same fingerprint.
fn seed() -> u64 {
    let mut seed = [0; 8];
    let _ = rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::NONBLOCK);
    u64::from_ne_bytes(seed) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{format, string::String};

    const MIB: u64 = 1 << 20;

    fn batches(chunks: &[(u64, u64)]) -> Vec<(usize, usize)> {
        let (mut all, mut rest) = (Vec::new(), chunks);
        while !rest.is_empty() {
            let (count, parts) = batch(rest);
            assert!(count > 0 && count <= MAX_CHUNKS && (count * parts <= MAX_PARTS || count == 1));
            assert!(rest.iter().take(count).all(|(_, len)| len.div_ceil(PART) <= parts as u64));
            all.push((count, parts));
            rest = &rest[count..];
        }
        all
    }

    #[test]
    fn chunks_of_different_sizes_share_a_batch() {
        let sizes = [64, 64, 86, 86, 54, 32].map(|mib| (0, mib * MIB));
        assert_eq!(batches(&sizes.repeat(30)), [(180, 22)]);
    }

    #[test]
    fn a_batch_is_no_larger_than_the_table() {
        assert_eq!(batches(&[(0, 2 * MIB); 3000]), [(1024, 1), (1024, 1), (952, 1)]);
        assert_eq!(batches(&[(0, 1024 * MIB); 100]), [(32, 256), (32, 256), (32, 256), (4, 256)]);
        assert_eq!(batches(&[]), []);
    }

    /// Computes the POSIX `cksum`: the CRC of the bytes followed by their number, and that number.
    fn cksum(bytes: &[u8]) -> String {
        let len = bytes.len().to_le_bytes();
        let len = &len[..len.len() - bytes.len().leading_zeros() as usize / 8];
        let crc = bytes.iter().chain(len).fold(0_u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte) << 24, |crc, _| crc << 1 ^ if crc >> 31 == 1 { 0x04c1_1db7 } else { 0 })
        });
        format!("{} {}", !crc, bytes.len())
    }

    #[test]
    fn the_fat_binary_was_made_from_this_ptx() {
        let identifier = format!("fingerprint.ptx {}\0", cksum(include_bytes!("fingerprint.ptx")));
        let is_there = FAT_BINARY.0.windows(identifier.len()).any(|bytes| bytes == identifier.as_bytes());
        assert!(is_there, "no {identifier:?}: run fingerprint.sh");
    }
}
