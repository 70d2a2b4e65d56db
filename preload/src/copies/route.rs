//! Calls that show which GPUs access each other's memory ([`crate::gpu::peers`]), and the [`Route`] of
//! a copy between different GPUs.

use crate::{
    driver::{self, types::*},
    gpu::{self, Gpu, peers},
    registry::{self, driver_memory, virtual_memory},
    submit,
    sys::errno,
};
use alloc::vec::Vec;

/// Whether this process uses several GPUs. Otherwise this module is not needed.
#[inline]
fn are_several() -> bool {
    gpu::are_several() && submit::is_active()
}

/// The source or destination of a copy, as the program specifies it.
#[derive(Debug, Clone, Copy)]
pub enum Side {
    Host,
    /// An address in GPU or host memory.
    Address(CUdeviceptr),
    Array(CUarray),
}

/// The method of a copy, and the gate at which it waits.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    pub way: Way,
    /// The GPU at whose gate the copy waits, if this library does not manage the stream's GPU. `None` means
    /// the gate of the stream's GPU.
    pub gate: Option<&'static Gpu>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The program's own call.
    Direct,
    /// A copy whose source and destination are in GPU memory that the stream's GPU cannot access
    /// completely. The driver stages such a copy. To copy chunks, the driver needs the contexts of
    /// destination and source, which this variant contains.
    Peers([CUcontext; 2]),
    /// A copy between the host and a GPU whose memory the stream's GPU cannot access. The copy is made in
    /// this context of the memory's GPU.
    Owner(CUcontext),
}

impl Route {
    const DIRECT: Self = Self { way: Way::Direct, gate: None };
}

/// The location and owner of a copy's GPU memory.
#[derive(Debug, Clone, Copy)]
struct Place {
    device: CUdevice,
    /// The context in which the memory was allocated; 0 if unknown.
    allocated_in: usize,
    /// The GPU, if this library manages it.
    gpu: Option<&'static Gpu>,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Chunks of this library. Another GPU has access only if this library has granted access, as
    /// it does for peers.
    Ours,
    /// Chunks of another process. Only the GPU that uses them has access.
    Imported,
    /// Memory whose access rights the driver or the program sets.
    Other,
}

impl Place {
    fn of(gpu: &'static Gpu, allocated_in: usize, kind: Kind) -> Self {
        Self { device: gpu.index as CUdevice, allocated_in, gpu: Some(gpu), kind }
    }

    /// Returns a context for copying the memory: if possible, the context in which the memory was
    /// allocated.
    fn context(&self) -> CUcontext {
        let contexts = self.gpu.map_or_else(Vec::new, |gpu| gpu.work.contexts());
        let own = contexts.iter().find(|known| **known as usize == self.allocated_in);
        own.or(contexts.first()).copied().unwrap_or(self.allocated_in as CUcontext)
    }

    /// Returns the place of memory that this library knows.
    fn find(side: Side) -> Option<Self> {
        match side {
            Side::Host | Side::Address(0) => None,
            Side::Address(address) => match registry::find(address) {
                Some((gpu, it)) => {
                    Some(Self::of(gpu, it.context, if it.is_foreign() { Kind::Imported } else { Kind::Ours }))
                }
                None => {
                    let memory = virtual_memory::TABLE.lock().at(address).map(|(_, memory)| memory);
                    memory.map(|memory| Self::of(memory.gpu, 0, Kind::Other))
                }
            },
            Side::Array(array) => driver_memory::array(array).map(|(gpu, context)| Self::of(gpu, context, Kind::Other)),
        }
    }

    /// Returns the place of memory according to the driver. Managed and host memory has no place, because
    /// every GPU can access it.
    fn query(side: Side) -> Option<Self> {
        use pointer_attribute::{CONTEXT, DEVICE_ORDINAL, IS_MANAGED, MEMORY_TYPE};
        let Side::Address(address @ 1..) = side else { return None };
        let attribute = |which| {
            let mut value = 0u64;
            // SAFETY: `value` has room for any of these attributes.
            let result = unsafe { driver::cuPointerGetAttribute((&raw mut value).cast(), which, address) };
            (result == SUCCESS).then_some(value)
        };
        let is_device = attribute(MEMORY_TYPE)? as u32 == MEMORYTYPE_DEVICE && attribute(IS_MANAGED) == Some(0);
        let device = attribute(DEVICE_ORDINAL).filter(|_| is_device)? as CUdevice;
        let context = attribute(CONTEXT).unwrap_or(0) as usize;
        match gpu::by_ordinal(device) {
            Some(gpu) => Some(Self::of(gpu, context, Kind::Other)),
            None if context != 0 => Some(Self { device, allocated_in: context, gpu: None, kind: Kind::Other }),
            None => None,
        }
    }
}

/// Couples these GPUs and the stream's GPU as peers. If this library does not manage the stream's
/// GPU (`own` is `None`), returns the GPU at whose gate the call waits.
fn couple_all(own: Option<&'static Gpu>, gpus: impl Iterator<Item = &'static Gpu>) -> Option<&'static Gpu> {
    let mut all = own.into_iter().chain(gpus);
    let first = all.next()?;
    all.for_each(|other| peers::couple(first, other));
    Some(first).filter(|_| own.is_none())
}

/// Returns the route of a copy between two sides, in this stream. The GPUs of both sides are peers from
/// now on.
#[inline]
pub fn route(stream: CUstream, sides: [Side; 2]) -> Route {
    if are_several() { errno::preserve(|| find(stream, sides)) } else { Route::DIRECT }
}

fn find(stream: CUstream, sides: [Side; 2]) -> Route {
    let known = sides.map(Place::find);
    let here = gpu::device_of(stream);
    let gate = couple_all(here.and_then(gpu::by_ordinal), known.iter().flatten().filter_map(|place| place.gpu));
    let has_chunks = known.iter().flatten().any(|place| place.kind != Kind::Other);
    let Some(here) = here.filter(|_| has_chunks) else { return Route { way: Way::Direct, gate } };
    let within_reach = |place: &Place| here == place.device || has_access(here, place);
    let [to, from] =
        [(known[0], sides[0]), (known[1], sides[1])].map(|(known, side)| known.or_else(|| Place::query(side)));
    let way = match (to, from) {
        _ if to.iter().chain(&from).all(within_reach) => Way::Direct,
        (Some(to), Some(from)) => Way::Peers([to.context(), from.context()]),
        (Some(only), None) | (None, Some(only)) => Way::Owner(only.context()),
        (None, None) => Way::Direct,
    };
    Route { way, gate }
}

/// Whether this GPU has been granted access to a place in memory of this library. Peers have access if
/// the hardware supports it.
fn has_access(device: CUdevice, place: &Place) -> bool {
    let peer = gpu::by_ordinal(device).filter(|_| place.kind == Kind::Ours);
    peer.zip(place.gpu).is_some_and(|(peer, gpu)| peers::can_reach(peer, gpu))
}

/// Called when the program has given its current context access to another context.
pub fn on_peer_access(context: CUcontext) {
    contexts(CTX_DEFAULT_STREAM, || Some([context, core::ptr::null_mut()]));
}

/// Returns the route of a call that the program makes itself, and that concerns these GPUs.
#[inline]
fn direct<I: Iterator<Item = &'static Gpu>>(stream: CUstream, gpus: impl FnOnce() -> I) -> Route {
    if !are_several() {
        return Route::DIRECT;
    }
    errno::preserve(|| Route { way: Way::Direct, gate: couple_all(gpu::of_stream(stream), gpus()) })
}

/// Returns the route of a copy between contexts.
#[inline]
pub fn contexts(stream: CUstream, named: impl FnOnce() -> Option<[CUcontext; 2]>) -> Route {
    direct(stream, || {
        let named = named().into_iter().flatten().filter(|context| !context.is_null());
        named.filter_map(|context| gpu::in_use().find(|gpu| gpu.work.has_context(context)))
    })
}

/// Returns the route of a call that copies between many sides.
#[inline]
pub fn many<I: Iterator<Item = Side>>(stream: CUstream, sides: impl FnOnce() -> I) -> Route {
    direct(stream, || sides().filter_map(|side| Place::find(side)?.gpu))
}
