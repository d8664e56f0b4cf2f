//! A store that is told what was decided: how far the instances of a fleet can be apart, and that they
//! come together again.

mod support;

use proptest::{collection::vec, option, prelude::*, sample::select, test_runner::TestRunner};
use std::{cell::Cell, time::Duration};
use support::{
    T0,
    fleet::{names, patient, until, users_by},
    inputs,
    instance::DEADLINE,
    ms, secs,
    server::{Flavour, Server},
    stacks::{ALGORITHMS, Algorithm},
    us,
};
use tokio::{runtime::Runtime, task::yield_now, time::Instant};
use tollgate::{
    BuildError, Decision, FailureMode, Limiter, LocalStore, ManualClock, Policy, Quota,
    RateLimitLayer, Reason, Rejection, Store,
    key::{Global, Key},
    redis::{ConfigError, DeferredStore, RedisStore},
};
use tonic::service::Interceptor;

/// Longer than any test: what is told is told because somebody says so.
const NEVER: Duration = secs(60);

fn redis() -> Server {
    Server::start(Flavour::Redis7)
}

fn deferred(server: &Server, clock: &ManualClock) -> DeferredStore {
    patient(server).clock(clock).build().unwrap().deferred(NEVER).unwrap()
}

/// An instance, with what it knows on its own.
fn instance<P>(clock: &ManualClock, store: impl Into<Store>, policies: P) -> Limiter<str>
where
    P: IntoIterator<Item = Policy<str>>,
{
    let builder = Limiter::builder().clock(clock).key(|user: &str| Key::from(user));
    let builder = policies.into_iter().fold(builder, |builder, policy| builder.policy(policy));
    builder.store(store).build().unwrap()
}

fn fleet(
    count: usize,
    clock: &ManualClock,
    server: &Server,
    policy: impl Fn() -> Policy<str>,
) -> Vec<Limiter<str>> {
    (0..count).map(|_| instance(clock, deferred(server, clock), [policy()])).collect()
}

async fn flush(fleet: &[Limiter<str>]) {
    for instance in fleet {
        instance.flush().await;
    }
}

/// How many requests of a user an instance admits until it does not.
fn spend(instance: &Limiter<str>, user: &str) -> u64 {
    let mut admitted = 0;
    while instance.check(user).is_ok() {
        admitted += 1;
        assert!(admitted < 10_000, "there is no limit");
    }
    admitted
}

fn left(instance: &Limiter<str>, user: &str) -> u64 {
    let answer = instance.peek(user);
    let outcomes = match &answer {
        Ok(decision) => decision.outcomes(),
        Err(rejection) => rejection.outcomes(),
    };
    outcomes[0].remaining()
}

fn hundred_per_second() -> Policy<str> {
    Policy::token_bucket("p", Quota::per_second(100))
}

// === what instances know of each other ===

#[tokio::test]
async fn what_one_admitted_all_know_after_it_was_told() {
    let (server, clock) = (redis(), ManualClock::at(T0));
    let fleet = fleet(2, &clock, &server, hundred_per_second);
    for _ in 0..60 {
        fleet[0].check("u").unwrap();
    }
    assert_eq!(left(&fleet[1], "u"), 100, "it was told before anybody told it");
    flush(&fleet).await;
    // Whoever tells something is told the rest.
    fleet[1].check("u").unwrap();
    assert_eq!(left(&fleet[1], "u"), 99);
    flush(&fleet).await;
    assert_eq!(left(&fleet[1], "u"), 39);
    assert_eq!(spend(&fleet[1], "u"), 39);
    assert_eq!(left(&fleet[0], "u"), 40, "it does not know yet");
    flush(&fleet).await;
    fleet[0].check("u").unwrap();
    flush(&fleet).await;
    assert_eq!(left(&fleet[0], "u"), 0);
}

#[tokio::test]
async fn no_request_waits_and_the_server_counts_all() {
    let (server, clock) = (redis(), ManualClock::at(T0));
    let store = deferred(&server, &clock);
    let limiter = instance(&clock, store.clone(), [hundred_per_second()]);
    // Without any await.
    assert_eq!(spend(&limiter, "u"), 100);
    assert!(names(&server).is_empty());
    limiter.flush().await;
    assert_eq!(names(&server).len(), 1);
    let health = store.health();
    assert_eq!((health.told, health.lost), (1, 0), "a hundred requests are one sum");
    let exact =
        users_by(&clock, &patient(&server).clock(&clock).build().unwrap(), [hundred_per_second()]);
    assert!(exact.check_async("u").await.is_err());
    clock.advance(ms(10));
    assert!(exact.check_async("u").await.is_ok());
}

/// Within a lag each instance admits no more than its own limit, and all of that is paid back.
#[tokio::test]
async fn what_was_admitted_beyond_the_limit_is_paid_back() {
    for algorithm in ALGORITHMS.into_iter().filter(|&algorithm| algorithm != Algorithm::SlidingLog)
    {
        let (server, clock) = (redis(), ManualClock::at(T0));
        let fleet = fleet(2, &clock, &server, || algorithm.policy("p", Quota::per_second(100)));
        let mut admitted: u64 = fleet.iter().map(|instance| spend(instance, "u")).sum();
        assert_eq!(admitted, 200, "{algorithm:?}: each by its own");
        flush(&fleet).await;
        for second in 1..=20_u64 {
            for _ in 0..10 {
                clock.advance(ms(100));
                admitted += fleet.iter().map(|instance| spend(instance, "u")).sum::<u64>();
                flush(&fleet).await;
            }
            // The burst, what has come back since, and what both admit within a lag.
            let bound = match algorithm {
                // A window begins for each anew, and what the last one had too much is forgotten.
                Algorithm::FixedWindow | Algorithm::FromFirstHit => 200 * (second + 1),
                _ => 100 + 100 * second + 2 * 100,
            };
            assert!(admitted <= bound, "{algorithm:?}: {admitted} after {second} s");
        }
        let fair = 100 + 20 * 100;
        assert!(admitted >= fair - 120, "{algorithm:?}: {admitted} of {fair}");
    }
}

/// However many instances are flooded at once, what is counted is no more than twice the limit.
#[tokio::test]
async fn debts_are_no_deeper_than_one_more_limit() {
    for algorithm in ALGORITHMS.into_iter().filter(|&algorithm| algorithm != Algorithm::SlidingLog)
    {
        // Alone, and with a record beside its own: scripts decide these in two ways.
        for beside in [false, true] {
            let (server, clock) = (redis(), ManualClock::at(T0));
            let policies = || {
                let daily = Policy::fixed_window("daily", Quota::per_day(10_000));
                let hundred = algorithm.policy("p", Quota::per_second(100));
                [hundred].into_iter().chain(beside.then_some(daily))
            };
            let store = patient(&server).clock(&clock).build().unwrap();
            let asked = users_by(&clock, &store, policies());
            let deferred = store.deferred(NEVER).unwrap();
            let fleet: Vec<_> =
                (0..7).map(|_| instance(&clock, deferred.clone(), policies())).collect();
            let admitted: u64 = fleet.iter().map(|instance| spend(instance, "u")).sum();
            assert_eq!(admitted, 700, "{algorithm:?}");
            flush(&fleet).await;
            // Both engines have counted the same.
            assert_eq!(
                said(fleet[6].peek("u")),
                said(asked.peek_async("u").await),
                "{algorithm:?}"
            );
            // In a sliding window two thirds of what was counted count still.
            clock.advance(if algorithm == Algorithm::SlidingWindow {
                ms(1_600)
            } else {
                ms(1_010)
            });
            assert!(fleet[6].check("u").is_ok(), "{algorithm:?}");
            assert!(asked.check_async("u").await.is_ok(), "{algorithm:?}");
        }
    }
}

/// What is admitted while the store is being told is not forgotten when it answers.
#[tokio::test]
async fn what_was_admitted_meanwhile_counts() {
    let (server, clock) = (redis(), ManualClock::at(T0));
    let limiter = instance(&clock, deferred(&server, &clock), [hundred_per_second()]);
    for _ in 0..30 {
        limiter.check("u").unwrap();
    }
    let telling = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.flush().await }
    });
    // It is on its way, or waits for a connection.
    yield_now().await;
    for _ in 0..20 {
        limiter.check("u").unwrap();
    }
    telling.await.unwrap();
    assert_eq!(left(&limiter, "u"), 50);
    limiter.flush().await;
    assert_eq!(left(&limiter, "u"), 50);
}

#[derive(Clone, Debug)]
struct Charge {
    gap_us: u64,
    cost: u64,
    quota: Option<u64>,
}

/// What an instance knows after it has told all, and what the server knows, are the same numbers.
#[test]
fn an_instance_that_is_alone_knows_what_the_server_knows() {
    let algorithms: Vec<_> =
        ALGORITHMS.into_iter().filter(|&algorithm| algorithm != Algorithm::SlidingLog).collect();
    let charge = (0..2_000_000_u64, 0..40_u64, option::weighted(0.2, 1..60_u64))
        .prop_map(|(gap_us, cost, quota)| Charge { gap_us, cost, quota });
    let inputs_from =
        (select(algorithms), 1..60_u64, 1..5_000_000_u64, any::<bool>(), vec(charge, 1..20));
    let runtime = Runtime::new().unwrap();
    for flavour in Flavour::ALL {
        let (server, number) = (Server::start(flavour), Cell::new(0));
        let result = TestRunner::new(inputs(40)).run(
            &inputs_from,
            |(algorithm, limit, period_us, varies, charges)| {
                number.set(number.get() + 1);
                let clock = ManualClock::at(T0);
                let store = patient(&server).namespace(format!("case-{}", number.get()));
                let store = store.clock(&clock).build().unwrap();
                let limiter = |store: Store| {
                    let policy = algorithm.policy("p", Quota::new(limit, us(period_us)));
                    let policy = policy.cost(|charge: &Charge| charge.cost);
                    let policy = match varies {
                        true => policy.quota_for(move |charge: &Charge| {
                            charge.quota.map(|limit| Quota::new(limit, us(period_us)))
                        }),
                        false => policy,
                    };
                    let builder = Limiter::<Charge>::builder().clock(&clock);
                    let builder = builder.key(|_: &Charge| Key::from("u")).policy(policy);
                    builder.store(store).build().unwrap()
                };
                let told = limiter(store.clone().deferred(NEVER).unwrap().into());
                let asked = limiter(store.into());
                runtime.block_on(async {
                    for charge in charges {
                        clock.advance(us(charge.gap_us));
                        let admitted = told.check(&charge);
                        told.flush().await;
                        prop_assert_eq!(
                            said(told.peek(&charge)),
                            said(asked.peek_async(&charge).await)
                        );
                        drop(admitted);
                    }
                    Ok(())
                })
            },
        );
        if let Err(error) = result {
            panic!("{flavour:?}: {error}");
        }
    }
}

/// What a client would be told.
fn said(answer: Result<Decision, Rejection>) -> (bool, Vec<(u64, Duration)>, Option<Duration>) {
    let (admitted, outcomes, wait) = match answer {
        Ok(decision) => (true, decision.outcomes().to_vec(), None),
        Err(rejection) => (false, rejection.outcomes().to_vec(), rejection.retry_after()),
    };
    let numbers = outcomes.iter().map(|outcome| (outcome.remaining(), outcome.reset_after()));
    (admitted, numbers.collect(), wait)
}

// === the background ===

#[tokio::test]
async fn it_is_told_by_itself_and_the_lag_is_known() {
    let server = redis();
    let store = patient(&server).build().unwrap().deferred(ms(20)).unwrap();
    let instances = [(); 2].map(|()| {
        let builder = Limiter::<str>::builder().key(|user: &str| Key::from(user));
        let hourly = Policy::token_bucket("p", Quota::per_hour(100));
        builder.policy(hourly).store(store.clone()).build().unwrap()
    });
    assert_eq!(spend(&instances[0], "u"), 100);
    instances[1].check("u").unwrap();
    until("the other one knows", async || instances[1].check("u").is_err()).await;
    let health = store.health();
    assert!(health.told >= 2, "{health:?}");
    assert!(health.lag > Duration::ZERO && health.lag <= health.longest_lag, "{health:?}");
}

#[tokio::test]
async fn what_is_left_is_told_when_nobody_needs_the_limiter_any_more() {
    let server = redis();
    let store = patient(&server).build().unwrap().deferred(ms(20)).unwrap();
    let limiter = Limiter::<str>::builder()
        .key(|user: &str| Key::from(user))
        .policy(hundred_per_second())
        .store(store.clone())
        .build()
        .unwrap();
    limiter.check("u").unwrap();
    drop(limiter);
    until("it was told", async || store.health().told == 1).await;
}

#[tokio::test]
async fn refunds_and_resets_reach_all() {
    let (server, clock) = (redis(), ManualClock::at(T0));
    let fleet = fleet(2, &clock, &server, || Policy::token_bucket("p", Quota::per_hour(100)));
    // Before it was told.
    let decision = fleet[0].check("u").unwrap();
    fleet[0].refund("u", &decision).unwrap();
    flush(&fleet).await;
    assert_eq!(left(&fleet[0], "u"), 100);
    // And after.
    let decision = fleet[0].check("u").unwrap();
    flush(&fleet).await;
    fleet[0].refund("u", &decision).unwrap();
    assert_eq!(left(&fleet[0], "u"), 100);
    flush(&fleet).await;
    assert_eq!(left(&fleet[0], "u"), 100);
    fleet[1].check("u").unwrap();
    flush(&fleet).await;
    assert_eq!(left(&fleet[1], "u"), 99);
    spend(&fleet[0], "u");
    flush(&fleet).await;
    fleet[0].reset_async("u").await.unwrap();
    assert_eq!(left(&fleet[0], "u"), 100);
    assert!(names(&server).is_empty());
}

// === when the store is out of reach ===

#[tokio::test]
async fn failure_modes_answer_while_it_is_down() {
    let mut server = redis();
    let store = RedisStore::builder(server.url())
        .deadline(DEADLINE)
        .failures_to_open(2)
        .retry_every(ms(50), ms(100))
        .instances(4)
        .build()
        .unwrap();
    let deferred = store.clone().deferred(ms(5)).unwrap();
    let limiter = |mode| {
        Limiter::<str>::builder()
            .key(|user: &str| Key::from(user))
            .policy(Policy::token_bucket("p", Quota::per_hour(100)).on_store_failure(mode))
            .store(deferred.clone())
            .build()
            .unwrap()
    };
    let [open, closed, local] =
        [FailureMode::Open, FailureMode::Closed, FailureMode::Local].map(limiter);
    assert_eq!(spend(&local, "before"), 100);
    server.kill();
    until("it is known to be down", async || {
        let _ = open.check("caller");
        !store.health().is_up
    })
    .await;
    let began = Instant::now();
    for _ in 0..1_000 {
        assert!(open.check("u").is_ok());
    }
    let Err(rejection) = closed.check("u") else { panic!("it lets pass what it must not") };
    assert_eq!(rejection.reason(), &Reason::Unavailable { policy: "p" });
    assert_eq!(spend(&local, "u"), 25, "its share");
    let decision = local.check("another").unwrap();
    assert!(decision.stood_in_for("p"));
    local.refund("another", &decision).unwrap();
    assert_eq!(spend(&local, "another"), 25);
    assert!(began.elapsed() < secs(10), "nobody waits");
    assert!(deferred.health().lost > 0);
    server.restart();
    // Also by a policy that admits nobody meanwhile.
    until("it is back", async || closed.check("after").is_ok()).await;
    assert!(!closed.check("after").unwrap().stood_in_for("p"));
    assert_eq!(spend(&local, "after"), 100, "it counts by the whole limit again");
}

// === what could not be asked ===

/// An interceptor cannot wait, and need not.
#[tokio::test]
async fn an_interceptor_tells_the_store_afterwards() {
    let server = redis();
    let store = patient(&server).build().unwrap().deferred(ms(5)).unwrap();
    let layer = RateLimitLayer::builder()
        .store(store.clone())
        .key(Global)
        .policy(Policy::token_bucket("p", Quota::per_hour(2)))
        .build()
        .unwrap();
    let mut interceptor = layer.interceptor().unwrap();
    assert!(interceptor.call(tonic::Request::new(())).is_ok());
    assert!(interceptor.call(tonic::Request::new(())).is_ok());
    let status = interceptor.call(tonic::Request::new(())).unwrap_err();
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    until("it is told", async || store.health().told > 0).await;
}

// === what cannot be ===

#[tokio::test]
async fn what_cannot_be_deferred_is_refused_in_words() {
    let store = RedisStore::builder("redis://127.0.0.1:1").build().unwrap();
    for interval in [Duration::ZERO, us(999), secs(61)] {
        let error = store.clone().deferred(interval).unwrap_err();
        assert!(matches!(error, ConfigError::OutOfRange { option: "interval", .. }), "{error}");
    }
    let build = |policy: Policy<str>| {
        let builder = Limiter::builder().key(|user: &str| Key::from(user)).policy(policy);
        builder.store(store.clone().deferred(ms(100)).unwrap()).build()
    };
    let refused = |policy: Policy<str>| match build(policy) {
        Err(error @ BuildError::CannotDefer { .. }) => println!("{error}"),
        other => panic!("{other:?}"),
    };
    refused(Policy::sliding_log("exact", Quota::per_second(1)));
    refused(Policy::concurrency("held", 1));
    let limiter = build(Policy::concurrency("held", 1).per_instance()).unwrap();
    let (_, permit) = limiter.try_acquire("u").unwrap();
    assert!(limiter.try_acquire("u").is_err());
    drop(permit);
    assert!(limiter.try_acquire("u").is_ok());
}

/// Memory stays bounded however many callers there are that a store out of reach is not told of.
#[tokio::test]
async fn promise_8_bounded_memory() {
    let clock = ManualClock::at(T0);
    let store = RedisStore::builder("redis://127.0.0.1:1").build().unwrap();
    let store = store.deferred(NEVER).unwrap();
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .key(|user: &u64| Key::from(*user))
        .policy(Policy::token_bucket("p", Quota::per_hour(10)))
        .store(LocalStore::new().max_keys(1_000))
        .store(store.clone())
        .build()
        .unwrap();
    for user in 0..400_000 {
        limiter.check(&user).unwrap();
    }
    assert!(limiter.tracked_keys() <= 1_000);
    let lost = store.health().lost;
    assert!((100_000..200_000).contains(&lost), "{lost} of 400,000 were too many to keep");
}

// === several servers ===

/// A request whose keys are on several servers is told to each of them.
async fn all_keys_are_counted(store: RedisStore, clock: &ManualClock) {
    let limiter = |store: Store| {
        let builder = Limiter::<str>::builder().clock(clock);
        let hourly = |name| Policy::token_bucket(name, Quota::per_hour(100));
        builder
            .policy(hourly("user").key(|user: &str| Key::from(user)))
            .policy(hourly("pair").key(|user: &str| Key::from(&user[..6])))
            .store(store)
            .build()
            .unwrap()
    };
    let deferred = store.clone().deferred(NEVER).unwrap();
    let instances = [(); 2].map(|()| limiter(deferred.clone().into()));
    let users: Vec<_> = (0..50).map(|number| format!("user-{number}")).collect();
    for user in &users {
        for instance in &instances {
            instance.check(user).unwrap();
        }
    }
    flush(&instances).await;
    assert_eq!(deferred.health().lost, 0);
    let asked = limiter(store.into());
    for user in &users {
        let decision = asked.peek_async(user).await.unwrap();
        let left: Vec<_> = decision.outcomes().iter().map(|outcome| outcome.remaining()).collect();
        let pair = users.iter().filter(|other| other[..6] == user[..6]).count() as u64;
        assert_eq!(left, [98, 100 - 2 * pair], "{user}");
    }
}

#[tokio::test]
async fn all_keys_are_counted_on_shards() {
    let (servers, clock) = ([(); 3].map(|()| redis()), ManualClock::at(T0));
    let shard = |server| patient(server).clock(&clock).build().unwrap();
    let shards = ["a", "b", "c"].into_iter().zip(servers.each_ref().map(shard));
    all_keys_are_counted(RedisStore::shards(shards).unwrap(), &clock).await;
    assert!(servers.iter().all(|server| !names(server).is_empty()));
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn all_keys_are_counted_on_a_cluster() {
    let (cluster, clock) =
        (support::clusters::Cluster::start(Flavour::Redis7, false), ManualClock::at(T0));
    let store = RedisStore::cluster(cluster.urls()).deadline(secs(20)).clock(&clock);
    all_keys_are_counted(store.build().unwrap(), &clock).await;
}
