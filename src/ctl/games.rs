//! `nvsharectl make-room --games`: keeps memory of a GPU free while GameMode reports a game on the
//! session bus.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::select;
use tokio::time::sleep;
use zbus::export::futures_core::Stream;
use zbus::fdo::DBusProxy;
use zbus::proxy::CacheProperties;

use super::progress::Progress;
use super::room::{FreeRoom, RoomRequest};
use super::{CtlError, Target, block_on, or_never};

/// The default size in bytes, which a current game needs.
pub const DEFAULT: u64 = 8 << 30;
/// Delay before a refused or lost room is requested again while a game runs.
const RETRY: Duration = Duration::from_secs(10);

/// The methods of GameMode's D-Bus interface that nvsharectl uses.
#[zbus::proxy(
    interface = "com.feralinteractive.GameMode",
    default_service = "com.feralinteractive.GameMode",
    default_path = "/com/feralinteractive/GameMode"
)]
trait GameMode {
    #[zbus(signal)]
    fn game_registered(&self, pid: i32, path: zbus::wire::ObjectPath<'_>) -> zbus::Result<()>;
    #[zbus(signal)]
    fn game_unregistered(&self, pid: i32, path: zbus::wire::ObjectPath<'_>) -> zbus::Result<()>;
    /// The number of registered games.
    #[zbus(property)]
    fn client_count(&self) -> zbus::Result<i32>;
}

/// Keeps the room while a game is registered. Returns when the session bus closes.
///
/// # Errors
/// The session bus cannot be reached.
pub fn follow(target: &Target, request: &RoomRequest) -> Result<u8, CtlError> {
    block_on(async {
        let failed = |e: zbus::Error| {
            CtlError::Failed(format!(
                "cannot watch GameMode on the session bus: {e}. Run this command in the session of the games"
            ))
        };
        let session = zbus::connection::Builder::session().build().await.map_err(failed)?;
        // The proxy has no cache, because the property is read only after signals.
        let games = GameModeProxy::builder(&session).cache_properties(CacheProperties::No).build();
        let games = games.await.map_err(failed)?;
        let bus = DBusProxy::new(&session).await.map_err(failed)?;
        let mut begins = games.receive_game_registered().await.map_err(failed)?;
        let mut ends = games.receive_game_unregistered().await.map_err(failed)?;
        let mut daemons = games.inner().receive_owner_changed().await.map_err(failed)?;
        let mut refused = String::new();
        let mut room: Option<FreeRoom> = None;
        loop {
            let plays = is_game_running(&bus, &games).await;
            if !plays {
                (room, refused) = (None, String::new());
            } else if room.is_none() {
                match FreeRoom::make(target, request, &mut Progress::new()).await {
                    Ok(made) => room = Some(made),
                    Err(e) => {
                        let why = e.to_string();
                        if why != refused {
                            eprintln!("nvsharectl: {why}. Retrying while a game runs");
                            refused = why;
                        }
                    }
                }
            }
            let is_there = select! {
                is_there = next(&mut begins) => is_there,
                is_there = next(&mut ends) => is_there,
                is_there = next(&mut daemons) => is_there,
                () = or_never(room.as_mut().map(FreeRoom::lasts)) => {
                    room = None;
                    true
                }
                () = sleep(RETRY), if plays && room.is_none() => true,
            };
            if !is_there {
                return Ok(0); // the session has ended
            }
        }
    })
}

/// Returns true if a game is registered. The query does not activate GameMode.
async fn is_game_running(bus: &DBusProxy<'_>, games: &GameModeProxy<'_>) -> bool {
    let name = games.inner().destination().to_owned();
    bus.name_has_owner(name).await.unwrap_or(false) && games.client_count().await.unwrap_or(0) > 0
}

/// Waits for the next item. Returns false at the end of the stream.
async fn next(stream: &mut (impl Stream + Unpin)) -> bool {
    let mut stream = pin!(stream);
    poll_fn(|cx| Pin::as_mut(&mut stream).poll_next(cx)).await.is_some()
}
