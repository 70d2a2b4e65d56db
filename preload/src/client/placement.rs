//! The GPUs that this process sees. The library asks the scheduler once, before the driver reads
//! `CUDA_VISIBLE_DEVICES`. It passes the scheduler's answer to the driver in that variable.

use crate::{
    connection::{
        handshake,
        socket::{self, Socket},
    },
    env::{settings, trace::trace},
    gpu::{identity::Identity, rules},
    sys::{
        c,
        once::{Once, OnceBox},
        sync::{Mutex, Rank},
        time::Instant,
    },
};
use alloc::{boxed::Box, string::String, vec::Vec};
use core::{ffi::CStr, fmt::Write, time::Duration};
use nvshare_wire::{
    ClientMessage, MAX_SLOTS, SchedulerMessage, Uuid,
    client::GpuKind,
    scheduler::NoPlacement,
    visible_devices::{self, Chooser, chooser},
};

/// The longest wait for an answer. After that, the program sees the same GPUs as without nvshare.
const TIMEOUT: Duration = Duration::from_secs(1);

static PLACED: Once = Once::new();

/// The connection that was made for the request, or the reason why none was made. The client's thread
/// takes over the connection.
pub type Connected = Result<handshake::Connected, String>;
/// The GPUs that the library has put into `CUDA_VISIBLE_DEVICES`. Unset if one of them is a MIG slice.
static VISIBLE_GPUS: OnceBox<Vec<Identity>> = OnceBox::new();

static CONNECTED: Mutex<Option<Connected>> = Mutex::new(Rank::EarlyConnection, None);

/// Sets `CUDA_VISIBLE_DEVICES` before the driver is first initialised. Returns `false` if the process
/// must see no GPU.
pub fn request(hello: &ClientMessage) -> bool {
    if settings::get().disabled {
        return true;
    }
    PLACED.run(|| place(hello))
}

/// Requests a placement and applies it. Returns `false` if the process must see no GPU. The next
/// attempt may find a free GPU.
fn place(hello: &ClientMessage) -> bool {
    let list = c::variable(visible_devices::VISIBLE).unwrap_or_default();
    if chooser(c::variable) == Chooser::List && !visible_devices::names_any(list) {
        return true; // no GPU is visible anyway
    }
    let connected = handshake::connect(hello);
    let answer = match &connected {
        Ok((socket, version, _)) => ask(socket, *version),
        Err(_) => PlacementAnswer::Free,
    };
    match answer {
        PlacementAnswer::Free => {}
        PlacementAnswer::Gpus(gpus) => apply(&gpus),
        PlacementAnswer::NoGpu => return false,
    }
    *CONNECTED.lock() = Some(connected);
    true
}

/// Returns the GPUs on which the scheduler has placed this process, or `None` if the scheduler has
/// not placed it.
pub fn visible_gpus() -> Option<impl ExactSizeIterator<Item = Uuid>> {
    VISIBLE_GPUS.get().map(|gpus| gpus.iter().map(Identity::get))
}

/// Updates the GPUs after a possible restore of the process. The environment variable still names
/// the original GPUs: it cannot be changed while threads may read it, and no code of this library
/// reads it again.
pub fn look_again() {
    for (device, identity) in (0..).zip(VISIBLE_GPUS.get().into_iter().flatten()) {
        identity.ask(device);
    }
}

/// Takes the connection that the client's thread uses first. Returns `Some` at most once.
pub fn take_connection() -> Option<Connected> {
    CONNECTED.lock().take()
}

enum PlacementAnswer {
    /// The scheduler leaves the choice to the process, or does not answer.
    Free,
    Gpus(Vec<(Uuid, GpuKind)>),
    NoGpu,
}

fn ask(socket: &Socket, version: u16) -> PlacementAnswer {
    let list = c::variable(visible_devices::VISIBLE).unwrap_or_default();
    let place = ClientMessage::RequestPlacement {
        chooser: chooser(c::variable),
        count: 0,
        bytes: 0,
        devices: devices(),
        ahead: 0,
    };
    let mut messages = visible_devices::parts(list).chain([place]);
    if !messages.all(|message| socket.send(message.encode(version).as_bytes())) {
        return PlacementAnswer::Free;
    }
    let begin = Instant::now();
    let mut gpus = Vec::new();
    while begin.elapsed() < TIMEOUT {
        socket::wait([Some(socket), None], TIMEOUT.saturating_sub(begin.elapsed()));
        match socket.receive(version) {
            Ok(Some((SchedulerMessage::Placed { at, of, uuid, kind }, _))) => {
                if at as usize != gpus.len() || !(1..=MAX_SLOTS).contains(&of) {
                    return PlacementAnswer::Free;
                }
                gpus.push((uuid, kind));
                if gpus.len() >= of as usize {
                    return PlacementAnswer::Gpus(gpus);
                }
            }
            Ok(Some((SchedulerMessage::Unplaced { outcome, text }, _))) => {
                trace!("not placed: {outcome:?} {}", text.as_str());
                return if outcome == NoPlacement::NoGpu { PlacementAnswer::NoGpu } else { PlacementAnswer::Free };
            }
            Ok(Some((SchedulerMessage::Remark { text }, _))) => trace!("{}", text.as_str()),
            // The program may ask for these values immediately after CUDA has been initialised.
            Ok(Some((SchedulerMessage::GpuRules { uuid, memory_max, permissions }, _))) => {
                rules::limit(uuid, memory_max);
                rules::permit(uuid, permissions);
            }
            // The scheduler sends other messages only after this client has attached a GPU.
            Ok(_) => {}
            Err(_) => return PlacementAnswer::Free,
        }
    }
    trace!("not placed: the scheduler does not answer");
    PlacementAnswer::Free
}

fn apply(gpus: &[(Uuid, GpuKind)]) {
    let mut list = String::new();
    for (uuid, kind) in gpus {
        let kind = if *kind == GpuKind::Mig { "MIG" } else { "GPU" };
        let comma = if list.is_empty() { "" } else { "," };
        let _ = write!(list, "{comma}{kind}-{uuid}");
    }
    trace!("placed: {list}");
    if gpus.iter().all(|(_, kind)| *kind == GpuKind::Gpu) {
        let _ = VISIBLE_GPUS.set(Box::new(gpus.iter().map(|(uuid, _)| Identity::new(*uuid)).collect()));
    }
    c::set_environment(visible_devices::VISIBLE, list.as_bytes());
}

/// Returns one bit for each GPU whose device file this process can open. In a container only some may
/// be accessible.
fn devices() -> u64 {
    use rustix::fs::{Access, access};
    let can_open = |number: &u32| {
        let mut path = String::new();
        let is_whole = write!(path, "/dev/nvidia{number}\0").is_ok();
        let path = CStr::from_bytes_with_nul(path.as_bytes()).ok().filter(|_| is_whole);
        path.is_some_and(|path| access(path, Access::READ_OK | Access::WRITE_OK).is_ok())
    };
    (0..u64::BITS).filter(can_open).fold(0, |set, number| set | 1 << number)
}
