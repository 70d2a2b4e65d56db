//! The control groups for which nvshare has set limits in the driver, in a file of the state directory: a daemon that
//! follows one that was killed removes them. A later control group of the same name is another one.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use nvshare_wire::Uuid;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::scheduler::GpuId;
use crate::sys::atomic_file;

const FILE: &str = "driver-limits.toml";
const HEADER: &str = "# What the scheduler has set in the driver, and takes away again.\n";
/// A limit ends with the boot, and numbers of control groups begin anew.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// The number of each control group, by GPU and path.
pub type Places = BTreeMap<(GpuId, String), u64>;

/// The file, if there is a state directory, and its content.
#[derive(Debug, Default)]
pub struct Left {
    path: Option<PathBuf>,
    written: Places,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Written {
    boot: String,
    #[serde(default)]
    limit: Vec<Limit>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Limit {
    gpu: String,
    cgroup: String,
    inode: u64,
}

/// Whether an earlier daemon left limits behind.
pub fn are_left(directory: Option<&Path>) -> bool {
    directory.is_some_and(|directory| directory.join(FILE).exists())
}

impl Left {
    /// Reads what an earlier daemon wrote.
    pub fn open(directory: Option<&Path>) -> Self {
        let path = directory.map(|directory| directory.join(FILE));
        let written = path.as_deref().map(read).transpose().unwrap_or_else(|e| {
            warn!("limits that an earlier scheduler has set in the driver are not known: {e}");
            None
        });
        let written = written.unwrap_or_default();
        if let Some(path) = path.as_deref().filter(|_| written.is_empty()) {
            let _ = std::fs::remove_file(path); // it says nothing, or nothing any more
        }
        Self { path, written }
    }

    pub fn places(&self) -> &Places {
        &self.written
    }

    /// Replaces the content of the file.
    pub fn write(&mut self, places: Places) {
        if places == self.written {
            return;
        }
        self.written = places;
        let Some(path) = &self.path else { return };
        if let Err(e) = atomic_file::write(path, &text(&self.written)) {
            warn!("limits in the driver stay there if the scheduler is killed: {}: {e}", path.display());
        }
    }
}

fn read(path: &Path) -> Result<Places, String> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Places::new()),
        Err(e) => return Err(format!("{}: {e}", path.display())),
    };
    let Written { boot: then, limit } = toml::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?;
    if then != boot() {
        return Ok(Places::new());
    }
    let place = |limit: Limit| Some(((GpuId(Uuid::parse(&limit.gpu)?), limit.cgroup), limit.inode));
    Ok(limit.into_iter().filter_map(place).collect())
}

/// Empty where there are none.
fn text(places: &Places) -> String {
    if places.is_empty() {
        return String::new();
    }
    let limit = |((gpu, cgroup), inode): (&(GpuId, String), &u64)| Limit {
        gpu: gpu.0.to_string(),
        cgroup: cgroup.clone(),
        inode: *inode,
    };
    let written = Written { boot: boot(), limit: places.iter().map(limit).collect() };
    // Texts and numbers can always be written.
    format!("{HEADER}{}", toml::to_string(&written).unwrap_or_default())
}

fn boot() -> String {
    std::fs::read_to_string(BOOT).unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_successor_reads_what_was_written_and_nothing_is_left_of_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let places = Places::from([((GpuId(Uuid([7; 16])), "/system.slice/a b\"c.service".to_owned()), 4711)]);
        let mut left = Left::open(Some(directory.path()));
        assert_eq!((left.places(), are_left(Some(directory.path()))), (&Places::new(), false));
        left.write(places.clone());
        assert!(are_left(Some(directory.path())));
        assert_eq!(Left::open(Some(directory.path())).places(), &places);

        let file = directory.path().join(FILE);
        let text = std::fs::read_to_string(&file).expect("the file");
        std::fs::write(&file, text.replace(&boot(), "another boot")).expect("the file");
        assert_eq!(Left::open(Some(directory.path())).places(), &Places::new(), "they ended with it");
        assert!(!are_left(Some(directory.path())));
        std::fs::write(&file, "half a li").expect("the file");
        assert_eq!(Left::open(Some(directory.path())).places(), &Places::new());

        left.write(Places::new());
        assert!(!are_left(Some(directory.path())));
    }
}
