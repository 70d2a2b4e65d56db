//! This process as a client of the scheduler. After CUDA has been initialised, one thread acts for the
//! process.
//!
//! - [`thread`]: the client's thread. It connects, carries out the scheduler's messages and moves memory.
//! - [`turn`]: one GPU lock, from grant to release. `nvshare-idle-gap` decides when to release it
//!   early. [`utilization`] measures how busy the client keeps the GPU.
//! - [`exit`]: exit of the process. [`offline`]: how clients share a GPU without a scheduler.
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
    connection::presence,
    env::{settings, trace::trace},
    gpu,
    submit::{self, barrier, epoch, threads},
    sys::{c, file, once::Once},
};
use core::sync::atomic::{AtomicBool, Ordering};
use thread::Start;

/// Asks the scheduler which GPUs the process sees. Called before CUDA is initialised. Returns `false`
/// if the process sees none.
pub fn request_placement() -> bool {
    placement::request(&thread::hello())
}

/// Closes the connection, so that the process does not count as a client. Called if CUDA could not be
/// initialised.
pub fn cancel_placement() {
    drop(placement::take_connection());
}

/// Starts the client's thread, once per process. Called on any thread after CUDA has been initialised.
/// The client's thread is running when this function returns, so the library knows of every context.
/// Returns `false` if the user requires a scheduler and none answers. The next `cuInit` then tries
/// again.
pub fn start() -> bool {
    static STARTED: Once = Once::new();
    settings::get().disabled || STARTED.run(start_once)
}

fn start_once() -> bool {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    if settings::get().memory_max_is_unread {
        trace!("ignoring NVSHARE_MEMORY_MAX: write a size of at least 2M, such as 8G, or a percentage, such as 25%");
    }
    barrier::init();
    threads::init();
    gpu::proof::remember();
    if !REGISTERED.swap(true, Ordering::SeqCst) {
        exit::watch();
        c::at_fork_in_child(in_child);
    }
    match thread::start() {
        Start::Started => submit::set_active(true),
        Start::NoThread => connection::set_connection(None), // without the client's thread, no code would read from it
        Start::NoScheduler => return false,
    }
    true
}

/// Stops all gating and moving of memory. Called when the library has failed.
#[cfg_attr(test, expect(dead_code, reason = "called only by the panic handler, which test builds omit"))]
pub fn give_up() {
    presence::come_back(); // if the process is off its GPUs, its threads now block inside the driver
    submit::set_active(false);
    epoch::end();
    submit::open_all();
}

/// Runs in the child of a fork. CUDA contexts do not survive a fork, and the connection belongs to the
/// parent.
extern "C" fn in_child() {
    presence::in_child();
    submit::set_active(false);
    epoch::end();
    connection::stop_in_child();
    file::close_in_child();
}
