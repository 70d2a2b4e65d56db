//! Calls that need authorization. On a terminal, polkit may ask for a password; a script is refused at once.

use std::io::IsTerminal;

use zbus::proxy::{CacheProperties, MethodFlags};
use zbus::wire::{DynamicDeserialize, DynamicType};
use zbus::{Proxy, Variant};

use crate::bus::{NAME, SchedulerProxy};

/// Calls a method.
pub(super) async fn call<R>(
    scheduler: &SchedulerProxy<'_>,
    method: &str,
    body: &(impl serde::Serialize + DynamicType),
) -> zbus::Result<R>
where
    R: for<'d> DynamicDeserialize<'d>,
{
    call_at(scheduler.inner(), method, body).await
}

/// Sets a property.
pub(super) async fn set(scheduler: &SchedulerProxy<'_>, property: &str, value: Variant<'_>) -> zbus::Result<()> {
    let scheduler = scheduler.inner();
    let properties: Proxy<'_> = zbus::proxy::Builder::new(scheduler.connection())
        .destination(scheduler.destination())
        .path(scheduler.path())
        .interface("org.freedesktop.DBus.Properties")
        .cache_properties(CacheProperties::No)
        .build()
        .await?;
    call_at(&properties, "Set", &(NAME, property, value)).await
}

async fn call_at<R>(proxy: &Proxy<'_>, method: &str, body: &(impl serde::Serialize + DynamicType)) -> zbus::Result<R>
where
    R: for<'d> DynamicDeserialize<'d>,
{
    let flags = if std::io::stdin().is_terminal() { MethodFlags::ALLOW_INTERACTIVE_AUTH } else { MethodFlags::empty() };
    let reply = proxy.call_with_flags(method, flags, body).await?;
    reply.ok_or_else(|| zbus::Error::Failure("no reply was waited for".into()))
}
