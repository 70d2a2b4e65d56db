//! What the driver says about the GPU.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Gpu, cu},
    report::Report,
};
use std::ffi::CStr;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let gpu = Gpu::open(args.size("device", "0") as i32)?;
    let (mut count, mut version, mut total, mut name) = (0, 0, 0, [0; 96]);
    cu!(cuDeviceGetCount(&mut count))?;
    cu!(cuDriverGetVersion(&mut version))?;
    cu!(cuDeviceTotalMem_v2(&mut total, gpu.device))?;
    cu!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, gpu.device))?;
    let (free, seen) = gpu.memory()?;
    report.integer("gpus", count as u64);
    report.integer("driver", version as u64);
    // SAFETY: the driver ends the name with NUL.
    report.text("name", &unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy());
    report.text("uuid", &gpu.uuid()?);
    report.integer("device_total", total as u64);
    report.integer("total", seen as u64);
    report.integer("free", free as u64);
    Ok(())
}
