//! This process as a client of the scheduler. From the initialisation of CUDA on, one thread acts for it.
//!
//! - [`thread`]: the client's thread. It connects, carries out the scheduler's messages and moves memory.
//! - [`turn`]: one GPU lock, from grant to release. `nvshare-idle-gap` decides when to release it early;
//!   [`utilization`] measures how busy the client keeps the GPU.
//! - [`exit`]: the end of the process. [`offline`]: how clients share a GPU without a scheduler.
//! - [`placement`]: the GPUs that this process sees.

mod exit;
pub mod offline;
#[cfg(not(test))]
mod panic;
pub mod placement;
pub mod thread;
pub mod turn;
pub mod utilization;

use crate::{
    connection,
    driver::presence,
    env::{settings, trace::trace},
    gate::{self, barrier, epoch, threads},
    gpu,
    memory::file,
    sys::{c, lock_file, once::Once},
};
use core::sync::atomic::{AtomicBool, Ordering};
use thread::Start;

/// Called before CUDA is initialised: asks the scheduler which GPUs the process sees. `false` if it sees none.
pub fn request_placement() -> bool {
    placement::request(&thread::hello())
}

/// Called when CUDA could not be initialised: closes the connection, so that the process does not count as a client.
pub fn cancel_placement() {
    drop(placement::take_connection());
}

/// Called when CUDA has been initialised: starts the client's thread, once per process. The client's thread is running
/// when this returns, whichever thread calls it: a context created earlier would be unknown. Returns `false` if the
/// user requires a scheduler and none answers; the next `cuInit` tries again.
///
/// `shut_driver` closes all entries into the driver if `true`, and opens them if `false`.
pub fn start(shut_driver: fn(bool)) -> bool {
    static STARTED: Once = Once::new();
    settings::get().disabled || STARTED.run(|| start_once(shut_driver))
}

fn start_once(shut_driver: fn(bool)) -> bool {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if settings::get().memory_max_is_unread {
        trace!("ignoring NVSHARE_MEMORY_MAX: write a size of at least 2M, such as 8G, or a percentage, such as 25%");
    }
    barrier::init();
    threads::init();
    if !REGISTERED.swap(true, Ordering::SeqCst) {
        exit::watch();
        c::at_fork_in_child(in_child);
    }
    match thread::start(shut_driver) {
        Start::Started => gate::set_active(true),
        Start::NoThread => connection::set_connection(None), // nothing would read from it
        Start::NoScheduler => return false,
    }
    true
}

/// Stops all gating and moving: the library has failed.
#[cfg_attr(test, expect(dead_code, reason = "for panics, which end a test"))]
pub fn give_up() {
    presence::come_back(); // if the process is off its GPUs, its threads then block inside the driver
    gate::set_active(false);
    epoch::end();
    gpu::open_all();
}

/// Runs in the child of a fork. A CUDA context does not survive a fork, and the connection is the parent's.
extern "C" fn in_child() {
    presence::in_child();
    gate::set_active(false);
    epoch::end();
    connection::close_in_child();
    file::close_in_child();
    lock_file::close_in_child();
}
