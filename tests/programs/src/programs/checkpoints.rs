//! Takes another process off its GPUs, or puts it back, as whoever puts programs to sleep does.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{
        cu,
        late::{LockArgs, late_cu},
    },
    report::Report,
};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let pid: i32 = args.text("pid", "0").parse()?;
    cu!(cuInit(0))?;
    let none = std::ptr::null();
    match args.text("to", "asleep") {
        "asleep" => {
            let lock = LockArgs { timeout_ms: args.size("timeout-ms", "2000") as u32, ..LockArgs::default() };
            late_cu!(cuCheckpointProcessLock(pid, &lock))?;
            late_cu!(cuCheckpointProcessCheckpoint(pid, none))?;
        }
        "awake" => {
            late_cu!(cuCheckpointProcessRestore(pid, none))?;
            late_cu!(cuCheckpointProcessUnlock(pid, none))?;
        }
        other => return Err(format!("--to {other}: want asleep or awake").into()),
    }
    report.integer("pid", pid as u64);
    Ok(())
}
