//! How much memory a decision takes, and how much is kept.

mod support;

use allocation_counter::measure;
use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body_util::{BodyExt, Full};
use std::{
    convert::Infallible,
    future::{Ready, ready},
};
use support::{
    T0, from_peer, get, ms, now, secs,
    stacks::{ALGORITHMS, Algorithm},
};
use tollgate::{
    Limiter, LocalStore, ManualClock, Policy, Quota, RateLimitLayer, RateLimitLayerBuilder,
    ResponseBody,
    key::{Global, Header, KeyExtractor, Path, PeerIp},
    reply::{Headers, LegacyReset},
};
use tower::{Layer, Service, service_fn};

// === decisions ===

fn parts() -> Parts {
    let mut request = from_peer("2001:db8::1");
    request.headers_mut().insert("x-user", "somebody".parse().unwrap());
    request.into_parts().0
}

/// How often decisions on known keys allocate, admitted ones and rejected ones.
fn allocations(policies: impl IntoIterator<Item = Policy>) -> [u64; 2] {
    let clock = ManualClock::at(T0);
    let builder = Limiter::builder().clock(&clock);
    let limiter =
        policies.into_iter().fold(builder, |builder, policy| builder.policy(policy)).build();
    let (limiter, parts) = (limiter.unwrap(), parts());
    // Until tables and logs are as large as they stay.
    for _ in 0..10 {
        assert!(limiter.check(&parts).is_ok());
        clock.advance(ms(600));
    }
    let admitted = measure(|| assert!(limiter.check(&parts).is_ok()));
    while limiter.check(&parts).is_ok() {}
    let rejected = measure(|| assert!(limiter.check(&parts).is_err()));
    [admitted.count_total, rejected.count_total]
}

#[test]
fn a_decision_on_a_known_key_allocates_nothing() {
    let quota = Quota::per_second(3);
    for first in ALGORITHMS {
        let policy = |algorithm: Algorithm, name| algorithm.policy(name, quota).key(PeerIp::new());
        assert_eq!(allocations([policy(first, "a")]), [0, 0], "{first:?}");
        for second in ALGORITHMS {
            for third in ALGORITHMS {
                let stack = [policy(first, "a"), policy(second, "b"), policy(third, "c")];
                assert_eq!(allocations(stack), [0, 0], "{first:?} {second:?} {third:?}");
            }
        }
    }
}

#[test]
fn a_decision_on_several_known_keys_allocates_nothing() {
    let policy = |name| Policy::token_bucket(name, Quota::per_second(3));
    let user = || Header::from_static("x-user");
    assert_eq!(allocations([policy("a").key(user()), policy("b").key(Global)]), [0, 0]);
    let three = [policy("a").key(user()), policy("b").key(PeerIp::new()), policy("c").key(Global)];
    assert_eq!(allocations(three), [0, 0]);
}

#[test]
fn no_key_of_ordinary_length_is_allocated() {
    fn allocations(extractor: &impl KeyExtractor) -> u64 {
        let parts = parts();
        measure(|| assert!(extractor.extract(&parts).is_ok())).count_total
    }
    assert_eq!(allocations(&PeerIp::new()), 0);
    assert_eq!(allocations(&Header::from_static("x-user")), 0);
    assert_eq!(allocations(&(Path, Header::from_static("x-user"))), 0);
    assert_eq!(allocations(&Global), 0);
    assert_eq!(allocations(&|parts: &Parts| parts.headers.len() as u64), 0);
}

// === services ===

fn answer(_: Request<()>) -> Ready<Result<Response<Full<Bytes>>, Infallible>> {
    // Room for more fields, as most responses have that come from a framework.
    let mut response = Response::new(Full::new(Bytes::from_static(b"hello")));
    response.headers_mut().reserve(8);
    ready(Ok(response))
}

/// How often a service allocates more for a request because it is limited.
fn added(configure: impl FnOnce(RateLimitLayerBuilder) -> RateLimitLayerBuilder) -> i64 {
    let builder = RateLimitLayer::builder()
        .key(PeerIp::new())
        .policy(Policy::token_bucket("burst", Quota::per_hour(50)))
        .policy(Policy::fixed_window("monthly", Quota::per_calendar_month(100)));
    let layer = configure(builder).build().unwrap();
    let mut plain = service_fn(answer);
    let mut limited = layer.layer(plain);
    let call = |request: Request<()>| measure(|| drop(now(plain.call(request)))).count_total;
    let alone = { call }(from_peer("192.0.2.1"));
    let mut with_layer = |request: Request<()>| {
        measure(|| assert_eq!(now(limited.call(request)).unwrap().status(), 200)).count_total
    };
    // The first makes the key known.
    with_layer(from_peer("192.0.2.1"));
    with_layer(from_peer("192.0.2.1")) as i64 - alone as i64
}

#[test]
fn a_layer_that_tells_nobody_anything_allocates_nothing() {
    let quiet =
        |builder: RateLimitLayerBuilder| builder.headers(Headers::none()).expose_decision(false);
    assert_eq!(added(quiet), 0);
    let only_rejections = |builder: RateLimitLayerBuilder| {
        builder.headers(Headers::default().on_admitted(false)).expose_decision(false)
    };
    assert_eq!(added(only_rejections), 0);
}

#[test]
fn a_layer_allocates_one_value_for_each_field_that_changes() {
    let telling =
        |headers: Headers| added(|builder| builder.headers(headers).expose_decision(false));
    // The list of policies is shared by all responses.
    assert_eq!(telling(Headers::default()), 1);
    let legacy = Headers::none().legacy(LegacyReset::EpochSeconds);
    assert_eq!(telling(legacy), 3);
    assert_eq!(telling(Headers::default().legacy(LegacyReset::DeltaSeconds)), 4);
}

#[test]
fn the_decision_in_the_extensions_allocates_little() {
    let exposing = added(|builder| builder.headers(Headers::none()));
    assert!((1..=2).contains(&exposing), "{exposing}");
    assert_eq!(added(|builder| builder), 1 + exposing);
}

#[test]
fn a_body_that_goes_through_allocates_nothing() {
    let layer = RateLimitLayer::builder()
        .key(Global)
        .policy(Policy::fixed_window("p", Quota::per_calendar_month(9)))
        .build()
        .unwrap();
    let body: ResponseBody<Full<Bytes>> =
        now(layer.layer(service_fn(answer)).call(get())).unwrap().into_body();
    let mut body = std::pin::pin!(body);
    let read = measure(|| while now(body.frame()).is_some() {});
    assert_eq!(read.count_total, 0);
}

/// Futures go through every layer around this one and into every task.
#[test]
fn a_future_is_not_much_larger_than_the_one_inside() {
    let layer = RateLimitLayer::builder()
        .key(Global)
        .policy(Policy::leaky_bucket("p", Quota::per_second(1)).max_delay(secs(9)))
        .build()
        .unwrap();
    let mut service = layer.layer(service_fn(answer));
    let [alone, limited] = [size_of_val(&answer(get())), size_of_val(&service.call(get()))];
    assert!(limited <= alone + 200, "{alone} bytes inside, {limited} bytes outside");
}

// === what is kept ===

fn flooded(limiter: &Limiter<u64>, callers: u64) -> i64 {
    measure(|| {
        for caller in 0..callers {
            let _ = limiter.check(&caller);
        }
    })
    .bytes_current
}

fn keeping(clock: &ManualClock, store: LocalStore, policy: Policy<u64>) -> Limiter<u64> {
    let builder = Limiter::builder().clock(clock).store(store).key(|caller: &u64| *caller);
    builder.policy(policy).build().unwrap()
}

#[test]
fn a_key_takes_as_many_bytes_as_the_docs_say() {
    // Fingerprint and state, at a load of 70 to 87 %, and a little for each shard.
    for (policy, bytes) in [
        (Policy::token_bucket("p", Quota::per_hour(1)), 32),
        (Policy::fixed_window("p", Quota::per_hour(1)), 32),
        (Policy::sliding_window("p", Quota::per_hour(1)), 40),
        (Policy::token_bucket("p", Quota::per_hour(1)).quota_for(|_| None), 64),
    ] {
        let clock = ManualClock::at(T0);
        let limiter = keeping(&clock, LocalStore::new(), policy);
        let per_key = flooded(&limiter, 200_000) / 200_000;
        assert!(per_key < bytes * 16 / 10, "{per_key} bytes, {bytes} of them used");
    }
}

#[test]
fn memory_is_bounded_whatever_comes_and_given_back_afterwards() {
    let clock = ManualClock::at(T0);
    let policy = Policy::token_bucket("p", Quota::per_hour(1));
    let limiter = keeping(&clock, LocalStore::new().max_keys(10_000), policy);
    let kept = measure(|| {
        let full = flooded(&limiter, 10_000);
        let flooded = flooded(&limiter, 100_000);
        assert!(full + flooded < 10_000 * 60, "{full} bytes, then {flooded} more");
        clock.advance(secs(3_600));
        assert!(limiter.check(&0).is_ok());
    });
    assert!(kept.bytes_current < 2_000, "{} bytes for one key", kept.bytes_current);
}

#[test]
fn logs_take_no_more_than_their_bound() {
    const ENTRIES: usize = 200_000;

    let clock = ManualClock::at(T0);
    let policy = Policy::sliding_log("p", Quota::per_hour(1_000)).cost(|_| 1_000);
    let limiter = keeping(&clock, LocalStore::new().max_log_entries(ENTRIES), policy);
    // Ten times as much as there is room for.
    let kept = flooded(&limiter, 2_000);
    assert!(kept <= ENTRIES as i64 * 8 + 150_000, "{kept} bytes");
    assert!(kept >= ENTRIES as i64 * 8 / 2, "{kept} bytes");
    // The last to come is one of those that are kept.
    assert!(limiter.check(&1_999).is_err());
}

/// Also where that is more than the bound.
#[test]
fn a_single_log_of_full_length_is_always_allowed() {
    let clock = ManualClock::at(T0);
    let policy = Policy::sliding_log("p", Quota::per_hour(1_000));
    let limiter = keeping(&clock, LocalStore::new().max_log_entries(1), policy);
    for _ in 0..1_000 {
        assert!(limiter.check(&1).is_ok());
    }
    assert!(limiter.check(&1).is_err());
}

#[test]
fn a_caller_who_is_turned_away_leaves_nothing_behind() {
    let clock = ManualClock::at(T0);
    let policy = Policy::token_bucket("p", Quota::per_hour(1)).cost(|_| 2);
    let limiter = keeping(&clock, LocalStore::new(), policy);
    assert_eq!(flooded(&limiter, 10_000), 0);
    assert_eq!(limiter.tracked_keys(), 0);
}
