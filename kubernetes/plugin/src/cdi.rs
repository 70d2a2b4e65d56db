//! Checks that containers get the CDI devices that the plugin promises. A CDI file on the node must
//! name each device, and containerd must heed CDI files. For other runtimes and unreadable
//! settings, the module assumes that the runtime heeds CDI files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use nvshare::ctl::cdi::specs;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::sleep;
use tracing::warn;

use crate::health::Report;
use crate::{containerd, names::quoted};

/// Period of checks. The files change only a few times a year, but pods wait for each change.
const LOOK: Duration = Duration::from_secs(2);

/// The paths to check.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The directories of CDI files.
    pub directories: Vec<PathBuf>,
    /// containerd's settings, which may be missing.
    pub containerd: PathBuf,
}

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CdiView {
    /// The names of devices, by their kind.
    devices: BTreeMap<String, BTreeSet<String>>,
    /// The searched directories, for messages.
    searched: String,
    /// The reason why the runtime ignores CDI files.
    ignored: Option<String>,
}

impl CdiView {
    /// Reads the files.
    pub fn read(paths: &Paths) -> Self {
        let mut devices: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        for file in paths.directories.iter().flat_map(|directory| specs::files(directory)) {
            // Runtimes also skip invalid files.
            let Ok(spec) = specs::parse(&file) else { continue };
            let names = specs::devices(&spec).map(str::to_owned);
            devices.entry(specs::kind(&spec).to_owned()).or_default().extend(names);
        }
        let searched: Vec<String> = paths.directories.iter().map(|path| path.display().to_string()).collect();
        Self { devices, searched: searched.join(" or "), ignored: containerd::ignores_cdi(&paths.containerd) }
    }

    /// Returns true if a CDI file names the device.
    pub fn names(&self, kind: &str, uuid: &str) -> bool {
        self.devices.get(kind).is_some_and(|names| names.contains(uuid))
    }

    /// Returns the reason why a container would not get the device.
    pub fn problem(&self, kind: &str, uuid: &str) -> Option<String> {
        self.ignored.clone().or_else(|| self.unnamed(kind, uuid))
    }

    /// Returns the reason if no CDI file names the device.
    pub fn unnamed(&self, kind: &str, uuid: &str) -> Option<String> {
        let device = || quoted(&format!("{kind}={uuid}"));
        (!self.names(kind, uuid)).then(|| {
            format!(
                "no CDI file in {} names {}. The container \"cdi\" or `nvsharectl cdi generate` writes this file. See \
                 the log of that container or command",
                self.searched,
                device()
            )
        })
    }
}

/// Checks until the receiver is dropped.
pub async fn follow(paths: Paths, reports: UnboundedSender<Report>) {
    let mut before = None;
    loop {
        let now = Stamps::of(&paths);
        if before.as_ref() != Some(&now) {
            if let Some(why) = containerd::unreadable(&paths.containerd) {
                warn!("cannot check whether containerd supports CDI devices: {why}");
            }
            if reports.send(Report::Cdi(CdiView::read(&paths))).is_err() {
                return;
            }
            before = Some(now);
        }
        sleep(LOOK).await;
    }
}

/// The sizes and modification times of the files. If a size or a time changes, the files must be
/// read again.
#[derive(Debug, PartialEq)]
struct Stamps(Vec<(PathBuf, Option<(u64, SystemTime)>)>);

impl Stamps {
    fn of(paths: &Paths) -> Self {
        let specs = paths.directories.iter().flat_map(|directory| specs::files(directory));
        let stamp = |file: PathBuf| {
            let metadata = file.metadata().ok();
            let stamp = metadata.and_then(|metadata| Some((metadata.len(), metadata.modified().ok()?)));
            (file, stamp)
        };
        Self(specs.chain(containerd::files(&paths.containerd)).map(stamp).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cdi_device_is_found_in_any_spec_directory() {
        let directory = std::env::temp_dir().join(format!("nvshare-plugin-cdi-{}", std::process::id()));
        let directories = ["static", "dynamic"].map(|name| directory.join(name));
        let paths = Paths { directories: directories.to_vec(), containerd: directory.join("config.toml") };
        let problem = |uuid: &str| CdiView::read(&paths).problem("nvshare.com/gpu", uuid).unwrap_or_default();
        assert!(problem("GPU-a").contains("names \"nvshare.com/gpu=GPU-a\""), "{}", problem("GPU-a"));
        directories.iter().for_each(|directory| std::fs::create_dir_all(directory).expect("a directory"));
        let spec = |kind: &str, name: &str| {
            format!(r#"{{"cdiVersion": "0.5.0", "kind": "{kind}", "devices": [{{"name": "{name}"}}]}}"#)
        };
        for (at, file, text) in [
            (0, "a.json", spec("nvshare.com/gpu", "GPU-a")),
            (1, "b.yaml", spec("nvshare.com/gpu", "GPU-b")),
            (1, "c.json", spec("nvidia.com/gpu", "GPU-c")),
            (1, "d.json", "{".into()),
            (1, ".e.new", spec("nvshare.com/gpu", "GPU-e")),
        ] {
            std::fs::write(directories[at].join(file), text).expect("a file");
        }
        assert_eq!((problem("GPU-a"), problem("GPU-b")), Default::default());
        assert!(!problem("GPU-c").is_empty() && !problem("GPU-e").is_empty());
        std::fs::write(&paths.containerd, "version = 2").expect("a file");
        assert!(problem("GPU-a").contains("enable_cdi"), "{}", problem("GPU-a"));
        std::fs::remove_dir_all(directory).expect("it is removed");
    }
}
