//! Creates memory for other processes, without a CUDA context: a service that keeps a model's weights.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{api, cu, late::late_cu},
    report::Report,
};
use std::{
    os::fd::{FromRawFd, OwnedFd},
    thread,
    time::Duration,
};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const DESCRIPTOR: u32 = 1;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let memory = args.size("mem", "64M");
    cu!(cuInit(0))?;
    let location = api::Location { kind: 1, id: 0 };
    let properties = api::Properties { kind: 1, handle_types: DESCRIPTOR, location, ..Default::default() };
    let (mut handle, mut descriptor) = (0, -1);
    cu!(cuMemCreate(&mut handle, memory as usize, &properties, 0))?;
    late_cu!(cuMemExportToShareableHandle(&mut descriptor, handle, DESCRIPTOR, 0))?;
    // SAFETY: the driver has returned the descriptor to this program, so no other value owns it.
    let _descriptor = (descriptor >= 0).then(|| unsafe { OwnedFd::from_raw_fd(descriptor) });
    eprintln!("holding {memory} bytes");
    thread::sleep(Duration::from_secs_f64(args.number("seconds", "5")));
    cu!(cuMemRelease(handle))?;
    report.integer("mem", memory);
    Ok(())
}
