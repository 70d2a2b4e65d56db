//! Sends the node's pods to the scheduler over the scheduler's control socket. The whole list is
//! sent after each change, and to each new scheduler, because a new scheduler knows no pods.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::StreamExt;
use nvshare::bus;
use nvshare_kubernetes::scheduler::connect;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info};
use zbus::MessageStream;

use crate::links::Link;
use crate::node::Told;
use crate::pod_warnings::PodWarnings;
use crate::retry::Retry;

/// Timeouts for the scheduler's answers: to a new connection, and to a message. A restart of the
/// scheduler lasts at most two seconds.
const HANDSHAKE: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(30);

/// Pause between attempts. The pause is short, because attempts are cheap, and the scheduler knows
/// no pods' names until an attempt succeeds.
const RETRY: Duration = Duration::from_secs(2);

/// Sending takes at most one `SHARE`th of the time, even if pods change constantly.
const SHARE: u32 = 10;

/// Sends each new list, until the sender of lists is dropped.
pub async fn tell(control: PathBuf, mut told: watch::Receiver<Told>, mut link: Link) {
    let (mut retry, mut warnings) = (Retry::up_to(RETRY), PodWarnings::default());
    loop {
        match serve(&control, &mut told, &mut link, &mut retry, &mut warnings).await {
            Ok(()) => return,
            Err(why) => link.is_down(why),
        }
        sleep(retry.wait()).await;
    }
}

/// Sends the pods to one scheduler while the connection lasts. Returns an error at the end of the
/// connection, or `Ok` after the last change.
async fn serve(
    control: &Path,
    told: &mut watch::Receiver<Told>,
    link: &mut Link,
    retry: &mut Retry,
    warnings: &mut PodWarnings,
) -> Result<(), String> {
    let connecting = timeout(HANDSHAKE, connect(control)).await;
    let (connection, proxy) =
        connecting.map_err(|_| format!("the scheduler at {} does not answer", control.display()))??;
    let mut end = MessageStream::from(&connection);
    let mut is_first = true;
    loop {
        let pods = told.borrow_and_update().clone();
        let began = Instant::now();
        if let Some(pods) = pods {
            let refused = tokio::select! {
                answer = timeout(ANSWER, proxy.set_pods(pods.to_vec())) => match answer {
                    Ok(Ok(refused)) => refused,
                    Ok(Err(e)) => return Err(format!("the scheduler rejects the list of pods: {}", plain(&e))),
                    Err(_) => return Err(format!("the scheduler has not answered for {} s", ANSWER.as_secs())),
                },
                () = is_over(&mut end) => return Err(gone(control)),
            };
            warn_of_refused(&pods, refused, warnings);
            if std::mem::take(&mut is_first) {
                info!("the scheduler knows {} pods of this node", pods.len());
            }
            debug!("sent {} pods to the scheduler in {} ms", pods.len(), began.elapsed().as_millis());
            retry.reset();
        }
        link.is_up();
        let next = async {
            sleep(began.elapsed() * SHARE).await;
            told.changed().await.is_ok()
        };
        tokio::select! {
            is_more = next => if !is_more { return Ok(()) },
            () = is_over(&mut end) => return Err(gone(control)),
        }
    }
}

/// Returns when the connection has ended. Other code handles the connection's messages.
async fn is_over(messages: &mut MessageStream) {
    while let Some(Ok(_)) = messages.next().await {}
}

fn gone(control: &Path) -> String {
    format!("lost the connection to the scheduler at {}", control.display())
}

/// The message of an error, without its D-Bus name.
fn plain(error: &zbus::Error) -> String {
    match error {
        zbus::Error::MethodError(name, None, _) => name.to_string(),
        zbus::Error::MethodError(_, Some(text), _) => text.clone(),
        other => other.to_string(),
    }
}

/// Logs the pods whose rules the scheduler refuses.
fn warn_of_refused(pods: &[bus::Pod], refused: HashMap<String, String>, warnings: &mut PodWarnings) {
    let by_uid: BTreeMap<&str, &bus::Pod> = pods.iter().map(|pod| (pod.uid.as_str(), pod)).collect();
    warnings.keep(|uid| by_uid.contains_key(uid));
    for (uid, why) in refused {
        let Some(pod) = by_uid.get(uid.as_str()) else { continue };
        let name = format!("{}/{}", pod.namespace, pod.name);
        warnings.log(&uid, &name, &format!("the scheduler refuses its rule: {why}"));
    }
}
