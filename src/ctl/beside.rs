//! Programs that use a GPU without nvshare, although they descend from a program that has it. The
//! usual reason is a launcher that replaces `LD_PRELOAD`.

use std::fs;
use std::path::Path;

use crate::bus::{Client, Gpu};
use crate::identity::Cgroup;

/// Maximum number of ancestors that are compared. Launchers start their workers more directly.
const MAX_ANCESTORS: usize = 16;

/// The facts that relate two processes.
#[derive(Debug, Default, PartialEq, Eq)]
struct Process {
    name: String,
    parent: u32,
    session: u32,
    unit: String,
}

/// A sentence about each process on a GPU that is no client.
pub fn sentences(gpu: &Gpu, clients: &[Client]) -> impl Iterator<Item = String> {
    gpu.others.iter().flatten().filter_map(|pid| describe(Path::new("/proc"), *pid, clients))
}

fn describe(proc: &Path, pid: u32, clients: &[Client]) -> Option<String> {
    let program = read(proc, pid)?;
    let Process { name, .. } = &program;
    let relative = relative(proc, &program, clients);
    let why = relative.map_or(String::new(), |relative| {
        format!(
            ", but {relative} has it. A launcher has probably replaced LD_PRELOAD: add libnvshare.so to the value that it \
             sets, or use `nvsharectl preload enable`, which needs no variable"
        )
    });
    Some(format!("{name} (process {pid}) uses this GPU without nvshare{why}."))
}

/// A client that should have passed the library on to the program: an ancestor, or else a process of the
/// same session, or else of the same unit.
fn relative(proc: &Path, program: &Process, clients: &[Client]) -> Option<String> {
    let is_client = |pid: u32| clients.iter().find(|client| client.pid == pid && pid > 0);
    let ancestors = std::iter::successors(Some(program.parent), |pid| Some(read(proc, *pid)?.parent));
    if let Some(client) = ancestors.take_while(|pid| *pid > 1).take(MAX_ANCESTORS).find_map(is_client) {
        return Some(format!("process {}, which started it,", client.pid));
    }
    let others = || clients.iter().filter_map(|client| Some((client, read(proc, client.pid)?)));
    if let Some((client, _)) = others().find(|(_, other)| program.session > 1 && other.session == program.session) {
        return Some(format!("process {} of the same session", client.pid));
    }
    let in_unit = others().find(|(_, other)| program.unit.ends_with(".service") && other.unit == program.unit);
    in_unit.map(|(client, other)| format!("process {} of the same unit, {},", client.pid, other.unit))
}

fn read(proc: &Path, pid: u32) -> Option<Process> {
    let directory = proc.join(pid.to_string());
    let stat = fs::read_to_string(directory.join("stat")).ok()?;
    // The name is in parentheses, and may contain any character.
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let mut numbers = rest.split_whitespace().skip(1);
    let parent = numbers.next()?.parse().ok()?;
    let session = numbers.nth(1)?.parse().ok()?;
    let unit = fs::read_to_string(directory.join("cgroup")).map(|text| Cgroup::read(&text).unit().to_owned());
    Some(Process { name: crate::identity::printable(name), parent, session, unit: unit.unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes a process into a directory like `/proc`.
    fn put(proc: &Path, pid: u32, parent: u32, session: u32, unit: &str) {
        let directory = proc.join(pid.to_string());
        fs::create_dir_all(&directory).expect("a directory");
        fs::write(directory.join("stat"), format!("{pid} (a (b) c) S {parent} {pid} {session} 0 -1")).expect("a file");
        fs::write(directory.join("cgroup"), format!("0::/system.slice/{unit}\n")).expect("a file");
    }

    #[test]
    fn a_program_whose_relative_has_the_library_is_named_with_the_remedy() {
        let proc = tempfile::tempdir().expect("a directory");
        let put = |pid, parent, session, unit| put(proc.path(), pid, parent, session, unit);
        put(10, 1, 10, "ray.service");
        put(11, 10, 11, "ray.service");
        put(12, 11, 12, "other.service");
        put(13, 1, 10, "other.service");
        put(14, 1, 14, "ray.service");
        put(15, 1, 15, "session-3.scope");
        let clients = [Client { pid: 10, ..Client::default() }];
        let of = |pid| describe(proc.path(), pid, &clients).expect("a sentence");
        for (pid, relative) in [
            (12, "process 10, which started it, has it"),
            (13, "process 10 of the same session has it"),
            (14, "process 10 of the same unit, ray.service, has it"),
        ] {
            let text = of(pid);
            assert!(
                text.starts_with(&format!("a (b) c (process {pid}) uses this GPU without nvshare, but {relative}."))
            );
            assert!(text.contains("nvsharectl preload enable"), "{text}");
        }
        assert_eq!(of(15), "a (b) c (process 15) uses this GPU without nvshare.");
        assert_eq!(describe(proc.path(), 16, &clients), None, "it has ended");
    }
}
