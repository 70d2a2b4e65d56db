//! What ails the simulated GPUs: tests say it, in files of the simulated machine, and the simulated NVML passes it on.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Something that the driver tells unasked, with the number of its kind in `nvml.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub gpu: usize,
    pub kind: u64,
    /// The XID, where it is one.
    pub data: u64,
}

pub const DOUBLE_BIT_ECC: u64 = 2;
pub const XID: u64 = 8;

/// Whoever waits for that event gets it.
pub fn happen(dir: &Path, event: Event) -> io::Result<()> {
    let mut file = File::options().append(true).create(true).open(events(dir))?;
    file.write_all(format!("{} {} {}\n", event.gpu, event.kind, event.data).as_bytes())
}

/// Every event so far. A line that is still being written is left out.
pub fn happened(dir: &Path) -> Vec<Event> {
    let text = fs::read_to_string(events(dir)).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    let event = |line: &str| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let mut next = || numbers.next()?.ok();
        Some(Event { gpu: next()? as usize, kind: next()?, data: next()? })
    };
    whole.filter_map(event).collect()
}

/// A GPU has fallen off the bus, or is back.
pub fn lose(dir: &Path, gpu: usize, is_lost: bool) -> io::Result<()> {
    put(&dir.join(format!("gpu-{gpu}.lost")), is_lost.then_some(""))
}

pub fn is_lost(dir: &Path, gpu: usize) -> bool {
    dir.join(format!("gpu-{gpu}.lost")).exists()
}

/// The driver says that this recovery action is needed, 0 for none; or says nothing of such things.
pub fn advise(dir: &Path, gpu: usize, action: Option<u32>) -> io::Result<()> {
    put(&dir.join(format!("gpu-{gpu}.recovery")), action.map(|action| action.to_string()).as_deref())
}

pub fn advice(dir: &Path, gpu: usize) -> Option<u32> {
    fs::read_to_string(dir.join(format!("gpu-{gpu}.recovery"))).ok()?.parse().ok()
}

/// There is no driver for NVML to be initialised with, or there is one.
pub fn unload(dir: &Path, is_unloaded: bool) -> io::Result<()> {
    put(&dir.join("no-driver"), is_unloaded.then_some(""))
}

pub fn is_unloaded(dir: &Path) -> bool {
    dir.join("no-driver").exists()
}

fn events(dir: &Path) -> PathBuf {
    dir.join("nvml-events")
}

/// In one step, so that nobody reads half of it.
fn put(path: &Path, text: Option<&str>) -> io::Result<()> {
    let Some(text) = text else { return fs::remove_file(path) };
    let new = path.with_extension("new");
    fs::write(&new, text)?;
    fs::rename(new, path)
}
