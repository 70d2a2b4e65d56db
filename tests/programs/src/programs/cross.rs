//! Work on two GPUs of one process, mostly while the context of the first ("near") GPU is current.
//! The work consists of copies with every copy function of the driver, and of work in streams of
//! the second ("far") GPU.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, Mapped, Stream, cu,
        late::{self, late_cu},
    },
    report::Report,
};
use std::{ffi::CString, ffi::c_void, ptr, sync::Arc, thread};

const ROW: usize = 4096;
const UNIFIED: u32 = 4;
const DEVICE: u32 = 2;
const HOST: u32 = 1;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "8M"), args.size("rounds", "20"));
    let pause = args.milliseconds("pause-ms", "10");
    let how = args.text("how", "unified");
    let mut work = Work::new(memory as usize)?;
    // Only the first call after a pause may have to wait for the lock. `--first` sets the number of
    // the first round, which determines the call that comes first.
    let first = args.size("first", "0");
    for round in first..first + rounds {
        work.near.enter()?;
        work.round(how, round as u32)?;
        thread::sleep(pause);
    }
    work.far.check("far")?;
    report.integer("rounds", rounds);
    report.integer("mem", memory);
    Ok(())
}

/// A GPU, a stream, and a buffer whose elements all have the same value.
struct Place {
    gpu: Arc<Gpu>,
    stream: Stream,
    buffer: Buffer,
    value: u32,
}

impl Place {
    fn new(ordinal: i32, memory: usize) -> crate::cuda::Result<Place> {
        let gpu = Gpu::open(ordinal)?;
        let (stream, buffer) = (Stream::new()?, Buffer::new(Kind::Alloc, memory)?);
        gpu.fill(buffer.at, buffer.count(), 1, stream.0)?;
        stream.synchronise()?;
        Ok(Place { gpu, stream, buffer, value: 1 })
    }

    fn enter(&self) -> crate::cuda::Result<()> {
        self.gpu.enter()
    }

    fn add(&mut self, value: u32) -> crate::cuda::Result<()> {
        self.value = self.value.wrapping_add(value);
        self.gpu.add(self.buffer.at, self.buffer.count(), value, self.stream.0)
    }

    /// Compares all elements with the expected value.
    fn check(&self, what: &str) -> Outcome {
        self.enter()?;
        self.stream.synchronise()?;
        let (at, count) = (self.buffer.at, self.buffer.count());
        expect(what, self.gpu.sum(at, count)?, count * u64::from(self.value))
    }
}

struct Work {
    near: Place,
    far: Place,
    host: Mapped,
    memory: usize,
    /// The kernel `add_u32`, which can be launched in any context.
    kernel: usize,
    graph: Option<usize>,
}

impl Work {
    fn new(memory: usize) -> Result<Work, Box<dyn std::error::Error>> {
        let (far, near) = (Place::new(1, memory)?, Place::new(0, memory)?);
        let (mut library, mut kernel) = (0, 0);
        let image = CString::new(include_str!("../kernels.ptx"))?;
        let none = ptr::null();
        late_cu!(cuLibraryLoadData(&mut library, image.as_ptr().cast(), none, ptr::null(), 0, none, ptr::null(), 0))?;
        late_cu!(cuLibraryGetKernel(&mut kernel, library, c"add_u32".as_ptr().cast()))?;
        Ok(Work { near, far, host: Mapped::new(memory)?, memory, kernel, graph: None })
    }

    fn round(&mut self, how: &str, round: u32) -> Outcome {
        match how {
            "streams" => self.streams(round)?,
            "graph" => self.captured()?,
            "devices" => self.on_both(round)?,
            "host" | "rows-host" => self.through_host(how == "host", round)?,
            "own" => {
                self.near.add(round)?;
                self.far.enter()?;
                self.far.add(round + 1)?;
            }
            _ => {
                self.near.add(round + 1)?;
                if how == "recorded" && round == 0 {
                    // Copies once before the capture, like real programs. Only the first copy shows
                    // the library that the GPUs belong together. Until then, the far GPU's memory
                    // may be evicted while a capture names it.
                    late_cu!(cuMemcpyAsync(self.far.buffer.at, self.near.buffer.at, 4, self.near.stream.0))?;
                }
                self.near.stream.synchronise()?;
                self.copy(how, round, (self.far.buffer.at, self.near.buffer.at))?;
                self.near.gpu.synchronise()?;
                self.far.value = self.near.value;
                self.far.enter()?;
                self.far.add(round + 2)?;
                self.far.stream.synchronise()?;
                self.far.check("far")?;
                self.near.enter()?;
                self.copy(how, round, (self.near.buffer.at, self.far.buffer.at))?;
                self.near.gpu.synchronise()?;
                self.near.value = self.far.value;
            }
        }
        self.near.check("near")?;
        // In this mode only the graph uses the far GPU.
        if how == "graph" { Ok(()) } else { self.far.check("far") }
    }

    /// Copies from one GPU to the other in the near context. Each round uses another call.
    fn copy(&self, how: &str, round: u32, (to, from): (u64, u64)) -> Outcome {
        let (len, stream) = (self.memory, self.near.stream.0);
        let side2 = |kind, device| late::Side2D { kind, device, pitch: ROW, ..Default::default() };
        let side3 = |kind, device| late::Side3D { kind, device, pitch: ROW, height: 1, ..Default::default() };
        let rows = late::Copy2D { from: side2(DEVICE, from), to: side2(UNIFIED, to), width: ROW, height: len / ROW };
        let layers = late::Copy3D { from: side3(UNIFIED, from), to: side3(DEVICE, to), extent: [ROW, 1, len / ROW] };
        let operand = |at| late::Operand { kind: 1, at, ..Default::default() };
        let batch =
            late::BatchCopy3D { from: operand(from), to: operand(to), extent: [len, 1, 1], ..Default::default() };
        match (how, round % 5) {
            ("unified", 0) => late_cu!(cuMemcpy(to, from, len))?,
            ("unified", 1) => late_cu!(cuMemcpyAsync(to, from, len, stream))?,
            ("unified", 2) => late_cu!(cuMemcpyDtoDAsync_v2(to, from, len, stream))?,
            ("unified", 3) => late_cu!(cuMemcpyAsync_ptsz(to, from, len, 0))?,
            ("unified", _) => late_cu!(cuMemcpy_ptds(to, from, len))?,
            ("rows", 0) => late_cu!(cuMemcpy2D_v2(&rows))?,
            ("rows", 1) => late_cu!(cuMemcpy2DAsync_v2(&rows, stream))?,
            ("rows", 2) => late_cu!(cuMemcpy3D_v2(&layers))?,
            ("rows", _) => late_cu!(cuMemcpy3DAsync_v2(&layers, stream))?,
            ("attributes", n) if n % 2 == 0 => {
                late_cu!(cuMemcpyWithAttributesAsync(to, from, len, &late::CopyAttributes::default(), stream))?
            }
            ("attributes", _) => late_cu!(cuMemcpy3DWithAttributesAsync(&batch, 0, stream))?,
            ("batches", n) if n % 2 == 0 => {
                late_cu!(cuMemcpyBatchAsync_v2(&to, &from, &len, 1, &late::CopyAttributes::default(), &0, 1, stream))?
            }
            ("batches", _) => late_cu!(cuMemcpy3DBatchAsync_v2(1, &batch, 0, stream))?,
            ("recorded", n) => self.recorded(|| match n % 2 {
                0 => late_cu!(cuMemcpyAsync(to, from, len, stream)),
                _ => late_cu!(cuMemcpy2DAsync_v2(&rows, stream)),
            })?,
            ("nodes", n) => self.by_node(n, &layers)?,
            ("arrays", _) => self.by_array((to, from))?,
            _ => return Err(format!("--how {how} is not known").into()),
        }
        Ok(())
    }

    /// Copies by launching a graph that captured the call.
    fn recorded(&self, copy: impl FnOnce() -> crate::cuda::Result<()>) -> Outcome {
        const GLOBAL: u32 = 0;
        let (mut graph, mut exec) = (0, 0);
        cu!(cuStreamBeginCapture_v2(self.near.stream.0, GLOBAL))?;
        copy()?;
        cu!(cuStreamEndCapture(self.near.stream.0, &mut graph))?;
        cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
        cu!(cuGraphLaunch(exec, self.near.stream.0))?;
        self.near.stream.synchronise()?;
        cu!(cuGraphExecDestroy(exec))?;
        Ok(cu!(cuGraphDestroy(graph))?)
    }

    /// Copies by a node of a graph. The node receives the addresses in one of four ways.
    fn by_node(&self, way: u32, copy: &late::Copy3D) -> Outcome {
        let (mut graph, mut node, mut exec, stream) = (0, 0, 0, self.near.stream.0);
        let at_home = late::Copy3D { to: copy.from, ..*copy };
        let first = if matches!(way, 0 | 3) { copy } else { &at_home };
        let context = self.near.gpu.context;
        late_cu!(cuGraphCreate(&mut graph, 0))?;
        // If both addresses are on one GPU, that GPU may be the far one.
        let nodes_context = if first.from.device == self.near.buffer.at { context } else { self.far.gpu.context };
        if way == 3 {
            late_cu!(cuGraphAddNode(&mut node, graph, ptr::null(), 0, &late::CopyNode::new(*copy, context)))?;
        } else {
            late_cu!(cuGraphAddMemcpyNode(&mut node, graph, ptr::null(), 0, first, nodes_context))?;
        }
        if way == 1 {
            late_cu!(cuGraphMemcpyNodeSetParams(node, copy))?;
        }
        cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
        if matches!(way, 2 | 4) {
            late_cu!(cuGraphExecMemcpyNodeSetParams(exec, node, copy, context))?;
        }
        cu!(cuGraphLaunch(exec, stream))?;
        self.near.stream.synchronise()?;
        cu!(cuGraphExecDestroy(exec))?;
        Ok(cu!(cuGraphDestroy(graph))?)
    }

    /// Copies through an array of the near GPU.
    fn by_array(&self, (to, from): (u64, u64)) -> Outcome {
        let mut array = 0;
        let descriptor = late::ArrayDescriptor { width: 16384, height: 0, format: 3, channels: 1 };
        late_cu!(cuArrayCreate_v2(&mut array, &descriptor))?;
        for offset in (0..self.memory as u64).step_by(65536) {
            late_cu!(cuMemcpyDtoA_v2(array, 0, from + offset, 65536))?;
            late_cu!(cuMemcpyAtoD_v2(to + offset, array, 0, 65536))?;
        }
        self.near.gpu.synchronise()?;
        Ok(late_cu!(cuArrayDestroy(array))?)
    }

    /// Copies out of the far GPU and back, while the near context is current.
    fn through_host(&mut self, plain: bool, round: u32) -> Outcome {
        self.far.enter()?;
        self.far.add(round + 1)?;
        self.far.stream.synchronise()?;
        self.near.enter()?;
        let (at, host, len, stream) = (self.far.buffer.at, self.host.host, self.memory, self.near.stream.0);
        let memory = late::Side2D { kind: DEVICE, device: at, pitch: ROW, ..Default::default() };
        let outside = late::Side2D { kind: HOST, host: host as usize, pitch: ROW, ..Default::default() };
        let (width, height) = (ROW, len / ROW);
        let (out, back) = (
            late::Copy2D { from: memory, to: outside, width, height },
            late::Copy2D { from: outside, to: memory, width, height },
        );
        match (plain, round % 3) {
            (true, 0) => cu!(cuMemcpyDtoH_v2(host, at, len))?,
            (true, 1) => late_cu!(cuMemcpy(host as u64, at, len))?,
            (true, _) => cu!(cuMemcpyDtoHAsync_v2(host, at, len, stream))?,
            (false, n) if n % 2 == 0 => late_cu!(cuMemcpy2D_v2(&out))?,
            (false, _) => late_cu!(cuMemcpy2DAsync_v2(&out, stream))?,
        }
        self.near.stream.synchronise()?;
        self.far.value = self.far.value.wrapping_add(1);
        // SAFETY: the host memory has `count` elements, and the copy is complete, so there is no
        // other access.
        let elements = unsafe { std::slice::from_raw_parts_mut(host.cast::<u32>(), len / 4) };
        elements.iter_mut().for_each(|element| *element = element.wrapping_add(1));
        match (plain, round % 3) {
            (true, 0) => late_cu!(cuMemcpyHtoD_v2(at, host, len))?,
            (true, 1) => late_cu!(cuMemcpy(at, host as u64, len))?,
            (true, _) => cu!(cuMemcpyHtoDAsync_v2(at, host, len, stream))?,
            (false, n) if n % 2 == 0 => late_cu!(cuMemcpy2D_v2(&back))?,
            (false, _) => late_cu!(cuMemcpy2DAsync_v2(&back, stream))?,
        }
        Ok(self.near.stream.synchronise()?)
    }

    /// Launches a kernel that was loaded from a library. Such a kernel runs on the GPU of its
    /// stream.
    fn add_there(&self, place: &Place, mut value: u32) -> crate::cuda::Result<()> {
        let (mut at, mut count) = (place.buffer.at, place.buffer.count());
        let mut arguments: [*mut c_void; 3] =
            [ptr::from_mut(&mut at).cast(), ptr::from_mut(&mut count).cast(), ptr::from_mut(&mut value).cast()];
        let (to, none) = (arguments.as_mut_ptr(), ptr::null_mut());
        cu!(cuLaunchKernel(self.kernel, 1024, 1, 1, 256, 1, 1, 0, place.stream.0, to, none))
    }

    /// Submits every kind of work to a stream of the far GPU. Each round starts with another kind.
    fn streams(&mut self, round: u32) -> Outcome {
        let (at, count, stream) = (self.far.buffer.at, self.far.buffer.count(), self.far.stream.0);
        for step in (0..4).map(|step| (step + round) % 4) {
            match step {
                0 => {
                    self.add_there(&self.far, 5)?;
                    self.far.value = self.far.value.wrapping_add(5);
                }
                1 => {
                    late_cu!(cuMemsetD32Async(at, round, count as usize, stream))?;
                    self.far.value = round;
                }
                2 => late_cu!(cuStreamWriteValue32(stream, at + 8, self.far.value, 0))?,
                _ => {
                    let value = u64::from(self.far.value);
                    let write = late::BatchOp { operation: late::WRITE, at, value, flags: 0, alias: 0, padding: 0 };
                    late_cu!(cuStreamBatchMemOp_v2(stream, 1, &write, 0))?;
                }
            }
            // During this pause the memory may be evicted before the next call.
            thread::sleep(std::time::Duration::from_millis(5));
        }
        Ok(())
    }

    /// Captures a graph in streams of both GPUs once, and launches it in every round.
    fn captured(&mut self) -> Outcome {
        const RELAXED: u32 = 2;
        let exec = match self.graph {
            Some(exec) => exec,
            None => {
                let (mut fork, mut join, mut graph, mut exec) = (0, 0, 0, 0);
                self.far.enter()?;
                cu!(cuEventCreate(&mut join, 2))?;
                self.near.enter()?;
                cu!(cuEventCreate(&mut fork, 2))?;
                cu!(cuStreamBeginCapture_v2(self.near.stream.0, RELAXED))?;
                self.add_there(&self.near, 1)?;
                cu!(cuEventRecord(fork, self.near.stream.0))?;
                cu!(cuStreamWaitEvent(self.far.stream.0, fork, 0))?;
                self.add_there(&self.far, 2)?;
                cu!(cuEventRecord(join, self.far.stream.0))?;
                cu!(cuStreamWaitEvent(self.near.stream.0, join, 0))?;
                cu!(cuStreamEndCapture(self.near.stream.0, &mut graph))?;
                cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
                *self.graph.insert(exec)
            }
        };
        cu!(cuGraphLaunch(exec, self.near.stream.0))?;
        self.near.stream.synchronise()?;
        self.near.value = self.near.value.wrapping_add(1);
        self.far.value = self.far.value.wrapping_add(2);
        Ok(())
    }

    /// One launch on both GPUs.
    fn on_both(&mut self, round: u32) -> Outcome {
        let mut values = [self.near.buffer.at, self.far.buffer.at].map(|at| (at, self.near.buffer.count(), round));
        let mut arguments: Vec<[*mut c_void; 3]> = values
            .iter_mut()
            .map(|(at, count, value)| {
                [ptr::from_mut(at).cast(), ptr::from_mut(count).cast(), ptr::from_mut(value).cast()]
            })
            .collect();
        let streams = [self.near.stream.0, self.far.stream.0];
        let launches: Vec<_> = streams
            .into_iter()
            .zip(&mut arguments)
            .map(|(stream, arguments)| late::LaunchParams {
                function: self.kernel,
                grid: [1024, 1, 1],
                block: [256, 1, 1],
                shared: 0,
                stream,
                params: arguments.as_mut_ptr(),
            })
            .collect();
        late_cu!(cuLaunchCooperativeKernelMultiDevice(launches.as_ptr(), 2, 0))?;
        for place in [&mut self.near, &mut self.far] {
            place.value = place.value.wrapping_add(round);
        }
        Ok(())
    }
}
