//! Instances that share limits in a store on a server.

#[cfg(feature = "sentinel")]
use super::sentinels;
use super::{ms, secs, server::Server};
use std::{collections::HashMap, fmt::Debug};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tollgate::{
    Clock, Limiter, Policy, Rejection,
    key::Key,
    redis::{RedisStore, RedisStoreBuilder},
};

/// A store that has all the time in the world: what it says does not depend on how busy the machine is.
pub(crate) fn patient(server: &Server) -> RedisStoreBuilder {
    builder(server).deadline(secs(20))
}

/// A store, in one test crate as one of shards that are no more than one.
pub(crate) fn built(builder: RedisStoreBuilder) -> RedisStore {
    let store = builder.build().unwrap();
    match env!("CARGO_CRATE_NAME") {
        "redis_by_shards" => RedisStore::shards([("only", store)]).unwrap(),
        _ => store,
    }
}

/// The way to a server is another one in some test crates that have the same tests.
fn builder(server: &Server) -> RedisStoreBuilder {
    match env!("CARGO_CRATE_NAME") {
        #[cfg(feature = "sentinel")]
        "redis_by_sentinel" => RedisStore::sentinel([server.sentinel().url()], sentinels::NAME),
        #[cfg(feature = "cluster")]
        "redis_by_cluster" => RedisStore::cluster([server.url()]),
        _ => RedisStore::builder(server.url()),
    }
}

/// A limiter of users by their names.
pub(crate) fn users<P>(store: &RedisStore, policies: P) -> Limiter<str>
where
    P: IntoIterator<Item = Policy<str>>,
{
    users_by(Clock::system(), store, policies)
}

/// The same, with a clock of its own for what is decided or waited for in this process.
pub(crate) fn users_by<P>(clock: impl Into<Clock>, store: &RedisStore, policies: P) -> Limiter<str>
where
    P: IntoIterator<Item = Policy<str>>,
{
    let builder = Limiter::builder().clock(clock).key(|user: &str| Key::from(user));
    let builder = policies.into_iter().fold(builder, |builder, policy| builder.policy(policy));
    builder.store(store.clone()).build().unwrap()
}

/// Whether so many requests of a user, one after the other, are admitted.
pub(crate) async fn ask(limiter: &Limiter<str>, user: &str, count: usize) -> Vec<bool> {
    let mut admitted = Vec::new();
    for _ in 0..count {
        admitted.push(limiter.check_async(user).await.is_ok());
    }
    admitted
}

/// How many requests of a user that come at the same time are admitted. Those that are not are
/// limited, and nothing else.
pub(crate) async fn crowd(limiter: &Limiter<str>, user: &'static str, count: usize) -> usize {
    let mut crowd = JoinSet::new();
    for _ in 0..count {
        let limiter = limiter.clone();
        crowd.spawn(async move { limiter.check_async(user).await });
    }
    let answers = crowd.join_all().await;
    answers.into_iter().filter(is_admitted).count()
}

pub(crate) fn is_admitted<T: Debug>(answer: &Result<T, Rejection>) -> bool {
    if let Err(rejection) = answer {
        assert!(rejection.tightest().is_some(), "not for a limit: {rejection:?}");
    }
    answer.is_ok()
}

/// What a user could spend now by a policy.
pub(crate) async fn left(limiter: &Limiter<str>, user: &str, policy: &str) -> u64 {
    let answer = limiter.peek_async(user).await;
    let outcomes = match &answer {
        Ok(decision) => decision.outcomes(),
        Err(rejection) => rejection.outcomes(),
    };
    let outcome = outcomes.iter().find(|outcome| outcome.policy() == policy);
    outcome.unwrap_or_else(|| panic!("{policy} says nothing: {answer:?}")).remaining()
}

/// Waits until something is true. The time is long, for busy machines; it is there to find what never
/// comes true.
pub(crate) async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + secs(20);
    while !condition().await {
        assert!(Instant::now() < end, "it does not come true: {what}");
        sleep(ms(5)).await;
    }
}

/// The names of all keys on a server.
pub(crate) fn names(server: &Server) -> Vec<String> {
    server.command(&["KEYS", "*"]).texts()
}

/// How many milliseconds each key lives on; -1 if it lives for ever.
pub(crate) fn lifetimes(server: &Server) -> HashMap<String, i64> {
    let lifetime = |name: String| {
        let lifetime = server.command(&["PTTL", &name]).number();
        (name, lifetime)
    };
    names(server).into_iter().map(lifetime).collect()
}

/// How often clients and scripts have run a command.
pub(crate) fn calls_of(server: &Server, command: &str) -> u64 {
    let stats = server.report("commandstats");
    let line = format!("cmdstat_{command}:calls=");
    let calls = stats.lines().find_map(|text| text.strip_prefix(&line));
    calls.map_or(0, |rest| rest.split(',').next().unwrap().parse().unwrap())
}
