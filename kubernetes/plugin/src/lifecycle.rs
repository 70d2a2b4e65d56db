//! The plugin's registration with kubelet. A restarting kubelet removes the plugin's socket and
//! creates its own socket again. This module creates, serves and registers the plugin's socket, and
//! repeats this whenever kubelet restarts.

use std::path::Path;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::notices::Notices;
use crate::registration::register;
use crate::server::{Facts, Serving};
use crate::sockets::{BindError, Identity, KUBELET, PLUGIN, PluginSocket, SocketState};

/// Interval between checks of the directory if no notice of a change arrives.
const LOOK: Duration = Duration::from_secs(15);

/// Initial timeout for kubelet to watch the plugin's list after the registration.
const UNWATCHED: Duration = Duration::from_secs(10);

/// The first and the longest pause between attempts.
const RETRY_FIRST: Duration = Duration::from_millis(250);
const RETRY_LAST: Duration = Duration::from_secs(30);

/// Serves kubelet until `stopped` is true. Fails if another plugin serves the socket.
pub async fn live(
    directory: &Path,
    resource: &str,
    facts: Facts,
    stopped: watch::Receiver<bool>,
) -> Result<(), BindError> {
    let mut notices = Notices::new(directory);
    let mut trouble = Trouble::default();
    loop {
        let mut end = stopped.clone();
        let (listener, socket) = tokio::select! {
            bound = bind(directory, &mut notices, &mut trouble) => bound?,
            _ = end.wait_for(|stopped| *stopped) => return Ok(()),
        };
        let serving = Serving::start(listener, facts.clone()).await;
        let why = tokio::select! {
            state = stay_registered(directory, resource, &socket, &serving, &mut notices, &mut trouble) => Some(state),
            _ = end.wait_for(|stopped| *stopped) => None,
        };
        // From now on the kernel refuses new connections. Otherwise the stopping server could
        // accept a connection and close it immediately.
        drop(socket);
        serving.stop().await;
        match why {
            None => return Ok(()),
            Some(SocketState::Anothers) => return Err(BindError::Taken(directory.join(PLUGIN))),
            Some(_) => info!("the plugin's socket has disappeared: kubelet may have restarted. Creating it again"),
        }
    }
}

/// Creates the socket. Retries after failures.
async fn bind(
    directory: &Path,
    notices: &mut Notices,
    trouble: &mut Trouble,
) -> Result<(UnixListener, PluginSocket), BindError> {
    let mut retry = Retry::default();
    loop {
        match PluginSocket::bind(&directory.join(PLUGIN)) {
            Err(e @ BindError::Failed(..)) => trouble.tell(e.to_string()),
            done => return done,
        }
        tokio::select! {
            () = notices.changed() => {}
            () = sleep(retry.next()) => {}
        }
    }
}

/// Keeps the plugin registered with kubelet while the socket exists. Returns how the socket ended.
async fn stay_registered(
    directory: &Path,
    resource: &str,
    socket: &PluginSocket,
    serving: &Serving,
    notices: &mut Notices,
    trouble: &mut Trouble,
) -> SocketState {
    let kubelet = directory.join(KUBELET);
    let mut attention = Attention::new(serving.watchers());
    let mut registered: Option<Identity> = None;
    let mut retry = Retry::default();
    loop {
        match socket.state() {
            SocketState::Ours if serving.is_over() => return SocketState::Gone,
            SocketState::Ours => {}
            other => return other,
        }
        let now = Identity::of(&kubelet);
        if registered.is_some() && registered != now {
            (registered, attention.ignored) = (None, 0);
            serving.set_registered(false).await;
        }
        if registered.is_some()
            && let Some(told) = attention.is_over()
        {
            if let Some(what) = told {
                trouble.tell(what.into());
            }
            registered = None;
            serving.set_registered(false).await;
        }
        match now {
            None => trouble.tell(format!("waiting for kubelet at {}", kubelet.display())),
            Some(_) if registered.is_none() => match register(directory, resource).await {
                Ok(()) => {
                    (registered, retry) = (now, Retry::default());
                    if attention.ignored == 0 {
                        info!("kubelet has registered {resource}");
                        trouble.is_over();
                    }
                    attention.begin();
                    serving.set_registered(true).await;
                }
                Err(why) => trouble.tell(why),
            },
            Some(_) => {}
        }
        let wait = if registered.is_some() { LOOK } else { retry.next() };
        tokio::select! {
            () = notices.changed() => {}
            () = sleep(wait) => {}
            () = attention.changed(), if registered.is_some() => {}
        }
    }
}

/// Tracks whether kubelet watches the plugin's list after the registration.
#[derive(Debug)]
struct Attention {
    watchers: watch::Receiver<usize>,
    /// The time of the registration or of the end of the last watch. `None` while kubelet watches.
    idle: Option<Instant>,
    /// Whether kubelet has watched the list since it registered the plugin.
    was_watched: bool,
    /// The number of consecutive registrations without a watch.
    ignored: u32,
}

impl Attention {
    fn new(watchers: watch::Receiver<usize>) -> Self {
        Self { watchers, idle: None, was_watched: false, ignored: 0 }
    }

    /// Restarts the timeout after a registration.
    fn begin(&mut self) {
        (self.idle, self.was_watched) = (Some(Instant::now()), false);
        self.look();
    }

    fn look(&mut self) {
        if *self.watchers.borrow_and_update() > 0 {
            (self.idle, self.was_watched, self.ignored) = (None, true, 0);
        } else {
            self.idle.get_or_insert_with(Instant::now);
        }
    }

    /// Returns `None` while kubelet watches the list or the timeout has not expired. Afterwards
    /// returns a message, which is `None` if the message would repeat the previous one.
    fn is_over(&mut self) -> Option<Option<&'static str>> {
        self.look();
        if self.idle?.elapsed() < unwatched(self.ignored) {
            return None;
        }
        if self.was_watched {
            return Some(Some("kubelet does not watch the list of devices, registering the plugin again"));
        }
        self.ignored += 1;
        Some((self.ignored == 1).then_some(
            "kubelet has registered the plugin but does not request its devices. The plugin needs kubelet 1.26 or \
             newer. Registering again at increasing intervals",
        ))
    }

    /// Returns when the state may have changed.
    async fn changed(&mut self) {
        let ended = async |watchers: &mut watch::Receiver<usize>| {
            if watchers.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        match self.idle {
            None => ended(&mut self.watchers).await,
            Some(since) => {
                let left = unwatched(self.ignored).saturating_sub(since.elapsed());
                let _ = timeout(left, ended(&mut self.watchers)).await;
            }
        }
    }
}

/// Returns the timeout for kubelet to watch the list after a registration. The timeout grows with
/// `ignored`, the number of registrations without a watch.
fn unwatched(ignored: u32) -> Duration {
    UNWATCHED * 2u32.pow(ignored.min(5))
}

/// Exponentially growing pauses.
#[derive(Debug, Default)]
struct Retry(Option<Duration>);

impl Retry {
    fn next(&mut self) -> Duration {
        let wait = self.0.map_or(RETRY_FIRST, |last| (last * 2).min(RETRY_LAST));
        self.0 = Some(wait);
        wait
    }
}

/// The current problem. A problem is logged again only after it was solved or after another problem
/// has replaced it.
#[derive(Debug, Default)]
pub struct Trouble(Option<String>);

impl Trouble {
    pub fn tell(&mut self, text: String) {
        if self.0.as_ref() != Some(&text) {
            warn!("{text}");
            self.0 = Some(text);
        }
    }

    fn is_over(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registration_backs_off_while_kubelet_does_not_watch() {
        let seconds = [0, 1, 2, 5, 6, u32::MAX].map(|ignored| unwatched(ignored).as_secs());
        assert_eq!(seconds, [10, 20, 40, 320, 320, 320]);
    }

    #[tokio::test]
    async fn a_watch_by_kubelet_resets_the_registration_backoff() {
        let (count, watchers) = watch::channel(0);
        let mut attention = Attention::new(watchers);
        attention.ignored = 3;
        attention.begin();
        assert_eq!(attention.is_over(), None);
        assert_eq!((attention.was_watched, attention.ignored), (false, 3));
        count.send_replace(1);
        assert_eq!(attention.is_over(), None);
        assert_eq!((attention.was_watched, attention.ignored), (true, 0));
        assert_eq!(attention.idle, None);
    }
}
