//! Peers: GPUs of this process whose work accesses each other's memory. The causes are
//! `cuCtxEnablePeerAccess`, copies between the GPUs, and access rights that the program sets. GPUs are
//! also peers if one call submits work to both, for example the launch of a graph that was captured in
//! streams of both.
//!
//! Work for a GPU passes only when the gates of all its peers are open too. Memory of a GPU is
//! evicted only when the work of all its peers is done too. A client holds the locks of peers only
//! together.

use crate::{
    connection,
    driver::{query, types::*},
    env::trace::trace,
    gpu::{self, Gpu},
    submit::epoch,
    sys::{
        sync::{Mutex, Rank},
        time,
    },
};
use core::time::Duration;

/// The interval between checks whether transfers are done.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Couples two GPUs: they and all of their peers become peers of each other.
pub fn couple(a: &'static Gpu, b: &'static Gpu) {
    static ONE: Mutex<()> = Mutex::new(Rank::Coupling, ());
    if a.index == b.index || a.is_peer_of(b) {
        return;
    }
    let _one = ONE.lock();
    if a.is_peer_of(b) {
        return;
    }
    // Moves must end first: chunks in flight would be restored with their old access rights. A paused mover
    // starts no move.
    [a, b].iter().for_each(|gpu| gpu.moving.lock().pause());
    for (gpu, space) in [a, b].iter().filter_map(|gpu| Some((gpu, gpu.space()?))) {
        while !gpu.report_after(space, || gpu.moving.lock().rest(space)) {
            time::sleep(POLL_INTERVAL);
        }
    }
    let together =
        [a, b].iter().flat_map(|gpu| gpu.peers()).fold(1 << a.index | 1 << b.index, |set, g| set | 1 << g.index);
    for gpu in gpu::in_use().filter(|g| together >> g.index & 1 == 1) {
        gpu.work.set_peers(together & !(1 << gpu.index));
    }
    epoch::end();
    trace!("GPUs {} and {} can access each other's memory", a.index, b.index);
    reach(a, b);
    reach(b, a);
    [a, b].iter().for_each(|gpu| gpu.moving.lock().resume());
    connection::wake();
}

/// Gives work on `from` the same access to memory of `to` as the driver would give it to
/// `cuMemAlloc` memory there.
fn reach(from: &Gpu, to: &Gpu) {
    if let (true, Some(space)) = (can_reach(from, to), to.space()) {
        space.lock().let_in(from.index);
    }
}

/// Whether work on `from` can access memory of `to`.
pub fn can_reach(from: &Gpu, to: &Gpu) -> bool {
    query::can_access_peer(from.index as CUdevice, to.index as CUdevice) == Some(true)
}

/// Called when the program gives a GPU access rights to memory of another GPU.
pub fn on_access(owner: &'static Gpu, device: CUdevice) {
    if let Some(gpu) = gpu::by_ordinal(device) {
        couple(owner, gpu);
    }
}
