//! Dropping capabilities.

use caps::{CapSet, Capability};
use tracing::debug;

/// Drops all capabilities from every set of the calling thread. Threads that the calling thread
/// starts inherit the empty sets.
///
/// # Errors
/// A capability remains.
pub fn drop_all() -> Result<(), String> {
    for set in [CapSet::Ambient, CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        let done = caps::clear(None, set);
        let left: Vec<Capability> = caps::read(None, set).map_err(|e| e.to_string())?.into_iter().collect();
        match done {
            Err(e) if !left.is_empty() => return Err(format!("cannot drop the remaining privileges {left:?}: {e}")),
            Err(e) => debug!("cannot drop capabilities: {e}"), // harmless: the set is empty
            Ok(()) if !left.is_empty() => return Err(format!("the privileges {left:?} remain")),
            Ok(()) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use caps::CapsHashSet;

    #[test]
    fn a_thread_that_dropped_its_capabilities_starts_threads_without_any() {
        std::thread::spawn(|| {
            drop_all().expect("it can give up all");
            let has = || caps::read(None, CapSet::Permitted).expect("capabilities");
            assert_eq!(has(), CapsHashSet::new());
            let started = std::thread::spawn(has);
            assert_eq!(started.join().expect("it ends"), CapsHashSet::new());
        })
        .join()
        .expect("it ends");
    }
}
