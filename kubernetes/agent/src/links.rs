//! Whether somebody the agent needs is there: said in the log when that changes, and known to the probe.

use tokio::sync::watch;
use tracing::{info, warn};

/// What is in the way; `None` once nothing is.
pub type Trouble = Option<String>;

/// The connection to one of them.
#[derive(Debug)]
pub struct Link {
    /// Who it is, as in "the scheduler".
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
    /// Nobody is there yet. What is returned besides follows it.
    pub fn new(whom: &'static str) -> (Self, watch::Receiver<Trouble>) {
        let (state, followed) = watch::channel(Some(format!("{whom} has not answered yet")));
        (Self { whom, state, said: Said::Nothing }, followed)
    }

    pub fn is_up(&mut self) {
        self.state.send_replace(None);
        if std::mem::replace(&mut self.said, Said::Up) != Said::Up {
            info!("{} is there", self.whom);
        }
    }

    /// `why` is a whole sentence. It is said once, whatever else is in the way until it is over.
    pub fn is_down(&mut self, why: String) {
        if std::mem::replace(&mut self.said, Said::Down) != Said::Down {
            warn!("{why}; it is tried again until that works");
        }
        self.state.send_replace(Some(why));
    }
}
