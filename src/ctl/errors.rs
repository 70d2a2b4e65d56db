//! Errors as sentences, and their exit codes.

use std::fmt::Display;
use std::path::Path;

/// The directory of the control socket in nvshare's own pod. `kubernetes/base/daemonset.yaml`
/// mounts it.
const CONTROL_IN_POD: &str = "/run/nvshare-control";

#[derive(Debug, thiserror::Error)]
pub enum CtlError {
    /// The scheduler or the system refused the operation. The exit code is 1.
    #[error("{0}")]
    Failed(String),
    /// The scheduler is not running. The exit code is 3.
    #[error("{0}")]
    NotRunning(String),
    /// A command cannot be run. The exit code is 127 if the command does not exist, otherwise 126.
    #[error("cannot run {command}: {error}")]
    CannotRun { command: String, error: std::io::Error },
}

impl CtlError {
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Failed(_) => 1,
            Self::NotRunning(_) => 3,
            Self::CannotRun { error, .. } if error.kind() == std::io::ErrorKind::NotFound => 127,
            Self::CannotRun { .. } => 126,
        }
    }

    pub(super) fn not_running(why: impl Display) -> Self {
        // kubelet sets the variable in every container. Only nvshare's own pod contains the
        // directory.
        let (is_pod, is_own) =
            (std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(), Path::new(CONTROL_IN_POD).is_dir());
        Self::NotRunning(match (is_pod, is_own) {
            (true, false) => {
                "cannot reach the scheduler from this pod. On Kubernetes, an administrator runs `kubectl -n nvshare \
                 exec daemonset/nvshare -c scheduler -- nvsharectl`"
                    .to_owned()
            }
            (true, true) => format!(
                "the scheduler is not running ({why}). Kubelet starts it. See the log of this pod's container \
                 `scheduler`"
            ),
            (false, _) => format!(
                "the scheduler is not running ({why}). As root, start it with `systemctl start nvshare.socket`. To \
                 reach another scheduler, set --control or $NVSHARE_CONTROL"
            ),
        })
    }
}

/// D-Bus errors if the scheduler's name has no owner and cannot be activated.
const NOBODY: [&str; 8] = [
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.NoReply",
    "org.freedesktop.DBus.Error.TimedOut",
    "org.freedesktop.DBus.Error.Spawn.ChildExited",
    "org.freedesktop.DBus.Error.Spawn.Failed",
    "org.freedesktop.systemd1.NoSuchUnit",
    "org.freedesktop.systemd1.UnitMasked",
];

impl From<zbus::Error> for CtlError {
    fn from(error: zbus::Error) -> Self {
        use zbus::DBusError;
        let (name, text) = match &error {
            zbus::Error::MethodError(name, text, _) => (name.to_string(), text.clone()),
            zbus::Error::FDO(fdo) => match &**fdo {
                zbus::fdo::Error::ZBus(inner) => return inner.clone().into(),
                other => (other.name().to_string(), other.description().map(str::to_owned)),
            },
            zbus::Error::InputOutput(e) => return Self::not_running(e),
            _ => return Self::Failed(error.to_string()),
        };
        let text = text.unwrap_or_else(|| name.clone());
        match name.as_str() {
            name if NOBODY.contains(&name) => Self::not_running(text),
            // sudo is suggested only to other users, because root would be refused again.
            "org.freedesktop.DBus.Error.AccessDenied" if !nix::unistd::geteuid().is_root() => {
                Self::Failed(format!("{text} (try it with sudo)"))
            }
            "org.freedesktop.DBus.Error.InteractiveAuthorizationRequired" => {
                Self::Failed(format!("{text} (run nvsharectl on a terminal, or with sudo)"))
            }
            _ => Self::Failed(text),
        }
    }
}

impl From<zbus::fdo::Error> for CtlError {
    fn from(error: zbus::fdo::Error) -> Self {
        zbus::Error::from(error).into()
    }
}
