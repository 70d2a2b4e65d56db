//! Announces changes of properties, and clients and GPUs that appear or disappear.

use std::collections::HashMap;

use tracing::debug;
use zbus::fdo::Properties;
use zbus::names::InterfaceName;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, Variant};

use super::object::Object;
use super::{Shared, seconds};
use crate::bus;
use crate::config::names;
use crate::daemon::core::Published;

/// Announces each change of a value exactly once, until the connection ends.
pub async fn announce(connection: &Connection, shared: &Shared) {
    let mut published = shared.published.clone();
    let mut before = shared.visible(&published.borrow_and_update());
    loop {
        let changed = tokio::select! {
            () = connection.closed() => return,
            changed = published.changed() => changed,
        };
        if changed.is_err() {
            return connection.closed().await;
        }
        let now = shared.visible(&published.borrow_and_update());
        if let Err(e) = announce_changes(connection, &before, &now).await {
            debug!("cannot announce a change: {e}");
        }
        before = now;
    }
}

async fn announce_changes(connection: &Connection, before: &Published, now: &Published) -> zbus::Result<()> {
    let emitter = SignalEmitter::new(connection, bus::PATH)?;
    for (id, pid) in before.clients.iter().filter(|(id, _)| !now.clients.contains_key(id)) {
        Object::client_removed(&emitter, *id, *pid).await?;
    }
    for (id, pid) in now.clients.iter().filter(|(id, _)| !before.clients.contains_key(id)) {
        Object::client_added(&emitter, *id, *pid).await?;
    }
    for gpu in before.gpus.difference(&now.gpus) {
        Object::gpu_removed(&emitter, gpu).await?;
    }
    for gpu in now.gpus.difference(&before.gpus) {
        Object::gpu_added(&emitter, gpu).await?;
    }
    // The signal omits the state of the GPU.
    let (gone, states) = (before.states.keys().filter(|gpu| !now.states.contains_key(*gpu)), now.states.keys());
    for gpu in states.chain(gone).filter(|gpu| before.states.get(*gpu) != now.states.get(*gpu)) {
        Object::gpu_changed(&emitter, gpu).await?;
    }
    announce_properties(&emitter, before, now).await
}

async fn announce_properties(emitter: &SignalEmitter<'_>, before: &Published, now: &Published) -> zbus::Result<()> {
    let mut changed: HashMap<&str, Variant<'_>> = HashMap::new();
    if now.settings.time_quantum != before.settings.time_quantum {
        changed.insert("TimeQuantum", seconds(now.settings.time_quantum).into());
    }
    if now.settings.max_wait != before.settings.max_wait {
        changed.insert("MaxWait", seconds(now.settings.max_wait).into());
    }
    if now.settings.anti_thrash != before.settings.anti_thrash {
        changed.insert("AntiThrash", names::anti_thrash_name(now.settings.anti_thrash).into());
    }
    if now.settings.policy != before.settings.policy {
        changed.insert("Policy", names::policy_name(now.settings.policy).into());
    }
    if now.problems != before.problems {
        changed.insert("Problems", now.problems.clone().into());
    }
    // The signal omits the new value of `Holders`, because the value changes often, and most
    // listeners do not need it. Listeners that need the value read the property.
    let invalidated: &[&str] = if now.holders == before.holders { &[] } else { &["Holders"] };
    if changed.is_empty() && invalidated.is_empty() {
        return Ok(());
    }
    let name = InterfaceName::try_from(bus::NAME)?;
    Properties::properties_changed(emitter, name, changed, invalidated.into()).await
}
