//! `nvshare-device-plugin --probe`: whether the plugin that runs answers, and kubelet knows of it. It is gRPC's own health
//! protocol on the plugin's socket, so that other tools can ask as well.

use std::path::Path;
use std::time::Duration;

use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::registration::causes;
use crate::server::WHOLE_SERVER;
use crate::sockets::PLUGIN;

/// Less than kubelet's default timeout of a second.
const PATIENCE: Duration = Duration::from_millis(800);

/// Asks the plugin whose socket is in that directory.
///
/// # Errors
/// If no plugin answers, or it is not registered.
pub fn probe(directory: &Path) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| format!("cannot start: {e}"))?;
    let socket = directory.join(PLUGIN);
    let asking = async {
        let unreachable = |e| format!("no plugin answers at {}: {}", socket.display(), causes(&e));
        let endpoint = Endpoint::try_from(format!("unix://{}", socket.display())).map_err(unreachable)?;
        let mut plugin = HealthClient::new(endpoint.connect().await.map_err(unreachable)?);
        let answer = plugin.check(HealthCheckRequest { service: WHOLE_SERVER.into() }).await;
        let answer = answer.map_err(|status| format!("the plugin cannot say how it is: {}", status.message()))?;
        match answer.into_inner().status() {
            ServingStatus::Serving => Ok(()),
            _ => Err("the plugin runs, and kubelet does not know of it yet".to_owned()),
        }
    };
    runtime.block_on(async {
        tokio::time::timeout(PATIENCE, asking)
            .await
            .unwrap_or_else(|_| Err(format!("the plugin has not answered for {} ms", PATIENCE.as_millis())))
    })
}
