//! Access between the GPUs of one process.

use crate::{
    context, device,
    error::{Done, Error},
    out,
};
use cuda_sim_gpus::{Config, MAX_GPUS, place};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bit *n* of entry *m*: GPU *m* may access plain allocations of GPU *n*.
static PEERS: [AtomicU64; MAX_GPUS] = [const { AtomicU64::new(0) }; MAX_GPUS];

/// Whether kernels of GPU `from` may access plain allocations of GPU `to`.
pub fn enabled(from: usize, to: usize) -> bool {
    from == to || PEERS[from].load(Ordering::Relaxed) & (1 << to) != 0
}

/// Whether peer access can be enabled between two of the process's GPUs.
pub fn are_peers(a: usize, b: usize) -> bool {
    Config::get().are_peers(place(a), place(b))
}

/// `cuDeviceCanAccessPeer`
pub fn can_access(can: *mut i32, device: i32, peer: i32) -> Done {
    let (device, peer) = (device::gpu(device)?, device::gpu(peer)?);
    out(can, i32::from(are_peers(device, peer)))
}

/// `cuDeviceGetP2PAttribute`
pub fn attribute(value: *mut i32, attribute: u32, device: i32, peer: i32) -> Done {
    let (device, peer) = (device::gpu(device)?, device::gpu(peer)?);
    if device == peer {
        return Err(Error::INVALID_DEVICE);
    }
    match attribute {
        1 => out(value, 0),
        2..=4 => out(value, i32::from(are_peers(device, peer))),
        5 => out(value, 0),
        _ => Err(Error::INVALID_VALUE),
    }
}

/// `cuCtxEnablePeerAccess`
pub fn enable(peer: usize, flags: u32) -> Done {
    let (own, peer) = (context::healthy()?, context::of(peer)?);
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if own.gpu == peer.gpu {
        return Err(Error::INVALID_DEVICE);
    }
    if !are_peers(own.gpu, peer.gpu) {
        return Err(Error::PEER_ACCESS_UNSUPPORTED);
    }
    let before = PEERS[own.gpu].fetch_or(1 << peer.gpu, Ordering::Relaxed);
    if before & (1 << peer.gpu) != 0 { Err(Error::PEER_ACCESS_ALREADY_ENABLED) } else { Ok(()) }
}

/// `cuCtxDisablePeerAccess`
pub fn disable(peer: usize) -> Done {
    let (own, peer) = (context::healthy()?, context::of(peer)?);
    let before = PEERS[own.gpu].fetch_and(!(1 << peer.gpu), Ordering::Relaxed);
    if before & (1 << peer.gpu) == 0 { Err(Error::PEER_ACCESS_NOT_ENABLED) } else { Ok(()) }
}
