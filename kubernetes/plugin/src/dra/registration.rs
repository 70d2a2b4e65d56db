//! The discovery of the driver by kubelet. kubelet connects to a socket in its directory of
//! plugins, asks for the plugin's type, and reports the result of the registration.

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use super::plugin_registration::registration_server::Registration;
use super::plugin_registration::{DRA_PLUGIN, InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use super::{DRIVER, health, protocol};

/// The registration service for kubelet.
#[derive(Debug)]
pub struct Desk {
    /// The path of the driver's socket.
    pub endpoint: String,
    pub registered: watch::Sender<bool>,
}

#[tonic::async_trait]
impl Registration for Desk {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.into(),
            name: DRIVER.into(),
            endpoint: self.endpoint.clone(),
            supported_versions: vec![protocol::SERVICE.into(), health::SERVICE.into()],
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = request.into_inner();
        match plugin_registered {
            true => info!("kubelet has registered the DRA driver {DRIVER}"),
            false => warn!("kubelet does not register the DRA driver {DRIVER}: {error}"),
        }
        self.registered.send_replace(plugin_registered);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
