//! What this program's environment allows it, said to each scheduler before anything else is. What it means is the
//! scheduler's to say, but for the most memory (`amount`), which holds where there is no scheduler too.

use crate::{settings, socket, socket::Socket, sys::c::environment, trace::trace};
use alloc::{string::String, vec::Vec};
use nvshare_wire::{
    ClientMessage,
    own::{self, OwnTerm},
    version,
};

/// As the environment says it now.
pub fn read() -> Vec<ClientMessage> {
    let said = |term: OwnTerm| own::parts(term, environment(term.variable()).unwrap_or_default());
    OwnTerm::ALL.into_iter().flat_map(said).collect()
}

/// Makes a connection on which that has been said.
pub fn connect(hello: &ClientMessage) -> Result<(Socket, u16, u64), String> {
    let connected = socket::shake_hands(settings::get().socket, hello)?;
    let (socket, version, _) = &connected;
    if !say(socket, *version) {
        return Err("it does not read".into());
    }
    Ok(connected)
}

/// Says it; `false` if that cannot be sent.
pub fn say(socket: &Socket, version: u16) -> bool {
    let all = &settings::get().own;
    if version < version::OWN {
        if !all.is_empty() {
            trace!("the scheduler is too old to hear what the environment allows");
        }
        return true;
    }
    all.iter().all(|message| socket.wait_for_room() && socket.send(message.encode(version).as_bytes()))
}
