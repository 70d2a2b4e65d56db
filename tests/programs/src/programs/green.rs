//! Work in a green context: a part of the GPU with separate streams.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, Stream, cu,
        late::{Resource, late_cu},
    },
    report::Report,
};

/// `CU_DEV_RESOURCE_TYPE_SM`
const SM: u32 = 1;
const DEFAULT_STREAM: u32 = 1;
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
const RELAXED: u32 = 2;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds, primary) =
        (args.size("mem", "16M"), args.size("rounds", "20"), args.size("primary", "1") != 0);
    let reps = args.size("reps", "20");
    // With this option, another green context is destroyed while one of its streams captures.
    let leaves_capture = args.size("leaves-capture", "0") != 0;
    cu!(cuInit(0))?;
    // With `primary`, creates the primary context first, as CUDA recommends. Otherwise the program
    // has only the green context.
    let opened = if primary { Some(Gpu::open(0)?) } else { None };
    let (green, context) = create()?;
    cu!(cuCtxSetCurrent(context))?;
    let gpu = match opened {
        Some(gpu) => gpu,
        None => Gpu::in_current(0, context)?,
    };
    if leaves_capture {
        leave_capture()?;
    }
    cu!(cuCtxSetCurrent(context))?;
    let mut stream = 0;
    late_cu!(cuGreenCtxStreamCreate(&mut stream, green, NON_BLOCKING, 0))?;
    let stream = Stream(stream);
    gpu.load()?;
    let buffer = Buffer::new(Kind::Alloc, memory as usize)?;
    gpu.fill(buffer.at, buffer.count(), 0, stream.0)?;
    for _ in 0..rounds {
        for _ in 0..reps {
            gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        }
        stream.synchronise()?;
    }
    gpu.synchronise()?;
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * rounds * reps)?;
    buffer.free()?;
    drop(stream);
    if primary {
        gpu.enter()?;
    }
    late_cu!(cuGreenCtxDestroy(green))?;
    report.integer("rounds", rounds);
    Ok(())
}

fn leave_capture() -> Outcome {
    let (green, context) = create()?;
    cu!(cuCtxSetCurrent(context))?;
    let mut stream = 0;
    late_cu!(cuGreenCtxStreamCreate(&mut stream, green, NON_BLOCKING, 0))?;
    cu!(cuStreamBeginCapture_v2(stream, RELAXED))?;
    late_cu!(cuGreenCtxDestroy(green))?;
    Ok(())
}

/// Creates a green context with a part of the first GPU, and converts it to a context.
fn create() -> Result<(usize, usize), Box<dyn std::error::Error>> {
    let (mut device, mut description, mut green, mut context) = (0, 0, 0, 0);
    let (mut all, mut part, mut rest, mut count) = (Resource([0; 18]), Resource([0; 18]), Resource([0; 18]), 1);
    cu!(cuDeviceGet(&mut device, 0))?;
    late_cu!(cuDeviceGetDevResource(device, &mut all, SM))?;
    late_cu!(cuDevSmResourceSplitByCount(&mut part, &mut count, &all, &mut rest, 0, 16))?;
    expect("groups of multiprocessors", count, 1)?;
    late_cu!(cuDevResourceGenerateDesc(&mut description, &part, 1))?;
    late_cu!(cuGreenCtxCreate(&mut green, description, device, DEFAULT_STREAM))?;
    late_cu!(cuCtxFromGreenCtx(&mut context, green))?;
    Ok((green, context))
}
