//! What `libnvshare.so` costs the programs that it is preloaded into: loading it, beside a library that is empty, and a
//! launch through its open gate, beside the launch alone. The driver here does nothing, so that only the library is seen.
//!
//! `cargo bench --bench guest [-- --json FILE]`; `make bench` builds the library first.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use bench_support::results::{Figure, Results};

/// Launches that are timed. (Their instructions are not counted here: stepping slows the program down so much that the
/// library takes its work for slow.)
const TIMED: &str = "20000000";
/// Each is run so many times, in turns; the fastest counts, as what is slower was disturbed.
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
    results.add(Figure { name: "load-instructions", value: (with - without) as f64, unit: "instructions", note });

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
    let note = "cuLaunchKernel of a driver that does nothing, one thread, marks included".to_owned();
    results.add(Figure { name: "gate-ns", value: ns[1] - ns[0], unit: "ns", note });
    results.write();
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
        cc(&shared, &directory.join("libcuda.so.1"), &project.join("tests/guest/driver.c"), &[]);
        cc(&["-O2", "-o"], &scene.launches, &project.join("bench/launches.c"), &["-ldl"]);
        scene
    }

    fn launch(&self, preloaded: bool, count: &str) -> Command {
        let mut command = Command::new(&self.launches);
        command.arg(count).env_clear().env("LD_LIBRARY_PATH", &self.directory);
        // A socket that is not there: the gate is the same, and always open.
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
