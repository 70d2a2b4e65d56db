//! `nvsharectl make-room`: keeps memory of a GPU free for programs that do not use nvshare. The
//! memory stays free while a command runs, for a given time, or until nvsharectl is interrupted.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::select;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at, sleep, sleep_until};
use zbus::Variant;

use super::progress::Progress;
use super::{CtlError, Target, block_on, or_never, password};
use crate::bus::RoomFd;
use crate::config::settings::DEFAULT_ROOM;
use crate::config::units;

/// Delay between attempts to obtain a lost room again.
const RETRY: Duration = Duration::from_secs(1);
/// The interval between renewals of a room without a time limit. This interval is much shorter than
/// the room's expiry time.
const RENEWAL: Duration = Duration::from_secs(DEFAULT_ROOM.as_secs() / 3);

/// The requested memory, and the time for which it is kept free.
#[derive(Debug, Clone)]
pub struct RoomRequest {
    pub gpu: String,
    pub bytes: u64,
    /// How long the room is kept. `None` means until this process or its command ends.
    pub lasts: Option<Duration>,
}

/// Keeps the memory free. Returns the command's exit code, or 128 plus the signal that ended the
/// command. Without a command, returns 0 when the time is over.
///
/// # Errors
/// The scheduler refuses the room, or the command cannot be started.
pub fn keep(target: &Target, request: &RoomRequest, command: &[OsString]) -> Result<u8, CtlError> {
    block_on(async {
        let ends = request.lasts.map(|lasts| Instant::now() + lasts);
        let mut room = FreeRoom::make(target, request, &mut Progress::new()).await?;
        let mut command = Running::start(command)?;
        if command.is_none() {
            let until = request
                .lasts
                .map_or("until this command is interrupted".into(), |lasts| format!("for {}", units::duration(lasts)));
            eprintln!("nvsharectl: {} are free, and are kept free {until}", units::size(request.bytes));
        }
        loop {
            select! {
                status = ended(&mut command) => return Ok(exit_code(status)),
                () = or_never(ends.map(sleep_until)) => match command.is_some() {
                    // The scheduler ends the room by itself. The command keeps running.
                    true => return Ok(exit_code(ended(&mut command).await)),
                    false => return Ok(0),
                },
                () = room.lasts() => {}
            }
            // The scheduler ended the room because its time is over.
            if ends.is_some_and(|ends| ends <= Instant::now() + RETRY) {
                or_never(ends.map(sleep_until)).await;
                continue;
            }
            eprintln!("nvsharectl: lost the room, because the scheduler ended or the GPU is gone. Requesting it again");
            let again = RoomRequest { lasts: ends.map(|ends| ends - Instant::now()).map(whole), ..request.clone() };
            room = select! {
                room = FreeRoom::make_again(target, &again) => room,
                status = ended(&mut command) => return Ok(exit_code(status)),
                () = or_never(ends.map(sleep_until)) => continue,
            };
            eprintln!("nvsharectl: {} are free again", units::size(request.bytes));
        }
    })
}

/// Rounds down to whole seconds, but to at least one second.
fn whole(time: Duration) -> Duration {
    Duration::from_secs(time.as_secs().max(1))
}

/// Memory that is kept free until this value is dropped, or the scheduler ends the room.
pub(super) struct FreeRoom {
    socket: UnixStream,
    renewals: Option<Interval>,
}

impl FreeRoom {
    /// Waits until the memory is free.
    pub(super) async fn make(
        target: &Target,
        request: &RoomRequest,
        progress: &mut Progress,
    ) -> Result<Self, CtlError> {
        let RoomRequest { gpu, bytes, lasts } = request;
        let scheduler = target.connect().await?;
        let seconds = lasts.map_or(DEFAULT_ROOM, |lasts| lasts).as_secs();
        let seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
        let options: HashMap<&str, Variant<'_>> = HashMap::from([("for", Variant::from(seconds))]);
        let arguments = (gpu.as_str(), bytes, options);
        let text = format!("waiting until programs have freed {}", units::size(*bytes));
        let asked = password::call::<RoomFd>(&scheduler, "MakeRoom", &arguments);
        let room = OwnedFd::from(progress.during(&text, asked).await?);
        let socket = std::os::unix::net::UnixStream::from(room);
        let socket = socket.set_nonblocking(true).and_then(|()| UnixStream::from_std(socket));
        let socket = socket.map_err(|e| CtlError::Failed(format!("cannot use the room's descriptor: {e}")))?;
        let renewals = lasts.is_none().then(|| {
            let mut renewals = interval_at(Instant::now() + RENEWAL, RENEWAL);
            renewals.set_missed_tick_behavior(MissedTickBehavior::Delay);
            renewals
        });
        Ok(Self { socket, renewals })
    }

    /// Like [`Self::make`], retrying without limit.
    async fn make_again(target: &Target, request: &RoomRequest) -> Self {
        let mut is_told = false;
        loop {
            match Self::make(target, request, &mut Progress::new()).await {
                Ok(room) => return room,
                Err(e) if !std::mem::replace(&mut is_told, true) => eprintln!("nvsharectl: {e}. Retrying"),
                Err(_) => {}
            }
            sleep(RETRY).await;
        }
    }

    /// Renews the room periodically. Returns when the scheduler has ended the room.
    pub(super) async fn lasts(&mut self) {
        let Self { socket, renewals } = self;
        let mut buffer = [0; 16];
        loop {
            let renewal = or_never(renewals.as_mut().map(Interval::tick));
            select! {
                // The socket's buffer never fills, because the scheduler reads each renewal.
                _ = renewal => drop(socket.try_write(b"r")),
                readable = socket.readable() => match readable.and_then(|()| socket.try_read(&mut buffer)) {
                    Ok(1..) => {}
                    Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                    _ => return,
                },
            }
        }
    }
}

/// The running command.
struct Running {
    child: Child,
    /// Signals that the terminal sends both to this process and to the command. This process
    /// ignores these signals, so that the room is kept until the command has ended.
    _ignored: Vec<Signal>,
}

impl Running {
    /// Starts the command without nvshare, even if `/etc/ld.so.preload` names the library.
    fn start(command: &[OsString]) -> Result<Option<Self>, CtlError> {
        let Some((program, arguments)) = command.split_first() else { return Ok(None) };
        let kinds = [SignalKind::interrupt(), SignalKind::quit()];
        let ignored = kinds.into_iter().filter_map(|kind| signal(kind).ok()).collect();
        let child = Command::new(program).args(arguments).env("NVSHARE_DISABLE", "1").spawn();
        let command = || program.to_string_lossy().into_owned();
        let child = child.map_err(|error| CtlError::CannotRun { command: command(), error })?;
        Ok(Some(Self { child, _ignored: ignored }))
    }
}

/// Waits until the command ends. Never returns without a command.
async fn ended(command: &mut Option<Running>) -> Option<ExitStatus> {
    or_never(command.as_mut().map(|running| running.child.wait())).await.ok()
}

fn exit_code(status: Option<ExitStatus>) -> u8 {
    let code = status.and_then(|status| status.code().or_else(|| Some(128 + status.signal()?)));
    u8::try_from(code.unwrap_or(1)).unwrap_or(1)
}
