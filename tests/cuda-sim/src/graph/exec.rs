//! Executable graphs: instantiating, changing and launching them.

use super::*;

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

/// `cuGraphExecUpdate_v2`: the new graph must have nodes of the same kinds in the same order.
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
