//! Graphs: work with an order, kept to be launched again and again.

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

/// One node and what it comes after.
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

/// A node's work; copies remember how they were described.
#[derive(Clone, Debug)]
struct What {
    work: Work,
    copy: Option<copy::Copy3D>,
    child: Option<Arc<Graph>>,
}

/// A graph made ready to launch: a copy of its nodes' work, in an order that its edges allow.
#[derive(Debug)]
pub struct Exec {
    nodes: Mutex<Vec<Step>>,
    flags: u64,
    /// A graph does not overlap itself.
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

    /// Adds a node; returns its handle.
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

    /// These nodes and everything that they come after.
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

    /// The nodes in an order that their edges allow; invalid if they go in circles.
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
        match &self.work {
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
            Work::Nothing | Work::Prefetch { .. } | Work::Free(_) => 5,
        }
    }
}

/// The graph behind a handle.
pub fn of(graph: usize) -> Result<Arc<Graph>, Error> {
    GRAPHS.find(graph).ok_or(Error::INVALID_VALUE)
}

fn node(handle: usize) -> Result<Arc<Node>, Error> {
    NODES.find(handle).ok_or(Error::INVALID_VALUE)
}

/// Makes a graph known to the program.
pub fn keep(graph: &Arc<Graph>) -> usize {
    GRAPHS.add(graph.clone())
}

/// A list of nodes as the program passes it.
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

/// Fills the program's list, or only says how long it is.
fn fill_list(items: &[usize], to: *mut usize, count: *mut usize) -> Done {
    let room = crate::arg(count.cast_const())?;
    if to.is_null() {
        return out(count, items.len());
    }
    for i in 0..room {
        // SAFETY: the program says that there is room for `count` nodes; those beyond the last become null.
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

/// `CUDA_KERNEL_NODE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParams {
    function: usize,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    params: *const *const u8,
    extra: *const usize,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParams2 {
    plain: KernelParams,
    kernel: usize,
    context: usize,
}

impl KernelParams {
    fn work(&self) -> Result<Work, Error> {
        let shape = Shape { function: self.function, grid: self.grid, block: self.block, shared: self.shared };
        launch::prepare(shape, self.params, self.extra).map(Work::Kernel)
    }
}

impl KernelParams2 {
    fn work(&self) -> Result<Work, Error> {
        let function = if self.plain.function != 0 { self.plain.function } else { self.kernel };
        KernelParams { function, ..self.plain }.work()
    }
}

/// `CUDA_MEMSET_NODE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FillParams {
    at: u64,
    pitch: usize,
    value: u32,
    size: u32,
    width: usize,
    height: usize,
}

impl FillParams {
    fn work(&self) -> Result<Work, Error> {
        if !matches!(self.size, 1 | 2 | 4) || self.height == 0 {
            return Err(Error::INVALID_VALUE);
        }
        Ok(Work::Fill(Fill {
            at: self.at,
            pitch: self.pitch as u64,
            value: self.value,
            size: self.size.into(),
            width: self.width as u64,
            height: self.height as u64,
        }))
    }
}

/// `CUDA_HOST_NODE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HostParams {
    call: Option<HostFn>,
    data: usize,
}

fn add(to: *mut usize, graph: usize, after: *const usize, count: usize, what: What) -> Done {
    if to.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    out(to, of(graph)?.add_what(what, &list(after, count)?)?)
}

fn plain(work: Work) -> What {
    What { work, copy: None, child: None }
}

/// `cuGraphAddKernelNode`
pub fn add_kernel(
    to: *mut usize,
    graph: usize,
    after: *const usize,
    count: usize,
    params: *const KernelParams,
) -> Done {
    add(to, graph, after, count, plain(crate::arg(params)?.work()?))
}

/// `cuGraphAddKernelNode_v2`
pub fn add_kernel_v2(
    to: *mut usize,
    graph: usize,
    after: *const usize,
    count: usize,
    params: *const KernelParams2,
) -> Done {
    add(to, graph, after, count, plain(crate::arg(params)?.work()?))
}

/// `cuGraphAddMemcpyNode`
pub fn add_copy(
    to: *mut usize,
    graph: usize,
    after: *const usize,
    count: usize,
    params: *const copy::Copy3D,
    _context: usize,
) -> Done {
    let params = crate::arg(params)?;
    add(to, graph, after, count, What { work: Work::Copy(Arc::new(params.decode()?)), copy: Some(params), child: None })
}

/// `cuGraphAddMemsetNode`
pub fn add_fill(
    to: *mut usize,
    graph: usize,
    after: *const usize,
    count: usize,
    params: *const FillParams,
    _context: usize,
) -> Done {
    add(to, graph, after, count, plain(crate::arg(params)?.work()?))
}

/// `cuGraphAddHostNode`
pub fn add_host(to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const HostParams) -> Done {
    let HostParams { call, data } = crate::arg(params)?;
    add(to, graph, after, count, plain(Work::Host { call: call.ok_or(Error::INVALID_VALUE)?, data }))
}

/// `cuGraphAddEmptyNode`
pub fn add_empty(to: *mut usize, graph: usize, after: *const usize, count: usize) -> Done {
    add(to, graph, after, count, plain(Work::Nothing))
}

/// `cuGraphAddEventRecordNode`
pub fn add_record(to: *mut usize, graph: usize, after: *const usize, count: usize, event: usize) -> Done {
    add(to, graph, after, count, plain(Work::RecordEvent(event::of(event)?)))
}

/// `cuGraphAddEventWaitNode`
pub fn add_wait(to: *mut usize, graph: usize, after: *const usize, count: usize, event: usize) -> Done {
    add(to, graph, after, count, plain(Work::WaitEvent(event::of(event)?)))
}

/// `cuGraphAddChildGraphNode`: a copy of the child as it is now.
pub fn add_child(to: *mut usize, graph: usize, after: *const usize, count: usize, child: usize) -> Done {
    let child = of(child)?;
    add(to, graph, after, count, plain(Work::Graph(child.works()?)))
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

fn kernel_params(handle: usize) -> Result<KernelParams, Error> {
    let node = node(handle)?;
    let Work::Kernel(launch) = lock(&node.what).work.clone() else { return Err(Error::INVALID_VALUE) };
    let mut params = Box::new(Params { values: launch.args, pointers: [0; 4] });
    for i in 0..params.values.len() {
        params.pointers[i] = std::ptr::from_ref(&params.values[i]) as usize;
    }
    let pointers = params.pointers.as_ptr().cast();
    *lock(&node.params) = Some(params);
    let Shape { function, grid, block, shared } = launch.shape;
    Ok(KernelParams { function, grid, block, shared, params: pointers, extra: std::ptr::null() })
}

/// `cuGraphKernelNodeGetParams`: the pointers are good until the next call for this node.
pub fn get_kernel(handle: usize, params: *mut KernelParams) -> Done {
    out(params, kernel_params(handle)?)
}

/// `cuGraphKernelNodeGetParams_v2`
pub fn get_kernel_v2(handle: usize, params: *mut KernelParams2) -> Done {
    out(params, KernelParams2 { plain: kernel_params(handle)?, kernel: 0, context: 0 })
}

fn set(handle: usize, kind: u32, work: Work) -> Done {
    let node = node(handle)?;
    let mut what = lock(&node.what);
    if what.kind() != kind {
        return Err(Error::INVALID_VALUE);
    }
    what.work = work;
    Ok(())
}

/// `cuGraphKernelNodeSetParams`
pub fn set_kernel(handle: usize, params: *const KernelParams) -> Done {
    set(handle, 0, crate::arg(params)?.work()?)
}

/// `cuGraphKernelNodeSetParams_v2`
pub fn set_kernel_v2(handle: usize, params: *const KernelParams2) -> Done {
    set(handle, 0, crate::arg(params)?.work()?)
}

/// `cuGraphMemcpyNodeGetParams`; not for captured copies.
pub fn get_copy(handle: usize, params: *mut copy::Copy3D) -> Done {
    let copy = lock(&node(handle)?.what).copy;
    out(params, copy.ok_or(Error::NOT_SUPPORTED)?)
}

/// `cuGraphMemcpyNodeSetParams`
pub fn set_copy(handle: usize, params: *const copy::Copy3D) -> Done {
    let params = crate::arg(params)?;
    set(handle, 1, Work::Copy(Arc::new(params.decode()?)))?;
    lock(&node(handle)?.what).copy = Some(params);
    Ok(())
}

/// `cuGraphMemsetNodeGetParams`
pub fn get_fill(handle: usize, params: *mut FillParams) -> Done {
    let Work::Fill(f) = lock(&node(handle)?.what).work.clone() else { return Err(Error::INVALID_VALUE) };
    out(
        params,
        FillParams {
            at: f.at,
            pitch: f.pitch as usize,
            value: f.value,
            size: f.size as u32,
            width: f.width as usize,
            height: f.height as usize,
        },
    )
}

/// `cuGraphMemsetNodeSetParams`
pub fn set_fill(handle: usize, params: *const FillParams) -> Done {
    set(handle, 2, crate::arg(params)?.work()?)
}

fn exec(handle: usize) -> Result<Arc<Exec>, Error> {
    EXECS.find(handle).ok_or(Error::INVALID_VALUE)
}

/// `cuGraphInstantiate`, `_v2`
pub fn instantiate(to: *mut usize, graph: usize, _error_node: *mut usize, _log: *mut u8, _log_size: usize) -> Done {
    instantiate_with_flags(to, graph, 0)
}

/// `cuGraphInstantiateWithFlags`
pub fn instantiate_with_flags(to: *mut usize, graph: usize, flags: u64) -> Done {
    if to.is_null() || flags > 15 {
        return Err(Error::INVALID_VALUE);
    }
    let nodes = of(graph)?.steps()?;
    out(to, EXECS.add(Arc::new(Exec { nodes: Mutex::new(nodes), flags, last: Mutex::default() })))
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct InstantiateParams {
    flags: u64,
    stream: usize,
    error_node: usize,
    result: u32,
}

/// `cuGraphInstantiateWithParams`
pub fn instantiate_with_params(
    _flavour: Flavour,
    to: *mut usize,
    graph: usize,
    params: *mut InstantiateParams,
) -> Done {
    let asked = crate::arg(params.cast_const())?;
    let done = instantiate_with_flags(to, graph, asked.flags);
    out(params, InstantiateParams { error_node: 0, result: u32::from(done.is_err()), ..asked })?;
    done
}

/// `cuGraphExecDestroy`
pub fn exec_destroy(handle: usize) -> Done {
    EXECS.remove(handle).map(drop).map_err(|_| Error::INVALID_VALUE)
}

/// `cuGraphExecGetFlags`
pub fn exec_flags(handle: usize, flags: *mut u64) -> Done {
    out(flags, exec(handle)?.flags)
}

fn exec_set(handle: usize, node: usize, work: Work) -> Done {
    let exec = exec(handle)?;
    let mut nodes = lock(&exec.nodes);
    let step = nodes.iter_mut().find(|s| s.node == node).ok_or(Error::INVALID_VALUE)?;
    if std::mem::discriminant(&step.work) != std::mem::discriminant(&work) {
        return Err(Error::INVALID_VALUE);
    }
    step.work = work;
    Ok(())
}

/// `cuGraphExecKernelNodeSetParams`
pub fn exec_set_kernel(handle: usize, node: usize, params: *const KernelParams) -> Done {
    exec_set(handle, node, crate::arg(params)?.work()?)
}

/// `cuGraphExecKernelNodeSetParams_v2`
pub fn exec_set_kernel_v2(handle: usize, node: usize, params: *const KernelParams2) -> Done {
    exec_set(handle, node, crate::arg(params)?.work()?)
}

/// `cuGraphExecMemcpyNodeSetParams`
pub fn exec_set_copy(handle: usize, node: usize, params: *const copy::Copy3D, _context: usize) -> Done {
    exec_set(handle, node, Work::Copy(Arc::new(crate::arg(params)?.decode()?)))
}

/// `cuGraphExecMemsetNodeSetParams`
pub fn exec_set_fill(handle: usize, node: usize, params: *const FillParams, _context: usize) -> Done {
    exec_set(handle, node, crate::arg(params)?.work()?)
}

/// `cuGraphNodeSetEnabled`
pub fn set_enabled(handle: usize, node: usize, enabled: u32) -> Done {
    let exec = exec(handle)?;
    let mut nodes = lock(&exec.nodes);
    nodes.iter_mut().find(|s| s.node == node).ok_or(Error::INVALID_VALUE)?.enabled = enabled != 0;
    Ok(())
}

/// `cuGraphNodeGetEnabled`
pub fn get_enabled(handle: usize, node: usize, enabled: *mut u32) -> Done {
    let exec = exec(handle)?;
    let is = lock(&exec.nodes).iter().find(|s| s.node == node).ok_or(Error::INVALID_VALUE)?.enabled;
    out(enabled, u32::from(is))
}

/// `CUgraphExecUpdateResultInfo`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct UpdateResult {
    result: u32,
    node: usize,
    from: usize,
}

/// `cuGraphExecUpdate_v2`: the new graph must have the same kinds of nodes in the same order.
pub fn exec_update_v2(handle: usize, graph: usize, result: *mut UpdateResult) -> Done {
    let (exec, new) = (exec(handle)?, of(graph)?.steps()?);
    let mut nodes = lock(&exec.nodes);
    let same = nodes.len() == new.len()
        && nodes.iter().zip(&new).all(|(a, b)| std::mem::discriminant(&a.work) == std::mem::discriminant(&b.work));
    crate::out_if(result, UpdateResult { result: if same { 0 } else { 2 }, node: 0, from: 0 });
    if !same {
        return Err(Error::GRAPH_EXEC_UPDATE_FAILURE);
    }
    for (step, new) in nodes.iter_mut().zip(new) {
        step.work = new.work;
    }
    Ok(())
}

/// `cuGraphExecUpdate`
pub fn exec_update(handle: usize, graph: usize, node: *mut usize, result: *mut u32) -> Done {
    let mut info = UpdateResult { result: 0, node: 0, from: 0 };
    let done = exec_update_v2(handle, graph, &mut info);
    crate::out_if(node, 0);
    crate::out_if(result, info.result);
    done
}

/// `cuGraphUpload`
pub fn upload(flavour: Flavour, handle: usize, stream: usize) -> Done {
    exec(handle)?;
    stream::of(stream, flavour).map(drop)
}

/// `cuGraphLaunch`
pub fn launch(flavour: Flavour, handle: usize, stream: usize) -> Done {
    let (exec, stream) = (exec(handle)?, stream::of(stream, flavour)?);
    stream.context.error()?;
    let works: Arc<[Work]> = lock(&exec.nodes).iter().filter(|s| s.enabled).map(|s| s.work.clone()).collect();
    let events: Vec<Arc<Event>> = works
        .iter()
        .filter_map(|w| if let Work::RecordEvent(event) = w { Some(event.clone()) } else { None })
        .collect();
    let Some(work) = capture::add(&stream, Work::Graph(works))? else { return Ok(()) };
    let mut last = lock(&exec.last);
    let point = stream.enqueue(work, last.take().into_iter().collect());
    events.iter().for_each(|event| event.mark(point.clone()));
    *last = Some(point);
    Ok(())
}
