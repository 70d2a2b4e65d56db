//! `nvshare-device-plugin --probe`: checks whether the running plugin answers and kubelet has
//! registered it. The probe uses gRPC's health protocol on the plugin's socket, so that other tools
//! can query the plugin, too.
//!
//! `--ready` also checks whether containers can get slots, and whether the scheduler has problems.
//! `--ready` prints the reasons, which the health protocol cannot express.

use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshare_kubernetes::scheduler::connect;
use tokio::time::timeout;
use tonic::transport::{Channel, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::plugin::block_on;
use crate::registration::causes;
use crate::server::WHOLE_SERVER;
use crate::status::StatusRequest;
use crate::status::status_client::StatusClient;

/// Timeout of the probe. This timeout is shorter than kubelet's default timeout of one second.
const PATIENCE: Duration = Duration::from_millis(800);

/// Queries the plugin on these sockets, which serve the device plugin API, DRA, or both.
///
/// # Errors
/// No plugin answers on one of the sockets, or kubelet has not registered the plugin.
pub fn probe(sockets: &[PathBuf]) -> Result<(), String> {
    sockets.iter().try_for_each(|socket| {
        ask(socket, async |channel| {
            let answer = HealthClient::new(channel).check(HealthCheckRequest { service: WHOLE_SERVER.into() }).await;
            match answer.map_err(|status| silent(&status))?.into_inner().status() {
                ServingStatus::Serving => Ok(()),
                _ => Err(UNREGISTERED.to_owned()),
            }
        })
    })
}

/// Asks the plugin whether containers can get any GPU, and the scheduler at `control` for its
/// problems.
///
/// # Errors
/// - No plugin answers, or kubelet has not registered the plugin.
/// - The plugin offers no GPU or no healthy GPU. The error names each reason once.
/// - The scheduler has problems.
pub fn ready(sockets: &[PathBuf], control: &Path) -> Result<(), String> {
    gives_gpus(sockets)?;
    let asking = async {
        let (_connection, scheduler) = connect(control).await.ok()?;
        scheduler.problems().await.ok()
    };
    // If the scheduler does not answer, the plugin already reports the GPUs as unhealthy.
    let problems = block_on(async { Ok(timeout(PATIENCE, asking).await.ok().flatten()) })?.unwrap_or_default();
    if problems.is_empty() { Ok(()) } else { Err(problems.join("; ")) }
}

fn gives_gpus(sockets: &[PathBuf]) -> Result<(), String> {
    let mut gpus = Vec::new();
    for socket in sockets {
        let answer = ask(socket, async |channel| {
            let answer = StatusClient::new(channel).read(StatusRequest {}).await;
            Ok(answer.map_err(|status| silent(&status))?.into_inner())
        })?;
        if !answer.registered {
            return Err(UNREGISTERED.to_owned());
        }
        if !answer.problem.is_empty() {
            return Err(answer.problem);
        }
        gpus.extend(answer.gpus);
    }
    if gpus.is_empty() {
        return Err("no GPU is known: the scheduler and NVML list none, or slots is 0 for all".to_owned());
    }
    if gpus.iter().any(|gpu| gpu.problem.is_empty()) {
        return Ok(());
    }
    let mut why: Vec<String> = gpus.into_iter().map(|gpu| gpu.problem).collect();
    why.dedup();
    Err(format!("containers get no GPU: {}", why.join("; ")))
}

const UNREGISTERED: &str = "the plugin runs, but kubelet has not registered it yet";

fn silent(status: &tonic::Status) -> String {
    format!("the plugin cannot report its state: {}", status.message())
}

fn ask<T>(socket: &Path, question: impl AsyncFnOnce(Channel) -> Result<T, String>) -> Result<T, String> {
    let asking = async {
        let unreachable = |e| format!("no plugin answers at {}: {}", socket.display(), causes(&e));
        let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).map_err(unreachable)?;
        question(endpoint.connect().await.map_err(unreachable)?).await
    };
    block_on(async {
        timeout(PATIENCE, asking)
            .await
            .unwrap_or_else(|_| Err(format!("the plugin has not answered for {} ms", PATIENCE.as_millis())))
    })
}
