//! Jobs of several processes on a simulated machine. The processes communicate with a stand-in for NCCL
//! (`nccl` in this crate). Each rank has its own GPU, and its work waits on the GPU for the other ranks.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::machine::{Machine, Program};

/// The ranks of each job: one on each GPU.
pub const RANKS: usize = 2;

/// How the processes of a job find NCCL, and what they do.
#[derive(Debug, Clone, Copy)]
pub struct Job {
    /// Further options of the C compiler.
    pub options: &'static [&'static str],
    /// How NCCL's functions are found, as in `rank.c`.
    pub find: &'static str,
    /// The function that creates the communicator, as in `rank.c`.
    pub init: &'static str,
    /// The value of `NVSHARE_GANG`, if it is set.
    pub gang: Option<&'static str>,
    /// MiB of GPU memory of each rank.
    pub mib: u32,
    pub rounds: u32,
}

/// The compiler's options for a program that is linked to NCCL.
pub const LINKED: &[&str] = &["-DLINKED", "-l:libnccl.so.2"];

impl Default for Job {
    fn default() -> Self {
        Self { options: LINKED, find: "link", init: "plain", gang: None, mib: 32, rounds: 30 }
    }
}

impl Job {
    /// Starts the ranks in this order. `name` distinguishes the machine's jobs.
    pub fn start(&self, machine: &Machine, name: &str, order: [usize; RANKS]) -> Vec<Program> {
        let rank = compile(machine, "rank.c", name, self.options);
        let id = machine.path(&format!("{name}.id")).display().to_string();
        let (mib, rounds, meet) = (self.mib.to_string(), self.rounds.to_string(), meet(machine));
        let launch = |number: usize| {
            let (number, ranks) = (number.to_string(), RANKS.to_string());
            let launch = machine.command(&rank, &[self.find, self.init, &number, &ranks, &id, &mib, &rounds]);
            let launch = launch.env("NCCL_MEET", &meet);
            self.gang.into_iter().fold(launch, |launch, gang| launch.env("NVSHARE_GANG", gang)).start()
        };
        order.map(launch).into()
    }
}

/// The directory in which the stand-in's ranks meet: the value of `NCCL_MEET`.
pub fn meet(machine: &Machine) -> String {
    machine.path("lib").display().to_string()
}

/// Compiles a C program or library of this crate into the machine's directory of libraries.
pub fn compile(machine: &Machine, source: &str, output: &str, options: &[&str]) -> PathBuf {
    let (libraries, output) = (machine.path("lib"), machine.path("lib").join(output));
    let mut cc = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    cc.args(["-Wall", "-Werror", "-o"]).arg(&output);
    cc.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("nccl").join(source));
    cc.arg("-L").arg(&libraries).args(options).args(["-l:libcuda.so.1", "-Wl,--allow-shlib-undefined"]);
    assert!(cc.status().expect("a C compiler").success(), "{cc:?}");
    output
}

/// Compiles the stand-in for NCCL, as `libnccl.so.VERSION`.
pub fn compile_nccl(machine: &Machine, version: u32) {
    let name = format!("libnccl.so.{version}");
    let options = ["-shared", "-fPIC", &format!("-DVERSION={version}"), &format!("-Wl,-soname,{name}")];
    compile(machine, "nccl.c", &name, &options);
}
