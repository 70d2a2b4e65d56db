//! Checkpoints or restores another process, optionally on other GPUs, like nvshare-checkpoint.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{
        self, cu,
        late::{LockArgs, RestoreArgs, late_cu},
    },
    report::Report,
};
use std::{error::Error, ptr};

fn uuid(gpu: i32) -> cuda::Result<[u8; 16]> {
    let mut uuid = [0; 16];
    cu!(cuDeviceGetUuid_v2(&mut uuid, gpu))?;
    Ok(uuid)
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let pid: i32 = args.text("pid", "0").parse()?;
    cu!(cuInit(0))?;
    let lock = LockArgs { timeout_ms: args.size("timeout-ms", "2000") as u32, ..LockArgs::default() };
    match args.text("to", "asleep") {
        "locked" => late_cu!(cuCheckpointProcessLock(pid, &lock))?,
        "asleep" => {
            if args.text("from", "running") == "running" {
                late_cu!(cuCheckpointProcessLock(pid, &lock))?;
            }
            late_cu!(cuCheckpointProcessCheckpoint(pid, ptr::null()))?;
        }
        "awake" => {
            // `--on 1,0` lists the new GPU of each old GPU.
            let on = args.text("on", "").split(',').filter(|gpu| !gpu.is_empty());
            let pair = |(old, new): (i32, &str)| -> Result<_, Box<dyn Error>> { Ok([uuid(old)?, uuid(new.parse()?)?]) };
            let pairs = (0..).zip(on).map(pair).collect::<Result<Vec<_>, _>>()?;
            let moved = RestoreArgs { pairs: pairs.as_ptr(), count: pairs.len() as u32, reserved: [0; 13] };
            late_cu!(cuCheckpointProcessRestore(pid, if pairs.is_empty() { ptr::null() } else { &moved }))?;
            late_cu!(cuCheckpointProcessUnlock(pid, ptr::null()))?;
        }
        other => return Err(format!("--to {other}: want locked, asleep or awake").into()),
    }
    report.integer("pid", pid as u64);
    Ok(())
}
