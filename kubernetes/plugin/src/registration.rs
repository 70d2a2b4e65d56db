//! Registers the plugin with kubelet.

use std::path::Path;
use std::time::Duration;

use tonic::transport::Endpoint;

use crate::protocol::registration_client::RegistrationClient;
use crate::protocol::{RegisterRequest, VERSION};
use crate::server::OPTIONS;
use crate::sockets::{KUBELET, PLUGIN};

/// Timeout of a registration, after which it is tried again. kubelet normally answers immediately.
const PATIENCE: Duration = Duration::from_secs(10);

/// Registers with the kubelet whose socket is in `directory`.
///
/// # Errors
/// The registration fails. The error is a sentence with the reason.
pub async fn register(directory: &Path, resource: &str) -> Result<(), String> {
    let kubelet = directory.join(KUBELET);
    let calling = async {
        let endpoint = Endpoint::try_from(format!("unix://{}", kubelet.display()))?;
        Ok::<_, tonic::transport::Error>(RegistrationClient::new(endpoint.connect().await?))
    };
    let request = RegisterRequest {
        version: VERSION.into(),
        endpoint: PLUGIN.into(),
        resource_name: resource.into(),
        options: Some(OPTIONS),
    };
    let registering = async {
        let unreachable = |e| format!("cannot reach kubelet at {}: {}", kubelet.display(), causes(&e));
        let mut kubelet = calling.await.map_err(unreachable)?;
        kubelet.register(request).await.map_err(|status| {
            format!("kubelet does not register {resource}: {} ({:?})", status.message(), status.code())
        })
    };
    match tokio::time::timeout(PATIENCE, registering).await {
        Ok(done) => done.map(|_| ()),
        Err(_) => Err(format!("kubelet has not answered for {} seconds", PATIENCE.as_secs())),
    }
}

/// Returns the texts of an error and of all its causes.
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut inner = error.source();
    while let Some(cause) = inner {
        text = format!("{text}: {cause}");
        inner = cause.source();
    }
    text
}
