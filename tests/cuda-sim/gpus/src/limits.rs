//! Limits of memory for all that is in a control group, as NVML sets them from driver 615 on: a file with a line for each.
//! What a process takes counts for every control group that it is in.

use crate::Config;
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Where control groups are.
const ROOT: &str = "/sys/fs/cgroup";

/// The limit of one control group on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub gpu: usize,
    pub soft: u64,
    pub hard: u64,
    /// Of its directory.
    pub cgroup: PathBuf,
}

impl Limit {
    fn parse(line: &str) -> Option<Limit> {
        let mut words = line.splitn(4, ' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (gpu, soft, hard) = (number()? as usize, number()?, number()?);
        Some(Limit { gpu, soft, hard, cgroup: words.next()?.into() })
    }

    /// Whether that process is in the control group.
    pub fn covers(&self, pid: u32) -> bool {
        let Ok(own) = self.cgroup.strip_prefix(ROOT) else { return false };
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        // Of version 2, and systemd's own of version 1.
        let lines = text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let mut paths = lines.filter(|(kind, _)| matches!(*kind, "" | "name=systemd")).map(|(_, path)| path);
        paths.any(|path| Path::new(path.trim_start_matches('/')).starts_with(own))
    }
}

/// Every limit there is.
pub fn all() -> Vec<Limit> {
    let text = fs::read_to_string(file()).unwrap_or_default();
    text.lines().filter_map(Limit::parse).collect()
}

/// Puts a limit in the place of the one that there was. With all accounts locked.
pub(crate) fn put(limit: &Limit, is_limit: bool) -> io::Result<()> {
    let mut limits = all();
    limits.retain(|old| (old.gpu, &old.cgroup) != (limit.gpu, &limit.cgroup));
    limits.extend(is_limit.then(|| limit.clone()));
    let line = |l: &Limit| format!("{} {} {} {}\n", l.gpu, l.soft, l.hard, l.cgroup.display());
    let beside = file().with_extension("new");
    fs::create_dir_all(&Config::get().dir)?;
    fs::write(&beside, limits.iter().map(line).collect::<String>())?;
    fs::rename(beside, file())
}

fn file() -> PathBuf {
    Config::get().dir.join("limits")
}
