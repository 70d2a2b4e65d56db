//! The cost of preloading `libnvshare.so`, in instructions and in time. Loading the library is
//! compared with loading an empty library. A launch through the library's open gate is compared
//! with a direct launch. The driver is a stub, so only the library's cost is measured.
//!
//! `cargo bench --bench guest [-- --json FILE]` runs the benchmark. `make figures-cpu PARTS=guest`
//! builds the library first.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use bench_support::results::{Figure, Results};

/// Number of timed launches.
const TIMED: &str = "20000000";
/// Number of launches before counting starts. By then the library knows that launches are short,
/// and records few marks.
const WARM_UP: &str = "1000000";
/// Number of launches, memsets and launches to the default stream whose instructions are counted.
/// This number is a multiple of the number of launches between two marks.
const COUNTED: usize = 256;
/// Number of alternating runs of each variant. The fastest run counts, because slower runs were
/// disturbed.
const RUNS: usize = 5;

struct Scene {
    directory: PathBuf,
    library: PathBuf,
    empty: PathBuf,
    launches: PathBuf,
}

fn main() {
    let mut results = Results::from_arguments();
    let scene = Scene::new();

    let load = |preloaded: Option<&Path>| {
        let mut command = Command::new("/bin/true");
        command.env_clear();
        if let Some(library) = preloaded {
            command.env("LD_PRELOAD", library);
        }
        test_support::steps::instructions(&mut command).expect("instructions can be counted")
    };
    let (without, empty, with) = (load(None), load(Some(&scene.empty)), load(Some(&scene.library)));
    println!("/bin/true executes {without} instructions");
    println!("  {:>7} more with an empty library (the limit)", empty - without);
    println!("  {:>7} more with libnvshare.so", with - without);
    let note = format!("/bin/true: {without} without, {} more with an empty library", empty - without);
    results.add(Figure { name: "load-cost-true-instructions", value: (with - without) as f64, unit: "count", note });

    let [native, gated] = [false, true].map(|preloaded| scene.counted(preloaded));
    println!(
        "a launch in a driver that does nothing executes {:.1} instructions, its caller's included",
        native.launch
    );
    println!("  {:>7.1} through the open gate, of which {:.1} are marks", gated.launch, gated.marks);
    println!("  {:>7.1} through the open gate to the default stream", gated.to_default);
    println!("  {:>7} more for a memset of four arguments, without marks", gated.memset - native.memset);
    let note = format!(
        "mean of {COUNTED} launches: {:.1} without the library; {:.1} of the others are marks; {:.1} to the default stream; the caller and a driver that does nothing included",
        native.launch, gated.marks, gated.to_default
    );
    results.add(Figure { name: "launch-path-instructions", value: gated.launch, unit: "count", note });
    let note = "more than natively: cuMemsetD32Async of a driver that does nothing, four arguments, no mark".to_owned();
    let gate = (gated.memset - native.memset) as f64;
    results.add(Figure { name: "gate-open-instructions", value: gate, unit: "count", note });

    let mut ns = [f64::MAX; 2];
    for _ in 0..RUNS {
        for (best, preloaded) in ns.iter_mut().zip([false, true]) {
            let output = scene.launch(preloaded, TIMED).output().expect("it runs");
            assert!(output.status.success(), "{output:?}");
            let text = String::from_utf8_lossy(&output.stdout);
            *best = best.min(text.trim().parse::<f64>().expect("a number"));
        }
    }
    println!("a launch in a driver that does nothing takes {:.2} ns", ns[0]);
    println!("  {:.2} ns more through the open gate, marks included", ns[1] - ns[0]);
    let note = format!(
        "cuLaunchKernel of a driver that does nothing, one thread, marks included; {:.2} ns without the library; best of {RUNS}, {}",
        ns[0],
        bench_support::results::load()
    );
    results.add(Figure { name: "gate-open-ns", value: ns[1] - ns[0], unit: "ns", note });
    results.write();
}

/// Instructions per call, including the caller's instructions.
struct Counted {
    /// Mean number of instructions of a launch.
    launch: f64,
    /// The part of `launch` that records marks.
    marks: f64,
    /// Number of instructions of a memset that records no mark.
    memset: u64,
    /// Mean number of instructions of a launch to the default stream.
    to_default: f64,
}

impl Scene {
    fn new() -> Self {
        let exe = std::env::current_exe().expect("the path of this program");
        let library = exe.parent().and_then(Path::parent).expect("target/release/deps").join("libnvshare.so");
        assert!(library.exists(), "{} is missing: make build", library.display());
        let directory = std::env::temp_dir().join(format!("nvshare-bench-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let project = Path::new(env!("CARGO_MANIFEST_DIR"));
        let scene = Self {
            empty: directory.join("libempty.so"),
            launches: directory.join("launches"),
            library,
            directory: directory.clone(),
        };
        std::fs::write(directory.join("empty.c"), "").expect("a file");
        let shared = ["-shared", "-fPIC", "-O2", "-o"];
        let cc = |arguments: &[&str], to: &Path, from: &Path, last: &[&str]| {
            let status = Command::new("cc").args(arguments).arg(to).arg(from).args(last).status().expect("cc runs");
            assert!(status.success(), "cc {}", from.display());
        };
        cc(&shared, &scene.empty, &directory.join("empty.c"), &["-nostdlib"]);
        // `-Bsymbolic` is needed because a memset calls another function of the stub, which must
        // not resolve to a hook.
        let own = ["-Wl,-Bsymbolic"];
        cc(&shared, &directory.join("libcuda.so.1"), &project.join("tests/guest/driver.c"), &own);
        cc(&["-O2", "-o"], &scene.launches, &project.join("bench/launches.c"), &["-ldl"]);
        scene
    }

    fn counted(&self, preloaded: bool) -> Counted {
        let mut command = self.launch(preloaded, WARM_UP);
        command.arg(COUNTED.to_string()).env("LD_BIND_NOW", "1");
        let counts = test_support::steps::between_signals(&mut command).expect("instructions can be counted");
        // The cost of a call: the instructions between two signals with the call between them,
        // minus the instructions without it.
        let of = |rounds: std::ops::Range<usize>| {
            let own = |round: usize| counts[3 * round + 1] - counts[3 * round];
            let mut each: Vec<u64> = rounds.map(own).collect();
            let mean = each.iter().sum::<u64>() as f64 / each.len() as f64;
            each.sort();
            (mean, each[each.len() / 2])
        };
        let [(launch, most), (_, memset), (to_default, _)] = [0, 1, 2].map(|n| of(n * COUNTED..(n + 1) * COUNTED));
        Counted { launch, marks: launch - most as f64, memset, to_default }
    }

    fn launch(&self, preloaded: bool, count: &str) -> Command {
        let mut command = Command::new(&self.launches);
        command.arg(count).env_clear().env("LD_LIBRARY_PATH", &self.directory);
        // No scheduler listens on this socket, so the gate stays open. A launch passes the same
        // gate as with a scheduler.
        command.env("NVSHARE_SOCKET", self.directory.join("none"));
        if preloaded {
            command.env("LD_PRELOAD", &self.library);
        }
        command
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
