//! What it costs to hold a slot: nanoseconds above the same service without a limit.
//!
//! `cargo bench --bench permits`
//!
//! One limit for everybody around a service that does nothing, next to tower's own limit and to a
//! semaphore alone. There are slots for all, and each operation takes one and releases it. The last
//! case has a limit for each of 100k callers, for which there is no peer.

// The line that each figure ends with, and what runs it, are shared with the other benches.
mod support;

use std::{
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};
use support::{Operation, interleave, result};
use tokio::sync::Semaphore;
use tollgate::{
    Limiter, Policy, RateLimitLayer,
    key::{Global, Key, KeyExtractor},
};
use tower::{Layer, Service, limit::ConcurrencyLimit};

const BENCH: &str = "permits";
const UNIT: &str = "ns added/request";

const SLOTS: u32 = 1_000;
const KEYS: usize = 100_000;

fn main() {
    for threads in [1, 2] {
        measure(threads);
    }
}

fn measure(threads: usize) {
    let service = tower::service_fn(|number: usize| async move { Ok::<_, Infallible>(number) });
    let limited = RateLimitLayer::calls(limiter(Global)).layer(service);
    let keyed = RateLimitLayer::calls(limiter(|n: &usize| Key::from(*n as u64))).layer(service);
    let bare_limiter = limiter(Global);
    let tower = ConcurrencyLimit::new(service, SLOTS as usize);
    let semaphore = Arc::new(Semaphore::new(SLOTS as usize));

    let contenders: [Operation<'_>; 6] = [
        Box::new(|number| call(service, number)),
        Box::new(|number| call(limited.clone(), number)),
        Box::new(|number| call(tower.clone(), number)),
        Box::new(|number| call(keyed.clone(), number.wrapping_mul(0x9E37_79B9) % KEYS)),
        Box::new(|number| drop(bare_limiter.try_acquire(&number).expect("there are slots"))),
        Box::new(|_| drop(semaphore.clone().try_acquire_owned().expect("there are permits"))),
    ];
    let times = interleave(&contenders, threads);
    let [bare, ours, tower, keyed, limiter, semaphore] = times[..] else {
        unreachable!("as many times as contenders")
    };
    let threads = if threads == 1 { String::new() } else { format!(", {threads} threads") };
    let added = |case: &str, ours: f64, peer: &str, theirs: f64| {
        result(BENCH, &format!("{case}{threads}"), UNIT, ours, peer, theirs);
    };
    added("layer", ours - bare, "tower ConcurrencyLimit", tower - bare);
    added("layer, 100k keys", keyed - bare, "tower ConcurrencyLimit, one key", tower - bare);
    added("take and release", limiter, "tokio Semaphore", semaphore);
    println!("bare service: {bare:.0} ns/request{threads}");
}

fn limiter(key: impl KeyExtractor<usize>) -> Limiter<usize> {
    let policy = Policy::concurrency("in-flight", SLOTS);
    Limiter::builder().key(key).policy(policy).build().unwrap()
}

fn call<S: Service<usize, Response = usize>>(mut service: S, number: usize) {
    let ready = service.poll_ready(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(ready, Poll::Ready(Ok(()))));
    now(service.call(number)).ok().expect("there are slots for all");
}

/// The output of a future that does not wait for anything.
fn now<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("nothing here waits"),
    }
}
