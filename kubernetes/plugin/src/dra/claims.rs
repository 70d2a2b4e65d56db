//! The prepared claims. Preparing a claim stores it on disk, creates a CDI device for the container
//! runtime, and sends the claim to the scheduler, which creates the claim's socket. All of this
//! happens before the answer to kubelet. No program of a claim can therefore run without the
//! claim's rule.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use nvshare::bus::{self, SchedulerProxy};
use nvshare::ctl::cdi;
use nvshare_kubernetes::retry::Retry;
use nvshare_kubernetes::scheduler::{connect, variants};
use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt;
use tracing::{debug, info, warn};
use zbus::MessageStream;

use super::claim::Prepared;
use super::store::Store;

/// Timeout for each answer of the scheduler: to a new connection, and to a message. kubelet's own
/// timeout is 45 s.
const ANSWER: Duration = Duration::from_secs(10);

/// Maximum pause between attempts to reach the scheduler.
const RETRY: Duration = Duration::from_secs(2);

/// The claims' directories, and the scheduler's socket.
#[derive(Debug)]
pub struct Places {
    /// The scheduler's control socket.
    pub control: PathBuf,
    /// The directory of the claims' files.
    pub store: PathBuf,
    /// The directory for CDI files.
    pub cdi: PathBuf,
    /// The directory of the claims' sockets, on the host.
    pub sockets: PathBuf,
}

/// All prepared claims, by UID.
#[derive(Debug)]
pub struct Claims {
    places: Places,
    store: Store,
    /// A sender holds the lock while it sends claims, so that the last message always contains the
    /// current state.
    prepared: Mutex<BTreeMap<String, Prepared>>,
}

impl Claims {
    /// Loads the claims that were prepared before the driver started.
    pub fn load(places: Places) -> Self {
        let store = Store::new(places.store.clone());
        let prepared = store.load();
        if !prepared.is_empty() {
            info!("prepared claims: {}", prepared.len());
        }
        Self { places, store, prepared: Mutex::new(prepared) }
    }

    /// Returns the name of a claim's CDI device.
    pub fn cdi_device(uid: &str) -> String {
        format!("{}={uid}", cdi::CLAIM_KIND)
    }

    pub async fn get(&self, uid: &str) -> Option<Prepared> {
        self.prepared.lock().await.get(uid).cloned()
    }

    /// Prepares a claim. For a claim that is already prepared, restores everything that is missing.
    ///
    /// # Errors
    /// The scheduler refuses the rule or does not answer, or a file cannot be written. In these
    /// cases a new claim is not prepared. The error is a sentence.
    pub async fn prepare(&self, claim: Prepared) -> Result<(), String> {
        let mut prepared = self.prepared.lock().await;
        let uid = claim.uid.clone();
        let before = prepared.insert(uid.clone(), claim.clone());
        let done = async {
            let write = |e: std::io::Error| format!("cannot save the claim: {e}");
            self.store.save(&claim).map_err(write)?;
            self.write_cdi(&claim).map_err(write)?;
            match self.tell(&prepared).await?.remove(&uid) {
                Some(why) => Err(format!("the scheduler refuses it: {why}")),
                None => Ok(()),
            }
        };
        let done = done.await;
        if done.is_err() && before.is_none() {
            prepared.remove(&uid);
            self.forget(&uid);
            // Without this message, the scheduler would keep the failed claim until the next
            // change.
            if let Err(why) = self.tell(&prepared).await {
                debug!("{why}");
            }
        }
        done
    }

    /// Undoes [`Self::prepare`]. If the claim is not prepared or the scheduler is not running, this
    /// is not an error. A scheduler that starts later receives the current claims.
    pub async fn unprepare(&self, uid: &str) {
        let mut prepared = self.prepared.lock().await;
        self.forget(uid);
        if prepared.remove(uid).is_some()
            && let Err(why) = self.tell(&prepared).await
        {
            debug!("{why}");
        }
    }

    /// Sends all claims to each scheduler that starts.
    pub async fn keep_told(&self) {
        let mut retry = Retry::up_to(RETRY);
        loop {
            if let Ok(Ok((connection, proxy))) = timeout(ANSWER, connect(&self.places.control)).await {
                let mut end = MessageStream::from(&connection);
                let told = {
                    let prepared = self.prepared.lock().await;
                    // A reboot of the node has removed the CDI files, so they are written again.
                    for claim in prepared.values() {
                        if let Err(e) = self.write_cdi(claim) {
                            warn!("cannot write the CDI file of claim {}: {e}", claim.uid);
                        }
                    }
                    tell(&proxy, &prepared).await
                };
                match told {
                    Ok(refused) => {
                        retry.reset();
                        for (uid, why) in refused {
                            warn!("the scheduler no longer serves claim {uid} and its programs: {why}");
                        }
                        while let Some(Ok(_)) = end.next().await {}
                    }
                    Err(why) => warn!("{why}"),
                }
            }
            sleep(retry.wait()).await;
        }
    }

    async fn tell(&self, prepared: &BTreeMap<String, Prepared>) -> Result<HashMap<String, String>, String> {
        let connecting = timeout(ANSWER, connect(&self.places.control)).await;
        let silent = |_| format!("the scheduler at {} does not answer", self.places.control.display());
        let (_connection, proxy) = connecting.map_err(silent)??;
        tell(&proxy, prepared).await
    }

    fn write_cdi(&self, claim: &Prepared) -> std::io::Result<()> {
        let Prepared { uid, namespace, name, .. } = claim;
        let sockets = self.places.sockets.join(uid);
        let text = cdi::of_claim(uid, &format!("{namespace}/{name}"), &sockets.display().to_string());
        let path = self.cdi_file(uid);
        match std::fs::read(&path) {
            Ok(there) if there == text.as_bytes() => Ok(()),
            _ => cdi::write(&path, text.as_bytes()),
        }
    }

    fn cdi_file(&self, uid: &str) -> PathBuf {
        self.places.cdi.join(format!("nvshare-claim-{uid}.json"))
    }

    fn forget(&self, uid: &str) {
        let removed = match std::fs::remove_file(self.cdi_file(uid)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
        if let Err(e) = removed.and(self.store.remove(uid)) {
            warn!("cannot remove the files of claim {uid}: {e}");
        }
    }
}

/// Sends all claims to the scheduler. Returns the refused claims and the reasons.
async fn tell(
    proxy: &SchedulerProxy<'_>,
    prepared: &BTreeMap<String, Prepared>,
) -> Result<HashMap<String, String>, String> {
    let claim = |claim: &Prepared| bus::Claim {
        uid: claim.uid.clone(),
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        rule: variants(&claim.rule),
    };
    match timeout(ANSWER, proxy.set_claims(prepared.values().map(claim).collect())).await {
        Ok(answer) => answer.map_err(|e| format!("the scheduler does not accept claims: {e}")),
        Err(_) => Err(format!("the scheduler has not answered for {} s", ANSWER.as_secs())),
    }
}
