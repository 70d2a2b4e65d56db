//! Events: marks in streams. Programs wait for events, and measure time with them.

use crate::{
    capture::{self, Place},
    context::{self, Context},
    error::{Done, Error},
    out,
    registry::Registry,
    stream::{self, Flavour, Point, Stream},
    work::Work,
};
use cuda_sim_gpus::Mark;
use std::{
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    thread,
    time::{Duration, Instant},
};

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;
const EXTERNAL: u32 = 1;
/// Polling interval while waiting for another process.
const LOOK: Duration = Duration::from_micros(50);

/// An event and its last recording.
#[derive(Debug)]
pub struct Event {
    flags: u32,
    context: Arc<Context>,
    last: Mutex<Last>,
    /// The part of the event that other processes share.
    shared: Option<Arc<Mark>>,
}

#[derive(Clone, Debug, Default)]
enum Last {
    /// Never recorded. Such an event counts as reached.
    #[default]
    Never,
    Record(Arc<Record>),
    /// Recorded in a capturing stream, as a position in a graph.
    Captured(Place),
}

/// `CUipcEventHandle`: identifies an event to other processes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct IpcHandle {
    name: [u64; 2],
    kind: u64,
    _rest: [u64; 5],
}

/// Magic number that distinguishes handles of events from other handles.
const IPC_EVENT: u64 = 0x7665_6e74;

/// One recording of an event.
#[derive(Debug, Default)]
pub struct Record {
    points: OnceLock<Vec<Point>>,
    time: OnceLock<Instant>,
}

impl Record {
    /// Marks the recording as reached.
    pub fn happen(&self) {
        let _ = self.time.set(Instant::now());
    }

    fn points(&self) -> &[Point] {
        self.points.get().map_or(&[], Vec::as_slice)
    }
}

static EVENTS: Registry<Event> = Registry::new();

impl Event {
    fn last(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn points(&self) -> Vec<Point> {
        match &*self.last() {
            Last::Record(record) => record.points().to_vec(),
            Last::Never | Last::Captured(_) => Vec::new(),
        }
    }

    fn reached(&self) -> bool {
        self.points().iter().all(Point::reached) && self.shared.as_ref().is_none_or(|m| m.reached(m.last()))
    }

    /// Waits until the last recording is reached.
    pub fn wait(&self) {
        self.points().iter().for_each(Point::wait);
        if let Some(mark) = &self.shared {
            let recording = mark.last();
            while !mark.reached(recording) && self.context.error().is_ok() {
                thread::sleep(LOOK);
            }
        }
    }

    /// Records the event at a given point.
    pub fn mark(&self, point: Point) {
        let record = Record::default();
        let _ = record.points.set(vec![point]);
        *self.last() = Last::Record(Arc::new(record));
    }

    fn not_captured(&self) -> Done {
        if let Last::Captured(place) = &*self.last() { Err(capture::forbid_at(place)) } else { Ok(()) }
    }

    fn record(&self, stream: &Arc<Stream>) -> Done {
        stream.context.error()?;
        if let Some(place) = capture::place(stream)? {
            *self.last() = Last::Captured(place);
            return Ok(());
        }
        if let Some(mark) = &self.shared {
            return stream.submit(Work::Reach(mark.clone(), mark.record())).map(drop);
        }
        let record = Arc::new(Record::default());
        if let Some(point) = stream.submit(Work::Record(record.clone()))? {
            let _ = record.points.set(vec![point]);
        }
        *self.last() = Last::Record(record);
        Ok(())
    }
}

/// Returns the event behind a handle.
pub fn of(handle: usize) -> Result<Arc<Event>, Error> {
    EVENTS.get(handle)
}

/// `cuEventCreate`
pub fn create(event: *mut usize, flags: u32) -> Done {
    let interprocess_with_timing = flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0;
    if event.is_null() || flags > 7 || interprocess_with_timing {
        return Err(Error::INVALID_VALUE);
    }
    let context = context::healthy()?;
    let shared = (flags & INTERPROCESS != 0).then(Mark::new).transpose().map_err(|_| Error::OPERATING_SYSTEM)?;
    out(event, EVENTS.add(Arc::new(Event { flags, context, last: Mutex::default(), shared: shared.map(Arc::new) })))
}

/// `cuIpcGetEventHandle`
pub fn export(handle: *mut IpcHandle, event: usize) -> Done {
    let event = of(event)?;
    event.context.error()?;
    let mark = event.shared.as_ref().ok_or(Error::INVALID_HANDLE)?;
    out(handle, IpcHandle { name: mark.name(), kind: IPC_EVENT, _rest: [0; 5] })
}

/// `cuIpcOpenEventHandle`
pub fn import(event: *mut usize, handle: IpcHandle) -> Done {
    let context = context::healthy()?;
    if event.is_null() || handle.kind != IPC_EVENT {
        return Err(Error::INVALID_VALUE);
    }
    let mark = Mark::open(handle.name).map_err(|_| Error::INVALID_HANDLE)?;
    let flags = INTERPROCESS | DISABLE_TIMING;
    out(event, EVENTS.add(Arc::new(Event { flags, context, last: Mutex::default(), shared: Some(Arc::new(mark)) })))
}

/// `cuEventDestroy`
pub fn destroy(event: usize) -> Done {
    of(event)?.context.error()?;
    EVENTS.remove(event).map(drop)
}

/// `cuEventRecord`
pub fn record(flavour: Flavour, event: usize, stream: usize) -> Done {
    record_with_flags(flavour, event, stream, 0)
}

/// `cuEventRecordWithFlags`
pub fn record_with_flags(flavour: Flavour, event: usize, stream: usize, flags: u32) -> Done {
    let (stream, event) = (stream::of(stream, flavour)?, of(event)?);
    if !stream.context.same(&event.context) {
        return Err(Error::INVALID_HANDLE);
    }
    if flags == EXTERNAL && capture::capturing(&stream) {
        return stream.submit(Work::RecordEvent(event)).map(drop);
    }
    event.record(&stream)
}

/// `cuEventQuery`
pub fn query(event: usize) -> Done {
    let event = of(event)?;
    event.context.error()?;
    event.not_captured()?;
    capture::forbid()?;
    let reached = event.reached();
    event.context.error()?;
    if reached { Ok(()) } else { Err(Error::NOT_READY) }
}

/// `cuEventSynchronize`
pub fn synchronise(event: usize) -> Done {
    let event = of(event)?;
    event.context.error()?;
    event.not_captured()?;
    capture::forbid()?;
    event.wait();
    event.context.error()
}

/// `cuEventElapsedTime`
pub fn elapsed(milliseconds: *mut f32, start: usize, end: usize) -> Done {
    let (start, end) = (of(start)?, of(end)?);
    start.context.error()?;
    if (start.flags | end.flags) & DISABLE_TIMING != 0 {
        return Err(Error::INVALID_HANDLE);
    }
    let time = |event: &Event| match &*event.last() {
        Last::Record(record) => record.time.get().copied().ok_or(Error::NOT_READY),
        Last::Never => Err(Error::INVALID_HANDLE),
        Last::Captured(place) => Err(capture::forbid_at(place)),
    };
    let (start, end) = (time(&start)?, time(&end)?);
    let forward = end.saturating_duration_since(start).as_secs_f64();
    out(milliseconds, ((forward - start.saturating_duration_since(end).as_secs_f64()) * 1e3) as f32)
}

/// `cuStreamWaitEvent`
pub fn stream_wait(flavour: Flavour, stream: usize, event: usize, _flags: u32) -> Done {
    let (stream, event) = (stream::of(stream, flavour)?, of(event)?);
    stream.context.error()?;
    if let Some(mark) = event.shared.as_ref().filter(|_| !capture::capturing(&stream)) {
        stream.enqueue(Work::Await(mark.clone(), mark.last()), Vec::new());
        return Ok(());
    }
    let last = event.last().clone();
    match last {
        Last::Captured(place) => capture::join(&stream, place),
        Last::Record(_) | Last::Never if capture::capturing(&stream) => {
            capture::isolated(&stream, matches!(last, Last::Never))
        }
        Last::Never => Ok(()),
        Last::Record(record) => {
            stream.enqueue(Work::Nothing, record.points().to_vec());
            Ok(())
        }
    }
}

/// `cuCtxRecordEvent`: the event is reached when all submitted work of the context is done.
pub fn context_record(context: usize, event: usize) -> Done {
    let (context, event) = (context::of(context)?, of(event)?);
    context.error()?;
    capture::forbid_in(&context)?;
    if !context.same(&event.context) || event.shared.is_some() {
        return Err(Error::INVALID_HANDLE);
    }
    let record = Record::default();
    let _ = record.points.set(context.points());
    *event.last() = Last::Record(Arc::new(record));
    Ok(())
}

/// `cuCtxWaitEvent`: all later work of the context waits for the event.
pub fn context_wait(context: usize, event: usize) -> Done {
    let (context, event) = (context::of(context)?, of(event)?);
    context.error()?;
    capture::forbid_in(&context)?;
    event.not_captured()?;
    let points: Vec<Point> = event.points().into_iter().filter(|p| !p.reached()).collect();
    for context in context.family() {
        for stream in context.streams().iter().chain([&context.null()]) {
            stream.enqueue(Work::Nothing, points.clone());
        }
        let mut gate = context.gate.lock().unwrap_or_else(|e| e.into_inner());
        gate.retain(|p| !p.reached());
        gate.extend(points.iter().cloned());
    }
    Ok(())
}
