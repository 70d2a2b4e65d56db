//! Dropping capabilities. The daemon's threads have none, but for the NVML thread where it sets limits in the driver.

use caps::{CapSet, Capability, CapsHashSet};
use tracing::debug;

/// The capabilities needed to set memory limits: the driver demands the first; writing to the files of a control group,
/// which belong to root, takes the second, where the kernel itself accounts for GPU memory.
pub const FOR_LIMITS: [Capability; 2] = [Capability::CAP_SYS_ADMIN, Capability::CAP_DAC_OVERRIDE];

/// Drops all capabilities but `only` from every set of the calling thread, and so from the threads that it starts.
///
/// # Errors
/// If a capability remains that should have been dropped.
pub fn keep(only: &[Capability]) -> Result<(), String> {
    let read = |set| caps::read(None, set).map_err(|e| e.to_string());
    let kept: CapsHashSet = read(CapSet::Permitted)?.into_iter().filter(|one| only.contains(one)).collect();
    let nothing = CapsHashSet::new();
    let all = [
        (CapSet::Ambient, &nothing),
        (CapSet::Effective, &kept),
        (CapSet::Permitted, &kept),
        (CapSet::Inheritable, &nothing),
    ];
    for (set, value) in all {
        let done = if value.is_empty() { caps::clear(None, set) } else { caps::set(None, set, value) };
        let left: Vec<Capability> = read(set)?.into_iter().filter(|one| !value.contains(one)).collect();
        match done {
            Err(e) if !left.is_empty() => return Err(format!("it still has {left:?}, and cannot give them up: {e}")),
            Err(e) => debug!("cannot give up capabilities: {e}"), // of a kind that this kernel does not have
            Ok(()) if !left.is_empty() => return Err(format!("it still has {left:?}")),
            Ok(()) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_what_it_is_to_keep_and_one_that_it_starts_has_no_more() {
        let read = |set| caps::read(None, set).expect("capabilities");
        std::thread::spawn(move || {
            let had = read(CapSet::Permitted);
            keep(&FOR_LIMITS).expect("it can give up the others");
            let kept: CapsHashSet = had.into_iter().filter(|one| FOR_LIMITS.contains(one)).collect();
            assert_eq!((read(CapSet::Permitted), read(CapSet::Effective)), (kept.clone(), kept));
            keep(&[]).expect("it can give up all");
            let started = std::thread::spawn(move || read(CapSet::Permitted));
            assert_eq!(started.join().expect("it ends"), CapsHashSet::new());
        })
        .join()
        .expect("it ends");
    }
}
