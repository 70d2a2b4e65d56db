//! The GPUs' device files. The driver keeps the device files of a process's GPUs open, except while
//! the process is checkpointed. A regular file in the simulator's directory takes the place of a
//! device.

use crate::{Config, lock::open_shared, place};
use std::{
    fs::File,
    sync::{Mutex, PoisonError},
};

static OPEN: Mutex<Vec<File>> = Mutex::new(Vec::new());

/// Opens the device files of these GPUs, and closes the files that were open before. Does nothing
/// in a process without access to the simulator's directory.
pub fn open(gpus: impl IntoIterator<Item = usize>) {
    let path = |gpu| Config::get().dir.join(format!("nvidia{}", place(gpu)));
    let files = gpus.into_iter().filter_map(|gpu| open_shared(&path(gpu)).ok()).collect();
    *OPEN.lock().unwrap_or_else(PoisonError::into_inner) = files;
}

pub fn close() {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner).clear();
}
