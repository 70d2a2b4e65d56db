//! The object as zbus serves it.
//!
//! Calls can take minutes. During a call, zbus holds a read lock on the interface. For a property,
//! zbus also locks `Properties` and the object tree. Readers do not block each other. A writer,
//! however, would wait for all calls in progress, and all later calls would wait for the writer. So
//! the daemon never takes a write lock. [`shared`] ensures that no method takes `&mut self`. The
//! daemon calls neither [`ObjectServer::at`] nor `remove` after it has registered the object. Each
//! admitted call runs in its own task.

use std::collections::HashMap;
use std::sync::Arc;

use tracing::debug;
use zbus::message::{Flags, Header};
use zbus::names::{InterfaceName, MemberName};
use zbus::object_server::{DispatchResult, Interface, SignalEmitter};
use zbus::{BoxDBusError, Connection, Message, ObjectServer, OwnedVariant, Variant, fdo};

use super::object::Object;

/// [`Object`], with the installed XML file as its introspection data. The XML declares how changes of
/// properties are announced.
pub struct Served(pub Arc<Object>);

const XML: &str = include_str!("../../../dbus/org.nvshare.Scheduler1.xml");

#[async_trait::async_trait]
impl Interface for Served {
    fn name() -> InterfaceName<'static> {
        Object::name()
    }

    async fn get(
        &self,
        property: &str,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> Option<Result<OwnedVariant, BoxDBusError>> {
        self.0.get(property, server, connection, header, emitter).await
    }

    async fn get_all(
        &self,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> fdo::Result<HashMap<String, OwnedVariant>> {
        self.0.get_all(server, connection, header, emitter).await
    }

    /// If true, zbus starts a task for each call, even for calls that the daemon refuses. With `false`,
    /// zbus awaits `call`, and `call` starts a task only for admitted calls.
    fn spawn_tasks_for_methods(&self) -> bool {
        false
    }

    fn set<'call>(
        &'call self,
        property: &'call str,
        value: &'call Variant<'_>,
        server: &'call ObjectServer,
        connection: &'call Connection,
        header: Option<&'call Header<'_>>,
        emitter: &'call SignalEmitter<'_>,
    ) -> DispatchResult<'call> {
        match shared(self.0.set(property, value, server, connection, header, emitter)) {
            DispatchResult::Async(set) => DispatchResult::Async(Box::pin(async move {
                let mut place = self.0.callers.admit(header)?;
                self.0.callers.admit_unknown(&mut place, header).await?;
                set.await
            })),
            other => other,
        }
    }

    async fn set_mut(
        &mut self,
        _: &str,
        _: &Variant<'_>,
        _: &ObjectServer,
        _: &Connection,
        _: Option<&Header<'_>>,
        _: &SignalEmitter<'_>,
    ) -> Option<Result<(), BoxDBusError>> {
        None
    }

    fn call<'call>(
        &'call self,
        _: &'call ObjectServer,
        connection: &'call Connection,
        message: &'call Message,
        name: MemberName<'call>,
    ) -> DispatchResult<'call> {
        let mut place = match self.0.callers.admit(Some(&message.header())) {
            Ok(place) => place,
            Err(e) => {
                return DispatchResult::Async(Box::pin(
                    async move { reply_error(connection, message, e.into()).await },
                ));
            }
        };
        let (object, connection, message, name) =
            (self.0.clone(), connection.clone(), message.clone(), name.to_owned());
        tokio::spawn(async move {
            let header = message.header();
            let answered = match object.callers.admit_unknown(&mut place, Some(&header)).await {
                Err(e) => Err(e.into()),
                Ok(()) => match shared(object.call(connection.object_server(), &connection, &message, name.as_ref())) {
                    DispatchResult::Async(answer) => answer.await,
                    _ => Err(fdo::Error::UnknownMethod(format!("there is no method {name}")).into()),
                },
            };
            if let Err(e) = answered
                && let Err(e) = reply_error(&connection, &message, e).await
            {
                debug!("cannot answer a call: {e}");
            }
        });
        DispatchResult::Async(Box::pin(std::future::ready(Ok(()))))
    }

    fn call_mut<'call>(
        &'call mut self,
        _: &'call ObjectServer,
        _: &'call Connection,
        _: &'call Message,
        _: MemberName<'call>,
    ) -> DispatchResult<'call> {
        DispatchResult::NotFound
    }

    fn introspect_to_writer(&self, writer: &mut dyn std::fmt::Write, level: usize) {
        for line in interface(XML).lines() {
            // An error of the writer cannot be reported to the caller.
            let _ = writeln!(writer, "{:level$}{}", "", line.strip_prefix("  ").unwrap_or(line));
        }
    }
}

/// Replies with an error if the caller expects a reply.
async fn reply_error(connection: &Connection, message: &Message, error: BoxDBusError) -> Result<(), BoxDBusError> {
    let header = message.header();
    if header.primary().flags().contains(Flags::NO_REPLY_EXPECTED) {
        return Ok(());
    }
    connection.reply_dbus_error(&header, error).await.map_err(|e| fdo::Error::from(e).into())
}

/// Accepts only methods that take `&self`. Other methods are reported as not found.
fn shared(dispatched: DispatchResult<'_>) -> DispatchResult<'_> {
    match dispatched {
        DispatchResult::RequiresMut => DispatchResult::NotFound,
        other => other,
    }
}

/// The `interface` element of an XML file.
fn interface(xml: &str) -> &str {
    let end = "</interface>";
    let start = xml.find("  <interface ").unwrap_or(0);
    let stop = xml.find(end).map_or(xml.len(), |at| at + end.len());
    xml.get(start..stop).unwrap_or(xml)
}

#[cfg(test)]
mod tests {
    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::config::Config;
    use crate::daemon::bus::Shared;
    use crate::daemon::bus::callers::{Callers, Known};
    use crate::daemon::control::views::Views;
    use crate::daemon::core::Published;
    use crate::daemon::tenants::Budgets;
    use crate::daemon::transport::peer::Process;

    /// The XML without comments and blank lines, as one element per line.
    fn bare(xml: &str) -> Vec<String> {
        let mut rest = xml;
        let mut kept = String::new();
        while let Some((before, after)) = rest.split_once("<!--") {
            kept.push_str(before);
            rest = after.split_once("-->").expect("the comment ends").1;
        }
        kept.push_str(rest);
        kept.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
    }

    #[test]
    fn the_object_implements_the_interface_of_the_xml_file() {
        let (requests, _) = mpsc::unbounded_channel();
        let (_, published) = watch::channel(Published::new(Config::default().settings));
        let budgets = Arc::new(Budgets::new(1));
        let shared = Shared {
            requests,
            views: Views::channel().0,
            bundling: Arc::default(),
            drawing: Arc::default(),
            following: Arc::default(),
            reading_usage: Arc::default(),
            budgets: budgets.clone(),
            published,
            is_visitor: false,
        };
        let callers = Callers::Peer(Known::new(Process::named(0, 0, None), Vec::new(), &budgets));
        let object = Object { shared, callers };
        let mut generated = String::new();
        object.introspect_to_writer(&mut generated, 0);
        // The macro does not know that `announce` announces changes of these properties.
        let silent = "<annotation name=\"org.freedesktop.DBus.Property.EmitsChangedSignal\" value=\"false\"/>";
        let mut written = bare(interface(XML));
        let mut generated: Vec<String> = bare(&generated);
        generated.retain(|line| line != silent);
        // XML has two notations for an element without children.
        for lines in [&mut written, &mut generated] {
            let joined = lines.join("\n").replace(">\n</property>", "/>").replace(">\n</method>", "/>");
            *lines = joined.lines().map(str::to_owned).collect();
            lines.sort();
        }
        assert_eq!(written, generated);
    }
}
