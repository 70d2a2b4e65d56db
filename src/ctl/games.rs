//! `nvsharectl make-room --games`: keeps memory of a GPU free while a game runs, as GameMode says on the session's bus.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::time::Duration;

use tokio::select;
use tokio::time::sleep;
use zbus::export::futures_core::Stream;
use zbus::fdo::DBusProxy;
use zbus::proxy::CacheProperties;

use super::progress::Progress;
use super::room::{Room, RoomRequest};
use super::{CtlError, Target, block_on};

/// Bytes that are kept free unless another size is given: what a game of today needs.
pub const DEFAULT: u64 = 8 << 30;
/// Time between attempts to have a room that was refused or lost, while a game runs.
const RETRY: Duration = Duration::from_secs(10);

/// GameMode's daemon: what this needs of it.
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
    /// The number of games.
    #[zbus(property)]
    fn client_count(&self) -> zbus::Result<i32>;
}

/// Keeps the room whenever a game is registered, until the session's bus goes away.
///
/// # Errors
/// If there is no session bus.
pub fn follow(target: &Target, request: &RoomRequest) -> Result<u8, CtlError> {
    block_on(async {
        let failed = |e: zbus::Error| {
            CtlError::Failed(format!(
                "cannot follow GameMode on the session's bus: {e}. Run this in the session of the games"
            ))
        };
        let session = zbus::connection::Builder::session().build().await.map_err(failed)?;
        // Without a cache, since it is asked only when something happens.
        let games = GameModeProxy::builder(&session).cache_properties(CacheProperties::No).build();
        let games = games.await.map_err(failed)?;
        let bus = DBusProxy::new(&session).await.map_err(failed)?;
        let mut begins = games.receive_game_registered().await.map_err(failed)?;
        let mut ends = games.receive_game_unregistered().await.map_err(failed)?;
        let mut daemons = games.inner().receive_owner_changed().await.map_err(failed)?;
        let mut refused = String::new();
        let mut room: Option<Room> = None;
        loop {
            let plays = plays(&bus, &games).await;
            if !plays {
                (room, refused) = (None, String::new());
            } else if room.is_none() {
                match Room::make(target, request, &mut Progress::new()).await {
                    Ok(made) => room = Some(made),
                    Err(e) => {
                        let why = e.to_string();
                        if why != refused {
                            eprintln!("nvsharectl: {why}; trying again while a game runs");
                            refused = why;
                        }
                    }
                }
            }
            let is_there = select! {
                is_there = next(&mut begins) => is_there,
                is_there = next(&mut ends) => is_there,
                is_there = next(&mut daemons) => is_there,
                () = lost(&mut room) => {
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

/// Whether a game is registered. GameMode is not started for this question.
async fn plays(bus: &DBusProxy<'_>, games: &GameModeProxy<'_>) -> bool {
    let name = games.inner().destination().to_owned();
    bus.name_has_owner(name).await.unwrap_or(false) && games.client_count().await.unwrap_or(0) > 0
}

/// Waits for the next item. Returns false at the end of the stream.
async fn next(stream: &mut (impl Stream + Unpin)) -> bool {
    let mut stream = pin!(stream);
    poll_fn(|cx| Pin::as_mut(&mut stream).poll_next(cx)).await.is_some()
}

async fn lost(room: &mut Option<Room>) {
    match room {
        Some(room) => room.lasts().await,
        None => std::future::pending().await,
    }
}
