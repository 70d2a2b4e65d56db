//! The rights of a program: its users and groups, limits and login. They are recorded before the program
//! is saved, and checked for **each task of a restored program** before it continues.
//!
//! CRIU reads the rights of an image from the program, which its owner controls. `claims` refuses an image
//! that claims more than the record. What CRIU has then created is compared with the record, too, because
//! CRIU may have left other processes, and may know formats that `claims` does not: a task that has more is
//! ended.

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

/// The users and groups of a program. All its user IDs are equal, and so are all its group IDs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// The rights of a program when it was saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rights {
    pub owner: Credentials,
    /// The hard limits of resources, in the order of their numbers. `u64::MAX`: unlimited.
    pub limits: Vec<u64>,
    /// The login user of the audit system. `None`: the program belongs to no login.
    pub login: Option<u32>,
}

/// The fields of a `status` file in `/proc`.
#[derive(Debug, PartialEq, Eq)]
pub struct Status(BTreeMap<String, String>);

/// The sets of capabilities that a program uses. The bounding set only restricts.
const CAPABILITIES: [&str; 4] = ["CapInh", "CapPrm", "CapEff", "CapAmb"];
const NO_LOGIN: u32 = u32::MAX;
/// The number of limits that Linux has.
const LIMITS: usize = 16;

impl Status {
    /// Reads the status of a process or thread. `directory`: its directory in `/proc`.
    ///
    /// # Errors
    /// The process has ended.
    pub fn read(directory: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(directory.join("status"))?;
        let fields = text.lines().filter_map(|line| line.split_once(':'));
        Ok(Self(fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()))
    }

    fn numbers(&self, name: &str, base: u32) -> Option<Vec<u64>> {
        self.0.get(name)?.split_whitespace().map(|number| u64::from_str_radix(number, base).ok()).collect()
    }

    /// Returns a field that is one decimal number.
    pub fn number(&self, name: &str) -> Option<u64> {
        match self.numbers(name, 10)?[..] {
            [number] => Some(number),
            _ => None,
        }
    }

    /// Returns a field that is an amount of memory, in bytes.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        Some(self.0.get(name)?.split_whitespace().next()?.parse::<u64>().ok()? << 10)
    }

    /// Returns the users and groups, if all user IDs are equal, and all group IDs.
    pub fn credentials(&self) -> Option<Credentials> {
        let same = |name: &str| {
            let ids = self.numbers(name, 10)?;
            let first = *ids.first()?;
            ids.iter().all(|id| *id == first).then_some(first as u32)
        };
        let groups = self.numbers("Groups", 10)?.into_iter().map(|group| group as u32).collect();
        Some(Credentials { uid: same("Uid")?, gid: same("Gid")?, groups })
    }

    /// Returns true if the task has any capability, or its capabilities cannot be read.
    pub fn has_capabilities(&self) -> bool {
        CAPABILITIES.iter().any(|set| self.numbers(set, 16) != Some(vec![0]))
    }

    /// Returns true if the task can gain no privileges from set-user-ID programs.
    pub fn has_no_new_privileges(&self) -> bool {
        self.number("NoNewPrivs") == Some(1)
    }

    /// Returns true unless the task has no filter of system calls.
    pub fn is_filtered(&self) -> bool {
        self.number("Seccomp").is_some_and(|mode| mode != 0)
    }
}

/// Returns the hard limits of a process.
fn limits(directory: &Path) -> io::Result<Vec<u64>> {
    let invalid = || io::Error::other("a file in /proc has an unknown format");
    let text = fs::read_to_string(directory.join("limits"))?;
    // The columns have fixed positions: the names contain spaces.
    let number = |line: &str| match line.get(47..68)?.trim() {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    let limits: Option<Vec<u64>> = text.lines().skip(1).map(number).collect();
    limits.filter(|limits| limits.len() == LIMITS).ok_or_else(invalid)
}

/// Returns the directories of all threads of a process in `/proc`.
///
/// # Errors
/// The process has ended.
pub fn tasks(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory.join("task"))?.map(|task| Ok(task?.path())).collect()
}

/// Returns the login user of a process. `None`: it has none, or the kernel has no audit system.
pub fn login(directory: &Path) -> Option<u32> {
    let text = fs::read_to_string(directory.join("loginuid")).ok()?;
    text.trim().parse().ok().filter(|login| *login != NO_LOGIN)
}

impl Rights {
    /// Returns the rights of these processes. Each limit is the highest of all processes.
    ///
    /// # Errors
    /// A process has ended.
    pub fn of(owner: Credentials, login: Option<u32>, processes: &[PathBuf]) -> io::Result<Self> {
        let mut highest = vec![0; LIMITS];
        for process in processes {
            for (highest, limit) in highest.iter_mut().zip(limits(process)?) {
                *highest = limit.max(*highest);
            }
        }
        Ok(Self { owner, limits: highest, login })
    }

    /// Checks that no task of these frozen processes has a right that is not recorded. `proc`: the
    /// directory `/proc`.
    ///
    /// The securebits of a task cannot be read. They have no effect without capabilities and without
    /// programs that grant privileges.
    ///
    /// # Errors
    /// The right that a process has, or that its rights cannot be read.
    pub fn check(&self, proc: &Path, pids: &[i32]) -> Result<(), String> {
        for pid in pids {
            let process = proc.join(pid.to_string());
            self.check_process(&process).map_err(|why| format!("process {pid} {why}"))?;
        }
        Ok(())
    }

    fn check_process(&self, process: &Path) -> Result<(), String> {
        let unreadable = |e: io::Error| format!("cannot be checked: {e}");
        for task in tasks(process).map_err(unreadable)? {
            let status = Status::read(&task).map_err(unreadable)?;
            if status.has_capabilities() {
                return Err("has capabilities".into());
            }
            if !status.has_no_new_privileges() {
                return Err("could gain privileges from set-user-ID programs".into());
            }
            if status.credentials().as_ref() != Some(&self.owner) {
                return Err("has another user or group".into());
            }
        }
        if login(process) != self.login {
            return Err("has another login".into());
        }
        let limits = limits(process).map_err(unreadable)?;
        match limits.len() == self.limits.len()
            && limits.iter().zip(&self.limits).all(|(own, recorded)| own <= recorded)
        {
            true => Ok(()),
            false => Err("has higher limits".into()),
        }
    }
}

#[cfg(test)]
mod tests;
