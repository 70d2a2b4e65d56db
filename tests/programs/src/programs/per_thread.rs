//! A program built with `--default-stream per-thread`: each thread has its own stream 0. The
//! program uses the functions that end in `_ptsz` and `_ptds`, which it looks up as `CUDA_LOOKUP`
//! selects.

use super::{Outcome, Random, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Error, Gpu, Kind, api, cu},
    report::Report,
};
use std::{
    env,
    ffi::{CString, c_char, c_void},
    mem, ptr, thread,
};

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`
const PER_THREAD: u64 = 2;
const SAMPLES: usize = 64;

type P = *mut c_void;
type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut P, i32, u64, *mut u32) -> u32;
type Launch = unsafe extern "C" fn(usize, u32, u32, u32, u32, u32, u32, u32, usize, *mut P, *mut P) -> u32;
type Set = unsafe extern "C" fn(u64, u32, usize) -> u32;
type CopyOut = unsafe extern "C" fn(*mut u32, u64, usize) -> u32;
type Synchronise = unsafe extern "C" fn(usize) -> u32;

#[derive(Clone, Copy)]
struct Calls {
    launch: Launch,
    set: Set,
    copy_out: CopyOut,
    synchronise: Synchronise,
}

impl Calls {
    fn find() -> Calls {
        let by_version = env::var("CUDA_LOOKUP").is_ok_and(|way| way == "getproc");
        let find = |name: &str, version: i32, symbol: &str| -> P {
            if !by_version {
                return api::dlsym(symbol);
            }
            // SAFETY: the type is the declaration of the CUDA headers.
            let ask = unsafe { mem::transmute::<P, GetProcAddress>(api::dlsym("cuGetProcAddress_v2")) };
            let text = CString::new(name).expect("no NUL in a name");
            let (mut found, mut status) = (ptr::null_mut(), 0);
            // SAFETY: `text` is a C string, and both result pointers are to live values.
            let code = unsafe { ask(text.as_ptr().cast(), &mut found, version, PER_THREAD, &mut status) };
            assert!(code == 0 && !found.is_null(), "cuGetProcAddress({name}): error {code}, status {status}");
            found
        };
        // SAFETY: the types are the declarations of the CUDA headers.
        unsafe {
            Calls {
                launch: mem::transmute::<P, Launch>(find("cuLaunchKernel", 7000, "cuLaunchKernel_ptsz")),
                set: mem::transmute::<P, Set>(find("cuMemsetD32", 7000, "cuMemsetD32_v2_ptds")),
                copy_out: mem::transmute::<P, CopyOut>(find("cuMemcpyDtoH", 7000, "cuMemcpyDtoH_v2_ptds")),
                synchronise: mem::transmute::<P, Synchronise>(find(
                    "cuStreamSynchronize",
                    7000,
                    "cuStreamSynchronize_ptsz",
                )),
            }
        }
    }

    fn add(&self, function: usize, buffer: &Buffer, mut value: u32) -> Outcome {
        let (mut at, mut count) = (buffer.at, buffer.count());
        let mut args: [P; 3] =
            [ptr::from_mut(&mut at).cast(), ptr::from_mut(&mut count).cast(), ptr::from_mut(&mut value).cast()];
        // SAFETY: the arguments match the kernel's three parameters.
        let code = unsafe { (self.launch)(function, 1024, 1, 1, 256, 1, 1, 0, 0, args.as_mut_ptr(), ptr::null_mut()) };
        done("cuLaunchKernel", code)
    }
}

fn done(call: &'static str, code: u32) -> Outcome {
    if code == 0 { Ok(()) } else { Err(Error { call, code }.into()) }
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, threads) = (args.size("mem", "16M"), args.size("threads", "3").max(1));
    let rounds = args.size("rounds", "20");
    let gpu = Gpu::open(0)?;
    let (mut module, mut add) = (0, 0);
    let image = CString::new(include_str!("../kernels.ptx"))?;
    cu!(cuModuleLoadData(&mut module, image.as_ptr()))?;
    cu!(cuModuleGetFunction(&mut add, module, c"add_u32".as_ptr()))?;
    let calls = Calls::find();
    let workers: Vec<_> = (0..threads)
        .map(|t| {
            let gpu = gpu.clone();
            let len = (memory / threads) as usize & !3;
            thread::spawn(move || work(&gpu, calls, add, len, t as u32, rounds as u32).map_err(|e| e.to_string()))
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| "a thread panicked")??;
    }
    report.integer("threads", threads);
    Ok(())
}

fn work(gpu: &Gpu, calls: Calls, add: usize, len: usize, thread: u32, rounds: u32) -> Outcome {
    gpu.enter()?;
    let buffer = Buffer::new(Kind::Alloc, len)?;
    // SAFETY: the buffer has this number of elements.
    done("cuMemsetD32", unsafe { (calls.set)(buffer.at, thread, buffer.count() as usize) })?;
    for round in 0..rounds {
        calls.add(add, &buffer, round)?;
        // SAFETY: the call takes no pointers.
        done("cuStreamSynchronize", unsafe { (calls.synchronise)(0) })?;
    }
    let mut random = Random::new(thread.into());
    for _ in 0..SAMPLES {
        let mut value = 0;
        let at = buffer.at + 4 * random.below(buffer.count());
        // SAFETY: `value` is a live place for one element.
        done("cuMemcpyDtoH", unsafe { (calls.copy_out)(&mut value, at, 4) })?;
        expect("element", value, thread + rounds * rounds.saturating_sub(1) / 2)?;
    }
    buffer.free()?;
    Ok(())
}
