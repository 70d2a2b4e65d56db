//! Sleep of the machine: programs' memory leaves the GPUs before it.

use tokio::sync::watch;
use tracing::info;

use super::state::Core;
use crate::scheduler::Event;

impl Core {
    /// Follows whether a program has a GPU attached.
    pub fn follow_attached(&self) -> watch::Receiver<bool> {
        self.attached.subscribe()
    }

    pub(super) fn count_attachments(&mut self, change: impl FnOnce(usize) -> usize) {
        self.attachments = change(self.attachments);
        let is_any = self.attachments > 0;
        self.attached.send_if_modified(|before| std::mem::replace(before, is_any) != is_any);
    }

    /// The machine is about to sleep, or has woken up.
    pub fn sleep(&mut self, asleep: bool) {
        if self.asleep == asleep {
            return;
        }
        self.asleep = asleep;
        if asleep {
            info!(name: "sleep", "the machine is about to sleep: programs' memory leaves the GPUs");
        } else {
            info!(name: "woken", "the machine has woken up");
        }
        self.apply(Event::Sleep { asleep });
    }

    /// Whether all memory that can leave the GPUs has left, or the machine has woken up.
    pub fn is_evacuated(&self) -> bool {
        !self.asleep || self.machine.is_evacuated()
    }
}
