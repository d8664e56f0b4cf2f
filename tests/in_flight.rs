//! What is in flight on real connections: what holds a slot, or a place in a load shedder, and until when.

mod support;

use axum::{
    Router,
    body::Body,
    extract::Request as AxumRequest,
    response::{
        IntoResponse, Response as AxumResponse,
        sse::{Event, Sse},
    },
    routing::{MethodRouter, any, any_service},
};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode, Version, request::Parts};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::{
    body::Incoming,
    client::conn::{http1, http2},
    ext::Protocol,
    upgrade,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::{
    collections::BTreeSet,
    convert::Infallible,
    future::{Future, pending, poll_fn},
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};
use support::{
    Fields, T0,
    fleet::{names, patient, until},
    gate::Gate,
    get, ms,
    net::{self, END_HEADERS, END_STREAM, HEADERS},
    now, secs,
    server::{Flavour, Server},
    with,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy, split},
    net::TcpStream,
    select,
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::{JoinSet, yield_now},
};
use tokio_stream::{StreamExt, iter, wrappers::UnboundedReceiverStream};
use tollgate::{
    BuildError, Limiter, ManualClock, Outcome, Policy, Priority, Quota, RateLimitLayer,
    RateLimitLayerBuilder, Reason, Rejection,
    concurrency::{Adaptive, HeldPermits},
    key::{Global, Header},
    reply::{GrpcCode, Headers},
    shed::{FleetShedder, Utilization, WorkerShedder},
};
use tonic::{Code, transport::Server as GrpcServer};
use tonic_health::{
    ServingStatus,
    pb::HealthCheckRequest,
    server::{HealthReporter, health_reporter},
};
use tonic_types::StatusExt;
use tower::{Layer, Service, ServiceExt, layer::layer_fn, service_fn};

// === an app and its clients ===

/// Where the frames of a response body go that is being streamed.
type Frames = UnboundedSender<Bytes>;

/// Where those of the responses go that have been called for.
type Opened = UnboundedReceiver<Frames>;

/// Bodies that end by themselves.
const WHOLE: [&str; 7] =
    ["/empty", "/no-content", "/not-modified", "/hello", "/chunks", "/sse", "/trailers"];

/// Bodies that the test writes, ten bytes long or longer.
const STREAMED: [&str; 4] = ["/stream", "/known", "/declared", "/events"];

fn app() -> (Router, Opened) {
    let (opened, streams) = unbounded_channel::<Frames>();
    let streamed = |answer: fn(UnboundedReceiver<Bytes>) -> AxumResponse| -> MethodRouter {
        let opened = opened.clone();
        any(move || {
            let (sender, frames) = unbounded_channel();
            let _ = opened.send(sender);
            async move { answer(frames) }
        })
    };
    fn ok<T>(frame: T) -> Result<T, Infallible> {
        Ok(frame)
    }
    fn stream(frames: UnboundedReceiver<Bytes>) -> Body {
        Body::from_stream(UnboundedReceiverStream::new(frames).map(ok))
    }
    let trailers = || async {
        let end =
            HeaderMap::from_iter([(HeaderName::from_static("x-end"), "yes".parse().unwrap())]);
        let frames = [Frame::data(Bytes::from("hello")), Frame::trailers(end)].map(ok);
        ([("trailer", "x-end")], Body::new(StreamBody::new(iter(frames))))
    };
    let event = |data: &str| ok(Event::default().data(data));
    let app = Router::new()
        .route("/empty", any(|| async {}))
        .route("/no-content", any(|| async { StatusCode::NO_CONTENT }))
        .route("/not-modified", any(|| async { (StatusCode::NOT_MODIFIED, [("etag", "\"1\"")]) }))
        .route("/hello", any(|| async { "hello" }))
        .route("/chunks", any(|| async { Body::from_stream(iter(["hel", "lo"].map(ok))) }))
        .route("/sse", any(move || async move { Sse::new(iter(["a", "b"].map(event))) }))
        .route("/trailers", any(trailers))
        .route("/stream", streamed(|frames| stream(frames).into_response()))
        .route("/known", streamed(|frames| Body::new(Known { frames, left: 10 }).into_response()))
        .route(
            "/declared",
            streamed(|frames| ([("content-length", "10")], stream(frames)).into_response()),
        )
        .route(
            "/events",
            streamed(|frames| {
                let data = |frame: Bytes| str::from_utf8(&frame).unwrap().to_owned();
                let frames = UnboundedReceiverStream::new(frames);
                let events = frames.map(move |frame| ok(Event::default().data(data(frame))));
                Sse::new(events).into_response()
            }),
        )
        .route("/never", any(pending::<()>))
        .route("/upgrade", any(upgrade));
    (app, streams)
}

/// A body whose length is known before it is there.
struct Known {
    frames: UnboundedReceiver<Bytes>,
    left: u64,
}

impl HttpBody for Known {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let polled = self.frames.poll_recv(cx);
        polled.map(|frame| {
            frame.map(|frame| {
                self.left -= frame.len() as u64;
                Ok(Frame::data(frame))
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// Gives back what it is sent, on a connection of its own. With the query `keep` it takes its permits
/// along.
async fn upgrade(request: AxumRequest) -> AxumResponse {
    let permits: HeldPermits = request.extensions().get().cloned().unwrap_or_default();
    let kept = (request.uri().query() == Some("keep")).then(|| permits.keep());
    let version = request.version();
    tokio::spawn(async move {
        let upgraded = upgrade::on(request).await.unwrap();
        let (mut reader, mut writer) = split(TokioIo::new(upgraded));
        let _ = copy(&mut reader, &mut writer).await;
        drop(kept);
    });
    if version == Version::HTTP_2 {
        return StatusCode::OK.into_response();
    }
    let headers = [("connection", "upgrade"), ("upgrade", "echo")];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}

/// Serves the app behind a layer.
async fn serve(layer: &RateLimitLayer) -> (SocketAddr, Opened) {
    let (app, opened) = app();
    (net::serve(app.layer(layer.clone())).await, opened)
}

const VERSIONS: [Version; 2] = [Version::HTTP_11, Version::HTTP_2];

/// A connection.
struct Client {
    sender: Sender,
    wire: net::Wire,
}

enum Sender {
    Http1(http1::SendRequest<Empty<Bytes>>),
    Http2(http2::SendRequest<Empty<Bytes>>),
}

impl Client {
    async fn connect(version: Version, address: SocketAddr) -> Self {
        let (stream, wire) = net::Wire::connect(address).await;
        if version == Version::HTTP_2 {
            let handshake = http2::handshake(TokioExecutor::new(), stream);
            let (sender, connection) = handshake.await.unwrap();
            tokio::spawn(connection);
            return Self { sender: Sender::Http2(sender), wire };
        }
        let (sender, connection) = http1::handshake(stream).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        Self { sender: Sender::Http1(sender), wire }
    }

    async fn send(&mut self, request: Request<Empty<Bytes>>) -> hyper::Result<Response<Incoming>> {
        match &mut self.sender {
            Sender::Http1(sender) => {
                sender.ready().await?;
                sender.send_request(request).await
            }
            Sender::Http2(sender) => sender.send_request(request).await,
        }
    }

    async fn get(&mut self, path: &str) -> Response<Incoming> {
        self.send(request(Method::GET, path)).await.unwrap()
    }

    /// The whole answer to a request.
    async fn answer(&mut self, method: Method, path: &str) -> Response<Bytes> {
        whole(self.send(request(method, path)).await.unwrap()).await
    }
}

fn request(method: Method, path: &str) -> Request<Empty<Bytes>> {
    let uri = format!("http://localhost{path}");
    Request::builder().method(method).uri(uri).body(Empty::new()).unwrap()
}

async fn whole(response: Response<Incoming>) -> Response<Bytes> {
    let (head, body) = response.into_parts();
    Response::from_parts(head, body.collect().await.unwrap().to_bytes())
}

async fn status(address: SocketAddr, path: &str) -> u16 {
    let mut client = Client::connect(Version::HTTP_11, address).await;
    client.get(path).await.status().as_u16()
}

// === bodies ===

#[tokio::test]
async fn bodies_are_on_the_wire_as_they_are_without_the_layer() {
    let (plain, _opened) = app();
    let plain = net::serve(plain).await;
    let silent = |builder: RateLimitLayerBuilder| {
        builder.headers(Headers::none()).policy(Policy::concurrency("in-flight", 1))
    };
    for gate in Gate::both(silent) {
        let (address, _opened) = serve(&gate.layer).await;
        for path in WHOLE {
            for method in ["GET", "HEAD", "POST"] {
                let bytes = bytes_of(address, method, path).await;
                assert_eq!(bytes, bytes_of(plain, method, path).await, "{method} {path}");
                gate.comes_to_hold(0).await;
            }
            let frames = net::frames_of_call(address, path).await;
            assert_eq!(frames, net::frames_of_call(plain, path).await, "{path}");
            gate.comes_to_hold(0).await;
        }
        // What the comparisons rest on.
        let hello = bytes_of(address, "HEAD", "/hello").await;
        assert!(hello.contains("\r\ncontent-length: 5\r\n") && hello.ends_with("\r\n\r\n"));
        assert!(bytes_of(address, "GET", "/chunks").await.ends_with("\r\n2\r\nlo\r\n0\r\n\r\n"));
        assert!(
            bytes_of(address, "GET", "/trailers").await.ends_with("\r\n0\r\nx-end: yes\r\n\r\n")
        );
        let empty = net::frames_of_call(address, "/empty").await;
        assert_eq!(empty.len(), 1, "{empty:?}");
    }
}

/// The answer to an HTTP/1 request as it is on the wire, without its date.
async fn bytes_of(address: SocketAddr, method: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nte: trailers\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let lines = answer.split_inclusive("\r\n").filter(|line| !line.starts_with("date: "));
    lines.collect()
}

#[tokio::test]
async fn whoever_comes_after_the_end_of_a_response_finds_the_slot_free() {
    for gate in Gate::slots(1) {
        let (address, mut opened) = serve(&gate.layer).await;
        for version in VERSIONS {
            let mut client = Client::connect(version, address).await;
            for path in WHOLE {
                for _ in 0..10 {
                    for method in [Method::GET, Method::HEAD, Method::POST] {
                        let answer = client.answer(method.clone(), path).await;
                        assert_ne!(answer.status(), 429, "{version:?} {method} {path}");
                    }
                }
            }
            // Nothing is streamed to HEAD.
            for path in STREAMED {
                for _ in 0..10 {
                    let answer = client.answer(Method::HEAD, path).await;
                    assert_eq!(answer.status(), 200, "{version:?} {path}");
                    assert!(opened.recv().await.unwrap().is_closed());
                }
            }
        }
        gate.comes_to_hold(0).await;
    }
}

#[tokio::test]
async fn a_slot_is_held_while_the_body_is_streamed() {
    for gate in Gate::slots(1) {
        let (address, mut opened) = serve(&gate.layer).await;
        for version in VERSIONS {
            let mut client = Client::connect(version, address).await;
            for path in STREAMED {
                let response = client.get(path).await;
                assert_eq!(response.status(), 200, "{version:?} {path}");
                let frames = opened.recv().await.unwrap();
                gate.holds(1).await;
                let mut body = response.into_body();
                for _ in 0..2 {
                    // Others are turned away meanwhile.
                    assert_eq!(status(address, "/empty").await, 429);
                    gate.holds(1).await;
                    frames.send(Bytes::from("12345")).unwrap();
                    let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
                    assert!(frame.windows(5).any(|window| window == b"12345"));
                }
                drop(frames);
                assert!(body.collect().await.unwrap().to_bytes().is_empty());
                gate.comes_to_hold(0).await;
            }
        }
    }
}

#[tokio::test]
async fn a_place_in_a_shedder_is_held_as_a_slot_is() {
    let fleet = FleetShedder::builder("fleet", 1).reserve(0.0).build().unwrap();
    let workers = WorkerShedder::builder("workers").build().unwrap();
    let builder = RateLimitLayer::builder().shedder(workers.clone()).shedder(fleet.clone());
    let (address, mut opened) = serve(&builder.build().unwrap()).await;
    let comes_to = async |count| {
        until("so many are in flight", async || {
            (fleet.in_flight(), workers.in_flight()) == (count, count)
        })
        .await;
    };
    for version in VERSIONS {
        for path in STREAMED {
            for ends in [true, false] {
                let mut client = Client::connect(version, address).await;
                let body = client.get(path).await.into_body();
                let frames = opened.recv().await.unwrap();
                comes_to(1).await;
                assert_eq!(status(address, "/empty").await, 503);
                frames.send(Bytes::from("1234567890")).unwrap();
                if ends {
                    drop(frames);
                    body.collect().await.unwrap();
                    comes_to(0).await;
                } else {
                    drop((frames, body));
                    client.wire.cut();
                    comes_to(0).await;
                }
            }
        }
    }
}

// === clients that go away ===

#[tokio::test]
async fn a_client_that_goes_away_in_the_middle_frees_its_slot() {
    for gate in Gate::slots(1) {
        let (address, mut opened) = serve(&gate.layer).await;
        for version in VERSIONS {
            for path in STREAMED {
                for reads in [false, true] {
                    for resets in [false, true] {
                        let mut client = Client::connect(version, address).await;
                        let mut body = client.get(path).await.into_body();
                        // It would never end.
                        let frames = opened.recv().await.unwrap();
                        if reads {
                            frames.send(Bytes::from("12345")).unwrap();
                            assert!(body.frame().await.unwrap().is_ok());
                        }
                        gate.holds(1).await;
                        if resets && version == Version::HTTP_2 {
                            // By RST_STREAM; the connection lives on.
                            drop(body);
                            gate.comes_to_hold(0).await;
                            assert_eq!(client.get("/hello").await.status(), 200);
                        } else {
                            client.wire.cut();
                        }
                        gate.comes_to_hold(0).await;
                        assert!(frames.is_closed());
                    }
                }
            }
        }
    }
}

#[tokio::test]
async fn a_client_that_goes_away_before_the_head_frees_its_slot() {
    for gate in Gate::slots(1) {
        let (address, _opened) = serve(&gate.layer).await;
        for version in VERSIONS {
            for cuts in [false, true] {
                let mut client = Client::connect(version, address).await;
                select! {
                    _ = client.get("/never") => unreachable!("it is never answered"),
                    () = until("it is inside", async || gate.held() == 1) => gate.holds(1).await,
                }
                if cuts {
                    client.wire.cut();
                } else if version == Version::HTTP_2 {
                    gate.comes_to_hold(0).await;
                    assert_eq!(client.get("/hello").await.status(), 200);
                }
                gate.comes_to_hold(0).await;
            }
        }
    }
}

/// What comes of a future within so many polls; then it is dropped.
async fn polled<F: Future>(times: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = times;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// All at once: streams that end, streams that are dropped, and requests that are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_held_after_a_storm() {
    for gate in Gate::slots(4) {
        let (address, mut opened) = serve(&gate.layer).await;
        let writer = tokio::spawn(async move {
            let mut never = Vec::new();
            let mut number = 0;
            while let Some(frames) = opened.recv().await {
                let _ = frames.send(Bytes::from("1234567890"));
                number += 1;
                if number % 2 == 0 {
                    never.push(frames);
                }
            }
        });
        let mut clients = JoinSet::new();
        for number in 0..16 {
            clients.spawn(async move {
                let version = VERSIONS[number % 2];
                let mut statuses = BTreeSet::new();
                for turn in 0..12 {
                    let mut client = Client::connect(version, address).await;
                    let path = ["/hello", "/stream", "/events", "/known"][(number + turn) % 4];
                    // It may go away at any point.
                    let polls = if turn % 4 == 3 { turn % 5 } else { usize::MAX };
                    let response = polled(polls, client.send(request(Method::GET, path))).await;
                    if let Some(Ok(response)) = response {
                        statuses.insert(response.status().as_u16());
                        if turn % 3 == 0 {
                            let _ = response.into_body().frame().await;
                        }
                    }
                    client.wire.cut();
                }
                statuses
            });
        }
        let statuses: BTreeSet<_> = clients.join_all().await.into_iter().flatten().collect();
        assert!(statuses.is_subset(&BTreeSet::from([200, 429])), "{statuses:?}");
        assert!(statuses.contains(&200));
        gate.comes_to_hold(0).await;
        writer.abort();
    }
}

// === upgraded connections ===

#[tokio::test]
async fn an_upgraded_connection_holds_its_slot_only_if_its_handler_keeps_it() {
    for gate in Gate::slots(1) {
        let (address, _opened) = serve(&gate.layer).await;
        for version in VERSIONS {
            for (path, held, cuts) in
                [("/upgrade", 0, false), ("/upgrade?keep", 1, false), ("/upgrade?keep", 1, true)]
            {
                let mut client = Client::connect(version, address).await;
                // Settings are known afterwards.
                assert_eq!(client.answer(Method::GET, "/hello").await.status(), 200);
                gate.comes_to_hold(0).await;
                let mut request = request(Method::GET, path);
                if version == Version::HTTP_2 {
                    *request.method_mut() = Method::CONNECT;
                    request.extensions_mut().insert(Protocol::from_static("echo"));
                } else {
                    let headers = request.headers_mut();
                    headers.insert("connection", "upgrade".parse().unwrap());
                    headers.insert("upgrade", "echo".parse().unwrap());
                }
                let response = client.send(request).await.unwrap();
                let expected = if version == Version::HTTP_2 { 200 } else { 101 };
                assert_eq!(response.status(), expected);
                let mut echo = TokioIo::new(upgrade::on(response).await.unwrap());
                for _ in 0..2 {
                    echo.write_all(b"ping").await.unwrap();
                    let mut answer = [0; 4];
                    echo.read_exact(&mut answer).await.unwrap();
                    assert_eq!(&answer, b"ping");
                    gate.comes_to_hold(held).await;
                }
                let other = status(address, "/empty").await;
                assert_eq!(other, if held == 0 { 200 } else { 429 });
                gate.comes_to_hold(held).await;
                if cuts {
                    client.wire.cut();
                } else {
                    echo.shutdown().await.unwrap();
                }
                gate.comes_to_hold(0).await;
            }
        }
    }
}

// === tonic ===

/// A health service behind a layer, which also knows a service named `other`.
async fn serve_health(layer: &RateLimitLayer) -> (SocketAddr, HealthReporter) {
    let (address, incoming) = net::listen().await;
    let (reporter, health) = health_reporter();
    reporter.set_service_status("other", ServingStatus::Serving).await;
    let server = GrpcServer::builder().layer(layer.clone()).add_service(health);
    tokio::spawn(server.serve_with_incoming(incoming));
    (address, reporter)
}

fn of(service: &str) -> HealthCheckRequest {
    HealthCheckRequest { service: service.to_owned() }
}

const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";

/// Sees to it that calls of either kind are turned away, as they should be. Returns when to try again, in
/// milliseconds.
async fn are_turned_away(address: SocketAddr, code: Code) -> Vec<u64> {
    let mut client = net::connect(address).await;
    let mut times = Vec::new();
    for status in
        [client.check(of("")).await.unwrap_err(), client.watch(of("")).await.map(drop).unwrap_err()]
    {
        assert_eq!(status.code(), code);
        let headers = status.metadata().clone().into_headers();
        let pushback = headers.number("grpc-retry-pushback-ms").unwrap();
        let delay = status.get_details_retry_info().unwrap().retry_delay.unwrap();
        assert_eq!(delay.as_micros().div_ceil(1_000), u128::from(pushback));
        assert_eq!(headers.retry_after(), Some(pushback.div_ceil(1_000)));
        times.push(pushback);
    }
    let mut client = Client::connect(Version::HTTP_2, address).await;
    for path in [CHECK, WATCH] {
        let mut call = request(Method::POST, path);
        call.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        let answer = client.send(call).await.unwrap();
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.text("content-type"), Some("application/grpc"));
        assert_eq!(answer.number("grpc-status"), Some(code as u64));
        let frames = net::frames_of_call(address, path).await;
        let [net::Frame { kind: HEADERS, flags, .. }] = frames[..] else { panic!("{frames:?}") };
        assert_eq!(flags, END_STREAM | END_HEADERS);
    }
    times
}

/// BR-54: two overlapping streams.
#[tokio::test]
async fn br_54_a_stream_beside_another_is_told_8_until_that_is_over() {
    for gate in Gate::slots(1) {
        let (address, mut reporter) = serve_health(&gate.layer).await;
        let mut client = net::connect(address).await;
        for ends in [false, true] {
            let mut stream = client.watch(of("other")).await.unwrap().into_inner();
            assert!(stream.message().await.unwrap().is_some());
            gate.holds(1).await;
            let times = are_turned_away(address, Code::ResourceExhausted).await;
            assert_eq!(times, [1_000, 1_000]);
            gate.holds(1).await;
            if ends {
                reporter.clear_service_status("other").await;
                assert!(stream.message().await.unwrap().is_none());
            } else {
                drop(stream);
            }
            gate.comes_to_hold(0).await;
        }
        for _ in 0..10 {
            assert!(client.check(of("")).await.is_ok());
            // Calls that fail are over, too.
            assert_eq!(client.check(of("third")).await.unwrap_err().code(), Code::NotFound);
        }
        gate.comes_to_hold(0).await;
    }
}

#[tokio::test]
async fn grpc_answers_are_on_the_wire_as_they_are_without_the_layer() {
    let (plain, incoming) = net::listen().await;
    let (_, health) = health_reporter();
    tokio::spawn(GrpcServer::builder().add_service(health).serve_with_incoming(incoming));
    let silent = |builder: RateLimitLayerBuilder| {
        builder.headers(Headers::none()).policy(Policy::concurrency("in-flight", 1))
    };
    for gate in Gate::both(silent) {
        let (address, _reporter) = serve_health(&gate.layer).await;
        // One with trailers, and two that are nothing but trailers.
        for (path, count) in [(CHECK, 3), ("/grpc.health.v1.Health/None", 1), ("/None/None", 1)] {
            let frames = net::frames_of_call(address, path).await;
            assert_eq!(frames, net::frames_of_call(plain, path).await);
            assert_eq!(frames.len(), count, "{frames:?}");
            gate.comes_to_hold(0).await;
        }
    }
}

/// BR-54: calls that are shed.
#[tokio::test]
async fn br_54_a_call_that_is_shed_is_told_14_or_as_configured() {
    type Configure = fn(RateLimitLayerBuilder) -> RateLimitLayerBuilder;
    for (configure, code) in [
        ((|builder| builder) as Configure, Code::Unavailable),
        (|builder| builder.grpc_shed_code(GrpcCode::ResourceExhausted), Code::ResourceExhausted),
        // That of limits is another one.
        (|builder| builder.grpc_code(GrpcCode::ResourceExhausted), Code::Unavailable),
    ] {
        let fleet = FleetShedder::builder("fleet", 1).reserve(0.0).build().unwrap();
        let builder = RateLimitLayer::builder().shedder(fleet.clone());
        let (address, _reporter) = serve_health(&configure(builder).build().unwrap()).await;
        let mut client = net::connect(address).await;
        let mut stream = client.watch(of("")).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        let times = are_turned_away(address, code).await;
        assert!(times.iter().all(|time| (1_000..=3_000).contains(time)), "{times:?}");
        assert_eq!(fleet.in_flight(), 1);
        drop(stream);
        until("the stream is over", async || fleet.in_flight() == 0).await;
        assert!(client.check(of("")).await.is_ok());
    }
}

#[tokio::test]
async fn calls_are_as_important_as_their_path_says() {
    let fleet = FleetShedder::builder("fleet", 1).reserve(0.0).build().unwrap();
    let by_path = |parts: &Parts| match parts.uri.path() {
        CHECK => Priority::Critical,
        _ => Priority::Read,
    };
    let layer = RateLimitLayer::builder().shedder(fleet).priority(by_path).build().unwrap();
    let (address, _reporter) = serve_health(&layer).await;
    let mut client = net::connect(address).await;
    let _stream = client.watch(of("")).await.unwrap().into_inner();
    assert_eq!(client.watch(of("")).await.map(drop).unwrap_err().code(), Code::Unavailable);
    assert!(client.check(of("")).await.is_ok());
}

// === load shedding ===

/// A shedder that has been fully busy for so long: nothing is shed before 28 s, and all that may be after
/// 148 s.
fn busy_for(seconds: u64) -> WorkerShedder {
    let clock = ManualClock::new();
    let shedder = WorkerShedder::builder("workers")
        .utilization(Utilization::from_fn(|| 1.0))
        .longest_step(secs(1_000))
        .clock(&clock)
        .build()
        .unwrap();
    clock.advance(secs(seconds));
    shedder.sample();
    shedder
}

/// A shedder with room for so many, none of which is kept for critical requests.
fn room_for(capacity: u32) -> FleetShedder {
    FleetShedder::builder("fleet", capacity).reserve(0.0).build().unwrap()
}

/// What each policy has left.
async fn left(layer: &RateLimitLayer) -> Vec<u64> {
    let left = |outcomes: &[Outcome]| outcomes.iter().map(Outcome::remaining).collect();
    match layer.limiter().peek_async(&get().into_parts().0).await {
        Ok(decision) => left(decision.outcomes()),
        Err(rejection) => left(rejection.outcomes()),
    }
}

fn rates_and_slots(builder: RateLimitLayerBuilder) -> RateLimitLayerBuilder {
    builder
        .policy(Policy::token_bucket("rate", Quota::per_hour(10)))
        .policy(Policy::sliding_log("log", Quota::per_hour(10)))
        .policy(Policy::concurrency("in-flight", 3))
}

#[tokio::test]
async fn what_is_shed_is_told_503_and_leaves_all_policies_alone() {
    let workers = busy_for(148);
    assert_eq!(workers.level(), 1.0);
    let fleet = room_for(1);
    let full = fleet.admit(Priority::Read).unwrap();
    let by_workers =
        |builder| rates_and_slots(builder).shedder(workers.clone()).shedder(fleet.clone());
    let by_fleet =
        |builder| rates_and_slots(builder).shedder(fleet.clone()).shedder(workers.clone());
    let [local, redis] = Gate::both(by_workers);
    let [local_too, redis_too] = Gate::both(by_fleet);
    for (gate, shedder, range) in [
        (local, "workers", 5..=15),
        (redis, "workers", 5..=15),
        (local_too, "fleet", 1..=3),
        (redis_too, "fleet", 1..=3),
    ] {
        let (address, _opened) = serve(&gate.layer).await;
        let mut times = BTreeSet::new();
        for version in VERSIONS {
            let mut client = Client::connect(version, address).await;
            for method in ["GET", "HEAD", "POST", "PUT", "DELETE"].repeat(5) {
                let answer = client.answer(method.parse().unwrap(), "/hello").await;
                assert_eq!(answer.status(), 503);
                assert_eq!(answer.text("content-type"), Some("application/problem+json"));
                assert_eq!(answer.text("cache-control"), Some("no-store"));
                for name in answer.headers().keys() {
                    assert!(!name.as_str().contains("ratelimit"), "{name}");
                }
                times.insert(answer.retry_after().unwrap());
                if method == "HEAD" {
                    assert!(answer.body().is_empty() && answer.number("content-length") > Some(0));
                    continue;
                }
                let problem: serde_json::Value = serde_json::from_slice(answer.body()).unwrap();
                let kind =
                    "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
                assert_eq!(problem["type"], kind);
                assert_eq!(problem["status"], 503);
                assert_eq!(problem["violated-policies"], serde_json::json!([shedder]));
            }
        }
        assert!(times.iter().all(|time| range.contains(time)), "{times:?}");
        assert!(times.len() > 1, "not all come back at once");
        if let Some((_, server)) = &gate.redis {
            assert!(names(server).is_empty(), "nobody was asked");
        }
        assert_eq!(left(&gate.layer).await, [10, 10, 3]);
        gate.holds(0).await;
        assert_eq!((workers.in_flight(), fleet.in_flight()), (0, 1));
    }
    drop(full);
}

#[tokio::test]
async fn critical_requests_are_let_in_and_counted() {
    let (workers, fleet) = (busy_for(10_000), room_for(1));
    let _full = fleet.admit(Priority::Read).unwrap();
    let stack = |builder| {
        let named = |parts: &Parts| match parts.headers.get("x-charge") {
            Some(_) => Priority::Critical,
            None => Priority::Write,
        };
        rates_and_slots(builder).shedder(workers.clone()).shedder(fleet.clone()).priority(named)
    };
    for gate in Gate::both(stack) {
        let (address, mut opened) = serve(&gate.layer).await;
        let mut client = Client::connect(Version::HTTP_2, address).await;
        let mut charge = request(Method::GET, "/stream");
        charge.headers_mut().insert("x-charge", "1".parse().unwrap());
        let response = client.send(charge).await.unwrap();
        assert_eq!(response.status(), 200);
        assert!(response.text("ratelimit").is_some());
        let _frames = opened.recv().await.unwrap();
        assert_eq!(client.get("/stream").await.status(), 503);
        gate.holds(1).await;
        assert_eq!((workers.in_flight(), fleet.in_flight()), (1, 2));
        assert_eq!(left(&gate.layer).await, [9, 9, 2]);
        drop(response);
        gate.comes_to_hold(0).await;
        assert_eq!((workers.in_flight(), fleet.in_flight()), (0, 1));
    }
}

/// Unless they are told otherwise, layers go by the method.
#[tokio::test]
async fn reads_go_before_writes() {
    // Two thirds of the way there, reads are gone.
    let layer = RateLimitLayer::builder().shedder(busy_for(28 + 80)).build().unwrap();
    let (address, _opened) = serve(&layer).await;
    let mut client = Client::connect(Version::HTTP_11, address).await;
    for (methods, status) in
        [(["GET", "HEAD", "OPTIONS", "TRACE"], 503), (["POST", "PUT", "PATCH", "DELETE"], 200)]
    {
        for method in methods {
            let answer = client.answer(method.parse().unwrap(), "/hello").await;
            assert_eq!(answer.status(), status, "{method}");
        }
    }
}

#[tokio::test]
async fn a_classifier_that_panics_is_told_500_and_leaves_nothing_behind() {
    let (workers, fleet) = (busy_for(0), room_for(9));
    let panics = |parts: &Parts| -> Priority {
        assert!(!parts.headers.contains_key("x-panic"), "a secret");
        Priority::Read
    };
    let stack = |builder| {
        rates_and_slots(builder).shedder(workers.clone()).shedder(fleet.clone()).priority(panics)
    };
    for gate in Gate::both(stack) {
        let (address, _opened) = serve(&gate.layer).await;
        for version in VERSIONS {
            let mut client = Client::connect(version, address).await;
            for _ in 0..5 {
                let mut request = request(Method::GET, "/hello");
                request.headers_mut().insert("x-panic", "1".parse().unwrap());
                let answer = whole(client.send(request).await.unwrap()).await;
                assert_eq!(answer.status(), 500);
                let problem: serde_json::Value = serde_json::from_slice(answer.body()).unwrap();
                assert_eq!(problem["type"], "about:blank");
                assert!(!problem.to_string().contains("secret"), "{problem}");
            }
        }
        let service = gate.layer.layer(service_fn(support::ok));
        let answer = service.oneshot(with("x-panic", "1")).await.unwrap();
        let rejection: &Rejection = answer.extensions().get().unwrap();
        let Reason::Faulty { policy: "workers", message } = rejection.reason() else {
            panic!("{rejection:?}")
        };
        assert!(message.contains("priority"), "{message}");
        assert_eq!(left(&gate.layer).await, [10, 10, 3]);
        assert_eq!((workers.in_flight(), fleet.in_flight()), (0, 0));
        // The connection and the layer are as good as ever.
        assert_eq!(status(address, "/hello").await, 200);
    }
}

/// What a policy turns away, or cannot judge, was let in before and leaves the shedders.
#[tokio::test]
async fn what_a_policy_rejects_leaves_the_shedders() {
    let (workers, fleet) = (busy_for(0), room_for(9));
    let stack = |builder: RateLimitLayerBuilder| {
        let cost = |parts: &Parts| match parts.headers.get("cost") {
            Some(cost) => cost.to_str().unwrap().parse().expect("a number"),
            None => 1,
        };
        builder
            .shedder(workers.clone())
            .shedder(fleet.clone())
            .policy(Policy::token_bucket("rate", Quota::per_hour(10)).cost(cost))
            .policy(Policy::concurrency("in-flight", 1))
            .policy(Policy::concurrency("of-user", 9).key(Header::from_static("user")))
    };
    for gate in Gate::both(stack) {
        let in_flight = || (workers.in_flight(), fleet.in_flight());
        let service = gate.layer.layer(service_fn(async |_: Request<()>| {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello"))))
        }));
        let send = async |headers: &[(&'static str, &str)]| {
            let mut request = get();
            for (name, value) in headers {
                request.headers_mut().insert(*name, value.parse().unwrap());
            }
            service.clone().oneshot(request).await.unwrap()
        };
        let first = send(&[("user", "a")]).await;
        assert_eq!(first.status(), 200);
        assert_eq!(in_flight(), (1, 1));
        for (headers, status) in [
            // No slot is free; then there is no key, and what a request costs is not to be found out.
            (&[("user", "a")] as &[_], 429),
            (&[], 400),
            (&[("user", "a"), ("cost", "much")], 500),
            // More than there ever is.
            (&[("user", "a"), ("cost", "11")], 429),
        ] {
            let answer = send(headers).await;
            assert_eq!(answer.status(), status, "{headers:?}");
            // The answer holds nothing.
            assert_eq!(in_flight(), (1, 1));
        }
        drop(first);
        assert_eq!(send(&[("user", "a"), ("cost", "10")]).await.status(), 429);
        assert_eq!(in_flight(), (0, 0));
        gate.holds(0).await;
    }
}

/// Calls the layer's service and waits until it is so; then the call goes away.
async fn cancelled(gate: &Gate, what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let service = gate.layer.layer(service_fn(support::ok));
    select! {
        _ = service.oneshot(get()) => panic!("it does not wait: {what}"),
        () = until(what, async || is_so().await) => {}
    }
}

#[tokio::test]
async fn a_request_that_is_cancelled_while_it_waits_for_a_slot_leaves_the_shedders() {
    let (workers, fleet) = (busy_for(0), room_for(9));
    let stack = |builder: RateLimitLayerBuilder| {
        let queue = Policy::concurrency("in-flight", 1).queue(9, secs(600));
        let rate = Policy::token_bucket("rate", Quota::per_hour(10));
        builder.shedder(workers.clone()).shedder(fleet.clone()).policy(queue).policy(rate)
    };
    for gate in Gate::both(stack) {
        let (_, permit) = gate.layer.limiter().acquire(&get().into_parts().0).await.unwrap();
        assert_eq!((workers.in_flight(), fleet.in_flight()), (1, 1));
        for _ in 0..3 {
            cancelled(&gate, "both are in flight", async || fleet.in_flight() == 2).await;
            assert_eq!((workers.in_flight(), fleet.in_flight()), (1, 1));
        }
        gate.holds(1).await;
        drop(permit);
        gate.holds(0).await;
        assert_eq!((workers.in_flight(), fleet.in_flight()), (0, 0));
        assert_eq!(left(&gate.layer).await, [1, 9]);
    }
}

#[tokio::test]
async fn a_request_that_is_cancelled_while_it_waits_for_its_turn_leaves_the_shedders() {
    let (workers, fleet) = (busy_for(0), room_for(9));
    let stack = |builder: RateLimitLayerBuilder| {
        let line = Policy::leaky_bucket("line", Quota::per_hour(1)).max_delay(secs(9 * 3_600));
        let slots = Policy::concurrency("in-flight", 9);
        builder.shedder(workers.clone()).shedder(fleet.clone()).policy(line).policy(slots)
    };
    for gate in Gate::both(stack) {
        let (_, permit) = gate.layer.limiter().acquire(&get().into_parts().0).await.unwrap();
        let before = left(&gate.layer).await;
        for _ in 0..3 {
            cancelled(&gate, "both hold a slot", async || gate.held() == 2).await;
            assert_eq!((workers.in_flight(), fleet.in_flight()), (1, 1));
            gate.holds(1).await;
            // In Redis it is given back in the background.
            until("its place is given up", async || left(&gate.layer).await == before).await;
        }
        drop(permit);
        gate.holds(0).await;
        assert_eq!((workers.in_flight(), fleet.in_flight()), (0, 0));
    }
}

#[tokio::test]
async fn a_request_that_is_cancelled_while_redis_is_asked_leaves_the_shedders() {
    let (workers, fleet) = (busy_for(0), room_for(9));
    let gate = Gate::redis(|builder| {
        rates_and_slots(builder).shedder(workers.clone()).shedder(fleet.clone())
    });
    // There is a connection already.
    drop(gate.layer.limiter().acquire(&get().into_parts().0).await.unwrap());
    gate.holds(0).await;
    let (_, server) = gate.redis.as_ref().unwrap();
    server.pause();
    for _ in 0..3 {
        cancelled(&gate, "it is in flight", async || fleet.in_flight() == 1).await;
        assert_eq!((workers.in_flight(), fleet.in_flight()), (0, 0));
    }
    server.resume();
    // What the server decided all the same is held by nobody.
    gate.comes_to_hold(0).await;
}

#[test]
fn a_layer_with_nothing_but_shedders_sheds() {
    let fleet = room_for(1);
    let layer = RateLimitLayer::builder().shedder(fleet.clone()).build().unwrap();
    let answer = support::send(layer.layer(service_fn(support::ok)), get());
    assert_eq!(answer.status(), 200);
    assert!(answer.headers().is_empty(), "there is nothing to tell");
    let limiter = layer.limiter();
    let (parts, ()) = get().into_parts();
    let (_, permit) = limiter.try_acquire(&parts).unwrap();
    let answer = support::send(layer.layer(service_fn(support::ok)), get());
    assert_eq!(answer.status(), 503);
    assert!(now(limiter.acquire(&parts)).is_err());
    drop(permit);
    // Who returns no permit cannot hold a place.
    let rejection = limiter.check(&parts).unwrap_err();
    assert!(matches!(rejection.reason(), Reason::Faulty { policy: "fleet", .. }), "{rejection:?}");
    assert_eq!(fleet.in_flight(), 0);
    assert!(limiter.peek(&parts).unwrap().outcomes().is_empty());
    assert_eq!(
        layer.interceptor().unwrap_err(),
        BuildError::CannotHold { policy: "fleet".to_owned() }
    );
}

#[test]
fn shedders_that_cannot_be_are_told() {
    let shedder = || room_for(1);
    let limiter = Limiter::<str>::builder().shedder(shedder());
    let error = limiter.build().unwrap_err();
    assert_eq!(error, BuildError::NoPriority { shedder: "fleet".to_owned() });
    assert!(error.to_string().contains("priority"), "{error}");
    let limiter = Limiter::<str>::builder().shedder(shedder()).priority(|_: &str| Priority::Read);
    assert!(limiter.build().is_ok());

    let layer = || RateLimitLayer::builder().key(Global).shedder(shedder());
    for (builder, name) in [
        (layer().policy(Policy::concurrency("fleet", 1)), "fleet"),
        (layer().policy(Policy::token_bucket("Fleet", Quota::per_second(1))), "Fleet"),
        (layer().shedder(shedder()), "fleet"),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!(error, BuildError::DuplicateName { name: name.to_owned() });
    }
}

// === limits that find themselves ===

/// A service behind a limit that finds itself, on a clock that is moved by hand.
struct Found {
    clock: ManualClock,
    limit: Adaptive,
    layer: RateLimitLayer,
    /// How long a request takes from now on, in microseconds.
    latency_us: Arc<AtomicU64>,
    /// How often the service was called.
    called: Arc<AtomicU64>,
}

impl Found {
    fn new(configure: impl FnOnce(RateLimitLayerBuilder) -> RateLimitLayerBuilder) -> Self {
        Self::by(20, configure)
    }

    /// The limit goes by so many requests at a time.
    fn by(
        samples: usize,
        configure: impl FnOnce(RateLimitLayerBuilder) -> RateLimitLayerBuilder,
    ) -> Self {
        let clock = ManualClock::at(T0);
        let limit = Adaptive::builder()
            .initial(20)
            .max(100_000)
            .window(ms(1))
            .window_samples(samples)
            .probe_samples(samples)
            .longest_probe(secs(3_600))
            .probe_interval(secs(1_000_000))
            .build()
            .unwrap();
        let builder = RateLimitLayer::builder().clock(&clock).key(Global);
        let builder = builder.policy(Policy::concurrency("in-flight", limit.clone()));
        let layer = configure(builder).build().unwrap();
        Self { clock, limit, layer, latency_us: Arc::default(), called: Arc::default() }
    }

    /// A request, which is answered so long after the service is called.
    fn call(&self) -> Call {
        let (clock, latency_us) = (self.clock.clone(), self.latency_us.clone());
        let called = self.called.clone();
        let service = service_fn(move |_: Request<()>| {
            called.fetch_add(1, Relaxed);
            let clock = clock.clone();
            let end = clock.now() + Duration::from_micros(latency_us.load(Relaxed));
            poll_fn(move |_| {
                if clock.now() < end {
                    return Poll::Pending;
                }
                Poll::Ready(Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello")))))
            })
        });
        Box::pin(self.layer.layer(service).oneshot(get()))
    }

    /// As many requests as there may be at the same time, each of which takes so long. The last is
    /// answered first. The bodies of their responses are not read yet.
    fn round(&self, latency: Duration) -> Vec<Answer> {
        self.latency_us.store(latency.as_micros() as u64, Relaxed);
        let mut calls: Vec<_> = (0..self.limit.limit()).map(|_| self.call()).collect();
        assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
        self.clock.advance(latency);
        let answers = calls.into_iter().rev().map(|mut call| answer(poll(&mut call)));
        answers.collect()
    }
}

type Answer = Response<tollgate::ResponseBody<Full<Bytes>>>;
type Call = Pin<Box<dyn Future<Output = Result<Answer, Infallible>>>>;

fn poll(call: &mut Call) -> Poll<Result<Answer, Infallible>> {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

fn answer(polled: Poll<Result<Answer, Infallible>>) -> Answer {
    let Poll::Ready(Ok(answer)) = polled else { panic!("it is not answered") };
    assert_eq!(answer.status(), 200);
    answer
}

#[test]
fn slow_answers_shrink_a_limit_and_fast_ones_let_it_grow() {
    let found = Found::new(|builder| builder);
    for _ in 0..30 {
        found.round(ms(10));
    }
    let grown = found.limit.limit();
    assert!(grown > 40, "{grown}");
    assert_eq!(found.limit.baseline(), Some(ms(10)));
    for _ in 0..6 {
        found.round(ms(30));
    }
    let shrunk = found.limit.limit();
    assert!(shrunk < grown * 3 / 4, "{grown}, {shrunk}");
    for _ in 0..30 {
        found.round(ms(10));
    }
    let again = found.limit.limit();
    assert!(again > grown, "{grown}, {shrunk}, {again}");
    // Nobody uses it, so it says nothing that there is no queue.
    let alone = || {
        for _ in 0..50 {
            let mut call = found.call();
            assert!(poll(&mut call).is_pending());
            found.clock.advance(ms(10));
            answer(poll(&mut call));
        }
        found.limit.limit()
    };
    let last = alone();
    assert_eq!(alone(), last);
    assert_eq!(found.layer.limiter().in_flight("in-flight"), Some(0));
}

#[test]
fn the_time_that_a_client_takes_for_the_body_does_not_count() {
    let found = Found::new(|builder| builder);
    for _ in 0..30 {
        let answers = found.round(ms(10));
        found.clock.advance(secs(7));
        assert_eq!(found.layer.limiter().in_flight("in-flight"), Some(answers.len() as u64));
        for answer in answers {
            now(answer.into_body().collect()).unwrap();
        }
    }
    assert_eq!(found.limit.baseline(), Some(ms(10)));
    assert!(found.limit.limit() > 40, "{:?}", found.limit);
}

#[test]
fn requests_that_are_cancelled_do_not_count() {
    let found = Found::new(|builder| builder);
    let cancel = |times: usize| {
        for _ in 0..times {
            found.latency_us.store(u64::MAX, Relaxed);
            let mut calls: Vec<_> = (0..found.limit.limit()).map(|_| found.call()).collect();
            assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
            found.clock.advance(secs(3));
        }
    };
    cancel(20);
    assert_eq!((found.limit.limit(), found.limit.baseline()), (20, None));
    for _ in 0..30 {
        found.round(ms(10));
        cancel(1);
    }
    assert_eq!(found.limit.baseline(), Some(ms(10)));
    let grown = found.limit.limit();
    assert!(grown > 40, "{grown}");
    cancel(20);
    assert_eq!(found.limit.limit(), grown);
    assert_eq!(found.layer.limiter().in_flight("in-flight"), Some(0));
}

/// A line in which each request waits for a second.
fn line() -> Policy {
    Policy::leaky_bucket("line", Quota::per_second(1)).max_delay(secs(9))
}

#[test]
fn the_wait_for_a_turn_does_not_count() {
    let found = Found::new(|builder| builder.policy(line()));
    found.latency_us.store(10_000, Relaxed);
    for _ in 0..60 {
        let mut calls = [found.call(), found.call(), found.call()];
        for call in &mut calls {
            assert!(poll(call).is_pending());
        }
        for call in &mut calls {
            // Now it is called.
            assert!(poll(call).is_pending());
            found.clock.advance(ms(10));
            answer(poll(call));
            found.clock.advance(ms(990));
        }
    }
    assert_eq!(found.limit.baseline(), Some(ms(10)));
    assert_eq!(found.limit.limit(), 20);
}

#[test]
fn the_wait_for_a_turn_does_not_count_without_a_layer_either() {
    let found = Found::new(|builder| builder.policy(line()));
    let (parts, ()) = get().into_parts();
    for _ in 0..60 {
        let mut waits = [(); 3].map(|()| Box::pin(found.layer.limiter().acquire(&parts)));
        let mut poll =
            |number: usize| waits[number].as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let mut first = match poll(0) {
            Poll::Ready(answer) => Some(answer),
            Poll::Pending => panic!("it is its turn"),
        };
        assert!(poll(1).is_pending() && poll(2).is_pending());
        for number in 0..3 {
            let answer = first.take().map_or_else(|| poll(number), Poll::Ready);
            let Poll::Ready(Ok((_, permit))) = answer else { panic!("it is its turn") };
            found.clock.advance(ms(10));
            drop(permit);
            found.clock.advance(ms(990));
        }
    }
    assert_eq!(found.limit.baseline(), Some(ms(10)));
    assert_eq!(found.limit.limit(), 20);
}

#[tokio::test]
async fn the_time_that_redis_takes_does_not_count() {
    let server = Server::start(Flavour::Redis7);
    let store = patient(&server).build().unwrap();
    let rate = Policy::token_bucket("rate", Quota::per_second(1_000));
    let found = Found::by(1, |builder| builder.policy(rate).store(store));
    found.latency_us.store(10_000, Relaxed);
    for number in 1..=10 {
        server.pause();
        let mut call = found.call();
        assert!(poll(&mut call).is_pending());
        found.clock.advance(secs(1));
        server.resume();
        until("the service is called", async || {
            assert!(poll(&mut call).is_pending());
            found.called.load(Relaxed) == number
        })
        .await;
        found.clock.advance(ms(10));
        drop(answer(poll(&mut call)));
    }
    assert_eq!(found.limit.baseline(), Some(ms(10)));
}

// === panics ===

/// Answers 500 where the inner service panics.
#[derive(Clone)]
struct CatchPanics<S>(S);

impl<S> Service<AxumRequest> for CatchPanics<S>
where
    S: Service<AxumRequest, Response = AxumResponse, Error = Infallible, Future: Send + 'static>,
{
    type Response = AxumResponse;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<AxumResponse, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: AxumRequest) -> Self::Future {
        let caught = || Ok(StatusCode::INTERNAL_SERVER_ERROR.into_response());
        let Ok(call) = catch_unwind(AssertUnwindSafe(|| self.0.call(request))) else {
            return Box::pin(async move { caught() });
        };
        Box::pin(async move {
            let mut call = pin!(call);
            poll_fn(|cx| {
                let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().poll(cx)));
                polled.unwrap_or_else(|_| Poll::Ready(caught()))
            })
            .await
        })
    }
}

/// BR-48, under a layer that catches panics.
#[tokio::test]
async fn br_48_panics_shrink_nothing() {
    async fn at_once() {
        panic!("the handler panics");
    }
    async fn later() {
        yield_now().await;
        panic!("the handler panics later");
    }
    let in_call =
        service_fn(|_: AxumRequest| -> std::future::Ready<Result<AxumResponse, Infallible>> {
            panic!("the call panics")
        });
    let in_body = any(|| async {
        let frames = iter([true, false]).map(|is_first| {
            assert!(is_first, "the body panics");
            Ok::<_, Infallible>("first")
        });
        Body::from_stream(frames)
    });
    let fleet = room_for(9);
    let stack = |builder: RateLimitLayerBuilder| {
        let keyed = Policy::token_bucket("keyed", Quota::per_second(1_000)).key(|parts: &Parts| {
            assert!(parts.uri.path() != "/hello", "the extractor panics");
            0_u32
        });
        let slots = Policy::concurrency("in-flight", 2);
        builder.policy(slots).policy(keyed).shedder(fleet.clone())
    };
    for gate in Gate::both(stack) {
        let (app, mut opened) = app();
        let app = app
            .route("/at-once", any(at_once))
            .route("/later", any(later))
            .route("/in-call", any_service(in_call))
            .route("/in-body", in_body.clone())
            .layer(gate.layer.clone())
            .layer(layer_fn(CatchPanics));
        let address = net::serve(app).await;
        for version in VERSIONS {
            for path in ["/at-once", "/later", "/in-call", "/in-body", "/hello"] {
                for _ in 0..10 {
                    let mut client = Client::connect(version, address).await;
                    let answer = client.send(request(Method::GET, path)).await;
                    if path == "/in-body" {
                        // Nobody can catch that but the server. The head may be lost as well.
                        if let Ok(response) = answer {
                            assert_eq!(response.status(), 200);
                            assert!(response.into_body().collect().await.is_err());
                        }
                    } else {
                        assert_eq!(answer.unwrap().status(), 500, "{path}");
                    }
                    until("it is over", async || gate.held() == 0).await;
                }
                gate.comes_to_hold(0).await;
                assert_eq!(fleet.in_flight(), 0);
                let mut client = Client::connect(version, address).await;
                let mut other = Client::connect(version, address).await;
                let two = [client.get("/stream").await, other.get("/stream").await];
                assert!(two.iter().all(|response| response.status() == 200));
                assert_eq!(status(address, "/empty").await, 429);
                gate.holds(2).await;
                for _ in 0..2 {
                    drop(opened.recv().await.unwrap());
                }
                for response in two {
                    whole(response).await;
                }
                gate.comes_to_hold(0).await;
                assert_eq!(fleet.in_flight(), 0);
            }
        }
    }
}
