//! Reports total and free memory by all interfaces: the driver, and NVML with each kind of lookup.
//! Reports them once at the start, and again after each change. With `--too-much`, reports them again
//! when the test asks for it, and once more after an allocation of so many bytes has failed.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, cu,
        nvml::{Lookup, Memory, Memory2, Nvml},
    },
    report::Report,
    signal,
};
use std::{error::Error, thread, time::Duration};

const LOOK: Duration = Duration::from_millis(2);
/// Figures are final after they have not changed for this time.
const SETTLED: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, PartialEq)]
struct Reading {
    device_total: Option<usize>,
    /// The driver's figures of free and total bytes.
    info: Option<(usize, usize)>,
    memory: Memory,
    memory_2: Memory2,
}

/// The interfaces that the program queries.
struct Asked {
    /// The driver's device, if it is initialized.
    device: Option<i32>,
    has_context: bool,
    nvml: Nvml,
}

impl Asked {
    /// Reads all interfaces until the figures are stable. Another program's memory may change
    /// between two reads.
    fn read(&self) -> Result<Reading, Box<dyn Error>> {
        loop {
            let reading = self.read_once()?;
            let linked = (self.nvml.memory(Lookup::Linked)?, self.nvml.memory_2(Lookup::Linked)?);
            if self.read_once()? != reading {
                continue;
            }
            if linked != (reading.memory, reading.memory_2) {
                let found = (reading.memory, reading.memory_2);
                return Err(format!("linked, NVML says {linked:?}, else {found:?}").into());
            }
            return Ok(reading);
        }
    }

    fn read_once(&self) -> Result<Reading, Box<dyn Error>> {
        let (memory, memory_2) = (self.nvml.memory(Lookup::Library)?, self.nvml.memory_2(Lookup::Library)?);
        let info = || {
            let (mut free, mut total) = (0, 0);
            cu!(cuMemGetInfo_v2(&mut free, &mut total)).map(|()| (free, total))
        };
        let info = self.has_context.then(info).transpose()?;
        Ok(Reading { device_total: self.device.map(device_total).transpose()?, info, memory, memory_2 })
    }
}

fn device_total(device: i32) -> Result<usize, crate::cuda::Error> {
    let mut total = 0;
    cu!(cuDeviceTotalMem_v2(&mut total, device)).map(|()| total)
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let ordinal = args.size("device", "0");
    let has_context = args.size("context", "1") != 0;
    let gpu = has_context.then(|| Gpu::open(ordinal as i32)).transpose()?;
    let is_initialised = has_context || args.size("init", "1") != 0;
    if is_initialised {
        cu!(cuInit(0))?;
    }
    let memory = args.size("mem", "0") as usize;
    let _held =
        gpu.iter().filter(|_| memory > 0).map(|_| Buffer::new(Kind::Alloc, memory)).collect::<Result<Vec<_>, _>>()?;
    let device = is_initialised.then_some(ordinal as i32);
    let asked = Asked { device, has_context, nvml: Nvml::open(args.size("nvml", "0") as u32)? };
    let mut reading = asked.read()?;
    tell(report, 0, &reading)?;
    for number in 1..=args.size("changes", "0") {
        // Waits until the driver's total memory of the device changes.
        while device.map(device_total).transpose()? == reading.device_total {
            thread::sleep(LOOK);
        }
        reading = asked.read()?;
        // The library learns the total and the free memory from separate messages. Free memory
        // changes after other programs have released memory.
        let mut before = None;
        while before.replace(reading.clone()).as_ref() != Some(&reading) {
            thread::sleep(SETTLED);
            reading = asked.read()?;
        }
        tell(report, number, &reading)?;
    }
    let too_much = args.size("too-much", "0") as usize;
    if too_much > 0 {
        signal::pause(Duration::from_secs(3600));
        tell(report, 1, &asked.read()?)?;
        expect("that an allocation fails", Buffer::new(Kind::Alloc, too_much).is_err(), true)?;
        tell(report, 2, &asked.read()?)?;
    }
    Ok(())
}

fn tell(report: &mut Report, number: u64, reading: &Reading) -> Outcome {
    let Reading { device_total, info, memory, memory_2 } = reading;
    expect("the parts by NVML", memory.free + memory.used, memory.total)?;
    expect("the parts by NVML's second form", memory_2.free + memory_2.used + memory_2.reserved, memory_2.total)?;
    expect("the total by NVML's second form", memory_2.total, memory.total)?;
    expect("what is free by NVML's second form", memory_2.free, memory.free)?;
    let mut integer = |name: &str, value: u64| report.integer(&format!("{name}_{number}"), value);
    if let Some(total) = device_total {
        integer("device_total", *total as u64);
    }
    if let Some((free, total)) = info {
        integer("free", *free as u64);
        integer("total", *total as u64);
    }
    integer("nvml_total", memory.total);
    integer("nvml_free", memory.free);
    integer("nvml_reserved", memory_2.reserved);
    eprintln!("reading {number}");
    Ok(())
}
