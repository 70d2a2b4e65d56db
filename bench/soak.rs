//! Checks for leaks in the scheduler and in a client, over 100,000 hand-overs. The clients need
//! more memory than the GPU has, so memory moves at each hand-over. Other clients connect and
//! disconnect. At intervals the clients pause. The benchmark then records resident memory, address
//! space, mappings and open descriptors of the scheduler and of one client. The figure is the
//! larger of two slopes, in KiB per 1,000 hand-overs: the slope of the scheduler's resident memory
//! and the slope of the client's.
//!
//! `cargo bench --bench soak [-- --handovers 100000] [--library 20000] [--samples 100] [--programs
//! DIR] [--json FILE]`
//!
//! The run has two parts. The first `--library` hand-overs are between programs under libnvshare.so
//! on the simulated GPU and take 5 to 10 ms each. These programs are this benchmark itself, run
//! with `--client`. They make driver calls and allocate nothing, so any growth is nvshare's. The
//! other hand-overs are between clients that speak the protocol but have no GPU memory. These
//! hand-overs take less than 1 ms each and test the scheduler alone. `--programs` is the directory
//! of release builds of nvshare-scheduler, libnvshare.so and the simulated libcuda.so (default: the
//! directory of this benchmark).

use std::{
    ffi::{c_char, c_void},
    fmt, fs,
    io::{BufRead, BufReader, Write},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    ptr,
    time::{Duration, Instant},
};

use bench_support::results::{Figure, Results};
use bench_support::stage::{Stage, metric, option};
use nvshare_wire::{ClientMessage, SchedulerMessage, client::ReleaseReason};
use test_support::daemon::{self, Client, GIB, PATIENCE};

/// Memory of the simulated GPU, of each program, and of each context, in MiB. Two programs need
/// more memory than the GPU has.
const TOTAL: usize = 10;
const PROGRAM: usize = 4;
const CONTEXT: usize = 1;
/// Memory of a protocol client in bytes. The clients' GPU has 16 GiB.
const MEMORY: u64 = 9 * GIB;
/// The pause between two rounds of a program. The pause is long enough for the library to release
/// the lock. While another program waits, the library releases the lock after 1 ms to 2 ms without
/// work.
const PAUSE: Duration = Duration::from_millis(2);
/// Number of rounds of a short-lived program. Each interval has one such program.
const VISIT: usize = 10;
/// Number of short-lived protocol clients in each interval.
const VISITORS: usize = 5;
/// Delay before each observation, during which the scheduler and the clients complete deferred
/// work.
const SETTLE: Duration = Duration::from_millis(300);
/// The fraction of the observations that the fit excludes. The scheduler's heap grows by about 300
/// KiB before it stays constant.
const WARM_UP: f64 = 0.5;

fn main() {
    if std::env::args().any(|a| a == "--client") {
        return client();
    }
    let mut results = Results::from_arguments();
    let hand_overs: f64 = option("--handovers", "100000").parse().expect("a number of hand-overs");
    let library = option("--library", "20000").parse::<f64>().expect("a number of hand-overs").min(hand_overs);
    let samples: f64 = option("--samples", "100").parse().expect("a number of samples");
    let stage = Stage::from_arguments();
    stage.simulate((TOTAL << 20) as u64, &[("CUDA_SIM_CONTEXT", format!("{CONTEXT}M"))]);
    let metrics = stage.file("metrics.sock");
    let configuration = format!(
        "anti-thrash = \"on\"\nlog-level = \"warn\"\n[memory]\nreserve = \"1M\"\ncontext = \"{CONTEXT}M\"\n[metrics]\nlisten = {metrics:?}\n"
    );
    let scheduler = Running(stage.scheduler(&configuration, Path::new("/dev/null")));
    let mut programs = [(); 2].map(|()| Program::start(&stage));
    let mut log = Log {
        metrics,
        scheduler: scheduler.0.id(),
        client: programs[0].child.id(),
        begin: Instant::now(),
        every: samples / 10.0,
    };
    log.heading();

    // A round of one program is usually one hand-over.
    let interval = library / (samples / 2.0);
    let mut rounds = interval / 2.0;
    let (mut by_library, mut visitors) = (Vec::new(), 0);
    while by_library.last().is_none_or(|last: &Observation| last.hand_overs < library) {
        let before = log.hand_overs();
        programs.iter_mut().for_each(|program| program.begin(rounds.ceil() as usize));
        let mut visitor = Program::start(&stage);
        visitor.begin(VISIT);
        visitor.finish();
        visitor.end();
        visitors += 1;
        programs.iter_mut().for_each(Program::finish);
        // This round restores all memory of the observed program to the GPU before the observation.
        programs[0].begin(1);
        programs[0].finish();
        let seen = log.observe(by_library.len());
        rounds *= (interval / (seen.hand_overs - before).max(1.0)).clamp(0.2, 5.0);
        by_library.push(seen);
    }
    let moved = log.counter("nvshare_gpu_swapped_in_bytes_total") / GIB as f64;
    let mut clients: Vec<ProtocolClient> = (0..2).map(|_| ProtocolClient::connect(&stage.socket())).collect();
    until_granted(&mut clients);
    let mut by_protocol = Vec::new();
    let interval = (hand_overs - library) / (samples / 2.0);
    while log.hand_overs() < hand_overs {
        for _ in 0..VISITORS {
            clients.push(ProtocolClient::connect(&stage.socket()));
            hear_until(&mut clients, |clients| clients.iter().all(|client| client.attached));
            while !clients.last().is_some_and(|visitor| visitor.granted) {
                hand_over(&mut clients);
            }
            // The client disconnects while it holds the lock.
            clients.pop();
            until_granted(&mut clients);
            visitors += 1;
        }
        for _ in 0..interval as usize {
            hand_over(&mut clients);
        }
        by_protocol.push(log.observe(by_protocol.len()));
    }
    let seconds = log.begin.elapsed().as_secs_f64();
    let done = log.hand_overs();
    drop((programs, clients, scheduler));

    println!(
        "{done} hand-overs in {seconds:.0} s; {visitors} clients came and went; programs moved {moved:.1} GiB to the GPU"
    );
    println!("growth per 1,000 hand-overs, in the second half of each part:");
    println!("{:>22}  {:>20}  {:>20}  {:>20}", "", "scheduler, library", "scheduler, protocol", "client");
    let mut resident = [0.0; 3];
    type Column = fn(&Sample) -> u64;
    let columns: [(&str, Column); 4] = [
        ("address space, KiB", |s| s.address_space),
        ("mappings", |s| s.mappings),
        ("open descriptors", |s| s.descriptors),
        ("resident memory, KiB", |s| s.resident),
    ];
    for (what, of) in columns {
        resident = [
            slope(&by_library, |o| of(&o.scheduler)),
            slope(&by_protocol, |o| of(&o.scheduler)),
            slope(&by_library, |o| of(&o.client)),
        ];
        println!("{what:>22}  {:>20.3}  {:>20.3}  {:>20.3}", resident[0], resident[1], resident[2]);
    }
    let [first, second, client] = resident;
    let note = format!(
        "slope of resident memory in the second half of each part: scheduler {first:.3} over {library} hand-overs between programs on the simulated GPU and {second:.3} over {} more between protocol clients, a program {client:.3} over the former; {visitors} clients came and went",
        done - library
    );
    results.add(Figure {
        name: "soak-growth",
        value: first.max(second).max(client),
        unit: "KiB/1000 hand-overs",
        note,
    });
    results.write();
}

/// The samples that were taken after a number of hand-overs.
#[derive(Debug, Clone, Copy)]
struct Observation {
    hand_overs: f64,
    scheduler: Sample,
    client: Sample,
}

struct Log {
    metrics: PathBuf,
    scheduler: u32,
    client: u32,
    begin: Instant,
    /// `observe` prints one in `every / 2` observations.
    every: f64,
}

impl Log {
    fn heading(&self) {
        let columns = format!("{:>8} {:>13} {:>5} {:>4}", "RSS KiB", "address KiB", "maps", "fds");
        println!("{:>10} {:>7}  {:>33}  {:>33}", "", "", "scheduler", "client");
        println!("{:>10} {:>7}  {columns}  {columns}", "hand-overs", "seconds");
    }

    fn observe(&mut self, number: usize) -> Observation {
        std::thread::sleep(SETTLE);
        let hand_overs = self.hand_overs();
        let [scheduler, client] = [self.scheduler, self.client].map(Sample::of);
        if number.is_multiple_of((self.every / 2.0).max(1.0) as usize) {
            let seconds = self.begin.elapsed().as_secs_f64();
            println!("{hand_overs:>10} {seconds:>7.0}  {scheduler}  {client}");
        }
        Observation { hand_overs, scheduler, client }
    }

    fn hand_overs(&self) -> f64 {
        self.counter("nvshare_gpu_hand_overs_total")
    }

    /// Returns a counter of the scheduler's metrics, summed over GPUs.
    fn counter(&self, name: &str) -> f64 {
        metric(&self.metrics, name)
    }
}

/// Returns the slope by the Theil–Sen estimator, which is robust against outliers. The estimate is
/// the median of the slopes between all pairs of points.
fn slope(observations: &[Observation], of: impl Fn(&Observation) -> u64) -> f64 {
    let warm = &observations[(observations.len() as f64 * WARM_UP) as usize..];
    let points: Vec<(f64, f64)> = warm.iter().map(|o| (o.hand_overs / 1e3, of(o) as f64)).collect();
    let pairs = points.iter().enumerate().flat_map(|(i, a)| points[i + 1..].iter().map(move |b| (a, b)));
    let mut slopes: Vec<f64> = pairs.filter(|(a, b)| b.0 > a.0).map(|(a, b)| (b.1 - a.1) / (b.0 - a.0)).collect();
    slopes.sort_by(f64::total_cmp);
    slopes.get(slopes.len() / 2).copied().unwrap_or_default()
}

/// The resources of a process. Memory is in KiB.
#[derive(Debug, Clone, Copy)]
struct Sample {
    resident: u64,
    address_space: u64,
    mappings: u64,
    descriptors: u64,
}

impl Sample {
    fn of(pid: u32) -> Self {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).expect("the process runs");
        let status = read("status");
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("the kernel says it");
            line.trim_matches([' ', '\t', ':', 'k', 'B']).parse().expect("a number of KiB")
        };
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process runs").count() as u64;
        let mappings = read("maps").lines().count() as u64;
        Self { resident: field("VmRSS"), address_space: field("VmSize"), mappings, descriptors }
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { resident, address_space, mappings, descriptors } = self;
        write!(f, "{resident:>8} {address_space:>13} {mappings:>5} {descriptors:>4}")
    }
}

/// A process that is killed when this value is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program under libnvshare.so that works for a given number of rounds on request.
struct Program {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Program {
    fn start(stage: &Stage) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
        command.arg("--client").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = stage.under_nvshare(&mut command).spawn().expect("it runs");
        let to = child.stdin.take().expect("its stdin");
        let mut program = Self { from: BufReader::new(child.stdout.take().expect("its stdout")), to, child };
        program.finish();
        program
    }

    fn begin(&mut self, rounds: usize) {
        writeln!(self.to, "{rounds}").expect("the program runs");
    }

    /// Waits until the rounds are done.
    fn finish(&mut self) {
        let mut line = String::new();
        let n = self.from.read_line(&mut line).expect("the program writes UTF-8");
        assert!(n > 0, "the program has ended: {:?}", self.child.wait());
    }

    /// Asks the program to exit, and waits until it has exited.
    fn end(mut self) {
        self.begin(0);
        assert!(self.child.wait().expect("a child").success(), "a program failed");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A protocol client without GPU memory. It reports memory, and obeys the scheduler immediately.
struct ProtocolClient {
    connection: Client,
    mapped: u64,
    allowance: u64,
    /// Sequence number of the newest allowance.
    ack: u32,
    attached: bool,
    granted: bool,
}

impl ProtocolClient {
    fn connect(socket: &Path) -> Self {
        let connection = Client::welcomed(socket);
        connection.send(daemon::attach(0, daemon::GPU));
        Self { connection, mapped: 0, allowance: 0, ack: 0, attached: false, granted: false }
    }

    fn release(&mut self) {
        self.granted = false;
        self.connection.send(ClientMessage::Release { gpus: 1, reason: ReleaseReason::Idle, busy_us: 100 });
    }

    /// Waits for a message, and obeys it.
    fn hear(&mut self) {
        let before = (self.ack, self.mapped);
        match self.connection.receive().expect("the scheduler runs") {
            SchedulerMessage::Attached { .. } => {
                self.attached = true;
                self.connection.report(MEMORY, 0);
                self.connection.request();
            }
            SchedulerMessage::Grant { .. } => self.granted = true,
            SchedulerMessage::Allowance { bytes, seq, .. } => (self.allowance, self.ack) = (bytes, seq),
            _ => return,
        }
        let most = self.allowance.min(MEMORY);
        self.mapped = if self.granted { most } else { self.mapped.min(most) };
        if (self.ack, self.mapped) != before {
            let mut report = daemon::memory(0, MEMORY, self.mapped);
            if let ClientMessage::Memory { ack, swapped, .. } = &mut report {
                (*ack, *swapped) = (self.ack, MEMORY - self.mapped);
            }
            self.connection.send(report);
        }
    }
}

/// Hands the lock from its holder to the next client.
fn hand_over(clients: &mut [ProtocolClient]) {
    let holder = clients.iter().position(|client| client.granted).expect("one has the lock");
    clients[holder].release();
    until_granted(clients);
    clients[holder].connection.request();
}

fn until_granted(clients: &mut [ProtocolClient]) {
    hear_until(clients, |clients| clients.iter().any(|client| client.granted));
}

/// Receives and obeys messages of all clients until `enough` returns true.
fn hear_until(clients: &mut [ProtocolClient], enough: impl Fn(&[ProtocolClient]) -> bool) {
    while !enough(clients) {
        let of = |client: &ProtocolClient| libc::pollfd {
            fd: client.connection.socket.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut sockets: Vec<libc::pollfd> = clients.iter().map(of).collect();
        let patience = PATIENCE.as_millis() as i32;
        // SAFETY: `sockets` has `sockets.len()` entries.
        let n = unsafe { libc::poll(sockets.as_mut_ptr(), sockets.len() as libc::nfds_t, patience) };
        assert!(n > 0, "the scheduler says nothing");
        for (client, _) in clients.iter_mut().zip(&sockets).filter(|(_, socket)| socket.revents != 0) {
            client.hear();
        }
    }
}

/// The client program: allocates memory and reports that. It then repeatedly reads a number of
/// rounds from standard input, runs these rounds on all of its memory, and reports that they are
/// done. The number 0 ends the program.
fn client() {
    // SAFETY: the calls have the types of the CUDA headers. All pointers refer to live values of
    // the right size.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").expect("a driver");
        macro_rules! call {
            ($name:literal, $($type:ty : $value:expr),*) => {{
                let symbol = driver.get::<unsafe extern "C" fn($($type),*) -> u32>(concat!($name, "\0").as_bytes());
                let code = symbol.expect($name)($($value),*);
                assert_eq!(code, 0, $name);
            }};
        }
        let (mut device, mut context, mut module, mut mix) = (0, 0usize, 0usize, 0usize);
        let (mut at, mut count, mut seed) = (0u64, (PROGRAM << 20) as u64 / 4, std::process::id());
        call!("cuInit", u32: 0);
        call!("cuDeviceGet", *mut i32: &mut device, i32: 0);
        call!("cuDevicePrimaryCtxRetain", *mut usize: &mut context, i32: device);
        call!("cuCtxSetCurrent", usize: context);
        let image = concat!(include_str!("../tests/programs/src/kernels.ptx"), "\0");
        call!("cuModuleLoadData", *mut usize: &mut module, *const c_char: image.as_ptr().cast());
        call!("cuModuleGetFunction", *mut usize: &mut mix, usize: module, *const c_char: c"mix_u32".as_ptr());
        call!("cuMemAlloc_v2", *mut u64: &mut at, usize: PROGRAM << 20);
        println!("ready");
        let mut line = String::with_capacity(64);
        loop {
            line.clear();
            let n = std::io::stdin().read_line(&mut line).expect("UTF-8");
            let rounds: usize = if n == 0 { 0 } else { line.trim().parse().expect("a number of rounds") };
            for _ in 0..rounds {
                seed = seed.wrapping_mul(0x9e37_79b9).wrapping_add(1);
                let mut arguments: [*mut c_void; 3] =
                    [(&raw mut at).cast(), (&raw mut count).cast(), (&raw mut seed).cast()];
                call!("cuLaunchKernel", usize: mix, u32: 64, u32: 1, u32: 1, u32: 256, u32: 1, u32: 1, u32: 0, usize: 0,
                    *mut *mut c_void: arguments.as_mut_ptr(), *mut *mut c_void: ptr::null_mut());
                call!("cuCtxSynchronize",);
                std::thread::sleep(PAUSE);
            }
            if rounds == 0 {
                return;
            }
            println!("done");
        }
    }
}
