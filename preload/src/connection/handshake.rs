//! Making a connection: the handshake, and then the limits of the environment and the gangs of the
//! process, which precede all other messages.

use crate::{
    connection::{
        gangs,
        socket::{ANSWER_TIMEOUT, Socket, new_socket, wait, words},
    },
    env::settings,
    sys::{file::Descriptor, time::Instant},
};
use alloc::{format, string::String};
use core::ops::ControlFlow;
use nvshare_wire::{ClientMessage, SchedulerMessage, version};
use rustix::net::SocketAddrUnix;

/// A socket, the protocol version that both sides speak, and this client's id.
pub type Connected = (Socket, u16, u64);

/// Connects, waits for the answer to the handshake, and announces the limits of the environment and the gangs.
///
/// # Errors
/// Returns the reason why connecting failed, in words for the user.
pub fn connect(hello: &ClientMessage) -> Result<Connected, String> {
    let mut attempt = Attempt::begin(hello)?;
    loop {
        attempt = match attempt.look()? {
            ControlFlow::Break(connected) => return Ok(connected),
            ControlFlow::Continue(attempt) => attempt,
        };
        // A signal handler of the program may end the wait early, so the loop repeats it.
        wait([Some(&attempt.socket), None], ANSWER_TIMEOUT.saturating_sub(attempt.since.elapsed()));
    }
}

/// Sends the limits that the program's environment sets, and the gangs of the process. Returns `false` if
/// they could not be sent.
pub fn announce(socket: &Socket, version: u16) -> bool {
    let send = |message: &ClientMessage| socket.wait_for_room() && socket.send(message.encode(version).as_bytes());
    settings::get().limits.iter().all(send) && gangs::announce(send)
}

/// A handshake that waits for its answer.
#[derive(Debug)]
pub struct Attempt {
    socket: Socket,
    since: Instant,
}

impl Attempt {
    /// Connects and introduces this process, without waiting.
    ///
    /// # Errors
    /// Returns the same errors as [`connect`].
    pub fn begin(hello: &ClientMessage) -> Result<Self, String> {
        let address = SocketAddrUnix::new(settings::get().socket).map_err(|_| "the path is too long for a socket")?;
        let socket = new_socket().map_err(words)?;
        rustix::net::connect(&socket, &address).map_err(words)?;
        let socket = Socket(Descriptor::new(socket).ok_or("cannot identify the connected socket")?);
        if !socket.send(hello.encode(0).as_bytes()) {
            return Err("it does not accept messages".into());
        }
        Ok(Self { socket, since: Instant::now() })
    }

    /// A handshake on this socket, which has sent `Hello`.
    #[cfg(test)]
    pub fn after_hello(socket: Socket, since: Instant) -> Self {
        Self { socket, since }
    }

    /// Returns the socket, which is readable when the answer has arrived.
    pub fn socket(&self) -> &Socket {
        &self.socket
    }

    /// Reads the answer, if it has arrived, and then announces the limits of the environment and the gangs. Returns
    /// the attempt while the answer is pending.
    ///
    /// # Errors
    /// Returns the same errors as [`connect`].
    pub fn look(self) -> Result<ControlFlow<Connected, Self>, String> {
        match self.answer()? {
            None if self.since.elapsed() < ANSWER_TIMEOUT => Ok(ControlFlow::Continue(self)),
            None => Err("it does not answer".into()),
            Some((version, _)) if !announce(&self.socket, version) => Err("it does not read messages".into()),
            Some((version, client)) => Ok(ControlFlow::Break((self.socket, version, client))),
        }
    }

    /// Returns the agreed version and this client's id, if the answer has arrived.
    fn answer(&self) -> Result<Option<(u16, u64)>, String> {
        let Some((message, _)) = self.socket.receive(0)? else { return Ok(None) };
        match message {
            SchedulerMessage::Welcome { version: version @ version::MIN..=version::MAX, client } => {
                Ok(Some((version, client)))
            }
            SchedulerMessage::Welcome { version, .. } => {
                Err(format!("it chose protocol {version}, which was not offered"))
            }
            SchedulerMessage::Refused { text, .. } => {
                let text: String = text.as_str().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
                Err(format!("it refuses this program: {text}"))
            }
            _ => Err("it sent an unexpected answer".into()),
        }
    }
}
