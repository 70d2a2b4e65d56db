//! Announces changes of properties, and clients and GPUs that appear or disappear.

use std::collections::HashMap;

use tracing::debug;
use zbus::fdo::Properties;
use zbus::names::InterfaceName;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, Variant};

use super::object::Object;
use super::{Followed, Shared, seconds};
use crate::bus;
use crate::config::names;
use crate::daemon::core::{ClientPids, GpuStates, Present};

/// Announces each change of a value exactly once, until the connection ends.
pub async fn announce(connection: &Connection, shared: &Shared) {
    let Followed { mut settings, mut problems, mut holders, mut clients, mut states, mut gpus, attached: _ } =
        shared.followed.clone();
    let mut before = settings.borrow_and_update().clone();
    let mut known = problems.borrow_and_update().clone();
    let mut held = holders.borrow_and_update().clone();
    let mut connected = clients.borrow_and_update().clone();
    let mut present = gpus.borrow_and_update().clone();
    let mut seen = states.borrow_and_update().clone();
    loop {
        let heard = tokio::select! {
            () = connection.closed() => return,
            heard = settings.changed() => heard,
            heard = problems.changed() => heard,
            heard = holders.changed() => heard,
            heard = clients.changed() => heard,
            heard = gpus.changed() => heard,
            heard = states.changed() => heard,
        };
        if heard.is_err() {
            return connection.closed().await;
        }
        let here = clients.borrow_and_update().clone();
        if let Err(e) = announce_clients(connection, &connected, &here).await {
            debug!("cannot announce clients: {e}");
        }
        connected = here;
        let usable = gpus.borrow_and_update().clone();
        if let Err(e) = announce_gpus(connection, &present, &usable).await {
            debug!("cannot announce GPUs: {e}");
        }
        present = usable;
        let states = states.borrow_and_update().clone();
        if let Err(e) = announce_changes(connection, &seen, &states).await {
            debug!("cannot announce a GPU's change: {e}");
        }
        seen = states;
        let now = settings.borrow_and_update().clone();
        let mut changed: HashMap<&str, Variant<'_>> = HashMap::new();
        // The signal omits the new value of `Holders`, because the value changes often, and most
        // listeners do not need it. Listeners that need the value read the property.
        let holds = holders.borrow_and_update().clone();
        let invalidated: &[&str] = if holds == held { &[] } else { &["Holders"] };
        held = holds;
        if now.time_quantum != before.time_quantum {
            changed.insert("TimeQuantum", seconds(now.time_quantum).into());
        }
        if now.max_wait != before.max_wait {
            changed.insert("MaxWait", seconds(now.max_wait).into());
        }
        if now.anti_thrash != before.anti_thrash {
            changed.insert("AntiThrash", names::anti_thrash_name(now.anti_thrash).into());
        }
        if now.policy != before.policy {
            changed.insert("Policy", names::policy_name(now.policy).into());
        }
        before = now;
        let present_problems = problems.borrow_and_update().clone();
        if present_problems != known {
            changed.insert("Problems", present_problems.clone().into());
        }
        known = present_problems;
        if changed.is_empty() && invalidated.is_empty() {
            continue;
        }
        let sent = async {
            let emitter = SignalEmitter::new(connection, bus::PATH)?;
            let name = InterfaceName::try_from(bus::NAME)?;
            Properties::properties_changed(&emitter, name, changed, invalidated.into()).await
        };
        if let Err(e) = sent.await {
            debug!("cannot announce a change: {e}");
        }
    }
}

async fn announce_clients(connection: &Connection, before: &ClientPids, now: &ClientPids) -> zbus::Result<()> {
    let emitter = SignalEmitter::new(connection, bus::PATH)?;
    for (id, pid) in before.iter().filter(|(id, _)| !now.contains_key(id)) {
        Object::client_removed(&emitter, *id, *pid).await?;
    }
    for (id, pid) in now.iter().filter(|(id, _)| !before.contains_key(id)) {
        Object::client_added(&emitter, *id, *pid).await?;
    }
    Ok(())
}

/// Announces the GPUs whose state differs, without the state.
async fn announce_changes(connection: &Connection, before: &GpuStates, now: &GpuStates) -> zbus::Result<()> {
    let emitter = SignalEmitter::new(connection, bus::PATH)?;
    let is_changed = |gpu: &&String| before.get(*gpu) != now.get(*gpu);
    for gpu in now.keys().chain(before.keys().filter(|gpu| !now.contains_key(*gpu))).filter(is_changed) {
        Object::gpu_changed(&emitter, gpu).await?;
    }
    Ok(())
}

async fn announce_gpus(connection: &Connection, before: &Present, now: &Present) -> zbus::Result<()> {
    let emitter = SignalEmitter::new(connection, bus::PATH)?;
    for gpu in before.difference(now) {
        Object::gpu_removed(&emitter, gpu).await?;
    }
    for gpu in now.difference(before) {
        Object::gpu_added(&emitter, gpu).await?;
    }
    Ok(())
}
