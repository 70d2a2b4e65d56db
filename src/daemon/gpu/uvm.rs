//! Page faults of each GPU, as counted by the driver's module for managed memory. The module shows them only if it
//! was loaded with `uvm_enable_debug_procfs=1`, and for whole GPUs, not for MIG slices.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use crate::scheduler::{GpuId, Time};

/// A directory for each GPU that a program has open, `UVM-GPU-…`.
const GPUS: &str = "/proc/driver/nvidia-uvm/gpus";
const FILE: &str = "fault_stats";
/// The line with those that a kernel waits for, from the driver's start on.
const COUNTER: &str = "replayable_faults";

/// Older counts are not used.
const FRESH: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Faults {
    directory: PathBuf,
    /// The last count of each GPU, and its time.
    before: BTreeMap<GpuId, (Time, u64)>,
}

impl Default for Faults {
    fn default() -> Self {
        Self { directory: GPUS.into(), before: BTreeMap::new() }
    }
}

impl Faults {
    /// Faults a second since the last call, where there was one not long ago. An error where the driver does not show them.
    pub fn rate(&mut self, gpu: GpuId, now: Time) -> Result<Option<u64>, String> {
        let path = self.directory.join(format!("UVM-GPU-{}", gpu.0)).join(FILE);
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let counted = parse(&text).ok_or_else(|| format!("{}: it has no number of {COUNTER}", path.display()))?;
        let before = self.before.insert(gpu, (now, counted));
        Ok(before.and_then(|(at, before)| {
            let passed = now.checked_sub(at).filter(|passed| !passed.is_zero() && *passed <= FRESH)?;
            // It counts from 0 again when the last program has closed the GPU.
            let faults = counted.checked_sub(before)?;
            Some((u128::from(faults) * 1000 / passed.as_millis().max(1)) as u64)
        }))
    }
}

fn parse(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(COUNTER)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::Uuid;

    /// As driver 510 wrote it.
    fn text(faults: u64) -> String {
        format!(
            "replayable_faults      {faults}\nduplicates             0\nfaults_by_access_type:\n  prefetch             0\n  \
             read                 0\n  write                446\n  atomic               0\nmigrations:\n  num_pages_in         \
             1024 (4 MB)\n  num_pages_out        1024 (4 MB)\nnon_replayable_faults  7\n"
        )
    }

    #[test]
    fn faults_are_counted_between_two_looks() {
        let directory = tempfile::tempdir().expect("a directory");
        let gpu = GpuId(Uuid([0x11; 16]));
        let own = directory.path().join("UVM-GPU-11111111-1111-1111-1111-111111111111");
        let mut faults = Faults { directory: directory.path().into(), ..Faults::default() };
        let at = Duration::from_millis;
        assert!(faults.rate(gpu, at(0)).is_err_and(|e| e.contains("fault_stats")), "no program has it open");
        std::fs::create_dir(&own).expect("a directory");
        let mut look = |counted: &str, ms| {
            std::fs::write(own.join(FILE), counted).expect("a file");
            faults.rate(gpu, at(ms))
        };
        assert_eq!(look(&text(1000), 1000), Ok(None), "the first says nothing");
        assert_eq!(look(&text(4000), 3000), Ok(Some(1500)));
        assert_eq!(look(&text(4000), 3000), Ok(None), "no time has passed");
        assert_eq!(look(&text(5), 4000), Ok(None), "the driver began anew");
        assert_eq!(look(&text(5), 4500), Ok(Some(0)));
        assert_eq!(look(&text(9999), 60_000), Ok(None), "that is too long ago");
        assert!(look("duplicates 3\n", 61_000).is_err());
    }
}
