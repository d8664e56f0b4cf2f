//! What happens to limits in Redis when the server, or the way there, is not well: every request is
//! answered in time, and when all is well again, limits hold again.

mod support;

use parking_lot::Mutex;
use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use std::{sync::Arc, thread, time::Duration};
use support::{
    T0,
    fleet::{ask, crowd, left, lifetimes, names, patient, until, users},
    inputs, ms,
    proxy::{Fault, Proxy},
    puppet::Puppet,
    secs,
    server::{Flavour, Reply, Server},
    stacks::ALGORITHMS,
    us,
};
use tokio::{
    runtime::Runtime,
    task::JoinSet,
    time::{Instant, timeout},
};
use tollgate::{
    FailureMode, Limiter, ManualClock, Policy, Quota, Reason,
    redis::{RedisStore, RedisStoreBuilder, StateChange, StoreError, Warning},
};

/// How long requests wait for the server here.
const DEADLINE: Duration = ms(150);

/// An instance, and what it reports. Its policy allows three an hour, and everything while the server
/// is out of reach.
struct Instance {
    store: RedisStore,
    limiter: Limiter<str>,
    changes: Arc<Mutex<Vec<StateChange>>>,
    longest: Mutex<Duration>,
}

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
        let changes = Arc::<Mutex<Vec<StateChange>>>::default();
        let heard = changes.clone();
        let builder = RedisStore::builder(url)
            .deadline(DEADLINE)
            .retry_every(ms(50), ms(200))
            .on_state_change(move |change| heard.lock().push(change.clone()));
        let store = configure(builder).build().unwrap();
        let limiter = users(&store, policies);
        Self { store, limiter, changes, longest: Mutex::default() }
    }

    /// Whether a request is admitted. It is answered in time: the deadline, and some more for a busy
    /// machine.
    async fn admits(&self, user: &str) -> bool {
        let start = Instant::now();
        let answer = timeout(DEADLINE + secs(2), self.limiter.check_async(user)).await;
        let mut longest = self.longest.lock();
        *longest = start.elapsed().max(*longest);
        answer.expect("an answer in time").is_ok()
    }

    /// Asks until the server is out of use. Everything is admitted meanwhile.
    async fn goes_down(&self) -> String {
        for asked in 0.. {
            assert!(asked < 30, "{:?}", self.store.health());
            assert!(self.admits("anybody").await);
            if !self.store.health().is_up {
                break;
            }
        }
        // Once, and not again while it stays so.
        let before = self.store.health();
        for _ in 0..20 {
            assert!(self.admits("anybody").await);
        }
        let [StateChange::Down { error }] = &self.changes.lock()[..] else {
            panic!("{:?}", self.changes.lock())
        };
        let health = self.store.health();
        assert_eq!(health.downs, 1);
        assert!(health.skipped > before.skipped, "{health:?}");
        error.clone()
    }

    /// Asks until the server is in use again, and limits hold.
    async fn comes_back(&self) {
        let came_up = async || {
            self.admits("anybody").await;
            self.store.health().is_up
        };
        until("the server is in use again", came_up).await;
        {
            let changes = self.changes.lock();
            let [StateChange::Down { .. }, StateChange::Up] = &changes[..] else {
                panic!("{changes:?}")
            };
        }
        self.holds().await;
    }

    /// Whether limits hold. It is tried with some users, for a busy machine may make a request late.
    async fn holds(&self) {
        let mut user = 0;
        until("limits hold", || {
            user += 1;
            let user = format!("new {user}");
            async move {
                let mut admitted = Vec::new();
                for _ in 0..4 {
                    admitted.push(self.admits(&user).await);
                }
                admitted == [true, true, true, false]
            }
        })
        .await;
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        println!("the longest wait was {:?} of {DEADLINE:?}", self.longest.lock());
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
async fn few_requests_wait_for_a_server_that_is_gone() {
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
async fn while_the_server_is_out_of_use_it_is_not_asked() {
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
async fn a_crowd_before_a_server_that_is_paused() {
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
        let instance =
            Instance::with(&proxy.url(), |builder| builder.deadline(ms(50)), [open()]);
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
        let instance = Instance::with(
            &proxy.url(),
            |builder| builder.namespace(namespace),
            [open(), policy],
        );
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
