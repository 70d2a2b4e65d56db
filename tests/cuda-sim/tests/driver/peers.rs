//! GPUs without peer access.

use crate::support::*;
use std::ptr;

const M: usize = 1 << 20;
const INVALID_VALUE: u32 = 1;
const INVALID_DEVICE: u32 = 101;
const UNSUPPORTED: u32 = 217;
const APART: &[(&str, &str)] = &[("CUDA_SIM_GPUS", "3"), ("CUDA_SIM_NO_PEERS", "0-1")];

/// Creates a chunk on a GPU and maps it for that GPU.
fn mapped(device: u32, len: usize) -> u64 {
    let properties: [u32; 8] = [1, 0, 1, device, 0, 0, 0, 0];
    let handle = get("cuMemCreate", &[len, properties.as_ptr() as usize, 0]);
    let at = get("cuMemAddressReserve", &[len, 0, 0, 0]);
    assert_eq!(cu("cuMemMap", &[at, len, 0, handle, 0]), 0);
    assert_eq!(let_in(device, at as u64, len), 0);
    at as u64
}

fn let_in(device: u32, at: u64, len: usize) -> u32 {
    let access: [u32; 3] = [1, device, 3];
    cu("cuMemSetAccess", &[at as usize, len, access.as_ptr() as usize, 1])
}

/// Returns the primary contexts of the first two GPUs. The context of the first GPU is current.
fn contexts() -> [usize; 2] {
    assert_eq!(cu("cuInit", &[0]), 0);
    let contexts = [0, 1].map(|device| get("cuDevicePrimaryCtxRetain", &[device]));
    assert_eq!(cu("cuCtxSetCurrent", &[contexts[0]]), 0);
    contexts
}

/// Returns memory on each of the two GPUs. The memory of the first GPU contains `value` in each
/// word.
fn filled(contexts: [usize; 2], value: u32, new: impl Fn(u32) -> u64) -> [u64; 2] {
    let places = [0, 1].map(|device| {
        assert_eq!(cu("cuCtxSetCurrent", &[contexts[device]]), 0);
        new(device as u32)
    });
    assert_eq!(cu("cuCtxSetCurrent", &[contexts[0]]), 0);
    assert_eq!(cu("cuMemsetD32_v2", &[places[0] as usize, value as usize, 2 * M / 4]), 0);
    places
}

#[test]
fn isolated_gpus_cannot_get_peer_access() {
    isolated("peers::isolated_gpus_cannot_get_peer_access", APART, || {
        let contexts = contexts();
        let can = |from, to| get("cuDeviceCanAccessPeer", &[from, to]) as u32;
        assert_eq!([can(0, 1), can(1, 0), can(0, 2), can(2, 1), can(1, 1)], [0, 0, 1, 1, 0]);
        assert_eq!(cu("cuCtxEnablePeerAccess", &[contexts[1], 0]), UNSUPPORTED);
        let at = mapped(0, 2 * M);
        assert_eq!(let_in(1, at, 2 * M), INVALID_DEVICE);
        assert_eq!(let_in(2, at, 2 * M), 0);
    });
}

#[test]
fn plain_memory_is_copied_without_peer_access() {
    isolated("peers::plain_memory_is_copied_without_peer_access", APART, || {
        let contexts = contexts();
        let [from, to] = filled(contexts, 7, |_| alloc(2 * M));
        assert_eq!(cu("cuMemcpyDtoD_v2", &[to as usize, from as usize, 2 * M]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), 0);
        assert_eq!(read(to), 7, "the memory of the other GPU");
    });
}

#[test]
fn mapped_memory_is_copied_only_between_contexts() {
    isolated("peers::mapped_memory_is_copied_only_between_contexts", APART, || {
        let contexts = contexts();
        let [from, to] = filled(contexts, 9, |device| mapped(device, 2 * M));
        for (call, arguments) in [
            ("cuMemcpy", vec![]),
            ("cuMemcpyDtoD_v2", vec![]),
            ("cuMemcpyAsync", vec![0]),
            ("cuMemcpyDtoDAsync_v2", vec![0]),
        ] {
            let arguments: Vec<usize> = [to as usize, from as usize, 2 * M].into_iter().chain(arguments).collect();
            assert_eq!(cu(call, &arguments), INVALID_VALUE, "{call}");
        }
        let mut value = 0_u32;
        let place = ptr::from_mut(&mut value) as usize;
        assert_eq!(cu("cuMemcpyDtoH_v2", &[place, to as usize, 4]), INVALID_VALUE, "from the wrong context");
        assert_eq!(cu("cuMemcpyPeer", &[to as usize, contexts[1], from as usize, contexts[0], 2 * M]), 0);
        assert_eq!(cu("cuCtxSynchronize", &[]), 0);
        assert_eq!(cu("cuCtxSetCurrent", &[contexts[1]]), 0);
        assert_eq!(read(to), 9);
        // With the contexts exchanged, the memory is not found.
        assert_eq!(cu("cuMemcpyPeer", &[to as usize, contexts[0], from as usize, contexts[1], 2 * M]), INVALID_VALUE);
    });
}

#[test]
fn exclusive_mode_admits_one_process() {
    isolated(
        "peers::exclusive_mode_admits_one_process",
        &[("CUDA_SIM_GPUS", "2"), ("CUDA_SIM_EXCLUSIVE", "1")],
        || {
            assert_eq!(cu("cuInit", &[0]), 0);
            let mode = |device| get("cuDeviceGetAttribute", &[20, device]) as u32;
            assert_eq!([mode(0), mode(1)], [0, 3]);
        },
    );
}
