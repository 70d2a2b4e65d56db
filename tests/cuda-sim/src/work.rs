//! The work of streams: one variant for each kind, and its execution.

use crate::{
    context::Context,
    copy::Copy,
    error::Done,
    event::{Event, Record},
    fill::Fill,
    kernels::Launch,
    managed,
    memory::Mapping,
    value::Value,
};
use cuda_sim_gpus::Mark;
use std::{ffi::c_void, sync::Arc, thread, time::Duration};

/// Polling interval of a stream that waits for another process.
const LOOK: Duration = Duration::from_micros(50);

/// A function of the program, called in stream order.
pub type HostFn = unsafe extern "C" fn(*mut c_void);
/// The older kind of function. It receives the stream's status.
pub type Callback = unsafe extern "C" fn(usize, u32, *mut c_void);

/// One piece of work in a stream or a graph.
#[derive(Clone, Debug)]
pub enum Work {
    /// No work. Only waits for its dependencies.
    Nothing,
    Kernel(Launch),
    Copy(Arc<Copy>),
    Fill(Fill),
    Host {
        call: HostFn,
        data: usize,
    },
    Callback {
        call: Callback,
        stream: usize,
        data: usize,
    },
    Record(Arc<Record>),
    /// Marks a recording as reached, for an event that other processes share.
    Reach(Arc<Mark>, u64),
    /// Waits for an event of another process.
    Await(Arc<Mark>, u64),
    /// Only in graphs. Records an event when the graph is launched.
    RecordEvent(Arc<Event>),
    /// Only in graphs. Waits for the event's last recording before the launch.
    WaitEvent(Arc<Event>),
    Value(Value),
    Prefetch {
        at: u64,
        len: u64,
        gpu: Option<usize>,
    },
    /// Releases memory that was freed in stream order.
    Free(Arc<Mapping>),
    /// Only in graphs. The memory was allocated when the node was created, and stays until the context
    /// ends.
    AllocNode,
    FreeNode,
    /// A launched graph, in topological order.
    Graph(Arc<[Work]>),
    /// Only in graphs. Work that was captured in a stream of that context. The launching stream may have
    /// another context.
    In(Arc<Context>, Arc<Work>),
}

impl Work {
    /// Whether the work counts towards the depth of the stream's queue.
    pub fn heavy(&self) -> bool {
        matches!(
            self,
            Work::Kernel(_) | Work::Copy(_) | Work::Fill(_) | Work::Graph(_) | Work::Record(_) | Work::Reach(..)
        )
    }

    /// Whether the work takes no time. An idle stream need not wake its thread for such work.
    pub fn instant(&self) -> bool {
        match self {
            Work::Nothing | Work::Record(_) => true,
            Work::Kernel(launch) => launch.instant(),
            _ => false,
        }
    }

    /// Executes the work. In a dead context, executes only work that other threads wait for. An error kills
    /// the context.
    pub fn run(&self, context: &Context) {
        match self {
            Work::Record(record) => record.happen(),
            Work::Reach(mark, recording) => mark.reach(*recording),
            Work::Callback { call, stream, data } => {
                let status = context.error().map_or_else(|e| e.0, |()| 0);
                // SAFETY: the program passed this function with this argument.
                unsafe { call(*stream, status, *data as *mut c_void) }
            }
            Work::Free(mapping) => crate::pool::freed(mapping),
            Work::In(own, work) => work.run(own),
            _ => {
                if let Err(error) = context.error().and_then(|()| self.execute(context)) {
                    context.fail(error);
                }
            }
        }
    }

    fn execute(&self, context: &Context) -> Done {
        match self {
            Work::Kernel(launch) => launch.run(context),
            Work::Copy(copy) => copy.run(context),
            Work::Fill(fill) => fill.run(context),
            Work::Host { call, data } => {
                // SAFETY: the program passed this function with this argument.
                unsafe { call(*data as *mut c_void) };
                Ok(())
            }
            Work::Value(value) => value.run(context),
            Work::Prefetch { at, len, gpu } => managed::prefetch(*at, *len, *gpu),
            Work::Graph(nodes) => {
                for node in nodes.iter() {
                    node.run(context);
                }
                context.error()
            }
            Work::WaitEvent(event) => {
                event.wait();
                Ok(())
            }
            Work::Await(mark, recording) => {
                while !mark.reached(*recording) {
                    context.error()?;
                    thread::sleep(LOOK);
                }
                Ok(())
            }
            Work::Nothing
            | Work::AllocNode
            | Work::FreeNode
            | Work::Record(_)
            | Work::Reach(..)
            | Work::RecordEvent(_)
            | Work::Callback { .. }
            | Work::In(..)
            | Work::Free(_) => Ok(()),
        }
    }
}
