//! Running programs as the owner of a program, with the capabilities that CRIU needs and no others.
//!
//! The kernel then checks each access of CRIU as an access of the owner. So a restore opens only files
//! that the owner may open now, whatever a path in the image refers to, and creates only processes
//! with the owner's users and groups.

use crate::process::Credentials;
use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
};

/// Choosing the PIDs of new processes, and reading the files that processes have mapped.
const CAP_CHECKPOINT_RESTORE: u32 = 40;
/// Lowering the bounding set of a process. CRIU restores a bounding set that lacks capabilities, and
/// fails if it may not lower its own [CRIU 4.1.1].
const CAP_SETPCAP: u32 = 8;

/// What a command does as the owner.
#[derive(Debug, Clone, Copy)]
pub enum Purpose {
    Dump,
    Restore,
    /// Opening files, without any capability.
    Probe,
}

impl Purpose {
    fn capabilities(self) -> u64 {
        match self {
            Self::Dump => 1 << CAP_CHECKPOINT_RESTORE,
            Self::Restore => 1 << CAP_CHECKPOINT_RESTORE | 1 << CAP_SETPCAP,
            Self::Probe => 0,
        }
    }
}

/// Makes a command run as the owner in this directory, without the helper's environment.
pub fn run_as(command: &mut Command, owner: &Credentials, purpose: Purpose, directory: BorrowedFd<'_>) {
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("NVSHARE_DISABLE", "1");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (owner, directory) = (owner.clone(), directory.as_raw_fd());
    // SAFETY: the closure only makes system calls, and reads memory that was allocated before the fork.
    unsafe { command.pre_exec(move || become_owner(&owner, purpose.capabilities(), directory)) };
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

const VERSION_3: u32 = 0x2008_0522;

fn become_owner(owner: &Credentials, capabilities: u64, directory: i32) -> io::Result<()> {
    let Credentials { uid, gid, groups } = owner;
    let set = |half: u32| Sets { effective: half, permitted: half, inheritable: half };
    let sets = [set(capabilities as u32), set((capabilities >> 32) as u32)];
    let header = Header { version: VERSION_3, pid: 0 };
    // SAFETY: the pointers refer to values that live during the calls, and `directory` is open.
    unsafe {
        check(libc::fchdir(directory))?;
        libc::umask(0o077);
        check(libc::setgroups(groups.len(), groups.as_ptr()))?;
        check(libc::prctl(libc::PR_SET_KEEPCAPS, 1, 0, 0, 0))?;
        check(libc::setresgid(*gid, *gid, *gid))?;
        check(libc::setresuid(*uid, *uid, *uid))?;
        check(libc::syscall(libc::SYS_capset, &raw const header, sets.as_ptr()) as i32)?;
        for capability in (0..64).filter(|capability| capabilities >> capability & 1 == 1) {
            check(libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, capability, 0, 0))?;
        }
    }
    Ok(())
}
