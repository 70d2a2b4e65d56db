//! Runs a program with and without the library, and compares everything that a user sees. The
//! programs are the C files of this directory, which the test builds.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use test_support::artifact;
use test_support::machine::*;

/// A simulated machine that builds programs.
#[derive(Debug)]
pub struct Host(pub Machine);

/// How a program ended, and its output.
#[derive(Debug, PartialEq)]
pub struct Ended {
    /// The program's exit status, and the signal that killed it.
    pub status: (Option<i32>, Option<i32>),
    pub stdout: String,
    pub stderr: String,
}

/// The library under test.
pub fn library() -> PathBuf {
    artifact("libnvshare.so")
}

/// Runs a command that is part of the test itself.
pub fn output(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"))
}

impl Host {
    /// Starts a scheduler that lets a client run until its work is done.
    pub fn new() -> Self {
        Self(Machine::with_scheduler(Setup::default()))
    }

    pub fn without_scheduler() -> Self {
        Self(Machine::new(Setup::default()))
    }

    /// Starts a scheduler and a program that keeps the GPU until it is killed. So other programs
    /// wait for the lock.
    pub fn occupied() -> (Self, impl FnMut()) {
        let host = Self(Machine::with_scheduler(Setup { anti_thrash: "on", time_quantum: HOUR, ..Setup::default() }));
        // The kernel runs continuously, so the program is never idle.
        let mut holder = host.0.program("persistent --seconds 3600").start();
        host.0.wait_for_grants(&holder, 1);
        (host, move || holder.kill())
    }

    /// Builds the program of this C file.
    pub fn program(&self, name: &str) -> PathBuf {
        self.build(name, name, &[]).expect("a C compiler")
    }

    /// Builds the library of this C file.
    pub fn library(&self, name: &str) -> PathBuf {
        self.build(name, &format!("lib{name}.so"), &["-shared", "-fPIC"]).expect("a C compiler")
    }

    /// A directory with `driver.c` as the driver, for `LD_LIBRARY_PATH`.
    pub fn bare_driver(&self) -> String {
        let name = "bare/libcuda.so.1";
        let directory = self.0.path("bare");
        if !directory.exists() {
            std::fs::create_dir(&directory).expect("a directory");
            self.build("driver", name, &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]).expect("a C compiler");
        }
        directory.to_string_lossy().into_owned()
    }

    /// Returns `None` if the compiler cannot build it.
    pub fn build(&self, name: &str, output_name: &str, options: &[&str]) -> Option<PathBuf> {
        let (to, libraries) = (self.0.path(output_name), self.0.path("lib"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guest").join(name).with_extension("c");
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
        cc.args(["-O1", "-g", "-Wall", "-Wextra", "-pthread"]).args(options).arg("-o").arg(&to).arg(source);
        // `--as-needed` links the driver and NVML only to programs that use them. The rpath lets
        // these programs find both libraries even in an empty environment.
        cc.arg("-L").arg(&libraries).args([
            "-Wl,--as-needed",
            "-l:libcuda.so.1",
            "-l:libnvidia-ml.so.1",
            "-ldl",
            "-Wl,--enable-new-dtags",
        ]);
        cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
        let said = output(&mut cc);
        if !said.status.success() && !options.iter().any(|o| o.starts_with("-fsanitize")) {
            panic!("{cc:?}: {}", String::from_utf8_lossy(&said.stderr));
        }
        said.status.success().then_some(to)
    }

    pub fn case<'a>(&'a self, program: impl AsRef<Path>, arguments: &[&str]) -> Case<'a> {
        Case {
            host: self,
            program: program.as_ref().to_owned(),
            arguments: arguments.iter().map(|a| (*a).to_owned()).collect(),
            environment: Vec::new(),
            before: Vec::new(),
            nvshare: vec![library()],
            after: Vec::new(),
        }
    }

    /// Builds this program. Checks for each word that the program succeeds and behaves as without
    /// the library.
    #[track_caller]
    pub fn succeeds(&self, name: &str, words: &[&str]) {
        let program = self.program(name);
        words.iter().for_each(|word| drop(self.case(&program, &[word]).succeeds()));
    }

    /// The number of clients that the scheduler has seen.
    pub fn clients(&self) -> usize {
        self.0.moves().iter().filter(|m| m.what == "connect").count()
    }
}

/// A program and its environment.
#[derive(Debug)]
pub struct Case<'a> {
    host: &'a Host,
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    /// The libraries preloaded before nvshare's library, nvshare's library, and the libraries
    /// preloaded after it.
    before: Vec<PathBuf>,
    nvshare: Vec<PathBuf>,
    after: Vec<PathBuf>,
}

impl Case<'_> {
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    pub fn before(mut self, library: &Path) -> Self {
        self.before.push(library.into());
        self
    }

    pub fn after(mut self, library: &Path) -> Self {
        self.after.push(library.into());
        self
    }

    /// Preloads the library under other names, or several times.
    pub fn preloading(mut self, libraries: &[PathBuf]) -> Self {
        self.nvshare = libraries.to_vec();
        self
    }

    fn launch(&self, nvshare: bool) -> Program {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        let launch = self.host.0.command(&self.program, &arguments).quiet();
        let (launch, own) = if nvshare { (launch, &*self.nvshare) } else { (launch.without_nvshare(), &[][..]) };
        let list: Vec<_> =
            [&self.before, own, &self.after].into_iter().flatten().map(|p| p.to_string_lossy()).collect();
        let launch = if list.is_empty() { launch } else { launch.env("LD_PRELOAD", &list.join(":")) };
        self.environment.iter().fold(launch, |launch, (name, value)| launch.env(name, value)).start()
    }

    /// Starts the program with the library.
    pub fn start(&self) -> Program {
        self.launch(true)
    }

    #[track_caller]
    pub fn without(&self) -> Ended {
        end(&mut self.launch(false))
    }

    #[track_caller]
    pub fn with(&self) -> Ended {
        end(&mut self.launch(true))
    }

    /// Checks that the program ends in the same way and with the same output, with and without the
    /// library.
    #[track_caller]
    pub fn same(&self) -> Ended {
        let plain = self.without();
        assert_eq!(
            self.with(),
            plain,
            "{} {:?}: with the library, and without",
            self.program.display(),
            self.arguments
        );
        plain
    }

    /// Like [`same`](Self::same), but ignores the line about a missing scheduler.
    #[track_caller]
    pub fn same_but_for_the_line(&self) -> Ended {
        let (plain, mut guest) = (self.without(), self.with());
        let (line, rest) = guest.stderr.split_once('\n').unwrap_or_default();
        if line.starts_with("nvshare: no scheduler at ") {
            guest.stderr = rest.to_owned();
        }
        assert_eq!(guest, plain, "{} {:?}: with the library, and without", self.program.display(), self.arguments);
        plain
    }

    /// Uses the minimal driver, which leaves no traces in the process.
    pub fn on_bare_driver(self) -> Self {
        let directory = self.host.bare_driver();
        self.env("LD_LIBRARY_PATH", &directory)
    }

    /// Like [`same`](Self::same), and also checks that the program succeeds with an empty stderr.
    #[track_caller]
    pub fn succeeds(&self) -> Ended {
        let plain = self.same();
        assert_eq!((plain.status, &*plain.stderr), ((Some(0), None), ""), "without the library: {plain:?}");
        plain
    }
}

#[track_caller]
pub fn end(program: &mut Program) -> Ended {
    let status = program.wait();
    Ended { status: (status.code(), status.signal()), stdout: program.stdout(), stderr: program.stderr() }
}
