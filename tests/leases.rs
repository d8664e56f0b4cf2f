//! Slots of a fleet: leases in Redis, taken with the decision, kept for as long as requests take, and gone
//! after a while with the process that held them. Every way that a request can end is in `permits`.

mod support;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicI64, AtomicU64, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};
use support::{
    fleet::{calls_of, lifetimes, names, patient, until, users},
    ms,
    process::{Process, serve, variable},
    secs,
    server::{Flavour, Server},
};
use tokio::{
    runtime::Runtime,
    task::{JoinSet, yield_now},
    time::{Instant, sleep},
};
use tollgate::{
    FailureMode, Limiter, Policy, Quota, Reason, Rejection,
    concurrency::Permit,
    key::Key,
    redis::{
        LeaseHealth, RedisStore,
        client::{Client, cmd},
    },
};

fn redis() -> Server {
    Server::start(Flavour::Redis7)
}

/// So many slots for each user, and nothing at all without the server.
fn slots(store: &RedisStore, limit: u32) -> Limiter<str> {
    users(store, [Policy::concurrency("slots", limit).on_store_failure(FailureMode::Closed)])
}

/// Takes slots of a user until there are none, and returns the permits.
async fn take_all(limiter: &Limiter<str>, user: &str) -> Vec<Permit> {
    let mut permits = Vec::new();
    while let Ok((_, permit)) = limiter.acquire(user).await {
        permits.push(permit);
    }
    permits
}

async fn is_full(limiter: &Limiter<str>, user: &str) -> bool {
    match limiter.acquire(user).await {
        Ok(_) => false,
        Err(rejection) => {
            assert_eq!(rejection.reason(), &Reason::Limited);
            true
        }
    }
}

/// The names of all sets of leases.
fn sets(server: &Server) -> Vec<String> {
    names(server).into_iter().filter(|name| !name.ends_with('}')).collect()
}

/// How many slots are held, as the server knows.
fn held_on(server: &Server) -> i64 {
    sets(server).iter().map(|set| server.command(&["ZCARD", set]).number()).sum()
}

async fn until_held(server: &Server, slots: i64) {
    until("so many are held", async || held_on(server) == slots).await;
}

fn lost(store: &RedisStore) -> u64 {
    store.leases().lost
}

// === many processes ===

/// How long a lease is where processes die.
const LEASE: Duration = secs(1);

/// What a process does that is an instance: `take` slots until there are none, `drop` all, say how many
/// were `lost`, and `work` for some milliseconds: take a slot, hold it for a moment, again and again.
#[test]
fn an_instance() {
    serve("an_instance", || {
        let runtime = Runtime::new().unwrap();
        let store = RedisStore::builder(variable("SERVER")).deadline(secs(20)).lease(LEASE);
        let store = store.build().unwrap();
        let limiter = slots(&store, variable("LIMIT").parse().unwrap());
        let mut permits: Vec<Permit> = Vec::new();
        move |line| match line.split(' ').collect::<Vec<_>>()[..] {
            ["take"] => {
                permits.extend(runtime.block_on(take_all(&limiter, "user")));
                permits.len().to_string()
            }
            ["drop", rest] => {
                permits.truncate(rest.parse().unwrap());
                permits.len().to_string()
            }
            ["lost"] => {
                let known = permits.iter().filter(|permit| permit.was_lost()).count();
                format!("{} {known}", lost(&store))
            }
            ["work", millis] => runtime.block_on(work(&limiter, ms(millis.parse().unwrap()))),
            _ => panic!("what is `{line}`?"),
        }
    });
}

/// Sixteen that take a slot, hold it for a moment and release it. Returns how many did so, and how many
/// of all processes were inside at a time, as they counted themselves.
async fn work(limiter: &Limiter<str>, time: Duration) -> String {
    let end = Instant::now() + time;
    let client = Client::open(variable("COUNTER")).unwrap();
    let counter = client.get_multiplexed_async_connection().await.unwrap();
    let (done, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicI64::new(0)));
    let mut crowd = JoinSet::new();
    for _ in 0..16 {
        let (limiter, mut counter) = (limiter.clone(), counter.clone());
        let (done, most) = (done.clone(), most.clone());
        crowd.spawn(async move {
            while Instant::now() < end {
                let Ok((_, permit)) = limiter.acquire("user").await else {
                    yield_now().await;
                    continue;
                };
                let inside: i64 =
                    cmd("INCR").arg("inside").query_async(&mut counter).await.unwrap();
                most.fetch_max(inside, SeqCst);
                let _: i64 = cmd("DECR").arg("inside").query_async(&mut counter).await.unwrap();
                drop(permit);
                done.fetch_add(1, SeqCst);
            }
        });
    }
    crowd.join_all().await;
    format!("{} {}", done.load(SeqCst), most.load(SeqCst))
}

fn instance(server: &Server, counter: &Server, limit: u32) -> Process {
    let (server, counter, limit) = (server.url(), counter.url(), limit.to_string());
    let variables = [("SERVER", &*server), ("COUNTER", &*counter), ("LIMIT", &*limit)];
    Process::start("an_instance", &variables)
}

#[tokio::test]
async fn never_more_inside_than_the_limit_in_all_processes_together() {
    let (server, counter) = (redis(), redis());
    let mut processes: Vec<_> = (0..4).map(|_| instance(&server, &counter, 10)).collect();
    processes.iter_mut().for_each(|process| process.tell("work 2000"));
    let (mut done, mut most, mut working) = (0, 0, 0);
    for process in &mut processes {
        let answer = process.answer();
        let (own, seen) = answer.split_once(' ').unwrap();
        let own: u64 = own.parse().unwrap();
        working += u32::from(own > 0);
        done += own;
        most = most.max(seen.parse().unwrap());
    }
    assert!((2..=10).contains(&most), "{most} inside");
    assert!(working > 1 && done > 100, "only {done} got through, of {working} processes");
    until_held(&server, 0).await;
}

#[tokio::test]
async fn a_killed_process_frees_its_slots_within_a_lease() {
    let server = redis();
    let (mut dying, mut other) = (instance(&server, &server, 5), instance(&server, &server, 5));
    assert_eq!(dying.ask("take"), "5");
    assert_eq!(other.ask("take"), "0");
    let killed = Instant::now();
    dying.kill();
    until("the slots are free", async || other.ask("take") == "5").await;
    // As long as a lease at most, and some patience with a busy machine.
    assert!(killed.elapsed() < LEASE + secs(5));
    assert_eq!(other.ask("lost"), "0 0");
}

#[tokio::test]
async fn a_process_that_stood_still_learns_what_it_lost() {
    let server = redis();
    let (mut still, mut other) = (instance(&server, &server, 5), instance(&server, &server, 5));
    assert_eq!(still.ask("take"), "5");
    assert_eq!(still.ask("drop 3"), "3");
    until_held(&server, 3).await;
    still.pause();
    // Its slots are given away once its leases have run out.
    until("the slots are free", async || other.ask("take") == "5").await;
    still.resume();
    until("it knows", async || still.ask("lost") == "3 3").await;
    // Too many are in flight, by no more than what it holds; and nobody else comes in until they
    // are gone.
    assert_eq!(held_on(&server), 5 + 3);
    assert_eq!(other.ask("take"), "5");
    assert_eq!(other.ask("drop 2"), "2");
    until_held(&server, 2 + 3).await;
    assert_eq!(other.ask("take"), "2");
    assert_eq!(other.ask("drop 1"), "1");
    until_held(&server, 1 + 3).await;
    assert_eq!(other.ask("take"), "2");
    assert_eq!(still.ask("take"), "3");
    assert_eq!(other.ask("lost"), "0 0");
}

// === one process ===

#[tokio::test]
async fn slots_and_rates_are_one_call() {
    let server = redis();
    let store = patient(&server).build().unwrap();
    let limiter = users(
        &store,
        [
            Policy::token_bucket("bucket", Quota::per_hour(100)),
            Policy::concurrency("slots", 2),
            Policy::concurrency("everybody", 3).key(|_: &str| Key::from("everybody")),
        ],
    );
    drop(limiter.acquire("warm").await.unwrap());
    until("all is quiet", async || held_on(&server) == 0).await;
    let before = (store.calls(), calls_of(&server, "evalsha"));
    let (_, _permit) = limiter.acquire("user").await.unwrap();
    assert_eq!(store.calls().0, before.0.0 + 1);
    assert_eq!(calls_of(&server, "evalsha"), before.1 + 1);
    assert_eq!(held_on(&server), 2);
}

/// All that a server has to have, on every one of them.
#[tokio::test]
async fn slots_are_kept_for_as_long_as_a_request_takes() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = patient(&server).lease(ms(300)).build().unwrap();
        let limiter = slots(&store, 3);
        let permits = take_all(&limiter, "user").await;
        assert_eq!(permits.len(), 3);
        // Several leases long.
        let before = calls_of(&server, "evalsha");
        until("they were renewed", async || {
            assert_eq!(held_on(&server), 3);
            assert!(is_full(&limiter, "user").await);
            sleep(ms(20)).await;
            calls_of(&server, "evalsha") > before + 60
        })
        .await;
        let LeaseHealth { held, lost, .. } = store.leases();
        assert_eq!((held, lost), (3, 0));
        assert!(permits.iter().all(|permit| !permit.was_lost()));
        for (name, lifetime_ms) in lifetimes(&server) {
            assert!((1..=600).contains(&lifetime_ms), "{name}: {lifetime_ms}");
        }
        drop(permits);
        until_held(&server, 0).await;
        until("nothing is kept", async || store.leases().held == 0).await;
    }
}

#[tokio::test]
async fn slots_that_the_server_forgot_are_held_again() {
    let mut server = redis();
    let store = patient(&server).lease(ms(500)).retry_every(ms(20), ms(50)).build().unwrap();
    let limiter = slots(&store, 5);
    let mut permits = take_all(&limiter, "user").await;
    permits.truncate(3);
    until_held(&server, 3).await;
    server.kill();
    server.restart();
    until_held(&server, 3).await;
    until("it is known", async || lost(&store) == 3).await;
    assert!(permits.iter().all(Permit::was_lost));
    server.command(&["FLUSHALL"]);
    until_held(&server, 3).await;
    server.command(&["SCRIPT", "FLUSH"]);
    drop(permits);
    until_held(&server, 0).await;
}

/// Whatever the moment at which a request gives up, its slot is free again.
#[tokio::test]
async fn slots_of_requests_that_give_up_while_they_are_decided_are_not_leaked() {
    let server = redis();
    let store = patient(&server).lease(secs(3)).build().unwrap();
    let limiter = slots(&store, 1_000_000);
    let mut crowd = JoinSet::new();
    for number in 0..500_u64 {
        let limiter = limiter.clone();
        crowd.spawn(async move {
            let acquire = limiter.acquire("user");
            // From before it is sent to after it is answered.
            let patience = Duration::from_micros(number * 7919 % 3_000);
            let _ = tokio::time::timeout(patience, acquire).await;
        });
        if number % 10 == 0 {
            sleep(ms(1)).await;
        }
    }
    crowd.join_all().await;
    until_held(&server, 0).await;
    assert_eq!((limiter.in_flight("slots"), lost(&store)), (Some(0), 0));
}

#[test]
fn a_permit_can_be_dropped_where_there_is_no_runtime() {
    let server = redis();
    let store = patient(&server).lease(secs(60)).build().unwrap();
    let limiter = slots(&store, 1);
    let runtime = Runtime::new().unwrap();
    let (_, permit) = runtime.block_on(limiter.acquire("user")).unwrap();
    // The runtime goes first, and nobody is there to tell the server.
    drop(runtime);
    thread::spawn(move || drop(permit)).join().unwrap();
    assert_eq!(limiter.in_flight("slots"), Some(0));
    assert_eq!(held_on(&server), 1);
    // Whoever asks next does so in passing, once there is a connection that works.
    let runtime = Runtime::new().unwrap();
    runtime.block_on(until("it is told", async || limiter.acquire("user").await.is_ok()));
    runtime.block_on(until_held(&server, 0));
}

#[tokio::test]
async fn what_is_no_set_of_leases_is_as_good_as_gone() {
    let server = redis();
    let store = patient(&server).build().unwrap();
    let limiter = slots(&store, 1);
    let (_, permit) = limiter.acquire("user").await.unwrap();
    let [set] = &sets(&server)[..] else { panic!("one user has one set") };
    assert!(set.starts_with("tg:{") && !set.contains("user"), "{set}");
    drop(permit);
    until_held(&server, 0).await;
    server.command(&["SET", set, "something else"]);
    assert!(limiter.acquire("user").await.is_ok());
}

#[tokio::test]
async fn weights_are_counted_up_to_what_a_lease_can_hold() {
    let server = redis();
    let store = patient(&server).build().unwrap();
    let cost = |request: &str| request.parse().unwrap();
    let policy = Policy::concurrency("slots", 100_000).cost(cost);
    let everybody = policy.key(|_: &str| Key::from("everybody"));
    let limiter = users(&store, [everybody]);
    let (_, permit) = limiter.acquire("10000").await.unwrap();
    assert_eq!(held_on(&server), 10_000);
    for too_much in ["10001", "100000", "4294967296", "18446744073709551615"] {
        let rejection = limiter.acquire(too_much).await.unwrap_err();
        assert_eq!(rejection.reason(), &Reason::TooCostly, "{too_much}");
    }
    drop(permit);
    until_held(&server, 0).await;
}

#[tokio::test]
async fn what_is_free_holds_nothing_however_long_it_takes() {
    let server = redis();
    let store = patient(&server).lease(ms(300)).build().unwrap();
    let policy = Policy::concurrency("slots", 1).cost(|user: &str| u64::from(user != "free"));
    let limiter = users(&store, [policy.key(|_: &str| Key::from("everybody"))]);
    let (_, _free) = limiter.acquire("free").await.unwrap();
    let (_, _taken) = limiter.acquire("user").await.unwrap();
    let before = calls_of(&server, "evalsha");
    until("it was renewed", async || calls_of(&server, "evalsha") > before + 3).await;
    assert_eq!(held_on(&server), 1);
    assert_eq!((store.leases().held, store.leases().lost), (1, 0));
}

/// Requests for the same slots may have different limits, also those that go in one call.
#[tokio::test]
async fn the_same_slots_by_different_limits_are_counted_together() {
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let store = patient(&server).build().unwrap();
        let limit = |user: &str| Some(if user == "critical" { 10 } else { 8 });
        let policy = Policy::concurrency("slots", 1).limit_for(limit);
        let limiter = users(&store, [policy.key(|_: &str| Key::from("everybody"))]);
        let mut crowd = JoinSet::new();
        for number in 0..100 {
            let limiter = limiter.clone();
            let user = if number % 2 == 0 { "critical" } else { "other" };
            crowd.spawn(async move { (user, limiter.acquire(user).await.ok()) });
        }
        let admitted: Vec<_> =
            crowd.join_all().await.into_iter().filter(|(_, admitted)| admitted.is_some()).collect();
        assert_eq!(admitted.len(), 10, "{flavour:?}");
        assert!(admitted.iter().filter(|(user, _)| *user == "other").count() <= 8);
        assert_eq!(held_on(&server), 10);
    }
}

#[tokio::test]
async fn slots_per_instance_are_not_asked_for_elsewhere() {
    let server = redis();
    let stores = [(); 2].map(|()| patient(&server).build().unwrap());
    let limiter = |store| {
        users(
            store,
            [
                Policy::concurrency("own", 1).per_instance(),
                Policy::concurrency("fleet", 3),
                Policy::token_bucket("bucket", Quota::per_hour(4)),
            ],
        )
    };
    let [a, b] = stores.each_ref().map(limiter);
    let (decision, permit_a) = a.acquire("user").await.unwrap();
    let told: Vec<_> =
        decision.outcomes().iter().map(|outcome| (outcome.policy(), outcome.remaining())).collect();
    assert_eq!(told, [("own", 0), ("fleet", 2), ("bucket", 3)]);
    let calls = stores[0].calls();
    let rejected: Rejection = a.acquire("user").await.unwrap_err();
    assert_eq!(rejected.policies().collect::<Vec<_>>(), ["own"]);
    assert_eq!(stores[0].calls(), calls, "it was known before");
    let (_, permit_b) = b.acquire("user").await.unwrap();
    assert_eq!(held_on(&server), 2);
    drop((permit_a, permit_b));
    // What the server rejects holds nothing here.
    for _ in 0..2 {
        assert!(a.acquire("user").await.is_ok());
    }
    let rejected = a.acquire("user").await.unwrap_err();
    assert_eq!(rejected.policies().collect::<Vec<_>>(), ["bucket"]);
    assert_eq!(a.in_flight("own"), Some(0));
    until_held(&server, 0).await;
}

#[tokio::test]
async fn those_who_wait_find_slots_that_other_instances_release() {
    let server = redis();
    let stores = [(); 2].map(|()| patient(&server).build().unwrap());
    let limiter = |store| users(store, [Policy::concurrency("slots", 1).queue(10, secs(60))]);
    let [a, b] = stores.each_ref().map(limiter);
    let (_, permit) = a.acquire("user").await.unwrap();
    let order = Arc::new(parking_lot::Mutex::new(VecDeque::new()));
    let mut waiting = JoinSet::new();
    for number in 0..5 {
        let (b, order) = (b.clone(), order.clone());
        waiting.spawn(async move {
            let (_, permit) = b.acquire("user").await.unwrap();
            order.lock().push_back(number);
            drop(permit);
        });
        // The first stands in line, from where it asks again, before the next one comes.
        until("it has asked", async || stores[1].calls().1 > 1).await;
    }
    assert!(order.lock().is_empty());
    drop(permit);
    waiting.join_all().await;
    assert_eq!(*order.lock(), [0, 1, 2, 3, 4]);
    until_held(&server, 0).await;
}

// === without the server ===

#[tokio::test]
async fn each_instance_has_its_share_while_the_server_is_gone() {
    let mut server = redis();
    let store = RedisStore::builder(server.url()).instances(2).lease(secs(1)).build().unwrap();
    let limiter = users(&store, [Policy::concurrency("slots", 10)]);
    let held = {
        let mut permits = take_all(&limiter, "user").await;
        permits.truncate(3);
        permits
    };
    until_held(&server, 3).await;
    server.kill();
    // What it held before counts.
    let more = take_all(&limiter, "user").await;
    assert_eq!(more.len(), 2, "five are its share");
    assert_eq!(limiter.in_flight("slots"), Some(5));
    drop(held);
    assert_eq!(take_all(&limiter, "user").await.len(), 3);
    drop(more);
    assert_eq!(limiter.in_flight("slots"), Some(0));
}

#[tokio::test]
async fn failure_modes_are_those_of_each_policy() {
    let mut server = redis();
    let store = RedisStore::builder(server.url()).build().unwrap();
    let closed = users(
        &store,
        [
            Policy::concurrency("own", 1).per_instance(),
            Policy::concurrency("closed", 1).on_store_failure(FailureMode::Closed),
        ],
    );
    let open = users(&store, [Policy::concurrency("open", 1).on_store_failure(FailureMode::Open)]);
    let one = users(&store, [Policy::concurrency("one", 1)]);
    server.kill();
    let rejection = closed.acquire("user").await.unwrap_err();
    assert_eq!(rejection.reason(), &Reason::Unavailable { policy: "closed" });
    assert_eq!(closed.in_flight("own"), Some(0));
    let permits = [open.acquire("user").await.unwrap().1, open.acquire("user").await.unwrap().1];
    assert_eq!(open.in_flight("open"), Some(2));
    // Whatever it costs.
    let cost = |_: &str| u64::MAX;
    let policy = Policy::concurrency("dear", 3).cost(cost).on_store_failure(FailureMode::Open);
    let dear = users(&store, [policy]);
    let many = [dear.acquire("user").await.unwrap().1, dear.acquire("user").await.unwrap().1];
    assert_eq!(dear.in_flight("dear"), Some(6));
    drop((permits, many));
    assert_eq!((open.in_flight("open"), dear.in_flight("dear")), (Some(0), Some(0)));
    // Who may have one at all may have one here.
    let (_, _permit) = one.acquire("user").await.unwrap();
    assert_eq!(one.acquire("user").await.unwrap_err().reason(), &Reason::Limited);
}

#[tokio::test]
async fn nothing_piles_up_while_the_server_is_gone() {
    let mut server = redis();
    let store = patient(&server).deadline(secs(1)).lease(ms(200)).build().unwrap();
    let limiter = users(&store, [Policy::concurrency("slots", 10)]);
    let permits = take_all(&limiter, "user").await;
    assert_eq!(permits.len(), 10);
    server.kill();
    for _ in 0..2_000 {
        drop(limiter.acquire("user").await);
    }
    drop(permits);
    // The notes of what is over are thrown away once it has run out anyway.
    until("nothing is kept", async || {
        let LeaseHealth { held, ending, .. } = store.leases();
        (held, ending) == (0, 0)
    })
    .await;
}
