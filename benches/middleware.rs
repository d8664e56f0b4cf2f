//! What a limit adds to a request, in process: nanoseconds above the same service without it.
//!
//! `cargo bench --bench middleware`
//!
//! An axum router answers an empty 200; tollgate and tower_governor limit it by peer address under a
//! quota that admits everything. The same without keys around a trivial service, against tower's
//! own limits.

// The line that each figure ends with, and what runs it, are shared with the other benches.
mod support;

use axum::{Router, body::Body, extract::ConnectInfo, http::Request, routing::get};
use std::{
    convert::Infallible,
    future::Future,
    net::{Ipv4Addr, SocketAddr},
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};
use support::{Operation, interleave, result};
use tollgate::{
    Limiter, LocalStore, Policy, Quota, RateLimitLayer,
    key::{Global, PeerIp},
    reply::Headers,
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt};
use tower_governor::{GovernorLayer, governor::GovernorConfigBuilder};

const BENCH: &str = "middleware";
const UNIT: &str = "ns added/request";

/// So large that everything is admitted, and so slow to come back that nothing is forgotten.
const BURST: u32 = 500_000_000;

fn main() {
    for (name, keys) in [("hot key", 1), ("100k keys", 100_000)] {
        for threads in [1, 2] {
            routers(name, keys, threads);
        }
    }
    trivial();
}

fn routers(name: &str, keys: usize, threads: usize) {
    let bare = || Router::new().route("/", get(|| async {}));
    let services = [
        bare(),
        bare().layer(tollgate(Headers::default(), true)),
        bare().layer(tollgate(Headers::default(), false)),
        bare().layer(tollgate(Headers::none(), false)),
        bare().layer(GovernorLayer::new(
            GovernorConfigBuilder::default()
                .per_second(1)
                .burst_size(BURST)
                .use_headers()
                .finish()
                .unwrap(),
        )),
        bare().layer(GovernorLayer::new(
            GovernorConfigBuilder::default().per_second(1).burst_size(BURST).finish().unwrap(),
        )),
    ];
    for service in &services {
        (0..keys).for_each(|i| call(service, i));
    }
    let contenders: Vec<_> = services
        .iter()
        .map(|service| -> Operation<'_> { Box::new(move |i| call(service, scatter(i, keys))) })
        .collect();
    let times = interleave(&contenders, threads);
    let [bare, exposing, plain, silent, governor, governor_silent] = times[..] else {
        unreachable!("as many times as services")
    };
    let threads = if threads == 1 { String::new() } else { format!(", {threads} threads") };
    for (case, ours, theirs) in [
        ("headers on", exposing, governor),
        ("headers on, decision not exposed", plain, governor),
        ("headers off, decision not exposed", silent, governor_silent),
    ] {
        let case = format!("{name}, {case}{threads}");
        result(BENCH, &case, UNIT, ours - bare, "tower_governor", theirs - bare);
    }
    println!("bare router: {bare:.0} ns/request");
}

fn tollgate(headers: Headers, expose_decision: bool) -> RateLimitLayer {
    RateLimitLayer::builder()
        .store(LocalStore::new().max_keys(200_000))
        .key(PeerIp::new())
        .policy(Policy::token_bucket("peer", Quota::per_second(1).burst(BURST.into())))
        .headers(headers)
        .expose_decision(expose_decision)
        .build()
        .unwrap()
}

/// Walks through the keys in no order that memory would like.
fn scatter(index: usize, keys: usize) -> usize {
    index.wrapping_mul(0x9E37_79B9) % keys
}

fn call(router: &Router, key: usize) {
    let peer = Ipv4Addr::from_bits(0x0A00_0000 + key as u32);
    let mut request = Request::new(Body::empty());
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from((peer, 40_000))));
    let response = now(router.clone().oneshot(request)).unwrap();
    assert!(response.status().is_success());
}

/// The output of a future that does not wait for anything.
fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("nothing here waits"),
    }
}

/// One budget for everybody around a service that does nothing, as tower's own limits have it.
fn trivial() {
    let service = tower::service_fn(|number: u64| async move { Ok::<_, Infallible>(number) });
    let limiter = Limiter::<u64>::builder()
        .key(Global)
        .policy(Policy::token_bucket("all", Quota::per_second(1).burst(BURST.into())))
        .build()
        .unwrap();
    let limited = RateLimitLayer::calls(limiter).layer(service);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    // A buffer is what makes tower's rate limit shareable.
    let buffered = runtime.block_on(async {
        ServiceBuilder::new()
            .buffer(1_024)
            .rate_limit(u64::from(BURST), Duration::from_secs(1))
            .service(service)
    });
    let ours = |mut service: tollgate::RateLimit<_, _>| async move {
        service.ready().await.unwrap();
        service.call(1).await.unwrap()
    };
    let runs = 7;
    let (mut bare_ns, mut ours_ns, mut tower_ns) = (Vec::new(), Vec::new(), Vec::new());
    // tower's worker lives in the runtime, so this one is timed there and on one thread.
    for _ in 0..runs {
        bare_ns.push(timed(&runtime, || {
            let mut service = service;
            async move { service.call(1).await.unwrap() }
        }));
        ours_ns.push(timed(&runtime, || ours(limited.clone())));
        tower_ns.push(timed(&runtime, || {
            let mut service = buffered.clone();
            async move {
                service.ready().await.unwrap();
                service.call(1).await.unwrap()
            }
        }));
    }
    let bare = support::median(bare_ns);
    result(
        BENCH,
        "trivial service, one budget",
        UNIT,
        support::median(ours_ns) - bare,
        "tower RateLimit in a Buffer",
        support::median(tower_ns) - bare,
    );
}

fn timed<F: Future<Output = u64>>(runtime: &tokio::runtime::Runtime, call: impl Fn() -> F) -> f64 {
    const CALLS: u32 = 50_000;
    runtime.block_on(async {
        let start = support::now();
        for _ in 0..CALLS {
            std::hint::black_box(call().await);
        }
        start.elapsed().as_nanos() as f64 / f64::from(CALLS)
    })
}
