//! This process as a client of the scheduler: it begins when the program initialises CUDA, and acts in a thread of its own.
//!
//! - [`thread`]: that thread. It makes the connection, acts on messages and moves memory.
//! - [`turn`]: one GPU lock, from grant to release; `nvshare-idle-gap` says when to release it early, [`utilization`]
//!   how well the GPU is used meanwhile.
//! - [`offline`]: what clients do without a scheduler.
//! - [`placement`]: which GPUs this process is to see.

pub mod offline;
#[cfg(not(test))]
mod panic;
pub mod placement;
pub mod thread;
pub mod turn;
pub mod utilization;

use crate::{
    connection,
    env::{settings, trace::trace},
    gate::{self, barrier, epoch, threads},
    gpu,
    sys::{c, lock_file},
};
use core::sync::atomic::{AtomicBool, Ordering};
use thread::Start;

/// The program is about to initialise CUDA: sees to it that it sees the GPUs that it is to see. `false` if there are none.
pub fn request_placement() -> bool {
    placement::request(&thread::hello())
}

/// CUDA could not be initialised: nobody is to be counted as a client that is none.
pub fn cancel_placement() {
    drop(placement::take_connection());
}

/// The program has initialised CUDA: begins to take part, once a process. `false` if it must not go on without a scheduler,
/// and there is none.
///
/// `resolve_hooks` looks up the real function of every hook: a first look-up takes the loader's lock, which a thread of the
/// program may hold while it waits at a gate.
pub fn start(resolve_hooks: impl FnOnce()) -> bool {
    // Not a lock: a fork of another thread's would leave it taken in the child for ever.
    static STARTED: AtomicBool = AtomicBool::new(false);
    static AT_FORK: AtomicBool = AtomicBool::new(false);
    if settings::get().disabled || STARTED.swap(true, Ordering::SeqCst) {
        return true;
    }
    if settings::get().memory_max_is_unread {
        trace!("NVSHARE_MEMORY_MAX bounds nothing: it is neither a size of 2M or more, like 8G, nor a part, like 25%");
    }
    barrier::init();
    threads::init();
    if !AT_FORK.swap(true, Ordering::SeqCst) {
        c::at_fork_in_child(in_child);
    }
    match thread::start(resolve_hooks) {
        Start::Started => gate::set_active(true),
        Start::NoThread => connection::set_connection(None), // nobody would listen
        Start::NoScheduler => {
            STARTED.store(false, Ordering::SeqCst); // the next cuInit tries again
            return false;
        }
    }
    true
}

/// From now on nothing is gated or moved: this library is no longer able to.
#[cfg_attr(test, expect(dead_code, reason = "for panics, which end a test"))]
pub fn give_up() {
    gate::set_active(false);
    epoch::end();
    gpu::open_all();
}

/// In the child of a fork: a CUDA context does not survive it, and the connection is the parent's.
extern "C" fn in_child() {
    gate::set_active(false);
    epoch::end();
    connection::close_in_child();
    lock_file::close_in_child();
}
