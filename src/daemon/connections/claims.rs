//! A listening socket for each Kubernetes ResourceClaim that is prepared on this node. A claim's
//! allocation is a rule, so the scheduler has to know each program's claim. Control groups identify
//! only pods: the containers of one pod can have different claims, a claim can have several pods,
//! and later pods are not announced to a driver.
//!
//! So each socket has its own directory. Containers that were given the claim have this directory
//! mounted in place of the usual directory, and the library connects as always. Other containers
//! cannot reach the claim's directory. So the socket identifies the claim of a connecting program,
//! whatever the program itself reports.
//!
//! A claim's directory exists until the claim is removed, because running containers have it
//! mounted. After a restart, the daemon reads the existing claims from these directories. So it
//! serves the sockets before the device plugin has sent the claims' rules (`SetClaims`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tokio::task::{JoinHandle, spawn_local};
use tracing::{error, warn};

use super::{Connections, accept};
use crate::bus::is_pod_uid;
use crate::config::paths::CLIENTS_SOCKET;
use crate::daemon::core::Core;
use crate::daemon::core::claims::Claims;
use crate::daemon::core::pods::Refused;
use crate::sys::listen;

/// The sockets of claims, by UID.
pub struct ClaimSockets {
    directory: PathBuf,
    core: Rc<RefCell<Core>>,
    connections: Rc<Connections>,
    open: BTreeMap<String, ClaimSocket>,
}

/// A served socket. Dropping this value removes the socket file but not its directory.
#[derive(Debug)]
struct ClaimSocket {
    path: PathBuf,
    serving: JoinHandle<()>,
}

impl Drop for ClaimSocket {
    fn drop(&mut self) {
        self.serving.abort();
        let _ = std::fs::remove_file(&self.path);
    }
}

impl ClaimSockets {
    /// Opens the sockets of the claims that an earlier daemon left in this directory.
    pub fn new(directory: &Path, core: &Rc<RefCell<Core>>, connections: &Rc<Connections>) -> Self {
        {
            let core = &mut *core.borrow_mut();
            core.containers.serve_claims_in(&core.model, directory);
        }
        let (core, connections) = (core.clone(), connections.clone());
        let mut sockets = Self { directory: directory.into(), core, connections, open: BTreeMap::new() };
        for uid in sockets.directories() {
            if let Err(why) = sockets.open(&uid) {
                warn!("{why}");
            }
        }
        sockets
    }

    /// Replaces all claims. On return, new claims have sockets, and the sockets of removed claims are
    /// closed. Claims whose socket cannot be opened are left out, and returned with the reasons.
    pub fn set(&mut self, mut claims: Claims) -> Refused {
        let mut refused = Refused::new();
        let uids: BTreeSet<String> = claims.uids().map(str::to_owned).collect();
        for uid in &uids {
            if let Err(why) = self.open(uid) {
                claims.remove(uid);
                refused.insert(uid.clone(), why);
            }
        }
        self.open.retain(|uid, _| uids.contains(uid));
        for uid in self.directories().iter().filter(|uid| !uids.contains(*uid)) {
            let _ = std::fs::remove_dir_all(self.directory.join(uid));
        }
        self.core.borrow_mut().change_containers(|known, _| known.set_claims(claims));
        refused
    }

    fn directories(&self) -> Vec<String> {
        let entries = self.directory.read_dir().into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_pod_uid(name)).collect()
    }

    fn open(&mut self, uid: &str) -> Result<(), String> {
        if self.open.get(uid).is_some_and(|socket| socket.path.exists()) {
            return Ok(());
        }
        let name = Path::new(CLIENTS_SOCKET).file_name().unwrap_or_default();
        let directory = self.directory.join(uid);
        let path = directory.join(name);
        let listener = listen::listen_within(&path).map_err(|e| e.to_string())?;
        let core = self.core.borrow();
        core.containers.link_lock_files(&core.model, &directory);
        drop(core);
        let serving = spawn_local(serve(self.core.clone(), listener, self.connections.clone(), uid.to_owned()));
        self.open.insert(uid.to_owned(), ClaimSocket { path, serving });
        Ok(())
    }
}

async fn serve(core: Rc<RefCell<Core>>, listener: OwnedFd, connections: Rc<Connections>, uid: String) {
    if let Err(e) = accept::accept(core, listener, connections, &uid).await {
        error!("cannot accept programs of claim {uid}: {e}");
    }
}
