//! Which GPU of the host one of this process' GPUs is. The driver puts a process back on others if another process says so: what the
//! process has there then goes on under the same ordinals, contexts and addresses, and only the UUIDs are different.
//!
//! Reading takes no lock, and so it never waits in the child of a fork.

use crate::{
    driver::{self, types::CUdevice},
    sys::once::OnceBox,
};
use alloc::boxed::Box;
use core::{
    ptr,
    sync::atomic::{AtomicPtr, AtomicUsize, Ordering},
};
use nvshare_wire::{MAX_SLOTS, Uuid};

/// All UUIDs that have been seen here, as many as a process may have GPUs.
static KNOWN: [OnceBox<Uuid>; MAX_SLOTS as usize] = [const { OnceBox::new() }; MAX_SLOTS as usize];

/// Counts the times at which GPUs may have changed.
static TIMES: AtomicUsize = AtomicUsize::new(0);

/// The UUID in the table; `None` if the table is full.
fn known(uuid: Uuid) -> Option<&'static Uuid> {
    KNOWN.iter().find_map(|place| {
        let known = place.get_or_init(|| Box::new(uuid));
        (*known == uuid).then_some(known)
    })
}

#[derive(Debug)]
pub struct Identity(AtomicPtr<Uuid>);

impl Identity {
    pub fn new(uuid: Uuid) -> Self {
        let identity = Self(AtomicPtr::new(ptr::null_mut()));
        identity.set(uuid);
        identity
    }

    pub fn get(&self) -> Uuid {
        // SAFETY: NULL, or from a reference to what lives for ever and is never changed.
        unsafe { self.0.load(Ordering::SeqCst).as_ref() }.copied().unwrap_or_default()
    }

    fn set(&self, uuid: Uuid) {
        // No host has as many GPUs as there is room for. If one had, it would be the GPU that it was.
        if let Some(known) = known(uuid) {
            self.0.store(ptr::from_ref(known).cast_mut(), Ordering::SeqCst);
        }
    }

    /// Asks the driver, at any time. The UUIDs before and now; both are the same if it does not answer.
    pub fn ask(&self, device: CUdevice) -> (Uuid, Uuid) {
        let before = self.get();
        driver::uuid(device).into_iter().for_each(|uuid| self.set(Uuid(uuid)));
        (before, self.get())
    }
}

/// The process has been put back: [`Identity::ask`] is to be called for all that are known.
pub fn may_have_changed() {
    TIMES.fetch_add(1, Ordering::SeqCst);
}

/// Learns of a GPU, and stores it for all to see with `publish`. If the process is put back meanwhile, whoever asks for those
/// that are known may come before it is stored, so it is asked for again, with `ask`.
pub fn learn<'a>(publish: impl FnOnce() -> Option<&'a Identity>, ask: impl Fn(&Identity)) {
    let mut seen = TIMES.load(Ordering::SeqCst);
    let Some(identity) = publish() else { return };
    loop {
        let now = TIMES.load(Ordering::SeqCst);
        if now == seen {
            return;
        }
        seen = now;
        ask(identity);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_what_was_set_last_and_the_table_does_not_grow_by_moves() {
        let [a, b] = [0xa1, 0xb1].map(|n| Uuid([n; 16]));
        let identity = Identity::new(a);
        assert_eq!(identity.get(), a);
        for _ in 0..2 * MAX_SLOTS {
            identity.set(b);
            assert_eq!(identity.get(), b);
            identity.set(a);
        }
        assert!(ptr::eq(known(a).unwrap(), known(a).unwrap()));
        assert_ne!(known(a), known(b));
    }

    #[test]
    fn what_is_learned_while_the_process_is_put_back_is_asked_for_again() {
        let identity = Identity::new(Uuid([0xc1; 16]));
        let asked = AtomicUsize::new(0);
        let publish = || {
            may_have_changed();
            Some(&identity)
        };
        learn(publish, |_| {
            // Once more in the first answer.
            if asked.fetch_add(1, Ordering::SeqCst) == 0 {
                may_have_changed();
            }
        });
        assert!(asked.load(Ordering::SeqCst) >= 2);
        learn(|| None, |_| unreachable!("this library leaves it alone"));
    }
}
