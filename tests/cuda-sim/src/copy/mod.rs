//! Copies. Each `cuMemcpy*` becomes one box of bytes that moves from one place to another.

mod batches;
mod shapes;

pub use batches::*;
pub use shapes::*;

use crate::{
    array,
    context::{self, Context},
    error::{Done, Error},
    managed,
    memory::{self, Backing, PIECE, Space, Touch, space},
    stream::{self, Flavour, Stream},
    work::Work,
};
use cuda_sim_gpus::{Config, Engine, EngineKind, host_link};
use std::{ptr, sync::Arc, time::Duration};

/// The largest asynchronous copy from pageable memory, in bytes, that is staged immediately. A
/// larger copy blocks the caller.
const STAGED: u64 = 64 << 10;

/// The kind of memory on one side of a copy.
#[derive(Clone, Debug)]
enum Side {
    /// Device memory and managed memory, accessed through the table.
    Device,
    /// Host memory that the GPU can access directly.
    Pinned,
    Pageable,
    /// Bytes that were read when the copy was submitted.
    Staged(Arc<[u8]>),
}

/// One side of a copy: the position of its first byte, and the pitches of rows and slices.
#[derive(Clone, Debug)]
struct End {
    side: Side,
    at: u64,
    pitch: u64,
    slice: u64,
    /// The GPU that accesses this side; `None` for the stream's GPU.
    gpu: Option<usize>,
}

/// A box of bytes to copy.
#[derive(Clone, Debug)]
pub struct Copy {
    to: End,
    from: End,
    width: u64,
    height: u64,
    depth: u64,
    /// True if the two sides are on different GPUs.
    peer: bool,
}

/// Pointers and lengths of the runs that form one contiguous range.
type Runs = Vec<(*mut u8, u64)>;

impl End {
    fn linear(side: Side, at: u64, len: u64) -> End {
        End { side, at, pitch: len, slice: len, gpu: None }
    }

    /// Returns this end, accessed by the GPU of `context`. Used for copies between peers.
    fn by(self, context: &Context) -> End {
        End { gpu: Some(context.gpu), ..self }
    }

    fn device(&self) -> bool {
        matches!(self.side, Side::Device)
    }

    fn runs(&self, space: &Space, at: u64, len: u64, gpu: usize, write: bool) -> Result<Runs, Error> {
        match &self.side {
            Side::Device => space.runs(at, len, Touch { gpu: self.gpu.unwrap_or(gpu), write, copy: true }),
            Side::Pinned if !space.covers(at, len) => Err(Error::ILLEGAL_ADDRESS),
            Side::Pinned | Side::Pageable => Ok(vec![(at as *mut u8, len)]),
            Side::Staged(bytes) => Ok(vec![(bytes.as_ptr().cast_mut().wrapping_add(at as usize), len)]),
        }
    }
}

impl Copy {
    /// Executes the copy in pieces.
    pub fn run(&self, context: &Context) -> Done {
        let contiguous =
            (self.height <= 1 || (self.to.pitch == self.width && self.from.pitch == self.width)) && self.depth <= 1;
        let (width, height) = if contiguous { (self.width * self.height, 1) } else { (self.width, self.height) };
        for z in 0..self.depth {
            for y in 0..height {
                let to = self.to.at + z * self.to.slice + y * self.to.pitch;
                let from = self.from.at + z * self.from.slice + y * self.from.pitch;
                self.line(context, to, from, width)?;
            }
        }
        Ok(())
    }

    fn line(&self, context: &Context, to: u64, from: u64, len: u64) -> Done {
        let (engine, bandwidth) = self.route();
        let step = (bandwidth / 500).clamp(64 << 10, PIECE) & !4095;
        let mut done = 0;
        while done < len {
            context.error()?;
            let piece = step.min(len - done);
            for (end, at) in [(&self.to, to), (&self.from, from)] {
                if end.device() {
                    managed::fault(at + done, piece, context.gpu);
                }
            }
            let cost = Duration::from_nanos((u128::from(piece) * 1_000_000_000 / u128::from(bandwidth)) as u64);
            Engine::get(context.gpu, engine).run(cost, || {
                let copied = self.piece(context.gpu, to + done, from + done, piece);
                if engine != EngineKind::Compute && !self.peer {
                    host_link::wait_for_host(piece);
                }
                copied
            })?;
            done += piece;
        }
        Ok(())
    }

    fn piece(&self, gpu: usize, to: u64, from: u64, len: u64) -> Done {
        let space = space();
        let mut to = self.to.runs(&space, to, len, gpu, true)?.into_iter();
        let mut from = self.from.runs(&space, from, len, gpu, false)?.into_iter();
        let (mut target, mut source) = (to.next(), from.next());
        while let (Some((to_at, to_len)), Some((from_at, from_len))) = (target, source) {
            let n = to_len.min(from_len);
            // SAFETY: device runs are valid while `space` is locked, and by the API's contract host
            // runs are valid. `ptr::copy` permits overlapping sides.
            unsafe { ptr::copy(from_at, to_at, n as usize) };
            target = if n < to_len { Some((to_at.wrapping_add(n as usize), to_len - n)) } else { to.next() };
            source = if n < from_len { Some((from_at.wrapping_add(n as usize), from_len - n)) } else { from.next() };
        }
        Ok(())
    }

    /// Returns the engine and the bandwidth of the copy.
    fn route(&self) -> (EngineKind, u64) {
        let config = Config::get();
        let host = |side: &Side| {
            if matches!(side, Side::Pageable | Side::Staged(_)) {
                config.pageable_bandwidth
            } else {
                config.link_bandwidth
            }
        };
        match (self.to.device(), self.from.device()) {
            (true, true) if self.peer => (EngineKind::Out, config.link_bandwidth),
            (true, true) => (EngineKind::Compute, (config.gpu_bandwidth / 2).max(1)),
            (true, false) => (EngineKind::In, host(&self.from.side)),
            (false, _) => (EngineKind::Out, host(&self.to.side)),
        }
    }

    fn pageable(&self) -> bool {
        matches!(self.to.side, Side::Pageable) || matches!(self.from.side, Side::Pageable)
    }

    /// Reads the bytes of a small pageable source immediately.
    fn stage(&mut self) {
        let len = self.width * self.height * self.depth;
        if matches!(self.from.side, Side::Pageable) && self.height == 1 && self.depth == 1 && len <= STAGED {
            // SAFETY: by the API's contract, the source has `len` bytes.
            let bytes = unsafe { std::slice::from_raw_parts(self.from.at as *const u8, len as usize) };
            self.from = End::linear(Side::Staged(bytes.into()), 0, len);
        }
    }

    fn check(&mut self, context: &Context) -> Done {
        let space = space();
        let mut gpus = [None, None];
        for (i, (end, write)) in [(&self.to, true), (&self.from, false)].into_iter().enumerate() {
            if end.device() {
                let last = (self.depth - 1) * end.slice + (self.height - 1) * end.pitch + self.width;
                end.runs(&space, end.at, last, context.gpu, write).map_err(|_| Error::INVALID_VALUE)?;
                gpus[i] = space.at(end.at).and_then(memory::Mapping::gpu);
            }
        }
        self.peer = matches!(gpus, [Some(a), Some(b)] if a != b);
        Ok(())
    }
}

/// Submits a copy to a stream. Waits for the copy if `wait` is set, or if one side is pageable and was
/// not staged.
fn submit(stream: &Arc<Stream>, mut copy: Copy, wait: bool) -> Done {
    stream.context.error()?;
    if copy.width == 0 || copy.height == 0 || copy.depth == 0 {
        return Ok(());
    }
    copy.check(&stream.context)?;
    if !wait && !crate::capture::capturing(stream) {
        copy.stage();
    }
    let wait = wait || copy.pageable();
    match stream.submit(Work::Copy(Arc::new(copy)))? {
        Some(point) if wait => {
            point.wait();
            stream.context.error()
        }
        _ => Ok(()),
    }
}

fn host(at: u64) -> Result<Side, Error> {
    if at == 0 {
        return Err(Error::INVALID_VALUE);
    }
    Ok(match space().at(at).map(|m| &m.backing) {
        Some(Backing::Chunk { .. } | Backing::Managed(_)) => Side::Device,
        Some(Backing::Host { .. }) => Side::Pinned,
        None => Side::Pageable,
    })
}

fn device(at: u64) -> Result<Side, Error> {
    match space().at(at).map(|m| &m.backing) {
        Some(Backing::Host { .. }) => Ok(Side::Pinned),
        Some(_) => Ok(Side::Device),
        None => Err(Error::INVALID_VALUE),
    }
}

fn linear(flavour: Flavour, to: (Side, u64), from: (Side, u64), len: usize, stream: usize, wait: bool) -> Done {
    let len = len as u64;
    let stream = stream::of(stream, flavour)?;
    let copy = Copy {
        to: End::linear(to.0, to.1, len),
        from: End::linear(from.0, from.1, len),
        width: len,
        height: 1,
        depth: 1,
        peer: false,
    };
    submit(&stream, copy, wait)
}

/// Returns the result of a zero-byte copy, which accesses no memory.
fn nothing(flavour: Flavour, stream: usize) -> Done {
    stream::of(stream, flavour)?.context.error()
}

/// `cuMemcpy`
pub fn any(flavour: Flavour, to: u64, from: u64, len: usize) -> Done {
    if len == 0 {
        return nothing(flavour, 0);
    }
    context::healthy()?;
    linear(flavour, (host(to)?, to), (host(from)?, from), len, 0, true)
}

/// `cuMemcpyAsync`
pub fn any_async(flavour: Flavour, to: u64, from: u64, len: usize, stream: usize) -> Done {
    if len == 0 {
        return nothing(flavour, stream);
    }
    context::healthy()?;
    linear(flavour, (host(to)?, to), (host(from)?, from), len, stream, false)
}

/// `cuMemcpyHtoD`
pub fn to_device(flavour: Flavour, to: u64, from: u64, len: usize) -> Done {
    if len == 0 {
        return nothing(flavour, 0);
    }
    context::healthy()?;
    linear(flavour, (device(to)?, to), (host(from)?, from), len, 0, true)
}

/// `cuMemcpyHtoDAsync`
pub fn to_device_async(flavour: Flavour, to: u64, from: u64, len: usize, stream: usize) -> Done {
    if len == 0 {
        return nothing(flavour, stream);
    }
    context::healthy()?;
    linear(flavour, (device(to)?, to), (host(from)?, from), len, stream, false)
}

/// `cuMemcpyDtoH`
pub fn to_host(flavour: Flavour, to: u64, from: u64, len: usize) -> Done {
    if len == 0 {
        return nothing(flavour, 0);
    }
    context::healthy()?;
    linear(flavour, (host(to)?, to), (device(from)?, from), len, 0, true)
}

/// `cuMemcpyDtoHAsync`
pub fn to_host_async(flavour: Flavour, to: u64, from: u64, len: usize, stream: usize) -> Done {
    if len == 0 {
        return nothing(flavour, stream);
    }
    context::healthy()?;
    linear(flavour, (host(to)?, to), (device(from)?, from), len, stream, false)
}

/// `cuMemcpyDtoD`: ordered like any other copy, but asynchronous.
pub fn on_device(flavour: Flavour, to: u64, from: u64, len: usize) -> Done {
    on_device_async(flavour, to, from, len, 0)
}

/// `cuMemcpyDtoDAsync`
pub fn on_device_async(flavour: Flavour, to: u64, from: u64, len: usize, stream: usize) -> Done {
    if len == 0 {
        return nothing(flavour, stream);
    }
    context::healthy()?;
    linear(flavour, (device(to)?, to), (device(from)?, from), len, stream, false)
}

/// `cuMemcpyPeer`
pub fn peer(flavour: Flavour, to: u64, to_context: usize, from: u64, from_context: usize, len: usize) -> Done {
    peer_async(flavour, to, to_context, from, from_context, len, 0)
}

/// `cuMemcpyPeerAsync`
pub fn peer_async(
    flavour: Flavour,
    to: u64,
    to_context: usize,
    from: u64,
    from_context: usize,
    len: usize,
    stream: usize,
) -> Done {
    let (to_context, from_context) = (context::of(to_context)?, context::of(from_context)?);
    if len == 0 {
        return nothing(flavour, stream);
    }
    context::healthy()?;
    let stream = stream::of(stream, flavour)?;
    let len = len as u64;
    let copy = Copy {
        to: End::linear(device(to)?, to, len).by(&to_context),
        from: End::linear(device(from)?, from, len).by(&from_context),
        width: len,
        height: 1,
        depth: 1,
        peer: false,
    };
    submit(&stream, copy, false)
}

fn boxed(flavour: Flavour, copy: Copy3D, stream: usize, wait: bool) -> Done {
    let stream = stream::of(stream, flavour)?;
    stream.context.error()?;
    if copy.width == 0 || copy.height == 0 || copy.depth == 0 {
        return Ok(());
    }
    submit(&stream, copy.decode()?, wait)
}

/// `cuMemcpy2D`, `cuMemcpy2DUnaligned`
pub fn rect(flavour: Flavour, copy: *const Copy2D) -> Done {
    boxed(flavour, crate::arg(copy)?.into(), 0, true)
}

/// `cuMemcpy2DAsync`
pub fn rect_async(flavour: Flavour, copy: *const Copy2D, stream: usize) -> Done {
    boxed(flavour, crate::arg(copy)?.into(), stream, false)
}

/// `cuMemcpy3D`
pub fn cuboid(flavour: Flavour, copy: *const Copy3D) -> Done {
    boxed(flavour, crate::arg(copy)?, 0, true)
}

/// `cuMemcpy3DAsync`
pub fn cuboid_async(flavour: Flavour, copy: *const Copy3D, stream: usize) -> Done {
    boxed(flavour, crate::arg(copy)?, stream, false)
}

/// `cuMemcpy3DPeer`
pub fn peer_cuboid(flavour: Flavour, copy: *const Copy3D) -> Done {
    peer_cuboid_async(flavour, copy, 0)
}

/// `cuMemcpy3DPeerAsync`
pub fn peer_cuboid_async(flavour: Flavour, copy: *const Copy3D, stream: usize) -> Done {
    let described = crate::arg(copy)?;
    let (to, from) = (context::of(described.to.context)?, context::of(described.from.context)?);
    let stream = stream::of(stream, flavour)?;
    stream.context.error()?;
    if described.width == 0 || described.height == 0 || described.depth == 0 {
        return Ok(());
    }
    let copy = described.decode()?;
    submit(&stream, Copy { to: copy.to.by(&to), from: copy.from.by(&from), ..copy }, false)
}

/// Copies between two addresses, for arrays.
pub fn between(flavour: Flavour, to: u64, from: u64, len: usize, stream: usize, wait: bool) -> Done {
    context::healthy()?;
    linear(flavour, (host(to)?, to), (host(from)?, from), len, stream, wait)
}
