//! What ails the simulated GPUs: tests say it, in files of the simulated machine, and the simulated NVML passes it on.
//! Memory trouble takes effect in the simulated driver as well, at the next call of any process.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
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

/// `nvmlInit` does not return until this is called with `false`, or it does not wait.
pub fn hold_init(dir: &Path, is_held: bool) -> io::Result<()> {
    put(&dir.join("nvml-init.held"), is_held.then_some(""))
}

pub fn is_init_held(dir: &Path) -> bool {
    dir.join("nvml-init.held").exists()
}

/// Every call of an NVML that is initialised fails with an unknown error, or none does.
pub fn break_nvml(dir: &Path, is_broken: bool) -> io::Result<()> {
    put(&dir.join("nvml.broken"), is_broken.then_some(""))
}

pub fn is_nvml_broken(dir: &Path) -> bool {
    dir.join("nvml.broken").exists()
}

/// A GPU is taken out of the machine, or put in: NVML does not list it, and numbers the others without it.
pub fn take_out(dir: &Path, gpu: usize, is_out: bool) -> io::Result<()> {
    put(&dir.join(format!("gpu-{gpu}.out")), is_out.then_some(""))
}

pub fn is_out(dir: &Path, gpu: usize) -> bool {
    dir.join(format!("gpu-{gpu}.out")).exists()
}

/// A GPU is in MIG mode, with these slices, each of which has a number of its own; or it is not in that mode.
pub fn slice(dir: &Path, gpu: usize, slices: Option<&[u8]>) -> io::Result<()> {
    let text = slices.map(|all| all.iter().map(|slice| format!("{slice}\n")).collect::<String>());
    put(&dir.join(format!("gpu-{gpu}.slices")), text.as_deref())
}

/// `None`: the GPU is not in MIG mode.
pub fn slices(dir: &Path, gpu: usize) -> Option<Vec<u8>> {
    let text = fs::read_to_string(dir.join(format!("gpu-{gpu}.slices"))).ok()?;
    Some(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// A display is attached to a GPU from now on, or not.
pub fn set_display(dir: &Path, gpu: usize, attached: bool) -> io::Result<()> {
    put(&memory_file(dir, gpu, "display"), attached.then_some(""))
}

pub fn has_display(dir: &Path, gpu: usize) -> bool {
    memory_file(dir, gpu, "display").exists()
}

/// The file that the simulated NVML has open from `nvmlInit` to `nvmlShutdown`, as the driver's device files are.
pub fn device_file(dir: &Path) -> PathBuf {
    dir.join("nvidiactl")
}

/// Bytes in use that NVML does not count. They are on top of `CUDA_SIM_HIDDEN`.
pub fn hide(dir: &Path, gpu: usize, bytes: u64) -> io::Result<()> {
    put_number(&memory_file(dir, gpu, "hidden"), bytes as i64)
}

pub fn hidden(dir: &Path, gpu: usize) -> u64 {
    number(&memory_file(dir, gpu, "hidden")).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Free bytes that cannot be allocated. They are on top of `CUDA_SIM_FRAGMENTED`.
pub fn fragment(dir: &Path, gpu: usize, bytes: u64) -> io::Result<()> {
    put_number(&memory_file(dir, gpu, "fragmented"), bytes as i64)
}

pub fn fragmented(dir: &Path, gpu: usize) -> u64 {
    number(&memory_file(dir, gpu, "fragmented")).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Memory of a process that does not run on the simulated driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stranger {
    /// What it wants; it gets what processes leave it, also later.
    pub bytes: u64,
    /// How NVML lists it; `None`: only the total shows it.
    pub pid: Option<u32>,
}

/// Replaces the strangers of a GPU.
pub fn set_strangers(dir: &Path, gpu: usize, strangers: &[Stranger]) -> io::Result<()> {
    let line = |s: &Stranger| format!("{} {}\n", s.bytes, s.pid.map_or("-".into(), |pid| pid.to_string()));
    let text: String = strangers.iter().map(line).collect();
    put(&memory_file(dir, gpu, "strangers"), (!text.is_empty()).then_some(&text))
}

pub fn strangers(dir: &Path, gpu: usize) -> Vec<Stranger> {
    let stranger = |line: &str| {
        let (bytes, pid) = line.split_once(' ')?;
        Some(Stranger { bytes: bytes.parse().ok()?, pid: pid.parse().ok() })
    };
    let text = fs::read_to_string(memory_file(dir, gpu, "strangers")).unwrap_or_default();
    text.lines().filter_map(stranger).collect()
}

/// Which calls of `cuMemCreate` fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// Those of this process only.
    pub pid: Option<u32>,
    /// Those until so long from now.
    pub lasts: Option<Duration>,
}

/// Has `cuMemCreate` fail with out of memory on a GPU, until that time is over or this is called with `None`.
pub fn refuse(dir: &Path, gpu: usize, refusal: Option<Refusal>) -> io::Result<()> {
    let text = refusal.map(|Refusal { pid, lasts }| {
        let until = lasts.map_or(u64::MAX, |lasts| now().saturating_add(lasts.as_millis() as u64));
        format!("{until} {}", pid.map_or("-".into(), |pid| pid.to_string()))
    });
    put(&memory_file(dir, gpu, "refusing"), text.as_deref())
}

/// Whether `cuMemCreate` fails in that process now.
pub fn is_refused(dir: &Path, gpu: usize, pid: u32) -> bool {
    let Ok(text) = fs::read_to_string(memory_file(dir, gpu, "refusing")) else { return false };
    let Some((until, whom)) = text.split_once(' ') else { return false };
    until.parse().is_ok_and(|until: u64| now() < until) && whom.parse().map_or(true, |whom: u32| whom == pid)
}

/// By how much the bytes in use that NVML reports for a GPU are wrong.
pub fn set_nvml_error(dir: &Path, gpu: usize, bytes: i64) -> io::Result<()> {
    put_number(&memory_file(dir, gpu, "nvml-error"), bytes)
}

pub fn nvml_error(dir: &Path, gpu: usize) -> i64 {
    number(&memory_file(dir, gpu, "nvml-error")).unwrap_or(0)
}

fn memory_file(dir: &Path, gpu: usize, what: &str) -> PathBuf {
    dir.join(format!("gpu-{gpu}.{what}"))
}

fn number(path: &Path) -> Option<i64> {
    fs::read_to_string(path).ok()?.parse().ok()
}

/// 0 is no file.
fn put_number(path: &Path, number: i64) -> io::Result<()> {
    put(path, (number != 0).then(|| number.to_string()).as_deref())
}

/// Milliseconds of `CLOCK_MONOTONIC`, which all processes share.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place for the answer.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

fn events(dir: &Path) -> PathBuf {
    dir.join("nvml-events")
}

/// In one step, so that nobody reads half of it.
fn put(path: &Path, text: Option<&str>) -> io::Result<()> {
    let Some(text) = text else {
        return match fs::remove_file(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            result => result,
        };
    };
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(&new, text)?;
    fs::rename(new, path)
}
