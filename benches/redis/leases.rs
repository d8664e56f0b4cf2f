//! Slots of a fleet: how many are taken and released a second, and what it costs to hold many.

use crate::{
    BENCH, KEYS,
    contenders::{self, Decide, connect, key, store},
    cores,
    load::{Crowd, Seen, drive},
    ms, on,
    server::{Flavour, Server},
    support::result,
};
use std::sync::Arc;
use tokio::{task::JoinSet, time::sleep};
use tollgate::{
    FailureMode, Limiter, Policy,
    concurrency::Permit,
    key::Key,
    redis::client::{Script, cmd},
};

const ROUNDS: usize = 7;

/// So many that everybody gets one.
const SLOTS: u32 = 1_000;

/// How many leases are held at a time where they are to last.
const HELD: usize = 10_000;

pub(crate) async fn measure(flavour: Flavour) {
    for (callers, keys, name) in
        [(16, KEYS, "100k keys"), (256, KEYS, "100k keys"), (256, 1, "hot key")]
    {
        let server = cores::start(flavour);
        let url = &server.url();
        let limiter = limiter(store(url).build().unwrap());
        let contenders = [tollgate(&limiter), plain(url).await];
        let mut rounds = [Vec::new(), Vec::new()];
        // The first round only warms up.
        for round in 0..=ROUNDS {
            for (contender, rounds) in contenders.iter().zip(&mut rounds) {
                let seen = drive(contender, Crowd { callers, keys }, round, ms(300)).await;
                if round > 0 {
                    rounds.push(seen);
                }
            }
        }
        let [ours, plain] = rounds.map(|rounds| Seen::median(&rounds).per_second);
        let case = on(flavour, &format!("slots, {name}, {callers} callers"));
        result(BENCH, &case, "slots/s", ours, "plain", plain);
    }
    renew(flavour).await;
}

/// Takes a slot and releases it.
fn tollgate(limiter: &Limiter<String>) -> Decide {
    let limiter = limiter.clone();
    Arc::new(move |caller| {
        let limiter = limiter.clone();
        Box::pin(async move { drop(acquire(&limiter, caller).await) })
    })
}

fn limiter(store: tollgate::redis::RedisStore) -> Limiter<String> {
    let policy = Policy::concurrency("slots", SLOTS).on_store_failure(FailureMode::Closed);
    let builder = Limiter::<String>::builder().store(store).policy(policy);
    builder.key(|key: &String| Key::from(key.as_str())).build().unwrap()
}

async fn acquire(limiter: &Limiter<String>, caller: usize) -> Permit {
    limiter.acquire(&key(caller)).await.expect("there are slots for all").1
}

/// Stripe's way: a script takes a slot, a command releases it, on one multiplexed connection. The
/// release is waited for, as that of a handler would be.
async fn plain(url: &str) -> Decide {
    let connection = connect(url).await;
    let script = Arc::new(Script::new(include_str!("plain_slots.lua")));
    Arc::new(move |caller| {
        let (script, mut connection) = (script.clone(), connection.clone());
        Box::pin(async move {
            let name = format!("slots:{}", key(caller));
            let id = format!("{caller:016x}");
            let mut call = script.key(&name);
            call.arg(SLOTS).arg(&id).arg(60);
            let admitted: u8 = call.invoke_async(&mut connection).await.unwrap();
            assert_eq!(admitted, 1, "there are slots for all");
            cmd("ZREM").arg(&name).arg(&id).exec_async(&mut connection).await.unwrap();
        })
    })
}

/// What the server does to make many leases last, once.
async fn renew(flavour: Flavour) {
    let server = cores::start(flavour);
    let lease = ms(3_000);
    let limiter = limiter(contenders::store(&server.url()).lease(lease).build().unwrap());
    for (keys, name) in [(HELD, "one a key"), (HELD / 100, "100 a key")] {
        let mut permits = JoinSet::new();
        for index in 0..HELD {
            let limiter = limiter.clone();
            permits.spawn(async move { acquire(&limiter, index % keys).await });
            // Not more at a time than a service would have.
            if permits.len() % 256 == 0 {
                tokio::task::yield_now().await;
            }
        }
        let permits = permits.join_all().await;
        let before = calls(&server);
        // Two renewals at least, and not much else.
        sleep(lease).await;
        let after = calls(&server);
        let (count, us) = (after.0 - before.0, after.1 - before.1);
        let batches = HELD as f64 / 500.0;
        let renewals = count as f64 / batches;
        let case = on(flavour, &format!("{HELD} leases held, {name}"));
        println!(
            "{case}: a renewal keeps the server busy for {:.1} ms in all, {:.2} ms a call \
             ({renewals:.1} renewals seen)",
            us as f64 / renewals / 1_000.0,
            us as f64 / count as f64 / 1_000.0,
        );
        drop(permits);
        sleep(ms(500)).await;
    }
}

/// How many scripts the server ran, and for how many microseconds.
fn calls(server: &Server) -> (u64, u64) {
    let stats = server.command(&["INFO", "commandstats"]);
    let line = stats.text().lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:"));
    let field = |name: &str| {
        let fields = line.into_iter().flat_map(|line| line.split(','));
        let value = fields.filter_map(|field| field.strip_prefix(name)).next();
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    (field("calls="), field("usec="))
}
