//! `make demo` starts a scheduler and two programs that together need more memory than the GPU has.
//! It shows the hand-overs of the lock and the moves of memory, and checks the results.
//!
//! Exits with 0 only if both results are correct, the lock alternated, and memory moved in both
//! directions.

mod processes;
mod sizes;
mod story;
mod turns;

use processes::{Process, Scratch, interrupted};
use sizes::{GIB, MIB, Plan, mib};
use std::{
    env,
    error::Error,
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};
use story::Story;
use turns::Paint;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const NAMES: [&str; 2] = ["A", "B"];
/// The time limit of every wait, which is reached only if a process hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// The time for which each program computes on a real GPU. It is a few turns long.
const WORK: Duration = Duration::from_secs(4);
/// The interval between reads of the record.
const PERIOD: Duration = Duration::from_millis(50);

const USAGE: &str =
    "usage: nvshare-demo --simulated DIR   on a simulated GPU whose libraries tests/cuda-sim/install.sh put into DIR
       nvshare-demo --real           on GPU 0 of this machine; with DEMO_LEAVE=16G in the environment, a third
                                     program first takes all of its memory but that much";

/// The GPU of the demo.
#[derive(Debug)]
enum Stage {
    Simulated { libraries: PathBuf },
    Real,
}

fn main() -> ExitCode {
    let words: Vec<String> = env::args().skip(1).collect();
    let stage = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--simulated", libraries] => Stage::Simulated { libraries: libraries.into() },
        ["--real"] => Stage::Real,
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    processes::notice_interrupts();
    match play(&stage) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) if interrupted() => {
            eprintln!("\nnvshare-demo: stopped ({e})");
            ExitCode::from(130)
        }
        Err(e) => {
            eprintln!("nvshare-demo: {e}");
            ExitCode::FAILURE
        }
    }
}

/// The directory of the programs, and a temporary directory.
#[derive(Debug)]
struct Scene<'a> {
    stage: &'a Stage,
    programs: PathBuf,
    scratch: &'a Path,
}

impl Scene<'_> {
    fn socket(&self) -> PathBuf {
        self.scratch.join("run/scheduler.sock")
    }

    fn control(&self) -> PathBuf {
        self.scratch.join("control/control.sock")
    }

    fn record(&self) -> PathBuf {
        self.scratch.join("record.jsonl")
    }

    /// Returns a command for one of the demo's programs, with the environment for this GPU.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.programs.join(name));
        for (variable, _) in env::vars_os() {
            let name = variable.to_string_lossy();
            let simulation = name.starts_with("CUDA_SIM_") && matches!(self.stage, Stage::Simulated { .. });
            if simulation || name.starts_with("NVSHARE_") || name == "LD_PRELOAD" {
                command.env_remove(variable);
            }
        }
        command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM");
        if let Stage::Simulated { libraries } = self.stage {
            command.env("LD_LIBRARY_PATH", libraries).env_remove("CUDA_VISIBLE_DEVICES");
            let gpu = self.scratch.join("gpu");
            command.env("CUDA_SIM_DIR", &gpu).env("NVSHARE_DEVICES", &gpu);
            command.env("CUDA_SIM_MEMORY", format!("{}M", GIB / MIB));
        }
        command.stdin(Stdio::null());
        command
    }

    /// Prints the timeline of the record, and draws it into a file in the programs' directory.
    fn draw_timeline(&self) -> Result<PathBuf> {
        let picture = self.programs.join("demo.svg");
        for output in [None, Some(&picture)] {
            let mut command = self.command("nvsharectl");
            command.arg("timeline").arg("--bundle").arg(self.record());
            if let Some(file) = output {
                command.arg("--output").arg(file);
            }
            if !command.status()?.success() {
                return Err("nvsharectl cannot draw the timeline".into());
            }
        }
        Ok(picture)
    }

    /// Runs one of the CUDA programs without nvshare, and returns its report.
    fn ask(&self, arguments: &[String]) -> Result<serde_json::Value> {
        let output = self.command("cuda-program").args(arguments).stderr(Stdio::null()).output();
        let output = output.map_err(|e| format!("cannot start cuda-program: {e}"))?;
        let info: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if info["ok"] == true {
            return Ok(info);
        }
        let why = info["error"].as_str().unwrap_or("cuda-program does not start");
        Err(match self.stage {
            Stage::Real => format!("no GPU can be used here ({why}): make demo without GPU=real simulates one"),
            Stage::Simulated { .. } => format!("the simulated GPU does not work: {why}"),
        }
        .into())
    }
}

/// Prints a line. A closed stdout ends the demo.
fn say(line: &str) -> Result<()> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

fn play(stage: &Stage) -> Result<bool> {
    let scratch = Scratch::new()?;
    let programs = env::current_exe()?.parent().map(Path::to_owned).unwrap_or_default();
    let scene = Scene { stage, programs, scratch: scratch.path() };
    fs::create_dir(scene.scratch.join("gpu"))?;
    let paint = Paint::of_stdout();

    let info = scene.ask(&["info".into()])?;
    let number = |key: &str| info[key].as_u64().unwrap_or(0);
    let mut free = number("free");
    let stranger = match (stage, env::var("DEMO_LEAVE")) {
        (Stage::Real, Ok(leave)) if !leave.is_empty() => {
            let leave = sizes::parse(&leave).ok_or(format!("DEMO_LEAVE={leave}: want a number with M or G"))?;
            let take = free.saturating_sub(leave) / (2 * MIB) * (2 * MIB);
            free -= take;
            if take > 0 { Some(hold(&scene, take)?) } else { None }
        }
        _ => None,
    };
    let mut plan = match stage {
        Stage::Simulated { .. } => Plan::simulated(),
        Stage::Real => Plan::real(free, sizes::host_available())?,
    };
    if let Stage::Real = stage {
        let trial = scene.ask(&plan.arguments(0))?;
        plan.work_for(WORK, Duration::from_secs_f64(trial["gpu_seconds"].as_f64().unwrap_or(1.0)));
    }
    let (name, total) = (info["name"].as_str().unwrap_or("GPU"), number("total"));
    say(&paint.bold(&format!("Two programs share one GPU: {name}, {}", mib(total))))?;
    if stranger.is_some() {
        say(&format!("  another program, without nvshare, leaves {} of it free", mib(free)))?;
    }
    say(&format!(
        "  each wants {}, together {}: {} more than there is for them",
        mib(plan.memory),
        mib(2 * plan.memory),
        mib((2 * plan.memory).saturating_sub(plan.room))
    ))?;
    say("  time quantum 1 s: at most that long one keeps the GPU while the other waits\n")?;

    let scheduler = schedule(&scene, &plan)?;
    let mut players = NAMES
        .iter()
        .enumerate()
        .map(|(i, name)| {
            let mut command = scene.command("nvsharectl");
            command.arg("run").arg("--library").arg(scene.programs.join("libnvshare.so")).arg("--");
            // With this link, the program has the same name in nvsharectl and in the lines about
            // turns.
            let program = scene.scratch.join(format!("program-{name}"));
            std::os::unix::fs::symlink(scene.programs.join("cuda-program"), &program)?;
            command.arg(program).args(plan.arguments(i));
            command.env("NVSHARE_SOCKET", scene.socket());
            Process::start(&format!("program {name}"), command, scene.scratch)
        })
        .collect::<Result<Vec<_>>>()?;
    let pids: Vec<u32> = players.iter().map(Process::pid).collect();

    let (mut story, mut status) = (Story::new(&scene.record(), &pids), None);
    say(&turns::heading(&paint))?;
    let start = Instant::now();
    loop {
        let running = players.iter_mut().any(|player| player.is_running());
        // Possibly the scheduler has not read the last packet of the program that ended last.
        thread::sleep(PERIOD);
        for turn in story.read() {
            say(&turns::turn(&turn, &NAMES, &paint))?;
        }
        if status.is_none() && story.grants() > 4 {
            status = Some(ask_status(&scene));
        }
        if !running {
            break;
        }
        if interrupted() {
            return Err("interrupted".into());
        }
        if start.elapsed() > PATIENCE {
            return Err(format!("the programs have not ended after {} s", PATIENCE.as_secs()).into());
        }
    }
    for line in status.unwrap_or_default() {
        say(&line)?;
    }
    say("")?;
    let picture = scene.draw_timeline()?;
    say("")?;
    let right = judge(&story, &mut players, &plan, &paint)?;
    say(&format!("\nThe same as a picture: {}", picture.display()))?;
    if !right {
        eprintln!("\n--- the scheduler's log ---\n{}", scheduler.errors());
    }
    Ok(right)
}

/// Starts a program that holds memory without using it.
fn hold(scene: &Scene<'_>, bytes: u64) -> Result<Process> {
    let mut command = scene.command("cuda-program");
    command.args(["stranger", "--mem", &bytes.to_string(), "--seconds", "3600"]);
    let mut stranger = Process::start("the program that holds memory", command, scene.scratch)?;
    stranger.wait_until("it has not got its memory", |it| it.errors().contains("holding"))?;
    Ok(stranger)
}

fn schedule(scene: &Scene<'_>, plan: &Plan) -> Result<Process> {
    let config = scene.scratch.join("nvshare.toml");
    fs::write(&config, plan.config())?;
    let mut command = scene.command("nvshare-scheduler");
    command.arg("--no-bus").arg("--socket").arg(scene.socket()).arg("--control-socket").arg(scene.control());
    command.arg("--config").arg(config).arg("--record").arg(scene.record());
    let mut scheduler = Process::start("nvshare-scheduler", command, scene.scratch)?;
    let socket = scene.socket();
    scheduler.wait_until("it does not listen", |_| socket.exists())?;
    Ok(scheduler)
}

/// Returns the output of `nvsharectl` while both programs run.
fn ask_status(scene: &Scene<'_>) -> Vec<String> {
    let output = scene.command("nvsharectl").arg("--control").arg(scene.control()).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let cut = |line: &str| line.chars().take(turns::WIDTH).collect();
    let heading = ["".into(), "What nvsharectl showed meanwhile".into()];
    heading.into_iter().chain(text.lines().filter(|line| !line.is_empty()).map(cut)).collect()
}

/// Prints the result of each check. Returns true if all checks succeed.
fn judge(story: &Story, players: &mut [Process], plan: &Plan, paint: &Paint) -> Result<bool> {
    let mut all = true;
    let mut check = |right: bool, text: String| {
        all &= right;
        say(&format!("  {} {text}", paint.verdict(right)))
    };
    for (player, name) in players.iter_mut().zip(NAMES) {
        let code = player.wait()?.code();
        let said = player.output();
        let report: serde_json::Value = serde_json::from_str(said.trim()).unwrap_or_default();
        let right = code == Some(0) && report["ok"] == true;
        check(
            right,
            if right {
                let seconds = report["seconds"].as_f64().unwrap_or(0.0);
                format!("program {name}: every element of its {} is right, after {seconds:.1} s", mib(plan.memory))
            } else {
                format!("program {name}: exit code {code:?}\n{said}{}", player.errors())
            },
        )?;
    }
    let [a, b] = story.turns();
    check(
        a >= 2 && b >= 2 && story.alternations() >= 3,
        format!("the lock changed hands {} times: {a} turns for A, {b} for B", story.alternations()),
    )?;
    let (out, back) = story.moved();
    check(
        out > 0 && back > 0,
        format!("{} left the GPU for host memory while their program waited, {} came back", mib(out), mib(back)),
    )?;
    check(
        story.overlaps().is_empty(),
        match story.overlaps() {
            [] => "never did both have the lock at once".into(),
            times => format!("both had the lock at once, from {times:.1?} s on"),
        },
    )?;
    Ok(all)
}
