//! Faults of the simulated GPUs. Tests write the faults into files of the simulated machine, and
//! the simulated NVML reports them. Memory faults also affect the simulated driver, at the next
//! call of any process.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

/// An event of the driver. `kind` is the number of the event's kind in `nvml.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub gpu: usize,
    pub kind: u64,
    /// The XID, for an XID event.
    pub data: u64,
}

pub const DOUBLE_BIT_ECC: u64 = 2;
pub const XID: u64 = 8;

/// Raises an event, which all waiting programs receive.
pub fn happen(dir: &Path, event: Event) -> io::Result<()> {
    let mut file = File::options().append(true).create(true).open(events(dir))?;
    file.write_all(format!("{} {} {}\n", event.gpu, event.kind, event.data).as_bytes())
}

/// Returns every event so far, except a line that is still being written.
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

/// Makes a GPU fall off the bus, or return.
pub fn lose(dir: &Path, gpu: usize, is_lost: bool) -> io::Result<()> {
    put(&dir.join(format!("gpu-{gpu}.lost")), is_lost.then_some(""))
}

pub fn is_lost(dir: &Path, gpu: usize) -> bool {
    dir.join(format!("gpu-{gpu}.lost")).exists()
}

/// Sets the recovery action that the driver reports. 0 means no action, and `None` means not
/// supported.
pub fn advise(dir: &Path, gpu: usize, action: Option<u32>) -> io::Result<()> {
    put(&dir.join(format!("gpu-{gpu}.recovery")), action.map(|action| action.to_string()).as_deref())
}

pub fn advice(dir: &Path, gpu: usize) -> Option<u32> {
    fs::read_to_string(dir.join(format!("gpu-{gpu}.recovery"))).ok()?.parse().ok()
}

/// Unloads or loads the driver. NVML cannot be initialized without the driver.
pub fn unload(dir: &Path, is_unloaded: bool) -> io::Result<()> {
    put(&dir.join("no-driver"), is_unloaded.then_some(""))
}

pub fn is_unloaded(dir: &Path) -> bool {
    dir.join("no-driver").exists()
}

/// Makes `nvmlInit` block until this function is called with `false`.
pub fn hold_init(dir: &Path, is_held: bool) -> io::Result<()> {
    put(&dir.join("nvml-init.held"), is_held.then_some(""))
}

pub fn is_init_held(dir: &Path) -> bool {
    dir.join("nvml-init.held").exists()
}

/// Makes every call of the initialized NVML fail with an unknown error, or succeed again.
pub fn break_nvml(dir: &Path, is_broken: bool) -> io::Result<()> {
    put(&dir.join("nvml.broken"), is_broken.then_some(""))
}

pub fn is_nvml_broken(dir: &Path) -> bool {
    dir.join("nvml.broken").exists()
}

/// Removes a GPU from the machine, or adds it again. NVML does not list a removed GPU, and
/// renumbers the other GPUs.
pub fn take_out(dir: &Path, gpu: usize, is_out: bool) -> io::Result<()> {
    put(&dir.join(format!("gpu-{gpu}.out")), is_out.then_some(""))
}

pub fn is_out(dir: &Path, gpu: usize) -> bool {
    dir.join(format!("gpu-{gpu}.out")).exists()
}

/// Enables MIG mode with slices of these numbers, which must be unique. `None` disables MIG mode.
pub fn slice(dir: &Path, gpu: usize, slices: Option<&[u8]>) -> io::Result<()> {
    let text = slices.map(|all| all.iter().map(|slice| format!("{slice}\n")).collect::<String>());
    put(&dir.join(format!("gpu-{gpu}.slices")), text.as_deref())
}

/// Returns the slices of a GPU, or `None` if it is not in MIG mode.
pub fn slices(dir: &Path, gpu: usize) -> Option<Vec<u8>> {
    let text = fs::read_to_string(dir.join(format!("gpu-{gpu}.slices"))).ok()?;
    Some(text.lines().filter_map(|line| line.parse().ok()).collect())
}

/// Attaches a display to a GPU, or detaches it.
pub fn set_display(dir: &Path, gpu: usize, attached: bool) -> io::Result<()> {
    put(&memory_file(dir, gpu, "display"), attached.then_some(""))
}

pub fn has_display(dir: &Path, gpu: usize) -> bool {
    memory_file(dir, gpu, "display").exists()
}

/// The file that the simulated NVML keeps open from `nvmlInit` to `nvmlShutdown`, like the driver's
/// device files.
pub fn device_file(dir: &Path) -> PathBuf {
    dir.join("nvidiactl")
}

/// Sets the used bytes that NVML does not count, in addition to `CUDA_SIM_HIDDEN`.
pub fn hide(dir: &Path, gpu: usize, bytes: u64) -> io::Result<()> {
    put_number(&memory_file(dir, gpu, "hidden"), bytes as i64)
}

pub fn hidden(dir: &Path, gpu: usize) -> u64 {
    number(&memory_file(dir, gpu, "hidden")).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Sets the free bytes that cannot be allocated, in addition to `CUDA_SIM_FRAGMENTED`.
pub fn fragment(dir: &Path, gpu: usize, bytes: u64) -> io::Result<()> {
    put_number(&memory_file(dir, gpu, "fragmented"), bytes as i64)
}

pub fn fragmented(dir: &Path, gpu: usize) -> u64 {
    number(&memory_file(dir, gpu, "fragmented")).map_or(0, |bytes| bytes.max(0) as u64)
}

/// Memory of a process that does not run on the simulated driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stranger {
    /// The demand in bytes. The process receives the free bytes, including bytes that simulated
    /// processes free later.
    pub bytes: u64,
    /// The pid in NVML's list. With `None`, only the total includes the bytes.
    pub pid: Option<u32>,
    /// NVML lists the process among the graphics programs.
    pub is_graphics: bool,
}

/// The end of a graphics program's line.
const GRAPHICS: &str = " graphics";

/// Replaces the foreign processes of a GPU.
pub fn set_strangers(dir: &Path, gpu: usize, strangers: &[Stranger]) -> io::Result<()> {
    let line = |s: &Stranger| {
        let (pid, graphics) =
            (s.pid.map_or("-".into(), |pid| pid.to_string()), if s.is_graphics { GRAPHICS } else { "" });
        format!("{} {pid}{graphics}\n", s.bytes)
    };
    let text: String = strangers.iter().map(line).collect();
    put(&memory_file(dir, gpu, "strangers"), (!text.is_empty()).then_some(&text))
}

pub fn strangers(dir: &Path, gpu: usize) -> Vec<Stranger> {
    let stranger = |line: &str| {
        let (bytes, pid) = line.split_once(' ')?;
        let (pid, is_graphics) = pid.strip_suffix(GRAPHICS).map_or((pid, false), |pid| (pid, true));
        Some(Stranger { bytes: bytes.parse().ok()?, pid: pid.parse().ok(), is_graphics })
    };
    let text = fs::read_to_string(memory_file(dir, gpu, "strangers")).unwrap_or_default();
    text.lines().filter_map(stranger).collect()
}

/// The calls of `cuMemCreate` that fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refusal {
    /// If set, only calls of this process fail.
    pub pid: Option<u32>,
    /// If set, calls fail only within this time after [`refuse`].
    pub lasts: Option<Duration>,
}

/// Makes `cuMemCreate` fail with out of memory on a GPU. The failures end after [`Refusal::lasts`],
/// or when this function is called with `None`.
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

/// Sets the error in the used bytes that NVML reports for a GPU.
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

/// Writes a number. 0 removes the file.
fn put_number(path: &Path, number: i64) -> io::Result<()> {
    put(path, (number != 0).then(|| number.to_string()).as_deref())
}

/// Milliseconds of `CLOCK_MONOTONIC`, which all processes share.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a live value.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000
}

fn events(dir: &Path) -> PathBuf {
    dir.join("nvml-events")
}

/// Replaces the file atomically, so that no reader sees a part of it.
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
