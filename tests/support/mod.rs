//! What the tests share: a limited app on a clock that is moved by hand, and requests to it.

#![allow(dead_code, reason = "every test crate uses a part of it")]

#[cfg(feature = "cluster")]
pub(crate) mod clusters;
pub(crate) mod crowd;
#[cfg(feature = "redis")]
pub(crate) mod fleet;
#[cfg(feature = "redis")]
pub(crate) mod gate;
#[cfg(feature = "redis")]
pub(crate) mod instance;
pub(crate) mod net;
pub(crate) mod process;
pub(crate) mod proxy;
pub(crate) mod puppet;
pub(crate) mod sentinels;
pub(crate) mod server;
pub(crate) mod stacks;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Body;
use http_body_util::{BodyExt, Empty};
use proptest::test_runner::{Config, RngSeed};
use std::{
    convert::Infallible,
    fmt::Debug,
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tollgate::{Decision, ManualClock, RateLimitLayer, RateLimitLayerBuilder, key::PeerAddr};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Where clocks stand at first: 20,000 days after the epoch, so that a minute, an hour and a day
/// begin there.
pub(crate) const T0: Duration = Duration::from_secs(20_000 * 86_400);

pub(crate) const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

pub(crate) const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub(crate) const fn us(us: u64) -> Duration {
    Duration::from_micros(us)
}

pub(crate) const YEAR: Duration = secs(365 * 86_400);

/// A service behind a rate limit. It answers all that comes through with an empty 200, at once.
pub(crate) struct App {
    pub(crate) clock: ManualClock,
    pub(crate) layer: RateLimitLayer,
}

/// The decision that the service found in the request's extensions, put into the response's.
#[derive(Clone, Debug)]
pub(crate) struct Seen(pub(crate) Option<Decision>);

impl App {
    pub(crate) fn new(
        configure: impl FnOnce(RateLimitLayerBuilder) -> RateLimitLayerBuilder,
    ) -> Self {
        let clock = ManualClock::at(T0);
        let layer = configure(RateLimitLayer::builder().clock(&clock)).build().unwrap();
        Self { clock, layer }
    }

    /// Sets the clock to so long after [`T0`].
    pub(crate) fn at(&self, time: Duration) -> &Self {
        self.clock.set(T0 + time);
        self
    }

    pub(crate) fn send(&self, request: Request<()>) -> Response<Bytes> {
        send(self.layer.layer(service_fn(ok)), request)
    }

    /// Only the status of the answer.
    pub(crate) fn status(&self, request: Request<()>) -> u16 {
        self.send(request).status().as_u16()
    }

    /// The statuses of the answers to this many requests, one after the other.
    pub(crate) fn statuses(&self, count: usize, request: impl Fn() -> Request<()>) -> Vec<u16> {
        (0..count).map(|_| self.status(request())).collect()
    }

    pub(crate) fn tracked_keys(&self) -> usize {
        self.layer.limiter().tracked_keys()
    }
}

/// The service that all apps have.
pub(crate) async fn ok<B>(request: Request<B>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let mut response = Response::new(Empty::new());
    response.extensions_mut().insert(Seen(request.extensions().get().cloned()));
    Ok(response)
}

/// The whole answer of a service that takes no time.
pub(crate) fn send<S, A, B>(service: S, request: Request<A>) -> Response<Bytes>
where
    S: Service<Request<A>, Response = Response<B>>,
    S::Error: Debug,
    B: Body<Data = Bytes>,
    B::Error: Debug,
{
    now(async {
        let (head, body) = service.oneshot(request).await.unwrap().into_parts();
        Response::from_parts(head, body.collect().await.unwrap().to_bytes())
    })
}

/// What comes of a future that does not have to wait.
pub(crate) fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it has to wait"),
    }
}

// === requests ===

/// A plain request.
pub(crate) fn get() -> Request<()> {
    Request::new(())
}

pub(crate) fn from_peer(address: &str) -> Request<()> {
    let mut request = get();
    request
        .extensions_mut()
        .insert(PeerAddr((address.parse::<std::net::IpAddr>().unwrap(), 50_000).into()));
    request
}

/// A request with one header.
pub(crate) fn with(name: &'static str, value: &str) -> Request<()> {
    Request::builder().header(name, value).body(()).unwrap()
}

/// A gRPC call.
pub(crate) fn grpc() -> Request<()> {
    with("content-type", "application/grpc")
}

// === headers ===

pub(crate) trait Fields {
    fn fields(&self) -> &HeaderMap;

    /// The value of a header that comes once at most.
    fn text(&self, name: &str) -> Option<&str> {
        let mut lines = self.fields().get_all(name).iter();
        let line = lines.next().map(|line| line.to_str().unwrap());
        assert!(lines.next().is_none(), "more than one {name}");
        line
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name).map(|text| text.parse().unwrap())
    }

    fn retry_after(&self) -> Option<u64> {
        self.number("retry-after")
    }
}

impl Fields for HeaderMap {
    fn fields(&self) -> &HeaderMap {
        self
    }
}

impl<B> Fields for Response<B> {
    fn fields(&self) -> &HeaderMap {
        self.headers()
    }
}

/// A configuration for property tests. They try the same inputs in every run;
/// `PROPTEST_RNG_SEED=1` tries others.
pub(crate) fn inputs(cases: u32) -> Config {
    let default = Config::default();
    let rng_seed = match default.rng_seed {
        RngSeed::Random => RngSeed::Fixed(0),
        chosen => chosen,
    };
    Config { cases, rng_seed, failure_persistence: None, ..default }
}
