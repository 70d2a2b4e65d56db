//! `nvsharectl migrate`, `drain` and `undrain`: move programs to another GPU, or empty a GPU.

use super::progress::{LOOK, Progress};
use super::{CtlError, Target, block_on, driver, password, pause};
use crate::bus::{Client, Gpu, GpuUse, SchedulerProxy};
use crate::config::units;

/// Migrates programs to another GPU, one after the other. Returns once all programs have arrived.
///
/// # Errors
/// The program does not exist, or a process was not migrated.
pub fn migrate(target: &Target, program: &str, gpu: &str) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        for pid in pause::pids(&scheduler, program).await? {
            let arguments = (pid, gpu);
            let moves = password::call::<()>(&scheduler, "Migrate", &arguments);
            let mut moves = std::pin::pin!(moves);
            let mut progress = Progress::new();
            loop {
                tokio::select! {
                    moved = &mut moves => break moved?,
                    () = tokio::time::sleep(LOOK), if progress.is_shown() => {
                        let clients = scheduler.list_clients().await.unwrap_or_default();
                        let client = clients.iter().find(|client| client.pid == pid && !client.moving.is_empty());
                        progress.show(&client.map_or_else(String::new, |client| format!("{pid}: {}", step(client))));
                    }
                }
            }
        }
        Ok(())
    })
}

/// Drains a GPU. Returns the text to print once all movable programs have left the GPU.
///
/// # Errors
/// The GPU does not exist, or programs stay on the GPU.
pub fn drain(target: &Target, gpu: &str) -> Result<String, CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        password::call::<()>(&scheduler, "Drain", &(gpu,)).await?;
        let mut progress = Progress::new();
        loop {
            let there = There::look(&scheduler, gpu).await?;
            if there.leave.is_empty() {
                progress.show("");
                return there.result(gpu);
            }
            let steps = there.leave.iter().map(|client| format!("{}: {}", client.pid, step(client)));
            progress.show(&steps.collect::<Vec<_>>().join("; "));
            tokio::time::sleep(LOOK).await;
        }
    })
}

/// Undrains a GPU.
///
/// # Errors
/// The GPU does not exist.
pub fn undrain(target: &Target, gpu: &str) -> Result<(), CtlError> {
    block_on(async {
        let scheduler = target.connect().await?;
        Ok(password::call::<()>(&scheduler, "Undrain", &(gpu,)).await?)
    })
}

/// Describes the progress of a program that is leaving its GPU.
fn step(client: &Client) -> String {
    let sum = |of: fn(&GpuUse) -> u64| client.gpus.iter().map(of).fold(0u64, u64::saturating_add);
    let (resident, swapped) = (sum(|usage| usage.resident), sum(|usage| usage.swapped));
    match client.sleep.as_str() {
        "preparing" if resident > 0 => {
            format!(
                "evicting its memory, {} of {}",
                units::size(swapped),
                units::size(resident.saturating_add(swapped))
            )
        }
        "awake" => "finishing its work".into(),
        "preparing" => "evicting its memory".into(),
        "checkpointing" => "taking it off the GPU".into(),
        "sleeping" | "waking" => "waiting for free memory".into(),
        "restoring" => "restoring it".into(),
        _ => "determining its state".into(),
    }
}

/// The programs that are still on a draining GPU.
#[derive(Debug, Default)]
struct There {
    leave: Vec<Client>,
    asleep: Vec<Client>,
    stay: Vec<Client>,
}

impl There {
    async fn look(scheduler: &SchedulerProxy<'_>, gpu: &str) -> Result<Self, CtlError> {
        let gpus = scheduler.list_gpus().await?;
        let is_meant = |listed: &&Gpu| {
            let index = listed.index.map(|index| index.to_string());
            gpu.is_empty() || listed.uuid.eq_ignore_ascii_case(gpu) || index.as_deref() == Some(gpu)
        };
        match gpus.iter().find(is_meant) {
            Some(listed) if listed.drained => Ok(Self::of(scheduler.list_clients().await?, &listed.uuid)),
            Some(_) => Err(CtlError::Failed("cannot drain the GPU: another command has undrained it".into())),
            None => Ok(Self::default()), // the GPU is gone
        }
    }

    fn of(clients: Vec<Client>, uuid: &str) -> Self {
        let mut there = Self::default();
        // A client that waits for a context has no memory on the GPU.
        let is_there = |client: &Client| client.gpus.iter().any(|at| at.uuid == uuid && at.state != "attaching");
        for client in clients.into_iter().filter(is_there) {
            let list = match client.sleep.as_str() {
                "sleeping" | "lost" if client.moving.is_empty() => &mut there.asleep,
                "awake" if !client.sleep_obstacle.is_empty() => &mut there.stay,
                _ => &mut there.leave,
            };
            list.push(client);
        }
        there
    }

    fn result(&self, gpu: &str) -> Result<String, CtlError> {
        let lines = |clients: &[Client], why: fn(&Client) -> String| {
            let line = |client: &Client| format!("{}{}\n", driver::line(client).trim_end(), why(client));
            clients.iter().map(line).collect::<String>()
        };
        let mut text = String::new();
        if !self.asleep.is_empty() {
            text += "These programs sleep until the GPU is undrained. End them before you load another version of the \
                driver:\n";
            text += &lines(&self.asleep, |_| String::new());
        }
        if self.stay.is_empty() {
            return Ok(format!(
                "No program is on the GPU. New programs cannot use it until `nvsharectl undrain {gpu}`.\n{text}"
            ));
        }
        let stay = lines(&self.stay, |client| format!(": {}", client.sleep_obstacle));
        Err(CtlError::Failed(format!(
            "cannot drain the GPU: these programs can neither move nor sleep. The scheduler retries them \
             periodically:\n{stay}{text}"
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_names_the_evicted_bytes() {
        let usage = GpuUse { resident: 3 << 30, swapped: 1 << 30, ..GpuUse::default() };
        let mut client = Client { sleep: "preparing".into(), gpus: vec![usage], ..Client::default() };
        assert_eq!(step(&client), "evicting its memory, 1 GiB of 4 GiB");
        client.sleep = "checkpointing".into();
        assert_eq!(step(&client), "taking it off the GPU");
    }

    #[test]
    fn programs_on_a_drained_gpu_leave_sleep_or_stay() {
        let client = |pid: u32, sleep: &str, obstacle: &str| Client {
            id: pid.into(),
            pid,
            name: "python".into(),
            sleep: sleep.into(),
            sleep_obstacle: obstacle.into(),
            gpus: vec![GpuUse { uuid: "GPU-1".into(), state: "idle".into(), ..GpuUse::default() }],
            ..Client::default()
        };
        let elsewhere = Client { gpus: Vec::new(), ..client(9, "awake", "") };
        let mut waits = client(8, "awake", "");
        waits.gpus[0].state = "attaching".into();
        let moves = Client { moving: "GPU-2".into(), ..client(4, "sleeping", "") };
        let all = vec![client(1, "awake", ""), client(2, "sleeping", ""), moves, elsewhere, waits];
        let there = There::of(all, "GPU-1");
        let pids = |clients: &[Client]| clients.iter().map(|client| client.pid).collect::<Vec<_>>();
        assert_eq!((pids(&there.leave), pids(&there.asleep), pids(&there.stay)), (vec![1, 4], vec![2], vec![]));
        let text = there.result("0").expect("nobody stays");
        assert!(text.contains("undrain 0") && text.ends_with("  python (process 2)\n"), "{text}");
        let there = There::of(vec![client(3, "awake", "it is in a gang")], "GPU-1");
        let text = there.result("0").expect_err("one stays").to_string();
        assert!(text.contains("  python (process 3): it is in a gang\n"), "{text}");
    }
}
