//! A store on several independent servers: each key has its own, and a request that counts for several
//! keys is all or nothing.

mod support;

use std::{collections::HashMap, time::Duration};
use support::{
    fleet::{ask, calls_of, crowd, left, names, patient, until, users},
    ms,
    proxy::{Fault, Proxy},
    secs,
    server::{Flavour, Server},
};
use tokio::time::Instant;
use tollgate::{
    FailureMode, Limiter, Policy, Quota, Reason,
    key::{Global, Key},
    redis::{ConfigError, RedisStore, RedisStoreBuilder},
};

const NAMES: [&str; 3] = ["a", "b", "c"];

fn servers(count: usize) -> Vec<Server> {
    (0..count).map(|_| Server::start(Flavour::Redis7)).collect()
}

fn store_by(
    servers: &[Server],
    configure: impl Fn(RedisStoreBuilder) -> RedisStoreBuilder,
) -> RedisStore {
    let shards = NAMES.iter().zip(servers);
    let shards = shards.map(|(name, server)| (*name, configure(patient(server)).build().unwrap()));
    RedisStore::shards(shards).unwrap()
}

fn store(servers: &[Server]) -> RedisStore {
    store_by(servers, |builder| builder)
}

fn user(number: usize) -> String {
    format!("user-{number}")
}

/// On which of the servers each of so many users is counted.
async fn places(servers: &[Server], users_count: usize) -> HashMap<usize, usize> {
    let store = store(servers);
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(10))]);
    let mut places = HashMap::new();
    for number in 0..users_count {
        servers.iter().for_each(|server| drop(server.command(&["FLUSHALL"])));
        limiter.check_async(&user(number)).await.unwrap();
        let place = servers.iter().position(|server| !names(server).is_empty());
        places.insert(number, place.expect("somebody counts"));
    }
    places
}

#[tokio::test]
async fn each_key_is_counted_exactly_by_one_server() {
    let servers = servers(3);
    let store = store(&servers);
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(20))]);
    let decided = crowd(&limiter, "somebody", 100).await;
    assert_eq!(decided, 20);
    for number in 0..60 {
        assert_eq!(ask(&limiter, &user(number), 1).await, [true]);
    }
    let counts: Vec<_> = servers.iter().map(|server| names(server).len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 61);
    assert!(counts.iter().all(|count| *count > 5), "{counts:?}");
    assert!(store.health().is_up);
    let decided: u64 = store.server_health().iter().map(|(_, health)| health.decided).sum();
    assert_eq!(decided, 160);
}

#[tokio::test]
async fn a_server_that_is_added_takes_over_its_share_and_no_more() {
    let servers = servers(3);
    let (two, three) = (places(&servers[..2], 90).await, places(&servers, 90).await);
    let moved: Vec<_> = (0..90).filter(|number| two[number] != three[number]).collect();
    assert!(moved.iter().all(|number| three[number] == 2), "only to the new one");
    assert!((15..=45).contains(&moved.len()), "about a third: {}", moved.len());
}

/// A user and everybody, who are on different servers for some users.
fn stack(store: &RedisStore) -> Limiter<str> {
    users(
        store,
        [
            Policy::token_bucket("user", Quota::per_hour(5)),
            Policy::fixed_window("everybody", Quota::per_calendar_day(40)).key(Global),
            Policy::sliding_log("log", Quota::per_hour(4))
                .key(|user: &str| Key::from(user.len() as u64)),
        ],
    )
}

#[tokio::test]
async fn all_or_nothing_on_several_servers() {
    let servers = servers(3);
    let store = store(&servers);
    let limiter = stack(&store);
    let mut admitted = 0;
    for number in 0..12 {
        // Four each, by the log of all whose names are as long.
        admitted += ask(&limiter, &user(number), 6).await.iter().filter(|ok| **ok).count();
    }
    // user-0 to user-9 share one log, user-10 and user-11 another.
    assert_eq!(admitted, 8);
    assert_eq!(left(&limiter, "user-0", "everybody").await, 32);
    let spent: u64 = 12 * 5 - {
        let mut left_in_all = 0;
        for number in 0..12 {
            left_in_all += left(&limiter, &user(number), "user").await;
        }
        left_in_all
    };
    assert_eq!(spent, 8, "what was rejected was given back");
    let (given_back, failed) = store.given_back();
    assert!(given_back > 0, "some were on several servers");
    assert_eq!(failed, 0);
}

/// It is given back all the same.
#[tokio::test]
async fn nobody_waits_past_the_deadline_for_what_is_given_back() {
    let servers = servers(2);
    let proxies = [Proxy::start(servers[0].port()).await, Proxy::start(servers[1].port()).await];
    let shard = |proxy: &Proxy| RedisStore::builder(proxy.url()).deadline(secs(2)).build().unwrap();
    let store = RedisStore::shards(NAMES.into_iter().zip(proxies.iter().map(shard))).unwrap();
    let policies = [
        Policy::token_bucket("user", Quota::per_hour(1)),
        Policy::token_bucket("everybody", Quota::per_hour(9)).key(Global),
    ];
    let limiter = users(&store, policies);
    // One who is not counted where everybody is.
    let mut number = 0;
    let everybody = loop {
        number += 1;
        servers.iter().for_each(|server| drop(server.command(&["FLUSHALL"])));
        assert!(limiter.check_async(&user(number)).await.is_ok());
        if servers.iter().all(|server| !names(server).is_empty()) {
            let before = [calls_of(&servers[0], "set"), calls_of(&servers[1], "set")];
            while limiter.check_async(&user(number)).await.is_ok() {}
            break usize::from(calls_of(&servers[1], "set") > before[1]);
        }
    };
    let given_back = store.given_back().0;
    proxies[everybody].set(Fault::Delay(ms(1_500)));
    let start = Instant::now();
    assert!(limiter.check_async(&user(number)).await.is_err());
    let waited = start.elapsed();
    assert!((ms(1_500)..ms(2_800)).contains(&waited), "{waited:?}");
    until("it is given back", async || store.given_back().0 > given_back).await;
    proxies[everybody].set(Fault::Pass);
    assert_eq!((left(&limiter, &user(number), "everybody").await, store.given_back().1), (8, 0));
}

#[tokio::test]
async fn refunds_and_resets_reach_every_server() {
    let servers = servers(3);
    let store = store(&servers);
    let limiter = stack(&store);
    let mut decisions = Vec::new();
    for _ in 0..4 {
        decisions.push(limiter.check_async("user-1").await.unwrap());
    }
    assert!(limiter.check_async("user-1").await.is_err());
    for decision in decisions.iter().rev() {
        limiter.refund_async("user-1", decision).await.unwrap();
    }
    assert_eq!(left(&limiter, "user-1", "everybody").await, 40);
    assert_eq!(left(&limiter, "user-1", "log").await, 4);
    assert_eq!(left(&limiter, "user-1", "user").await, 5);
    limiter.check_async("user-1").await.unwrap();
    limiter.reset_async("user-1").await.unwrap();
    assert_eq!(left(&limiter, "user-1", "everybody").await, 40);
}

#[tokio::test]
async fn a_dead_server_is_a_matter_of_its_own_keys() {
    let mut servers = servers(3);
    let places = places(&servers, 40).await;
    let store = store_by(&servers, |builder| builder.deadline(ms(200)).retry_every(ms(50), ms(50)));
    let closed = |name| {
        Policy::token_bucket(name, Quota::per_hour(1_000)).on_store_failure(FailureMode::Closed)
    };
    let limiter = users(&store, [closed("p")]);
    servers[1].kill();
    for number in 0..40 {
        let answer = limiter.check_async(&user(number)).await;
        if places[&number] == 1 {
            let rejection = answer.unwrap_err();
            assert_eq!(rejection.reason(), &Reason::Unavailable { policy: "p" });
        } else {
            answer.unwrap();
        }
    }
    assert!(!store.health().is_up);
    let up = store.server_health().into_iter().map(|(name, health)| (name, health.is_up));
    assert_eq!(
        up.collect::<Vec<_>>(),
        [("a".into(), true), ("b".into(), false), ("c".into(), true)]
    );
    // What one key takes is given back if the other cannot be asked.
    let two = users(&store, [closed("user"), closed("everybody").key(Global)]);
    let before = store.given_back();
    let mut unavailable = 0;
    for number in 0..40 {
        unavailable += u32::from(two.check_async(&user(number)).await.is_err());
    }
    assert!(unavailable > 0);
    servers[1].restart();
    until("it is back", async || {
        store.health().is_up || {
            let _ = limiter.check_async(&user(0)).await;
            for number in 0..40 {
                let _ = limiter.check_async(&user(number)).await;
            }
            false
        }
    })
    .await;
    let everybody = left(&two, "user-0", "everybody").await;
    if unavailable < 40 {
        // Everybody's server was there, so others' charges came back.
        assert_eq!(everybody, 1_000 - u64::from(40 - unavailable));
        assert!(store.given_back().0 > before.0);
    }
    assert_eq!(store.given_back().1, 0);
}

#[tokio::test]
async fn those_whose_server_is_gone_fall_back_to_their_share() {
    let mut servers = servers(3);
    let places = places(&servers, 20).await;
    let store = store_by(&servers, |builder| builder.deadline(ms(200)).instances(2));
    let limiter = stack(&store);
    let number = *places.iter().find(|(_, place)| **place == 0).unwrap().0;
    servers[0].kill();
    let decision = limiter.check_async(&user(number)).await.unwrap();
    let outcome = decision.outcomes().iter().find(|outcome| outcome.policy() == "user").unwrap();
    // Two of five, of which one is spent.
    assert_eq!((outcome.limit(), outcome.remaining()), (2, 1));
    limiter.refund_async(&user(number), &decision).await.unwrap();
    let again = limiter.check_async(&user(number)).await.unwrap();
    let outcome = again.outcomes().iter().find(|outcome| outcome.policy() == "user").unwrap();
    assert_eq!(outcome.remaining(), 1);
}

#[tokio::test]
async fn slots_are_held_on_the_servers_of_their_keys() {
    let servers = servers(3);
    let store = store_by(&servers, |builder| builder.lease(ms(400)));
    let limiter = users(
        &store,
        [Policy::concurrency("user", 1), Policy::concurrency("everybody", 10).key(Global)],
    );
    let mut permits = Vec::new();
    for number in 0..10 {
        permits.push(limiter.acquire(&user(number)).await.unwrap().1);
    }
    // Whose slots are taken leaves nothing held elsewhere.
    assert!(limiter.acquire("user-0").await.is_err());
    assert!(limiter.acquire("user-10").await.is_err());
    let held = || -> i64 {
        let of = |server: &Server| -> i64 {
            let sets = names(server).into_iter().filter(|name| !name.ends_with('}'));
            sets.map(|set| server.command(&["ZCARD", &set]).number()).sum()
        };
        servers.iter().map(of).sum()
    };
    let start = Instant::now();
    // For longer than a lease.
    until("they were renewed", async || start.elapsed() > Duration::from_millis(1_000)).await;
    assert_eq!(held(), 20);
    assert_eq!(store.leases().lost, 0);
    drop(permits);
    until("all are free", async || held() == 0).await;
    assert_eq!(limiter.in_flight("user"), Some(0));
}

#[test]
fn what_cannot_be_is_told() {
    let one = |namespace: &str| {
        RedisStore::builder("redis://127.0.0.1").namespace(namespace).build().unwrap()
    };
    let none: [(&str, RedisStore); 0] = [];
    let sharded = RedisStore::shards([("a", one("x")), ("b", one("x"))]).unwrap();
    for error in [
        RedisStore::shards(none).unwrap_err(),
        RedisStore::shards([("a", one("x")), ("a", one("x"))]).unwrap_err(),
        RedisStore::shards([("a", one("x")), ("b", one("y"))]).unwrap_err(),
        RedisStore::shards([("a", sharded)]).unwrap_err(),
    ] {
        assert!(matches!(error, ConfigError::Shards { .. }));
        assert!(error.to_string().contains("a name of its own"), "{error}");
    }
}
