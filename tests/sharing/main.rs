//! Programs that share a GPU, end to end: a scheduler and real processes with `libnvshare.so` on the simulated GPU.

mod accounting;
mod consumer_card;
mod crowd;
mod drain;
mod engine;
mod environment;
mod faults;
mod guest;
mod host;
mod ipc;
mod limits;
mod memory;
mod memory_info;
mod metrics;
mod moves;
mod offline;
mod peers;
mod placement;
mod pools;
mod progress;
mod restart;
mod rooms;
mod sleep;
mod thrash;
mod turns;
mod vmm;
