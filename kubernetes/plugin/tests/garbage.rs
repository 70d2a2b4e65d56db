//! Tests that the plugin rejects nonsense, and serves the next request normally.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use crate::support::kubelet::Kubelet;
use crate::support::{Node, PATIENCE};
use nvshare_device_plugin::protocol::{AllocateRequest, ContainerAllocateRequest, Empty, RegisterRequest};
use prost::Message;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Endpoint;
use tonic::{Code, Request};
use tonic_prost::ProstCodec;

#[tokio::test]
async fn invalid_grpc_closes_only_its_own_connection() {
    let node = Node::with_gpus(1);
    let _scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    let mut plugin = kubelet.plugin().await;
    plugin.next().await.expect("a list");
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let frames: [&[u8]; 5] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &[0; 4096],
        // This frame exceeds the size limit.
        &[&preface[..], b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"].concat(),
        // These headers are invalid.
        &[
            &preface[..],
            b"\x00\x00\x00\x04\x00\x00\x00\x00\x00",
            b"\x00\x00\x04\x01\x04\x00\x00\x00\x01\xff\xff\xff\xff",
        ]
        .concat(),
    ];
    for bytes in frames {
        let mut stream = UnixStream::connect(node.socket()).expect("it listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.write_all(bytes).expect("it takes it");
        stream.shutdown(std::net::Shutdown::Write).expect("a socket");
        let mut rest = Vec::new();
        let end = tokio::task::spawn_blocking(move || stream.read_to_end(&mut rest)).await.expect("it ends");
        let is_end = end.as_ref().map_or_else(|e| e.kind() == ErrorKind::ConnectionReset, |_| true);
        assert!(is_end, "{bytes:?}: {end:?}");
    }
    let first = plugin.last[0].id.clone();
    assert!(plugin.allocate(&[&[&first]]).await.is_ok());
    assert_eq!(process.log.count("panicked"), 0);
}

/// Calls a method with a message. Returns the status code of the error.
async fn call<M: Message + 'static>(node: &Node, path: &'static str, message: M) -> Code {
    let endpoint = Endpoint::try_from(format!("unix://{}", node.socket().display())).expect("an endpoint");
    let mut grpc = Grpc::new(endpoint.connect().await.expect("it serves"));
    grpc.ready().await.expect("it is connected");
    let codec = ProstCodec::<M, Empty>::default();
    let called = grpc.unary(Request::new(message), PathAndQuery::from_static(path), codec).await;
    called.expect_err("it makes no sense").code()
}

const ALLOCATE: &str = "/v1beta1.DevicePlugin/Allocate";

#[tokio::test]
async fn unknown_methods_and_invalid_messages_are_rejected() {
    let node = Node::with_gpus(1);
    let _scheduler = node.scheduler();
    let mut kubelet = Kubelet::start(&node.kubelet_directory());
    let process = node.plugin();
    let mut plugin = kubelet.plugin().await;
    plugin.next().await.expect("a list");
    let ids =
        |ids: Vec<String>| AllocateRequest { container_requests: vec![ContainerAllocateRequest { devices_ids: ids }] };
    assert_eq!(call(&node, "/v1beta1.DevicePlugin/Nothing", ids(vec![])).await, Code::Unimplemented);
    assert_eq!(call(&node, "/v1.DevicePlugin/Allocate", ids(vec![])).await, Code::Unimplemented);
    // These are messages of another type, whose text is not a container.
    for text in ["\u{1}\u{2}", "\n\u{7f}", "\u{18}"] {
        let other = RegisterRequest { version: text.into(), ..Default::default() };
        assert_eq!(call(&node, ALLOCATE, other).await, Code::Internal, "{text:?}");
    }
    // This message exceeds the maximum size.
    let many = ids((0..600_000).map(|n| format!("GPU-{n}")).collect());
    assert_eq!(call(&node, ALLOCATE, many).await, Code::OutOfRange);
    let strange: Vec<String> = ["", "::", "\u{0}", "GPU-::-1", "🦀::0", &"x".repeat(100_000)].map(str::to_owned).into();
    for id in strange {
        let refused = call(&node, ALLOCATE, ids(vec![id.clone()])).await;
        assert_eq!(refused, Code::NotFound, "{:?}", id.get(..10));
    }
    let first = plugin.last[0].id.clone();
    assert!(plugin.allocate(&[&[&first]]).await.is_ok());
    assert_eq!(process.log.count("panicked"), 0);
}
