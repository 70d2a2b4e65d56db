//! A stand-in for the API server, with HTTP, streams of watches, and failures. A [`World`] contains
//! the server's data and creates its answers.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use http_body_util::{BodyExt, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio_stream::wrappers::UnboundedReceiverStream;

pub use hyper::Method;

pub type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// The data of an API server.
pub trait World: Send + 'static {
    /// Returns the answer to a request. `uri` is the path with the query.
    fn answer(&mut self, method: &Method, uri: &str, body: &[u8]) -> Answer;

    /// The watchers of events.
    fn watchers(&mut self) -> &mut Watchers;
}

/// The API server, which answers requests in order.
#[derive(Debug)]
pub struct ApiServer<W: World> {
    address: SocketAddr,
    known: Arc<Mutex<Known<W>>>,
    running: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct Known<W> {
    world: W,
    requests: Vec<String>,
}

impl<W: World> ApiServer<W> {
    pub fn start(world: W) -> Self {
        let known = Arc::new(Mutex::new(Known { world, requests: Vec::new() }));
        let mut server = Self { address: ([127, 0, 0, 1], 0).into(), known, running: None };
        server.start_again();
        server
    }

    /// Restarts the server at the same address, with the same data.
    pub fn start_again(&mut self) {
        let listener = TcpListener::bind(self.address).expect("the address is free");
        self.address = listener.local_addr().expect("an address");
        listener.set_nonblocking(true).expect("a socket");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let (stop, stopped) = oneshot::channel();
        let known = self.known.clone();
        let thread = std::thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(listener, known) => {}
                    _ = stopped => {}
                }
            });
        });
        self.running = Some((stop, thread));
    }

    /// Closes all connections, and accepts no more connections.
    pub fn stop(&mut self) {
        if let Some((stop, thread)) = self.running.take() {
            drop(stop);
            thread.join().expect("the API server ran");
        }
        self.with(|world| world.watchers().end());
    }

    /// A kubeconfig for this server.
    pub fn kubeconfig(&self) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: test\nclusters:\n- name: test\n  cluster: {{server: \"http://{}\"}}\n\
             users:\n- name: test\n  user: {{}}\ncontexts:\n- name: test\n  context: {{cluster: test, user: test}}\n",
            self.address
        )
    }

    /// Reads or changes the data.
    pub fn with<T>(&self, look: impl FnOnce(&mut W) -> T) -> T {
        look(&mut self.known().world)
    }

    /// The requests so far that contain `text`, such as `GET /api/v1/pods?…`.
    pub fn requests(&self, text: &str) -> Vec<String> {
        self.known().requests.iter().filter(|request| request.contains(text)).cloned().collect()
    }

    fn known(&self) -> MutexGuard<'_, Known<W>> {
        self.known.lock().expect("what it knows")
    }
}

impl<W: World> Drop for ApiServer<W> {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn serve<W: World>(listener: TcpListener, known: Arc<Mutex<Known<W>>>) {
    let listener = tokio::net::TcpListener::from_std(listener).expect("a socket");
    while let Ok((stream, _)) = listener.accept().await {
        let known = known.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let known = known.clone();
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
                let uri = parts.uri.to_string();
                let mut known = known.lock().expect("what it knows");
                known.requests.push(format!("{} {uri}", parts.method));
                Ok::<_, io::Error>(known.world.answer(&parts.method, &uri, &body))
            }
        });
        tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service));
    }
}

fn response(status: u16, body: UnsyncBoxBody<Bytes, io::Error>) -> Answer {
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(body).expect("a response")
}

/// A complete answer.
pub fn whole(status: u16, body: &Value) -> Answer {
    response(status, Full::new(Bytes::from(body.to_string())).map_err(|never| match never {}).boxed_unsync())
}

/// A refusal with its reason.
pub fn refused(code: u16, reason: &str, message: &str) -> Answer {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": reason, "code": code});
    whole(code, &status)
}

/// Returns the version from which a watch is requested, or 0 if the request names no version.
/// Returns `None` if the request is not a watch.
pub fn watches_from(uri: &str) -> Option<u64> {
    let from = |uri: &str| uri.split("resourceVersion=").nth(1)?.split('&').next()?.parse().ok();
    uri.contains("watch=true").then(|| from(uri).unwrap_or(0))
}

/// The watchers of events. Each watcher has a streaming answer.
#[derive(Debug, Default)]
pub struct Watchers(Vec<UnboundedSender<Result<Frame<Bytes>, io::Error>>>);

impl Watchers {
    /// Begins the answer to a watcher, with past events and, if `goes_on` is true, future events.
    pub fn begin(&mut self, past: impl IntoIterator<Item = String>, goes_on: bool) -> Answer {
        let (sender, chunks) = unbounded_channel();
        for line in past {
            let _ = sender.send(Ok(frame(&line)));
        }
        if goes_on {
            self.0.push(sender);
        }
        response(200, StreamBody::new(UnboundedReceiverStream::new(chunks)).boxed_unsync())
    }

    /// Sends a line to all watchers. The line is an event or any other text.
    pub fn say(&mut self, line: &str) {
        self.0.retain(|watcher| watcher.send(Ok(frame(line))).is_ok());
    }

    pub fn end(&mut self) {
        self.0.clear();
    }

    /// Ends all streams in the middle of a line.
    pub fn tear(&mut self) {
        for watcher in self.0.drain(..) {
            let _ = watcher.send(Ok(Frame::data(Bytes::from_static(b"{\"type\": \"ADDED\", \"object\": {\"metad"))));
            let _ = watcher.send(Err(io::ErrorKind::ConnectionReset.into()));
        }
    }
}

fn frame(line: &str) -> Frame<Bytes> {
    Frame::data(Bytes::from(format!("{line}\n")))
}
