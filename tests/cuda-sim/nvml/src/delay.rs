//! Reports memory figures that are `CUDA_SIM_NVML_DELAY` old.

use cuda_sim_gpus::{Config, account::Figures};
use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, Once},
    thread,
    time::{Duration, Instant},
};

/// Interval between stored figures.
const LOOK: Duration = Duration::from_millis(10);

/// The figures of all GPUs, oldest first. Entries older than the delay are dropped, except the
/// newest of them.
static KEPT: Mutex<VecDeque<(Instant, Vec<Figures>)>> = Mutex::new(VecDeque::new());

fn kept() -> MutexGuard<'static, VecDeque<(Instant, Vec<Figures>)>> {
    KEPT.lock().unwrap_or_else(|e| e.into_inner())
}

/// NVML's figures of a GPU.
pub(crate) fn figures(gpu: usize) -> Figures {
    static WATCH: Once = Once::new();
    if Config::get().nvml_delay.is_zero() {
        return Figures::of(gpu);
    }
    WATCH.call_once(|| {
        keep();
        thread::spawn(|| {
            loop {
                thread::sleep(LOOK);
                keep();
            }
        });
    });
    kept().front().and_then(|(_, gpus)| gpus.get(gpu).cloned()).unwrap_or_default()
}

fn keep() {
    let now = (Instant::now(), (0..Config::get().gpus).map(Figures::of).collect());
    let mut kept = kept();
    kept.push_back(now);
    while kept.get(1).is_some_and(|(taken, _)| taken.elapsed() >= Config::get().nvml_delay) {
        kept.pop_front();
    }
}
