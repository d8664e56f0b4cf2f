//! What holds of limits in a Redis primary that sentinels name, also while it is replaced by another.
//! That all else is as with one server is in `redis_by_sentinel`.

mod support;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};
use support::{
    fleet::{ask, calls_of, crowd, left, until, users},
    instance::Instance,
    ms,
    proxy::{Fault, Proxy},
    puppet::Puppet,
    secs,
    sentinels::{Group, NAME, quiet_sentinel_of},
    server::{Flavour, Reply, Server, next_port},
};
use tokio::{
    task::JoinSet,
    time::{Instant, interval, sleep, timeout},
};
use tollgate::{
    FailureMode, Policy, Quota,
    redis::{ConfigError, RedisStore, RedisStoreBuilder, StateChange, StoreError},
};

/// Three an hour, and everything while there is no server.
fn three() -> Policy<str> {
    Policy::token_bucket("p", Quota::per_hour(3)).on_store_failure(FailureMode::Open)
}

/// So many that none is turned away, so that what was charged can be told afterwards.
const MANY: u64 = 1_000_000;

fn many() -> Policy<str> {
    Policy::fixed_window("many", Quota::per_calendar_month(MANY))
        .on_store_failure(FailureMode::Open)
}

fn sentinel(urls: impl IntoIterator<Item = String>) -> RedisStoreBuilder {
    RedisStore::sentinel(urls, NAME)
}

impl Instance {
    fn of(group: &Group) -> Self {
        Self::with(sentinel(group.urls()), three())
    }

    fn with(builder: RedisStoreBuilder, policy: Policy<str>) -> Self {
        Self::start(builder, |builder| builder, [policy])
    }

    /// Whether a request was decided by a server.
    async fn is_decided(&self) -> bool {
        let before = self.store.health().decided;
        self.admits("anybody").await;
        self.store.health().decided > before
    }

    /// Asks until a server that was the primary has been told that it is no longer.
    async fn hears_of_its_successor(&self, old: &Server) {
        until("it is told", async || {
            self.admits("u").await;
            old.info("role").as_deref() == Some("slave")
        })
        .await;
    }

    /// Asks until the server is out of use, and returns why it is.
    async fn goes_down(&self) -> String {
        until("it is out of use", async || {
            self.admits("anybody").await;
            !self.store.health().is_up
        })
        .await;
        match self.changes.lock().last() {
            Some(StateChange::Down { error }) => error.clone(),
            other => panic!("{other:?}"),
        }
    }
}

/// Makes instances until one goes down for a reason that contains all this. On a busy machine it may do
/// so for being late.
async fn goes_down_for(make: impl Fn() -> Instance, reason: &[&str]) {
    let mut error = String::new();
    for _ in 0..10 {
        error = make().goes_down().await;
        if reason.iter().all(|part| error.contains(part)) {
            return;
        }
    }
    panic!("not for {reason:?}: {error}");
}

/// How many scripts clients had a server run.
fn decisions(server: &Server) -> u64 {
    calls_of(server, "evalsha") + calls_of(server, "eval")
}

/// What the user `u` was charged in all, as the primary knows.
async fn charged(group: &Group) -> u64 {
    let store = sentinel(group.urls()).deadline(secs(20)).build().unwrap();
    MANY - left(&users(&store, [many()]), "u", "many").await
}

// === who the primary is ===

#[tokio::test]
async fn the_primary_is_found_whoever_of_the_sentinels_lives() {
    let mut group = Group::start(Flavour::Redis7, 1);
    Instance::of(&group).holds().await;
    group.sentinels[0].kill();
    Instance::of(&group).holds().await;
    group.sentinels[1].kill();
    Instance::of(&group).holds().await;
    assert!(decisions(&group.servers[0]) >= 12);
    assert_eq!(decisions(&group.servers[1]), 0);
}

#[tokio::test]
async fn the_primary_is_found_whoever_of_the_sentinels_is_silent() {
    let group = Group::start(Flavour::Redis7, 0);
    let before = Instance::of(&group);
    before.holds().await;
    for sentinel in &group.sentinels[..2] {
        sentinel.pause();
        Instance::of(&group).holds().await;
        before.holds().await;
    }
}

/// What one is told by who was cut off does not count against what two say.
#[tokio::test]
async fn a_sentinel_that_lags_is_outvoted() {
    let (primary, other) = (Server::start(Flavour::Redis7), Server::start(Flavour::Redis7));
    let lagging = Puppet::start(&address_of(&other)).await;
    let others =
        [Puppet::start(&address_of(&primary)).await, Puppet::start(&address_of(&primary)).await];
    let urls = [lagging.url(), others[0].url(), others[1].url()];
    let instance = Instance::with(sentinel(urls), three());
    instance.holds().await;
    // Some looks later.
    let end = Instant::now() + secs(3);
    while Instant::now() < end {
        instance.admits("u").await;
        sleep(ms(50)).await;
    }
    // On a busy machine, the others may be so late once that they seem to be gone.
    assert!(decisions(&other) * 10 < decisions(&primary), "{}", decisions(&other));
}

/// All sentinels may lag.
#[tokio::test]
async fn a_replica_is_no_primary_whoever_says_so() {
    for flavour in Flavour::ALL {
        let primary = Server::start(flavour);
        let port = primary.port().to_string();
        let replica = Server::with(flavour, &["--replicaof", "127.0.0.1", &port]);
        let puppet = Puppet::start(&address_of(&replica)).await;
        let new = || Instance::with(sentinel([puppet.url()]), three());
        goes_down_for(new, &["replica"]).await;
        let instance = new();
        instance.goes_down().await;
        assert_eq!(decisions(&replica), 0);
        puppet.say(&address_of(&primary));
        instance.holds().await;
    }
}

/// What a sentinel says whose primary this is.
fn address_of(server: &Server) -> Vec<u8> {
    format!("*2\r\n$9\r\n127.0.0.1\r\n$5\r\n{}\r\n", server.port()).into_bytes()
}

#[tokio::test]
async fn a_name_that_no_sentinel_knows_is_told() {
    let mut group = Group::start(Flavour::Redis7, 0);
    let urls = group.urls();
    let new = || Instance::with(RedisStore::sentinel(urls.clone(), "other"), three());
    goes_down_for(new, &["`other`", "3 of 3 sentinels know no such name"]).await;
    group.sentinels[0].kill();
    goes_down_for(new, &["`other`", "2 of 3 sentinels know no such name", "1 cannot be asked"])
        .await;
    let store = RedisStore::sentinel(urls.clone(), "other").deadline(secs(1)).build().unwrap();
    match store.check().await.unwrap_err() {
        StoreError::NoPrimary { name, message } => {
            assert_eq!(name, "other");
            assert!(message.contains("2 of 3 sentinels know no such name"), "{message}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn sentinels_that_are_not_there_are_told_of() {
    let urls = || (0..3).map(|_| format!("redis://127.0.0.1:{}", next_port()));
    let new = || Instance::with(sentinel(urls()), three());
    goes_down_for(new, &["3 cannot be asked", "onnection"]).await;
    // One that is none.
    let server = Server::start(Flavour::Redis7);
    goes_down_for(|| Instance::with(sentinel([server.url()]), three()), &["unknown command"]).await;
}

/// Each side has users and passwords of its own, with no more rights than the documentation tells.
#[tokio::test]
async fn credentials_of_sentinels_and_of_the_primary() {
    let group = Group::start(Flavour::Redis7, 1);
    for sentinel in &group.sentinels {
        let rights = ["resetkeys", "-@all", "+sentinel|get-master-addr-by-name"];
        sentinel.command(&[&["ACL", "SETUSER", "watcher", "on", ">s%w"], &rights[..]].concat());
        let closed = sentinel.command(&["ACL", "SETUSER", "default", "resetpass", ">other"]);
        assert_eq!(closed, Reply::Status("OK".to_owned()));
    }
    let rights = "~tg:api:* -@all +evalsha +eval +time +mget +set +del +getrange +setrange +pexpire \
                  +info +role +select";
    let rights: Vec<_> = rights.split(' ').collect();
    let primary = &group.servers[0];
    primary.command(&[&["ACL", "SETUSER", "app", "on", ">p%w"], &rights[..]].concat());
    primary.command(&["ACL", "SETUSER", "default", "resetpass", ">other"]);

    let urls = |user: &str| {
        let url = |server: &Server| format!("redis://{user}@127.0.0.1:{}", server.port());
        group.sentinels.iter().map(url).collect::<Vec<_>>()
    };
    let builder = |sentinels: &str, primary: &str| {
        let builder = sentinel(urls(sentinels)).namespace("api");
        builder.primary(format!("redis://{primary}@nowhere:1/0"))
    };
    let fits = Instance::with(builder("watcher:s%25w", "app:p%25w"), three());
    assert_eq!(fits.store.check().await.unwrap(), []);
    fits.holds().await;
    assert_eq!(fits.store.health().failed, 0);
    Instance::with(builder(":other", ":other"), three()).holds().await;

    for (sentinels, primary) in [("watcher:no", "app:p%25w"), ("watcher:s%25w", "app:no")] {
        let whose = if sentinels.ends_with("no") { "sentinels" } else { "the server refused" };
        let new = || Instance::with(builder(sentinels, primary), three());
        goes_down_for(new, &["WRONGPASS", whose]).await;
    }
    // Who may not ask for the role is not kept from deciding.
    let app = ["ACL", "SETUSER", "app", "-role"];
    assert_eq!(command_as(primary, "other", &app).await, "OK");
    Instance::with(builder("watcher:s%25w", "app:p%25w"), three()).holds().await;
}

/// What a server says to a command of its administrator.
async fn command_as(server: &Server, password: &str, command: &[&str]) -> String {
    let url = format!("redis://:{password}@127.0.0.1:{}", server.port());
    let client = tollgate::redis::client::Client::open(url).unwrap();
    let mut connection = client.get_multiplexed_async_connection().await.unwrap();
    let mut sent = tollgate::redis::client::cmd(command[0]);
    sent.arg(&command[1..]);
    sent.query_async(&mut connection).await.unwrap()
}

#[tokio::test]
async fn a_database_of_the_primary() {
    let group = Group::start(Flavour::Redis7, 0);
    let builder = sentinel(group.urls()).primary("redis://nowhere/3");
    Instance::with(builder, three()).holds().await;
    let keyspace = group.servers[0].command(&["INFO", "keyspace"]);
    assert!(keyspace.text().contains("db3"), "{}", keyspace.text());
}

#[test]
fn settings_that_cannot_be_are_named() {
    let told = |builder: RedisStoreBuilder| match builder.build() {
        Err(error @ ConfigError::Sentinel { .. }) => {
            let text = error.to_string();
            assert!(!text.contains("hunter2"), "{text}");
            text
        }
        other => panic!("{other:?}"),
    };
    let good = || RedisStore::sentinel(["redis://:hunter2@127.0.0.1:26379"], NAME);
    assert!(good().build().is_ok());
    assert!(!format!("{:?} {:?}", good(), good().build()).contains("hunter2"));
    let error = told(RedisStore::sentinel(Vec::<String>::new(), NAME));
    assert!(error.contains("at least one"), "{error}");
    let error = told(RedisStore::sentinel(["redis://localhost", "http://:hunter2@host"], NAME));
    assert!(error.contains("number 2"), "{error}");
    let error = told(RedisStore::sentinel(["redis://localhost"], ""));
    assert!(error.contains("no name"), "{error}");
    for primary in ["http://:hunter2@host", "unix:///hunter2"] {
        let error = told(good().primary(primary));
        assert!(error.contains("`primary`"), "{error}");
    }
    let error = told(RedisStore::builder("redis://:hunter2@localhost").primary("redis://host"));
    assert!(error.contains("RedisStore::sentinel"), "{error}");
}

// === there is another primary ===

/// BR-36
#[tokio::test]
async fn a_fail_over_in_good_order_loses_no_request() {
    for flavour in Flavour::ALL {
        let group = Group::start(flavour, 1);
        let [old, new] = [&group.servers[0], &group.servers[1]];
        let instance = Instance::with(sentinel(group.urls()), many());
        for _ in 0..10 {
            assert!(instance.is_decided().await);
        }
        group.fail_over();
        let start = Instant::now();
        let (mut named, mut moved, mut became_replica) = (None, None, None);
        let mut ticks = interval(ms(100));
        for _ in 0..150 {
            ticks.tick().await;
            assert!(instance.admits("u").await);
            if named.is_none() && group.named_port() == new.port() {
                named = Some(start.elapsed());
            }
            if moved.is_none() && decisions(new) > 0 {
                moved = Some((start.elapsed(), decisions(old)));
            }
            if became_replica.is_none() && old.info("role").as_deref() == Some("slave") {
                became_replica = Some(start.elapsed());
            }
        }
        let (took, decisions_of_old) = moved.expect("the new primary decides");
        println!(
            "{flavour:?}: another one named after {named:?}, decides after {took:?}, the old one a \
             replica after {became_replica:?}"
        );
        assert!(took < secs(5), "{took:?}");
        // Never again, before it was a replica or after.
        assert_eq!(decisions(old), decisions_of_old);
        let health = instance.store.health();
        // None, unless the machine is busy.
        assert!(health.failed + health.skipped < 20, "{health:?}");
        let charged = charged(&group).await;
        // What the old one decided after the new one stopped listening to it is lost.
        assert!((100..=150).contains(&charged), "{charged} of 150");
    }
}

/// A primary that says READONLY decides nothing more, though the sentinels know of no other.
#[tokio::test]
async fn who_says_that_it_is_a_replica_decides_nothing_more() {
    for flavour in Flavour::ALL {
        let primary = Server::start(flavour);
        let (other, puppet) = (Server::start(flavour), Puppet::start(&address_of(&primary)).await);
        let builder = sentinel([puppet.url()]).in_flight(4).batch(1);
        let instance = Arc::new(Instance::with(builder, three()));
        // Some connections.
        let mut crowd = JoinSet::new();
        for number in 0..40 {
            let instance = instance.clone();
            crowd.spawn(async move { instance.admits(&format!("{}", number % 3)).await });
        }
        crowd.join_all().await;
        assert!(!instance.admits("1").await);

        primary.command(&["REPLICAOF", "127.0.0.1", &other.port().to_string()]);
        println!("{}", instance.goes_down().await);
        // Whoever was over the limit there needs no writing to be turned away; it is not asked.
        let before = decisions(&primary);
        for _ in 0..50 {
            assert!(instance.admits("1").await);
            sleep(ms(10)).await;
        }
        assert_eq!(decisions(&primary), before, "{flavour:?}");
        puppet.say(&address_of(&other));
        instance.holds().await;
        assert_eq!(decisions(&primary), before, "{flavour:?}");
    }
}

/// A request that a replica refused is decided by the new primary, within its deadline, and charged once.
#[tokio::test]
async fn a_request_that_a_replica_refused_is_decided_by_the_primary() {
    for flavour in Flavour::ALL {
        let (old, new) = (Server::start(flavour), Server::start(flavour));
        let puppet = Puppet::start(&address_of(&old)).await;
        let store = sentinel([puppet.url()]).deadline(secs(20)).build().unwrap();
        let limiter = users(&store, [many()]);
        assert_eq!(ask(&limiter, "u", 5).await, [true; 5]);
        old.command(&["REPLICAOF", "127.0.0.1", &new.port().to_string()]);
        puppet.say(&address_of(&new));
        assert_eq!(ask(&limiter, "v", 5).await, [true; 5]);
        assert_eq!(left(&limiter, "v", "many").await, MANY - 5);
        assert_eq!((store.health().failed, store.health().decided), (0, 11), "{flavour:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_is_killed_under_load() {
    for flavour in Flavour::ALL {
        let mut group = Group::start(flavour, 2);
        let instance = Arc::new(Instance::with(sentinel(group.urls()), many()));
        assert!(instance.is_decided().await);
        let is_done = Arc::new(AtomicBool::new(false));
        let mut callers = JoinSet::new();
        for _ in 0..8 {
            let (instance, is_done) = (instance.clone(), is_done.clone());
            callers.spawn(async move {
                let mut asked = 0;
                while !is_done.load(SeqCst) {
                    assert!(instance.admits("u").await, "the failure mode lets it through");
                    asked += 1;
                    sleep(ms(5)).await;
                }
                asked
            });
        }
        sleep(ms(500)).await;
        let port = group.servers[0].port();
        group.servers[0].kill();
        let start = Instant::now();
        until("it is out of use", async || !instance.store.health().is_up).await;
        let down_after = start.elapsed();
        let mut named = None;
        until("the new one decides", async || {
            if named.is_none() && group.named_port() != port {
                named = Some(start.elapsed());
            }
            group.servers[1..].iter().any(|server| decisions(server) > 0)
        })
        .await;
        println!(
            "{flavour:?}: down after {down_after:?}, another one named after {named:?}, decides after {:?}",
            start.elapsed()
        );
        until("it is in use", async || instance.store.health().is_up).await;
        sleep(ms(300)).await;
        is_done.store(true, SeqCst);
        let asked: u64 = callers.join_all().await.into_iter().sum();
        let health = instance.store.health();
        let charged = charged(&group).await;
        println!("{charged} charged of {asked}, {health:?}");
        assert!(charged > 0 && charged <= asked);
        let new = group.server(group.successor_of(port));
        assert_eq!(new.info("role").as_deref(), Some("master"));
        // Failure modes answered what no server did, and at once.
        assert_eq!(health.decided + health.failed + health.skipped, asked + 1);
        assert!(health.skipped > 0 && health.failed < 200, "{health:?}");
    }
}

/// It goes on where it was stopped, and believes that it is the primary, until it is told that it is not.
#[tokio::test]
async fn a_primary_that_is_paused_and_comes_back() {
    let group = Group::start(Flavour::Redis7, 1);
    let old = &group.servers[0];
    let instance = Instance::of(&group);
    instance.holds().await;
    old.pause();
    let start = Instant::now();
    println!("{}", instance.goes_down().await);
    group.successor_of(old.port());
    let named = start.elapsed();
    until("the new one decides", async || instance.is_decided().await).await;
    println!("another one named after {named:?}, decides after {:?}", start.elapsed());
    instance.holds().await;
    old.resume();
    assert_eq!(old.info("role").as_deref(), Some("master"));
    // What was on its way to it when it stopped.
    sleep(ms(100)).await;
    let before = decisions(old);
    instance.hears_of_its_successor(old).await;
    instance.holds().await;
    assert_eq!(decisions(old), before);
}

/// The same, while connections to it stay open all the time.
#[tokio::test]
async fn a_primary_that_is_cut_off_and_comes_back() {
    let old = Server::start(Flavour::Redis7);
    let proxy = Proxy::start(old.port()).await;
    let proxy_port = proxy.port();
    // The proxy needs this thread meanwhile.
    let group =
        tokio::task::spawn_blocking(move || Group::around(Flavour::Redis7, old, proxy_port, 1));
    let group = group.await.unwrap();
    let old = &group.servers[0];
    let instance = Instance::of(&group);
    instance.holds().await;
    proxy.set(Fault::Stall);
    instance.goes_down().await;
    until("there is another primary", async || group.named_port() != proxy_port).await;
    instance.holds().await;
    proxy.set(Fault::Pass);
    // What was on its way to it arrives.
    sleep(ms(200)).await;
    let before = decisions(old);
    instance.hears_of_its_successor(old).await;
    instance.holds().await;
    assert_eq!(decisions(old), before);
}

// === there are no sentinels ===

#[tokio::test(flavor = "multi_thread")]
async fn while_no_sentinel_answers_the_primary_stays_in_use() {
    let mut group = Group::start(Flavour::Redis7, 0);
    let store = sentinel(group.urls()).deadline(secs(20)).in_flight(8).batch(1).build().unwrap();
    let limiter = users(&store, [three()]);
    assert_eq!(ask(&limiter, "u", 4).await, [true, true, true, false]);
    group.sentinels.iter().for_each(Server::pause);
    assert_eq!(ask(&limiter, "v", 4).await, [true, true, true, false]);
    group.sentinels.iter_mut().for_each(Server::kill);
    // More connections are needed, and then new ones.
    assert_eq!(crowd(&limiter, "w", 100).await, 3);
    group.servers[0].command(&["CLIENT", "KILL", "TYPE", "normal"]);
    // It is noticed.
    sleep(ms(300)).await;
    assert_eq!(crowd(&limiter, "x", 100).await, 3);
    let health = store.health();
    assert!(health.downs == 0 && health.failed <= 8, "{health:?}");
    // It says itself that it is a replica now. Nobody says who is the primary.
    group.servers[0].command(&["REPLICAOF", "127.0.0.1", "1"]);
    until("it is out of use", async || {
        let patient = timeout(secs(1), limiter.check_async("y")).await;
        patient.is_err() || !store.health().is_up
    })
    .await;
}

/// Asking the sentinels keeps no request waiting.
#[tokio::test]
async fn promise_6_never_the_weak_link_when_sentinels_are_silent() {
    let group = Group::start(Flavour::Redis7, 0);
    let instance = Instance::of(&group);
    instance.holds().await;
    group.sentinels.iter().for_each(Server::pause);
    let fresh = Instance::of(&group);
    goes_down_for(|| Instance::of(&group), &["no sentinel has named one yet"]).await;
    fresh.goes_down().await;
    let before = instance.store.health();
    for _ in 0..40 {
        instance.admits("u").await;
        sleep(ms(50)).await;
    }
    assert_eq!(instance.store.health().failed, before.failed);
    group.sentinels.iter().for_each(Server::resume);
    fresh.holds().await;
}

/// Sentinels are asked by connections that stay, by one caller at a time, and seldom.
#[tokio::test(flavor = "multi_thread")]
async fn sentinels_are_asked_now_and_then() {
    let server = Server::start(Flavour::Redis7);
    let quiet = quiet_sentinel_of(&server);
    let proxy = Proxy::start(quiet.port()).await;
    let store = sentinel([proxy.url()]).deadline(secs(20)).in_flight(8).batch(4).build().unwrap();
    let limiter = users(&store, [many()]);
    let start = Instant::now();
    while start.elapsed() < secs(4) {
        crowd(&limiter, "u", 50).await;
    }
    let question = "*3\r\n$8\r\nSENTINEL\r\n$23\r\nGET-MASTER-ADDR-BY-NAME\r\n$8\r\nmymaster\r\n";
    let asked = proxy.requested() / question.len();
    println!("asked {asked} times at most, for {:?}", store.calls());
    // By each of ten connections at most, and once a second; with what else is said at first.
    assert!((3..=10 + 6 + 3).contains(&asked), "{asked}");
    assert_eq!(proxy.accepted(), 1);
    assert_eq!(store.health().failed, 0);
}
