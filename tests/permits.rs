//! Permits: held from admission until the response body has ended, on every way that a request can end,
//! and released exactly once. Each way is tried with slots in this process and with leases in Redis.

mod support;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, request::Parts};
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use std::{
    collections::VecDeque,
    convert::Infallible,
    future::{Future, pending, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
};
use support::{Fields, T0, fleet::until, gate::Gate, get, grpc, ms, now, secs, with};
use tokio::{
    sync::{Notify, oneshot},
    task::{JoinSet, yield_now},
};
use tollgate::{
    BuildError, CallError, Limiter, ManualClock, Policy, Quota, RateLimitLayer,
    RateLimitLayerBuilder, Reason, Rejection,
    concurrency::HeldPermits,
    key::{Global, Header, Key},
};
use tower::{Layer, Service, ServiceExt, service_fn};

// === services ===

/// A body that does as it is told.
#[derive(Debug, Default)]
struct Frames(VecDeque<Step>);

#[derive(Debug)]
enum Step {
    Data,
    Trailers,
    Wait,
    Fail,
    Panic,
}

impl<const N: usize> From<[Step; N]> for Frames {
    fn from(steps: [Step; N]) -> Self {
        Self(steps.into())
    }
}

impl Body for Frames {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        Poll::Ready(match self.0.pop_front() {
            None => None,
            Some(Step::Data) => Some(Ok(Frame::data(Bytes::from_static(b"data")))),
            Some(Step::Trailers) => Some(Ok(Frame::trailers(HeaderMap::new()))),
            Some(Step::Wait) => return Poll::Pending,
            Some(Step::Fail) => Some(Err("failed")),
            Some(Step::Panic) => panic!("the body panics"),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        if self.0.is_empty() { SizeHint::with_exact(0) } else { SizeHint::default() }
    }
}

/// Calls a limited service that answers with such a body.
async fn answer<const N: usize>(
    gate: &Gate,
    steps: [Step; N],
) -> Response<tollgate::ResponseBody<Frames>> {
    let mut body = Some(Frames::from(steps));
    let service = service_fn(move |_: Request<()>| {
        let body = body.take().unwrap();
        async { Ok::<_, Infallible>(Response::new(body)) }
    });
    let service = Clonable(Arc::new(parking_lot::Mutex::new(service)));
    gate.layer.layer(service).oneshot(get()).await.unwrap()
}

/// A service that can be cloned though its closure cannot.
struct Clonable<S>(Arc<parking_lot::Mutex<S>>);

impl<S> Clone for Clonable<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Service<Req>, Req> Service<Req> for Clonable<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.lock().poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> S::Future {
        self.0.lock().call(request)
    }
}

async fn next<B: Body + Unpin>(body: &mut B) -> Option<Result<Frame<B::Data>, B::Error>> {
    poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
}

/// Answers as soon as it is let.
#[derive(Clone, Default)]
struct Held(Arc<(AtomicUsize, AtomicUsize, Notify)>);

impl Held {
    fn service(
        &self,
    ) -> impl Service<
        Request<()>,
        Response = Response<Frames>,
        Error = Infallible,
        Future: Send + 'static,
    > + Clone
    + Send
    + 'static {
        let this = self.clone();
        service_fn(move |_: Request<()>| {
            let this = this.clone();
            async move {
                let (inside, most, let_go) = &*this.0;
                most.fetch_max(inside.fetch_add(1, SeqCst) + 1, SeqCst);
                struct Leave<'a>(&'a AtomicUsize);
                impl Drop for Leave<'_> {
                    fn drop(&mut self) {
                        self.0.fetch_sub(1, SeqCst);
                    }
                }
                let _leave = Leave(inside);
                let_go.notified().await;
                Ok(Response::new(Frames::default()))
            }
        })
    }

    fn inside(&self) -> usize {
        self.0.0.load(SeqCst)
    }

    fn most(&self) -> usize {
        self.0.1.load(SeqCst)
    }

    fn let_one_go(&self) {
        self.0.2.notify_one();
    }
}

fn status<B>(response: &Response<B>) -> u16 {
    response.status().as_u16()
}

fn rejection<B>(response: &Response<B>) -> &Rejection {
    response.extensions().get().unwrap()
}

// === every way in which a request ends ===

#[tokio::test]
async fn promise_7_nothing_leaks_held_from_the_call_until_the_body_has_ended() {
    for gate in Gate::slots(1) {
        let (let_go, wait) = oneshot::channel::<()>();
        let wait = Arc::new(parking_lot::Mutex::new(Some(wait)));
        let mut service = gate.layer.layer(service_fn(move |_: Request<()>| {
            let wait = wait.lock().take().unwrap();
            async move {
                wait.await.unwrap();
                Ok::<_, Infallible>(Response::new(Frames::from([Step::Data, Step::Data])))
            }
        }));
        service.ready().await.unwrap();
        gate.holds(0).await;
        let mut call = pin!(service.call(get()));
        assert!(poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await.is_pending());
        until("it is admitted", async || {
            let polled = poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
            assert!(polled.is_pending());
            gate.held() == 1
        })
        .await;
        gate.holds(1).await;
        let_go.send(()).unwrap();
        let mut body = call.await.unwrap().into_body();
        gate.holds(1).await;
        assert!(next(&mut body).await.unwrap().is_ok());
        gate.holds(1).await;
        assert!(next(&mut body).await.unwrap().is_ok());
        // Nothing is left in it, which it says.
        gate.holds(0).await;
        assert!(next(&mut body).await.is_none());
        assert!(next(&mut body).await.is_none());
        drop(body);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn released_with_the_trailers() {
    for gate in Gate::slots(1) {
        let mut body = answer(&gate, [Step::Data, Step::Trailers, Step::Wait]).await.into_body();
        assert!(next(&mut body).await.unwrap().unwrap().is_data());
        gate.holds(1).await;
        assert!(next(&mut body).await.unwrap().unwrap().is_trailers());
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn released_with_the_end_of_a_body_that_did_not_announce_it() {
    struct Unannounced(usize);
    impl Body for Unannounced {
        type Data = Bytes;
        type Error = Infallible;
        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            self.0 += 1;
            Poll::Ready((self.0 == 1).then(|| Ok(Frame::data(Bytes::new()))))
        }
    }
    for gate in Gate::slots(1) {
        let service =
            service_fn(async |_: Request<()>| Ok::<_, Infallible>(Response::new(Unannounced(0))));
        let response = gate.layer.layer(service).oneshot(get()).await.unwrap();
        let mut body = response.into_body();
        assert!(next(&mut body).await.is_some());
        gate.holds(1).await;
        assert!(next(&mut body).await.is_none());
        gate.holds(0).await;
        drop(body);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn released_with_the_error_of_a_body() {
    for gate in Gate::slots(1) {
        let mut body = answer(&gate, [Step::Data, Step::Fail, Step::Wait]).await.into_body();
        assert!(next(&mut body).await.unwrap().is_ok());
        gate.holds(1).await;
        assert!(next(&mut body).await.unwrap().is_err());
        gate.holds(0).await;
        drop(body);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn released_with_the_panic_of_a_body() {
    for gate in Gate::slots(1) {
        let mut body = answer(&gate, [Step::Data, Step::Panic]).await.into_body();
        assert!(next(&mut body).await.unwrap().is_ok());
        gate.holds(1).await;
        let poll = AssertUnwindSafe(|| {
            let _ = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
        });
        assert!(catch_unwind(poll).is_err());
        drop(body);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn released_when_a_body_is_dropped_early() {
    for gate in Gate::slots(2) {
        let unread = answer(&gate, [Step::Data]).await.into_body();
        let mut half_read = answer(&gate, [Step::Data, Step::Wait]).await.into_body();
        assert!(next(&mut half_read).await.unwrap().is_ok());
        gate.holds(2).await;
        drop(unread);
        gate.holds(1).await;
        drop(half_read);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn released_with_the_head_where_the_body_is_empty() {
    for gate in Gate::slots(1) {
        let empty = answer(&gate, []).await;
        gate.holds(0).await;
        assert_eq!(empty.body().size_hint().exact(), Some(0));
    }
}

#[tokio::test]
async fn promise_7_nothing_leaks_when_a_call_is_cancelled() {
    for gate in Gate::slots(1) {
        let held = Held::default();
        let call = tokio::spawn(gate.layer.layer(held.service()).oneshot(get()));
        until("it is inside", async || held.inside() == 1).await;
        gate.holds(1).await;
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
        gate.holds(0).await;
        assert_eq!(held.inside(), 0);
    }
}

#[tokio::test]
async fn released_when_a_call_is_never_polled() {
    let [gate, _] = Gate::slots(1);
    let call = gate.layer.layer(Held::default().service()).call(get());
    assert_eq!(gate.held(), 1);
    drop(call);
    assert_eq!(gate.held(), 0);
}

#[tokio::test]
async fn released_with_the_error_of_a_service() {
    for gate in Gate::slots(1) {
        let failing = service_fn(async |_: Request<()>| Err::<Response<Frames>, _>("failed"));
        assert!(gate.layer.layer(failing).oneshot(get()).await.is_err());
        gate.holds(0).await;
    }
}

/// BR-48, panics: in the handler's call, in its future, and in a key extractor.
#[tokio::test]
async fn br_48_released_with_panics() {
    let panicking_call =
        |_: Request<()>| -> std::future::Ready<Result<Response<Frames>, Infallible>> {
            panic!("the call panics")
        };
    for gate in Gate::slots(2) {
        let mut calls = JoinSet::new();
        for _ in 0..10 {
            calls.spawn(gate.layer.layer(service_fn(panicking_call)).oneshot(get()));
        }
        while let Some(result) = calls.join_next().await {
            // The others were turned away.
            assert!(result.is_err() || status(&result.unwrap().unwrap()) == 429);
        }
        gate.holds(0).await;
        for _ in 0..10 {
            let panicking =
                service_fn(async |_: Request<()>| -> Result<Response<Frames>, Infallible> {
                    yield_now().await;
                    panic!("the future panics")
                });
            let call = tokio::spawn(gate.layer.layer(panicking).oneshot(get()));
            assert!(call.await.unwrap_err().is_panic());
            gate.holds(0).await;
        }
        gate.holds(0).await;
        let two = [answer(&gate, [Step::Data]).await, answer(&gate, [Step::Data]).await];
        assert!(two.iter().all(|response| status(response) == 200));
    }

    fn panics(_: &Parts) -> Key {
        panic!("the extractor panics")
    }
    for gate in Gate::both(|builder| {
        let keyed = Policy::token_bucket("keyed", Quota::per_second(1)).key(panics);
        builder.policy(Policy::concurrency("in-flight", 2)).policy(keyed)
    }) {
        for _ in 0..10 {
            assert_eq!(status(&answer(&gate, [Step::Data]).await), 500);
        }
        gate.holds(0).await;
    }
}

/// BR-46: 16 clones, two slots.
#[tokio::test]
async fn br_46_clones_share_the_slots_and_dropped_calls_give_them_back() {
    for gate in Gate::slots(2) {
        let held = Held::default();
        let service = gate.layer.layer(held.service());
        let mut calls = JoinSet::new();
        for _ in 0..16 {
            let mut service = service.clone();
            calls.spawn(async move { service.ready().await.unwrap().call(get()).await.unwrap() });
        }
        for _ in 0..14 {
            let turned_away = calls.join_next().await.unwrap().unwrap();
            assert_eq!(status(&turned_away), 429);
        }
        until("two are inside", async || held.inside() == 2).await;
        gate.holds(2).await;
        calls.shutdown().await;
        gate.holds(0).await;
        assert_eq!(held.inside(), 0);
        for _ in 0..2 {
            calls.spawn(service.clone().oneshot(get()).map_ok());
        }
        until("two are inside", async || held.inside() == 2).await;
        assert_eq!(held.most(), 2);
    }
}

trait MapOk: Future<Output = Result<Self::Ok, Infallible>> + Sized {
    type Ok;

    async fn map_ok(self) -> Self::Ok {
        self.await.unwrap()
    }
}

impl<T, F: Future<Output = Result<T, Infallible>>> MapOk for F {
    type Ok = T;
}

#[tokio::test]
async fn nested_layers_each_release_their_own() {
    for gate in Gate::slots(2) {
        let inner = Gate::local(|builder| builder.policy(Policy::concurrency("in-flight", 1)));
        let service = service_fn(async |_: Request<()>| {
            Ok::<_, Infallible>(Response::new(Frames::from([Step::Data])))
        });
        let service = gate.layer.layer(inner.layer.layer(service));
        let first = service.clone().oneshot(get()).await.unwrap();
        gate.holds(1).await;
        assert_eq!(inner.held(), 1);
        // What the inner one turns away holds nothing in the outer one.
        let second = service.clone().oneshot(get()).await.unwrap();
        assert_eq!(status(&second), 429);
        second.into_body().collect().await.unwrap();
        gate.holds(1).await;
        drop(first);
        gate.holds(0).await;
        assert_eq!(inner.held(), 0);
    }
}

#[tokio::test]
async fn a_handler_can_take_its_permits_along() {
    for gate in Gate::slots(1) {
        let (sender, receiver) = oneshot::channel();
        let sender = Arc::new(parking_lot::Mutex::new(Some(sender)));
        let upgrading = service_fn(move |request: Request<()>| {
            let permits = request.extensions().get::<HeldPermits>().unwrap().clone();
            assert!(sender.lock().take().unwrap().send((permits.keep(), permits)).is_ok());
            let response = Response::builder().status(StatusCode::SWITCHING_PROTOCOLS);
            async move { Ok::<_, Infallible>(response.body(Frames::default()).unwrap()) }
        });
        let inner = Gate::local(|builder| builder.policy(Policy::concurrency("in-flight", 1)));
        let service = gate.layer.layer(inner.layer.layer(upgrading));
        drop(service.oneshot(get()).await.unwrap());
        let (kept, permits) = receiver.await.unwrap();
        assert_eq!(kept.len(), 2, "of both layers");
        gate.holds(1).await;
        assert_eq!(inner.held(), 1);
        let again = permits.keep();
        drop(kept);
        gate.holds(1).await;
        drop(again);
        gate.holds(0).await;
        assert_eq!(inner.held(), 0);
        assert!(permits.keep().is_empty(), "it is over");
    }
}

/// The release of a lease is on its way when the next request comes, but it is never overtaken.
#[tokio::test]
async fn who_comes_after_a_release_finds_the_slot_free() {
    for gate in Gate::slots(1) {
        for _ in 0..500 {
            let response = answer(&gate, [Step::Data]).await;
            assert_eq!(status(&response), 200);
            response.into_body().collect().await.unwrap();
        }
        gate.holds(0).await;
    }
    let weighted = |builder: RateLimitLayerBuilder| {
        builder.policy(Policy::concurrency("in-flight", 30).cost(|_: &Parts| 3))
    };
    for gate in Gate::both(weighted) {
        let limiter = gate.layer.limiter().clone();
        for _ in 0..50 {
            let mut crowd = JoinSet::new();
            for _ in 0..10 {
                let limiter = limiter.clone();
                crowd.spawn(async move { limiter.acquire(&get().into_parts().0).await.unwrap().1 });
            }
            let permits = crowd.join_all().await;
            assert!(limiter.acquire(&get().into_parts().0).await.is_err());
            drop(permits);
        }
        gate.holds(0).await;
    }
}

// === what is turned away ===

/// What is turned away leaves nothing held and nothing charged, whoever turned it away.
#[tokio::test]
async fn all_or_nothing() {
    let stack = |builder: RateLimitLayerBuilder| {
        let none = Policy::token_bucket("none", Quota::per_hour(1))
            .cost(|parts: &Parts| if parts.headers.contains_key("dear") { 2 } else { 0 });
        builder
            .policy(Policy::token_bucket("bucket", Quota::per_hour(10)))
            .policy(Policy::concurrency("in-flight", 1))
            .policy(none)
            .policy(Policy::concurrency("per-user", 1).key(Header::from_static("user")))
    };
    for gate in Gate::both(stack) {
        let left = async || {
            let peeked = gate.layer.limiter().peek_async(&with("user", "c").into_parts().0).await;
            let outcomes = match &peeked {
                Ok(decision) => decision.outcomes(),
                Err(rejection) => rejection.outcomes(),
            };
            outcomes[0].remaining()
        };
        let send = async |request: Request<()>| {
            let service = service_fn(async |_| {
                Ok::<_, Infallible>(Response::new(Frames::from([Step::Data])))
            });
            gate.layer.layer(service).oneshot(request).await.unwrap()
        };
        let first = send(with("user", "a")).await;
        assert_eq!(status(&first), 200);
        assert_eq!(left().await, 9);
        // By slots, in either key space.
        for user in ["a", "b"] {
            assert_eq!(status(&send(with("user", user)).await), 429);
        }
        drop(first);
        // By a rate.
        let mut dear = with("user", "a");
        dear.headers_mut().insert("dear", "yes".parse().unwrap());
        assert_eq!(status(&send(dear).await), 429);
        // For want of a key.
        assert_eq!(status(&send(get()).await), 400);
        gate.holds(0).await;
        assert_eq!(left().await, 9);
    }
}

#[tokio::test]
async fn what_is_told_of_slots() {
    for gate in Gate::slots(2) {
        let first = answer(&gate, [Step::Data]).await;
        assert_eq!(
            first.text("ratelimit-policy"),
            Some(r#""in-flight";q=2;qu="concurrent-requests""#)
        );
        assert_eq!(first.text("ratelimit"), Some(r#""in-flight";r=1"#));
        let second = answer(&gate, [Step::Data]).await;
        assert_eq!(second.text("ratelimit"), Some(r#""in-flight";r=0"#));
        let third = answer(&gate, [Step::Data]).await;
        assert_eq!(status(&third), 429);
        assert_eq!(third.text("ratelimit"), Some(r#""in-flight";r=0"#));
        assert_eq!(third.retry_after(), Some(1), "nobody knows");
        let rejection = rejection(&third);
        assert_eq!(rejection.reason(), &Reason::Limited);
        assert_eq!(rejection.policies().collect::<Vec<_>>(), ["in-flight"]);
        let outcome = rejection.tightest().unwrap();
        assert!(outcome.is_concurrency() && outcome.retry_after().is_none());
        let body = third.into_body().collect().await.unwrap().to_bytes();
        let problem: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(
            problem["type"],
            "https://iana.org/assignments/http-problem-types#quota-exceeded"
        );
        assert_eq!(problem["violated-policies"], serde_json::json!(["in-flight"]));
    }
}

#[tokio::test]
async fn a_rate_speaks_for_a_stack_that_has_one() {
    let stack = |builder: RateLimitLayerBuilder| {
        builder
            .policy(Policy::concurrency("in-flight", 1))
            .policy(Policy::fixed_window("rate", Quota::per_calendar_day(100)))
    };
    for gate in Gate::both(stack) {
        let first = answer(&gate, [Step::Data]).await;
        assert_eq!(
            first.text("ratelimit-policy"),
            Some(r#""in-flight";q=1;qu="concurrent-requests", "rate";q=100;w=86400"#)
        );
        assert!(first.text("ratelimit").unwrap().starts_with(r#""rate";r=99;t="#));
        let second = answer(&gate, [Step::Data]).await;
        assert_eq!(second.text("ratelimit"), Some(r#""in-flight";r=0"#));
        // Both said something.
        assert_eq!(rejection(&second).outcomes().len(), 2);
    }
}

#[tokio::test]
async fn grpc_calls_are_told_8() {
    for gate in Gate::slots(1) {
        let service = gate.layer.layer(Held::default().service());
        let first = tokio::spawn(service.clone().oneshot(grpc()));
        until("it is held", async || gate.held() == 1).await;
        let second = service.oneshot(grpc()).await.unwrap();
        assert_eq!(status(&second), 200);
        assert_eq!(second.text("grpc-status"), Some("8"));
        assert_eq!(second.text("grpc-retry-pushback-ms"), Some("1000"));
        first.abort();
    }
}

// === weights, plans, keys ===

#[tokio::test]
async fn a_request_holds_its_cost_in_slots() {
    let weighted = |builder: RateLimitLayerBuilder| {
        let cost = |parts: &Parts| parts.headers["cost"].to_str().unwrap().parse().unwrap();
        builder.policy(Policy::concurrency("in-flight", 5).cost(cost))
    };
    for gate in Gate::both(weighted) {
        let limiter = gate.layer.limiter().clone();
        let acquire = async |cost: &str| limiter.acquire(&with("cost", cost).into_parts().0).await;
        let (_, three) = acquire("3").await.unwrap();
        gate.holds(3).await;
        assert_eq!(acquire("3").await.unwrap_err().reason(), &Reason::Limited);
        let (decision, two) = acquire("2").await.unwrap();
        assert_eq!(decision.outcomes()[0].remaining(), 0);
        gate.holds(5).await;
        // What is free is free even now.
        let (_, none) = acquire("0").await.unwrap();
        gate.holds(5).await;
        for too_much in ["6", "18446744073709551615"] {
            assert_eq!(acquire(too_much).await.unwrap_err().reason(), &Reason::TooCostly);
        }
        drop((three, none));
        gate.holds(2).await;
        let again = two.clone();
        drop(two);
        gate.holds(2).await;
        drop(again);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn a_plan_has_a_limit_of_its_own() {
    let plans = |builder: RateLimitLayerBuilder| {
        let limit =
            |parts: &Parts| Some(parts.headers.get("plan")?.to_str().unwrap().parse().unwrap());
        builder.policy(Policy::concurrency("in-flight", 1).limit_for(limit))
    };
    for gate in Gate::both(plans) {
        let limiter = gate.layer.limiter().clone();
        let acquire = async |plan| limiter.acquire(&with("plan", plan).into_parts().0).await;
        let (decision, _first) = acquire("2").await.unwrap();
        assert_eq!(decision.outcomes()[0].limit(), 2);
        assert!(limiter.acquire(&get().into_parts().0).await.is_err(), "its own limit is 1");
        let _second = acquire("2").await.unwrap();
        assert_eq!(acquire("0").await.unwrap_err().reason(), &Reason::TooCostly);
        gate.holds(2).await;
    }
}

#[tokio::test]
async fn keys_have_slots_of_their_own() {
    let keyed = |builder: RateLimitLayerBuilder| {
        let policy = Policy::concurrency("in-flight", 1).key(Header::from_static("user"));
        builder.policy(policy.exempt([b"root".as_slice()]))
    };
    for gate in Gate::both(keyed) {
        let limiter = gate.layer.limiter().clone();
        let acquire = async |user| limiter.acquire(&with("user", user).into_parts().0).await;
        let _held = [acquire("a").await.unwrap(), acquire("b").await.unwrap()];
        assert!(acquire("a").await.is_err());
        for _ in 0..3 {
            assert!(acquire("root").await.is_ok());
        }
        gate.holds(2).await;
    }
}

// === waiting for a slot ===

/// A limiter with one slot and room for two to wait, for ten seconds at most.
fn queueing(clock: &ManualClock) -> Limiter<str> {
    let policy = Policy::concurrency("in-flight", 1).queue(2, secs(10));
    Limiter::builder().clock(clock).key(Global).policy(policy).build().unwrap()
}

/// Polls a future once.
fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn waiters_are_served_in_order_and_there_is_room_for_so_many() {
    let limiter = queueing(&ManualClock::at(T0));
    let (_, held) = now(limiter.acquire("")).unwrap();
    let mut first = Box::pin(limiter.acquire(""));
    let mut second = Box::pin(limiter.acquire(""));
    assert!(poll(first.as_mut()).is_pending());
    assert!(poll(second.as_mut()).is_pending());
    let third = now(limiter.acquire("")).unwrap_err();
    assert_eq!(third.reason(), &Reason::Limited);
    drop(held);
    // Nobody overtakes those who wait, not even the second.
    assert!(limiter.try_acquire("").is_err());
    assert!(poll(second.as_mut()).is_pending());
    let Poll::Ready(Ok((_, held))) = poll(first.as_mut()) else {
        panic!("it is the first's turn");
    };
    assert!(poll(second.as_mut()).is_pending());
    drop(held);
    let Poll::Ready(Ok((_, held))) = poll(second.as_mut()) else {
        panic!("it is the second's turn");
    };
    drop(held);
    assert_eq!(limiter.in_flight("in-flight"), Some(0));
    assert!(limiter.try_acquire("").is_ok());
}

#[test]
fn a_cancelled_waiter_gives_up_its_place() {
    let limiter = queueing(&ManualClock::at(T0));
    let (_, held) = now(limiter.acquire("")).unwrap();
    let mut first = Box::pin(limiter.acquire(""));
    let mut second = Box::pin(limiter.acquire(""));
    assert!(poll(first.as_mut()).is_pending());
    assert!(poll(second.as_mut()).is_pending());
    drop(first);
    // There is room in the line again.
    let mut third = Box::pin(limiter.acquire(""));
    assert!(poll(third.as_mut()).is_pending());
    drop(held);
    // The slot was the second's already when it gave up, and goes on.
    drop(second);
    assert!(matches!(poll(third.as_mut()), Poll::Ready(Ok(_))));
    assert_eq!(limiter.in_flight("in-flight"), Some(0));
}

/// PRIORITY-SHED: a slot won at the same moment as the waiter's time is up is not lost.
#[test]
fn a_slot_is_not_lost_to_a_waiter_whose_time_is_up() {
    for slot_first in [true, false] {
        let clock = ManualClock::at(T0);
        let limiter = queueing(&clock);
        let (_, held) = now(limiter.acquire("")).unwrap();
        let mut waiter = Box::pin(limiter.acquire(""));
        assert!(poll(waiter.as_mut()).is_pending());
        clock.advance(secs(10) - ms(1));
        assert!(poll(waiter.as_mut()).is_pending());
        if slot_first {
            drop(held);
            clock.advance(ms(1));
            assert!(matches!(poll(waiter.as_mut()), Poll::Ready(Ok(_))));
        } else {
            clock.advance(ms(1));
            assert!(matches!(poll(waiter.as_mut()), Poll::Ready(Err(_))));
            drop(held);
        }
        drop(waiter);
        assert!(limiter.try_acquire("").is_ok());
        assert_eq!(limiter.in_flight("in-flight"), Some(0));
    }
}

#[test]
fn waiting_ends_where_something_else_is_in_the_way() {
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<str>::builder()
        .clock(&clock)
        .key(Global)
        .policy(Policy::concurrency("in-flight", 1).queue(9, secs(10)))
        .policy(Policy::token_bucket("rate", Quota::per_hour(2)))
        .build()
        .unwrap();
    let (_, held) = now(limiter.acquire("")).unwrap();
    let mut first = Box::pin(limiter.acquire(""));
    let mut second = Box::pin(limiter.acquire(""));
    assert!(poll(first.as_mut()).is_pending());
    assert!(poll(second.as_mut()).is_pending());
    drop(held);
    let Poll::Ready(Ok((_, held))) = poll(first.as_mut()) else { panic!() };
    drop(held);
    let Poll::Ready(Err(rejection)) = poll(second.as_mut()) else { panic!() };
    assert_eq!(rejection.policies().collect::<Vec<_>>(), ["rate"]);
    assert_eq!(limiter.in_flight("in-flight"), Some(0));
    // It is turned away at once where waiting is no use.
    let rejection = now(limiter.acquire("")).unwrap_err();
    assert_eq!(rejection.policies().collect::<Vec<_>>(), ["rate"]);
}

#[tokio::test]
async fn a_crowd_that_waits_gets_through_one_by_one() {
    let waiting = |builder: RateLimitLayerBuilder| {
        builder.policy(Policy::concurrency("in-flight", 2).queue(100, secs(60)))
    };
    for gate in Gate::both(waiting) {
        let held = Held::default();
        let service = gate.layer.layer(held.service());
        let mut calls = JoinSet::new();
        for _ in 0..50 {
            calls.spawn(service.clone().oneshot(get()).map_ok());
        }
        let mut done = 0;
        while done < 50 {
            until("somebody is inside", async || {
                held.let_one_go();
                calls.try_join_next().is_some()
            })
            .await;
            done += 1;
        }
        assert_eq!(held.most(), 2);
        gate.holds(0).await;
    }
}

#[tokio::test]
async fn those_who_wait_do_not_spin() {
    let polls = Arc::new(AtomicU64::new(0));
    let policy = Policy::concurrency("in-flight", 1).queue(1, secs(60));
    let limiter = Limiter::<str>::builder().key(Global).policy(policy).build().unwrap();
    let (_, held) = limiter.acquire("").await.unwrap();
    let waiter = tokio::spawn({
        let (limiter, polls) = (limiter.clone(), polls.clone());
        async move {
            let mut acquire = pin!(limiter.acquire(""));
            poll_fn(|cx| {
                polls.fetch_add(1, SeqCst);
                acquire.as_mut().poll(cx)
            })
            .await
            .is_ok()
        }
    });
    for _ in 0..1_000 {
        yield_now().await;
    }
    drop(held);
    assert!(waiter.await.unwrap());
    assert!(polls.load(SeqCst) <= 4, "{polls:?}");
}

// === where there is no layer, and what cannot be ===

#[tokio::test]
async fn calls_hold_slots_until_they_are_done() {
    let limiter = Limiter::<u32>::builder()
        .key(Global)
        .policy(Policy::concurrency("in-flight", 1))
        .build()
        .unwrap();
    let service = RateLimitLayer::calls(limiter.clone()).layer(service_fn(async |job: u32| {
        if job == 0 {
            pending::<()>().await
        };
        if job == 1 { Err("failed") } else { Ok(job) }
    }));
    let first = tokio::spawn(service.clone().oneshot(0));
    until("it is held", async || limiter.in_flight("in-flight") == Some(1)).await;
    assert!(matches!(service.clone().oneshot(2).await, Err(CallError::Rejected(_))));
    first.abort();
    assert!(first.await.is_err());
    assert!(matches!(service.clone().oneshot(1).await, Err(CallError::Inner("failed"))));
    assert!(matches!(service.oneshot(2).await, Ok(2)));
    assert_eq!(limiter.in_flight("in-flight"), Some(0));
}

#[tokio::test]
async fn what_returns_no_permit_refuses_to_hold_one() {
    for gate in Gate::slots(1) {
        let limiter = gate.layer.limiter();
        let (parts, ()) = get().into_parts();
        for refused in
            [limiter.check(&parts), limiter.ready(&parts).await, limiter.check_async(&parts).await]
        {
            let rejection = refused.unwrap_err();
            let Reason::Faulty { policy: "in-flight", message } = rejection.reason() else {
                panic!("{rejection:?}");
            };
            assert!(message.contains("acquire") || message.contains("_async"), "{message}");
        }
        assert_eq!(limiter.peek_async(&parts).await.unwrap().outcomes()[0].remaining(), 1);
        let (_, permit) = limiter.acquire(&parts).await.unwrap();
        assert!(limiter.peek_async(&parts).await.is_err());
        drop(permit);
        gate.holds(0).await;
        assert_eq!(limiter.in_flight("another"), None);
    }
}

#[test]
fn what_cannot_be_is_told() {
    let build = |policy: Policy| RateLimitLayer::builder().key(Global).policy(policy).build();
    let error = build(Policy::concurrency("p", 0)).unwrap_err();
    assert_eq!(error, BuildError::NoSlots { policy: "p".to_owned() });
    assert!(error.to_string().contains("give it 1 or more"));
    for (policy, option) in [
        (Policy::concurrency("p", 1).max_delay(secs(1)), "max_delay"),
        (Policy::concurrency("p", 1).from_first_hit(), "from_first_hit"),
        (Policy::concurrency("p", 1).quota_for(|_| None), "quota_for"),
        (Policy::token_bucket("p", Quota::per_second(1)).queue(1, secs(1)), "queue"),
        (Policy::token_bucket("p", Quota::per_second(1)).per_instance(), "per_instance"),
        (Policy::token_bucket("p", Quota::per_second(1)).limit_for(|_| None), "limit_for"),
    ] {
        let error = build(policy).unwrap_err();
        assert_eq!(error, BuildError::Misplaced { policy: "p".to_owned(), option });
    }
    let layer = build(Policy::concurrency("p", 1)).unwrap();
    let error = layer.interceptor().unwrap_err();
    assert_eq!(error, BuildError::CannotHold { policy: "p".to_owned() });
}
