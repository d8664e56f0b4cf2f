//! Real servers on the loopback interface, and clients of them.

use axum::Router;
use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::net::{Shutdown, SocketAddr};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tonic::transport::{Channel, Endpoint, server::TcpIncoming};
use tonic_health::pb::health_client::HealthClient;

/// Serves an app over HTTP/1 and HTTP/2 until the test ends.
pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
    address
}

/// A new HTTP/1 connection.
pub(crate) async fn http1(address: SocketAddr) -> http1::SendRequest<Empty<Bytes>> {
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (client, connection) = http1::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A new HTTP/2 connection.
pub(crate) async fn http2(address: SocketAddr) -> http2::SendRequest<Empty<Bytes>> {
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (client, connection) = http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    client
}

/// What a connection goes over, for those who want to cut it.
pub(crate) struct Wire(std::net::TcpStream);

impl Wire {
    pub(crate) async fn connect(address: SocketAddr) -> (TokioIo<TcpStream>, Self) {
        let stream = TcpStream::connect(address).await.unwrap().into_std().unwrap();
        let wire = Self(stream.try_clone().unwrap());
        (TokioIo::new(TcpStream::from_std(stream).unwrap()), wire)
    }

    /// From here on nothing goes over it, whatever is under way.
    pub(crate) fn cut(self) {
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Where a gRPC server can listen.
pub(crate) async fn listen() -> (SocketAddr, TcpIncoming) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    (listener.local_addr().unwrap(), TcpIncoming::from(listener))
}

/// A client of a health service, on a new connection.
pub(crate) async fn connect(address: SocketAddr) -> HealthClient<Channel> {
    let endpoint = Endpoint::try_from(format!("http://{address}")).unwrap();
    HealthClient::new(endpoint.connect().await.unwrap())
}

/// A frame of HTTP/2 (RFC 9113, section 4.1).
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) length: usize,
}

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// The frames that a gRPC call with an empty message is answered with, as they are on the wire.
pub(crate) async fn frames_of_call(address: SocketAddr, path: &str) -> Vec<Frame> {
    const SETTINGS: u8 = 4;

    let mut stream = TcpStream::connect(address).await.unwrap();
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    push_frame(&mut sent, SETTINGS, 0, 0, &[]);
    let mut head = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", "localhost"),
        (":path", path),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        // A literal field without indexing and without Huffman codes (RFC 7541, section 6.2.2).
        head.push(0);
        for text in [name, value] {
            head.push(text.len() as u8);
            head.extend_from_slice(text.as_bytes());
        }
    }
    push_frame(&mut sent, HEADERS, END_HEADERS, 1, &head);
    // A message that is not compressed and zero bytes long.
    push_frame(&mut sent, DATA, END_STREAM, 1, &[0; 5]);
    stream.write_all(&sent).await.unwrap();

    let mut frames = Vec::new();
    loop {
        let mut header = [0; 9];
        stream.read_exact(&mut header).await.unwrap();
        let [a, b, c, kind, flags, id @ ..] = header;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        stream.read_exact(&mut vec![0; length]).await.unwrap();
        if u32::from_be_bytes(id) == 1 {
            frames.push(Frame { kind, flags, length });
            if matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0 {
                return frames;
            }
        }
    }
}

fn push_frame(bytes: &mut Vec<u8>, kind: u8, flags: u8, stream: u8, payload: &[u8]) {
    bytes.extend_from_slice(&[0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream]);
    bytes.extend_from_slice(payload);
}
