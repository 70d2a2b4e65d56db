//! Reports the driver's properties of the GPU.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Gpu, cu,
        late::late_cu,
        nvml::{Lookup, Nvml},
    },
    report::Report,
};
use std::ffi::CStr;

/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED`
pub const FABRIC_HANDLES: u32 = 128;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let gpu = Gpu::open(args.size("device", "0") as i32)?;
    let (mut count, mut version, mut total, mut name) = (0, 0, 0, [0; 96]);
    cu!(cuDeviceGetCount(&mut count))?;
    cu!(cuDriverGetVersion(&mut version))?;
    cu!(cuDeviceTotalMem_v2(&mut total, gpu.device))?;
    cu!(cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, gpu.device))?;
    let (free, seen) = gpu.memory()?;
    let mut fabric = 0;
    late_cu!(cuDeviceGetAttribute(&mut fabric, FABRIC_HANDLES, gpu.device))?;
    report.integer("gpus", count as u64);
    report.integer("fabric_handles", fabric as u64);
    report.integer("driver", version as u64);
    // SAFETY: the driver ends the name with NUL.
    report.text("name", &unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy());
    report.text("uuid", &gpu.uuid()?);
    report.integer("device_total", total as u64);
    report.integer("total", seen as u64);
    report.integer("free", free as u64);
    if args.size("nvml", "0") != 0 {
        let nvml = Nvml::open(0)?;
        let devices = nvml.devices(Lookup::Library)?;
        let linked = nvml.devices(Lookup::Linked)?;
        expect("what NVML says where it is linked", format!("{linked:?}"), format!("{devices:?}"))?;
        report.integer("nvml_gpus", devices.0.into());
        report.text("nvml_uuid", &devices.1);
        report.integer("nvml_index", devices.2.into());
        report.integer("nvml_has_another", Nvml::open(devices.0).is_ok().into());
    }
    Ok(())
}
