//! Reports of the scheduler. This module asks the scheduler for its GPUs periodically, over the
//! control socket. The scheduler may be silent for a while, because a restart is harmless.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvshare::bus::{self, SchedulerProxy};
use nvshare_kubernetes::scheduler::connect;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};
use tracing::debug;

use super::Report;
use crate::config::Config;
use crate::devices::{SchedulerGpu, SchedulerView};

/// Period of queries. An answer takes less than a millisecond.
const PERIOD: Duration = Duration::from_secs(1);

/// Queries the scheduler until the receiver is dropped.
pub async fn follow(control: PathBuf, config: watch::Receiver<Arc<Config>>, reports: UnboundedSender<Report>) {
    let (mut proxy, mut gpus, mut heard) = (None, Vec::new(), Instant::now());
    loop {
        let patience = config.borrow().health.scheduler_timeout;
        // Even after a long silence, each query has a timeout of at least one period.
        let deadline = (heard + patience).max(Instant::now() + PERIOD);
        let answer = timeout_at(deadline, ask(&control, &mut proxy)).await;
        let silence = match answer {
            Ok(Ok(listed)) => {
                (gpus, heard) = (listed, Instant::now());
                None
            }
            Ok(Err(why)) => Some(why),
            Err(_) => Some(format!("{} does not answer", control.display())),
        };
        if let Some(why) = &silence {
            debug!("cannot query the scheduler: {why}");
            proxy = None;
        }
        let silence =
            silence.map(|why| format!("the scheduler has not answered for {} s or more: {why}", patience.as_secs()));
        // The last answer stays valid until the scheduler has been silent for `scheduler_timeout`.
        if silence.is_none() || heard.elapsed() >= patience {
            let view = SchedulerView { gpus: gpus.clone(), silence };
            if reports.send(Report::Scheduler(view)).is_err() {
                return;
            }
        }
        sleep(PERIOD).await;
    }
}

/// Queries once, over the existing connection or a new one.
async fn ask(control: &Path, proxy: &mut Option<SchedulerProxy<'static>>) -> Result<Vec<SchedulerGpu>, String> {
    let proxy = match proxy {
        Some(proxy) => proxy,
        None => proxy.insert(connect(control).await?.1),
    };
    let gpus = proxy.list_gpus().await.map_err(|e| e.to_string())?;
    let gpu = |gpu: bus::Gpu| SchedulerGpu {
        uuid: gpu.uuid,
        name: gpu.name,
        index: gpu.index,
        total: gpu.total,
        drained: gpu.drained,
    };
    Ok(gpus.into_iter().map(gpu).collect())
}
