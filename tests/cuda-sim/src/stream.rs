//! Streams: queues of work, and dependencies between them. Each stream's own thread executes its work
//! in order.

use crate::{
    capture::{self, Place},
    context::{self, Context},
    error::{Done, Error},
    out,
    registry::{Registry, handle_of},
    work::Work,
};
use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

/// The maximum number of launches, copies, fills and events in a stream's queue. Further calls
/// block.
pub const DEPTH: usize = 1021;
/// The greatest priority. The least priority is 0.
pub const GREATEST_PRIORITY: i32 = -5;

const NON_BLOCKING: u32 = 1;
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// The meaning of stream handle 0: the context's default stream, or the thread's default stream in
/// `_ptsz` and `_ptds` functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    Legacy,
    PerThread,
}

/// The kind of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The legacy default stream. It waits for all blocking streams, and blocking streams wait for it.
    Null,
    /// A thread's default stream, which is a blocking stream.
    Thread,
    Blocking,
    NonBlocking,
}

/// An in-order queue of work.
#[derive(Debug)]
pub struct Stream {
    pub context: Arc<Context>,
    pub kind: Kind,
    pub priority: i32,
    pub id: u64,
    queue: Mutex<Queue>,
    changed: Condvar,
    submitted: AtomicU64,
    completed: AtomicU64,
    /// The position in the capture while the stream captures.
    pub capture: Mutex<Option<Place>>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Op>,
    /// The number of pending launches, copies, fills and events.
    heavy: usize,
    worker: bool,
    closed: bool,
}

#[derive(Debug)]
struct Op {
    work: Work,
    after: Vec<Point>,
}

/// A point in a stream. A point is reached when all earlier work is done.
#[derive(Clone, Debug)]
pub struct Point {
    stream: Arc<Stream>,
    count: u64,
}

impl Point {
    pub fn reached(&self) -> bool {
        self.stream.completed.load(Ordering::Acquire) >= self.count
    }

    pub fn wait(&self) {
        if !self.reached() {
            let mut queue = self.stream.lock();
            while !self.reached() {
                queue = self.stream.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
            }
        }
    }
}

static STREAMS: Registry<Stream> = Registry::new();

impl Stream {
    fn new(context: Arc<Context>, kind: Kind, priority: i32) -> Arc<Stream> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Stream {
            context,
            kind,
            priority,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            queue: Mutex::default(),
            changed: Condvar::new(),
            submitted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            capture: Mutex::new(None),
        })
    }

    pub fn null(context: Arc<Context>) -> Arc<Stream> {
        Stream::new(context, Kind::Null, 0)
    }

    pub fn of_thread(context: Arc<Context>) -> Arc<Stream> {
        Stream::new(context, Kind::Thread, 0)
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether some submitted work is not done.
    pub fn pending(&self) -> bool {
        self.completed.load(Ordering::Acquire) < self.submitted.load(Ordering::Acquire)
    }

    /// Returns the stream's current point.
    pub fn point(self: &Arc<Self>) -> Point {
        Point { stream: self.clone(), count: self.submitted.load(Ordering::Acquire) }
    }

    pub fn blocking(&self) -> bool {
        matches!(self.kind, Kind::Blocking | Kind::Thread)
    }

    /// Submits work to the stream and returns its point. If the stream captures, adds the work to the graph
    /// instead and returns no point.
    pub fn submit(self: &Arc<Self>, work: Work) -> Result<Option<Point>, Error> {
        self.context.error()?;
        Ok(capture::add(self, work)?.map(|work| self.enqueue(work, Vec::new())))
    }

    /// Enqueues work that also depends on `after`, and returns the stream's new point.
    pub fn enqueue(self: &Arc<Self>, work: Work, mut after: Vec<Point>) -> Point {
        let heavy = work.heavy();
        if heavy {
            let mut queue = self.lock();
            while queue.heavy >= DEPTH {
                queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
            }
        }
        let _order = self.context.order.lock().unwrap_or_else(|e| e.into_inner());
        match self.kind {
            Kind::Null => {
                after.extend(self.context.streams().iter().filter(|s| s.blocking() && s.pending()).map(|s| s.point()))
            }
            Kind::Thread | Kind::Blocking => {
                after.extend(self.context.null_if_used().filter(|s| s.pending()).map(|s| s.point()))
            }
            Kind::NonBlocking => {}
        }
        after.retain(|point| !point.reached());

        let mut queue = self.lock();
        let count = self.submitted.fetch_add(1, Ordering::AcqRel) + 1;
        let idle = self.completed.load(Ordering::Acquire) + 1 == count;
        if idle && after.is_empty() && work.instant() {
            work.run(&self.context);
            self.completed.store(count, Ordering::Release);
            self.changed.notify_all();
            return Point { stream: self.clone(), count };
        }
        queue.waiting.push_back(Op { work, after });
        queue.heavy += usize::from(heavy);
        self.start_worker(&mut queue);
        self.changed.notify_all();
        Point { stream: self.clone(), count }
    }

    fn start_worker(self: &Arc<Self>, queue: &mut Queue) {
        if !queue.worker {
            queue.worker = true;
            let stream = self.clone();
            let started = spawn(move || stream.work());
            started.expect("cuda-sim: no thread for a stream");
        }
    }

    /// The main function of the stream's thread.
    fn work(self: Arc<Self>) {
        loop {
            let mut queue = self.lock();
            let op = loop {
                match queue.waiting.pop_front() {
                    Some(op) => break op,
                    None if queue.closed => return,
                    None => queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner()),
                }
            };
            drop(queue);
            op.after.iter().for_each(Point::wait);
            op.work.run(&self.context);
            let heavy = op.work.heavy();
            // Releases the work's resources before the work counts as done, because checkpoints rely on this
            // order.
            drop(op);
            let mut queue = self.lock();
            queue.heavy -= usize::from(heavy);
            self.completed.fetch_add(1, Ordering::AcqRel);
            self.changed.notify_all();
        }
    }

    /// Ends the stream's thread after all work.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits for all submitted work. On the legacy stream, also waits for work of blocking streams.
    pub fn synchronise(self: &Arc<Self>) -> Done {
        let point = match self.kind {
            Kind::Null => self.enqueue(Work::Nothing, Vec::new()),
            _ => self.point(),
        };
        point.wait();
        self.context.error()
    }

    /// Whether the program has destroyed the stream and all its work is done.
    pub fn over(&self) -> bool {
        !self.pending() && self.lock().closed
    }

    fn idle(&self) -> bool {
        let others = || self.context.streams().iter().any(|s| s.blocking() && s.pending());
        !(self.pending() || self.kind == Kind::Null && others())
    }
}

/// Starts a thread of the driver. The thread receives no signals of the program, and sleeps with the
/// least timer slack.
///
/// # Errors
/// Returns the error of the system if no more threads can be created.
pub fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<thread::JoinHandle<()>> {
    // The thread starts with the caller's signal mask. SAFETY: the calls change only the calling thread,
    // and the sets are filled before they are read.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        let started = thread::Builder::new().name("cuda-sim".into()).spawn(|| {
            libc::prctl(libc::PR_SET_TIMERSLACK, 1);
            run();
        });
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        started
    }
}

/// Returns the stream behind a handle.
pub fn of(handle: usize, flavour: Flavour) -> Result<Arc<Stream>, Error> {
    match (handle, flavour) {
        (0, Flavour::Legacy) | (LEGACY, _) => Ok(context::current()?.null()),
        (0, Flavour::PerThread) | (PER_THREAD, _) => Ok(context::current()?.of_thread()),
        _ => {
            context::current()?;
            STREAMS.get(handle)
        }
    }
}

/// `cuStreamCreate`
pub fn create(stream: *mut usize, flags: u32) -> Done {
    create_with_priority(stream, flags, 0)
}

/// `cuStreamCreateWithPriority`
pub fn create_with_priority(stream: *mut usize, flags: u32, priority: i32) -> Done {
    if stream.is_null() || flags & !NON_BLOCKING != 0 {
        return Err(Error::INVALID_VALUE);
    }
    create_in(&context::healthy()?, stream, flags, priority)
}

/// Creates a stream of a context.
pub fn create_in(context: &Arc<Context>, stream: *mut usize, flags: u32, priority: i32) -> Done {
    let kind = if flags & NON_BLOCKING != 0 { Kind::NonBlocking } else { Kind::Blocking };
    let new = Stream::new(context.clone(), kind, priority.clamp(GREATEST_PRIORITY, 0));
    context.join(&new);
    let gate: Vec<Point> =
        context.gate.lock().unwrap_or_else(|e| e.into_inner()).iter().filter(|p| !p.reached()).cloned().collect();
    // Starts the worker here and not at the first submission. The first submission may happen while
    // a library's constructor runs, and the new thread would then wait for the loader's lock.
    new.start_worker(&mut new.lock());
    if !gate.is_empty() {
        new.enqueue(Work::Nothing, gate);
    }
    out(stream, STREAMS.add(new))
}

/// `cuStreamDestroy`
pub fn destroy(stream: usize) -> Done {
    let stream = STREAMS.remove(stream)?;
    capture::abandon(&stream);
    stream.close();
    Ok(())
}

/// Ends a context's streams.
pub fn forget(streams: &[Arc<Stream>]) {
    for stream in streams {
        let _ = STREAMS.remove(handle_of(stream));
        stream.close();
    }
}

/// `cuStreamQuery`
pub fn query(flavour: Flavour, stream: usize) -> Done {
    let stream = of(stream, flavour)?;
    stream.context.error()?;
    capture::forbid_on(&stream)?;
    capture::forbid()?;
    let idle = stream.idle();
    stream.context.error()?;
    if idle { Ok(()) } else { Err(Error::NOT_READY) }
}

/// `cuStreamSynchronize`
pub fn synchronise(flavour: Flavour, stream: usize) -> Done {
    let stream = of(stream, flavour)?;
    stream.context.error()?;
    capture::forbid_on(&stream)?;
    capture::forbid()?;
    stream.synchronise()
}

/// `cuStreamGetPriority`
pub fn get_priority(flavour: Flavour, stream: usize, priority: *mut i32) -> Done {
    out(priority, of(stream, flavour)?.priority)
}

/// `cuStreamGetFlags`
pub fn get_flags(flavour: Flavour, stream: usize, flags: *mut u32) -> Done {
    out(flags, u32::from(of(stream, flavour)?.kind == Kind::NonBlocking))
}

/// `cuStreamGetId`
pub fn get_id(flavour: Flavour, stream: usize, id: *mut u64) -> Done {
    out(id, of(stream, flavour)?.id)
}

/// `cuStreamGetDevice`
pub fn get_device(flavour: Flavour, stream: usize, device: *mut i32) -> Done {
    out(device, crate::device::ordinal(of(stream, flavour)?.context.gpu))
}

/// `cuStreamGetCtx`
pub fn get_context(flavour: Flavour, stream: usize, context: *mut usize) -> Done {
    out(context, of(stream, flavour)?.context.handle())
}

/// `cuStreamGetCtx_v2`
pub fn get_context_v2(flavour: Flavour, stream: usize, context: *mut usize, green: *mut usize) -> Done {
    crate::out_if(green, crate::green::of_context(&of(stream, flavour)?.context));
    get_context(flavour, stream, context)
}

/// `cuStreamAttachMemAsync`
pub fn attach(flavour: Flavour, stream: usize, at: u64, _len: usize, _flags: u32) -> Done {
    if crate::memory::space().at(at).is_none() {
        return Err(Error::INVALID_VALUE);
    }
    of(stream, flavour)?.submit(Work::Nothing).map(drop)
}

/// `cuStreamCopyAttributes`: has no effect, because the simulator keeps no attributes of streams.
pub fn copy_attributes(flavour: Flavour, to: usize, from: usize) -> Done {
    of(to, flavour)?;
    of(from, flavour).map(drop)
}

/// `cuStreamGetAttribute`: returns zeros.
pub fn get_attribute(flavour: Flavour, stream: usize, _attribute: u32, value: *mut [u64; 8]) -> Done {
    of(stream, flavour)?;
    out(value, [0; 8])
}

/// `cuStreamSetAttribute`: has no effect.
pub fn set_attribute(flavour: Flavour, stream: usize, _attribute: u32, _value: *const u8) -> Done {
    of(stream, flavour).map(drop)
}
