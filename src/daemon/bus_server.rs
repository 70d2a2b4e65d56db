//! The D-Bus object, on the bus and on the control socket. It has a thread and a runtime of its own, so that no call
//! of anybody can delay a hand-over; it talks to the scheduling loop through channels.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self as blocking, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime};

use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tracing::{debug, error, info, warn};
use zbus::fdo::{DBusProxy, Properties};
use zbus::message::Header;
use zbus::names::{InterfaceName, MemberName};
use zbus::object_server::{DispatchResult, Interface, SignalEmitter};
use zbus::{BoxDBusError, Connection, Guid, Message, ObjectServer, OwnedVariant, Variant, connection, fdo};

use super::config;
use super::hub::ClientView;
use super::lock::Wish;
use super::socket;
use crate::bus::{self, Error};
use crate::scheduler::{AntiThrash, Settings};

/// How long to wait before the bus is tried again.
const RETRY: Duration = Duration::from_secs(5);
/// Connections to the control socket at a time; more wait.
const MAX_PEERS: usize = 64;
/// A peer that does not finish the handshake in this time is hung up on.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a stopping daemon waits for this thread.
const STOP_PATIENCE: Duration = Duration::from_millis(300);

/// What the object wants of the loop.
#[derive(Debug)]
pub enum Request {
    Clients(oneshot::Sender<Vec<ClientView>>),
    Gpus(oneshot::Sender<Vec<bus::Gpu>>),
    Set(Change, oneshot::Sender<()>),
    Lock(Wish, oneshot::Sender<Result<OwnedFd, Error>>),
    Reload(oneshot::Sender<Result<(), String>>),
    /// Forgets every `Set`.
    Reset(oneshot::Sender<Result<(), String>>),
}

/// A setting that was changed by somebody who may.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    TimeQuantum(Duration),
    MaxWait(Duration),
    AntiThrash(AntiThrash),
}

impl Change {
    pub fn apply(self, settings: &mut Settings) {
        match self {
            Self::TimeQuantum(quantum) => settings.time_quantum = quantum,
            Self::MaxWait(most) => settings.max_wait = most,
            Self::AntiThrash(mode) => settings.anti_thrash = mode,
        }
    }
}

/// Clients that hold the lock of each GPU, by its UUID.
pub type Holders = HashMap<String, Vec<u64>>;

/// The thread that serves the object.
#[derive(Debug)]
pub struct BusServer {
    stop: oneshot::Sender<()>,
    stopped: blocking::Receiver<()>,
}

impl BusServer {
    /// Starts it. What is returned beside it is answered (or dropped) once the bus has been tried for the first time.
    pub fn start(
        bus: Bus,
        control: Option<OwnedFd>,
        requests: mpsc::UnboundedSender<Request>,
        settings: watch::Receiver<Settings>,
        holders: watch::Receiver<Holders>,
    ) -> std::io::Result<(Self, oneshot::Receiver<()>)> {
        let (attempted, first) = oneshot::channel();
        let (stop, asked) = oneshot::channel();
        let (done, stopped) = blocking::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        thread::Builder::new().name("dbus".into()).spawn(move || {
            let shared = Shared { requests, settings, holders };
            LocalSet::new().block_on(&runtime, async {
                if let Some(control) = control {
                    spawn_local(serve_peers(control, shared.clone()));
                }
                spawn_local(serve_bus(bus, shared, attempted));
                let _ = asked.await;
            });
            drop(runtime);
            drop(done);
        })?;
        Ok((Self { stop, stopped }, first))
    }

    /// Leaves the bus and hangs up on the peers.
    pub fn stop(self) {
        let _ = self.stop.send(());
        if self.stopped.recv_timeout(STOP_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            debug!("the D-Bus thread is left behind");
        }
    }
}

/// Which bus to be on.
#[derive(Debug, Clone)]
pub enum Bus {
    None,
    System,
    Address(String),
}

#[derive(Debug, Clone)]
struct Shared {
    requests: mpsc::UnboundedSender<Request>,
    settings: watch::Receiver<Settings>,
    holders: watch::Receiver<Holders>,
}

/// Stays on the bus for as long as there is one, and comes back to it.
async fn serve_bus(bus: Bus, shared: Shared, attempted: oneshot::Sender<()>) {
    let mut attempted = Some(attempted);
    let mut complained = false;
    loop {
        let builder = match &bus {
            Bus::None => return,
            Bus::System => connection::Builder::system(),
            Bus::Address(address) => connection::Builder::address(address.as_str()),
        };
        let object = Object { shared: shared.clone(), callers: Callers::Bus };
        // The name is requested once the object is there: nobody can find the one without the other.
        let connected = builder
            .serve_at(bus::PATH, Served(object))
            .name(bus::NAME)
            .allow_name_replacements(false)
            .replace_existing_names(false)
            .build()
            .await;
        match connected {
            Ok(connection) => {
                info!("on the bus as {}", bus::NAME);
                drop(attempted.take());
                complained = false;
                announce(&connection, &shared).await;
                warn!(name: "bus-gone", "the bus has gone away");
            }
            Err(e) => {
                // No bus is nothing wrong: containers and small systems have none.
                if !std::mem::replace(&mut complained, true) {
                    info!("not on the bus, will try again: {e}");
                }
                drop(attempted.take());
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Serves the control socket: the same object, without a bus between.
async fn serve_peers(listener: OwnedFd, shared: Shared) {
    let listener = match socket::watch(listener) {
        Ok(listener) => listener,
        Err(e) => return error!("there is no control socket: {e}"),
    };
    let places = Arc::new(Semaphore::new(MAX_PEERS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok(mut ready) = listener.readable().await else { return };
        match ready.try_io(|l| socket::accept(l.as_fd())) {
            Ok(Ok(stream)) => {
                let shared = shared.clone();
                spawn_local(async move {
                    if let Err(e) = serve_peer(stream, shared).await {
                        debug!("a control connection ended: {e}");
                    }
                    drop(place);
                });
            }
            Ok(Err(e)) => {
                debug!("cannot accept a control connection: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(_would_block) => {}
        }
    }
}

async fn serve_peer(stream: OwnedFd, shared: Shared) -> zbus::Result<()> {
    let socket::Credentials { uid, pid } = socket::credentials(stream.as_fd())?;
    let object = Object { shared: shared.clone(), callers: Callers::Peer { uid, pid } };
    let build = connection::Builder::unix_stream(UnixStream::from(stream))
        .server(Guid::generate())
        .p2p()
        .serve_at(bus::PATH, Served(object))
        .build();
    let Ok(connection) = tokio::time::timeout(HANDSHAKE_TIMEOUT, build).await else { return Ok(()) };
    announce(&connection?, &shared).await;
    Ok(())
}

/// Says PropertiesChanged once for every real change, until the connection ends.
async fn announce(connection: &Connection, shared: &Shared) {
    let (mut settings, mut holders) = (shared.settings.clone(), shared.holders.clone());
    let mut before = settings.borrow_and_update().clone();
    let mut held = holders.borrow_and_update().clone();
    loop {
        let heard = tokio::select! {
            () = connection.closed() => return,
            heard = settings.changed() => heard,
            heard = holders.changed() => heard,
        };
        if heard.is_err() {
            return connection.closed().await;
        }
        let now = settings.borrow_and_update().clone();
        let mut changed: HashMap<&str, Variant<'_>> = HashMap::new();
        let holds = holders.borrow_and_update().clone();
        if holds != held {
            held.clone_from(&holds);
            changed.insert("Holders", holds.into());
        }
        if now.time_quantum != before.time_quantum {
            changed.insert("TimeQuantum", seconds(now.time_quantum).into());
        }
        if now.max_wait != before.max_wait {
            changed.insert("MaxWait", seconds(now.max_wait).into());
        }
        if now.anti_thrash != before.anti_thrash {
            changed.insert("AntiThrash", bus::anti_thrash_name(now.anti_thrash).into());
        }
        before = now;
        if changed.is_empty() {
            continue;
        }
        let sent = async {
            let emitter = SignalEmitter::new(connection, bus::PATH)?;
            let name = InterfaceName::try_from(bus::NAME)?;
            Properties::properties_changed(&emitter, name, changed, [].as_slice().into()).await
        };
        if let Err(e) = sent.await {
            debug!("cannot announce a change: {e}");
        }
    }
}

fn seconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_secs()).unwrap_or(u32::MAX)
}

/// How the users of callers are known.
#[derive(Debug, Clone, Copy)]
enum Callers {
    /// The bus knows each sender's.
    Bus,
    /// There is one caller only, the peer, and the kernel said who it is.
    Peer { uid: u32, pid: i32 },
}

/// The object as zbus's macro dispatches to it. Every method takes `&self` and waits only for the scheduling loop or
/// the bus daemon, because calls hold the interface's lock while they wait.
struct Object {
    shared: Shared,
    callers: Callers,
}

#[zbus::interface(name = "org.nvshare.Scheduler1", introspection_docs = false)]
impl Object {
    #[zbus(out_args("gpus"))]
    async fn list_gpus(&self) -> Result<Vec<bus::Gpu>, Error> {
        self.ask(Request::Gpus).await
    }

    #[zbus(out_args("clients"))]
    async fn list_clients(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<Vec<bus::Client>, Error> {
        let caller = self.caller(Some(&header), connection).await;
        let clients = self.ask(Request::Clients).await?;
        Ok(clients.into_iter().map(|client| present(client, caller)).collect())
    }

    #[zbus(out_args("lock"))]
    async fn acquire_lock(
        &self,
        gpu: String,
        who: String,
        why: String,
        options: HashMap<String, OwnedVariant>,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<bus::LockFd, Error> {
        if let Some(option) = options.keys().next() {
            return Err(Error::InvalidArgument(format!("there is no option {option:?}")));
        }
        let unknown = || Error::NotAuthorized("cannot tell who wants a lock".into());
        let (uid, pid) = self.process(&header, connection).await.ok_or_else(unknown)?;
        let wish = Wish { gpu, who, why, uid, pid };
        self.ask(|reply| Request::Lock(wish, reply)).await?.map(Into::into)
    }

    async fn reload(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Error> {
        self.authorize(Some(&header), connection, "reload the configuration").await?;
        self.ask(Request::Reload).await?.map_err(Error::InvalidConfiguration)
    }

    async fn reset(
        &self,
        #[zbus(header)] header: Header<'_>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Error> {
        self.authorize(Some(&header), connection, "reset the settings").await?;
        self.ask(Request::Reset).await?.map_err(Error::InvalidConfiguration)
    }

    // `Served` announces changes, by the loop's word that they happened; the macro would announce every call.
    #[zbus(property(emits_changed_signal = "false"))]
    fn time_quantum(&self) -> u32 {
        seconds(self.shared.settings.borrow().time_quantum)
    }

    #[zbus(property)]
    async fn set_time_quantum(
        &self,
        value: u32,
        #[zbus(header)] header: Option<Header<'_>>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Error> {
        self.authorize(header.as_ref(), connection, "change the time quantum").await?;
        let quantum = config::time_quantum(Duration::from_secs(value.into())).map_err(Error::InvalidArgument)?;
        self.ask(|reply| Request::Set(Change::TimeQuantum(quantum), reply)).await
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn max_wait(&self) -> u32 {
        seconds(self.shared.settings.borrow().max_wait)
    }

    #[zbus(property)]
    async fn set_max_wait(
        &self,
        value: u32,
        #[zbus(header)] header: Option<Header<'_>>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Error> {
        self.authorize(header.as_ref(), connection, "change the longest wait").await?;
        let most = config::max_wait(Duration::from_secs(value.into())).map_err(Error::InvalidArgument)?;
        self.ask(|reply| Request::Set(Change::MaxWait(most), reply)).await
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn anti_thrash(&self) -> String {
        bus::anti_thrash_name(self.shared.settings.borrow().anti_thrash).into()
    }

    #[zbus(property)]
    async fn set_anti_thrash(
        &self,
        value: String,
        #[zbus(header)] header: Option<Header<'_>>,
        #[zbus(connection)] connection: &Connection,
    ) -> Result<(), Error> {
        self.authorize(header.as_ref(), connection, "change anti-thrash").await?;
        let mode = bus::parse_anti_thrash(&value).map_err(Error::InvalidArgument)?;
        self.ask(|reply| Request::Set(Change::AntiThrash(mode), reply)).await
    }

    #[zbus(property(emits_changed_signal = "false"))]
    fn holders(&self) -> Holders {
        self.shared.holders.borrow().clone()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> &'static str {
        env!("CARGO_PKG_VERSION")
    }
}

impl Object {
    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<T>) -> Request) -> Result<T, Error> {
        let stopping = || Error::Stopping("the scheduler is stopping".into());
        let (reply, answer) = oneshot::channel();
        self.shared.requests.send(request(reply)).map_err(|_| stopping())?;
        answer.await.map_err(|_| stopping())
    }

    /// The user of whoever sent the message.
    async fn caller(&self, header: Option<&Header<'_>>, connection: &Connection) -> Option<u32> {
        match self.callers {
            Callers::Peer { uid, .. } => Some(uid),
            Callers::Bus => {
                let sender = header?.sender()?.to_owned();
                let bus = DBusProxy::new(connection).await.ok()?;
                bus.get_connection_unix_user(sender.into()).await.ok()
            }
        }
    }

    /// The same with the process; 0 where it is not known.
    async fn process(&self, header: &Header<'_>, connection: &Connection) -> Option<(u32, i32)> {
        match self.callers {
            Callers::Peer { uid, pid } => Some((uid, pid)),
            Callers::Bus => {
                let sender = header.sender()?.to_owned();
                let bus = DBusProxy::new(connection).await.ok()?;
                let known = bus.get_connection_credentials(sender.into()).await.ok()?;
                let pid = known.process_id().and_then(|pid| i32::try_from(pid).ok());
                Some((known.unix_user_id()?, pid.unwrap_or(0)))
            }
        }
    }

    async fn authorize(&self, header: Option<&Header<'_>>, connection: &Connection, action: &str) -> Result<(), Error> {
        let caller = self.caller(header, connection).await;
        let own = match self.callers {
            // SAFETY: a plain call that cannot fail.
            Callers::Peer { .. } => Some(unsafe { libc::geteuid() }),
            Callers::Bus => None,
        };
        match caller {
            Some(0) => Ok(()),
            Some(uid) if Some(uid) == own => Ok(()),
            Some(uid) => Err(Error::NotAuthorized(format!("user {uid} may not {action}: only root may"))),
            None => Err(Error::NotAuthorized(format!("cannot tell who wants to {action}: only root may"))),
        }
    }
}

/// What a caller may see of a client.
fn present(client: ClientView, caller: Option<u32>) -> bus::Client {
    let identity = &client.identity;
    let may_see = caller.is_some_and(|uid| uid == 0 || uid == identity.uid);
    let since = client.connected.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    bus::Client {
        id: client.id.0,
        pid: u32::try_from(identity.pid).unwrap_or(0),
        uid: identity.uid,
        name: identity.name.clone(),
        command: may_see.then(|| identity.command.clone()),
        why: identity.why.clone(),
        unit: identity.unit.clone(),
        slice: identity.slice.clone(),
        container: identity.container.clone(),
        library: client.library,
        connected_since: u64::try_from(since.as_micros()).unwrap_or(u64::MAX),
        stopped: client.stopped,
        gpus: client.uses,
    }
}

/// [`Object`] as it is served: what it says of itself is the XML that is installed, where changes are announced.
struct Served(Object);

const XML: &str = include_str!("../../dbus/org.nvshare.Scheduler1.xml");

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

    fn set<'call>(
        &'call self,
        property: &'call str,
        value: &'call Variant<'_>,
        server: &'call ObjectServer,
        connection: &'call Connection,
        header: Option<&'call Header<'_>>,
        emitter: &'call SignalEmitter<'_>,
    ) -> DispatchResult<'call> {
        self.0.set(property, value, server, connection, header, emitter)
    }

    async fn set_mut(
        &mut self,
        property: &str,
        value: &Variant<'_>,
        server: &ObjectServer,
        connection: &Connection,
        header: Option<&Header<'_>>,
        emitter: &SignalEmitter<'_>,
    ) -> Option<Result<(), BoxDBusError>> {
        self.0.set_mut(property, value, server, connection, header, emitter).await
    }

    fn call<'call>(
        &'call self,
        server: &'call ObjectServer,
        connection: &'call Connection,
        message: &'call Message,
        name: MemberName<'call>,
    ) -> DispatchResult<'call> {
        self.0.call(server, connection, message, name)
    }

    fn call_mut<'call>(
        &'call mut self,
        server: &'call ObjectServer,
        connection: &'call Connection,
        message: &'call Message,
        name: MemberName<'call>,
    ) -> DispatchResult<'call> {
        self.0.call_mut(server, connection, message, name)
    }

    fn introspect_to_writer(&self, writer: &mut dyn std::fmt::Write, level: usize) {
        for line in interface(XML).lines() {
            // A writer that fails has nobody to tell.
            let _ = writeln!(writer, "{:level$}{}", "", line.strip_prefix("  ").unwrap_or(line));
        }
    }
}

/// The element `interface` of a file.
fn interface(xml: &str) -> &str {
    let end = "</interface>";
    let start = xml.find("  <interface ").unwrap_or(0);
    let stop = xml.find(end).map_or(xml.len(), |at| at + end.len());
    xml.get(start..stop).unwrap_or(xml)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// XML without comments and blank lines, one element a line.
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
    fn the_xml_file_is_what_the_object_does() {
        let (requests, _) = mpsc::unbounded_channel();
        let (_, settings) = watch::channel(config::Config::default().settings);
        let (_, holders) = watch::channel(Holders::new());
        let object =
            Object { shared: Shared { requests, settings, holders }, callers: Callers::Peer { uid: 0, pid: 0 } };
        let mut generated = String::new();
        object.introspect_to_writer(&mut generated, 0);
        // Changes of these are announced by `announce`, which the macro does not know.
        let silent = "<annotation name=\"org.freedesktop.DBus.Property.EmitsChangedSignal\" value=\"false\"/>";
        let mut written = bare(interface(XML));
        let mut generated: Vec<String> = bare(&generated);
        generated.retain(|line| line != silent);
        // Two ways to write an element without children.
        for lines in [&mut written, &mut generated] {
            let joined = lines.join("\n").replace(">\n</property>", "/>").replace(">\n</method>", "/>");
            *lines = joined.lines().map(str::to_owned).collect();
            lines.sort();
        }
        assert_eq!(written, generated);
    }
}
