//! Nodes: adding them, and reading and changing their parameters.

use super::*;

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

/// `CUgraphNodeParams` for a copy.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NodeParams {
    kind: u32,
    reserved: [u32; 3],
    flags: [u32; 2],
    context: usize,
    copy: copy::Copy3D,
}

/// `cuGraphAddNode`: supports only copies.
pub fn add_any(to: *mut usize, graph: usize, after: *const usize, count: usize, params: *const NodeParams) -> Done {
    const COPY: u32 = 1;
    // SAFETY: by the API's contract, the program passes null or a valid description, which begins with its
    // kind.
    if params.is_null() || unsafe { (*params).kind } != COPY {
        return Err(Error::NOT_SUPPORTED);
    }
    // SAFETY: the pointer is not null and its description is of a copy, as just checked. By the API's
    // contract, that description is valid.
    let (copy, context) = unsafe { (&raw const (*params).copy, (*params).context) };
    add_copy(to, graph, after, count, copy, context)
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

/// `cuGraphAddChildGraphNode`: copies the current nodes of the child.
pub fn add_child(to: *mut usize, graph: usize, after: *const usize, count: usize, child: usize) -> Done {
    let child = of(child)?;
    add(to, graph, after, count, plain(Work::Graph(child.works()?)))
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

/// `cuGraphKernelNodeGetParams`: the returned pointers are valid until the next call for this node.
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

/// `cuGraphMemcpyNodeGetParams`: does not support captured copies.
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
