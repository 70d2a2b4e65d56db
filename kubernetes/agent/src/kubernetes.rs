//! Reads the pods of a node from the API server, first as a list and then as changes.
//!
//! This module uses kube's requests rather than kube's watcher. The watcher does not report when a
//! failed watch works again, so on a quiet node the agent would not know whether it is connected. A
//! new watch continues where the previous watch ended. If the API server no longer knows the
//! changes since then, all pods are listed again.

use std::time::Duration;

use futures::TryStreamExt;
use kube::api::{ListParams, ObjectList, WatchEvent, WatchParams};
use kube::core::Request;
use kube::core::Status;
use kube::{Client, Error};
use nvshare_kubernetes::api_server::{causes, message};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::links::Link;
use crate::node::Change;
use crate::pod::Pod;
use crate::retry::Retry;

/// The path that lists all pods. A selector restricts the list to the pods of the node.
const PODS: &str = "/api/v1/pods";

/// The API server's status code if a watch cannot continue.
const GONE: u16 = 410;
const UNAUTHORIZED: u16 = 401;
const FORBIDDEN: u16 = 403;

/// Timeout for the beginning of an answer.
const ANSWER: Duration = Duration::from_secs(30);

/// The requested duration of a watch, in seconds. On a quiet watch the API server sends a bookmark
/// about every minute. A watch that is silent for its whole duration is therefore broken.
const WATCH_SECONDS: u32 = 240;
const SILENCE: Duration = Duration::from_secs(WATCH_SECONDS as u64 + 5);

/// Maximum pause before the next attempt.
const RETRY: Duration = Duration::from_secs(30);

/// A watch that has lasted this long counts as working, even without a change.
const LASTING: Duration = Duration::from_secs(10);

/// The reason why a list is no longer valid.
#[derive(Debug)]
enum Over {
    /// The list must be read again.
    Stale,
    /// The API server cannot be reached, or its answer is invalid.
    Failed(String),
    /// The receiver was dropped.
    Unwanted,
}

/// Reads the pods of a node until the receiver is dropped.
pub async fn follow(client: Client, node: &str, changes: mpsc::Sender<Change>, mut link: Link) {
    let selector = format!("spec.nodeName={node}");
    let mut reader = Reader { client, selector, changes, version: String::new(), count: 0 };
    let mut retry = Retry::up_to(RETRY);
    loop {
        match reader.read(&mut link, &mut retry).await {
            Over::Stale => debug!("the watch has expired, listing the pods again"),
            Over::Failed(why) => link.is_down(why),
            Over::Unwanted => return,
        }
        sleep(retry.wait()).await;
    }
}

/// A reader of a node's pods.
struct Reader {
    client: Client,
    selector: String,
    changes: mpsc::Sender<Change>,
    /// The newest resource version.
    version: String,
    /// The number of events.
    count: u64,
}

impl Reader {
    /// Reads a list, and follows its changes.
    async fn read(&mut self, link: &mut Link, retry: &mut Retry) -> Over {
        if let Err(over) = self.list().await {
            return over;
        }
        loop {
            let (began, before) = (Instant::now(), self.count);
            let ended = self.watch(link).await;
            debug!("the watch ended after {} events", self.count - before);
            if self.count > before || began.elapsed() >= LASTING {
                retry.reset();
            }
            if let Err(over) = ended {
                return over;
            }
            sleep(retry.wait()).await;
        }
    }

    async fn list(&mut self) -> Result<(), Over> {
        // Data from the API server's cache suffices, because the watch delivers newer changes.
        let params = ListParams::default().fields(&self.selector).match_any();
        let request = Request::new(PODS).list(&params).map_err(|e| Over::Failed(causes(&e)))?;
        let list: ObjectList<Pod> = match timeout(ANSWER, self.client.request(request)).await {
            Ok(answer) => answer.map_err(|e| failed("list", &e))?,
            Err(_) => return Err(late()),
        };
        self.version = list.metadata.resource_version.unwrap_or_default();
        debug!("listed {} pods, at version {:?}", list.items.len(), self.version);
        self.pass_on(Change::Listed(list.items)).await
    }

    /// Watches from the newest known version on, until the API server ends the watch.
    async fn watch(&mut self, link: &mut Link) -> Result<(), Over> {
        let params = WatchParams::default().fields(&self.selector).timeout(WATCH_SECONDS);
        let request = Request::new(PODS).watch(&params, &self.version).map_err(|e| Over::Failed(causes(&e)))?;
        let stream = match timeout(ANSWER, self.client.request_events::<Pod>(request)).await {
            Ok(answer) => answer.map_err(|e| failed("watch", &e))?,
            Err(_) => return Err(late()),
        };
        link.is_up();
        let mut stream = std::pin::pin!(stream);
        loop {
            let event = match timeout(SILENCE, stream.try_next()).await {
                Ok(Ok(Some(event))) => event,
                Ok(Ok(None)) => return Ok(()),
                Ok(Err(Error::Api(status))) => return Err(refused("watch", &status)),
                // The list is read again, because a new watch from the same version would return
                // the same invalid object.
                Ok(Err(Error::SerdeError(e))) => {
                    return Err(Over::Failed(format!("cannot parse the API server's answer: {e}")));
                }
                Ok(Err(e)) => {
                    debug!("the watch failed: {}", causes(&e));
                    return Ok(());
                }
                Err(_) => {
                    debug!("the watch has been silent for {} s", SILENCE.as_secs());
                    return Ok(());
                }
            };
            self.heed(event).await?;
        }
    }

    async fn heed(&mut self, event: WatchEvent<Pod>) -> Result<(), Over> {
        let (version, change) = match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => {
                (pod.metadata.resource_version.clone(), Some(Change::Applied(pod)))
            }
            WatchEvent::Deleted(pod) => (pod.metadata.resource_version.clone(), Some(Change::Deleted(pod))),
            WatchEvent::Bookmark(bookmark) => (bookmark.metadata.resource_version, None),
            WatchEvent::Error(status) => return Err(refused("watch", &status)),
        };
        self.version = version;
        self.count += 1;
        match change {
            Some(change) => self.pass_on(change).await,
            None => Ok(()),
        }
    }

    async fn pass_on(&self, change: Change) -> Result<(), Over> {
        self.changes.send(change).await.map_err(|_| Over::Unwanted)
    }
}

fn late() -> Over {
    Over::Failed(format!("the API server has not answered for {} s", ANSWER.as_secs()))
}

fn failed(what: &str, error: &Error) -> Over {
    match error {
        Error::Api(status) => refused(what, status),
        Error::Service(e) => Over::Failed(format!("cannot reach the API server: {}", causes(&**e))),
        e => Over::Failed(format!("cannot request pods from the API server: {}", causes(e))),
    }
}

/// Interprets the API server's error status.
fn refused(what: &str, status: &Status) -> Over {
    let message = message(status);
    match status.code {
        GONE => Over::Stale,
        UNAUTHORIZED | FORBIDDEN => Over::Failed(format!(
            "the API server does not allow the agent to {what} pods. Its service account needs \"list\" and \"watch\" \
             ({message})"
        )),
        code => Over::Failed(format!("the API server cannot {what} pods (status {code}): {message}")),
    }
}
