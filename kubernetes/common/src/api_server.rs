//! Finds the API server, and describes the API server's errors.

use std::path::Path;
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Client, Config};

/// Timeout for connecting.
const CONNECT: Duration = Duration::from_secs(5);

/// Maximum length of the API server's messages, in characters.
const LONGEST: usize = 400;

/// Finds the API server by `kubeconfig` or by the environment of a pod.
///
/// # Errors
/// The file cannot be used, or this process is not in a pod.
pub async fn client(kubeconfig: Option<&Path>) -> Result<Client, String> {
    let mut config = match kubeconfig {
        Some(path) => {
            let wrong = |e: &dyn std::error::Error| format!("cannot use {}: {}", path.display(), causes(e));
            let file = Kubeconfig::read_from(path).map_err(|e| wrong(&e))?;
            let options = KubeConfigOptions::default();
            Config::from_custom_kubeconfig(file, &options).await.map_err(|e| wrong(&e))?
        }
        None => Config::incluster().map_err(|e| {
            format!(
                "this process does not run in a Kubernetes pod: {}. Use --kubeconfig to name an API server",
                causes(&e)
            )
        })?,
    };
    config.connect_timeout = Some(CONNECT);
    // kube does not retry by itself, because the callers retry and log each failure.
    config.default_retry = false;
    Client::try_from(config).map_err(|e| format!("cannot create an API server client: {}", causes(&e)))
}

/// Returns the API server's message as one line. Control characters are replaced, because the
/// message may quote a request.
pub fn message(status: &Status) -> String {
    status.message.chars().map(|c| if c.is_control() { '?' } else { c }).take(LONGEST).collect()
}

/// Returns an error and its causes in one line, without repetitions.
pub fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let said = next.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = next.source();
    }
    text
}
