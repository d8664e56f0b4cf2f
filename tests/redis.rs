//! What is promised of limits in Redis and Valkey, each promise by its name, and faults that somebody's
//! rate limiter in Redis really had. What happens when the server is not well is in `faults`.

mod support;

use bb8_redis::RedisConnectionManager;
use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body_util::BodyExt;
use proptest::{prelude::*, test_runner::TestRunner};
use std::{
    cell::Cell,
    collections::HashSet,
    convert::Infallible,
    future::Future,
    task::{Context, Waker},
    time::Duration,
};
use support::{
    Fields, T0, YEAR,
    fleet::{
        ask, built, calls_of, crowd, is_admitted, left, lifetimes, names, patient, until, users,
        users_by,
    },
    get, grpc, inputs, ms, ok,
    puppet::Puppet,
    secs,
    server::{Flavour, Reply, Server},
    stacks::{ALGORITHMS, Algorithm, everybody, stack, traffic, with_policies},
    us, with,
};
use tokio::{
    runtime::Runtime,
    task::{JoinSet, yield_now},
};
use tollgate::{
    BuildError, CallError, Decision, FailureMode, Limiter, LocalStore, ManualClock, Policy, Quota,
    RateLimitLayer, RateLimitLayerBuilder, Reason, Rejection,
    key::{BearerToken, Global, Header, Path},
    redis::{ConfigError, RedisStore, Warning},
    reply::{Headers, LegacyReset},
};
use tower::{Layer, ServiceExt, service_fn};

/// Whether these tests run on a cluster, where each call is for one slot.
const IN_SLOTS: bool = support::server::is_cluster();

fn redis() -> Server {
    Server::start(Flavour::Redis7)
}

fn store(server: &Server) -> RedisStore {
    built(patient(server))
}

fn store_at(server: &Server, clock: &ManualClock) -> RedisStore {
    built(patient(server).clock(clock))
}

/// The whole answer to a request through a layer.
async fn send(layer: &RateLimitLayer, request: Request<()>) -> Response<Bytes> {
    let (head, body) = layer.layer(service_fn(ok)).oneshot(request).await.unwrap().into_parts();
    Response::from_parts(head, body.collect().await.unwrap().to_bytes())
}

/// A layer that counts everybody together.
fn counting_all(server: &Server) -> RateLimitLayerBuilder {
    RateLimitLayer::builder().store(store(server)).key(Global)
}

async fn status(layer: &RateLimitLayer, request: Request<()>) -> u16 {
    send(layer, request).await.status().as_u16()
}

/// Runs a property against a server of each flavour. It gets a namespace of its own each time.
fn on_every_server<S: Strategy>(
    cases: u32,
    inputs_from: &S,
    test: &impl AsyncFn(&Server, &str, S::Value) -> Result<(), TestCaseError>,
) {
    let runtime = Runtime::new().unwrap();
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let number = Cell::new(0);
        let result = TestRunner::new(inputs(cases)).run(inputs_from, |input| {
            number.set(number.get() + 1);
            runtime.block_on(test(&server, &format!("case-{}", number.get()), input))
        });
        if let Err(error) = result {
            panic!("{flavour:?}: {error}");
        }
    }
}

// === 1. all or nothing ===

#[test]
fn promise_1_all_or_nothing() {
    on_every_server(20, &(stack(), traffic(20)), &async |server, namespace, (stack, traffic)| {
        let clock = ManualClock::at(T0);
        let store = built(patient(server).namespace(namespace).clock(&clock));
        let layer = with_policies(RateLimitLayer::builder().store(store), &stack).build().unwrap();
        let limiter = layer.limiter();
        for (gap_us, call) in traffic {
            clock.advance(us(gap_us));
            let before = peek_all(limiter).await;
            match limiter.check_async(&call.parts()).await {
                Ok(decision) => {
                    prop_assert!(decision.outcomes().iter().all(|outcome| outcome.is_admitted()));
                }
                Err(_) => {
                    prop_assert_eq!(peek_all(limiter).await, before, "something was consumed");
                }
            }
        }
        Ok(())
    });
}

/// What all policies say to everybody, without charging anything.
async fn peek_all(limiter: &Limiter<Parts>) -> Vec<Result<Decision, Rejection>> {
    let mut answers = Vec::new();
    for call in everybody() {
        answers.push(limiter.peek_async(&call.parts()).await);
    }
    answers
}

/// BR-18
#[tokio::test]
async fn promise_1_all_or_nothing_in_any_order() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for (namespace, backwards) in [("forwards", false), ("backwards", true)] {
            let clock = ManualClock::at(T0);
            let store = built(patient(&server).namespace(namespace).clock(&clock));
            let mut policies = vec![
                Policy::token_bucket("a", Quota::per_hour(1).burst(10)),
                Policy::token_bucket("b", Quota::per_second(1).burst(1)),
            ];
            if backwards {
                policies.reverse();
            }
            let limiter = users(&store, policies);
            assert_eq!(ask(&limiter, "u", 5).await, [true, false, false, false, false]);
            clock.advance(secs(1));
            assert_eq!(ask(&limiter, "u", 1).await, [true]);
            assert_eq!(left(&limiter, "u", "a").await, 8, "{flavour:?} {namespace}");
        }
    }
}

// === 2. one round trip ===

#[tokio::test]
async fn promise_2_one_round_trip() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = store(&server);
        // Five algorithms, three identities, and a ring.
        let layer = RateLimitLayer::builder()
            .store(store.clone())
            .key(Header::from_static("x-user"))
            .policy(Policy::token_bucket("a", Quota::per_hour(9)))
            .policy(Policy::leaky_bucket("b", Quota::per_hour(9)).key(Global))
            .policy(Policy::fixed_window("c", Quota::per_hour(9)).key(Path))
            .policy(Policy::sliding_window("d", Quota::per_hour(9)))
            .policy(Policy::sliding_log("e", Quota::per_hour(9)).key(Global))
            .build()
            .unwrap();
        settle(&server, &store, async || status(&layer, with("x-user", "u")).await == 200).await;

        assert_eq!(status(&layer, with("x-user", "u")).await, 200);
        // In a cluster, each identity is in a slot of its own.
        let calls = if IN_SLOTS { 3 } else { 1 };
        assert_eq!(calls_of(&server, "evalsha"), calls, "{flavour:?}");
        for other in ["eval", "ping", "script|load", "hello"] {
            assert_eq!(calls_of(&server, other), 0, "{other} {flavour:?}");
        }
        // All identities are read at once, and each is written once.
        assert_eq!(calls_of(&server, "mget"), calls);
        assert_eq!(calls_of(&server, "time"), calls);
        let writes = calls_of(&server, "set") + calls_of(&server, "msetex");
        assert!(writes <= 3, "{writes} writes of 3 identities on {flavour:?}");
    }
}

/// Has the server learn the scripts, and waits until the store has looked it over. Counts begin
/// afterwards.
async fn settle(server: &Server, store: &RedisStore, request: impl AsyncFn() -> bool) {
    assert!(request().await);
    until("the server is looked over", async || calls_of(server, "info") >= 1).await;
    store.check().await.unwrap();
    // Another connection may be under way, which was not needed in the end.
    tokio::time::sleep(ms(50)).await;
    server.command(&["CONFIG", "RESETSTAT"]);
}

#[tokio::test]
async fn promise_2_one_round_trip_for_all_who_wait() {
    for flavour in Flavour::ALL {
        for (in_flight, batch, calls) in
            [(1, 64, 2), (1, 19, 2), (1, 5, 5), (2, 64, 3), (64, 64, 20)]
        {
            let server = Server::start(flavour);
            let store = built(patient(&server).in_flight(in_flight).batch(batch));
            let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(7))]);
            let warm = async || limiter.check_async("other").await.is_ok();
            settle(&server, &store, warm).await;

            let calls_before = store.calls();
            server.pause();
            let mut waiting = JoinSet::new();
            for _ in 0..20 {
                let limiter = limiter.clone();
                waiting.spawn(async move { limiter.check_async("u").await });
            }
            // All of them are on their way or in the queue after this.
            yield_now().await;
            yield_now().await;
            server.resume();
            let answers = waiting.join_all().await;
            assert_eq!(answers.into_iter().filter(is_admitted).count(), 7);
            let case = format!("{in_flight} in flight, batches of {batch}, {flavour:?}");
            let after = store.calls();
            assert_eq!(after.1 - calls_before.1, 20, "{case}");
            assert!(after.0 - calls_before.0 <= calls, "{:?} calls: {case}", store.calls());
            assert!(calls_of(&server, "evalsha") <= calls, "{case}");
        }
    }
}

// === 3. exact ===

/// By the server's own time.
#[tokio::test(flavor = "multi_thread")]
async fn promise_3_exact_for_a_fleet() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS.into_iter().filter(|kind| *kind != Algorithm::FixedWindow) {
            assert_eq!(admitted_by_fleet(&server, algorithm, None).await, 100, "{algorithm:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn promise_3_exact_for_a_fleet_whose_time_stands_still() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        for algorithm in ALGORITHMS {
            let admitted = admitted_by_fleet(&server, algorithm, Some(&clock)).await;
            assert_eq!(admitted, 100, "{algorithm:?}");
        }
    }
}

/// How many requests of four instances are admitted that each believe in a hundred an hour.
async fn admitted_by_fleet(
    server: &Server,
    algorithm: Algorithm,
    clock: Option<&ManualClock>,
) -> usize {
    let mut instances = JoinSet::new();
    for instance in 0..4 {
        let builder = patient(server).namespace(format!("{algorithm:?}")).in_flight(1 + instance);
        let builder = match clock {
            Some(clock) => builder.clock(clock),
            None => builder,
        };
        let store = builder.build().unwrap();
        let limiter = users(&store, [algorithm.policy("p", Quota::per_hour(100))]);
        instances.spawn(async move {
            let admitted = crowd(&limiter, "u", 150).await;
            assert_eq!(store.health().failed, 0);
            admitted
        });
    }
    instances.join_all().await.into_iter().sum()
}

// === 4. one clock ===

/// Neither the clock of the instance nor that of its limiter counts.
#[tokio::test]
async fn promise_4_one_clock_is_that_of_the_server() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = store(&server);
        for far_off in [T0, secs(1), T0 + 100 * YEAR] {
            let policy = Policy::token_bucket("p", Quota::per_hour(100));
            let limiter = users_by(&ManualClock::at(far_off), &store, [policy]);
            let before = time_of(&server);
            let decision = limiter.check_async("u").await.unwrap();
            let after = time_of(&server);
            assert!(before <= decision.time() && decision.time() <= after, "{flavour:?}");
        }
        let policy = Policy::token_bucket("p", Quota::per_hour(100));
        assert_eq!(left(&users(&store, [policy]), "u", "p").await, 97);
    }
}

fn time_of(server: &Server) -> Duration {
    let time = server.command(&["TIME"]).texts();
    secs(time[0].parse().unwrap()) + us(time[1].parse().unwrap())
}

#[tokio::test]
async fn promise_4_one_clock_prints_a_reset_the_same_however_often_it_is_asked() {
    let minute = Quota::per_minute(2);
    let policies = || {
        [
            (Policy::fixed_window("p", minute), "1728000060"),
            (Policy::fixed_window("p", minute).from_first_hit(), "1728000070"),
            (Policy::sliding_window("p", minute), "1728000090"),
            (Policy::sliding_log("p", minute), "1728000070"),
            (Policy::token_bucket("p", minute), "1728000040"),
            (Policy::leaky_bucket("p", minute), "1728000040"),
        ]
    };
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for (number, (policy, reset)) in policies().into_iter().enumerate() {
            let clock = ManualClock::at(T0 + secs(10));
            let namespace = number.to_string();
            let store = built(patient(&server).namespace(namespace).clock(&clock));
            let layer = RateLimitLayer::builder()
                .store(store)
                .key(Global)
                .policy(policy)
                .headers(Headers::default().legacy(LegacyReset::EpochSeconds))
                .build()
                .unwrap();
            assert_eq!([status(&layer, get()).await, status(&layer, get()).await], [200; 2]);
            for millis in [10_000, 10_001, 10_999, 13_500, 25_999, 39_999] {
                clock.set(T0 + ms(millis));
                let response = send(&layer, get()).await;
                assert_eq!(response.status(), 429);
                assert_eq!(response.text("x-ratelimit-reset"), Some(reset), "at {millis} ms");
            }
        }
    }
}

/// BR-25: the clocks of instances are not asked, so none of them is slow.
#[tokio::test]
async fn promise_4_one_clock_for_instances_whose_own_are_apart() {
    let server = redis();
    let policy = || [Policy::token_bucket("p", Quota::per_hour(150))];
    let [a, b] = [T0 + secs(10), T0 + secs(9)]
        .map(|time| users_by(&ManualClock::at(time), &store(&server), policy()));
    assert_eq!(crowd(&a, "u", 150).await, 150);
    assert_eq!(crowd(&b, "u", 10).await, 0);
    assert_eq!(crowd(&a, "u", 150).await, 0);
}

/// BR-25, on a server whose own clock goes back: after a fail-over, say.
#[tokio::test]
async fn promise_4_one_clock_that_goes_back_gives_nothing_out_twice() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS {
            let clock = ManualClock::at(T0 + secs(3_610));
            let namespace = format!("{algorithm:?}");
            let store = built(patient(&server).namespace(namespace).clock(&clock));
            let limiter = users(&store, [algorithm.policy("p", Quota::per_second(150))]);
            assert_eq!(crowd(&limiter, "u", 151).await, 150);
            clock.set(T0 + secs(3_609));
            assert_eq!(crowd(&limiter, "u", 10).await, 0, "{algorithm:?}");
            clock.set(T0 + secs(3_610));
            assert_eq!(crowd(&limiter, "u", 150).await, 0, "{algorithm:?}");
        }
    }
}

// === 5. honest waits ===

#[test]
fn promise_5_honest_waits() {
    on_every_server(20, &(stack(), traffic(25)), &async |server, namespace, (stack, traffic)| {
        let clock = ManualClock::at(T0);
        let store = built(patient(server).namespace(namespace).clock(&clock));
        let layer = with_policies(RateLimitLayer::builder().store(store), &stack).build().unwrap();
        for (gap_us, call) in traffic {
            clock.advance(us(gap_us));
            let parts = call.parts();
            let Err(rejection) = layer.limiter().check_async(&parts).await else { continue };
            let Some(wait) = rejection.retry_after() else { continue };
            prop_assert!(wait > Duration::ZERO);
            let now = clock.now();
            clock.set(now + wait - us(1));
            prop_assert!(layer.limiter().peek_async(&parts).await.is_err(), "told too long");
            clock.set(now + wait);
            prop_assert!(layer.limiter().peek_async(&parts).await.is_ok(), "told too short");
            clock.set(now);
        }
        Ok(())
    });
}

/// By the server's own time, to within what it takes to ask.
#[tokio::test]
async fn promise_5_honest_waits_by_the_clock_on_the_wall() {
    let server = redis();
    let store = store(&server);
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_second(4).burst(1))]);
    assert_eq!(ask(&limiter, "u", 1).await, [true]);
    let rejection = limiter.check_async("u").await.unwrap_err();
    let wait = rejection.retry_after().unwrap();
    assert!(wait <= ms(250));
    until("what was told is over", async || time_of(&server) >= rejection.time() + wait).await;
    assert_eq!(ask(&limiter, "u", 1).await, [true]);
}

// === 7. bounded memory ===

#[tokio::test]
async fn promise_7_bounded_memory_on_the_server() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = store(&server);
        let policies = ALGORITHMS.into_iter().zip(["a", "b", "c", "d", "e", "f"]);
        let policies =
            policies.map(|(algorithm, name)| algorithm.policy(name, Quota::per_second(2)));
        let limiter = users(&store, policies);
        let mut crowd = JoinSet::new();
        for user in 0..300 {
            let limiter = limiter.clone();
            crowd.spawn(async move {
                let user = user.to_string();
                for _ in 0..3 {
                    let _ = limiter.check_async(&user[..]).await;
                }
            });
        }
        crowd.join_all().await;
        assert!(names(&server).len() <= 600, "an identity and a ring for each");
        for (name, lifetime) in lifetimes(&server) {
            // -2 is one that is gone since it was listed. With one command for several keys, an
            // expiry may be up to twice as long.
            assert!(lifetime == -2 || (1..=8_192).contains(&lifetime), "{name} {lifetime}");
        }
        until("all keys expire", async || names(&server).is_empty()).await;
    }
}

/// What stands in for the server is bounded, too.
#[tokio::test]
async fn promise_7_bounded_memory_in_this_process() {
    let mut server = redis();
    server.kill();
    let store = RedisStore::builder(server.url()).deadline(ms(5)).build().unwrap();
    let limiter = Limiter::<u64>::builder()
        .store(store)
        .store(LocalStore::new().max_keys(1_000))
        .key(|n: &u64| *n)
        .policy(Policy::fixed_window("p", Quota::per_calendar_month(1)))
        .build()
        .unwrap();
    for user in 0..5_000 {
        assert!(limiter.check_async(&user).await.is_ok());
        assert!(limiter.tracked_keys() <= 1_000);
    }
    assert!(limiter.check_async(&4_999).await.is_err(), "it counts");
}

// === 8. keys don't collide and don't leak ===

/// BR-06 (b)
#[tokio::test]
async fn promise_8_keys_dont_leak() {
    for (flavour, secret) in
        Flavour::ALL.into_iter().flat_map(|flavour| [(flavour, ""), (flavour, "k")])
    {
        let server = Server::start(flavour);
        let store = built(patient(&server).namespace("api").hash_secret(secret));
        let layer = RateLimitLayer::builder()
            .store(store.clone())
            .key(Header::from_static("x-api-key"))
            .policy(Policy::sliding_log("POLICYTEXT", Quota::per_hour(10)))
            .policy(Policy::token_bucket("POLICYTEXT2", Quota::per_hour(10)).key(BearerToken))
            .policy(Policy::fixed_window("POLICYTEXT3", Quota::per_calendar_month(10)).key(Path))
            .build()
            .unwrap();
        let request = Request::get("/SECRET/path")
            .header("x-api-key", "sk_live_SECRET")
            .header("authorization", "Bearer SECRET")
            .body(())
            .unwrap();
        assert_eq!(status(&layer, request).await, 200);

        let mut names = names(&server);
        names.retain(|name| !name.ends_with(":check"));
        assert_eq!(names.len(), 4, "three identities and a ring: {names:?}");
        for name in &names {
            let rest = name.strip_prefix("tg:api:{").expect("the namespace");
            let (hash, ring) = rest.split_once('}').unwrap();
            assert_eq!(hash.len(), 22);
            let ours = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
            assert!(hash.bytes().all(ours), "{name}");
            assert!(ring.is_empty() || ring.len() == 5, "{name}");
            let Reply::Bulk(Some(value)) = server.command(&["GET", name]) else { panic!("{name}") };
            let shown = [name.as_bytes(), &value].concat();
            for text in ["SECRET", "sk_live", "POLICYTEXT", "path"] {
                let found = shown.windows(text.len()).any(|part| part == text.as_bytes());
                assert!(!found, "{text} in {name}");
            }
        }
        let debug = format!("{store:?} {layer:?} {:?}", layer.limiter());
        assert!(!debug.contains("SECRET"));
    }
}

/// An address may hold a password.
/// The same caller has another name under another secret, and the same under the same.
#[tokio::test]
async fn promise_8_keys_dont_leak_what_can_be_guessed() {
    let server = redis();
    let mut seen = HashSet::new();
    for (secret, is_new) in [("", true), ("one", true), ("two", true), ("one", false)] {
        let store = built(patient(&server).hash_secret(secret));
        let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(9))]);
        assert_eq!(ask(&limiter, "192.0.2.1", 1).await, [true]);
        let new: Vec<_> =
            names(&server).into_iter().filter(|name| seen.insert(name.clone())).collect();
        let new = new.iter().filter(|name| !name.ends_with(":check")).count();
        assert_eq!(new, usize::from(is_new), "under {secret:?}");
    }
}

/// BR-08
#[tokio::test]
async fn promise_8_keys_dont_collide() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = store(&server);
        let limiter = Limiter::<(String, String)>::builder()
            .store(store)
            .key(|(path, user): &(String, String)| (path.clone(), user.clone()))
            .policy(Policy::token_bucket("p", Quota::per_day(1)))
            .build()
            .unwrap();
        let long = "x".repeat(4_096);
        let longer = "x".repeat(4_097);
        let callers = [
            ("/a:b", "c"),
            ("/a", "b:c"),
            ("/a|b", "c"),
            ("/a", "b|c"),
            ("/a/b", "c"),
            ("/a", "b/c"),
            ("/a%3Ab", "c"),
            ("/a", "%3Ab:c"),
            ("", "/a:b:c"),
            ("/a:b:c", ""),
            ("", ""),
            ("/a", &long),
            ("/a", &longer),
            (&long, "/a"),
            // What Redis Cluster would take for a slot.
            ("{a}", "b"),
            ("a}", "{b"),
            ("{}a", "b"),
            ("x{y}z", "b"),
        ]
        .map(|(path, user)| (path.to_owned(), user.to_owned()));
        for caller in &callers {
            assert!(limiter.check_async(caller).await.is_ok(), "{caller:?}");
        }
        for caller in &callers {
            assert!(limiter.check_async(caller).await.is_err(), "{caller:?}");
        }
        let mut names = names(&server);
        names.retain(|name| !name.ends_with(":check"));
        assert_eq!(names.len(), callers.len());
    }
}

// === a layer around a service ===

#[tokio::test]
async fn promise_9_a_rejection_is_a_response() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let layer = RateLimitLayer::builder()
            .store(store_at(&server, &clock))
            .key(Header::from_static("x-user"))
            .policy(Policy::fixed_window("minute", Quota::per_minute(2)))
            .policy(Policy::token_bucket("hour", Quota::per_hour(60)))
            .build()
            .unwrap();
        let first = send(&layer, with("x-user", "a")).await;
        assert_eq!(first.status(), 200);
        let policies = r#""minute";q=2;w=60, "hour";q=60;w=3600"#;
        assert_eq!(first.text("ratelimit-policy"), Some(policies));
        assert_eq!(first.text("ratelimit"), Some(r#""minute";r=1;t=60"#));
        let seen = first.extensions().get::<support::Seen>().unwrap();
        let seen = seen.0.as_ref().expect("the handler finds the decision");
        assert_eq!(seen.time(), T0);

        assert_eq!(status(&layer, with("x-user", "a")).await, 200);
        clock.advance(ms(20_500));
        let third = send(&layer, with("x-user", "a")).await;
        assert_eq!(third.status(), 429);
        assert_eq!(third.retry_after(), Some(40));
        assert_eq!(third.text("ratelimit"), Some(r#""minute";r=0;t=40"#));
        assert_eq!(third.text("content-type"), Some("application/problem+json"));
        assert_eq!(third.text("cache-control"), Some("no-store"));
        assert_eq!(status(&layer, with("x-user", "b")).await, 200);
        assert_eq!(status(&layer, get()).await, 400, "no key");

        let mut call = grpc();
        call.headers_mut().insert("x-user", "a".parse().unwrap());
        let answer = send(&layer, call).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.text("grpc-status"), Some("8"));
        clock.advance(ms(39_500));
        assert_eq!(status(&layer, with("x-user", "a")).await, 200);
    }
}

#[tokio::test]
async fn a_layer_limits_an_axum_router() {
    let server = redis();
    let layer = counting_all(&server)
        .policy(Policy::token_bucket("p", Quota::per_hour(5)))
        .build()
        .unwrap();
    let app = axum::Router::new().route("/", axum::routing::get(|| async { "hello" })).layer(layer);
    let mut statuses = Vec::new();
    for _ in 0..7 {
        let request = Request::get("/").body(axum::body::Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.headers().contains_key("retry-after"), response.status() == 429);
        statuses.push(response.status().as_u16());
    }
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429, 429]);
}

#[tokio::test]
async fn a_closed_policy_answers_503_when_the_server_is_gone() {
    let mut server = redis();
    server.kill();
    let layer = RateLimitLayer::builder()
        .store(RedisStore::builder(server.url()).build().unwrap())
        .key(Global)
        .policy(
            Policy::token_bucket("open", Quota::per_hour(5)).on_store_failure(FailureMode::Open),
        )
        .policy(Policy::token_bucket("p", Quota::per_hour(5)).on_store_failure(FailureMode::Closed))
        .build()
        .unwrap();
    for _ in 0..10 {
        let response = send(&layer, get()).await;
        assert_eq!(response.status(), 503);
        assert_eq!(response.text("content-type"), Some("application/problem+json"));
        let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
        let kind = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
        assert_eq!(problem["type"], kind);
        assert_eq!(problem["status"], 503);
        assert!(response.retry_after().is_some_and(|seconds| seconds >= 1));
        let rejection = response.extensions().get::<Rejection>().unwrap();
        assert_eq!(rejection.reason(), &Reason::Unavailable { policy: "p" });

        let call = send(&layer, grpc()).await;
        assert_eq!(call.status(), 200);
        assert_eq!(call.text("grpc-status"), Some("14"));
    }
}

#[tokio::test]
async fn a_call_that_is_not_http_is_limited() {
    let server = redis();
    let limiter = users(&store(&server), [Policy::sliding_log("p", Quota::per_hour(2))]);
    // A limiter of sized requests.
    let jobs = Limiter::<u64>::builder()
        .store(store(&server))
        .key(|job: &u64| *job)
        .policy(Policy::sliding_log("p", Quota::per_hour(2)))
        .build()
        .unwrap();
    let layer = RateLimitLayer::calls(jobs);
    let work = || layer.layer(service_fn(|job: u64| async move { Ok::<_, Infallible>(job) }));
    assert_eq!(work().oneshot(7).await, Ok(7));
    assert_eq!(work().oneshot(7).await, Ok(7));
    let Err(CallError::Rejected(rejection)) = work().oneshot(7).await else { panic!("admitted") };
    assert_eq!(rejection.reason(), &Reason::Limited);
    assert_eq!(work().oneshot(8).await, Ok(8));
    assert_eq!(ask(&limiter, "7", 1).await, [true], "a text is another key");
}

/// The layers are two budgets by the names of their policies, and each knows only its own.
#[tokio::test]
async fn a_layer_in_redis_and_one_in_this_process_go_together() {
    let server = redis();
    let shared = counting_all(&server)
        .policy(Policy::token_bucket("fleet", Quota::per_hour(5)))
        .build()
        .unwrap();
    let local = RateLimitLayer::builder()
        .key(Global)
        .policy(Policy::token_bucket("here", Quota::per_hour(3)))
        .build()
        .unwrap();
    for (outside, inside) in [(&shared, &local), (&local, &shared)] {
        local.limiter().reset(&get().into_parts().0).unwrap();
        shared.limiter().reset_async(&get().into_parts().0).await.unwrap();
        let service = outside.layer(inside.layer(service_fn(ok)));
        let mut statuses = Vec::new();
        for _ in 0..4 {
            let response = service.clone().oneshot(get()).await.unwrap();
            // Each header once.
            assert!(
                response.text("ratelimit").is_some() && response.text("ratelimit-policy").is_some()
            );
            statuses.push(response.status().as_u16());
        }
        assert_eq!(statuses, [200, 200, 200, 429]);
    }
}

#[tokio::test]
async fn promise_10_shared_by_clone() {
    let server = redis();
    let layer = |namespace: &str| {
        RateLimitLayer::builder()
            .store(built(patient(&server).namespace(namespace)))
            .key(Global)
            .policy(Policy::token_bucket("p", Quota::per_hour(4)))
            .build()
            .unwrap()
    };
    let (one, other_instance, other) = (layer("a"), layer("a"), layer("b"));
    for layer in [&one, &one.clone(), &other_instance, &one] {
        assert_eq!(status(layer, get()).await, 200);
    }
    for layer in [&one, &one.clone(), &other_instance] {
        assert_eq!(status(layer, get()).await, 429);
    }
    assert_eq!(status(&other, get()).await, 200, "another namespace");
}

#[tokio::test]
async fn a_method_that_cannot_wait_says_so() {
    let server = redis();
    let limiter = users(&store(&server), [Policy::token_bucket("p", Quota::per_hour(4))]);
    let decision = limiter.check_async("u").await.unwrap();
    let answers = [
        limiter.check("u").map(drop),
        limiter.peek("u").map(drop),
        limiter.refund("u", &decision),
        limiter.reset("u"),
    ];
    for answer in answers {
        let rejection = answer.unwrap_err();
        let Reason::Faulty { policy: "p", message } = rejection.reason() else {
            panic!("{rejection:?}")
        };
        assert!(message.contains("Redis") && message.contains("_async"), "{message}");
        assert_eq!(rejection.retry_after(), None);
    }
    assert_eq!(left(&limiter, "u", "p").await, 3, "nothing was charged");
}

#[tokio::test]
async fn an_interceptor_does_not_take_a_layer_that_has_to_ask() {
    let server = redis();
    let layer = counting_all(&server)
        .policy(Policy::token_bucket("p", Quota::per_hour(4)))
        .build()
        .unwrap();
    assert!(matches!(layer.interceptor(), Err(BuildError::CannotAsk)));
}

// === waiting for one's turn ===

fn shaping(server: &Server, clock: &ManualClock) -> Limiter<str> {
    let policy = Policy::leaky_bucket("p", Quota::per_second(5).burst(1)).max_delay(secs(1));
    users_by(clock, &store_at(server, clock), [policy])
}

#[tokio::test]
async fn requests_are_spaced_across_instances() {
    let server = redis();
    let clock = ManualClock::at(T0);
    let (a, b) = (shaping(&server, &clock), shaping(&server, &clock));
    let mut delays = Vec::new();
    for limiter in [&a, &b, &a, &b, &b, &a] {
        delays.push(limiter.check_async("u").await.unwrap().delay());
    }
    assert_eq!(delays, [0, 200, 400, 600, 800, 1_000].map(ms));
    let full = a.check_async("u").await.unwrap_err();
    assert_eq!(full.retry_after(), Some(ms(200)));
}

#[tokio::test]
async fn a_request_waits_until_it_is_its_turn() {
    let server = redis();
    let clock = ManualClock::at(T0);
    let limiter = shaping(&server, &clock);
    assert!(limiter.ready("u").await.is_ok());
    let waits = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.ready("u").await.map(|decision| decision.delay()) }
    });
    until("it is charged", async || left(&limiter, "u", "p").await == 4).await;
    clock.advance(us(199_999));
    for _ in 0..10 {
        yield_now().await;
    }
    assert!(!waits.is_finished());
    clock.advance(us(1));
    assert_eq!(waits.await.unwrap().unwrap(), ms(200));
}

#[tokio::test]
async fn who_is_cancelled_while_it_waits_gives_back_what_it_was_charged() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let limiter = shaping(&server, &clock);
        assert!(limiter.ready("u").await.is_ok());
        let wait = || {
            let limiter = limiter.clone();
            tokio::spawn(async move { limiter.ready("u").await.map(drop) })
        };
        let waiting = [wait(), wait(), wait()];
        until("all are charged", async || left(&limiter, "u", "p").await == 2).await;
        // They know by now: whoever goes away before that may have been charged for nothing.
        for _ in 0..5 {
            left(&limiter, "u", "p").await;
        }
        waiting[1].abort();
        until("it is given back", async || left(&limiter, "u", "p").await == 3).await;
        clock.advance(ms(600));
        let [first, _, third] = waiting;
        assert!(first.await.unwrap().is_ok());
        assert!(third.await.unwrap().is_ok());
    }
}

/// So does a request through a layer.
#[tokio::test]
async fn who_goes_away_while_its_response_waits_gives_back_what_it_was_charged() {
    let server = redis();
    let clock = ManualClock::at(T0);
    let policy = Policy::leaky_bucket("p", Quota::per_second(5).burst(1)).max_delay(secs(1));
    let layer = RateLimitLayer::builder()
        .store(store_at(&server, &clock))
        .clock(&clock)
        .key(Global)
        .policy(policy)
        .build()
        .unwrap();
    assert_eq!(status(&layer, get()).await, 200);
    let waits = tokio::spawn({
        let layer = layer.clone();
        async move { status(&layer, get()).await }
    });
    let parts = get().into_parts().0;
    let left = async || match layer.limiter().peek_async(&parts).await {
        Ok(decision) => decision.outcomes()[0].remaining(),
        Err(rejection) => panic!("{rejection}"),
    };
    until("it is charged", async || left().await == 4).await;
    // It knows by now: whoever goes away before that may have been charged for nothing.
    for _ in 0..5 {
        left().await;
    }
    waits.abort();
    until("it is given back", async || left().await == 5).await;
}

// === the state of callers, when limits change ===

/// BR-58
#[tokio::test]
async fn a_looser_quota_turns_nobody_away() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let store = store_at(&server, &clock);
        let slow = Quota::new(10, secs(20)).burst(16);
        let fast = Quota::new(1_000, secs(20)).burst(16);
        let limiter = |quota| users(&store, [Policy::token_bucket("p", quota)]);
        assert_eq!(ask(&limiter(slow), "u", 3).await, [true; 3]);
        clock.advance(ms(100));
        assert_eq!(ask(&limiter(fast), "u", 1).await, [true]);
    }
}

/// What is used stays used, by whatever algorithm, as far as the new quota can tell.
#[tokio::test]
async fn a_changed_quota_carries_usage_over() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS {
            let clock = ManualClock::at(T0);
            let namespace = format!("{algorithm:?}");
            let store = built(patient(&server).namespace(namespace).clock(&clock));
            let limiter = |limit| users(&store, [algorithm.policy("p", Quota::per_hour(limit))]);
            assert_eq!(ask(&limiter(10), "u", 8).await, [true; 8]);
            assert_eq!(left(&limiter(20), "u", "p").await, 12, "{algorithm:?}");
            assert_eq!(left(&limiter(9), "u", "p").await, 1, "{algorithm:?}");
            assert_eq!(ask(&limiter(5), "u", 1).await, [false], "{algorithm:?}");
            assert_eq!(ask(&limiter(9), "u", 2).await, [true, false], "{algorithm:?}");
            assert_eq!(left(&limiter(10), "u", "p").await, 1, "{algorithm:?}");
        }
    }
}

#[tokio::test]
async fn a_changed_stack_leaves_the_other_policies_their_records() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS {
            let clock = ManualClock::at(T0);
            let namespace = format!("{algorithm:?}");
            let store = built(patient(&server).namespace(namespace).clock(&clock));
            let stack = |names: &[&'static str]| {
                let policy = |&name| algorithm.policy(name, Quota::per_hour(10));
                users(&store, names.iter().map(policy))
            };
            let left = async |names: &[&'static str], name| left(&stack(names), "u", name).await;
            assert!(stack(&["a", "b"]).check_async("u").await.is_ok());
            // One added, one removed, one renamed, and their order changed.
            assert!(stack(&["c", "b"]).check_async("u").await.is_ok());
            assert_eq!(left(&["a", "b", "c"], "a").await, 9, "{algorithm:?}");
            assert_eq!(left(&["a", "b", "c"], "b").await, 8, "{algorithm:?}");
            assert_eq!(left(&["a", "b", "c"], "c").await, 9, "{algorithm:?}");
            assert_eq!(left(&["renamed", "b"], "renamed").await, 10, "{algorithm:?}");
            assert_eq!(left(&["b"], "b").await, 8, "{algorithm:?}");
        }
    }
}

/// A policy by the same name but with another algorithm counts from nothing, and back again.
#[tokio::test]
async fn a_changed_algorithm_does_not_read_the_other_ones_records() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let store = store_at(&server, &clock);
        let limiter =
            |algorithm: Algorithm| users(&store, [algorithm.policy("p", Quota::per_hour(10))]);
        // A bucket is a bucket.
        let kinds = [
            Algorithm::TokenBucket,
            Algorithm::FixedWindow,
            Algorithm::SlidingWindow,
            Algorithm::SlidingLog,
        ];
        for round in [9, 8] {
            for algorithm in kinds {
                assert_eq!(ask(&limiter(algorithm), "u", 1).await, [true]);
                assert_eq!(left(&limiter(algorithm), "u", "p").await, round, "{algorithm:?}");
            }
        }
    }
}

fn ten_per_second(server: &Server, clock: &ManualClock) -> Limiter<str> {
    users(&store_at(server, clock), [Policy::token_bucket("p", Quota::per_second(10))])
}

/// Spends what there is, up to `most`.
async fn spend(limiter: &Limiter<str>, most: usize) -> Vec<Decision> {
    let mut spent = Vec::new();
    while spent.len() < most
        && let Ok(decision) = limiter.check_async("u").await
    {
        spent.push(decision);
    }
    spent
}

/// What is given back lay beneath something else, which therefore drains sooner.
#[tokio::test]
async fn promise_3_exact_where_the_older_is_given_back_first() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let limiter = ten_per_second(&server, &clock);
        let (older, newer) = (spend(&limiter, 5).await, spend(&limiter, 9).await);
        for decision in &older {
            limiter.refund_async("u", decision).await.unwrap();
        }
        clock.set(T0 + ms(90));
        assert_eq!(spend(&limiter, 5).await.len(), 5);
        for decision in &newer {
            limiter.refund_async("u", decision).await.unwrap();
        }
        assert_eq!(spend(&limiter, 9).await.len(), 5);
        clock.set(T0 + ms(100));
        assert_eq!(spend(&limiter, 9).await.len(), 0, "eleven in a tenth of a second");
    }
}

/// Also if the bucket was empty in between. The mark that tells of it is gone when it is of no use.
#[tokio::test]
async fn promise_3_exact_where_the_older_is_given_back_first_and_nothing_is_left() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let limiter = ten_per_second(&server, &clock);
        let length = || {
            let [name] = &names(&server)[..] else { panic!("one key") };
            server.command(&["STRLEN", name]).number()
        };
        let (older, newer) = (spend(&limiter, 9).await, spend(&limiter, 1).await);
        assert_eq!(length(), 11);
        for decision in &older {
            limiter.refund_async("u", decision).await.unwrap();
        }
        assert_eq!(length(), 41);
        clock.set(T0 + ms(150));
        assert_eq!(spend(&limiter, 5).await.len(), 5);
        limiter.refund_async("u", &newer[0]).await.unwrap();
        assert_eq!(left(&limiter, "u", "p").await, 5);
        clock.set(T0 + secs(2));
        assert_eq!(spend(&limiter, 1).await.len(), 1);
        assert_eq!(length(), 11);
    }
}

#[tokio::test]
async fn what_is_given_back_can_be_spent_again() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = store(&server);
        for (algorithm, name) in ALGORITHMS.into_iter().zip(["a", "b", "c", "d", "e", "f"]) {
            if algorithm == Algorithm::FixedWindow {
                // Its hour may end.
                continue;
            }
            let limiter = users(&store, [algorithm.policy(name, Quota::per_hour(2))]);
            let decision = limiter.check_async("u").await.unwrap();
            assert_eq!(ask(&limiter, "u", 2).await, [true, false]);
            limiter.refund_async("u", &decision).await.unwrap();
            assert_eq!(ask(&limiter, "u", 2).await, [true, false], "{algorithm:?}");
            limiter.reset_async("u").await.unwrap();
            assert_eq!(ask(&limiter, "u", 3).await, [true, true, false], "{algorithm:?}");
        }
    }
}

// === faults that somebody had ===

/// BR-23
#[tokio::test]
async fn a_wait_is_told_to_the_microsecond_and_is_not_the_verdict() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let policy = Policy::token_bucket("p", Quota::per_second(2).burst(1));
        let limiter = users(&store_at(&server, &clock), [policy]);
        let mut answers = Vec::new();
        for millis in [0, 100, 300, 510] {
            clock.set(T0 + ms(millis));
            let answer = limiter.check_async("u").await;
            answers.push(answer.map(drop).map_err(|rejection| rejection.retry_after()));
        }
        assert_eq!(answers, [Ok(()), Err(Some(ms(400))), Err(Some(ms(200))), Ok(())]);
        // Less than a millisecond, which a whole number of them could not tell.
        clock.set(T0 + ms(1_010) - us(1));
        let rejection = limiter.check_async("u").await.unwrap_err();
        assert_eq!(rejection.retry_after(), Some(us(1)));
    }
}

/// BR-30
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_forgot_the_scripts_is_told_them() {
    for flavour in Flavour::ALL {
        let mut server = Server::start(flavour);
        let store = store(&server);
        let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(5))]);
        let remaining = async || {
            let decision = limiter.check_async("u").await.expect("it is decided");
            decision.outcomes()[0].remaining()
        };
        assert_eq!(remaining().await, 4);
        server.command(&["SCRIPT", "FLUSH"]);
        assert_eq!(remaining().await, 3);
        server.restart_keeping_data();
        // The connection broke with the server; that is known before anything is sent on it.
        assert_eq!(remaining().await, 2);
        assert_eq!(store.health().failed, 0, "{flavour:?}");

        let many = users(&store, [Policy::sliding_log("many", Quota::per_hour(1_000))]);
        let flushing = tokio::task::spawn_blocking(move || {
            for _ in 0..50 {
                server.command(&["SCRIPT", "FLUSH"]);
            }
            server
        });
        for _ in 0..10 {
            assert_eq!(crowd(&many, "u", 50).await, 50);
        }
        let server = flushing.await.unwrap();
        assert_eq!(left(&many, "u", "many").await, 500, "{flavour:?}");
        assert_eq!(store.health().failed, 0);
        drop(server);
    }
}

/// BR-32 (a)
#[tokio::test]
async fn whatever_is_written_expires() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = store(&server);
        for algorithm in ALGORITHMS {
            let limiter = users(&store, [algorithm.policy("p", Quota::new(2, secs(2)))]);
            for request in 0..5 {
                let _ = limiter.check_async("u").await;
                for (name, lifetime) in lifetimes(&server) {
                    assert_ne!(lifetime, -1, "{name} after request {request} {algorithm:?}");
                    // It is two windows at most, and up to twice that where many are written at once.
                    assert!(lifetime <= 8_192, "{name} lives {lifetime} ms {algorithm:?}");
                }
            }
            limiter.reset_async("u").await.unwrap();
        }
    }
}

/// BR-32 (b)
#[tokio::test]
async fn state_without_an_expiry_heals() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS {
            let namespace = format!("{algorithm:?}");
            let store = built(patient(&server).namespace(namespace));
            let limiter = users(&store, [algorithm.policy("p", Quota::new(2, ms(400)))]);
            server.command(&["FLUSHALL"]);
            let _ = ask(&limiter, "u", 3).await;
            for name in names(&server) {
                server.command(&["PERSIST", &name]);
            }
            until("it is admitted again", async || ask(&limiter, "u", 1).await == [true]).await;
            for (name, lifetime) in lifetimes(&server) {
                assert_ne!(lifetime, -1, "{name} {algorithm:?}");
            }
        }
    }
}

/// BR-39
#[tokio::test]
async fn over_the_limit_is_no_failure() {
    let server = redis();
    let store = built(patient(&server).instances(1));
    let policy = Policy::token_bucket("p", Quota::per_hour(2));
    let limiter = Limiter::<u64>::builder()
        .store(store.clone())
        .policy(policy.key(Global).cost(|cost: &u64| *cost))
        .build()
        .unwrap();
    let too_costly = limiter.check_async(&3).await.unwrap_err();
    assert_eq!(too_costly.reason(), &Reason::TooCostly);
    let mut answers = Vec::new();
    for _ in 0..50 {
        answers.push(limiter.check_async(&1).await.is_ok());
    }
    assert_eq!(answers[..3], [true, true, false]);
    assert!(!answers[2..].contains(&true));
    assert_eq!(limiter.tracked_keys(), 0, "nothing in this process was asked");
    let health = store.health();
    assert_eq!((health.decided, health.failed, health.skipped), (51, 0, 0));
    assert!(health.is_up);
}

/// A future that was begun and is not gone on with: its call is on its way for ever.
#[tokio::test]
async fn who_does_not_go_on_with_its_request_keeps_nobody_waiting() {
    let server = Server::start(Flavour::Redis7);
    let store = RedisStore::builder(server.url()).build().unwrap();
    let limiter = users(&store, [Policy::token_bucket("second", Quota::per_second(1_000))]);
    until("it is connected", async || {
        let _ = limiter.check_async("u").await;
        store.health().decided > 0
    })
    .await;
    let mut begun = Box::pin(limiter.check_async("u"));
    let mut context = Context::from_waker(Waker::noop());
    assert!(begun.as_mut().poll(&mut context).is_pending());
    let before = store.health().decided;
    until("others are decided", async || {
        let _ = limiter.check_async("u").await;
        store.health().decided > before
    })
    .await;
    drop(begun);
    assert!(limiter.check_async("u").await.is_ok());
}

/// BR-40
#[tokio::test(flavor = "multi_thread")]
async fn cancelled_requests_lose_no_connections() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let manager = RedisConnectionManager::new(server.url()).unwrap();
        let given = bb8_redis::bb8::Pool::builder().max_size(2).build(manager).await.unwrap();
        let stores = [
            built(patient(&server).in_flight(1)),
            RedisStore::from_pool(given.clone()).deadline(secs(20)).build().unwrap(),
        ];
        for store in stores {
            let limiter = users(&store, [Policy::token_bucket("p", Quota::per_minute(1_000))]);
            for number in 0..200_u64 {
                let request = limiter.check_async("u");
                let patience = us(number * 7_919 % 2_000);
                let _ = tokio::time::timeout(patience, request).await;
            }
            assert_eq!(ask(&limiter, "u", 10).await, [true; 10]);
            assert_eq!(store.health().failed, 0);
        }
        until("connections are idle", async || given.state().idle_connections == 2).await;
        assert_eq!(given.state().connections, 2);
        let clients = server.command(&["CLIENT", "LIST"]);
        // Ours, the pool's, and the one that asks.
        let count = clients.text().lines().count();
        assert!(count <= 2 + 2 + 1, "{}", clients.text());
    }
}

// === before limits are trusted to a server ===

#[tokio::test]
async fn a_server_that_is_as_it_should_be_is_not_warned_of() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = built(patient(&server).namespace("a"));
        assert_eq!(store.check().await.unwrap(), [], "{flavour:?}");
        until("nothing is left", async || names(&server).is_empty()).await;
    }
}

#[tokio::test]
async fn a_server_that_evicts_is_warned_of() {
    for flavour in Flavour::ALL {
        let server = Server::with(flavour, &["--maxmemory-policy", "volatile-ttl"]);
        let warnings = store(&server).check().await.unwrap();
        assert_eq!(warnings, [Warning::Eviction { policy: "volatile-ttl".to_owned() }]);
        let text = warnings[0].to_string();
        assert!(text.contains("volatile-ttl") && text.contains("noeviction"), "{text}");
    }
}

#[tokio::test]
async fn a_clock_that_is_far_off_is_warned_of() {
    // What the script says, and then what INFO does.
    let now = time_of(&redis());
    for (server_time, far_off) in [(now, false), (now + secs(90), true), (now - secs(90), true)] {
        let time = server_time.as_micros().to_string();
        let answer = format!("*2\r\n${}\r\n{time}\r\n$1\r\n0\r\n", time.len());
        let puppet = Puppet::start(answer.as_bytes()).await;
        let store = RedisStore::builder(puppet.url()).deadline(secs(20)).build().unwrap();
        match &store.check().await.unwrap()[..] {
            [] => assert!(!far_off),
            [warning @ Warning::ClockApart { by }] => {
                assert!(far_off && *by > secs(60) && *by < secs(120), "{by:?}");
                assert!(warning.to_string().contains("apart"));
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_cannot_be_looked_over() {
    let mut server = redis();
    server.kill();
    let store = RedisStore::builder(server.url()).build().unwrap();
    let error = store.check().await.unwrap_err();
    assert!(error.to_string().contains("onnection"), "{error}");
}

// === ways to a server ===

/// The application has to bring what TLS needs; nobody does here. It is told so, nothing is said in the
/// clear, and the failure modes answer.
#[tokio::test]
async fn tls_without_a_crypto_provider() {
    let server = redis();
    let url = format!("rediss://127.0.0.1:{}", server.port());
    let store = RedisStore::builder(url).build().unwrap();
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(3))]);
    assert_eq!(ask(&limiter, "u", 10).await, [&[true; 3][..], &[false; 7]].concat());
    let health = store.health();
    assert_eq!(health.decided, 0);
    assert!(!health.is_up, "{health:?}");
    let error = store.check().await.unwrap_err();
    assert!(error.to_string().contains("CryptoProvider"), "{error}");
    assert_eq!(calls_of(&server, "evalsha"), 0);
}

#[tokio::test]
async fn a_pool_of_the_application_serves() {
    for flavour in Flavour::ALL {
        let mut server = Server::start(flavour);
        let manager = RedisConnectionManager::new(server.url()).unwrap();
        let by_default = bb8_redis::bb8::Pool::builder().build(manager.clone()).await.unwrap();
        let small = bb8_redis::bb8::Pool::builder().max_size(1).test_on_check_out(false);
        let small = small.build(manager).await.unwrap();
        for (pool, heals) in [(by_default, true), (small, false)] {
            let builder = RedisStore::from_pool(pool.clone()).deadline(secs(20));
            let store = builder.retry_every(ms(10), ms(20)).build().unwrap();
            let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(100))]);
            limiter.reset_async("u").await.unwrap();
            assert_eq!(crowd(&limiter, "u", 150).await, 100);
            assert_eq!(store.check().await.unwrap(), []);
            assert_eq!(store.health().failed, 0);
            if heals {
                server.restart();
                let works = async || {
                    let before = store.health().decided;
                    let _ = limiter.check_async("u").await;
                    store.health().decided > before
                };
                until("connections are replaced", works).await;
            }
        }
    }
}

#[test]
fn settings_that_cannot_be_are_named() {
    let builder = || RedisStore::builder("redis://127.0.0.1");
    let out_of_range = [
        (builder().batch(0), "batch"),
        (builder().batch(1_025), "batch"),
        (builder().in_flight(0), "in_flight"),
        (builder().in_flight(65), "in_flight"),
        (builder().instances(0), "instances"),
        (builder().deadline(Duration::ZERO), "deadline"),
        (builder().deadline(Duration::MAX), "deadline"),
    ];
    for (builder, name) in out_of_range {
        match builder.build() {
            Err(ConfigError::OutOfRange { option, .. }) => assert_eq!(option, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    for namespace in ["", "a:b", "a{b", "ä", "a b", &"x".repeat(65)] {
        let error = builder().namespace(namespace).build().unwrap_err();
        assert!(matches!(error, ConfigError::Namespace { .. }), "{error}");
    }
    for address in
        ["", "127.0.0.1", "http://127.0.0.1", "redis://:bad:port:x", "redis://h/notanumber"]
    {
        let error = RedisStore::builder(address).build().unwrap_err();
        assert!(matches!(error, ConfigError::Address { .. }), "{address}: {error}");
    }
    // Nothing is connected to yet, so no server is needed, nor a runtime.
    assert!(builder().batch(1_024).in_flight(64).instances(u32::MAX).build().is_ok());
}

// === large and odd requests ===

#[tokio::test]
async fn keys_of_any_size_are_counted() {
    let server = redis();
    let store = store(&server);
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(1))]);
    for size in [0, 1, 47, 48, 49, 1_000, 65_535, 65_536, 10_000_000] {
        let user = "k".repeat(size);
        assert_eq!(ask(&limiter, &user, 2).await, [true, false], "{size}");
    }
    let mut names = names(&server);
    names.retain(|name| !name.ends_with(":check"));
    assert!(names.iter().all(|name| name.len() == 27), "{names:?}");
}

/// A stack as deep as nobody has one.
#[tokio::test]
async fn two_hundred_policies_are_decided_by_one_call() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let store = store_at(&server, &clock);
        let policies = (0..200).map(|number| {
            let algorithm = ALGORITHMS[number % ALGORITHMS.len()];
            let name: &'static str = Box::leak(format!("policy-{number}").into_boxed_str());
            algorithm.policy(name, Quota::per_hour(5 + number as u64 % 7))
        });
        let limiter = users(&store, policies);
        assert_eq!(ask(&limiter, "u", 6).await, [true, true, true, true, true, false]);
        assert_eq!(crowd(&limiter, "v", 50).await, 5);
        assert_eq!(store.health().failed, 0);
        limiter.reset_async("u").await.unwrap();
        assert_eq!(ask(&limiter, "u", 1).await, [true]);
    }
}

/// Buckets are decided in a short way, which reads what is known once. Strings with something else in
/// them are read once more, until that is worth nothing.
#[tokio::test]
async fn buckets_go_a_short_way() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let store = store_at(&server, &clock);
        let buckets = [
            Policy::token_bucket("second", Quota::per_second(5)),
            Policy::token_bucket("hour", Quota::per_hour(1_000).burst(40)),
            Policy::leaky_bucket("minute", Quota::new(7, secs(60)).burst(6)),
        ];
        let limiter = users(&store, buckets);
        let window = users(&store, [Policy::fixed_window("window", Quota::per_minute(5))]);
        let reads = async |limiter: &Limiter<str>| {
            let before = calls_of(&server, "mget");
            assert!(limiter.check_async("u").await.is_ok());
            calls_of(&server, "mget") - before
        };
        // The server is looked over with the first request.
        settle(&server, &store, async || limiter.check_async("w").await.is_ok()).await;
        let _ = reads(&limiter).await;
        assert_eq!(reads(&limiter).await, 1, "{flavour:?}");
        assert_eq!(crowd(&limiter, "v", 50).await, 5);
        assert_eq!(reads(&window).await, 1, "{flavour:?}");
        assert_eq!(reads(&limiter).await, 2, "{flavour:?}");
        clock.advance(secs(60));
        assert_eq!(reads(&limiter).await, 2, "{flavour:?}");
        assert_eq!(reads(&limiter).await, 1, "{flavour:?}");
    }
}

/// Each policy with a key of its own: more keys than a script can hold at a time.
#[tokio::test]
async fn a_crowd_with_more_charges_than_fit_into_a_call() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let clock = ManualClock::at(T0);
        let store = built(patient(&server).clock(&clock).batch(1_024).in_flight(1));
        let names = (0..30).map(|number| -> &'static str {
            Box::leak(format!("policy-{number}").into_boxed_str())
        });
        let builder = Limiter::<u64>::builder().store(store.clone());
        let limiter = names
            .enumerate()
            .fold(builder, |builder, (number, name)| {
                let algorithm = ALGORITHMS[number % ALGORITHMS.len()];
                let policy = algorithm.policy(name, Quota::per_hour(1));
                builder.policy(policy.key(move |user: &u64| user * 1_000 + number as u64))
            })
            .build()
            .unwrap();
        let mut crowd = JoinSet::new();
        for user in 0..400_u64 {
            let limiter = limiter.clone();
            crowd.spawn(async move { limiter.check_async(&(user / 2)).await.is_ok() });
        }
        let admitted = crowd.join_all().await.into_iter().filter(|admitted| *admitted).count();
        assert_eq!(admitted, 200, "{flavour:?}");
        assert_eq!(store.health().failed, 0);
        let (calls, requests) = store.calls();
        if IN_SLOTS {
            // Some few are in one slot by chance.
            assert!((11_000..=12_000).contains(&requests), "{requests} slots");
        } else {
            assert_eq!((store.health().decided, requests), (400, 400));
            assert!((6..=20).contains(&calls), "{calls} calls of 12,000 charges");
        }
    }
}

#[tokio::test]
async fn costs_of_any_size_are_weighed() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS {
            let clock = ManualClock::at(T0);
            let namespace = format!("{algorithm:?}");
            let store = built(patient(&server).namespace(namespace).clock(&clock));
            let limiter = Limiter::<u64>::builder()
                .store(store.clone())
                .key(Global)
                .policy(algorithm.policy("p", Quota::per_hour(1_000)).cost(|cost: &u64| *cost))
                .build()
                .unwrap();
            for cost in [1_001, 1 << 32, 1 << 53, (1 << 56) - 1, 1 << 56, u64::MAX] {
                let rejection = limiter.check_async(&cost).await.unwrap_err();
                assert_eq!(rejection.reason(), &Reason::TooCostly, "{cost}");
                assert_eq!(rejection.outcomes()[0].remaining(), 1_000);
            }
            assert!(limiter.check_async(&0).await.is_ok());
            let decision = limiter.check_async(&1_000).await.unwrap();
            assert_eq!(decision.outcomes()[0].remaining(), 0);
            assert!(limiter.check_async(&0).await.is_ok(), "what is free passes {algorithm:?}");
            assert!(limiter.check_async(&1).await.is_err());
            assert_eq!(store.health().failed, 0, "{algorithm:?} {flavour:?}");
        }
    }
}

/// The largest quotas that there are.
#[tokio::test]
async fn quotas_of_any_size_are_counted() {
    let server = redis();
    let clock = ManualClock::at(T0);
    for (number, limit) in [1, 1_000, 100_000, 1_000_000_000, 1 << 40].into_iter().enumerate() {
        for (index, algorithm) in ALGORITHMS.into_iter().enumerate() {
            for period in [us(1), ms(1), secs(1), YEAR] {
                let policy: Policy<str> = algorithm.policy("p", Quota::new(limit, period));
                // What cannot be in this process cannot be in Redis.
                let local = Limiter::builder()
                    .key(|user: &str| user.to_owned())
                    .policy(algorithm.policy("p", Quota::new(limit, period)))
                    .clock(&clock)
                    .build();
                let namespace = format!("{number}-{index}-{}", period.as_micros());
                let store = built(patient(&server).namespace(namespace).clock(&clock));
                let limiter = Limiter::builder()
                    .key(|user: &str| user.to_owned())
                    .policy(policy)
                    .store(store.clone())
                    .build();
                let (Ok(local), Ok(limiter)) = (&local, &limiter) else {
                    assert!(local.is_err() && limiter.is_err());
                    continue;
                };
                for _ in 0..3 {
                    assert_eq!(limiter.check_async("u").await, local.check("u"));
                }
                assert_eq!(store.health().failed, 0, "{algorithm:?} {limit} in {period:?}");
            }
        }
    }
}

/// A request that no policy applies to asks nobody.
#[tokio::test]
async fn a_request_without_charges_needs_no_server() {
    let mut server = redis();
    let store = store(&server);
    server.kill();
    let policy = Policy::token_bucket("p", Quota::per_hour(1)).when(|user: &str| user != "free");
    let limiter = users(&store, [policy]);
    assert!(limiter.check_async("free").await.unwrap().outcomes().is_empty());
    assert_eq!(store.health().failed, 0);
}
