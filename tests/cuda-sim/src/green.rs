//! Green contexts: parts of a GPU's multiprocessors with their own streams. Green contexts share
//! the primary context's memory, keep the primary context alive, and are synchronised with it. In
//! the simulator, the smaller number of multiprocessors changes nothing.

use crate::{
    context::{self, Context},
    device,
    error::{Done, Error},
    event, out,
    registry::{Registry, handle_of},
    stream::{self, Flavour},
};
use std::sync::Arc;

/// A green context.
#[derive(Debug)]
struct Green {
    context: Arc<Context>,
    device: i32,
    sms: u32,
}

/// The result of `cuDevResourceGenerateDesc`: a number of multiprocessors.
#[derive(Debug)]
struct Description(u32);

static GREENS: Registry<Green> = Registry::new();
static DESCRIPTIONS: Registry<Description> = Registry::new();

/// `CUdevResource`. Only multiprocessors are supported.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Resource {
    kind: u32,
    _padding: [u32; 23],
    sms: u32,
    _rest: [u32; 11],
}

const SM: u32 = 1;
/// On compute capability 9, multiprocessors are allocated in multiples of this number.
const STEP: u32 = 8;
const DEFAULT_STREAM: u32 = 1;

fn resource(sms: u32) -> Resource {
    Resource { kind: SM, _padding: [0; 23], sms, _rest: [0; 11] }
}

fn answer(to: *mut Resource, kind: u32, sms: u32) -> Done {
    if kind == SM { out(to, resource(sms)) } else { Err(Error::INVALID_VALUE) }
}

fn all() -> Result<u32, Error> {
    let mut sms = 0;
    device::attribute(&mut sms, 16, 0)?;
    Ok(sms as u32)
}

fn of(green: usize) -> Result<Arc<Green>, Error> {
    GREENS.get(green)
}

/// Returns the handle of the green context that has this context, or 0 if none has it.
pub fn of_context(context: &Arc<Context>) -> usize {
    GREENS.all().iter().find(|g| Arc::ptr_eq(&g.context, context)).map_or(0, handle_of)
}

/// `cuDeviceGetDevResource`
pub fn of_device(device: i32, to: *mut Resource, kind: u32) -> Done {
    device::gpu(device)?;
    answer(to, kind, all()?)
}

/// `cuCtxGetDevResource`
pub fn of_current(context: usize, to: *mut Resource, kind: u32) -> Done {
    let green = of_context(&context::of(context)?);
    let sms = if green == 0 { all()? } else { of(green)?.sms };
    answer(to, kind, sms)
}

/// `cuGreenCtxGetDevResource`
pub fn of_green(green: usize, to: *mut Resource, kind: u32) -> Done {
    answer(to, kind, of(green)?.sms)
}

/// `cuDevSmResourceSplitByCount`
pub fn split(
    groups: *mut Resource,
    count: *mut u32,
    from: *const Resource,
    rest: *mut Resource,
    _flags: u32,
    least: u32,
) -> Done {
    let (from, room) = (crate::arg(from)?, crate::arg(count.cast_const())?);
    let each = least.max(1).next_multiple_of(STEP);
    if from.kind != SM || each > from.sms {
        return Err(Error::INVALID_VALUE);
    }
    let fit = from.sms / each;
    if groups.is_null() {
        return out(count, fit);
    }
    let made = fit.min(room);
    for i in 0..made as usize {
        // SAFETY: by the API's contract, the array has room for `count` groups.
        unsafe { groups.add(i).write(resource(each)) };
    }
    crate::out_if(rest, resource(from.sms - made * each));
    out(count, made)
}

/// `cuDevResourceGenerateDesc`
pub fn describe(description: *mut usize, resources: *const Resource, count: u32) -> Done {
    if resources.is_null() || count == 0 || description.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passes `count` resources.
    let sms = unsafe { std::slice::from_raw_parts(resources, count as usize) }.iter().map(|r| r.sms).sum();
    out(description, DESCRIPTIONS.add(Arc::new(Description(sms))))
}

/// `cuGreenCtxCreate`
pub fn create(green: *mut usize, description: usize, device: i32, flags: u32) -> Done {
    let description = DESCRIPTIONS.find(description).ok_or(Error::INVALID_VALUE)?;
    if green.is_null() || flags != DEFAULT_STREAM {
        return Err(Error::INVALID_VALUE);
    }
    let mut primary = 0;
    context::retain_primary(&mut primary, device)?;
    let context = Context::green(context::of(primary)?)?;
    out(green, GREENS.add(Arc::new(Green { context, device, sms: description.0 })))
}

/// `cuGreenCtxDestroy`
pub fn destroy(green: usize) -> Done {
    let green = GREENS.remove(green)?;
    green.context.destroy();
    context::release_primary(green.device)
}

/// `cuCtxFromGreenCtx`
pub fn context(context: *mut usize, green: usize) -> Done {
    out(context, of(green)?.context.handle())
}

/// `cuGreenCtxRecordEvent`
pub fn record(green: usize, event: usize) -> Done {
    event::context_record(of(green)?.context.handle(), event)
}

/// `cuGreenCtxWaitEvent`
pub fn wait(green: usize, event: usize) -> Done {
    event::context_wait(of(green)?.context.handle(), event)
}

/// `cuGreenCtxStreamCreate`: creates only streams that do not wait for the legacy stream.
pub fn stream(to: *mut usize, green: usize, flags: u32, priority: i32) -> Done {
    const NON_BLOCKING: u32 = 1;
    let green = of(green)?;
    if to.is_null() || flags != NON_BLOCKING {
        return Err(Error::INVALID_VALUE);
    }
    green.context.error()?;
    stream::create_in(&green.context, to, flags, priority)
}

/// `cuStreamGetGreenCtx`
pub fn of_stream(stream: usize, green: *mut usize) -> Done {
    out(green, of_context(&stream::of(stream, Flavour::Legacy)?.context))
}
