//! The configuration of the simulated machine. It is read from the environment once.

use crate::MAX_GPUS;
use std::{
    collections::{BTreeSet, HashMap},
    env,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

/// The simulated machine. Sizes are in bytes, bandwidths in bytes per second.
#[derive(Debug)]
pub struct Config {
    /// `CUDA_SIM_GPUS`: the number of GPUs, which defaults to 1.
    pub gpus: usize,
    /// `CUDA_SIM_MEMORY`: memory of one GPU.
    pub memory: u64,
    /// `CUDA_SIM_RESERVED`: additional memory for the driver itself. Only NVML counts it.
    pub reserved: u64,
    /// `CUDA_SIM_CONTEXT`: memory of one context.
    pub context: u64,
    /// `CUDA_SIM_CONTEXT_TIME`: the time to create a context. During this time, the context's bytes
    /// are allocated in steps.
    pub context_time: Duration,
    /// `CUDA_SIM_CONTEXT_GROWTH`: memory that a context allocates later, for lazily loaded code.
    pub context_growth: u64,
    /// `CUDA_SIM_CONTEXT_GROWTH_STEPS`: the number of steps of this growth. Each module load and
    /// each launch is one step, until the growth is complete.
    pub context_growth_steps: u64,
    /// `CUDA_SIM_HIDDEN`: used bytes of each GPU that NVML does not count.
    pub hidden: u64,
    /// `CUDA_SIM_FRAGMENTED`: free bytes of each GPU that cannot be allocated.
    pub fragmented: u64,
    /// `CUDA_SIM_DIR`: the directory that the processes of one simulated machine share.
    pub dir: PathBuf,
    /// `CUDA_SIM_GPU_BANDWIDTH`: memory bandwidth of kernels.
    pub gpu_bandwidth: u64,
    /// `CUDA_SIM_LINK_BANDWIDTH`: bandwidth of copies to and from pinned memory, in each direction.
    pub link_bandwidth: u64,
    /// `CUDA_SIM_HOST_BANDWIDTH`: the host's memory bandwidth for the copies of all GPUs together.
    /// 0 means no limit.
    pub host_bandwidth: u64,
    /// `CUDA_SIM_PAGEABLE_BANDWIDTH`: bandwidth of copies to and from any other host memory.
    pub pageable_bandwidth: u64,
    /// `CUDA_SIM_FAULT_BANDWIDTH`: bandwidth of page faults in managed memory.
    pub fault_bandwidth: u64,
    /// `CUDA_SIM_PCIE_LANES`: the number of lanes of the first-generation link that NVML reports.
    /// With 0, NVML doesn't support link data.
    pub pcie_lanes: u32,
    /// `CUDA_SIM_NVML`: `memory` if NVML supports only memory and processes.
    pub nvml: Support,
    /// `CUDA_SIM_NVML_EVENTS`: `0` for a driver without events.
    pub nvml_events: bool,
    /// `CUDA_SIM_NVML_PROCESSES`: NVML's information about processes.
    pub nvml_processes: Listing,
    /// `CUDA_SIM_NVML_DELAY`: the age of NVML's memory figures.
    pub nvml_delay: Duration,
    /// `CUDA_SIM_VMM`: `0` for a GPU without virtual memory management.
    pub vmm: bool,
    /// `CUDA_SIM_FABRIC`: the fabric between the GPUs.
    pub fabric: Fabric,
    /// `CUDA_SIM_DECOMPRESSION`: whether the GPU has hardware for decompression.
    pub decompression: bool,
    /// `CUDA_SIM_KEEP_MEMORY`: whether a process keeps freed host pages for its next chunks.
    pub keep_memory: bool,
    /// `CUDA_SIM_FINGERPRINT_TIME`: additional milliseconds that each fingerprint kernel runs.
    pub fingerprint_time: Duration,
    /// `CUDA_SIM_FAT_BINARIES`: `0` for a GPU that no fat binary supports.
    pub fat_binaries: bool,
    /// `CUDA_SIM_NO_PEERS`: pairs of GPUs without peer access.
    pub no_peers: Vec<(usize, usize)>,
    /// `CUDA_SIM_EXCLUSIVE`: GPUs in compute mode exclusive-process.
    pub exclusive: Vec<usize>,
    /// `CUDA_SIM_DRIVER`: the CUDA version that `cuDriverGetVersion` returns.
    pub driver: i32,
    /// `CUDA_SIM_FAIL`: with `symbol:n,…`, the n-th call of the symbol fails.
    pub fail: HashMap<String, BTreeSet<u64>>,
    /// `CUDA_SIM_FAIL_AS`: the error of these failures.
    pub fail_as: u32,
}

/// The fabric between the GPUs, and what the driver offers because of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    None,
    /// The driver supports FABRIC handles, and the fabric ends at this host.
    Handles,
    /// The driver supports FABRIC handles, and the fabric connects several hosts.
    Cluster,
}

/// The features of NVML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// All features of the simulator.
    All,
    /// Only a GPU's memory, processes and identity.
    Memory,
}

/// NVML's information about the processes of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listing {
    /// Each process and its bytes.
    All,
    /// Each process, without its bytes.
    Unmeasured,
    /// No processes.
    None,
}

impl Config {
    /// Returns the configuration of this process. The first call reads the environment.
    pub fn get() -> &'static Config {
        static CONFIG: OnceLock<Config> = OnceLock::new();
        CONFIG.get_or_init(Config::from_env)
    }

    fn from_env() -> Config {
        let link_bandwidth = size("CUDA_SIM_LINK_BANDWIDTH", 1 << 30);
        Config {
            gpus: (size("CUDA_SIM_GPUS", 1) as usize).min(MAX_GPUS),
            memory: size("CUDA_SIM_MEMORY", 1 << 30),
            reserved: size("CUDA_SIM_RESERVED", 0),
            context: size("CUDA_SIM_CONTEXT", 16 << 20),
            context_time: milliseconds("CUDA_SIM_CONTEXT_TIME"),
            context_growth: size("CUDA_SIM_CONTEXT_GROWTH", 0),
            context_growth_steps: size("CUDA_SIM_CONTEXT_GROWTH_STEPS", 8).max(1),
            hidden: size("CUDA_SIM_HIDDEN", 0),
            fragmented: size("CUDA_SIM_FRAGMENTED", 0),
            dir: dir(),
            gpu_bandwidth: size("CUDA_SIM_GPU_BANDWIDTH", 4 << 30).max(1),
            link_bandwidth: link_bandwidth.max(1),
            host_bandwidth: size("CUDA_SIM_HOST_BANDWIDTH", 0),
            pageable_bandwidth: size("CUDA_SIM_PAGEABLE_BANDWIDTH", link_bandwidth / 3).max(1),
            fault_bandwidth: size("CUDA_SIM_FAULT_BANDWIDTH", link_bandwidth / 4).max(1),
            pcie_lanes: size("CUDA_SIM_PCIE_LANES", 0) as u32,
            nvml: support(),
            nvml_events: size("CUDA_SIM_NVML_EVENTS", 1) != 0 && support() == Support::All,
            nvml_processes: listing(),
            nvml_delay: milliseconds("CUDA_SIM_NVML_DELAY"),
            vmm: size("CUDA_SIM_VMM", 1) != 0,
            fabric: fabric(),
            decompression: size("CUDA_SIM_DECOMPRESSION", 0) != 0,
            keep_memory: size("CUDA_SIM_KEEP_MEMORY", 0) != 0,
            fingerprint_time: milliseconds("CUDA_SIM_FINGERPRINT_TIME"),
            fat_binaries: size("CUDA_SIM_FAT_BINARIES", 1) != 0,
            no_peers: list("CUDA_SIM_NO_PEERS", |pair| {
                let (a, b) = pair.split_once('-')?;
                Some((a.parse().ok()?, b.parse().ok()?))
            }),
            exclusive: list("CUDA_SIM_EXCLUSIVE", |gpu| gpu.parse().ok()),
            driver: size("CUDA_SIM_DRIVER", 13000) as i32,
            fail_as: size("CUDA_SIM_FAIL_AS", 2) as u32,
            fail: env::var("CUDA_SIM_FAIL").map(|text| failures(&text)).unwrap_or_default(),
        }
    }

    /// Whether one GPU can get access to the other's memory.
    pub fn are_peers(&self, a: usize, b: usize) -> bool {
        a != b && !self.no_peers.iter().any(|pair| *pair == (a, b) || *pair == (b, a))
    }

    /// The UUID of a GPU. It is the same in every process with the same directory.
    pub fn uuid(&self, gpu: usize) -> [u8; 16] {
        self.uuid_of(&gpu.to_string())
    }

    /// The UUID of a MIG slice.
    pub fn slice_uuid(&self, gpu: usize, slice: u8) -> [u8; 16] {
        self.uuid_of(&format!("{gpu}/{slice}"))
    }

    fn uuid_of(&self, what: &str) -> [u8; 16] {
        uuid_in(&self.dir, what)
    }

    /// The UUID as `nvidia-smi` prints it.
    pub fn uuid_text(&self, gpu: usize) -> String {
        text("GPU", self.uuid(gpu))
    }

    /// The UUID of a slice as `nvidia-smi` prints it.
    pub fn slice_uuid_text(&self, gpu: usize, slice: u8) -> String {
        text("MIG", self.slice_uuid(gpu, slice))
    }

    /// The PCI bus of a GPU. Its device and function are 0.
    pub fn pci_bus(gpu: usize) -> u32 {
        0x10 + gpu as u32
    }

    /// The marketing name of every simulated GPU.
    pub const NAME: &str = "Simulated GPU";
}

/// The UUID of a GPU of the machine in `dir`, as `nvidia-smi` prints it.
pub fn gpu_uuid(dir: &Path, gpu: usize) -> String {
    text("GPU", uuid_in(dir, &gpu.to_string()))
}

/// A file `host` in the directory contains the name of the simulated host, whose GPUs have other UUIDs. It is read
/// each time, because a process may be checkpointed on one host and restored on another.
fn uuid_in(dir: &Path, what: &str) -> [u8; 16] {
    let host = fs::read_to_string(dir.join("host")).unwrap_or_default();
    let name = format!("{}#{what}{}", dir.display(), host.trim());
    let mut uuid = [0; 16];
    for (half, seed) in [0xcbf2_9ce4_8422_2325_u64, 0x9ae1_6a3b_2f90_404f].into_iter().enumerate() {
        let hash = name.bytes().fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        uuid[half * 8..half * 8 + 8].copy_from_slice(&(hash ^ (hash >> 29)).to_be_bytes());
    }
    uuid
}

fn text(kind: &str, uuid: [u8; 16]) -> String {
    let mut text = format!("{kind}-");
    for (i, byte) in uuid.iter().enumerate() {
        if matches!(i, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        let _ = write!(text, "{byte:02x}");
    }
    text
}

fn dir() -> PathBuf {
    // SAFETY: getuid has no preconditions.
    let uid = unsafe { libc::getuid() };
    env::var_os("CUDA_SIM_DIR").map_or_else(|| PathBuf::from(format!("/dev/shm/cuda-sim-{uid}")), PathBuf::from)
}

fn support() -> Support {
    match env::var("CUDA_SIM_NVML").as_deref() {
        Err(_) | Ok("all") => Support::All,
        Ok("memory") => Support::Memory,
        Ok(other) => panic!("CUDA_SIM_NVML={other}: want all or memory"),
    }
}

fn fabric() -> Fabric {
    match env::var("CUDA_SIM_FABRIC").as_deref() {
        Ok("handles") => Fabric::Handles,
        Ok("cluster") => Fabric::Cluster,
        _ => Fabric::None,
    }
}

fn listing() -> Listing {
    match env::var("CUDA_SIM_NVML_PROCESSES").as_deref() {
        Err(_) | Ok("all") => Listing::All,
        Ok("unmeasured") => Listing::Unmeasured,
        Ok("none") => Listing::None,
        Ok(other) => panic!("CUDA_SIM_NVML_PROCESSES={other}: want all, unmeasured or none"),
    }
}

fn milliseconds(name: &str) -> Duration {
    Duration::from_millis(size(name, 0))
}

fn list<T>(name: &str, parse: impl Fn(&str) -> Option<T>) -> Vec<T> {
    let text = env::var(name).unwrap_or_default();
    let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
    items.map(|item| parse(item).unwrap_or_else(|| panic!("{name}={text}: what is {item}?"))).collect()
}

fn size(name: &str, default: u64) -> u64 {
    match env::var(name) {
        Ok(text) => parse_size(&text).unwrap_or_else(|| panic!("{name}={text}: want a number with K, M, G or T")),
        Err(_) => default,
    }
}

/// Parses a size such as `512M`. K, M, G and T are powers of 1024.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, shift) = match text.char_indices().next_back()? {
        (at, 'K' | 'k') => (&text[..at], 10),
        (at, 'M' | 'm') => (&text[..at], 20),
        (at, 'G' | 'g') => (&text[..at], 30),
        (at, 'T' | 't') => (&text[..at], 40),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn failures(text: &str) -> HashMap<String, BTreeSet<u64>> {
    let mut failures: HashMap<String, BTreeSet<u64>> = HashMap::new();
    for (symbol, n) in text.split(',').filter_map(|part| part.split_once(':')) {
        if let Ok(n) = n.trim().parse() {
            failures.entry(symbol.trim().to_owned()).or_default().insert(n);
        }
    }
    failures
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed() {
        assert_eq!(parse_size("12"), Some(12));
        assert_eq!(parse_size("3M"), Some(3 << 20));
        assert_eq!(parse_size("2g"), Some(2 << 30));
        assert_eq!(parse_size("M"), None);
        assert_eq!(parse_size("-1"), None);
        assert_eq!(parse_size("99999999999T"), None);
    }

    #[test]
    fn failure_settings_are_parsed() {
        assert_eq!(
            failures("cuMemCreate:3, cuMemAlloc_v2:1, cuMemCreate:7"),
            HashMap::from([("cuMemCreate".into(), [3, 7].into()), ("cuMemAlloc_v2".into(), [1].into())])
        );
    }
}
