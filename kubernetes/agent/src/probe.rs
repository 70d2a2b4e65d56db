//! `nvshare-agent --probe`: asks the running agent, on a separate socket, whether its connections
//! are up.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::debug;

use crate::links::Trouble;

/// Timeout of the probe. This timeout is shorter than kubelet's default timeout of one second.
const PATIENCE: Duration = Duration::from_millis(800);

/// The answer if both connections are up.
const WELL: &str = "connected\n";

/// Maximum length of an answer, in bytes.
const LONGEST: u64 = 4096;

/// The socket on which an agent answers probes. Dropping this value removes the socket's file.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    /// Binds the socket. Replaces a socket on which no process listens any more.
    pub fn bind(path: &Path) -> Result<Self, String> {
        if UnixStream::connect(path).is_ok() {
            return Err(format!("another agent answers at {}. Stop it first, or set another --socket", path.display()));
        }
        let made = match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => path.parent().map_or(Ok(()), std::fs::create_dir_all),
        };
        let listener = made.and_then(|()| UnixListener::bind(path));
        let listener = listener.map_err(|e| format!("cannot listen on {}: {e}", path.display()))?;
        Ok(Self { path: path.to_owned(), listener })
    }

    /// Answers each probe with the reasons why the agent's connections are down, or with `WELL`.
    pub async fn serve(&self, links: [watch::Receiver<Trouble>; 2]) {
        loop {
            let mut stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) => {
                    debug!("cannot accept a probe: {e}");
                    tokio::time::sleep(PATIENCE).await;
                    continue;
                }
            };
            let trouble: Vec<String> = links.iter().filter_map(|link| link.borrow().clone()).collect();
            let answer = if trouble.is_empty() { WELL.to_owned() } else { trouble.join("; ") + "\n" };
            // The answer fits in the socket's buffer even if the peer does not read.
            let _ = timeout(PATIENCE, stream.write_all(answer.as_bytes())).await;
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Queries the agent that listens on this socket.
///
/// # Errors
/// No agent answers, or one of the agent's connections is down.
pub fn probe(path: &Path) -> Result<(), String> {
    let silent = |e: io::Error| format!("no agent answers at {}: {e}", path.display());
    let stream = UnixStream::connect(path).map_err(silent)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(silent)?;
    let mut answer = String::new();
    stream.take(LONGEST).read_to_string(&mut answer).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => format!("the agent has not answered for {} ms", PATIENCE.as_millis()),
        _ => silent(e),
    })?;
    if answer == WELL { Ok(()) } else { Err(answer.trim_end().to_owned()) }
}
