//! What happens to limits in Redis when the server, or the way there, is not well: every request is
//! answered in time, and when all is well again, limits hold again.

mod support;

use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use std::{sync::Arc, thread};
use support::{
    T0,
    fleet::{ask, crowd, left, lifetimes, names, patient, until, users},
    inputs,
    instance::{DEADLINE, Instance},
    ms,
    proxy::{Fault, Proxy},
    puppet::Puppet,
    secs,
    server::{Flavour, Reply, Server},
    stacks::ALGORITHMS,
    us,
};
use tokio::{runtime::Runtime, task::JoinSet, time::timeout};
use tollgate::{
    FailureMode, Limiter, ManualClock, Policy, Quota, Reason,
    redis::{RedisStore, RedisStoreBuilder, StateChange, Warning},
    shed::FleetShedder,
};

/// Three an hour, and everything while the server is out of reach.
fn open() -> Policy<str> {
    Policy::token_bucket("p", Quota::per_hour(3)).on_store_failure(FailureMode::Open)
}

impl Instance {
    fn of(url: &str) -> Self {
        Self::with(url, |builder| builder, [open()])
    }

    fn with(
        url: &str,
        configure: impl FnOnce(RedisStoreBuilder) -> RedisStoreBuilder,
        policies: impl IntoIterator<Item = Policy<str>>,
    ) -> Self {
        Self::start(RedisStore::builder(url), configure, policies)
    }

    /// Asks until the server is out of use. Everything is admitted meanwhile.
    async fn goes_down(&self) -> String {
        for asked in 0.. {
            assert!(asked < 30, "{:?}", self.store.health());
            // A caller of its own each time, whom nothing could limit.
            assert!(self.admits(&format!("caller {asked}")).await);
            if !self.store.health().is_up {
                break;
            }
        }
        // Once, and not again while it stays so.
        let before = self.store.health();
        for _ in 0..20 {
            assert!(self.admits("anybody").await);
        }
        let health = self.store.health();
        assert_eq!(health.downs, before.downs);
        assert!(health.skipped > before.skipped, "{health:?}");
        match self.last_change() {
            StateChange::Down { error } => error,
            other => panic!("{other:?}"),
        }
    }

    /// Asks until the server is in use again, and limits hold.
    async fn comes_back(&self) {
        let came_up = async || {
            self.admits("anybody").await;
            self.store.health().is_up
        };
        until("the server is in use again", came_up).await;
        self.last_change();
        self.holds().await;
    }

    /// Each change is reported once. On a busy machine a server may seem to go once more than it does.
    fn last_change(&self) -> StateChange {
        let changes = self.changes.lock();
        let is_down = |change: &StateChange| matches!(change, StateChange::Down { .. });
        for (index, change) in changes.iter().enumerate() {
            assert_eq!(is_down(change), index % 2 == 0, "{changes:?}");
        }
        let downs = changes.iter().filter(|change| is_down(change)).count();
        assert_eq!(downs as u64, self.store.health().downs, "{changes:?}");
        changes.last().expect("a change").clone()
    }
}

// === the server goes away ===

#[tokio::test]
async fn a_server_that_is_killed_and_comes_back_empty() {
    for flavour in Flavour::ALL {
        let mut server = Server::start(flavour);
        let instance = Instance::of(&server.url());
        instance.holds().await;
        assert!(instance.admits("u").await);
        server.kill();
        let error = instance.goes_down().await;
        println!("{error}");
        assert!(error.contains("onnection"), "{error}");
        server.restart();
        instance.comes_back().await;
        until("its state is gone", async || left(&instance.limiter, "u", "p").await == 3).await;
    }
}

#[tokio::test]
async fn a_server_that_is_restarted_with_its_data() {
    for flavour in Flavour::ALL {
        let mut server = Server::start(flavour);
        let instance = Instance::of(&server.url());
        instance.holds().await;
        let store = patient(&server).build().unwrap();
        let limiter = users(&store, [open()]);
        assert_eq!(ask(&limiter, "u", 2).await, [true; 2]);
        server.restart_keeping_data();
        instance.holds().await;
        assert_eq!(ask(&limiter, "u", 2).await, [true, false]);
        assert_eq!(store.health().failed, 0);
    }
}

/// BR-37
#[tokio::test]
async fn promise_6_never_the_weak_link() {
    let mut server = Server::start(Flavour::Redis7);
    let settings = |builder: RedisStoreBuilder| builder.deadline(ms(50)).failures_to_open(5);
    let instance = Instance::with(&server.url(), settings, [open()]);
    instance.holds().await;
    let before = instance.store.health();
    server.kill();
    for _ in 0..100 {
        assert!(instance.admits("u").await);
    }
    let health = instance.store.health();
    let failed = health.failed - before.failed;
    // After the first five, one now and then tries whether the server is back.
    assert!(failed >= 5, "{health:?}");
    assert!(failed <= 5 + 20, "{health:?}");
    assert_eq!(failed + health.skipped - before.skipped, 100);
    server.restart();
    instance.comes_back().await;
}

#[tokio::test]
async fn promise_6_never_the_weak_link_that_is_asked_in_vain() {
    let server = Server::start(Flavour::Redis7);
    let proxy = Proxy::start(server.port()).await;
    let seldom = |builder: RedisStoreBuilder| builder.retry_every(secs(60), secs(60));
    let instance = Instance::with(&proxy.url(), seldom, [open()]);
    instance.holds().await;
    proxy.set(Fault::Stall);
    instance.goes_down().await;
    proxy.set(Fault::Pass);
    // What was on its way arrives.
    let mut requested = 0;
    until("nothing is on its way", || {
        let before = std::mem::replace(&mut requested, proxy.requested());
        let quiet = before == requested;
        async move {
            tokio::time::sleep(ms(100)).await;
            quiet
        }
    })
    .await;
    let (requested, accepted) = (proxy.requested(), proxy.accepted());
    let before = instance.store.health();
    for _ in 0..1_000 {
        assert!(instance.admits("u").await);
    }
    let health = instance.store.health();
    assert_eq!(health.skipped - before.skipped, 1_000);
    assert_eq!((health.failed, health.decided), (before.failed, before.decided));
    assert_eq!((proxy.requested(), proxy.accepted()), (requested, accepted));
}

#[tokio::test]
async fn a_server_that_is_paused() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let instance = Instance::of(&server.url());
        instance.holds().await;
        server.pause();
        let error = instance.goes_down().await;
        println!("{error}");
        server.resume();
        instance.comes_back().await;
    }
}

/// Requests that wait together are all answered by the deadline, not one after the other.
#[tokio::test]
async fn promise_6_never_the_weak_link_of_a_crowd() {
    let server = Server::start(Flavour::Redis7);
    for in_flight in [1, 2, 64] {
        let instance = Arc::new(Instance::with(
            &server.url(),
            |builder| builder.in_flight(in_flight).batch(4),
            [open()],
        ));
        instance.holds().await;
        server.pause();
        let mut crowd = JoinSet::new();
        for _ in 0..200 {
            let instance = instance.clone();
            crowd.spawn(async move { instance.admits("u").await });
        }
        assert_eq!(crowd.join_all().await, [true; 200]);
        server.resume();
        instance.comes_back().await;
    }
}

// === the way there is broken ===

#[tokio::test]
async fn a_server_that_is_slower_than_the_deadline() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let proxy = Proxy::start(server.port()).await;
        let instance = Instance::with(&proxy.url(), |builder| builder.deadline(ms(50)), [open()]);
        instance.holds().await;
        proxy.set(Fault::Delay(ms(100)));
        let error = instance.goes_down().await;
        println!("{error}");
        let health = instance.store.health();
        assert!(health.late > 0, "{health:?}");
        proxy.set(Fault::Pass);
        instance.comes_back().await;
    }
}

/// A server that is slow, but not too slow, is no failure.
#[tokio::test]
async fn a_server_that_is_slow_decides_all_the_same() {
    let server = Server::start(Flavour::Redis7);
    let proxy = Proxy::start(server.port()).await;
    proxy.set(Fault::Delay(ms(100)));
    let store = RedisStore::builder(proxy.url()).deadline(secs(20)).build().unwrap();
    let limiter = users(&store, [open()]);
    assert_eq!(crowd(&limiter, "u", 50).await, 3);
    assert_eq!(store.health().failed, 0);
}

/// What may have run is not run again.
#[tokio::test]
async fn a_wire_that_breaks_charges_nobody_twice() {
    let server = Server::start(Flavour::Redis7);
    for fault in [Fault::Stall, Fault::HalfOpen, Fault::Cut, Fault::CutReplies] {
        let proxy = Proxy::start(server.port()).await;
        let namespace = format!("{fault:?}");
        let policy = Policy::token_bucket("q", Quota::per_hour(1_000))
            .on_store_failure(FailureMode::Open)
            .cost(|user: &str| if user == "u" { 1 } else { 0 });
        let instance =
            Instance::with(&proxy.url(), |builder| builder.namespace(namespace), [open(), policy]);
        instance.holds().await;
        assert_eq!(left(&instance.limiter, "u", "q").await, 1_000);
        let mut asked = 0;
        for _ in 0..3 {
            for broken in [false, true] {
                proxy.set(if broken { fault } else { Fault::Pass });
                for _ in 0..2 {
                    instance.admits("u").await;
                    asked += 1;
                }
            }
        }
        instance.goes_down().await;
        proxy.set(Fault::Pass);
        instance.comes_back().await;
        // What is on its way to the server by connections of old comes in order, or never.
        let observer = patient(&server).namespace(format!("{fault:?}")).build().unwrap();
        let policy = Policy::token_bucket("q", Quota::per_hour(1_000));
        let observer = users(&observer, [policy]);
        let spent = 1_000 - left(&observer, "u", "q").await;
        assert!((1..=asked).contains(&spent), "{spent} of {asked} {fault:?}");
    }
}

// === the server refuses ===

#[tokio::test]
async fn a_server_that_is_out_of_memory() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let instance = Instance::of(&server.url());
        instance.holds().await;
        let filler = "x".repeat(100_000);
        for n in 0..30 {
            server.command(&["SET", &format!("filler:{n}"), &filler]);
        }
        let used: u64 = server.info("used_memory").unwrap().parse().unwrap();
        server.command(&["CONFIG", "SET", "maxmemory", &(used - 100_000).to_string()]);
        let error = instance.goes_down().await;
        assert!(error.contains("OOM"), "{error}");
        server.command(&["FLUSHALL"]);
        instance.comes_back().await;
    }
}

/// Who is over the limit stays so: that takes no memory. And what it is short of is not taken for a
/// missing right.
#[tokio::test]
async fn a_server_that_is_out_of_memory_still_rejects() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = patient(&server).build().unwrap();
        let limiter = users(&store, [open()]);
        assert_eq!(ask(&limiter, "u", 4).await, [true, true, true, false]);
        server.command(&["CONFIG", "SET", "maxmemory", "1"]);
        assert_eq!(ask(&limiter, "u", 1).await, [false]);
        assert_eq!(store.health().failed, 0);
        assert_eq!(store.check().await.unwrap(), [], "{flavour:?}");
    }
}

#[tokio::test]
async fn a_server_that_becomes_a_replica_and_a_primary_again() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let primary = Server::start(flavour);
        let instance = Instance::of(&server.url());
        instance.holds().await;
        server.command(&["REPLICAOF", "127.0.0.1", &primary.port().to_string()]);
        until("it is a replica", async || {
            server.info("master_link_status").as_deref() == Some("up")
        })
        .await;
        let error = instance.goes_down().await;
        assert!(error.contains("READONLY"), "{error}");
        let warnings = instance.store.check().await.unwrap();
        assert_eq!(warnings, [Warning::Replica], "{flavour:?}");
        server.command(&["REPLICAOF", "NO", "ONE"]);
        instance.comes_back().await;
    }
}

#[tokio::test]
async fn a_server_that_is_loading_its_data() {
    let arguments =
        ["--enable-debug-command", "yes", "--loading-process-events-interval-bytes", "1024"];
    let server = Arc::new(Server::with(Flavour::Redis7, &arguments));
    let instance = Instance::of(&server.url());
    instance.holds().await;
    for n in 0..2_000 {
        server.command(&["SET", &format!("filler:{n}"), "0123456789"]);
    }
    // In microseconds for each key.
    server.command(&["CONFIG", "SET", "key-load-delay", "1500"]);
    let reloading = thread::spawn({
        let server = server.clone();
        move || server.try_command(&["DEBUG", "RELOAD"], secs(60))
    });
    let error = instance.goes_down().await;
    // It says so, or it has no time to say anything.
    assert!(error.contains("LOADING") || error.contains("no answer"), "{error}");
    assert_eq!(reloading.join().unwrap().unwrap(), Reply::Status("OK".to_owned()));
    instance.comes_back().await;
}

/// Another connection may lead to the new primary, so one to a replica is not kept.
#[tokio::test]
async fn a_connection_to_a_replica_is_given_up() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let proxy = Proxy::start(server.port()).await;
        let instance = Instance::of(&proxy.url());
        instance.holds().await;
        server.command(&["REPLICAOF", "127.0.0.1", "1"]);
        let accepted = proxy.accepted();
        instance.goes_down().await;
        until("there are new connections", async || proxy.accepted() > accepted + 2).await;
        server.command(&["REPLICAOF", "NO", "ONE"]);
        instance.comes_back().await;
    }
}

/// What a server says that has a script running for too long.
#[tokio::test]
async fn a_server_that_is_busy() {
    let server = Arc::new(Server::with(Flavour::Redis7, &["--busy-reply-threshold", "50"]));
    let instance = Instance::of(&server.url());
    instance.holds().await;
    let busy = thread::spawn({
        let server = server.clone();
        move || server.try_command(&["EVAL", "while true do end", "0"], secs(60))
    });
    instance.goes_down().await;
    server.command(&["SCRIPT", "KILL"]);
    assert!(matches!(busy.join().unwrap().unwrap(), Reply::Error(_)));
    instance.comes_back().await;
}

#[tokio::test]
async fn a_wrong_password_that_is_put_right() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        server.command(&["ACL", "SETUSER", "app", "on", ">right", "~*", "+@all"]);
        let url = format!("redis://app:SECRET@127.0.0.1:{}", server.port());
        let instance = Instance::of(&url);
        let error = instance.goes_down().await;
        assert!(error.contains("WRONGPASS"), "{error}");
        assert!(!error.contains("SECRET"), "{error}");
        let failed = instance.store.check().await.unwrap_err();
        assert!(failed.to_string().contains("WRONGPASS"), "{failed}");
        server.command(&["ACL", "SETUSER", "app", ">SECRET"]);
        instance.comes_back().await;
    }
}

// === rights ===

/// All that a user needs besides its password, as the docs of `RedisStore` say.
fn least_rights(flavour: Flavour) -> Vec<&'static str> {
    let mut rights = vec![
        "+evalsha",
        "+eval",
        "+time",
        "+mget",
        "+set",
        "+del",
        "+getrange",
        "+setrange",
        "+pexpire",
    ];
    if flavour == Flavour::Valkey9 {
        rights.push("+msetex");
    }
    rights
}

fn set_rights(server: &Server, rights: &[&str]) {
    let user = ["ACL", "SETUSER", "tollgate", "reset", "on", ">pw", "~tg:*", "-@all"];
    let reply = server.command(&[&user, rights].concat());
    assert_eq!(reply, Reply::Status("OK".to_owned()));
}

fn url_of_user(server: &Server) -> String {
    format!("redis://tollgate:pw@127.0.0.1:{}", server.port())
}

/// All algorithms, in ways that run all that the scripts have.
async fn use_everything(store: &RedisStore) {
    for algorithm in ALGORITHMS {
        let limiter = users(store, [algorithm.policy("p", Quota::per_hour(100))]);
        for _ in 0..10 {
            let _ = limiter.check_async("u").await;
        }
        crowd(&limiter, "u", 20).await;
        if let Ok(decision) = limiter.check_async("v").await {
            let _ = limiter.refund_async("v", &decision).await;
        }
        let _ = limiter.reset_async("u").await;
    }
}

#[tokio::test]
async fn a_user_with_the_least_rights_can_do_everything() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let keys: [&str; 2] = ["resetkeys", "~tg:api:*"];
        set_rights(&server, &[&keys, &least_rights(flavour)[..]].concat());
        let builder = RedisStore::builder(url_of_user(&server)).namespace("api");
        let store = builder.deadline(secs(20)).build().unwrap();
        use_everything(&store).await;
        assert_eq!(store.check().await.unwrap(), []);
        use_everything(&store).await;
        assert_eq!(store.health().failed, 0, "{flavour:?}");
    }
}

/// And a missing one is known by its name.
#[tokio::test]
async fn a_user_with_less_than_the_least_rights_is_named_what_is_missing() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for missing in least_rights(flavour) {
            let mut rights = least_rights(flavour);
            rights.retain(|right| *right != missing);
            set_rights(&server, &rights);
            let store =
                RedisStore::builder(url_of_user(&server)).deadline(secs(20)).build().unwrap();
            server.command(&["SCRIPT", "FLUSH"]);
            let name = missing[1..].to_uppercase();
            match store.check().await {
                Ok(warnings) if missing == "+msetex" => assert_eq!(warnings, []),
                Ok(warnings) => {
                    let commands = vec![name.clone()];
                    assert_eq!(warnings, [Warning::MissingRights { commands }], "{flavour:?}");
                    assert!(warnings[0].to_string().contains(missing), "{}", warnings[0]);
                }
                Err(error) => {
                    assert!(["+evalsha", "+eval"].contains(&missing), "{missing}: {error}");
                    assert!(error.to_string().to_uppercase().contains(&name), "{error}");
                }
            }
            use_everything(&store).await;
            // A right that nobody misses would not be needed.
            assert_eq!(store.health().failed > 0, missing != "+msetex", "{missing} {flavour:?}");
        }
    }
}

/// What else takes rights is named where it is used, and nowhere else.
#[tokio::test]
async fn rights_for_slots_and_fleets_are_asked_for_where_they_are_needed() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        set_rights(&server, &least_rights(flavour));
        let store = RedisStore::builder(url_of_user(&server)).deadline(secs(20)).build().unwrap();
        let missing = async || match &store.check().await.unwrap()[..] {
            [] => Vec::new(),
            [Warning::MissingRights { commands }] => commands.clone(),
            other => panic!("{other:?}"),
        };
        assert!(missing().await.is_empty());
        let _fleet = FleetShedder::builder("fleet", 10).store(store.clone()).build().unwrap();
        let of_fleet = ["HSET", "HGETALL", "HDEL"];
        assert_eq!(missing().await, of_fleet, "{flavour:?}");
        let limiter = users(&store, [Policy::concurrency("held", 1)]);
        let of_slots = ["ZADD", "ZCARD", "PTTL", "ZREM", "ZREMRANGEBYSCORE"];
        assert_eq!(missing().await, [&of_slots[..], &of_fleet].concat(), "{flavour:?}");
        // With them, all is well.
        let rights: Vec<_> =
            of_slots.iter().chain(&of_fleet).map(|name| format!("+{name}")).collect();
        let rights: Vec<_> = rights.iter().map(String::as_str).collect();
        set_rights(&server, &[&least_rights(flavour)[..], &rights].concat());
        assert!(missing().await.is_empty(), "{flavour:?}");
        assert!(limiter.acquire("u").await.is_ok());
        assert_eq!(store.health().failed, 0);
    }
}

#[tokio::test]
async fn a_user_without_rights_to_the_keys_is_told_so() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        set_rights(&server, &[&["resetkeys", "~other:*"], &least_rights(flavour)[..]].concat());
        let instance = Instance::of(&url_of_user(&server));
        let error = instance.goes_down().await;
        assert!(error.contains("NOPERM"), "{error}");
        set_rights(&server, &least_rights(flavour));
        instance.comes_back().await;
    }
}

// === somebody else has been at our keys ===

#[tokio::test]
async fn values_of_another_type_under_our_keys() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for algorithm in ALGORITHMS {
            let store = patient(&server).build().unwrap();
            let policies = ["a", "b"].map(|name| algorithm.policy(name, Quota::per_hour(3)));
            let limiter = users(&store, policies);
            server.command(&["FLUSHALL"]);
            assert!(limiter.check_async("u").await.is_ok());
            for name in names(&server) {
                let value = server.command(&["GET", &name]);
                for command in ["LPUSH", "SADD", "PFADD", "APPEND"] {
                    server.command(&["DEL", &name]);
                    server.command(&[command, &name, "other"]);
                    // What was there is gone, so that it begins anew, or it can still be told.
                    assert_eq!(ask(&limiter, "u", 1).await, [true], "{command} {algorithm:?}");
                    limiter.reset_async("u").await.unwrap();
                    assert_eq!(ask(&limiter, "u", 4).await, [true, true, true, false]);
                    for (name, lifetime) in lifetimes(&server) {
                        assert_ne!(lifetime, -1, "{name} {command} {algorithm:?}");
                    }
                    server.command(&["FLUSHALL"]);
                    if let Reply::Bulk(Some(value)) = &value {
                        server.command(&[b"SET", name.as_bytes(), value]);
                    }
                }
            }
            assert_eq!(store.health().failed, 0, "{algorithm:?} {flavour:?}");
        }
    }
}

/// Whatever is there, requests are decided, and after a while the whole quota is there again. Only a
/// bucket by other terms is believed, as one of another quota.
#[test]
fn garbage_under_our_keys() {
    let changes = vec((any::<prop::sample::Index>(), any::<u8>()), 1..4);
    let lengths = prop_oneof![2 => Just(None), 1 => (0_usize..60).prop_map(Some)];
    let input = (prop::sample::select(&ALGORITHMS), changes, lengths, 1_u64..30);
    let runtime = Runtime::new().unwrap();
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let result =
            TestRunner::new(inputs(150)).run(&input, |(algorithm, changes, length, limit)| {
                runtime.block_on(async {
                    server.command(&["FLUSHALL"]);
                    let clock = ManualClock::at(T0);
                    let store = patient(&server).clock(&clock).build().unwrap();
                    let quota = Quota::per_minute(limit);
                    let limiter = users(&store, [algorithm.policy("p", quota)]);
                    assert!(limiter.check_async("u").await.is_ok());
                    let other =
                        users(&store, [algorithm.policy("p", Quota::per_minute(limit + 1))]);
                    let _ = ask(&other, "u", limit as usize / 2).await;
                    let mut heals = true;
                    for name in names(&server) {
                        let Reply::Bulk(Some(mut value)) = server.command(&["GET", &name]) else {
                            panic!("{name}")
                        };
                        for (index, byte) in &changes {
                            // Whose record it is stays, or it would be nobody's.
                            let index = 3 + index.index(value.len() - 3);
                            value[index] = *byte;
                            heals &= index < 11 || !algorithm.is_bucket();
                        }
                        value.resize(length.unwrap_or(value.len()), 7);
                        server.command(&[b"SET", name.as_bytes(), &value]);
                    }
                    for _ in 0..3 {
                        let _ = limiter.check_async("u").await;
                        let _ = limiter.peek_async("u").await;
                        let _ = other.peek_async("u").await;
                    }
                    prop_assert_eq!(store.health().failed, 0, "not decided");
                    clock.advance(secs(200));
                    let _ = limiter.check_async("u").await;
                    clock.advance(secs(200));
                    let admitted = ask(&limiter, "u", limit as usize + 1).await;
                    let expected = [&vec![true; limit as usize][..], &[false]].concat();
                    prop_assert!(admitted == expected || !heals, "it does not heal");
                    Ok(())
                })
            });
        if let Err(error) = result {
            panic!("{flavour:?}: {error}");
        }
    }
}

/// Valkey writes many keys with one command, which another server does not know.
#[tokio::test]
async fn a_server_that_is_replaced_by_one_of_another_kind() {
    for flavour in [Flavour::Redis7, Flavour::Redis62] {
        let mut server = Server::start(Flavour::Valkey9);
        let instance = Instance::of(&server.url());
        assert_eq!(instance.store.check().await.unwrap(), []);
        instance.holds().await;
        server.replace(flavour);
        // Not all at once: whether it is noticed before does not matter.
        instance.holds().await;
        let before = instance.store.health();
        server.replace(Flavour::Valkey9);
        instance.holds().await;
        assert!(instance.store.health().decided > before.decided);
    }
}

/// What it can do, and what is wrong with it, is looked at anew.
#[tokio::test]
async fn a_server_that_comes_back_is_looked_over_again() {
    let mut server = Server::start(Flavour::Redis7);
    let instance = Instance::of(&server.url());
    instance.holds().await;
    until("it is looked over", async || support::fleet::calls_of(&server, "info") > 0).await;
    server.kill();
    instance.goes_down().await;
    server.restart();
    instance.comes_back().await;
    let looked_over = async || {
        instance.admits("u").await;
        support::fleet::calls_of(&server, "setrange") > 0
    };
    until("it is looked over again", looked_over).await;
}

// === who answers meanwhile ===

/// Each instance gives out its share of what the fleet may, and its state stays here. When the server
/// is back, what it knew counts again.
#[tokio::test]
async fn an_instance_alone_gives_out_its_share() {
    for algorithm in ALGORITHMS {
        let mut server = Server::start(Flavour::Redis7);
        let policy = || [algorithm.policy("p", Quota::per_day(20))];
        let clock = ManualClock::at(T0);
        let store = RedisStore::builder(server.url())
            .deadline(DEADLINE)
            .retry_every(ms(50), ms(200))
            .clock(&clock)
            .instances(4)
            .build()
            .unwrap();
        let limiter = support::fleet::users_by(&clock, &store, policy());
        // Far from the deadline, so that the server decides.
        let observer = users(&patient(&server).clock(&clock).build().unwrap(), policy());
        assert_eq!(ask(&observer, "u", 2).await, [true; 2]);
        server.restart_keeping_data();
        server.pause();
        let admitted = ask(&limiter, "u", 10).await;
        assert_eq!(admitted, [&[true; 5][..], &[false; 5]].concat(), "{algorithm:?}");
        assert_eq!(limiter.tracked_keys(), 1);
        server.resume();
        until("the server is in use again", async || {
            let _ = limiter.check_async("other").await;
            store.health().is_up
        })
        .await;
        // What was on its way to it may have been charged.
        let spent = 20 - left(&observer, "u", "p").await;
        assert!((2..=12).contains(&spent), "{spent} {algorithm:?}");
    }
}

/// What was charged here is given back here, and what was charged there is given back there.
#[tokio::test]
async fn what_was_charged_meanwhile_is_given_back_where_it_was_charged() {
    for algorithm in ALGORITHMS {
        let mut server = Server::start(Flavour::Redis7);
        let clock = ManualClock::at(T0);
        let store = RedisStore::builder(server.url())
            .deadline(secs(20))
            .failures_to_open(1)
            .retry_every(ms(50), ms(100))
            .clock(&clock)
            .instances(2)
            .build()
            .unwrap();
        let policy = algorithm.policy("p", Quota::per_day(8));
        let limiter = support::fleet::users_by(&clock, &store, [policy]);
        assert_eq!(ask(&limiter, "u", 6).await, [true; 6]);
        server.command(&["REPLICAOF", "127.0.0.1", "1"]);
        let decision = limiter.check_async("u").await.unwrap();
        assert!(!store.health().is_up);
        assert_eq!(ask(&limiter, "u", 4).await, [true, true, true, false], "{algorithm:?}");
        limiter.refund_async("u", &decision).await.unwrap();
        let decision = limiter.check_async("u").await.expect("it was given back");
        assert!(limiter.check_async("u").await.is_err());

        server.command(&["REPLICAOF", "NO", "ONE"]);
        until("the server is in use again", async || {
            let _ = limiter.peek_async("u").await;
            store.health().is_up
        })
        .await;
        limiter.refund_async("u", &decision).await.unwrap();
        assert_eq!(left(&limiter, "u", "p").await, 2, "{algorithm:?}");
        server.kill();
    }
}

/// Requests are spaced here meanwhile, and who goes away gives its place up.
#[tokio::test]
async fn an_instance_alone_holds_requests_back_as_well() {
    let mut server = Server::start(Flavour::Redis7);
    server.kill();
    let clock = ManualClock::at(T0);
    let store = RedisStore::builder(server.url()).deadline(ms(20)).instances(2).build().unwrap();
    let policy = Policy::leaky_bucket("p", Quota::per_second(10).burst(1)).max_delay(secs(1));
    let limiter = support::fleet::users_by(&clock, &store, [policy]);
    assert!(limiter.ready("u").await.is_ok());
    let wait = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.ready("u").await.map(drop) })
    };
    // One after the other, so that they are in order.
    let mut waiting = Vec::new();
    for left_then in [4, 3, 2] {
        waiting.push(wait());
        until("it is in line", async || left(&limiter, "u", "p").await == left_then).await;
    }
    waiting.remove(1).abort();
    until("it has left", async || left(&limiter, "u", "p").await == 3).await;
    // The last one moved up: a fifth of a second each.
    clock.advance(ms(400));
    for waits in waiting {
        assert!(waits.await.unwrap().is_ok());
    }
}

/// A hook that panics takes no request with it.
#[tokio::test]
async fn a_hook_that_panics() {
    let mut server = Server::start(Flavour::Redis7);
    let store = RedisStore::builder(server.url())
        .deadline(DEADLINE)
        .retry_every(ms(50), ms(100))
        .on_state_change(|_| panic!("a hook"))
        .build()
        .unwrap();
    let limiter = users(&store, [open()]);
    server.kill();
    assert_eq!(ask(&limiter, "u", 10).await, [true; 10]);
    assert!(!store.health().is_up);
    server.restart();
    until("the server is in use again", async || {
        let _ = limiter.check_async("other").await;
        store.health().is_up
    })
    .await;
}

/// A policy that lets nothing pass is asked before those that count here.
#[tokio::test]
async fn policies_answer_each_in_its_own_way() {
    let mut server = Server::start(Flavour::Redis7);
    server.kill();
    let policy = |name, mode| Policy::token_bucket(name, Quota::per_hour(2)).on_store_failure(mode);
    let stack = |names: &[(&'static str, FailureMode)]| {
        let policies = names.iter().map(|(name, mode)| policy(*name, *mode));
        Instance::with(&server.url(), |builder| builder.deadline(ms(20)), policies)
    };
    let open = ("open", FailureMode::Open);
    let local = ("local", FailureMode::Local);
    let closed = ("closed", FailureMode::Closed);

    let instance = stack(&[open, local]);
    let mut rejection = None;
    for admitted in [true, true, false, false] {
        let answer = instance.limiter.check_async("u").await;
        assert_eq!(answer.is_ok(), admitted);
        rejection = answer.err();
    }
    let rejection = rejection.unwrap();
    assert_eq!(rejection.reason(), &Reason::Limited);
    assert_eq!(rejection.policies().collect::<Vec<_>>(), ["local"]);

    let instance = stack(&[open, local, closed]);
    for _ in 0..10 {
        let rejection = instance.limiter.check_async("u").await.unwrap_err();
        assert_eq!(rejection.reason(), &Reason::Unavailable { policy: "closed" });
    }
    assert_eq!(instance.limiter.tracked_keys(), 0, "nothing is charged");
}

// === requests that go away ===

/// An answer never goes to another request: each costs a prime number of its own, and is told what
/// remains after it.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_cancelled_at_random_moments() {
    const PRIMES: [u64; 12] = [101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157];
    const LIMIT: u64 = 1_000_000;
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        for (in_flight, batch) in [(1, 64), (1, 1), (2, 3), (64, 64)] {
            let namespace = format!("{in_flight}-{batch}");
            let builder = patient(&server).namespace(namespace).in_flight(in_flight);
            let store = builder.batch(batch).build().unwrap();
            let limiter = Limiter::<u64>::builder()
                .store(store.clone())
                .key(|prime: &u64| *prime)
                .policy(Policy::token_bucket("p", Quota::per_day(LIMIT)).cost(|prime: &u64| *prime))
                .build()
                .unwrap();
            let mut users = JoinSet::new();
            for prime in PRIMES {
                let limiter = limiter.clone();
                users.spawn(async move {
                    let mut random = prime;
                    let mut decided = 0;
                    let mut last = LIMIT;
                    for _ in 0..150 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let patience = us((random >> 33) % 3_000);
                        let answer = timeout(patience, limiter.check_async(&prime)).await;
                        let Ok(decision) = answer else { continue };
                        decided += 1;
                        let decision = decision.unwrap();
                        let outcome = decision.outcomes()[0];
                        assert_eq!(outcome.cost(), prime);
                        // Tokens come back, twelve in a second, which is few.
                        let spent = LIMIT - outcome.remaining();
                        let units = spent.div_ceil(prime);
                        assert!(units * prime - spent < 90, "{spent} of {prime}");
                        assert!(outcome.remaining() <= last, "it was decided before");
                        last = outcome.remaining() + 90;
                    }
                    decided
                });
            }
            let decided: u32 = users.join_all().await.into_iter().sum();
            println!("{decided} of {} were decided", 150 * PRIMES.len());
            // And all is as it was.
            for prime in PRIMES {
                assert!(limiter.check_async(&prime).await.is_ok());
            }
            assert_eq!(store.health().failed, 0);
        }
    }
}

#[tokio::test]
async fn a_store_that_is_dropped_while_requests_are_on_their_way() {
    let server = Server::start(Flavour::Redis7);
    server.pause();
    let store = RedisStore::builder(server.url()).deadline(ms(300)).in_flight(1).build().unwrap();
    let limiter = users(&store, [open()]);
    let mut waiting = JoinSet::new();
    for _ in 0..20 {
        let limiter = limiter.clone();
        waiting.spawn(async move { limiter.check_async("u").await.is_ok() });
    }
    tokio::task::yield_now().await;
    drop((store, limiter));
    let answers = timeout(secs(5), waiting.join_all()).await.expect("all are answered");
    assert_eq!(answers, [true; 20]);
    server.resume();
}

/// A store outlives the runtime that it was first used on, whatever was going on there.
#[test]
fn a_runtime_that_is_shut_down_while_requests_wait() {
    let server = Server::start(Flavour::Redis7);
    for (in_flight, paused) in [(1, false), (1, true), (2, true)] {
        let instance = Arc::new(Instance::with(
            &server.url(),
            |builder| builder.in_flight(in_flight).batch(3),
            [open()],
        ));
        for round in 0..3 {
            let runtime = Runtime::new().unwrap();
            runtime.block_on(instance.holds());
            if paused {
                server.pause();
            }
            for _ in 0..50 {
                let instance = instance.clone();
                runtime.spawn(async move { instance.admits("u").await });
            }
            // Some are on their way, others wait.
            thread::sleep(ms(round));
            runtime.shutdown_background();
            if paused {
                server.resume();
            }
        }
        Runtime::new().unwrap().block_on(async {
            instance.holds().await;
            let mut crowd = JoinSet::new();
            for _ in 0..50 {
                let instance = instance.clone();
                crowd.spawn(async move { instance.admits("u").await });
            }
            crowd.join_all().await;
            instance.holds().await;
            assert!(instance.store.health().is_up);
        });
    }
}

/// Two runtimes at once, of which one ends.
#[test]
fn two_runtimes_that_use_one_store() {
    let server = Server::start(Flavour::Redis7);
    let instance =
        Arc::new(Instance::with(&server.url(), |builder| builder.in_flight(1), [open()]));
    let stays = Runtime::new().unwrap();
    stays.block_on(instance.holds());
    for _ in 0..20 {
        let goes = Runtime::new().unwrap();
        for runtime in [&goes, &stays] {
            for _ in 0..20 {
                let instance = instance.clone();
                runtime.spawn(async move { instance.admits("u").await });
            }
        }
        goes.shutdown_background();
    }
    stays.block_on(instance.holds());
}

// === what a server says ===

/// BR-42
#[tokio::test]
async fn an_error_that_says_nothing_about_the_server_does_not_end_the_trial() {
    let puppet = Puppet::start(b"-OOM full\r\n").await;
    let instance =
        Instance::with(&puppet.url(), |builder| builder.retry_every(ms(100), ms(100)), [open()]);
    instance.goes_down().await;
    puppet.say(b"-ERR something about this request\r\n");
    let failed = instance.store.health().failed;
    until("it is tried", async || {
        instance.admits("u").await;
        instance.store.health().failed > failed
    })
    .await;
    assert!(!instance.store.health().is_up);
    let before = instance.store.health();
    puppet.say(&Puppet::admission(1));
    for _ in 0..5 {
        assert!(instance.admits("u").await);
    }
    let health = instance.store.health();
    assert!(health.is_up);
    assert_eq!((health.decided, health.skipped), (before.decided + 5, before.skipped));
}

/// Whatever it says, requests are answered, and it is left alone.
#[tokio::test]
async fn a_server_that_talks_nonsense() {
    let answers: [&[u8]; 8] = [
        b"+OK\r\n",
        b":1\r\n",
        b"$-1\r\n",
        b"_\r\n",
        b"$3\r\nabc\r\n",
        b"*0\r\n",
        b"*2\r\n+a\r\n$0\r\n\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ];
    for answer in answers {
        let puppet = Puppet::start(answer).await;
        let instance = Instance::of(&puppet.url());
        for _ in 0..10 {
            assert!(instance.admits("u").await);
        }
        let health = instance.store.health();
        assert_eq!(health.decided, 0, "{}", String::from_utf8_lossy(answer));
        assert_eq!(health.downs, 1, "{}", String::from_utf8_lossy(answer));
        let _ = timeout(secs(5), instance.store.check()).await.expect("an answer");
    }
}

/// A caller that went away says nothing about the connection that its request was on.
#[tokio::test]
async fn a_connection_is_kept_when_a_caller_goes_away() {
    let server = Server::start(Flavour::Redis7);
    let proxy = Proxy::start(server.port()).await;
    let instance = Instance::of(&proxy.url());
    instance.holds().await;
    until("it is looked over", async || support::fleet::calls_of(&server, "info") > 0).await;
    let accepted = proxy.accepted();
    for _ in 0..3 {
        proxy.set(Fault::Stall);
        let _ = timeout(ms(5), instance.limiter.check_async("u")).await;
        proxy.set(Fault::Pass);
        // Longer than a call may take.
        tokio::time::sleep(2 * DEADLINE).await;
        instance.admits("u").await;
    }
    assert_eq!(proxy.accepted(), accepted);
}
