//! The speed of restoring memory from a swap file, compared with `fio` on the same disk in the same
//! run. The GPU is simulated without artificial delays, so only the disk and the library are
//! measured.
//!
//! `cargo bench --bench swap-file -- [--directory DIR] [--mem 2G] [--rounds 5] [--programs DIR]
//! [--json FILE]`
//!
//! One program has `--mem` of memory. Another program causes the eviction of all of this memory.
//! The memory goes into the swap file, because no host memory is allowed. When the other program
//! has ended, the memory is restored, and the program checks it. Between these rounds, `fio` reads
//! a file of the same size and in the library's block size. `fio` uses io_uring or threads, at
//! depths of 1 to 16. The best result of `fio` is the disk's speed. `--directory` is the directory
//! of all files and must be on a disk (default: the directory of this benchmark). `--programs` is
//! the directory of release builds of nvshare-scheduler, libnvshare.so, cuda-program and the
//! simulated driver (default: the directory of this benchmark).

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use bench_support::results::{Figure, Results, load};
use bench_support::stage::{Stage, bytes, kill, option};
use serde_json::Value;

const GIB: f64 = (1u64 << 30) as f64;
/// Memory of the GPU beyond the memory of one program.
const BESIDE: u64 = 128 << 20;
/// The library's block size, from `preload/src/memory/file/worker.rs`.
const BLOCK: &str = "8M";
const DEPTHS: [u32; 5] = [1, 2, 4, 8, 16];
/// The engines of fio: io_uring and threads.
const ENGINES: [&str; 2] = ["io_uring", "psync"];

fn main() {
    let mut results = Results::from_arguments();
    let stage = Stage::from_arguments();
    let (memory, rounds) = (bytes(&option("--mem", "2G")), option("--rounds", "5").parse().expect("a number"));
    let directory = match option("--directory", "").as_str() {
        "" => stage.programs().join("swap-file-bench"),
        directory => directory.into(),
    };
    fs::create_dir_all(&directory).expect("the directory");
    // The simulated GPU keeps its pages, because allocating the pages again would take as long as
    // reading the file.
    stage.simulate(memory + BESIDE, &[("CUDA_SIM_KEEP_MEMORY", "1".into())]);

    let mut best: Option<(f64, &str, u32)> = None;
    for (engine, depth) in ENGINES.into_iter().flat_map(|engine| DEPTHS.map(|depth| (engine, depth))) {
        let Some(speed) = read_by_fio(&directory, engine, depth, memory) else { continue };
        println!("fio, {engine}, {BLOCK}, {depth:>2} at once: {speed:.2} GiB/s");
        if best.is_none_or(|(most, ..)| speed > most) {
            best = Some((speed, engine, depth));
        }
    }
    let Some((_, engine, depth)) = best else {
        println!("no fio that can read here: nothing is measured");
        return;
    };

    let configuration = format!(
        "anti-thrash = \"on\"\n[memory]\nreserve = \"8M\"\ncontext = \"4M\"\n[swap]\nmax = \"0%\"\nahead = \"0%\"\nfile = {directory:?}\nfile-max = \"none\"\n"
    );
    let scheduler = stage.scheduler(&configuration, Path::new("/dev/null"));
    let mut idle = Told::start(&stage, memory);
    let (mut disk, mut out, mut back) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let begin = Instant::now();
        let other = Told::start(&stage, memory);
        out.push(memory as f64 / GIB / begin.elapsed().as_secs_f64());
        other.end();
        back.push(memory as f64 / GIB / idle.work());
        disk.push(read_by_fio(&directory, engine, depth, memory).expect("fio reads"));
        println!("came back at {:.2} GiB/s, fio {:.2} GiB/s", back.last().unwrap(), disk.last().unwrap());
    }
    idle.end();
    kill(scheduler);
    let _ = fs::remove_file(directory.join("fio"));
    let (disk, back) = (median(disk), median(back));
    let ratio = back / disk;
    println!("memory comes back at {back:.2} GiB/s, {:.0} % of what fio reads", ratio * 100.0);
    let note = format!(
        "{:.1} GiB on a simulated GPU, medians of {rounds} rounds: {back:.2} GiB/s from the file until the program runs; fio {disk:.2} GiB/s ({engine}, {depth} at once of {BLOCK}); {}",
        memory as f64 / GIB,
        load()
    );
    results.add(Figure { name: "swap-file-return-over-disk", value: ratio, unit: "ratio", note });
    results.write();
}

/// Returns the read rate of fio in GiB/s, or `None` if fio fails.
fn read_by_fio(directory: &Path, engine: &str, depth: u32, bytes: u64) -> Option<f64> {
    let mut command = Command::new("fio");
    // fio uses buffers of huge pages, like the library. The kernel reads other buffers with more
    // and smaller requests.
    command.env("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
    command.args(["--name=swap", "--rw=read", "--direct=1", "--output-format=json", "--thread"]);
    command.arg(format!("--filename={}", directory.join("fio").display()));
    command.arg(format!("--bs={BLOCK}")).arg(format!("--size={bytes}")).arg(format!("--ioengine={engine}"));
    match engine {
        // Each thread reads a separate part of the file.
        "psync" => {
            let part = bytes / u64::from(depth);
            command.arg(format!("--numjobs={depth}")).arg(format!("--size={part}"));
            command.arg(format!("--offset_increment={part}")).arg("--group_reporting")
        }
        _ => command.arg(format!("--iodepth={depth}")),
    };
    let output = command.output().ok().filter(|output| output.status.success())?;
    let said: Value = serde_json::from_slice(&output.stdout).ok()?;
    Some(said["jobs"][0]["read"]["bw_bytes"].as_f64().filter(|speed| *speed > 0.0)? / GIB)
}

/// A program that does a round of work on request.
struct Told {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Told {
    /// Starts a program, and waits until it has used all of its memory.
    fn start(stage: &Stage, memory: u64) -> Self {
        let mut command = stage.shared(&["told", "--mem", &memory.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
        let (to, from) = (child.stdin.take().expect("its stdin"), child.stdout.take().expect("its stdout"));
        let mut told = Self { child, to, from: BufReader::new(from) };
        assert_eq!(told.hear(), "ready");
        told
    }

    /// Makes the program work, and returns the seconds until its memory was restored.
    fn work(&mut self) -> f64 {
        writeln!(self.to).expect("it runs");
        self.hear().parse().expect("seconds")
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).expect("it says something");
        assert!(!line.is_empty(), "a program has ended: {:?}", self.child.wait());
        line.trim().to_owned()
    }

    fn end(self) {
        let Self { mut child, to, from: _from } = self;
        drop(to);
        let begin = Instant::now();
        assert!(child.wait().expect("a child").success(), "a program failed");
        assert!(begin.elapsed() < Duration::from_secs(60), "it took long to end");
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
