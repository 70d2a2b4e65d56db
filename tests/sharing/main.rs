//! Programs that share a GPU. Each test runs a scheduler, and real processes with `libnvshare.so`,
//! on the simulated GPU. A *stranger* is a process without nvshare that uses the GPU.

mod accounting;
mod beyond_gpu;
mod claims;
mod consumer_card;
mod costs;
mod crowd;
mod drain;
mod engine;
mod environment;
mod faults;
mod files;
mod foreign_checkpoints;
mod guest;
mod host;
mod host_steps;
mod ipc;
mod limits;
mod memory;
mod memory_info;
mod metrics;
mod moves;
mod nccl;
mod offline;
mod peers;
mod placement;
mod pools;
mod progress;
mod restart;
mod rooms;
mod sleep;
mod turns;
mod vmm;
