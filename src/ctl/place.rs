//! Chooses the GPUs of a command that `nvsharectl run` starts. nvsharectl requests the placement
//! before the command starts, because the command may count GPUs before it initializes CUDA. The
//! request uses the programs' socket, which every user can connect to, even in containers.

use std::ffi::{CStr, OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nvshare_wire::env_limits::{self, LimitName};
use nvshare_wire::scheduler::NoPlacement;
use nvshare_wire::visible_devices::{self, chooser};
use nvshare_wire::{ClientMessage, MAX_LEN, MAX_SLOTS, SchedulerMessage, Text, version};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::CtlError;
use crate::bus;
use crate::config::paths::CLIENTS_SOCKET;
use crate::identity::printable;
use crate::scheduler::GpuId;
use crate::sys::socket::{self, Kind};

/// Timeout for one answer of the scheduler.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The placement requested on the command line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GpuRequest {
    pub gpus: Option<u32>,
    pub memory: Option<u64>,
}

/// Requests the value of `CUDA_VISIBLE_DEVICES` for the command. `None` means that the variable
/// stays unchanged, for instance because no scheduler answers.
///
/// # Errors
/// No GPU satisfies the request.
pub fn ask(request: GpuRequest) -> Result<Option<OsString>, CtlError> {
    let is_off = std::env::var_os("NVSHARE_DISABLE").is_some_and(|value| !value.is_empty() && value != "0");
    if is_off {
        return Ok(None);
    }
    let path = std::env::var_os("NVSHARE_SOCKET").filter(|path| !path.is_empty());
    match PlacementClient::connect(Path::new(path.as_deref().unwrap_or(OsStr::new(CLIENTS_SOCKET)))) {
        Some(client) => client.ask(request),
        None => Ok(None),
    }
}

struct PlacementClient {
    socket: OwnedFd,
    version: u16,
}

impl PlacementClient {
    fn connect(path: &Path) -> Option<Self> {
        let mut client = Self { socket: socket::connect(path, Kind::Packets).ok()?, version: 0 };
        client.send(&ClientMessage::Hello {
            min_version: version::MIN,
            max_version: version::MAX,
            flags: 0,
            resume: 0,
            gang: 0,
            library: Text::new("nvsharectl"),
        })?;
        let SchedulerMessage::Welcome { version, .. } = client.receive()? else { return None };
        client.version = version;
        Some(client)
    }

    fn ask(&self, request: GpuRequest) -> Result<Option<OsString>, CtlError> {
        let Some(mut answer) = self.send_request(request).and_then(|()| self.receive_answer()) else { return Ok(None) };
        let mut names: Vec<String> = Vec::new();
        loop {
            match answer {
                SchedulerMessage::Placed { at, of, uuid, kind }
                    if at as usize == names.len() && (1..=MAX_SLOTS).contains(&of) =>
                {
                    names.push(bus::gpu_name(kind, GpuId(uuid)));
                    if names.len() >= of as usize {
                        return Ok(Some(names.join(",").into()));
                    }
                }
                SchedulerMessage::Unplaced { outcome: NoPlacement::NoGpu, text } => {
                    return Err(CtlError::Failed(format!("cannot place the command on a GPU: {}", text.as_str())));
                }
                SchedulerMessage::Unplaced { outcome: NoPlacement::Free, text } => {
                    if !text.as_str().is_empty() {
                        eprintln!("nvsharectl: {}", printable(text.as_str()));
                    }
                    return Ok(None);
                }
                _ => return Ok(None),
            }
            match self.receive_answer() {
                Some(next) => answer = next,
                None => return Ok(None),
            }
        }
    }

    fn send_request(&self, request: GpuRequest) -> Option<()> {
        let environment = |name: &CStr| std::env::var_os(OsStr::from_bytes(name.to_bytes())).map(OsString::into_vec);
        // Sends the limits that the command's own library will send, too.
        for limit in LimitName::ALL {
            let value = environment(limit.variable()).unwrap_or_default();
            env_limits::parts(limit, &value).try_for_each(|part| self.send(&part))?;
        }
        for part in visible_devices::parts(&environment(visible_devices::VISIBLE).unwrap_or_default()) {
            self.send(&part)?;
        }
        self.send(&ClientMessage::RequestPlacement {
            chooser: chooser(environment),
            count: request.gpus.unwrap_or(0),
            bytes: request.memory.unwrap_or(0),
            devices: devices(),
            ahead: 1,
        })
    }

    fn send(&self, message: &ClientMessage) -> Option<()> {
        socket::send(self.socket.as_fd(), message.encode(self.version).as_bytes()).ok()
    }

    /// Skips messages other than the answer.
    fn receive_answer(&self) -> Option<SchedulerMessage> {
        loop {
            let message = self.receive()?;
            if let SchedulerMessage::Placed { .. } | SchedulerMessage::Unplaced { .. } = message {
                return Some(message);
            }
        }
    }

    fn receive(&self) -> Option<SchedulerMessage> {
        let end = Instant::now() + ANSWER_TIMEOUT;
        let mut readable = [PollFd::new(&self.socket, PollFlags::IN)];
        loop {
            let left = Timespec::try_from(end.checked_duration_since(Instant::now())?).ok()?;
            if poll(&mut readable, Some(&left)).is_ok_and(|count| count > 0) {
                break;
            }
        }
        let mut buffer = [0; MAX_LEN];
        let length = socket::receive(self.socket.as_fd(), &mut buffer, 0, &mut Vec::new()).ok()?;
        SchedulerMessage::decode(buffer.get(..length)?, self.version).ok()
    }
}

/// Returns a bit set of the GPU device files that this process can open. A container may contain
/// only some of the device files.
fn devices() -> u64 {
    let can_open = |number: &u32| {
        let path = format!("/dev/nvidia{number}");
        rustix::fs::access(&path, rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK).is_ok()
    };
    (0..u64::BITS).filter(can_open).fold(0, |set, number| set | 1 << number)
}
