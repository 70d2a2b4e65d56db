//! What a program needs from a host, besides its image: GPUs and their driver, a kernel and a processor that
//! can execute its code, its user, and its files. The needs are recorded when the program is saved, and
//! compared with the host before anything is started. So a user learns everything that is missing from one
//! answer, and not from CRIU's first failure or from a program that ends at an unknown instruction.

use crate::{
    files::{self, NeededFile},
    process::{self, Tree},
    rights::Rights,
    scope,
    worker::Limit,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CStr,
    fs,
    path::Path,
    time::{Duration, Instant},
};

/// Maximum time for which a restore waits until an ended process is reaped.
pub const REAPED: Duration = Duration::from_secs(3);

/// The needs of a program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// The name of the program's user. On another host, the number may belong to another user.
    pub user: String,
    pub system: System,
    /// The kind of each GPU that the program has used.
    pub gpus: Vec<String>,
    pub files: Vec<NeededFile>,
}

/// The properties of a host that programs depend on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct System {
    /// The version of the NVIDIA driver, if it is loaded.
    pub driver: Option<String>,
    /// The release of the kernel, such as `6.12.48-amd64`.
    pub kernel: String,
    /// The instruction sets of the processor.
    pub instructions: BTreeSet<String>,
}

/// The flags of x86 processors that say which instructions programs may execute. The other flags describe
/// virtualization, power management and errors of the processor, which programs do not depend on.
const INSTRUCTIONS: &str = "3dnow 3dnowext 3dnowprefetch abm adx aes amx_bf16 amx_complex amx_fp16 amx_int8 \
    amx_tile avx avx10 avx2 avx_ifma avx_ne_convert avx_vnni avx_vnni_int16 avx_vnni_int8 bmi1 bmi2 cldemote \
    clflush clflushopt clwb clzero cmov cmpccxadd cx16 cx8 enqcmd erms f16c fma fma4 fsgsbase fsrm fxsr gfni hle \
    lahf_lm lzcnt mmx mmxext movbe movdir64b movdiri ospke pclmulqdq pku pni popcnt prefetchwt1 rdpid rdrand \
    rdseed rdtscp rtm serialize sha512 sha_ni sm3 sm4 sse sse2 sse4_1 sse4_2 sse4a ssse3 tbm tsxldtrk \
    user_shstk vaes vpclmulqdq waitpkg wbnoinvd xgetbv1 xop xsave xsavec xsaveopt xsaves";

/// True if a flag names instructions that programs may execute.
fn is_instruction_set(flag: &str) -> bool {
    flag.starts_with("avx512")
        || flag.starts_with("avx10")
        || INSTRUCTIONS.split_whitespace().any(|known| known == flag)
}

/// Returns the instruction sets in the text of `/proc/cpuinfo`. On ARM, every feature is one.
fn instructions(cpuinfo: &str) -> BTreeSet<String> {
    let field = |name: &str| {
        let lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let mut values = lines.filter(|(key, _)| key.trim() == name).map(|(_, value)| value);
        values.next()
    };
    let (flags, features) = (field("flags").unwrap_or_default(), field("Features").unwrap_or_default());
    let known = flags.split_whitespace().filter(|flag| is_instruction_set(flag));
    known.chain(features.split_whitespace()).map(str::to_owned).collect()
}

impl System {
    /// The properties of this host.
    pub fn present() -> Self {
        let read = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned());
        Self {
            driver: read("/sys/module/nvidia/version").ok(),
            kernel: read("/proc/sys/kernel/osrelease").unwrap_or_default(),
            instructions: instructions(&read("/proc/cpuinfo").unwrap_or_default()),
        }
    }
}

/// The leading numbers of a kernel's release: `6.12.48-amd64` → 6, 12.
fn release(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse().ok()).take(2).collect()
}

impl Needs {
    /// Returns the needs of a stopped program. `gpus`: the kinds of its GPUs, which only the scheduler knows.
    ///
    /// # Errors
    /// Its files cannot be examined in time.
    pub fn of(tree: &Tree, rights: &Rights, gpus: Vec<String>, limit: Limit<'_>) -> Result<Self, crate::Refusal> {
        let files = files::identify(rights, tree, limit)?;
        let user = user_name(rights.owner.uid).unwrap_or_default();
        Ok(Self { user, system: System::present(), gpus, files })
    }

    /// Lists what a host lacks, each with the remedy. `gpus`: the kinds of the host's GPUs; empty if they are not known. `user`: the host's
    /// name of the program's user.
    pub fn missing(&self, host: &System, gpus: &[String], user: Option<&str>) -> Vec<String> {
        let mut missing: Vec<String> = self.missing_gpus(gpus);
        missing.extend(self.system.missing_driver(host.driver.as_deref()));
        if release(&host.kernel) < release(&self.system.kernel) {
            missing.push(format!(
                "it was saved with kernel {}, and this host has the older {}. Boot a kernel that is not older",
                self.system.kernel, host.kernel
            ));
        }
        let unknown: Vec<&str> = self.system.instructions.difference(&host.instructions).map(String::as_str).collect();
        if !unknown.is_empty() {
            missing.push(format!(
                "this processor lacks {}. Restore it on a host with such a processor",
                unknown.join(", ")
            ));
        }
        if let Some(user) = user.filter(|user| *user != self.user) {
            missing.push(format!(
                "its user {:?} has the number of another user here, {user:?}. Give both hosts the same users",
                self.user
            ));
        }
        missing
    }

    fn missing_gpus(&self, present: &[String]) -> Vec<String> {
        // After a boot, the program sleeps until the scheduler finds its GPU.
        if present.is_empty() {
            return Vec::new();
        }
        let count = |kinds: &[String]| {
            kinds.iter().fold(BTreeMap::new(), |mut counts: BTreeMap<String, usize>, kind| {
                *counts.entry(kind.clone()).or_default() += 1;
                counts
            })
        };
        let present = count(present);
        let lacks = |(kind, needed): (String, usize)| {
            let found = present.get(&kind).copied().unwrap_or(0);
            let text =
                format!("it uses {needed} of {kind:?}, and this host has {found}. Restore it on a host with such GPUs");
            (found < needed).then_some(text)
        };
        count(&self.gpus).into_iter().filter_map(lacks).collect()
    }
}

impl System {
    /// Its memory cannot return to a GPU under another version of the driver.
    fn missing_driver(&self, present: Option<&str>) -> Option<String> {
        match (self.driver.as_deref(), present) {
            (Some(saved), Some(present)) if saved != present => Some(format!(
                "it was saved with NVIDIA driver {saved}, and this host has {present}. Load the driver {saved}"
            )),
            (Some(saved), None) => {
                Some(format!("it was saved with NVIDIA driver {saved}, which is not loaded. Load it"))
            }
            _ => None,
        }
    }
}

/// Returns a reason if restored processes could have no control group.
pub fn missing_control_groups() -> Option<String> {
    let remedy = "Boot the kernel with systemd.unified_cgroup_hierarchy=1";
    scope::mount().err().map(|e| format!("{e}. {remedy}"))
}

/// Lists the threads whose IDs are not free, each group with the remedy. A process that has ended keeps its ID until
/// its parent reaps it, and the process may be the program that was just saved. Such parents are waited for.
pub fn taken(threads: &[i32], patience: Duration) -> Vec<String> {
    let any_ended = || threads.iter().any(|id| process::has_ended(*id));
    let _ = scope::wait_until(Instant::now() + patience, || Ok(!any_ended())); // looked at below
    let exists = |id: &i32| Path::new(&format!("/proc/{id}")).exists();
    let (ended, others): (Vec<i32>, Vec<i32>) =
        threads.iter().copied().filter(exists).partition(|id| process::has_ended(*id));
    let named = |ids: &[i32]| {
        let (first, rest) = (*ids.first()?, ids.len() - 1);
        Some((first, if rest > 0 { format!(" and {rest} more of its IDs") } else { String::new() }))
    };
    let other = named(&others).map(|(first, more)| {
        format!("another process has its process ID {first}{more}. Restore it when that process has ended")
    });
    let ended = named(&ended).map(|(first, more)| {
        let parent = process::parent(first).map_or_else(|| "its parent".to_owned(), process::describe);
        format!(
            "its process ID {first}{more} is not free, because {parent} has not reaped the ended process. End {parent}, \
             or try again later"
        )
    });
    other.into_iter().chain(ended).collect()
}

/// Returns the name of a user.
pub fn user_name(uid: u32) -> Option<String> {
    // SAFETY: the result is read before any other call that could change it, and this process has one thread.
    let user = unsafe { libc::getpwuid(uid).as_ref() }?;
    // SAFETY: `pw_name` is a string.
    Some(unsafe { CStr::from_ptr(user.pw_name) }.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    use std::{
        process::{Child, Command},
        thread,
    };

    fn system() -> System {
        let instructions = ["avx2", "avx512f"].map(str::to_owned).into();
        System { driver: Some("580.1".into()), kernel: "6.12.48-amd64".into(), instructions }
    }

    fn needs() -> Needs {
        Needs { user: "alice".into(), system: system(), gpus: vec!["H100".into(), "H100".into()], files: Vec::new() }
    }

    #[test]
    fn a_host_like_the_old_one_lacks_nothing() {
        let gpus = ["H100", "H100", "T4"].map(str::to_owned);
        assert_eq!(needs().missing(&system(), &gpus, Some("alice")), [""; 0]);
        let newer = System { kernel: "7.0.1".into(), ..system() };
        assert_eq!(needs().missing(&newer, &gpus, None), [""; 0], "a newer kernel, and no such user: told elsewhere");
        let simulated = Needs { system: System { driver: None, ..system() }, ..needs() };
        assert_eq!(simulated.missing(&System { driver: None, ..system() }, &gpus, None), [""; 0]);
    }

    #[test]
    fn everything_that_a_host_lacks_is_named_at_once() {
        let host =
            System { driver: Some("590.2".into()), kernel: "6.1.0-9".into(), instructions: ["avx2".into()].into() };
        let missing = needs().missing(&host, &["H100".into()], Some("bob"));
        let expected = [
            "uses 2 of \"H100\", and this host has 1",
            "with NVIDIA driver 580.1, and this host has 590.2. Load the driver 580.1",
            "with kernel 6.12.48-amd64, and this host has the older 6.1.0-9",
            "this processor lacks avx512f",
            "its user \"alice\" has the number of another user here, \"bob\"",
        ];
        assert_eq!(missing.len(), expected.len(), "{missing:#?}");
        for (missing, expected) in missing.iter().zip(expected) {
            assert!(missing.contains(expected), "{missing}, not {expected}");
        }
        assert_eq!(needs().missing(&system(), &[], None), [""; 0], "the GPUs are not known yet");
        let unloaded = System { driver: None, ..system() };
        let missing = needs().missing(&unloaded, &["H100".into(), "H100".into()], None);
        assert!(missing.len() == 1 && missing[0].contains("which is not loaded. Load it"), "{missing:?}");
    }

    #[test]
    fn only_flags_of_instructions_count() {
        let text = "processor\t: 0\nflags\t\t: fpu sse2 avx512f vmx md_clear\n\nprocessor\t: 1\nflags\t\t: none\n";
        assert_eq!(instructions(text), ["avx512f", "sse2"].map(str::to_owned).into());
        assert_eq!(instructions("Features\t: fp asimd sve\n"), ["asimd", "fp", "sve"].map(str::to_owned).into());
        assert!(release("6.12.48-amd64") > release("6.9.1"));
    }

    #[test]
    fn process_ids_that_are_taken_are_named() {
        let own = std::process::id() as i32;
        assert_eq!(taken(&[i32::MAX], REAPED), [""; 0]);
        let both = taken(&[i32::MAX, own, 1], REAPED);
        assert!(both.len() == 1 && both[0].contains(&format!("process ID {own} and 1 more")), "{both:?}");
    }

    /// Starts a process that ends, and is not reaped.
    fn ended() -> Child {
        let child = Command::new("true").spawn().expect("a process");
        let id = WaitId::Pid(Pid::from_raw(child.id() as i32).expect("a process ID"));
        waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).expect("it ends");
        child
    }

    #[test]
    fn the_parent_of_an_ended_process_that_has_its_id_is_named() {
        let mut child = ended();
        let lacks = taken(&[child.id() as i32, 1], Duration::ZERO);
        let expected = format!("process ID {} is not free, because process {} (", child.id(), std::process::id());
        assert!(lacks.len() == 2 && lacks[1].starts_with(&format!("its {expected}")), "{lacks:?}");
        child.wait().expect("it has ended");
    }

    #[test]
    fn an_ended_process_may_be_reaped_late() {
        let mut child = ended();
        let id = child.id() as i32;
        let parent = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            child.wait().expect("it has ended");
        });
        assert_eq!(taken(&[id], Duration::from_secs(60)), [""; 0]);
        parent.join().expect("it has ended");
    }
}
