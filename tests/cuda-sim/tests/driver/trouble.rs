//! Memory faults: hidden, fragmented, foreign and refused memory.

use crate::support::*;
use cuda_sim_gpus::{
    account::Figures,
    trouble::{self, Refusal, Stranger},
};
use std::{
    process, thread,
    time::{Duration, Instant},
};

const M: usize = 1 << 20;
const OUT_OF_MEMORY: u32 = 2;
/// A machine with 84 MiB free beside a context.
const MACHINE: &[(&str, &str)] = &[("CUDA_SIM_MEMORY", "100M"), ("CUDA_SIM_CONTEXT", "16M")];

fn with(more: &[(&'static str, &'static str)]) -> Vec<(&'static str, &'static str)> {
    MACHINE.iter().chain(more).copied().collect()
}

fn try_alloc(len: usize) -> u32 {
    let mut at = 0_u64;
    cu("cuMemAlloc_v2", &[&raw mut at as usize, len])
}

#[test]
fn hidden_bytes_are_not_free() {
    isolated("trouble::hidden_bytes_are_not_free", &with(&[("CUDA_SIM_HIDDEN", "10M")]), || {
        let (_gpu, dir) = (Gpu::open(), simulated_machine());
        assert_eq!(free_memory(), 74 * M);
        trouble::hide(&dir, 0, 30 << 20).expect("a file");
        assert_eq!(free_memory(), 44 * M);
        assert_eq!(Figures::of(0).used(0), 16 << 20, "what NVML counts");
        assert_eq!(chunk(46 * M), Err(OUT_OF_MEMORY));
        assert_eq!(try_alloc(46 * M), OUT_OF_MEMORY);
        assert_eq!(try_alloc(44 * M), 0);
        trouble::hide(&dir, 0, 0).expect("no file");
        assert_eq!(free_memory(), 30 * M);
    });
}

#[test]
fn fragmented_bytes_are_free_but_unusable() {
    isolated("trouble::fragmented_bytes_are_free_but_unusable", &with(&[("CUDA_SIM_FRAGMENTED", "4M")]), || {
        let (_gpu, dir) = (Gpu::open(), simulated_machine());
        trouble::fragment(&dir, 0, 20 << 20).expect("a file");
        assert_eq!(free_memory(), 84 * M);
        assert!(chunk(60 * M).is_ok());
        assert_eq!(chunk(2 * M), Err(OUT_OF_MEMORY));
        assert_eq!(free_memory(), 24 * M);
        trouble::fragment(&dir, 0, 0).expect("no file");
        assert!(chunk(20 * M).is_ok());
        assert_eq!(chunk(2 * M), Err(OUT_OF_MEMORY), "the environment's stay");
    });
}

#[test]
fn foreign_processes_reduce_the_free_memory() {
    isolated("trouble::foreign_processes_reduce_the_free_memory", MACHINE, || {
        let (_gpu, dir) = (Gpu::open(), simulated_machine());
        let (seen, unseen) = (
            Stranger { bytes: 30 << 20, pid: Some(1), is_graphics: false },
            Stranger { bytes: 20 << 20, pid: None, is_graphics: false },
        );
        trouble::set_strangers(&dir, 0, &[seen, unseen]).expect("a file");
        assert_eq!(free_memory(), 34 * M);
        assert_eq!(Figures::of(0).strangers, [seen, unseen]);
        assert_eq!((try_alloc(36 * M), try_alloc(24 * M)), (OUT_OF_MEMORY, 0));
        let greedy = Stranger { bytes: 1 << 40, pid: None, is_graphics: false };
        trouble::set_strangers(&dir, 0, &[seen, greedy]).expect("a file");
        assert_eq!(free_memory(), 0);
        assert_eq!(Figures::of(0).used(0), 100 << 20, "never more than there is");
        trouble::set_strangers(&dir, 0, &[]).expect("no file");
        assert_eq!(free_memory(), 60 * M);
    });
}

#[test]
fn chunks_can_be_refused_temporarily() {
    isolated("trouble::chunks_can_be_refused_temporarily", MACHINE, || {
        let (_gpu, dir) = (Gpu::open(), simulated_machine());
        let refuse = |refusal| trouble::refuse(&dir, 0, refusal).expect("a file");
        refuse(Some(Refusal::default()));
        assert_eq!(chunk(2 * M), Err(OUT_OF_MEMORY));
        assert_eq!(free_memory(), 84 * M, "and nobody sees why");
        refuse(None);
        assert!(chunk(2 * M).is_ok());
        refuse(Some(Refusal { pid: Some(1), lasts: None }));
        assert!(chunk(2 * M).is_ok(), "another process is meant");
        let refuse_for = |lasts| refuse(Some(Refusal { pid: Some(process::id()), lasts: Some(lasts) }));
        refuse_for(Duration::from_secs(600));
        assert_eq!(chunk(2 * M), Err(OUT_OF_MEMORY));
        refuse_for(Duration::from_millis(10));
        thread::sleep(Duration::from_millis(20));
        assert!(chunk(2 * M).is_ok());
    });
}

#[test]
fn contexts_can_grow_in_steps() {
    let slow = [("CUDA_SIM_CONTEXT", "64M"), ("CUDA_SIM_CONTEXT_TIME", "400")];
    isolated("trouble::contexts_can_grow_in_steps", &with(&slow), || {
        assert_eq!(cu("cuInit", &[0]), 0);
        let begin = Instant::now();
        let making = thread::spawn(|| get("cuDevicePrimaryCtxRetain", &[0]));
        let mut seen = Vec::new();
        while !making.is_finished() {
            seen.push(Figures::of(0).used(0));
            thread::sleep(Duration::from_millis(1));
        }
        making.join().expect("a context");
        assert!(begin.elapsed() >= Duration::from_millis(400));
        let parts = seen.iter().filter(|used| (1..64 << 20).contains(*used));
        assert!(parts.clone().count() > 0, "{seen:?}");
        assert!(parts.max() <= Some(&(14 << 20)), "most comes last: {seen:?}");
        assert_eq!(Figures::of(0).used(0), 64 << 20);
        let mut second = 0_usize;
        assert_eq!(cu("cuCtxCreate_v2", &[&raw mut second as usize, 0, 0]), OUT_OF_MEMORY);
        assert_eq!(Figures::of(0).used(0), 64 << 20, "what it had taken is free again");
    });
}

#[test]
fn contexts_can_grow_with_their_first_work() {
    let growth = [("CUDA_SIM_CONTEXT_GROWTH", "10M"), ("CUDA_SIM_CONTEXT_GROWTH_STEPS", "3")];
    isolated("trouble::contexts_can_grow_with_their_first_work", &with(&growth), || {
        assert_eq!(cu("cuInit", &[0]), 0);
        let context = get("cuCtxCreate_v2", &[0, 0]);
        assert_eq!(free_memory(), 84 * M);
        let gpu = Gpu::open(); // the primary context, which has loaded a module
        let third = 10 * M / 3;
        assert_eq!(free_memory(), 84 * M - 16 * M - third);
        assert_eq!(gpu.launch("empty", 0, &[]), 0);
        trouble::hide(&simulated_machine(), 0, 64 << 20).expect("a file");
        assert_eq!(gpu.launch("empty", 0, &[]), OUT_OF_MEMORY);
        trouble::hide(&simulated_machine(), 0, 0).expect("no file");
        assert_eq!((gpu.launch("empty", 0, &[]), gpu.launch("empty", 0, &[])), (0, 0));
        assert_eq!(free_memory(), 58 * M);
        assert_eq!(cu("cuCtxSetCurrent", &[context]), 0);
        assert_eq!(cu("cuDevicePrimaryCtxReset_v2", &[0]), 0);
        assert_eq!(free_memory(), 84 * M);
    });
}
