//! Making a connection: the handshake, and the limits of the environment, which come before all other messages.

use crate::{
    connection::socket::{ANSWER_TIMEOUT, Socket, new_socket, wait, words},
    env::settings,
    sys::time::Instant,
};
use alloc::{format, string::String};
use nvshare_wire::{ClientMessage, SchedulerMessage, version};
use rustix::net::SocketAddrUnix;

/// A socket, the protocol version that both sides speak, and the id that the scheduler gave this client.
pub type Connected = (Socket, u16, u64);

/// Connects, shakes hands, and announces the limits of the environment.
///
/// # Errors
/// The reason why there is no connection, in words for the user.
pub fn connect(hello: &ClientMessage) -> Result<Connected, String> {
    let connected = shake_hands(settings::get().socket, hello)?;
    let (socket, version, _) = &connected;
    if !announce_limits(socket, *version) {
        return Err("it does not read".into());
    }
    Ok(connected)
}

/// Tells the scheduler the limits that the program's environment sets. `false` if they could not be sent.
pub fn announce_limits(socket: &Socket, version: u16) -> bool {
    let mut messages = settings::get().limits.messages().iter();
    messages.all(|message| socket.wait_for_room() && socket.send(message.encode(version).as_bytes()))
}

/// Connects and shakes hands. Returns the socket, the agreed version and this client's id.
fn shake_hands(path: &[u8], hello: &ClientMessage) -> Result<(Socket, u16, u64), String> {
    let address = SocketAddrUnix::new(path).map_err(|_| "the path is too long for a socket")?;
    let socket = new_socket().map_err(words)?;
    rustix::net::connect(&socket, &address).map_err(words)?;
    let socket = Socket::new(socket).ok_or("it cannot be told from others")?;
    if !socket.send(hello.encode(0).as_bytes()) {
        return Err("it does not listen".into());
    }
    // A signal handler of the program may end a wait early.
    let begin = Instant::now();
    while !wait([Some(&socket), None], ANSWER_TIMEOUT.saturating_sub(begin.elapsed()))[0]
        && begin.elapsed() < ANSWER_TIMEOUT
    {}
    match socket.receive(0)?.map(|(message, _)| message) {
        Some(SchedulerMessage::Welcome { version: version @ version::MIN..=version::MAX, client }) => {
            Ok((socket, version, client))
        }
        Some(SchedulerMessage::Welcome { version, .. }) => {
            Err(format!("it speaks protocol {version}, which was not offered"))
        }
        Some(SchedulerMessage::Refused { text, .. }) => {
            let text: String = text.as_str().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
            Err(format!("it refuses: {text}"))
        }
        Some(_) => Err("it answers with something else".into()),
        None => Err("it does not answer".into()),
    }
}
