//! The connection to the scheduler: D-Bus without a bus, on its control socket.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nvshare::bus::SchedulerProxy;
use toml::Value;
use zbus::connection::Builder;
use zbus::proxy::CacheProperties;
use zbus::{Connection, OwnedVariant, Variant};

/// Connects to the scheduler whose control socket is `control`.
///
/// # Errors
/// No scheduler listens on the socket, or the scheduler ends the handshake. The error is a sentence
/// for the log.
pub async fn connect(control: &Path) -> Result<(Connection, SchedulerProxy<'static>), String> {
    let missing = |e: std::io::Error| format!("cannot connect to the scheduler at {}: {e}", control.display());
    let stream = UnixStream::connect(control).map_err(missing)?;
    let proxy = async {
        let connection = Builder::unix_stream(stream).p2p().build().await?;
        let proxy = SchedulerProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
        Ok((connection, proxy))
    };
    proxy.await.map_err(|e: zbus::Error| format!("the scheduler at {} closed the connection: {e}", control.display()))
}

/// The keys of a rule as D-Bus variants.
pub fn variants(keys: &BTreeMap<impl AsRef<str>, Value>) -> HashMap<String, OwnedVariant> {
    let variant = |value: &Value| match value {
        Value::Integer(number) => Some(Variant::I64(*number)),
        Value::Boolean(value) => Some(Variant::Bool(*value)),
        Value::String(text) => Some(Variant::from(text.clone())),
        Value::Array(all) => {
            Some(Variant::from(all.iter().filter_map(Value::as_str).map(str::to_owned).collect::<Vec<String>>()))
        }
        _ => None, // rules of pods have no values of other types
    };
    let owned = |value: &Value| OwnedVariant::try_from(variant(value)?).ok();
    keys.iter().filter_map(|(key, value)| Some((key.as_ref().to_owned(), owned(value)?))).collect()
}
