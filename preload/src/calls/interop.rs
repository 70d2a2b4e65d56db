//! Calls that connect the program to other APIs on the same GPU. Work that is submitted through those
//! APIs passes no gate, and may use this library's memory. After such a call the library cannot know
//! when the program's work is done, so the program's memory stays on the GPU.

use super::access::with_memory;
use crate::{
    driver::{after, types::*},
    gpu, submit,
};
use nvshare_wire::client::StuckReason;

/// Makes the call while the program's memory is on the GPU. If the call succeeds, the memory stays
/// on the GPU from then on.
pub fn call_and_tie(call: impl FnOnce() -> CUresult) -> CUresult {
    with_memory(|| after(call(), make_unevictable))
}

/// Restores the program's memory to the GPU, and keeps it there. Called before the program submits work
/// that passes no gate.
pub fn tie() {
    let _ = call_and_tie(|| SUCCESS);
}

pub fn make_unevictable() {
    if submit::is_active() {
        crate::sys::errno::preserve(|| gpu::in_use().for_each(|gpu| gpu.make_unevictable(StuckReason::UntrackedWork)));
    }
}
