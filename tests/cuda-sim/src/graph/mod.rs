//! Graphs: work with dependencies that can be launched repeatedly.

mod exec;
mod nodes;
mod params;

pub use exec::*;
pub use nodes::*;
pub use params::*;

use crate::{
    capture, copy,
    error::{Done, Error},
    event::{self, Event},
    fill::Fill,
    kernels::Shape,
    launch, out,
    registry::{Registry, handle_of},
    stream::{self, Flavour, Point},
    work::{HostFn, Work},
};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

/// A graph of nodes.
#[derive(Debug)]
pub struct Graph {
    nodes: Mutex<Vec<Arc<Node>>>,
}

/// A node and its dependencies.
#[derive(Debug)]
pub struct Node {
    graph: Weak<Graph>,
    what: Mutex<What>,
    after: Mutex<Vec<usize>>,
    /// Pointers to arguments, for `cuGraphKernelNodeGetParams`.
    params: Mutex<Option<Box<Params>>>,
}

#[derive(Debug)]
struct Params {
    values: [u64; 4],
    pointers: [usize; 4],
}

/// A node's work. For copies, also contains the description that the program passed.
#[derive(Clone, Debug)]
struct What {
    work: Work,
    copy: Option<copy::Copy3D>,
    child: Option<Arc<Graph>>,
}

/// An executable graph: a copy of its nodes' work, in topological order.
#[derive(Debug)]
pub struct Exec {
    nodes: Mutex<Vec<Step>>,
    flags: u64,
    /// The point at the end of the last launch. Launches of one graph do not overlap.
    last: Mutex<Option<Point>>,
}

#[derive(Clone, Debug)]
struct Step {
    node: usize,
    work: Work,
    enabled: bool,
}

static GRAPHS: Registry<Graph> = Registry::new();
static NODES: Registry<Node> = Registry::new();
static EXECS: Registry<Exec> = Registry::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Graph {
    pub fn new() -> Arc<Graph> {
        Arc::new(Graph { nodes: Mutex::default() })
    }

    /// Adds a node, and returns its handle.
    pub fn add(self: &Arc<Self>, work: Work, after: &[usize]) -> Result<usize, Error> {
        self.add_what(What { work, copy: None, child: None }, after)
    }

    fn add_what(self: &Arc<Self>, what: What, after: &[usize]) -> Result<usize, Error> {
        for node in after {
            if NODES.find(*node).is_none_or(|n| n.graph.as_ptr() != Arc::as_ptr(self)) {
                return Err(Error::INVALID_VALUE);
            }
        }
        let node = Arc::new(Node {
            graph: Arc::downgrade(self),
            what: Mutex::new(what),
            after: Mutex::new(after.to_vec()),
            params: Mutex::default(),
        });
        lock(&self.nodes).push(node.clone());
        Ok(NODES.add(node))
    }

    /// Returns these nodes and all their transitive dependencies.
    pub fn ancestors(&self, nodes: &[usize]) -> HashSet<usize> {
        let mut found = HashSet::new();
        let mut left = nodes.to_vec();
        while let Some(node) = left.pop() {
            if found.insert(node) {
                left.extend(NODES.find(node).map(|n| lock(&n.after).clone()).unwrap_or_default());
            }
        }
        found
    }

    /// Returns the nodes in topological order, or an error if the graph has a cycle.
    fn sorted(&self) -> Result<Vec<Arc<Node>>, Error> {
        let mut left = lock(&self.nodes).clone();
        let mut done = HashSet::new();
        let mut order = Vec::with_capacity(left.len());
        while !left.is_empty() {
            let before = left.len();
            left.retain(|node| {
                let ready = lock(&node.after).iter().all(|n| done.contains(n));
                if ready {
                    done.insert(handle_of(node));
                    order.push(node.clone());
                }
                !ready
            });
            if left.len() == before {
                return Err(Error::INVALID_VALUE);
            }
        }
        Ok(order)
    }

    fn steps(&self) -> Result<Vec<Step>, Error> {
        let step =
            |node: &Arc<Node>| Ok(Step { node: handle_of(node), work: lock(&node.what).ready()?, enabled: true });
        self.sorted()?.iter().map(step).collect()
    }

    fn works(&self) -> Result<Arc<[Work]>, Error> {
        Ok(self.steps()?.into_iter().map(|s| s.work).collect())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        for node in lock(&self.nodes).iter() {
            let _ = NODES.remove(handle_of(node));
        }
    }
}

impl What {
    fn ready(&self) -> Result<Work, Error> {
        match &self.child {
            Some(child) => Ok(Work::Graph(child.works()?)),
            None => Ok(self.work.clone()),
        }
    }

    fn kind(&self) -> u32 {
        let work = if let Work::In(_, work) = &self.work { work } else { &self.work };
        match work {
            Work::Kernel(_) => 0,
            Work::Copy(_) => 1,
            Work::Fill(_) => 2,
            Work::Host { .. } | Work::Callback { .. } => 3,
            Work::Graph(_) => 4,
            Work::WaitEvent(_) | Work::Await(..) => 6,
            Work::RecordEvent(_) | Work::Record(_) | Work::Reach(..) => 7,
            Work::AllocNode => 10,
            Work::FreeNode => 11,
            Work::Value(_) => 12,
            Work::Nothing | Work::Prefetch { .. } | Work::Free(_) | Work::In(..) => 5,
        }
    }
}

/// Returns the graph behind a handle.
pub fn of(graph: usize) -> Result<Arc<Graph>, Error> {
    GRAPHS.find(graph).ok_or(Error::INVALID_VALUE)
}

fn node(handle: usize) -> Result<Arc<Node>, Error> {
    NODES.find(handle).ok_or(Error::INVALID_VALUE)
}

/// Registers a graph and returns its handle.
pub fn keep(graph: &Arc<Graph>) -> usize {
    GRAPHS.add(graph.clone())
}

/// Reads a list of nodes that the program passes.
pub fn list(nodes: *const usize, count: usize) -> Result<Vec<usize>, Error> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if nodes.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passes `count` nodes.
    Ok(unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec())
}

/// Fills the program's list. If the program passes no list, returns only the length.
fn fill_list(items: &[usize], to: *mut usize, count: *mut usize) -> Done {
    let room = crate::arg(count.cast_const())?;
    if to.is_null() {
        return out(count, items.len());
    }
    for i in 0..room {
        // SAFETY: by the API's contract, the list has room for `count` nodes. Entries after the last node
        // become null.
        unsafe { to.add(i).write(items.get(i).copied().unwrap_or(0)) };
    }
    out(count, items.len().min(room))
}

/// `cuGraphCreate`
pub fn create(graph: *mut usize, flags: u32) -> Done {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    out(graph, keep(&Graph::new()))
}

/// `cuGraphDestroy`
pub fn destroy(graph: usize) -> Done {
    GRAPHS.remove(graph).map(drop).map_err(|_| Error::INVALID_VALUE)
}

/// `cuGraphClone`
pub fn clone(clone: *mut usize, graph: usize) -> Done {
    let (from, to) = (of(graph)?, Graph::new());
    let mut names = std::collections::HashMap::new();
    for node in from.sorted()? {
        let after: Vec<usize> = lock(&node.after).iter().filter_map(|n| names.get(n).copied()).collect();
        names.insert(handle_of(&node), to.add_what(lock(&node.what).clone(), &after)?);
    }
    out(clone, keep(&to))
}

/// `cuGraphAddDependencies`
pub fn add_edges(graph: usize, from: *const usize, to: *const usize, count: usize) -> Done {
    of(graph)?;
    for (from, to) in list(from, count)?.into_iter().zip(list(to, count)?) {
        lock(&node(to)?.after).push(handle_of(&node(from)?));
    }
    Ok(())
}

/// `cuGraphAddDependencies_v2`
pub fn add_edges_v2(graph: usize, from: *const usize, to: *const usize, _data: *const u8, count: usize) -> Done {
    add_edges(graph, from, to, count)
}

/// `cuGraphDestroyNode`
pub fn destroy_node(handle: usize) -> Done {
    let node = NODES.remove(handle).map_err(|_| Error::INVALID_VALUE)?;
    if let Some(graph) = node.graph.upgrade() {
        let mut nodes = lock(&graph.nodes);
        nodes.retain(|n| !Arc::ptr_eq(n, &node));
        nodes.iter().for_each(|n| lock(&n.after).retain(|after| *after != handle));
    }
    Ok(())
}

/// `cuGraphGetNodes`
pub fn nodes(graph: usize, to: *mut usize, count: *mut usize) -> Done {
    let handles: Vec<usize> = lock(&of(graph)?.nodes).iter().map(handle_of).collect();
    fill_list(&handles, to, count)
}

/// `cuGraphGetRootNodes`
pub fn roots(graph: usize, to: *mut usize, count: *mut usize) -> Done {
    let handles: Vec<usize> =
        lock(&of(graph)?.nodes).iter().filter(|n| lock(&n.after).is_empty()).map(handle_of).collect();
    fill_list(&handles, to, count)
}

/// `cuGraphGetEdges`
pub fn edges(graph: usize, from: *mut usize, to: *mut usize, count: *mut usize) -> Done {
    let graph = of(graph)?;
    let nodes = lock(&graph.nodes).clone();
    let edges: Vec<(usize, usize)> =
        nodes.iter().flat_map(|n| lock(&n.after).iter().map(|a| (*a, handle_of(n))).collect::<Vec<_>>()).collect();
    let room = crate::arg(count.cast_const())?;
    let (starts, ends): (Vec<usize>, Vec<usize>) = edges.into_iter().unzip();
    fill_list(&starts, from, count)?;
    out(count, room)?;
    fill_list(&ends, to, count)
}

/// `cuGraphGetEdges_v2`
pub fn edges_v2(graph: usize, from: *mut usize, to: *mut usize, _data: *mut u8, count: *mut usize) -> Done {
    edges(graph, from, to, count)
}

/// `cuGraphNodeGetDependencies`
pub fn dependencies(handle: usize, to: *mut usize, count: *mut usize) -> Done {
    let after = lock(&node(handle)?.after).clone();
    fill_list(&after, to, count)
}

/// `cuGraphNodeGetDependencies_v2`
pub fn dependencies_v2(handle: usize, to: *mut usize, _data: *mut u8, count: *mut usize) -> Done {
    dependencies(handle, to, count)
}

/// `cuGraphNodeGetType`
pub fn node_type(handle: usize, kind: *mut u32) -> Done {
    out(kind, lock(&node(handle)?.what).kind())
}
