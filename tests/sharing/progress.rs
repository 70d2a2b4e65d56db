//! Programs finish with correct contents, or are refused memory, whatever the GPU does and whatever
//! NVML reports. A test fails if a program waits for ever. The tests run real processes on the
//! simulated GPU.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use cuda_sim_gpus::trouble::{self, Refusal, Stranger};
use test_support::machine::*;

/// Programs allocate in multiples of the GPU's granularity, so they use exactly the bytes that they
/// report.
const STEP: u64 = 2 * MIB;
/// The exit status of `grow` if memory is refused.
const REFUSED: i32 = 3;

/// How a program may end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// With correct contents.
    Done,
    /// The driver or the library refused an allocation or the program's context:
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    Refused,
}

/// Waits until each program has ended in one of these ways. Returns how each ended.
#[track_caller]
fn ends(programs: &mut [Program]) -> Vec<End> {
    wait_for("all programs to be done or refused memory", || {
        let ended = programs.iter_mut().filter_map(|program| program.poll()).count();
        (ended == programs.len()).then_some(())
    });
    let end = |program: &mut Program| match program.wait().code() {
        Some(REFUSED) => {
            assert!(program.stdout().contains("CUDA_ERROR_OUT_OF_MEMORY"), "{}", program.stdout());
            End::Refused
        }
        _ => {
            program.finish();
            End::Done
        }
    };
    programs.iter_mut().map(end).collect()
}

/// Like [`ends`], for programs that each fit alone and so must not be refused memory.
#[track_caller]
fn all_finish(programs: &mut [Program]) {
    let ends = ends(programs);
    assert!(ends.iter().all(|end| *end == End::Done), "{ends:?}: each of them fits alone");
}

/// A large GPU on which strangers leave room for about one and a half programs. As on a real GPU,
/// the estimate of free memory can then be wrong by far more than the scheduler reserves after a
/// failed mapping.
struct Narrow {
    machine: Machine,
    /// Bytes that each program needs.
    share: u64,
    /// Bytes that strangers hold.
    strangers: u64,
}

/// The error of a wrong figure: a few percent of the GPU, and many times the memory that a program
/// needs.
const WRONG: u64 = 2 << 30;
const MEMORY: u64 = 32 << 30;
const ROOM: u64 = 96 * MIB;

impl Narrow {
    /// Creates a GPU with `unusable` bytes that no program can use. The scheduler, which may not
    /// know these bytes, isn't started yet.
    fn new(unusable: u64, simulator: &[(&'static str, &str)]) -> Self {
        Self::with(Setup::default(), ROOM, unusable, simulator)
    }

    fn with(setup: Setup, room: u64, unusable: u64, simulator: &[(&'static str, &str)]) -> Self {
        let simulator = simulator.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        let machine = Machine::new(Setup { memory: MEMORY, simulator, ..setup });
        let strangers = machine.setup.capacity(2) - room - unusable;
        let gpu = Self { machine, share: room * 2 / 3 / STEP * STEP, strangers };
        gpu.strangers(0, None);
        gpu
    }

    fn gpu(&self) -> PathBuf {
        self.machine.path("gpu")
    }

    fn start(&self, words: &str) -> Program {
        self.machine.program(&format!("grow --mem {} {words}", self.share)).start()
    }

    /// Two programs that start at the same time.
    fn pair(&self) -> [Program; 2] {
        self.pair_for(5)
    }

    /// [`pair`](Self::pair) with a given number of rounds.
    fn pair_for(&self, rounds: u32) -> [Program; 2] {
        let words = format!("--step {STEP} --rounds {rounds} --pause-ms 20");
        [self.start(&words), self.start(&words)]
    }

    /// Starts the scheduler and two programs, and waits until both have finished.
    #[track_caller]
    fn pair_finishes(&mut self) {
        self.machine.start_scheduler();
        all_finish(&mut self.pair());
        self.machine.wait_until_empty();
    }

    /// Adds strangers to the permanent ones.
    fn strangers(&self, bytes: u64, pid: Option<u32>) {
        let strangers = [
            Stranger { bytes: self.strangers, pid: None, is_graphics: false },
            Stranger { bytes, pid, is_graphics: false },
        ];
        trouble::set_strangers(&self.gpu(), 0, &strangers).expect("the strangers");
    }

    fn set_nvml_error(&self, bytes: i64) {
        trouble::set_nvml_error(&self.gpu(), 0, bytes).expect("the error");
    }

    fn hide(&self, bytes: u64) {
        trouble::hide(&self.gpu(), 0, bytes).expect("the hidden bytes");
    }

    fn fragment(&self, bytes: u64) {
        trouble::fragment(&self.gpu(), 0, bytes).expect("the fragmented bytes");
    }

    fn refuse(&self, refusal: Option<Refusal>) {
        trouble::refuse(&self.gpu(), 0, refusal).expect("the refusal");
    }

    fn calm(&self) {
        self.hide(0);
        self.fragment(0);
        self.strangers(0, None);
        self.set_nvml_error(0);
        self.refuse(None);
    }
}

/// Two programs, each of two thirds of the free memory, start at the same time, and their contexts
/// appear slowly. NVML is sampled during their creation, when each context has a fifth of its
/// bytes. If the scheduler kept that figure, it would overestimate the free memory. It would grant
/// both programs memory that `cuMemCreate` refuses. Neither program would evict memory for the
/// other or become idle, so nothing would be measured again.
///
/// The figures are those of a large GPU that strangers have nearly filled: the error must exceed
/// the scheduler's reserve for failed mappings. The contexts are completed between two samples,
/// which are 200 ms apart. The next sample is taken while both programs allocate.
#[test]
fn two_programs_with_slowly_created_contexts_both_finish() {
    let settings = [("CUDA_SIM_CONTEXT_TIME", "300"), ("CUDA_SIM_GPU_BANDWIDTH", "16G")];
    let mut gpu = Narrow::with(Setup { context: 1 << 30, ..Setup::default() }, 384 * MIB, 0, &settings);
    gpu.machine.start_scheduler();
    let words = "--step 2M --most 3 --step-ms 1 --fill late --rounds 3 --pause-ms 30";
    all_finish(&mut [gpu.start(words), gpu.start(words)]);
    gpu.machine.wait_until_empty();
}

// ---- a GPU that has less than it shows ------------------------------------------------------------------------------

#[test]
fn bytes_hidden_from_nvml_block_no_program() {
    let mut gpu = Narrow::new(WRONG, &[("CUDA_SIM_HIDDEN", "2G")]);
    gpu.pair_finishes();
}

/// Hidden memory replaces a stranger's memory. NVML shows only that the stranger's memory is freed.
#[test]
fn bytes_hidden_at_run_time_block_no_program() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.machine.start_scheduler();
    let mut programs = gpu.pair_for(20);
    programs[0].wait_to_say("built");
    gpu.hide(WRONG);
    gpu.strangers -= WRONG;
    gpu.strangers(0, None);
    all_finish(&mut programs);
    gpu.machine.wait_until_empty();
}

#[test]
fn fragmented_memory_blocks_no_program() {
    let mut gpu = Narrow::new(WRONG, &[("CUDA_SIM_FRAGMENTED", "2G")]);
    gpu.pair_finishes();
}

/// The scheduler counts 4 MiB for a context. With its first work, each context takes 1 GiB more for
/// code.
#[test]
fn contexts_that_grow_later_block_no_program() {
    let growth = [("CUDA_SIM_CONTEXT_GROWTH", "1G"), ("CUDA_SIM_CONTEXT_GROWTH_STEPS", "2")];
    let mut gpu = Narrow::new(WRONG, &growth);
    gpu.pair_finishes();
}

/// One program needs more than the GPU can give, and no figure shows that. One of its allocations
/// is refused, and the other program makes progress.
#[test]
fn a_program_that_can_never_fit_is_refused_memory() {
    let mut gpu = Narrow::new(WRONG, &[("CUDA_SIM_FRAGMENTED", "2G")]);
    gpu.machine.start_scheduler();
    let program = |mem: u64| gpu.machine.program(&format!("grow --mem {mem} --step {STEP} --rounds 5")).start();
    let mut programs = [program(ROOM + ROOM / 4), program(ROOM / 3)];
    assert_eq!(ends(&mut programs), [End::Refused, End::Done]);
    gpu.machine.wait_until_empty();
}

// ---- free memory that varies ----------------------------------------------------------------------------------------

/// Strangers sometimes take all free memory. A program that allocates at such a moment may be
/// refused.
#[test]
fn foreign_programs_that_come_and_go_block_no_program() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.machine.start_scheduler();
    let mut programs = gpu.pair_for(20);
    let mut random = Dice::seeded();
    for _ in 0..15 {
        let pid = (random.below(2) == 0).then_some(1);
        let most = *random.choose(&[ROOM / 4, MEMORY]).expect("one of them");
        gpu.strangers(random.below(most), pid);
        thread::sleep(random.milliseconds(200));
    }
    gpu.calm();
    ends(&mut programs);
    gpu.machine.wait_until_empty();
}

#[test]
fn programs_wait_while_the_driver_refuses_memory_for_three_seconds() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.machine.start_scheduler();
    let mut programs = gpu.pair();
    programs[0].wait_to_say("built");
    gpu.refuse(Some(Refusal { pid: None, lasts: Some(Duration::from_secs(3)) }));
    all_finish(&mut programs);
    gpu.machine.wait_until_empty();
}

/// The driver refuses memory to one program. The other program doesn't wait for the first program.
#[test]
fn memory_refused_to_one_program_does_not_block_the_other() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.machine.start_scheduler();
    let [refused, mut other] = gpu.pair();
    refused.wait_to_say("built");
    gpu.refuse(Some(Refusal { pid: Some(refused.pid()), lasts: None }));
    wait_for("the other program to be done", || other.poll());
    gpu.refuse(None);
    all_finish(&mut [refused, other]);
    gpu.machine.wait_until_empty();
}

/// The driver refuses memory from the first allocation on.
#[test]
fn allocations_wait_or_fail_while_the_driver_refuses_memory() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.machine.start_scheduler();
    gpu.refuse(Some(Refusal { pid: None, lasts: Some(Duration::from_secs(2)) }));
    ends(&mut gpu.pair());
    gpu.machine.wait_until_empty();
}

// ---- NVML that is wrong ---------------------------------------------------------------------------------------------

#[test]
fn nvml_showing_too_little_used_memory_blocks_no_program() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.set_nvml_error(-(WRONG as i64));
    gpu.pair_finishes();
}

/// NVML shows no free memory, although some is free. The library refuses a program's allocation
/// with an error, instead of letting the program wait.
#[test]
fn nvml_showing_too_much_used_memory_blocks_no_program() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.set_nvml_error(WRONG as i64);
    gpu.machine.start_scheduler();
    ends(&mut gpu.pair());
    gpu.machine.wait_until_empty();
}

#[test]
fn intermittently_wrong_nvml_figures_block_no_program() {
    let mut gpu = Narrow::new(0, &[]);
    gpu.machine.start_scheduler();
    let mut programs = gpu.pair_for(20);
    programs.iter().for_each(|program| program.wait_to_say("built"));
    let mut random = Dice::seeded();
    for _ in 0..15 {
        gpu.set_nvml_error(random.below(2 * WRONG) as i64 - WRONG as i64);
        thread::sleep(random.milliseconds(200));
    }
    gpu.calm();
    // Each round allocates, and its allocation is refused if no memory seems to be free at that
    // moment.
    ends(&mut programs);
    gpu.machine.wait_until_empty();
}

#[test]
fn nvml_without_process_figures_blocks_no_program() {
    nvml_says_of_processes("unmeasured");
}

#[test]
fn nvml_without_a_process_list_blocks_no_program() {
    nvml_says_of_processes("none");
}

fn nvml_says_of_processes(listing: &str) {
    let variant = [("CUDA_SIM_NVML_PROCESSES", listing), ("CUDA_SIM_CONTEXT_TIME", "200")];
    let mut gpu = Narrow::new(0, &variant);
    gpu.pair_finishes();
}

/// NVML still shows evicted memory for 700 ms. Until then no memory may seem to be free, and an
/// allocation may be refused.
#[test]
fn delayed_nvml_figures_block_no_program() {
    let mut gpu = Narrow::new(0, &[("CUDA_SIM_NVML_DELAY", "700"), ("CUDA_SIM_CONTEXT_TIME", "200")]);
    gpu.machine.start_scheduler();
    ends(&mut gpu.pair());
    gpu.machine.wait_until_empty();
}

// ---- random disturbances --------------------------------------------------------------------------------------------

/// Seconds of disturbances, unless `NVSHARE_TEST_SECONDS` is set.
const TROUBLED: u64 = 5;

/// Keeps three programs running, under disturbances that change several times a second. The free
/// memory always suffices for one program alone. When the disturbances end, all programs finish.
#[test]
fn programs_make_progress_under_random_trouble() {
    let seconds = std::env::var("NVSHARE_TEST_SECONDS").map_or(TROUBLED, |text| text.parse().expect("a number"));
    let mut gpu = Narrow::new(0, &[("CUDA_SIM_CONTEXT_TIME", "100")]);
    gpu.machine.start_scheduler();
    let mut random = Dice::seeded();
    let (mut programs, mut counts): (Vec<Program>, _) = (Vec::new(), [0; 2]);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(seconds) {
        let (mut running, mut ended) = (Vec::new(), Vec::new());
        for mut program in programs.drain(..) {
            if program.poll().is_some() { ended.push(program) } else { running.push(program) }
        }
        ends(&mut ended).into_iter().for_each(|end| counts[usize::from(end == End::Refused)] += 1);
        programs = running;
        while programs.len() < 3 {
            programs.push(gpu.start(&format!("--step {STEP} --rounds 4 --pause-ms 20 --seed {}", random.below(1000))));
        }
        change_trouble(&gpu, &programs, &mut random);
        thread::sleep(random.milliseconds(500));
    }
    gpu.calm();
    ends(&mut programs).into_iter().for_each(|end| counts[usize::from(end == End::Refused)] += 1);
    eprintln!("{} programs done, {} refused memory", counts[0], counts[1]);
    assert!(counts[0] > 0, "none was done: {counts:?}");
    gpu.machine.wait_until_empty();
}

/// Starts a kind of disturbance, or ends all. Several kinds may be active at the same time.
fn change_trouble(gpu: &Narrow, programs: &[Program], random: &mut Dice) {
    let (kind, bytes) = (random.below(8), random.below(ROOM / 12));
    eprintln!("trouble {kind}, {bytes} bytes");
    match kind {
        0 => gpu.hide(bytes),
        1 => gpu.fragment(bytes),
        2 => gpu.strangers(bytes, Some(1)),
        3 => gpu.strangers(bytes, None),
        4 => gpu.set_nvml_error(random.below(2 * WRONG) as i64 - WRONG as i64),
        5 => gpu.refuse(Some(Refusal { pid: None, lasts: Some(random.milliseconds(1000)) })),
        6 => {
            let pid = random.choose(programs).map(Program::pid);
            gpu.refuse(Some(Refusal { pid, lasts: Some(random.milliseconds(1000)) }));
        }
        _ => gpu.calm(),
    }
}
