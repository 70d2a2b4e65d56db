//! The signals of a service.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end the program.
#[derive(Debug)]
pub struct Termination {
    terminate: Signal,
    interrupt: Signal,
}

impl Termination {
    /// Waits for SIGTERM or SIGINT.
    pub async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Starts to listen for the signals that end the program, and for SIGHUP, which makes the program
/// reload its configuration.
///
/// # Errors
/// The process cannot listen for signals.
pub fn listen() -> Result<(Termination, Signal), String> {
    let listen = |kind| signal(kind).map_err(|e| format!("cannot listen for signals: {e}"));
    let termination =
        Termination { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? };
    Ok((termination, listen(SignalKind::hangup())?))
}
