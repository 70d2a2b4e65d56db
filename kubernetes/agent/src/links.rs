//! The state of a connection that the agent needs. Changes of the state are logged, and the probe
//! reports the state.

use tokio::sync::watch;
use tracing::{info, warn};

/// The reason why a connection is down. `None` means that the connection is up.
pub type Trouble = Option<String>;

/// The connection to the API server or the scheduler.
#[derive(Debug)]
pub struct Link {
    /// The name of the peer, as in "the scheduler".
    whom: &'static str,
    state: watch::Sender<Trouble>,
    said: Said,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Said {
    Nothing,
    Up,
    Down,
}

impl Link {
    /// Creates a connection that is down. The receiver receives the connection's state.
    pub fn new(whom: &'static str) -> (Self, watch::Receiver<Trouble>) {
        let (state, followed) = watch::channel(Some(format!("{whom} has not answered yet")));
        (Self { whom, state, said: Said::Nothing }, followed)
    }

    pub fn is_up(&mut self) {
        self.state.send_replace(None);
        if std::mem::replace(&mut self.said, Said::Up) != Said::Up {
            info!("connected to {}", self.whom);
        }
    }

    /// Marks the connection as down. `why` is a whole sentence. Logs only the first reason after
    /// the connection was up.
    pub fn is_down(&mut self, why: String) {
        if std::mem::replace(&mut self.said, Said::Down) != Said::Down {
            warn!("{why}. Retrying");
        }
        self.state.send_replace(Some(why));
    }
}
