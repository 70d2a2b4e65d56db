//! Stream capture: the streams that capture into a graph, and the calls that invalidate a capture.

use crate::{
    context::Context,
    error::{Done, Error},
    graph::{self, Graph},
    out,
    registry::handle_of,
    stream::{self, Flavour, Kind, Stream},
    work::Work,
};
use std::{
    cell::Cell,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, ThreadId},
};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

/// One capture, from begin to end.
#[derive(Debug)]
pub struct Capture {
    id: u64,
    mode: u32,
    thread: ThreadId,
    /// The stream in which the capture began.
    origin: usize,
    context: Arc<Context>,
    graph: Arc<Graph>,
    invalid: AtomicBool,
    streams: Mutex<Vec<Arc<Stream>>>,
}

/// The position of a stream or an event in a capture: the nodes on which the next work at this
/// position depends.
#[derive(Clone, Debug)]
pub struct Place {
    capture: Arc<Capture>,
    tail: Vec<usize>,
}

static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());
/// The number of captures. While it is 0, calls skip all checks.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

/// Returns the captures that have not ended, including invalidated ones.
fn active() -> Vec<Arc<Capture>> {
    if COUNT.load(Ordering::Acquire) == 0 { Vec::new() } else { lock(&ACTIVE).clone() }
}

impl Capture {
    fn valid(&self) -> bool {
        !self.invalid.load(Ordering::Acquire)
    }

    fn invalidate(&self) {
        self.invalid.store(true, Ordering::Release);
    }

    fn end(self: &Arc<Self>) {
        for stream in lock(&self.streams).drain(..) {
            *lock(&stream.capture) = None;
        }
        let mut active = lock(&ACTIVE);
        active.retain(|c| !Arc::ptr_eq(c, self));
        COUNT.store(active.len(), Ordering::Release);
    }
}

/// Whether the stream captures.
pub fn capturing(stream: &Stream) -> bool {
    COUNT.load(Ordering::Acquire) != 0 && lock(&stream.capture).is_some()
}

/// If the stream is the legacy stream, invalidates the captures of blocking streams, because work
/// of the legacy stream would depend on captured work.
fn implicit(stream: &Stream) -> Done {
    if stream.kind != Kind::Null || COUNT.load(Ordering::Acquire) == 0 {
        return Ok(());
    }
    let blocking = stream.context.streams().into_iter().filter(|s| s.blocking());
    let captures: Vec<_> = blocking.filter_map(|s| lock(&s.capture).as_ref().map(|p| p.capture.clone())).collect();
    captures.iter().for_each(|c| c.invalidate());
    if captures.is_empty() { Ok(()) } else { Err(Error::STREAM_CAPTURE_IMPLICIT) }
}

/// Adds work to the graph if the stream captures. Otherwise returns the work to the caller.
pub fn add(stream: &Arc<Stream>, work: Work) -> Result<Option<Work>, Error> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(Some(work));
    }
    implicit(stream)?;
    let mut place = lock(&stream.capture);
    let Some(place) = place.as_mut() else { return Ok(Some(work)) };
    if !place.capture.valid() {
        return Err(Error::STREAM_CAPTURE_INVALIDATED);
    }
    let is_elsewhere = !Arc::ptr_eq(&stream.context, &place.capture.context);
    let work = if is_elsewhere { Work::In(stream.context.clone(), Arc::new(work)) } else { work };
    let node = place.capture.graph.add(work, &place.tail)?;
    place.tail = vec![node];
    Ok(None)
}

/// Returns the stream's position in its capture, if it captures.
pub fn place(stream: &Arc<Stream>) -> Result<Option<Place>, Error> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return Ok(None);
    }
    match &*lock(&stream.capture) {
        Some(place) if !place.capture.valid() => Err(Error::STREAM_CAPTURE_INVALIDATED),
        place => Ok(place.clone()),
    }
}

/// Makes a stream that waits for a captured event join the event's capture.
pub fn join(stream: &Arc<Stream>, event: Place) -> Done {
    if !event.capture.valid() {
        return Err(Error::STREAM_CAPTURE_INVALIDATED);
    }
    if !lock(&ACTIVE).iter().any(|c| Arc::ptr_eq(c, &event.capture)) {
        return Err(Error::INVALID_VALUE);
    }
    if stream.kind == Kind::Null {
        event.capture.invalidate();
        return Err(Error::STREAM_CAPTURE_IMPLICIT);
    }
    let mut own = lock(&stream.capture);
    match own.as_mut() {
        Some(own) if Arc::ptr_eq(&own.capture, &event.capture) => {
            own.tail.extend(event.tail);
            own.tail.sort_unstable();
            own.tail.dedup();
        }
        Some(own) => {
            own.capture.invalidate();
            event.capture.invalidate();
            return Err(Error::STREAM_CAPTURE_MERGE);
        }
        None => {
            lock(&event.capture.streams).push(stream.clone());
            *own = Some(event);
        }
    }
    Ok(())
}

/// Checks a capturing stream that waits for an event. If the event's work is not captured, invalidates
/// the capture.
pub fn isolated(stream: &Stream, never_recorded: bool) -> Done {
    match &*lock(&stream.capture) {
        Some(place) if !never_recorded => {
            place.capture.invalidate();
            Err(Error::STREAM_CAPTURE_ISOLATION)
        }
        _ => Ok(()),
    }
}

/// Invalidates an event's capture, for functions that the driver forbids for captured events.
/// Returns the function's error, which differs if the capture has already ended.
pub fn forbid_at(event: &Place) -> Error {
    let active = event.capture.valid() && lock(&ACTIVE).iter().any(|c| Arc::ptr_eq(c, &event.capture));
    event.capture.invalidate();
    if active { Error::CAPTURED_EVENT } else { Error::INVALID_VALUE }
}

/// Invalidates the captures that forbid the current call. Whether a capture forbids the call
/// depends on its mode and on the calling thread. Returns an error if any capture forbids the call.
pub fn forbid() -> Done {
    let own_mode = MODE.get();
    let here = thread::current().id();
    let mut forbidden = false;
    for capture in active().iter().filter(|c| c.mode != RELAXED) {
        let same = capture.thread == here;
        let hit = match own_mode {
            GLOBAL => same || capture.mode == GLOBAL,
            THREAD_LOCAL => same,
            _ => false,
        };
        if hit {
            capture.invalidate();
            forbidden = true;
        }
    }
    if forbidden { Err(Error::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// Invalidates all captures in the context, for calls that every capture in the context forbids.
/// Returns an error if there is any capture.
pub fn forbid_in(context: &Arc<Context>) -> Done {
    let active = active();
    if active.is_empty() {
        return Ok(());
    }
    let family = context.family();
    let hit: Vec<_> = active.iter().filter(|c| family.iter().any(|f| Arc::ptr_eq(&c.context, f))).collect();
    hit.iter().for_each(|c| c.invalidate());
    if hit.is_empty() { Ok(()) } else { Err(Error::STREAM_CAPTURE_UNSUPPORTED) }
}

/// Invalidates the capture of this stream, for calls that a capture of their stream forbids.
/// Returns an error if the stream captures.
pub fn forbid_on(stream: &Stream) -> Done {
    implicit(stream)?;
    match &*lock(&stream.capture) {
        Some(place) => {
            place.capture.invalidate();
            Err(Error::STREAM_CAPTURE_UNSUPPORTED)
        }
        None => Ok(()),
    }
}

/// Handles the destruction of a stream. Invalidates the capture that the stream belongs to. If that
/// capture began in the stream, it also ends, without an error (observed on an H200, driver 580).
pub fn abandon(stream: &Arc<Stream>) {
    let place = lock(&stream.capture).clone();
    if let Some(place) = place {
        place.capture.invalidate();
        if place.capture.origin == handle_of(stream) {
            place.capture.end();
        }
    }
}

/// Invalidates and ends the captures of a context that is being destroyed.
pub fn forget(context: &Arc<Context>) {
    for capture in active().iter().filter(|c| Arc::ptr_eq(&c.context, context)) {
        capture.invalidate();
        capture.end();
    }
}

/// `cuStreamBeginCapture`
pub fn begin_global(flavour: Flavour, stream: usize) -> Done {
    begin(flavour, stream, GLOBAL)
}

/// `cuStreamBeginCapture_v2`
pub fn begin(flavour: Flavour, stream: usize, mode: u32) -> Done {
    start(flavour, stream, mode, None, Vec::new())
}

/// `cuStreamBeginCaptureToGraph`
pub fn begin_to_graph(
    flavour: Flavour,
    stream: usize,
    graph: usize,
    nodes: *const usize,
    _edges: *const u8,
    count: usize,
    mode: u32,
) -> Done {
    start(flavour, stream, mode, Some(graph::of(graph)?), graph::list(nodes, count)?)
}

fn start(flavour: Flavour, stream: usize, mode: u32, graph: Option<Arc<Graph>>, tail: Vec<usize>) -> Done {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let stream = stream::of(stream, flavour)?;
    stream.context.error()?;
    if mode > RELAXED {
        return Err(Error::INVALID_VALUE);
    }
    if stream.kind == Kind::Null {
        return Err(Error::STREAM_CAPTURE_UNSUPPORTED);
    }
    let mut place = lock(&stream.capture);
    if place.is_some() {
        return Err(Error::ILLEGAL_STATE);
    }
    let capture = Arc::new(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        mode,
        thread: thread::current().id(),
        origin: handle_of(&stream),
        context: stream.context.clone(),
        graph: graph.unwrap_or_else(Graph::new),
        invalid: AtomicBool::new(false),
        streams: Mutex::new(vec![stream.clone()]),
    });
    *place = Some(Place { capture: capture.clone(), tail });
    let mut active = lock(&ACTIVE);
    active.push(capture);
    COUNT.store(active.len(), Ordering::Release);
    Ok(())
}

/// `cuStreamEndCapture`
pub fn end(flavour: Flavour, stream: usize, graph: *mut usize) -> Done {
    let stream = stream::of(stream, flavour)?;
    let place = lock(&stream.capture).clone().ok_or(Error::ILLEGAL_STATE)?;
    let capture = &place.capture;
    if capture.origin != handle_of(&stream) {
        capture.invalidate();
        return Err(Error::STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(Error::STREAM_CAPTURE_WRONG_THREAD);
    }
    let tails: Vec<usize> =
        lock(&capture.streams).iter().filter_map(|s| Some(lock(&s.capture).as_ref()?.tail.clone())).flatten().collect();
    let joined = capture.graph.ancestors(&place.tail);
    let result = match (capture.valid(), tails.iter().all(|node| joined.contains(node))) {
        (false, _) => Err(Error::STREAM_CAPTURE_INVALIDATED),
        (true, false) => Err(Error::STREAM_CAPTURE_UNJOINED),
        (true, true) => Ok(graph::keep(&capture.graph)),
    };
    capture.end();
    crate::out_if(graph, *result.as_ref().unwrap_or(&0));
    result.map(drop)
}

/// `cuStreamIsCapturing`
pub fn is_capturing(flavour: Flavour, stream: usize, status: *mut u32) -> Done {
    let stream = stream::of(stream, flavour)?;
    implicit_query(&stream)?;
    out(status, state(&stream))
}

/// Checks a query of the legacy stream. The query fails while a blocking stream captures, but does not
/// invalidate that capture.
fn implicit_query(stream: &Stream) -> Done {
    let capturing = stream.kind == Kind::Null
        && COUNT.load(Ordering::Acquire) != 0
        && stream.context.streams().iter().any(|s| s.blocking() && lock(&s.capture).is_some());
    if capturing { Err(Error::STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
}

fn state(stream: &Stream) -> u32 {
    match &*lock(&stream.capture) {
        None => 0,
        Some(place) if place.capture.valid() => 1,
        Some(_) => 2,
    }
}

/// `cuStreamGetCaptureInfo`
pub fn info(flavour: Flavour, stream: usize, status: *mut u32, id: *mut u64) -> Done {
    info_v2(flavour, stream, status, id, std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut())
}

/// `cuStreamGetCaptureInfo_v2`
pub fn info_v2(
    flavour: Flavour,
    stream: usize,
    status: *mut u32,
    id: *mut u64,
    graph: *mut usize,
    nodes: *mut *const usize,
    count: *mut usize,
) -> Done {
    thread_local! {
        /// The storage to which `nodes` points, valid until the next call.
        static NODES: std::cell::RefCell<Vec<usize>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let stream = stream::of(stream, flavour)?;
    implicit_query(&stream)?;
    out(status, state(&stream))?;
    if let Some(place) = &*lock(&stream.capture) {
        crate::out_if(id, place.capture.id);
        crate::out_if(graph, graph::keep(&place.capture.graph));
        crate::out_if(count, place.tail.len());
        NODES.with(|list| {
            *list.borrow_mut() = place.tail.clone();
            crate::out_if(nodes, list.borrow().as_ptr());
        });
    }
    Ok(())
}

/// `cuStreamGetCaptureInfo_v3`: edges have no data.
#[allow(clippy::too_many_arguments)]
pub fn info_v3(
    flavour: Flavour,
    stream: usize,
    status: *mut u32,
    id: *mut u64,
    graph: *mut usize,
    nodes: *mut *const usize,
    edges: *mut *const u8,
    count: *mut usize,
) -> Done {
    crate::out_if(edges, std::ptr::null());
    info_v2(flavour, stream, status, id, graph, nodes, count)
}

/// `cuStreamUpdateCaptureDependencies`
pub fn update(flavour: Flavour, stream: usize, nodes: *const usize, count: usize, flags: u32) -> Done {
    let stream = stream::of(stream, flavour)?;
    let nodes = graph::list(nodes, count)?;
    let mut place = lock(&stream.capture);
    let place = place.as_mut().ok_or(Error::ILLEGAL_STATE)?;
    if flags == 1 {
        place.tail.clear();
    }
    place.tail.extend(nodes);
    Ok(())
}

/// `cuStreamUpdateCaptureDependencies_v2`
pub fn update_v2(
    flavour: Flavour,
    stream: usize,
    nodes: *const usize,
    _edges: *const u8,
    count: usize,
    flags: u32,
) -> Done {
    update(flavour, stream, nodes, count, flags)
}

/// `cuThreadExchangeStreamCaptureMode`
pub fn exchange_mode(mode: *mut u32) -> Done {
    let new = crate::arg(mode.cast_const())?;
    if new > RELAXED {
        return Err(Error::INVALID_VALUE);
    }
    out(mode, MODE.replace(new))
}
