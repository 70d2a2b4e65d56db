//! The HTTP server. Every process that can connect may read metrics. Clients can delay each other only
//! briefly: the number of connections is limited, and each connection has one answer and a timeout.

use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Semaphore;
use tokio::task::spawn_local;
use tracing::debug;

use super::listen::Listener;
use super::source::Source;
use super::text;

/// Maximum number of concurrent connections. Further connections wait.
const MAX_CONNECTIONS: usize = 64;
/// A peer that has not sent a request within this time is disconnected.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that has not read the whole answer within this time is disconnected. By default, Prometheus
/// waits for the same time.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum length of a request in bytes: the lowest limit that hyper allows.
const MAX_REQUEST: usize = 8 << 10;
/// Pause after a failed `accept`, for example if no file descriptors are left.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Permits for connections, shared by all sockets.
pub type Places = Arc<Semaphore>;

pub fn places() -> Places {
    Arc::new(Semaphore::new(MAX_CONNECTIONS))
}

/// Serves all connections to a socket.
pub async fn serve(listener: Listener, places: Places, source: Rc<Source>) {
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let source = source.clone();
        let accepted = match &listener {
            Listener::Unix(listener) => listener.accept().await.map(|(stream, _)| spawn(stream, source, place)),
            Listener::Tcp(listener) => listener.accept().await.map(|(stream, _)| spawn(stream, source, place)),
        };
        if let Err(e) = accepted {
            debug!("cannot accept a connection for metrics: {e}");
            tokio::time::sleep(ACCEPT_AGAIN).await;
        }
    }
}

fn spawn(
    stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
    source: Rc<Source>,
    place: tokio::sync::OwnedSemaphorePermit,
) {
    spawn_local(async move {
        if let Err(e) = one(stream, source).await {
            debug!("metrics connection failed: {e}");
        }
        drop(place);
    });
}

/// Serves one connection.
async fn one(stream: impl AsyncRead + AsyncWrite + Unpin + 'static, source: Rc<Source>) -> io::Result<()> {
    let service = service_fn(move |request| {
        let source = source.clone();
        async move { Ok::<_, Infallible>(answer(&request, &source).await) }
    });
    let connection = http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(MAX_REQUEST)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(CONNECTION_TIMEOUT, connection).await {
        Ok(ended) => ended.map_err(io::Error::other),
        Err(_) => Err(io::Error::other("timed out")),
    }
}

async fn answer(request: &Request<Incoming>, source: &Source) -> Response<Full<Bytes>> {
    if request.uri().path() != "/metrics" {
        return said(StatusCode::NOT_FOUND, "Not found. Metrics are at /metrics.\n");
    }
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        let mut response = said(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed. Use GET or HEAD.\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match source.text().await {
        Some(metrics) => with_type(Response::new(Full::new(metrics)), text::CONTENT_TYPE),
        None => said(StatusCode::SERVICE_UNAVAILABLE, "The scheduler does not answer.\n"),
    }
}

fn said(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from_static(text.as_bytes())));
    *response.status_mut() = status;
    with_type(response, "text/plain; charset=utf-8")
}

fn with_type(mut response: Response<Full<Bytes>>, content_type: &'static str) -> Response<Full<Bytes>> {
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}
