//! Real servers and clients on real sockets.

mod support;

use axum::{
    Router,
    extract::Request as AxumRequest,
    routing::{any, post},
};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use std::{collections::HashMap, net::SocketAddr};
use support::{
    Fields, T0,
    net::{self, END_HEADERS, END_STREAM, Frame, HEADERS},
    secs,
};
use tokio::task::JoinSet;
use tollgate::{
    LocalStore, ManualClock, Policy, Quota, RateLimitLayer, RateLimitLayerBuilder,
    key::{Global, Header, PeerIp},
    reply::GrpcCode,
};
use tonic::{Code, service::LayerExt};
use tonic_health::pb::HealthCheckRequest;
use tonic_types::StatusExt;

fn request(user: &str) -> Request<Empty<Bytes>> {
    Request::get("http://localhost/").header("x-user", user).body(Empty::new()).unwrap()
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/", any(|| async { "hello" })).layer(layer)
}

/// The head and the whole body.
async fn whole(response: Response<Incoming>) -> Response<Bytes> {
    let (head, body) = response.into_parts();
    Response::from_parts(head, body.collect().await.unwrap().to_bytes())
}

fn count(statuses: &[StatusCode], status: u16) -> usize {
    statuses.iter().filter(|&&found| found == status).count()
}

// === axum ===

/// BR-52
#[tokio::test]
async fn a_budget_is_one_for_all_connections() {
    let layer = || {
        RateLimitLayer::builder()
            .clock(&ManualClock::at(T0))
            .key((PeerIp::new(), Header::from_static("x-user")))
            .policy(Policy::fixed_window("p", Quota::per_minute(5)))
            .build()
            .unwrap()
    };
    let plain = || Router::new().route("/", any(|| async { "hello" }));
    for app in [plain().layer(layer()), plain().route_layer(layer())] {
        let address = net::serve(app).await;
        let mut statuses = Vec::new();
        for _ in 0..20 {
            let mut client = net::http1(address).await;
            statuses.push(client.send_request(request("new connections")).await.unwrap().status());
        }
        assert_eq!((count(&statuses, 200), count(&statuses, 429)), (5, 15));

        let client = net::http2(address).await;
        let mut calls = JoinSet::new();
        for _ in 0..20 {
            let mut client = client.clone();
            calls.spawn(async move {
                client.send_request(request("one connection")).await.unwrap().status()
            });
        }
        let statuses = calls.join_all().await;
        assert_eq!((count(&statuses, 200), count(&statuses, 429)), (5, 15));
    }
}

/// Sends requests over 16 connections at once, one half of them HTTP/1 and the other HTTP/2, one
/// after the other on each. Returns the statuses by user.
async fn flood(
    address: SocketAddr,
    each: usize,
    user: impl Fn(usize) -> String,
) -> HashMap<String, Vec<StatusCode>> {
    let mut clients = JoinSet::new();
    for connection in 0..16 {
        let user = user(connection);
        clients.spawn(async move {
            let mut statuses = Vec::new();
            let mut note = async |response: Response<Incoming>| {
                let response = whole(response).await;
                assert_is_well_formed(&response);
                statuses.push(response.status());
            };
            if connection % 2 == 0 {
                let mut client = net::http1(address).await;
                for _ in 0..each {
                    client.ready().await.unwrap();
                    note(client.send_request(request(&user)).await.unwrap()).await;
                }
            } else {
                let mut client = net::http2(address).await;
                for _ in 0..each {
                    note(client.send_request(request(&user)).await.unwrap()).await;
                }
            }
            (user, statuses)
        });
    }
    let mut by_user = HashMap::<_, Vec<_>>::new();
    for (user, statuses) in clients.join_all().await {
        by_user.entry(user).or_default().extend(statuses);
    }
    by_user
}

fn assert_is_well_formed(response: &Response<Bytes>) {
    let text = |name| response.text(name).unwrap();
    assert_eq!(text("content-length").parse(), Ok(response.body().len()));
    for name in ["ratelimit", "ratelimit-policy"] {
        let list: Result<sfv::List, _> = sfv::Parser::new(text(name)).parse();
        assert!(list.is_ok_and(|list| !list.is_empty()), "{}", text(name));
    }
    if response.status() == 200 {
        assert_eq!(response.body(), "hello");
        assert!(response.retry_after().is_none());
        return;
    }
    assert_eq!(response.status(), 429);
    assert_eq!(text("content-type"), "application/problem+json");
    assert_eq!(text("cache-control"), "no-store");
    assert!(response.retry_after().unwrap() >= 1);
    let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["title"], "Quota Exceeded");
    assert!(!problem["violated-policies"].as_array().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_burst_is_admitted_of_all_requests_on_all_connections() {
    let layer = RateLimitLayer::builder()
        .key(PeerIp::new())
        .policy(Policy::token_bucket("p", Quota::per_hour(1).burst(137)))
        .build()
        .unwrap();
    let address = net::serve(app(layer)).await;
    let statuses =
        flood(address, 25, |_| "everybody".to_owned()).await.remove("everybody").unwrap();
    assert_eq!((count(&statuses, 200), count(&statuses, 429)), (137, 263));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn two_policies_are_both_exact_on_all_connections() {
    // 8 users of 50 requests each; half of them by a route of their own.
    let layer = RateLimitLayer::builder()
        .store(LocalStore::new().max_keys(100))
        .policy(Policy::sliding_log("user", Quota::per_hour(15)).key(Header::from_static("x-user")))
        .policy(Policy::token_bucket("all", Quota::per_hour(1).burst(101)).key(Global))
        .build()
        .unwrap();
    let limiter = layer.limiter().clone();
    let address = net::serve(app(layer)).await;
    let by_user = flood(address, 25, |connection| format!("user{}", connection / 2)).await;
    let admitted: Vec<_> = by_user.values().map(|statuses| count(statuses, 200)).collect();
    assert_eq!(by_user.values().map(Vec::len).sum::<usize>(), 400);
    assert_eq!(admitted.iter().sum::<usize>(), 101);
    assert!(admitted.iter().all(|&admitted| admitted <= 15), "{admitted:?}");
    // What the users have left is what they were not admitted for.
    for (user, statuses) in &by_user {
        let (parts, _) = request(user).into_parts();
        let rejection = limiter.peek(&parts).unwrap_err();
        assert_eq!(rejection.outcomes()[0].remaining() as usize, 15 - count(statuses, 200));
    }
}

#[tokio::test]
async fn a_connection_lives_on_after_rejections_of_any_method() {
    let layer = RateLimitLayer::builder()
        .key(Header::from_static("x-user"))
        .policy(Policy::fixed_window("p", Quota::per_calendar_month(1)))
        .build()
        .unwrap();
    let mut client = net::http1(net::serve(app(layer)).await).await;
    let mut lengths = Vec::new();
    for method in ["GET", "HEAD", "GET", "HEAD", "POST", "DELETE", "OPTIONS"] {
        let mut request = request("one");
        *request.method_mut() = method.parse().unwrap();
        client.ready().await.unwrap();
        let response = whole(client.send_request(request).await.unwrap()).await;
        let first = lengths.is_empty();
        assert_eq!(response.status(), if first { 200 } else { 429 }, "{method}");
        assert_eq!(response.body().is_empty(), method == "HEAD");
        lengths.push(response.number("content-length").unwrap());
    }
    // HEAD is told the length that GET has.
    assert_eq!(lengths[1], lengths[2]);
    assert_eq!(lengths[3], lengths[2]);
    client.ready().await.unwrap();
    assert_eq!(client.send_request(request("another")).await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_large_request_body_goes_through_unharmed() {
    let layer = RateLimitLayer::builder()
        .key(PeerIp::new())
        .policy(Policy::fixed_window("p", Quota::per_calendar_month(2)))
        .build()
        .unwrap();
    let echo = post(|request: AxumRequest| async { request.into_body() });
    let address = net::serve(Router::new().route("/", echo).layer(layer)).await;
    let client = Client::builder(TokioExecutor::new()).build_http();
    let body = Bytes::from((0..1_000_000_u32).map(|n| (n % 251) as u8).collect::<Vec<_>>());
    for status in [200, 200, 429] {
        let request = Request::post(format!("http://{address}/"));
        let request = request.body(Full::new(body.clone())).unwrap();
        let response = whole(client.request(request).await.unwrap()).await;
        assert_eq!(response.status(), status);
        assert_eq!(*response.body() == body, status == 200);
    }
}

#[tokio::test]
async fn a_client_that_goes_away_while_it_waits_gives_its_place_up() {
    let clock = ManualClock::at(T0);
    let layer = RateLimitLayer::builder()
        .clock(&clock)
        .key(Global)
        .policy(Policy::leaky_bucket("p", Quota::per_second(1)).max_delay(secs(9)))
        .build()
        .unwrap();
    let limiter = layer.limiter().clone();
    let address = net::serve(app(layer)).await;
    let until_left = async |remaining| {
        let (parts, _) = request("").into_parts();
        let left = || limiter.peek(&parts).unwrap().outcomes()[0].remaining();
        let reached = async {
            while left() != remaining {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(secs(30), reached).await.expect("it is not given back");
    };
    until_left(10).await;
    let mut calls = Vec::new();
    for left in [9, 8, 7, 6] {
        let mut client = net::http1(address).await;
        let call = async move { client.send_request(request("")).await.unwrap().status() };
        calls.push(tokio::spawn(call));
        until_left(left).await;
    }
    // The third goes away, and the fourth has its turn.
    calls.remove(2).abort();
    until_left(7).await;
    clock.advance(secs(2));
    for call in calls {
        assert_eq!(call.await.unwrap(), 200);
    }
}

// === tonic ===

/// A layer for which the second call within a minute is one too many.
fn one_call(configure: fn(RateLimitLayerBuilder) -> RateLimitLayerBuilder) -> RateLimitLayer {
    let builder = RateLimitLayer::builder()
        .clock(&ManualClock::at(T0))
        .key(PeerIp::new())
        .policy(Policy::fixed_window("calls", Quota::per_minute(1)));
    configure(builder).build().unwrap()
}

/// A server with the layer around all of its services.
async fn serve_grpc(layer: RateLimitLayer) -> SocketAddr {
    let (address, incoming) = net::listen().await;
    let (_, health) = tonic_health::server::health_reporter();
    let server = tonic::transport::Server::builder().layer(layer).add_service(health);
    tokio::spawn(server.serve_with_incoming(incoming));
    address
}

/// The status that a call was turned away with, which has to be as it should.
fn assert_is_limited(status: &tonic::Status, code: Code) {
    assert_eq!(status.code(), code);
    assert_eq!(status.message(), "Limited by `calls`. Try again in 60 s.");
    let metadata = status.metadata().clone().into_headers();
    assert_eq!(metadata.text("grpc-retry-pushback-ms"), Some("60000"));
    assert_eq!(metadata.retry_after(), Some(60));
    assert_eq!(metadata.text("ratelimit"), Some(r#""calls";r=0;t=60"#));
    assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(secs(60)));
}

/// BR-54
#[tokio::test]
async fn unary_calls_over_the_limit_end_with_a_status_and_a_hint_when_to_retry() {
    for (configure, code) in [
        ((|builder| builder) as fn(RateLimitLayerBuilder) -> _, Code::ResourceExhausted),
        (|builder| builder.grpc_code(GrpcCode::Unavailable), Code::Unavailable),
    ] {
        let mut client = net::connect(serve_grpc(one_call(configure)).await).await;
        let response = client.check(HealthCheckRequest::default()).await.unwrap();
        let metadata = response.metadata().clone().into_headers();
        assert_eq!(metadata.text("ratelimit"), Some(r#""calls";r=0;t=60"#));
        assert_eq!(metadata.text("ratelimit-policy"), Some(r#""calls";q=1;w=60"#));
        let status = client.check(HealthCheckRequest::default()).await.unwrap_err();
        assert_is_limited(&status, code);
    }
}

/// BR-54
#[tokio::test]
async fn streams_over_the_limit_end_with_a_status_and_a_hint_when_to_retry() {
    let mut client = net::connect(serve_grpc(one_call(|builder| builder)).await).await;
    let mut stream = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    assert!(stream.message().await.unwrap().is_some());
    let status = client.watch(HealthCheckRequest::default()).await.unwrap_err();
    assert_is_limited(&status, Code::ResourceExhausted);
}

/// BR-54
#[tokio::test]
async fn a_call_that_is_turned_away_is_answered_by_a_single_frame() {
    let address = serve_grpc(one_call(|builder| builder)).await;
    let path = "/grpc.health.v1.Health/Check";
    let admitted = net::frames_of_call(address, path).await;
    assert!(admitted.len() > 1, "{admitted:?}");
    for path in [path, "/grpc.health.v1.Health/Watch"] {
        let frames = net::frames_of_call(address, path).await;
        let [Frame { kind, flags, .. }] = frames[..] else { panic!("{frames:?}") };
        assert_eq!(kind, HEADERS);
        assert_eq!(flags, END_STREAM | END_HEADERS);
    }
}

#[tokio::test]
async fn a_call_without_a_key_is_told_so() {
    let layer = RateLimitLayer::builder()
        .key(Header::from_static("x-api-key"))
        .policy(Policy::fixed_window("calls", Quota::per_minute(9)))
        .build()
        .unwrap();
    let mut client = net::connect(serve_grpc(layer).await).await;
    let status = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(status.message(), "the x-api-key header is missing or empty");
    let metadata = status.metadata().clone().into_headers();
    assert_eq!(metadata.text("grpc-retry-pushback-ms"), Some("-1"));
}

#[tokio::test]
async fn a_single_service_can_be_limited_by_a_layer_or_an_interceptor() {
    let (_, health) = tonic_health::server::health_reporter();
    let (address, incoming) = net::listen().await;
    let service = one_call(|builder| builder).named_layer(health.clone());
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));
    let mut by_layer = net::connect(address).await;

    let (address, incoming) = net::listen().await;
    let interceptor = one_call(|builder| builder).interceptor().unwrap();
    let service = tonic::service::interceptor::InterceptedService::new(health, interceptor);
    let server = tonic::transport::Server::builder().add_service(service);
    tokio::spawn(server.serve_with_incoming(incoming));
    let mut by_interceptor = net::connect(address).await;

    for client in [&mut by_layer, &mut by_interceptor] {
        assert!(client.check(HealthCheckRequest::default()).await.is_ok());
        let status = client.check(HealthCheckRequest::default()).await.unwrap_err();
        assert_is_limited(&status, Code::ResourceExhausted);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_burst_is_admitted_of_all_calls_on_all_channels() {
    let layer = RateLimitLayer::builder()
        .key(PeerIp::new())
        .policy(Policy::token_bucket("calls", Quota::per_hour(1).burst(61)))
        .build()
        .unwrap();
    let address = serve_grpc(layer).await;
    let mut channels = JoinSet::new();
    for _ in 0..8 {
        channels.spawn(async move {
            let mut client = net::connect(address).await;
            let mut admitted = 0;
            for _ in 0..20 {
                match client.check(HealthCheckRequest::default()).await {
                    Ok(_) => admitted += 1,
                    Err(status) => assert_eq!(status.code(), Code::ResourceExhausted),
                }
            }
            admitted
        });
    }
    assert_eq!(channels.join_all().await.into_iter().sum::<u32>(), 61);
}
