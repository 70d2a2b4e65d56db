//! The identity of a GPU: its UUID. When a process is restored from a checkpoint, the driver may
//! place it on other GPUs. The process then continues with the same ordinals, contexts and
//! addresses. The scheduler's slots of the process's GPUs also stay the same. Only the UUIDs
//! change.
//!
//! The library keeps a UUID for each GPU that it has queried. After each wake, it queries the
//! driver for all of them before any thread continues. So the UUIDs are right no matter which
//! program restored the process. The UUIDs in `Awake` only show whether the scheduler knows of the
//! move. A scheduler may have been killed before it could report the move, and its successor then
//! does not know of the move. The client then connects again, because a connection begins with the
//! UUIDs.
//!
//! Two names still refer to the old GPU. One is the answer of `cuDeviceGetPCIBusId`, which comes
//! from the driver. The other is `CUDA_VISIBLE_DEVICES`, which cannot be changed while threads may
//! read it.
//!
//! Reading an identity takes no lock, so it never blocks in the child of a fork.

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

/// All UUIDs that this process has seen, up to the number of GPUs that a process may have.
static KNOWN: [OnceBox<Uuid>; MAX_SLOTS as usize] = [const { OnceBox::new() }; MAX_SLOTS as usize];

/// The number of times that the GPUs of this process may have changed.
static TIMES: AtomicUsize = AtomicUsize::new(0);

/// Returns the table's entry for this UUID, and adds one if necessary. Returns `None` if the table is
/// full.
fn place_of(uuid: Uuid) -> Option<&'static Uuid> {
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
        // SAFETY: the pointer is NULL or comes from a reference to a value that is never freed or changed.
        unsafe { self.0.load(Ordering::SeqCst).as_ref() }.copied().unwrap_or_default()
    }

    fn set(&self, uuid: Uuid) {
        // No host has more GPUs than the table has entries. If the table is full, the old UUID is kept.
        if let Some(known) = place_of(uuid) {
            self.0.store(ptr::from_ref(known).cast_mut(), Ordering::SeqCst);
        }
    }

    /// Queries the driver for the UUID. Allowed at any time. Returns the UUIDs before and after the query,
    /// which are equal if the driver does not answer.
    pub fn ask(&self, device: CUdevice) -> (Uuid, Uuid) {
        let before = self.get();
        driver::uuid(device).into_iter().for_each(|uuid| self.set(Uuid(uuid)));
        (before, self.get())
    }
}

/// Called when the process has been restored. The caller then calls [`Identity::ask`] for all known
/// GPUs.
pub fn may_have_changed() {
    TIMES.fetch_add(1, Ordering::SeqCst);
}

/// Makes the identity of a new GPU visible to all threads by calling `publish`. A concurrent restore of
/// the process may update all known GPUs but miss this GPU. The identity is then queried again with
/// `ask`.
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
    fn an_identity_is_the_last_uuid_and_moves_do_not_grow_the_table() {
        let [a, b] = [0xa1, 0xb1].map(|n| Uuid([n; 16]));
        let identity = Identity::new(a);
        assert_eq!(identity.get(), a);
        for _ in 0..2 * MAX_SLOTS {
            identity.set(b);
            assert_eq!(identity.get(), b);
            identity.set(a);
        }
        assert!(ptr::eq(place_of(a).unwrap(), place_of(a).unwrap()));
        assert_ne!(place_of(a), place_of(b));
    }

    #[test]
    fn an_identity_read_during_a_restore_is_queried_again() {
        let identity = Identity::new(Uuid([0xc1; 16]));
        let asked = AtomicUsize::new(0);
        let publish = || {
            may_have_changed();
            Some(&identity)
        };
        learn(publish, |_| {
            // Another restore happens during the first query.
            if asked.fetch_add(1, Ordering::SeqCst) == 0 {
                may_have_changed();
            }
        });
        assert!(asked.load(Ordering::SeqCst) >= 2);
        learn(|| None, |_| unreachable!("this library leaves it alone"));
    }
}
