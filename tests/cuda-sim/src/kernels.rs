//! The kernels that the simulator knows, by name. A real GPU executes their PTX. The simulator computes
//! the same results in Rust.

use crate::{
    context::Context,
    error::{Done, Error},
    managed,
    memory::{self, PIECE, Touch},
};
use cuda_sim_gpus::{Config, Engine, EngineKind};
use cuda_sim_kernels::{Change, Fingerprint};
use std::{
    ptr,
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

/// The largest number of parameters. Each parameter has at most 8 bytes.
const MAX_PARAMS: usize = 4;
/// How long a kernel occupies the engine without interruption.
const SLICE: Duration = Duration::from_millis(1);

/// A kernel: its name in the PTX, the sizes of its parameters, and its computation.
#[derive(Debug)]
pub struct Kernel {
    pub name: &'static str,
    pub params: &'static [usize],
    run: fn(&Context, &[u64; MAX_PARAMS]) -> Done,
}

static KERNELS: &[Kernel] = &[
    Kernel { name: "empty", params: &[], run: |_, _| Ok(()) },
    Kernel {
        name: "fill_u32",
        params: &[8, 8, 4],
        run: |c, &[at, count, value, _]| each(c, at, count, Change::Fill(value as u32)),
    },
    Kernel {
        name: "add_u32",
        params: &[8, 8, 4],
        run: |c, &[at, count, value, _]| each(c, at, count, Change::Add(value as u32)),
    },
    Kernel {
        name: "mix_u32",
        params: &[8, 8, 4],
        run: |c, &[at, count, seed, _]| each(c, at, count, Change::Mix(seed as u32)),
    },
    Kernel {
        name: "unmix_u32",
        params: &[8, 8, 4],
        run: |c, &[at, count, seed, _]| each(c, at, count, Change::Unmix(seed as u32)),
    },
    Kernel { name: "sum_u32", params: &[8, 8, 8], run: sum },
    Kernel { name: "nvshare_fingerprint", params: &[8, 8, 8, 4], run: fingerprint },
    Kernel { name: "spin_ns", params: &[8], run: |c, &[ns, ..]| spin_ns(c, ns) },
    Kernel { name: "spin_until", params: &[8], run: |c, &[flag, ..]| spin_until(c, flag) },
];

pub fn all() -> impl Iterator<Item = &'static Kernel> {
    KERNELS.iter()
}

/// Returns the kernel of this name.
pub fn find(name: &str) -> Option<&'static Kernel> {
    all().find(|k| k.name == name)
}

/// The function to launch, and the number of threads. The results of simulated kernels do not depend on
/// the number of threads.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub function: usize,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
}

/// A kernel with its arguments.
#[derive(Clone, Debug)]
pub struct Launch {
    pub kernel: &'static Kernel,
    pub shape: Shape,
    pub args: [u64; MAX_PARAMS],
}

impl Launch {
    /// Copies the arguments from `kernelParams`, which contains a pointer to each argument.
    ///
    /// # Safety
    /// `params` must contain one pointer for each parameter of the kernel, to a value of that parameter's
    /// size.
    pub unsafe fn from_params(
        kernel: &'static Kernel,
        shape: Shape,
        params: *const *const u8,
    ) -> Result<Launch, Error> {
        let mut args = [0; MAX_PARAMS];
        if params.is_null() && !kernel.params.is_empty() {
            return Err(Error::INVALID_VALUE);
        }
        for (i, size) in kernel.params.iter().enumerate() {
            // SAFETY: the caller's contract. `size` is at most 8.
            unsafe { ptr::copy_nonoverlapping(*params.add(i), ptr::from_mut(&mut args[i]).cast(), *size) };
        }
        Ok(Launch { kernel, shape, args })
    }

    /// Copies the arguments from one buffer, in which each argument is aligned to its size.
    pub fn from_buffer(kernel: &'static Kernel, shape: Shape, buffer: &[u8]) -> Result<Launch, Error> {
        let mut args = [0; MAX_PARAMS];
        for (i, (offset, size)) in kernel.layout().enumerate() {
            let bytes = buffer.get(offset..offset + size).ok_or(Error::INVALID_VALUE)?;
            let mut word = [0; 8];
            word[..size].copy_from_slice(bytes);
            args[i] = u64::from_le_bytes(word);
        }
        Ok(Launch { kernel, shape, args })
    }

    pub fn instant(&self) -> bool {
        self.kernel.params.is_empty()
    }

    pub fn run(&self, context: &Context) -> Done {
        (self.kernel.run)(context, &self.args)
    }
}

impl Kernel {
    /// Returns the offset and the size of each parameter.
    pub fn layout(&self) -> impl Iterator<Item = (usize, usize)> {
        let mut end = 0_usize;
        self.params.iter().map(move |size| {
            let offset = end.next_multiple_of(*size);
            end = offset + size;
            (offset, *size)
        })
    }
}

/// How a kernel accesses the memory that it sweeps.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pass {
    Read,
    Write,
    Update,
}

/// Changes `count` elements at `at`.
fn each(context: &Context, at: u64, count: u64, change: Change) -> Done {
    let pass = if matches!(change, Change::Fill(_)) { Pass::Write } else { Pass::Update };
    sweep(context, at, count, pass, |first, elements, n| {
        // SAFETY: `elements` has `n` aligned elements while the sweep locks the table.
        unsafe { cuda_sim_kernels::change(elements, n, first, change) };
    })
}

fn sum(context: &Context, &[at, count, result, _]: &[u64; MAX_PARAMS]) -> Done {
    let mut sum = 0_u64;
    sweep(context, at, count, Pass::Read, |_, elements, n| {
        // SAFETY: `elements` has `n` aligned elements while the sweep locks the table.
        sum = sum.wrapping_add(unsafe { cuda_sim_kernels::sum(elements, n) });
    })?;
    if result % 8 != 0 {
        return Err(Error::MISALIGNED_ADDRESS);
    }
    managed::fault(result, 8, context.gpu);
    memory::touch(result, 8, Touch { gpu: context.gpu, write: true, copy: false }, |at, len| {
        if len == 8 {
            // SAFETY: `at` has eight writable bytes while the table is locked. They are aligned,
            // because `result` is, as checked above.
            unsafe { AtomicU64::from_ptr(at.cast()) }.fetch_add(sum, Ordering::Relaxed);
        }
    })
}

/// The computation of `preload/src/memory/fingerprint.ptx`, implemented independently. For each part of
/// a chunk it computes two sums, and whether the part only repeats the chunk's first word.
fn fingerprint(context: &Context, &[list, out, seed, words]: &[u64; MAX_PARAMS]) -> Done {
    let gpu = context.gpu;
    spin_ns(context, Config::get().fingerprint_time.as_nanos() as u64)?;
    let [chunks, parts]: [u64; 2] = memory::read(list, gpu)?;
    for chunk in 0..chunks {
        let [at, all_words]: [u64; 2] = memory::read(list + 16 * (1 + chunk), gpu)?;
        let value = u64::from(memory::read::<u32>(at, gpu)?);
        let value = value << 32 | value;
        for part in 0..parts {
            let (begin, end) = ((part * words).min(all_words), ((part + 1) * words).min(all_words));
            let mut print = Fingerprint::default();
            sweep(context, at + 16 * begin, 4 * (end - begin), Pass::Read, |first, elements, n| {
                // SAFETY: `elements` has `n` elements while the sweep locks the table.
                unsafe { print.add(elements.cast(), n / 4, begin + first / 4, seed, value) };
            })?;
            let Fingerprint { sums, differs } = print;
            memory::write(out + 32 * (chunk * parts + part), gpu, [sums[0], sums[1], differs, value])?;
        }
    }
    Ok(())
}

/// Processes memory piece by piece, and takes the time that the GPU would take.
fn sweep(context: &Context, at: u64, count: u64, pass: Pass, mut f: impl FnMut(u64, *mut u32, u64)) -> Done {
    let bytes = count.checked_mul(4).ok_or(Error::ILLEGAL_ADDRESS)?;
    if !at.is_multiple_of(4) {
        return Err(Error::MISALIGNED_ADDRESS);
    }
    let bandwidth = Config::get().gpu_bandwidth;
    let step = (bandwidth / 500).clamp(64 << 10, PIECE) & !4095;
    let touch = Touch { gpu: context.gpu, write: pass != Pass::Read, copy: false };
    let mut done = 0;
    while done < bytes {
        context.error()?;
        let len = step.min(bytes - done);
        managed::fault(at + done, len, context.gpu);
        let traffic = if pass == Pass::Update { 2 * len } else { len };
        let cost = Duration::from_nanos((u128::from(traffic) * 1_000_000_000 / u128::from(bandwidth)) as u64);
        Engine::get(context.gpu, EngineKind::Compute).run(cost, || {
            let mut first = done / 4;
            memory::touch(at + done, len, touch, |run, len| {
                f(first, run.cast(), len / 4);
                first += len / 4;
            })
        })?;
        done += len;
    }
    Ok(())
}

/// Keeps the GPU busy for `ns` nanoseconds. The time includes turns of other processes, as a clock
/// on the GPU would measure it.
fn spin_ns(context: &Context, ns: u64) -> Done {
    let end = Instant::now() + Duration::from_nanos(ns);
    loop {
        context.error()?;
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        Engine::get(context.gpu, EngineKind::Compute).run(left.min(SLICE), || {});
    }
}

/// Keeps the GPU busy until the program writes `flag`.
fn spin_until(context: &Context, flag: u64) -> Done {
    loop {
        context.error()?;
        if memory::read::<u32>(flag, context.gpu)? != 0 {
            return Ok(());
        }
        Engine::get(context.gpu, EngineKind::Compute).run(SLICE, || {});
        thread::yield_now();
    }
}
