//! A terminal line that shows why a command of `nvsharectl run` waits for its first turn. A
//! separate process shows the line, because the command has replaced nvsharectl. That process is
//! not a child of the command, inherits only the terminal, and ends at the first turn.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, getpgrp, pidfd_open};
use rustix::termios::tcgetpgrp;

use super::progress::{LOOK, Progress};
use super::{CtlError, Target, block_on};
use crate::bus::{Client, Gpu, SchedulerProxy};
use crate::sys::detached;

/// Time to wait for the command to use a GPU. A command that has used no GPU within this time may
/// never use one.
const PATIENCE: Duration = Duration::from_secs(600);

/// Starts the process that shows the line. The command is about to replace the calling process.
/// Failures are ignored, because the line is not essential.
pub fn begin(target: &Target) {
    if !Progress::new().is_shown() {
        return;
    }
    let Some(command) = Pid::from_raw(std::process::id().cast_signed()) else { return };
    let _ = detached::run(|| {
        let Ok(process) = pidfd_open(command, PidfdFlags::empty()) else { return };
        let _ = watch(target, command, &process);
    });
}

fn watch(target: &Target, command: Pid, process: &OwnedFd) -> Result<(), CtlError> {
    let begin = Instant::now();
    let mut progress = Progress::new();
    block_on(async {
        let scheduler = target.connect().await?;
        let mut pause = LOOK;
        loop {
            if has_ended(process, pause) {
                return Ok(());
            }
            match look(&scheduler, command).await? {
                Step::Unknown if begin.elapsed() > PATIENCE => return Ok(()),
                // The interval grows while the command uses no GPU.
                Step::Unknown => pause = (pause * 2).min(Duration::from_secs(2)),
                Step::Runs => return Ok(()),
                Step::Idle => progress.show(""),
                // Erases the line while the command is in the background.
                Step::Waits(_) if tcgetpgrp(std::io::stderr()).ok() != Some(getpgrp()) => progress.show(""),
                Step::Waits(text) => {
                    pause = LOOK;
                    progress.show(&text);
                }
            }
        }
    })
}

fn has_ended(process: &OwnedFd, pause: Duration) -> bool {
    let Ok(time) = Timespec::try_from(pause) else { return true };
    let mut ends = [PollFd::new(process, PollFlags::IN)];
    !matches!(poll(&mut ends, Some(&time)), Ok(0) | Err(rustix::io::Errno::INTR))
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// The command has not used a GPU yet.
    Unknown,
    /// The command has no work for a GPU.
    Idle,
    Waits(String),
    Runs,
}

async fn look(scheduler: &SchedulerProxy<'_>, command: Pid) -> Result<Step, CtlError> {
    let clients = scheduler.list_clients().await?;
    let pid = command.as_raw_nonzero().get().cast_unsigned();
    let Some(client) = clients.iter().find(|client| client.pid == pid) else { return Ok(Step::Unknown) };
    Ok(step(client, &scheduler.list_gpus().await?))
}

fn step(client: &Client, gpus: &[Gpu]) -> Step {
    if client.gpus.iter().any(|usage| usage.grants > 0 || usage.state == "holding") {
        return Step::Runs;
    }
    let Some(usage) = client.gpus.iter().find(|usage| ["waiting", "attaching"].contains(&&*usage.state)) else {
        return Step::Idle;
    };
    let gpu = gpus.iter().find(|gpu| gpu.uuid == usage.uuid);
    // The beginning of a UUID is short and identifies the GPU.
    let short = || usage.uuid.chars().take(12).collect();
    let name = gpu.and_then(|gpu| gpu.index).map_or_else(short, |index| format!("GPU {index}"));
    let ahead = gpu.and_then(|gpu| Some(gpu.queue.iter().position(|id| *id == client.id)? + gpu.holders.len()));
    let start = gpu.and_then(|gpu| gpu.expected_starts.as_ref()?.get(&client.id));
    let expected = match (start, ahead) {
        (Some(start), _) => format!(", about {:.0} s more", start.ceil()),
        (None, Some(ahead)) => format!(", {ahead} ahead of it"),
        (None, None) => String::new(),
    };
    let what = if usage.state == "attaching" { "room on " } else { "" };
    Step::Waits(format!("{} waits for {what}{name}: {:.0} s{expected}", client.name, usage.since))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::GpuUse;
    use std::collections::HashMap;

    #[test]
    fn the_line_shows_the_reason_until_the_first_turn() {
        let usage = GpuUse { uuid: "GPU-1".into(), state: "waiting".into(), since: 3.2, ..GpuUse::default() };
        let mut client = Client { id: 7, name: "python3".into(), gpus: vec![usage], ..Client::default() };
        let mut gpu = Gpu {
            uuid: "GPU-1".into(),
            index: Some(0),
            holders: vec![1],
            queue: vec![2, 7],
            expected_starts: Some(HashMap::from([(7, 11.3)])),
            ..Gpu::default()
        };
        let waits = |text: &str| Step::Waits(text.into());
        assert_eq!(step(&client, &[gpu.clone()]), waits("python3 waits for GPU 0: 3 s, about 12 s more"));
        gpu.expected_starts = None;
        assert_eq!(step(&client, &[gpu.clone()]), waits("python3 waits for GPU 0: 3 s, 2 ahead of it"));
        client.gpus[0].state = "attaching".into();
        gpu.queue.clear();
        assert_eq!(step(&client, &[gpu.clone()]), waits("python3 waits for room on GPU 0: 3 s"));
        client.gpus[0].state = "idle".into();
        assert_eq!(step(&client, &[gpu.clone()]), Step::Idle);
        client.gpus[0].grants = 1;
        assert_eq!(step(&client, &[gpu]), Step::Runs);
    }
}
