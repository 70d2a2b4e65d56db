//! Pipes and eventfds that a program shares with processes outside of its tree. CRIU would save them without
//! these processes: a restored writer has no reader and ends by SIGPIPE, and a restored reader waits forever.
//!
//! FIFOs have names, so `worker` looks for them. TCP connections: `process`. CRIU itself refuses Unix sockets
//! whose peer is not saved.
//!
//! Not found, because `/proc` does not identify them: timerfds, epoll instances, inotify instances and memory
//! without a name that a process outside shares, descriptors in a message that was not received yet, and
//! unlinked FIFOs.

use crate::process::{START, access, describe, descriptor_field, open_files, parent, pids};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// Maximum number of ancestors of a process that are looked at.
const MAX_DEPTH: usize = 64;

/// An open pipe or eventfd. The number is the same in all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    /// The end of a pipe for reading.
    Read(u64),
    /// The end of a pipe for writing.
    Write(u64),
    Event(u64),
}

impl End {
    /// The end with which a process uses the same object from the other side.
    fn other(self) -> Self {
        match self {
            Self::Read(pipe) => Self::Write(pipe),
            Self::Write(pipe) => Self::Read(pipe),
            Self::Event(_) => self,
        }
    }

    fn kind(self) -> &'static str {
        match self {
            Self::Read(_) | Self::Write(_) => "a pipe",
            Self::Event(_) => "an eventfd",
        }
    }
}

/// Returns the ends of one descriptor. A pipe can be open for both reading and writing.
fn ends_of(pid: i32, descriptor: &str, path: &Path) -> Vec<End> {
    let path = path.to_string_lossy();
    let pipe = path.strip_prefix("pipe:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
    match pipe {
        Some(pipe) => {
            let (reads, writes) = access(pid, descriptor).unwrap_or_default();
            let ends = [reads.then_some(End::Read(pipe)), writes.then_some(End::Write(pipe))];
            ends.into_iter().flatten().collect()
        }
        None if path == "anon_inode:[eventfd]" => {
            let id = descriptor_field(pid, descriptor, "eventfd-id:").and_then(|id| id.parse().ok());
            id.map(End::Event).into_iter().collect()
        }
        None => Vec::new(),
    }
}

/// Returns the pipes and eventfds of a process, with their descriptors.
fn ends(pid: i32) -> impl Iterator<Item = (End, String)> {
    let of = move |(descriptor, path): (String, PathBuf)| {
        ends_of(pid, &descriptor, &path).into_iter().map(move |end| (end, descriptor.clone()))
    };
    open_files(pid).flat_map(of)
}

/// True if a process was started by one of these processes. A running program may have started it after
/// its processes were listed.
fn is_descendant(pid: i32, members: &BTreeSet<i32>) -> bool {
    let ancestors = std::iter::successors(parent(pid), |pid| parent(*pid));
    ancestors.take(MAX_DEPTH).any(|ancestor| members.contains(&ancestor))
}

/// Checks that a tree of processes shares no pipe and no eventfd with another process. A pipe whose two ends
/// are in the tree is not shared, even if another process has inherited it.
///
/// # Errors
/// The process of the tree, and the reason.
pub fn check(members: &BTreeSet<i32>) -> Result<(), (i32, String)> {
    let mut inside = BTreeMap::new();
    for pid in members {
        inside.extend(ends(*pid).map(|(end, descriptor)| (end, (*pid, descriptor))));
    }
    let is_shareable = |end: &End| matches!(end, End::Event(_)) || !inside.contains_key(&end.other());
    let sought: BTreeMap<End, &(i32, String)> =
        inside.iter().filter(|(end, _)| is_shareable(end)).map(|(end, place)| (end.other(), place)).collect();
    if sought.is_empty() {
        return Ok(());
    }
    for other in pids().into_iter().flatten().filter(|pid| !members.contains(pid)) {
        let found = ends(other).find_map(|(end, _)| sought.get_key_value(&end));
        if let Some((end, (pid, descriptor))) = found
            && !is_descendant(other, members)
        {
            let (kind, other) = (end.kind(), describe(other));
            let why = format!("shares {kind} (descriptor {descriptor}) with {other}, which would not be saved");
            return Err((*pid, format!("{why}. {START}")));
        }
    }
    Ok(())
}

/// Names the process outside of a tree that has the other end of a FIFO. `is_written`: the tree has the end for
/// writing.
pub fn describe_others(fifo: &Path, is_written: bool, members: &[i32]) -> String {
    let is_other = |pid: &i32| {
        !members.contains(pid)
            && open_files(*pid).filter(|(_, path)| path == fifo).any(|(descriptor, _)| {
                access(*pid, &descriptor).is_some_and(|(reads, writes)| if is_written { reads } else { writes })
            })
    };
    pids().into_iter().flatten().find(is_other).map_or_else(|| "other programs".to_owned(), describe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::{Identity, Tree};
    use rustix::event::{EventfdFlags, eventfd};
    use std::{
        io::Read,
        os::unix::process::CommandExt,
        process::{Child, Command, Stdio},
    };

    fn tree(child: &Child) -> BTreeSet<i32> {
        let root = Identity::of(child.id() as i32).expect("its files").expect("it runs");
        Tree::of(&root).expect("its files").expect("it runs").pids().into_iter().collect()
    }

    fn end(mut child: Child) {
        for pid in tree(&child) {
            // SAFETY: sends a signal to a process of this test.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        child.wait().expect("it has ended");
    }

    /// Starts a program without the other files that the tests have inherited.
    fn start(command: &mut Command) -> Child {
        // SAFETY: the closure only makes a system call.
        unsafe {
            command.pre_exec(|| {
                libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as i32);
                Ok(())
            });
        }
        command.spawn().expect("a process")
    }

    fn sleeper(input: impl Into<Stdio>, output: Stdio) -> Child {
        start(Command::new("sleep").arg("1000").stdin(input).stdout(output).stderr(Stdio::null()))
    }

    #[test]
    fn a_pipe_to_another_program_is_refused_by_name() {
        let child = sleeper(Stdio::null(), Stdio::piped());
        let (pid, why) = check(&tree(&child)).expect_err("this test reads its output");
        assert_eq!(pid, child.id() as i32);
        let own = std::process::id();
        assert!(why.contains(&format!("a pipe (descriptor 1) with process {own} (")), "{why}");
        assert!(why.contains("nvsharectl run --portable"), "{why}");
        end(child);
    }

    #[test]
    fn a_pipe_whose_other_end_is_closed_is_saved() {
        let mut child = sleeper(Stdio::null(), Stdio::piped());
        drop(child.stdout.take());
        check(&tree(&child)).expect("CRIU restores it without a reader, too");
        end(child);
    }

    #[test]
    fn a_pipe_between_processes_of_the_tree_is_saved() {
        let mut command = Command::new("sh");
        // The errors tell when both processes run.
        command.args(["-c", "sleep 1000 2>/dev/null | { echo >&2; exec sleep 1000; }"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = start(&mut command);
        child.stderr.take().expect("its errors").read_exact(&mut [0]).expect("a line");
        let members = tree(&child);
        check(&members).expect("both ends are saved");
        members.iter().find_map(|pid| check(&[*pid].into()).err()).expect("one process alone shares the pipe");
        end(child);
    }

    #[test]
    fn an_eventfd_is_refused_only_if_another_program_has_it() {
        let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let child = sleeper(event.try_clone().expect("a descriptor"), Stdio::null());
        let (_, why) = check(&tree(&child)).expect_err("this test has it");
        assert!(why.contains("an eventfd (descriptor 0) with process"), "{why}");
        drop(event);
        check(&tree(&child)).expect("only the program has it");
        end(child);
    }
}
