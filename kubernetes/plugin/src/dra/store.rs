//! The prepared claims on disk. The claims' programs keep running while the driver restarts, and
//! the new driver sends the stored claims to the scheduler.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use nvshare::bus::is_pod_uid;
use nvshare::ctl::cdi;
use tracing::warn;

use super::claim::Prepared;

/// A directory with a file for each claim.
#[derive(Debug)]
pub struct Store(PathBuf);

impl Store {
    pub fn new(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Reads all claims, by UID. Unreadable files are logged and skipped, because kubelet prepares
    /// the claim again before another container uses it.
    pub fn load(&self) -> BTreeMap<String, Prepared> {
        let entries = self.0.read_dir().into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "json"));
        let read = |path: PathBuf| {
            let claim = std::fs::read(&path).and_then(|text| Ok(serde_json::from_slice::<Prepared>(&text)?));
            let claim = claim.inspect_err(|e| warn!("cannot read the saved claim {}: {e}", path.display())).ok()?;
            is_pod_uid(&claim.uid).then(|| (claim.uid.clone(), claim))
        };
        files.filter_map(read).collect()
    }

    /// Stores a claim.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(&self, claim: &Prepared) -> io::Result<()> {
        cdi::write(&self.path(&claim.uid), serde_json::to_string(claim)?.as_bytes())
    }

    /// Removes a claim.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn remove(&self, uid: &str) -> io::Result<()> {
        match std::fs::remove_file(self.path(uid)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    fn path(&self, uid: &str) -> PathBuf {
        self.0.join(format!("{uid}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prepared_claims_round_trip_through_the_store() {
        let directory = std::env::temp_dir().join(format!("nvshare-plugin-claims-{}", std::process::id()));
        let store = Store::new(directory.clone());
        assert!(store.load().is_empty());
        let rule = [("weight", toml::Value::from(5)), ("gang", true.into()), ("allowed-gpus", vec!["GPU-a"].into())];
        let claim = Prepared {
            uid: "01234567-89ab-cdef-0123-456789abcdef".into(),
            namespace: "team-a".into(),
            name: "half".into(),
            devices: Vec::new(),
            rule: rule.map(|(key, value)| (key.to_owned(), value)).into(),
        };
        store.save(&claim).expect("it is written");
        std::fs::write(directory.join("x.json"), "{").expect("a file");
        assert_eq!(store.load(), BTreeMap::from([(claim.uid.clone(), claim.clone())]));
        store.remove(&claim.uid).and_then(|()| store.remove(&claim.uid)).expect("it is gone");
        assert!(store.load().is_empty());
        std::fs::remove_dir_all(directory).expect("it is removed");
    }
}
