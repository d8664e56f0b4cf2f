//! The contract of tower's services, and the bodies that go through.

mod support;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full};
use std::{
    collections::VecDeque,
    convert::Infallible,
    future::{Future, Ready, ready},
    marker::PhantomPinned,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    task::{Context, Poll, Waker},
};
use support::{T0, crowd::Crowd, get, now, secs};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tollgate::{
    CallError, Limiter, ManualClock, Policy, Quota, RateLimitLayer, ResponseBody, key::Global,
};
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn};

/// One request at once, the next waits for a second, the third is rejected.
fn layer(clock: &ManualClock) -> RateLimitLayer {
    RateLimitLayer::builder().clock(clock).key(Global).policy(shaping()).build().unwrap()
}

fn calls<Req: 'static>(clock: &ManualClock) -> RateLimitLayer<tollgate::Calls<Req>> {
    let limiter = Limiter::builder().clock(clock).key(Global).policy(shaping()).build().unwrap();
    RateLimitLayer::calls(limiter)
}

fn shaping<R: ?Sized>() -> Policy<R> {
    Policy::leaky_bucket("p", Quota::per_second(1)).max_delay(secs(1))
}

fn poll_ready<S: Service<Req>, Req>(service: &mut S) -> Poll<Result<(), S::Error>> {
    service.poll_ready(&mut Context::from_waker(Waker::noop()))
}

// === a service that knows whether it is ready ===

/// Takes a place of a semaphore in `poll_ready` and keeps it until a call is done, like
/// [`ConcurrencyLimit`]. A clone has no place, and to call without one is a panic.
struct Places {
    semaphore: Arc<Semaphore>,
    place: Option<OwnedSemaphorePermit>,
    calls: Arc<AtomicUsize>,
}

impl Places {
    fn new(places: usize) -> Self {
        let semaphore = Arc::new(Semaphore::new(places));
        Self { semaphore, place: None, calls: Arc::default() }
    }

    fn call(&mut self) {
        assert!(self.place.take().is_some(), "called without having been ready");
        self.calls.fetch_add(1, SeqCst);
    }
}

impl Clone for Places {
    fn clone(&self) -> Self {
        Self { semaphore: self.semaphore.clone(), place: None, calls: self.calls.clone() }
    }
}

impl Service<Request<()>> for Places {
    type Response = Response<Empty<Bytes>>;
    type Error = &'static str;
    type Future = Ready<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        if self.semaphore.is_closed() {
            return Poll::Ready(Err("closed"));
        }
        if self.place.is_none() {
            self.place = self.semaphore.clone().try_acquire_owned().ok();
        }
        if self.place.is_some() { Poll::Ready(Ok(())) } else { Poll::Pending }
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        self.call();
        ready(Ok(Response::new(Empty::new())))
    }
}

impl Service<u64> for Places {
    type Response = u64;
    type Error = &'static str;
    type Future = Ready<Result<u64, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::<Request<()>>::poll_ready(self, cx)
    }

    fn call(&mut self, job: u64) -> Self::Future {
        self.call();
        ready(if job == 13 { Err("unlucky") } else { Ok(job) })
    }
}

#[test]
fn the_service_that_was_ready_is_the_one_that_is_called() {
    let clock = ManualClock::at(T0);
    let places = Places::new(3);
    let mut service = layer(&clock).layer(places.clone());
    let mut crowd = Crowd::new(&clock);
    for _ in 0..3 {
        // At once, after waiting, and not at all.
        assert!(poll_ready(&mut service).is_ready());
        crowd.enter(service.call(get()));
    }
    let status = |(number, response): (usize, Result<Response<_>, _>)| {
        (number, response.unwrap().status().as_u16())
    };
    assert_eq!(crowd.run().into_iter().map(status).collect::<Vec<_>>(), [(0, 200), (2, 429)]);
    assert_eq!(places.calls.load(SeqCst), 1);
    clock.advance(secs(1));
    assert_eq!(crowd.run().into_iter().map(status).collect::<Vec<_>>(), [(1, 200)]);
    assert_eq!(places.calls.load(SeqCst), 2);
    assert_eq!(places.semaphore.available_permits(), 3);
}

#[test]
fn the_service_that_was_ready_is_the_one_that_is_called_where_it_is_not_http() {
    let clock = ManualClock::at(T0);
    let places = Places::new(3);
    let mut service = calls(&clock).layer(places.clone());
    let mut crowd = Crowd::new(&clock);
    for job in 0..3_u64 {
        assert!(poll_ready::<_, u64>(&mut service).is_ready());
        crowd.enter(service.call(job));
    }
    let done = crowd.run();
    assert!(matches!(done[..], [(0, Ok(0)), (2, Err(CallError::Rejected(_)))]), "{done:?}");
    clock.advance(secs(1));
    assert!(matches!(crowd.run()[..], [(1, Ok(1))]));
    assert_eq!(places.calls.load(SeqCst), 2);
    assert_eq!(places.semaphore.available_permits(), 3);
}

/// One that was never ready stays behind, so the next call has to ask again.
#[test]
fn what_stays_behind_is_not_ready() {
    let clock = ManualClock::at(T0);
    let mut service = layer(&clock).layer(Places::new(9));
    // At once, waiting, rejected.
    let mut futures = Vec::new();
    for _ in 0..3 {
        assert!(poll_ready(&mut service).is_ready());
        futures.push(service.call(get()));
        assert!(service.get_ref().place.is_none());
    }
}

/// A layer that turns everybody away.
fn closed() -> RateLimitLayer {
    let layer = RateLimitLayer::builder()
        .key(Global)
        .policy(Policy::fixed_window("p", Quota::per_calendar_month(1)))
        .build()
        .unwrap();
    assert!(layer.limiter().check(&get().into_parts().0).is_ok());
    layer
}

#[test]
fn what_readiness_reserved_is_given_up_at_once_on_a_rejection() {
    let mut service = closed().layer(Places::new(1));
    let mut other = service.get_ref().clone();
    for _ in 0..2 {
        assert!(poll_ready(&mut service).is_ready());
        assert!(poll_ready::<_, Request<()>>(&mut other).is_pending());
        let rejected = service.call(get());
        assert!(poll_ready::<_, Request<()>>(&mut other).is_ready(), "before the answer is read");
        assert_eq!(now(rejected).unwrap().status(), 429);
        other = other.clone();
    }
}

#[test]
fn what_readiness_reserved_is_given_up_at_once_on_a_rejection_where_it_is_not_http() {
    let limiter = Limiter::<u64>::builder()
        .key(Global)
        .policy(Policy::fixed_window("p", Quota::per_calendar_month(1)))
        .build()
        .unwrap();
    assert!(limiter.check(&0).is_ok());
    let mut service = RateLimitLayer::calls(limiter).layer(Places::new(1));
    let mut other = service.get_ref().clone();
    assert!(poll_ready(&mut service).is_ready());
    let rejected = service.call(1);
    assert!(poll_ready::<_, u64>(&mut other).is_ready(), "before the answer is read");
    assert!(matches!(now(rejected), Err(CallError::Rejected(_))));
}

#[tokio::test]
async fn a_concurrency_limit_inside_is_not_blocked_by_rejections() {
    let inner = ConcurrencyLimit::new(service_fn(support::ok::<()>), 1);
    let mut service = closed().layer(inner);
    let mut kept = Vec::new();
    for _ in 0..3 {
        // Would wait for ever if a rejection kept its place.
        kept.push(service.ready().await.unwrap().call(get()));
    }
    for rejected in kept {
        assert_eq!(rejected.await.unwrap().status(), 429);
    }
}

/// A place that a request waits with is held while it waits and no longer.
#[test]
fn a_request_that_is_cancelled_while_it_waits_gives_its_place_inside_up() {
    let clock = ManualClock::at(T0);
    let mut service = layer(&clock).layer(Places::new(2));
    let semaphore = service.get_ref().semaphore.clone();
    assert!(poll_ready(&mut service).is_ready());
    assert_eq!(now(service.call(get())).unwrap().status(), 200);
    assert!(poll_ready(&mut service).is_ready());
    let waiting = service.call(get());
    assert_eq!(semaphore.available_permits(), 1);
    drop(waiting);
    assert_eq!(semaphore.available_permits(), 2);
}

#[test]
fn readiness_is_the_inner_services() {
    // Whether or not there is anything left to spend.
    for layer in [closed(), layer(&ManualClock::at(T0))] {
        let mut service = layer.layer(Places::new(1));
        let semaphore = service.get_ref().semaphore.clone();
        let taken = semaphore.clone().try_acquire_owned().unwrap();
        assert!(poll_ready(&mut service).is_pending());
        drop(taken);
        assert!(matches!(poll_ready(&mut service), Poll::Ready(Ok(()))));
        assert!(matches!(poll_ready(&mut service), Poll::Ready(Ok(()))));
        semaphore.close();
        assert_eq!(poll_ready(&mut service), Poll::Ready(Err("closed")));
    }
    let mut service = calls(&ManualClock::at(T0)).layer(Places::new(1));
    service.get_ref().semaphore.close();
    assert_eq!(poll_ready::<_, u64>(&mut service), Poll::Ready(Err(CallError::Inner("closed"))));
}

#[test]
fn asking_for_readiness_costs_nothing() {
    let clock = ManualClock::at(T0);
    let layer = layer(&clock);
    let mut service = layer.layer(service_fn(support::ok::<()>));
    for _ in 0..9 {
        assert!(poll_ready(&mut service).is_ready());
    }
    assert_eq!(layer.limiter().tracked_keys(), 0);
}

#[test]
fn errors_of_the_inner_service_pass() {
    let clock = ManualClock::at(T0);
    let failing = service_fn(|_: Request<()>| async { Err::<Response<String>, _>("broken") });
    let mut crowd = Crowd::new(&clock);
    let mut service = layer(&clock).layer(failing);
    crowd.enter(service.call(get()));
    crowd.enter(service.call(get()));
    assert_eq!(crowd.run().remove(0).1.unwrap_err(), "broken");
    clock.advance(secs(1));
    assert_eq!(crowd.run().remove(0).1.unwrap_err(), "broken");

    let error = now(calls(&clock).layer(Places::new(1)).oneshot(13_u64)).unwrap_err();
    assert_eq!(error, CallError::Inner("unlucky"));
    assert_eq!(error.to_string(), "unlucky");
}

// === the request ===

/// A body that must not be looked at.
struct Untouchable;

impl Body for Untouchable {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        panic!("the body was read");
    }

    fn is_end_stream(&self) -> bool {
        panic!("the body was asked for its end");
    }

    fn size_hint(&self) -> SizeHint {
        panic!("the body was asked for its size");
    }
}

#[test]
fn the_request_goes_on_as_it_came_and_its_body_is_not_touched() {
    #[derive(Clone, Debug, PartialEq)]
    struct Extra(u8);

    let clock = ManualClock::at(T0);
    let inner = service_fn(|request: Request<Untouchable>| async move {
        assert_eq!(request.method(), "PURGE");
        assert_eq!(request.uri(), "/a?b=c");
        assert_eq!(request.version(), http::Version::HTTP_2);
        assert_eq!(request.headers().get_all("x").iter().count(), 2);
        assert_eq!(request.extensions().get(), Some(&Extra(7)));
        support::ok(request).await
    });
    let request = || {
        Request::builder()
            .method("PURGE")
            .uri("/a?b=c")
            .version(http::Version::HTTP_2)
            .header("x", "1")
            .header("x", "2")
            .extension(Extra(7))
            .body(Untouchable)
            .unwrap()
    };
    let mut service = layer(&clock).layer(inner);
    let mut crowd = Crowd::new(&clock);
    for _ in 0..3 {
        crowd.enter(service.call(request()));
    }
    assert_eq!(crowd.run().len(), 2);
    clock.advance(secs(1));
    assert_eq!(crowd.run().len(), 1);
}

// === the response ===

#[test]
fn the_response_keeps_its_head_and_its_extensions() {
    #[derive(Clone, Debug, PartialEq)]
    struct Extra(u8);

    let inner = service_fn(|_: Request<()>| async {
        let response = Response::builder()
            .status(206)
            .version(http::Version::HTTP_10)
            .header("x", "1")
            .extension(Extra(7))
            .body(Full::new(Bytes::from_static(b"part")));
        Ok::<_, Infallible>(response.unwrap())
    });
    let response = now(layer(&ManualClock::at(T0)).layer(inner).oneshot(get())).unwrap();
    assert_eq!(response.status(), 206);
    assert_eq!(response.version(), http::Version::HTTP_10);
    assert_eq!(response.headers()["x"], "1");
    assert_eq!(response.extensions().get(), Some(&Extra(7)));
    assert_eq!(now(response.into_body().collect()).unwrap().to_bytes(), "part");
}

/// The body of the response to a request that was let through.
fn limited<B>(body: B) -> ResponseBody<B>
where
    B: Body<Data = Bytes> + Clone + 'static,
{
    let inner =
        service_fn(move |_: Request<()>| ready(Ok::<_, Infallible>(Response::new(body.clone()))));
    now(layer(&ManualClock::at(T0)).layer(inner).oneshot(get())).unwrap().into_body()
}

fn next_frame<B: Body + Unpin>(body: &mut B) -> Option<Result<Frame<B::Data>, B::Error>> {
    now(body.frame())
}

#[test]
fn a_body_that_is_empty_from_the_start_says_so() {
    let body = limited(Empty::new());
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
}

#[test]
fn a_body_of_a_known_size_says_so() {
    let mut body = limited(Full::new(Bytes::from_static(b"12345")));
    assert!(!body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(5));
    let frame = next_frame(&mut body).unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "12345");
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(next_frame(&mut body).is_none());
}

/// Frames to give, one after the other; it knows neither its size nor its end.
#[derive(Clone)]
struct Frames(VecDeque<Result<Piece, &'static str>>);

#[derive(Clone)]
enum Piece {
    Data(&'static str),
    Trailers(HeaderMap),
    NotYet,
}

impl Body for Frames {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        match self.0.pop_front() {
            None => Poll::Ready(None),
            Some(Err(error)) => Poll::Ready(Some(Err(error))),
            Some(Ok(Piece::Data(text))) => Poll::Ready(Some(Ok(Frame::data(text.into())))),
            Some(Ok(Piece::Trailers(trailers))) => Poll::Ready(Some(Ok(Frame::trailers(trailers)))),
            Some(Ok(Piece::NotYet)) => Poll::Pending,
        }
    }

    fn size_hint(&self) -> SizeHint {
        let mut hint = SizeHint::new();
        hint.set_lower(2);
        hint.set_upper(9);
        hint
    }
}

#[test]
fn frames_trailers_errors_and_waits_pass() {
    let trailers = HeaderMap::from_iter([(
        http::HeaderName::from_static("grpc-status"),
        HeaderValue::from_static("0"),
    )]);
    let pieces = [
        Ok(Piece::Data("a")),
        Ok(Piece::NotYet),
        Ok(Piece::Data("")),
        Ok(Piece::Trailers(trailers.clone())),
        Err("torn"),
    ];
    let mut body = limited(Frames(pieces.into()));
    assert!(!body.is_end_stream());
    assert_eq!((body.size_hint().lower(), body.size_hint().upper()), (2, Some(9)));
    assert_eq!(next_frame(&mut body).unwrap().unwrap().into_data().unwrap(), "a");
    {
        let mut frame = pin!(body.frame());
        assert!(frame.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert_eq!(next_frame(&mut body).unwrap().unwrap().into_data().unwrap(), "");
    assert_eq!(next_frame(&mut body).unwrap().unwrap().into_trailers().unwrap(), trailers);
    assert_eq!(next_frame(&mut body).unwrap().unwrap_err(), "torn");
    assert!(next_frame(&mut body).is_none());
}

#[test]
fn the_body_of_a_rejection_is_one_frame_of_a_known_size() {
    let response = now(closed().layer(service_fn(support::ok::<()>)).oneshot(get())).unwrap();
    let mut body = response.into_body();
    assert!(!body.is_end_stream());
    let size = body.size_hint().exact().unwrap();
    let data = next_frame(&mut body).unwrap().unwrap().into_data().unwrap();
    assert_eq!(data.len() as u64, size);
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(next_frame(&mut body).is_none());
}

/// Or gRPC would get a second frame for nothing instead of the trailers-only form.
#[test]
fn the_body_of_a_rejected_call_is_at_its_end_from_the_start() {
    let response =
        now(closed().layer(service_fn(support::ok::<()>)).oneshot(support::grpc())).unwrap();
    let mut body = response.into_body();
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
    assert!(next_frame(&mut body).is_none());
}

#[test]
fn a_body_by_default_is_the_inner_default() {
    let body = ResponseBody::<Full<Bytes>>::default();
    assert!(body.is_end_stream());
    assert_eq!(body.size_hint().exact(), Some(0));
}

/// Bodies need not be `Unpin`.
#[test]
fn a_body_that_cannot_be_moved_can_be_limited() {
    struct Pinned(bool, PhantomPinned);

    impl Body for Pinned {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            assert!(!self.is_end_stream());
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"pinned")))))
        }

        fn is_end_stream(&self) -> bool {
            self.0
        }
    }

    let inner = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Pinned(false, PhantomPinned)))
    });
    let response = now(layer(&ManualClock::at(T0)).layer(inner).oneshot(get())).unwrap();
    let mut body = pin!(response.into_body());
    let frame = body.as_mut().poll_frame(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Some(Ok(frame))) = frame else { panic!("no frame") };
    assert_eq!(frame.into_data().unwrap(), "pinned");
}
