//! Hooks of calls that lock, checkpoint and restore other processes ([`crate::registry::checkpoints`]).

use crate::{
    driver::{after, types::*},
    registry::checkpoints::{report, wait_for_room},
};
use core::ffi::c_void;
use nvshare_wire::client::CheckpointStep;

type P = *mut c_void;

/// Makes a call, and reports it if it has succeeded.
fn call(pid: i32, what: CheckpointStep, real: impl FnOnce() -> CUresult) -> CUresult {
    after(real(), || report(pid, what))
}

hooks! { real, flavour;
    [cuCheckpointProcessLock | cuCheckpointProcessUnlock] (pid: i32, arguments: P) {
        call(pid, CheckpointStep::Locked, real)
    }
    [cuCheckpointProcessCheckpoint] (pid: i32, arguments: P) { call(pid, CheckpointStep::Checkpointed, real) }
    [cuCheckpointProcessRestore] (pid: i32, arguments: P) {
        wait_for_room(pid);
        let result = real();
        report(pid, CheckpointStep::Restored);
        result
    }
}
