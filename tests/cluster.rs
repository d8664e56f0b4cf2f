//! A store on a Redis Cluster, with real nodes: exact wherever slots are, and on their way; and calm when a
//! node is gone.

mod support;

use http::request::Parts;
use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
};
use support::{
    clusters::Cluster,
    fleet::{ask, crowd, left, names, until, users},
    ms, secs,
    server::{Flavour, Server},
    stacks::{ALGORITHMS, Algorithm},
    with,
};
use tokio::{
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep},
};
use tollgate::{
    FailureMode, Limiter, Policy, Quota, Reason,
    key::{Global, Key},
    redis::{ConfigError, RedisStore, RedisStoreBuilder},
};

fn patient(cluster: &Cluster) -> RedisStoreBuilder {
    RedisStore::cluster(cluster.urls()).deadline(secs(20))
}

fn store(cluster: &Cluster) -> RedisStore {
    patient(cluster).build().unwrap()
}

fn user(number: usize) -> String {
    format!("user-{number}")
}

/// The keys of each node.
fn keys(cluster: &Cluster) -> Vec<Vec<String>> {
    cluster.nodes.iter().map(names).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_key_is_counted_exactly_wherever_it_is() {
    for flavour in [Flavour::Redis7, Flavour::Valkey9] {
        let cluster = Cluster::start(flavour, false);
        let store = store(&cluster);
        let limiter = users(
            &store,
            [
                Policy::token_bucket("bucket", Quota::per_hour(20)),
                Policy::sliding_log("log", Quota::per_hour(15)),
            ],
        );
        assert_eq!(crowd(&limiter, "somebody", 100).await, 15);
        // Many at the same time, for all nodes.
        let mut asked = JoinSet::new();
        for number in 0..200 {
            let limiter = limiter.clone();
            asked.spawn(async move { limiter.check_async(&user(number)).await.is_ok() });
        }
        assert!(asked.join_all().await.into_iter().all(|admitted| admitted));
        for number in 0..200 {
            assert_eq!(left(&limiter, &user(number), "log").await, 14);
        }
        assert!(keys(&cluster).iter().all(|keys| keys.len() > 60));
        assert_eq!(store.server_health().len(), 3);
        assert!(store.health().is_up);
        assert_eq!(store.check().await.unwrap(), []);
    }
}

/// BR-34: whatever braces there are in keys, all of a decision is in one slot.
#[tokio::test(flavor = "multi_thread")]
async fn br_34_braces_in_keys_are_nothing_special() {
    let cluster = Cluster::start(Flavour::Redis7, false);
    let key = |parts: &Parts| Key::from(&parts.headers["user"]);
    for (number, algorithm) in ALGORITHMS.into_iter().enumerate() {
        let quota = Quota::per_hour(1);
        let policy: Policy = match algorithm {
            Algorithm::TokenBucket => Policy::token_bucket("p", quota),
            Algorithm::LeakyBucket => Policy::leaky_bucket("p", quota),
            Algorithm::FixedWindow => Policy::fixed_window("p", quota),
            Algorithm::FromFirstHit => Policy::fixed_window("p", quota).from_first_hit(),
            Algorithm::SlidingWindow => Policy::sliding_window("p", quota),
            Algorithm::SlidingLog => Policy::sliding_log("p", quota),
        };
        let builder = patient(&cluster).namespace(format!("n{number}"));
        let limiter = Limiter::builder()
            .store(builder.build().unwrap())
            .key(key)
            .policy(policy)
            .policy(Policy::sliding_log("other", Quota::per_hour(100)))
            .build()
            .unwrap();
        for name in ["a", "{a}", "a}", "{}a", "x{y}z"] {
            let (parts, ()) = with("user", name).into_parts();
            assert!(limiter.check_async(&parts).await.is_ok(), "{algorithm:?} {name}");
            let rejection = limiter.check_async(&parts).await.unwrap_err();
            assert_eq!(rejection.reason(), &Reason::Limited, "{algorithm:?} {name}");
        }
    }
}

/// A user and everybody, in different slots, and mostly on different nodes.
#[tokio::test(flavor = "multi_thread")]
async fn all_or_nothing_in_several_slots() {
    let cluster = Cluster::start(Flavour::Redis7, false);
    for user_first in [true, false] {
        let namespace = format!("order-{user_first}");
        let store = patient(&cluster).namespace(namespace).build().unwrap();
        let mut policies = vec![
            Policy::token_bucket("user", Quota::per_hour(2)),
            Policy::sliding_window("everybody", Quota::per_hour(15)).key(Global),
        ];
        if !user_first {
            policies.reverse();
        }
        let limiter = users(&store, policies);
        let mut admitted = 0;
        for number in 0..10 {
            admitted += ask(&limiter, &user(number), 3).await.iter().filter(|ok| **ok).count();
        }
        assert_eq!(admitted, 15);
        let mut spent = 0;
        for number in 0..10 {
            spent += 2 - left(&limiter, &user(number), "user").await;
        }
        assert_eq!(spent, 15, "what was rejected was given back");
        assert_eq!(left(&limiter, "user-0", "everybody").await, 0);
        let (given_back, failed) = store.given_back();
        assert!(given_back >= 10, "{given_back}");
        assert_eq!(failed, 0);
    }
}

/// One key for everybody need not be one slot, and still is one limit.
#[tokio::test(flavor = "multi_thread")]
async fn a_limit_for_everybody_is_spread_over_the_cluster() {
    let cluster = Cluster::start(Flavour::Redis7, false);
    let store = store(&cluster);
    let limiter = users(
        &store,
        [
            Policy::token_bucket("everybody", Quota::per_hour(900)).key(Global).spread(32),
            Policy::fixed_window("day", Quota::per_hour(100_000)).key(Global).spread(32),
        ],
    );
    let mut admitted = 0;
    for _ in 0..10 {
        admitted += crowd(&limiter, "somebody", 100).await;
    }
    // 28 in each of 32 parts.
    assert_eq!(admitted, 896);
    for (node, keys) in keys(&cluster).iter().enumerate() {
        assert!(keys.len() > 5, "node {node} has {}", keys.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_lost_its_scripts_is_no_matter() {
    let cluster = Cluster::start(Flavour::Redis7, false);
    let store = store(&cluster);
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(3))]);
    for round in 0..3 {
        for number in 0..60 {
            let decision = limiter.check_async(&user(number)).await.unwrap();
            assert_eq!(decision.outcomes()[0].remaining(), 2 - round);
        }
        cluster.nodes[round as usize].command(&["SCRIPT", "FLUSH"]);
    }
    assert_eq!((store.health().failed, store.health().downs), (0, 0));
}

/// Slots go round and round under load, with all that is in them; and nobody is told anything wrong.
#[tokio::test(flavor = "multi_thread")]
async fn slots_that_move_lose_and_grant_nothing() {
    const USERS: usize = 8;
    let cluster = Arc::new(Cluster::start(Flavour::Redis7, false));
    let store = store(&cluster);
    let limiter = users(
        &store,
        // Nothing comes back meanwhile.
        [Policy::fixed_window("window", Quota::per_hour(1_000_000))
            .from_first_hit()
            .on_store_failure(FailureMode::Closed)],
    );
    // Where the users are.
    for number in 0..USERS {
        limiter.check_async(&user(number)).await.unwrap();
    }
    let mut slots = HashMap::new();
    for (node, keys) in keys(&cluster).iter().enumerate() {
        for key in keys {
            let slot = cluster.nodes[node].command(&["CLUSTER", "KEYSLOT", key]).number();
            slots.insert(slot as u16, node);
        }
    }
    let admitted: Arc<[AtomicU64]> = (0..USERS).map(|_| AtomicU64::new(1)).collect();
    let stop = Arc::new(AtomicBool::new(false));
    let mut crowd = JoinSet::new();
    for caller in 0..32 {
        let (limiter, admitted, stop) = (limiter.clone(), admitted.clone(), stop.clone());
        crowd.spawn(async move {
            let number = caller % USERS;
            while !stop.load(SeqCst) {
                let answer = limiter.check_async(&user(number)).await;
                answer.expect("nobody is turned away");
                admitted[number].fetch_add(1, SeqCst);
            }
        });
    }
    let moving = spawn_blocking({
        let cluster = cluster.clone();
        move || {
            for round in 0..3 {
                for (slot, first) in &slots {
                    let from = (first + round) % 3;
                    cluster.move_slot(*slot, from, (from + 1) % 3);
                }
            }
        }
    });
    moving.await.unwrap();
    stop.store(true, SeqCst);
    crowd.join_all().await;
    let mut decided = 0;
    for number in 0..USERS {
        let admitted = admitted[number].load(SeqCst);
        decided += admitted;
        assert_eq!(left(&limiter, &user(number), "window").await, 1_000_000 - admitted);
    }
    assert!(decided > 500, "only {decided} were decided meanwhile");
    let health = store.health();
    assert_eq!((health.failed, health.downs), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_primary_is_a_matter_of_its_own_slots_until_its_replica_takes_over() {
    let mut cluster = Cluster::start(Flavour::Redis7, true);
    let store = RedisStore::cluster(cluster.urls())
        .deadline(ms(500))
        .retry_every(ms(50), ms(200))
        .build()
        .unwrap();
    let policy = Policy::token_bucket("p", Quota::per_hour(1_000));
    let limiter = users(&store, [policy.on_store_failure(FailureMode::Closed)]);
    let mut lost = Vec::new();
    for number in 0..60 {
        limiter.check_async(&user(number)).await.unwrap();
    }
    cluster.nodes[1].kill();
    for number in 0..60 {
        if let Err(rejection) = limiter.check_async(&user(number)).await {
            assert_eq!(rejection.reason(), &Reason::Unavailable { policy: "p" });
            lost.push(number);
        }
    }
    assert!((10..=35).contains(&lost.len()), "a third: {}", lost.len());
    for number in (0..60).filter(|number| !lost.contains(number)) {
        assert!(limiter.check_async(&user(number)).await.is_ok(), "{number} is elsewhere");
    }
    until("the replica decides", async || {
        let mut admitted = true;
        for number in &lost {
            admitted &= limiter.check_async(&user(*number)).await.is_ok();
        }
        admitted
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_gone_keeps_nobody_waiting() {
    let mut cluster = Cluster::start(Flavour::Redis7, false);
    let store = RedisStore::cluster(cluster.urls()).instances(2).build().unwrap();
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(10))]);
    cluster.nodes.iter_mut().for_each(Server::kill);
    let decision = limiter.check_async("user").await.unwrap();
    assert_eq!(decision.outcomes()[0].limit(), 5, "its share");
    assert_eq!(ask(&limiter, "user", 5).await, [true, true, true, true, false]);
    assert!(store.check().await.is_err());
}

/// Not even those who have to find out first who has which slot.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_says_nothing_keeps_nobody_waiting() {
    let cluster = Cluster::start(Flavour::Redis7, false);
    let store = RedisStore::cluster(cluster.urls()).deadline(ms(800)).build().unwrap();
    let limiter = users(&store, [Policy::token_bucket("p", Quota::per_hour(10))]);
    cluster.nodes.iter().for_each(Server::pause);
    let mut crowd = JoinSet::new();
    for number in 0..30 {
        let limiter = limiter.clone();
        crowd.spawn(async move {
            sleep(ms(number * 20)).await;
            let start = Instant::now();
            limiter.check_async(&user(number as usize)).await.unwrap();
            start.elapsed()
        });
    }
    let longest = crowd.join_all().await.into_iter().max().unwrap();
    assert!((ms(800)..ms(1_200)).contains(&longest), "{longest:?}");
    cluster.nodes.iter().for_each(Server::resume);
    until("it decides again", async || {
        drop(limiter.check_async("user-0").await);
        store.health().decided > 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slots_of_a_fleet_follow_the_slots_of_the_cluster() {
    let cluster = Arc::new(Cluster::start(Flavour::Redis7, false));
    let store = patient(&cluster).lease(ms(600)).build().unwrap();
    let limiter = users(
        &store,
        [Policy::concurrency("user", 2), Policy::concurrency("everybody", 30).key(Global)],
    );
    let mut permits = Vec::new();
    for number in 0..15 {
        permits.push(limiter.acquire(&user(number)).await.unwrap().1);
        permits.push(limiter.acquire(&user(number)).await.unwrap().1);
    }
    assert!(limiter.acquire("user-0").await.is_err());
    assert!(limiter.acquire("user-16").await.is_err());
    let held = {
        let cluster = cluster.clone();
        move || -> i64 {
            let of = |node: &Server| -> i64 {
                let sets = names(node).into_iter().filter(|name| !name.ends_with('}'));
                sets.map(|set| node.command(&["ZCARD", &set]).number()).sum()
            };
            cluster.nodes.iter().map(of).sum()
        }
    };
    assert_eq!(held(), 60);
    // Elsewhere they are renewed and released as well.
    let everywhere: Vec<_> = keys(&cluster)
        .into_iter()
        .enumerate()
        .flat_map(|(node, keys)| keys.into_iter().map(move |key| (node, key)))
        .map(|(node, key)| {
            (cluster.nodes[node].command(&["CLUSTER", "KEYSLOT", &key]).number() as u16, node)
        })
        .collect();
    for (slot, node) in everywhere {
        cluster.move_slot(slot, node, (node + 1) % 3);
    }
    let before = store.calls();
    let start = tokio::time::Instant::now();
    until("they were renewed", async || start.elapsed() > ms(1_500)).await;
    assert_eq!((held(), store.leases().lost), (60, 0));
    assert_eq!(store.calls(), before);
    drop(permits);
    until("all are free", async || held() == 0).await;
}

#[test]
fn what_cannot_be_is_told() {
    let none: [&str; 0] = [];
    for builder in [
        RedisStore::cluster(none),
        RedisStore::cluster(["redis://127.0.0.1/3"]),
        RedisStore::cluster(["redis://127.0.0.1", "http://127.0.0.1"]),
        RedisStore::cluster(["unix:///run/redis.sock"]),
    ] {
        let error = builder.build().unwrap_err();
        assert!(matches!(error, ConfigError::Cluster { .. }), "{error:?}");
    }
}
