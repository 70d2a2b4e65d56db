//! Event sets. A program registers kinds of events of each GPU in a set, and waits for later events
//! of these kinds. Tests raise the events.

use super::*;
use cuda_sim_gpus::trouble::{DOUBLE_BIT_ECC, Event, XID, happened, is_lost};
use std::{
    sync::{Mutex, MutexGuard},
    time::Instant,
};

/// An event set.
#[derive(Debug, Default)]
struct Set(Mutex<Watched>);

#[derive(Debug, Default)]
struct Watched {
    /// Each registered GPU with a mask of the kinds of events.
    kinds: Vec<(usize, u64)>,
    /// Number of events that have been checked.
    seen: usize,
}

/// `nvmlEventData_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EventData {
    device: usize,
    kind: u64,
    data: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// Interval between checks for events.
const LOOK: Duration = Duration::from_millis(5);

/// The kinds that the simulated driver supports.
const KINDS: u64 = DOUBLE_BIT_ECC | XID;

fn set(handle: usize) -> Result<MutexGuard<'static, Watched>, Error> {
    // SAFETY: the API's contract: the program passes null or a set that it has created and not freed.
    let set = unsafe { (handle as *const Set).as_ref() }.ok_or(INVALID_ARGUMENT)?;
    Ok(set.0.lock().unwrap_or_else(|e| e.into_inner()))
}

fn wait(handle: usize, timeout: u32) -> Result<Event, Error> {
    let until = Instant::now() + Duration::from_millis(timeout.into());
    let dir = &Config::get().dir;
    loop {
        {
            let mut watched = set(handle)?;
            for event in happened(dir).into_iter().skip(watched.seen) {
                watched.seen += 1;
                if watched.kinds.iter().any(|(gpu, kinds)| *gpu == event.gpu && kinds & event.kind != 0) {
                    return Ok(event);
                }
            }
            if watched.kinds.iter().any(|(gpu, _)| is_lost(dir, *gpu)) {
                return Err(GPU_IS_LOST);
            }
        }
        if Instant::now() >= until {
            return Err(TIMEOUT);
        }
        thread::sleep(LOOK);
    }
}

exports! {
    nvmlEventSetCreate(to: *mut usize) {
        if !Config::get().nvml_events {
            return Err(NOT_SUPPORTED);
        }
        let seen = happened(&Config::get().dir).len();
        let set = Set(Mutex::new(Watched { kinds: Vec::new(), seen }));
        out(to, Box::into_raw(Box::new(set)) as usize)
    }
    nvmlDeviceGetSupportedEventTypes(handle: usize, types: *mut u64) {
        gpu(handle)?;
        out(types, if Config::get().nvml_events { KINDS } else { 0 })
    }
    nvmlDeviceRegisterEvents(handle: usize, types: u64, to: usize) {
        let gpu = gpu(handle)?;
        if types & !KINDS != 0 {
            return Err(NOT_SUPPORTED);
        }
        set(to)?.kinds.push((gpu, types));
        Ok(())
    }
    nvmlEventSetWait_v2(from: usize, to: *mut EventData, timeout: u32) {
        let Event { gpu, kind, data } = wait(from, timeout)?;
        out(to, EventData { device: gpu + 1, kind, data, gpu_instance: u32::MAX, compute_instance: u32::MAX })
    }
    nvmlEventSetFree(from: usize) {
        if from == 0 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the API's contract: the program passes a set that it has created, and does not
        // use it again.
        drop(unsafe { Box::from_raw(from as *mut Set) });
        Ok(())
    }
}
