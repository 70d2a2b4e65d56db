//! The programs, one file each.

mod account;
mod across;
mod aliases;
mod binds;
mod bursts;
mod capture_allocs;
mod captures;
mod checkpoints;
mod churn;
mod contexts;
mod cross;
mod cycles;
mod deep;
mod endless;
mod escapes;
mod exchange;
mod forks;
mod frees;
mod graph;
mod green;
mod grow;
mod host_step;
mod host_waits;
mod info;
mod jax;
mod latency;
mod launches;
mod leaves;
mod link;
mod maps;
mod mix;
mod naps;
mod nulls;
mod open_captures;
mod oversub;
mod pair;
mod per_thread;
mod persistent;
mod pool_keeper;
mod pool_latency;
mod pool_rules;
mod pools;
mod provides;
mod proxy;
mod queued;
mod share;
mod starts;
mod story;
mod stranger;
mod streams;
mod told;
mod unseen;
mod waits;
mod weights;

use crate::{args::Args, report::Report};
use std::error::Error;

pub type Outcome = Result<(), Box<dyn Error>>;
type Program = fn(&Args, &mut Report) -> Outcome;

const PROGRAMS: &[(&str, Program, &str)] = &[
    (
        "mix",
        mix::run,
        "--mem 64M --chunks 4 --rounds 10|endless --gpu-ms 20 | --reps N --cpu-ms 0 --no-device 1 --lock 1 --kind alloc|vmm|managed|async: work, then verify",
    ),
    ("bursts", bursts::run, "--mem 16M --bursts 50 --pause-ms 20: short work after pauses, and how long it took"),
    ("graph", graph::run, "--mem 16M --replays 20 --cpu-ms 0: capture in global mode, replay, verify"),
    (
        "contexts",
        contexts::run,
        "--mem 16M --rounds 8 --pause-ms 50: retain and release the primary context, go on in another, verify",
    ),
    (
        "capture-allocs",
        capture_allocs::run,
        "--mem 40M --rounds 10 --how captured|named|reached --pause-ms 0: allocate while a stream is captured, use it at once, verify",
    ),
    (
        "host-step",
        host_step::run,
        "--how allocate|destroy|fill --mem 60M --before-ms 3000 --pause-ms 2000: work waits for a step of the host that needs the library",
    ),
    (
        "checkpoints",
        checkpoints::run,
        "--pid N --to asleep|awake --timeout-ms 2000: takes a process off its GPUs, or puts it back",
    ),
    ("provides", provides::run, "--mem 64M --seconds 5: creates and exports memory without a context"),
    (
        "naps",
        naps::run,
        "--mem 16M --seconds 5 --pause-ms 20: threads that launch, ask and allocate, with pauses; verify",
    ),
    (
        "churn",
        churn::run,
        "--mem 256M --seconds 2 --steps 0 --seed 1: random allocate, grow, write, free, verify, for at least --steps",
    ),
    ("streams", streams::run, "--mem 64M --streams 8 --threads 4 --rounds 10: many streams from many threads, verify"),
    (
        "binds",
        binds::run,
        "--mem 160M: bind memory to objects through which others reach it, in all ways that fail or not",
    ),
    (
        "frees",
        frees::run,
        "--mem 16M --rounds 8 --kind alloc|vmm|managed|async --seconds 0: free memory that queued work uses, hold nothing",
    ),
    ("info", info::run, "what the driver says about the GPU and its memory"),
    (
        "oversub",
        oversub::run,
        "--mem 2G --chunk 64M --kind alloc|vmm|managed --beside 0: allocate until it fails, and plain memory beside it; touch, verify",
    ),
    ("latency", latency::run, "--launches 100000: the cost of launching an empty kernel"),
    ("launches", launches::run, "--ms 3000 --ns 1000 --pause-us 20: kernels, and a pause of the host after each"),
    ("leaves", leaves::run, "--mem 48M --ms 600 --status 7: exit at a random moment while a thread works"),
    (
        "exchange",
        exchange::run,
        "--mem 4G: how fast memory can leave one program while as much comes to another, in GiB/s; needs twice as much",
    ),
    ("link", link::run, "--mem 256M --rounds 4: how fast memory can be copied out, in, and both at once, in GiB/s"),
    (
        "persistent",
        persistent::run,
        "--mem 16M --seconds 1: a kernel that runs until the host tells it to end, beside other work",
    ),
    ("account", account::run, "--mem 32M: free memory while some is taken, refused and given back"),
    (
        "captures",
        captures::run,
        "--mem 16M --rounds 6 --capture-ms 50 --mode all|global|thread-local|relaxed: slow captures in each mode beside a thread that works, verify",
    ),
    ("forks", forks::run, "--mem 16M --rounds 10: make children of three kinds while working, verify"),
    ("nulls", nulls::run, "calls with NULL and with nonsense, and what each was answered"),
    (
        "per-thread",
        per_thread::run,
        "--mem 16M --threads 3 --rounds 20: work on the threads' own default streams, verify",
    ),
    (
        "deep",
        deep::run,
        "--launches 10000 --ns 100000 --streams 1 --per-graph 0 --mem 0: queue kernels as fast as the driver takes them, verify",
    ),
    (
        "host-waits",
        host_waits::run,
        "--how write|copy|batch|thread|lock|callback --blocking 0 --rounds 3 --pause-ms 300: work that a later step of the host lets go on",
    ),
    (
        "proxy",
        proxy::run,
        "--mem 4M --rounds 3 --steps 10: kernels that run until a thread which submits copies ends them",
    ),
    (
        "pair",
        pair::run,
        "--how value|event --rounds 10 --pause-ms 0: two processes, the work of each waits for that of the other",
    ),
    (
        "endless",
        endless::run,
        "--seconds 5 --graph 0: a kernel, or a graph, that runs until the host ends it, and nothing else",
    ),
    (
        "open-captures",
        open_captures::run,
        "--how stream|context --rounds 20: leave a capture open when its stream or context is destroyed, then work",
    ),
    (
        "grow",
        grow::run,
        "--mem 64M --step 1M --most 3 --step-ms 0 --fill each|late --rounds 5 --pause-ms 50 --kind alloc|vmm|managed|async --seed 1: allocate and fill in parts of 1 to 3 steps, then rounds over all, verify; exits with 3 where memory is refused",
    ),
    ("green", green::run, "--mem 16M --rounds 20 --primary 1: work in a green context"),
    (
        "share",
        share::run,
        "--role export|import --file F --mem 16M --count 1 --private 16M --rounds 10: use the same memory in two processes",
    ),
    ("waits", waits::run, "which calls of the driver wait for a kernel that runs"),
    (
        "weights",
        weights::run,
        "--mem 64M --reserve 16M --state 4M --rounds 10 --pause-ms 50: weights that are only read, a reserve that is not used, verify",
    ),
    (
        "jax",
        jax::run,
        "--used 0.5 --steps 20 --pause-ms 50 --seed 1: reserve three quarters of the GPU, use a part of that, verify; exits with 3 where memory is refused",
    ),
    (
        "told",
        told::run,
        "--mem 64M --writes none|all: for each line on standard input, how long its memory takes to come back, then verify",
    ),
    (
        "across",
        across::run,
        "--mem 16M --how copy|pitched|kernel|map|pool --rounds 20 --pause-ms 10: two GPUs that reach into each other's memory, verify",
    ),
    (
        "cross",
        cross::run,
        "--mem 8M --how unified|rows|recorded|attributes|batches|nodes|arrays|host|rows-host|streams|graph|devices|own --first 0 --rounds 20 --pause-ms 10: work that concerns two GPUs, with the first one's context current, verify",
    ),
    (
        "escapes",
        escapes::run,
        "--mem 16M --beside 32M --how sync|sync-and-clear|range|export|bind|bind-address|offered|none --kind alloc|vmm --seconds 5: hold memory, part of it given to others, verify",
    ),
    (
        "maps",
        maps::run,
        "--mem 48M --seconds 2 --seed 1 --pause-ms 20 | --unused 1 --strict 1: random steps of virtual memory management, each answer compared with a model",
    ),
    (
        "starts",
        starts::run,
        "--mem 4M --threads 8 --seconds 600: initialise CUDA in many threads at once, each of which holds memory then, verify",
    ),
    (
        "story",
        story::run,
        "--mem 0 --changes 0 --context 1 --init 1 --nvml 0 --too-much 0: how much memory there is, by everything that says so, each time that changes",
    ),
    (
        "unseen",
        unseen::run,
        "--mem 64M --rounds 10 --ms 300 --pause-ms 500: launch kernels of --ms past the hooks, verify",
    ),
    (
        "pools",
        pools::run,
        "--mem 64M --streams 3 --threads 2 --seconds 2 --seed 1 --pause-ms 0: allocate and free in the order of streams, verify",
    ),
    ("pool_keeper", pool_keeper::run, "--mem 96M --live 8M --seconds 5: a pool that keeps what it no longer uses"),
    ("pool_latency", pool_latency::run, "--pairs 1000000 --size 1M: the cost of allocating from a pool and freeing"),
    ("pool_rules", pool_rules::run, "| --reserve 160M: what memory pools promise, call by call"),
    (
        "aliases",
        aliases::run,
        "--count 32768 --remapped 1000: one chunk at many addresses, and how long mapping took, verify",
    ),
    (
        "queued",
        queued::run,
        "--streams 16 --each 970 --held 970: launches behind a kernel that the host ends once so many are queued, and how long they took",
    ),
    (
        "cycles",
        cycles::run,
        "--streams 40000 --busy 0: a stream for each piece of work, and how long the first and the last of them took",
    ),
    ("stranger", stranger::run, "--mem 256M --seconds 5 --kind alloc|vmm|managed|async: hold memory and do nothing"),
];

pub fn find(name: &str) -> Option<Program> {
    PROGRAMS.iter().find(|p| p.0 == name).map(|p| p.1)
}

pub fn usage() -> String {
    PROGRAMS.iter().map(|(name, _, what)| format!("  {name:10} {what}\n")).collect()
}

/// Compares a result with the expected value.
pub fn expect<T: PartialEq + std::fmt::Display>(what: &str, got: T, want: T) -> Outcome {
    if got == want { Ok(()) } else { Err(format!("{what}: got {got}, want {want}").into()) }
}

/// An out-of-memory error that the program handles.
#[derive(Debug)]
pub struct Refused(pub crate::cuda::Error);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "refused: {}", self.0)
    }
}

impl Error for Refused {}

/// A reproducible random number generator.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}
