//! What a decision costs that a store is told of afterwards, and how much later that is.

use crate::{
    BENCH, KEYS,
    contenders::{self, ample, key},
    cores,
    load::{Crowd, drive},
    ms, on,
    server::Flavour,
    support::{interleave, median, result},
};
use std::time::Duration;
use tokio::{
    runtime,
    time::{MissedTickBehavior, interval},
};
use tollgate::{
    Limiter, LocalStore, Policy, Store,
    key::Key,
    redis::{DeferredStore, RedisStore},
};

const INTERVAL: Duration = ms(100);

const ROUNDS: usize = 5;

pub(crate) async fn measure(flavour: Flavour) {
    let server = cores::start_anywhere(flavour);
    let asked = contenders::store(&server.url()).build().unwrap();
    decisions(flavour, &asked).await;
    for keys in [1, 1_000, 10_000] {
        lag(flavour, &asked, keys).await;
    }
}

fn deferred(store: &RedisStore) -> DeferredStore {
    store.clone().deferred(INTERVAL).unwrap()
}

fn limiter(store: impl Into<Store>) -> Limiter<str> {
    let policy = Policy::token_bucket("policy-0", ample(1)[0]);
    let builder = Limiter::builder().key(|key: &str| Key::from(key)).policy(policy);
    builder.store(store).build().unwrap()
}

async fn decisions(flavour: Flavour, asked: &RedisStore) {
    let contender = contenders::tollgate(asked.clone(), &ample(1));
    for (name, keys) in [("hot key", 1), ("100k keys", KEYS)] {
        let mut waits = Vec::new();
        for round in 0..ROUNDS {
            let seen = drive(&contender, Crowd { callers: 1, keys }, round, ms(300)).await;
            waits.push(1_000.0 * seen.latencies[0]);
        }
        // What is told is told by a thread of its own meanwhile.
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.unwrap();
        let names: Vec<_> = (0..keys).map(key).collect();
        let limiters = [limiter(deferred(asked)), limiter(LocalStore::new())];
        let operations = limiters.each_ref().map(|limiter| {
            let (names, runtime) = (&names, runtime.handle());
            Box::new(move |index: usize| {
                let _entered = index.is_multiple_of(512).then(|| runtime.enter());
                limiter.check(&names[index % names.len()]).expect("everything is admitted");
            }) as Box<dyn Fn(usize) + Sync>
        });
        let [told, local] = interleave(&operations, 1)[..] else { unreachable!() };
        drop(operations);
        runtime.shutdown_background();
        let case = on(flavour, &format!("deferred, {name}"));
        result(BENCH, &case, "ns/decision", told, "local state", local);
        result(BENCH, &case, "ns/decision", told, "tollgate, asked", median(waits));
    }
}

/// How long after its decision a request is counted, where so many keys have one in each interval.
async fn lag(flavour: Flavour, asked: &RedisStore, keys: usize) {
    let store = deferred(asked);
    let limiter = limiter(store.clone());
    let mut lags = Vec::new();
    let mut ticks = interval(ms(1));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let in_a_tick = (keys / INTERVAL.as_millis() as usize).max(1);
    for tick in 0..3_000 {
        ticks.tick().await;
        for request in 0..in_a_tick {
            limiter.check(&key((tick * in_a_tick + request) % keys)).unwrap();
        }
        lags.push(store.health().lag.as_secs_f64() * 1e3);
    }
    let longest = store.health().longest_lag.as_secs_f64() * 1e3;
    let interval = INTERVAL.as_secs_f64() * 1e3;
    let case = |what| on(flavour, &format!("deferred, {keys} keys an interval, {what} lag"));
    result(BENCH, &case("median"), "ms", median(lags), "interval", interval);
    result(BENCH, &case("longest"), "ms", longest, "interval", interval);
}
