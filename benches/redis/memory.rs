//! How much memory state takes in the server: key, value, expiry and their place in its tables.

use crate::{
    BENCH,
    contenders::{self, Decide, connect},
    load::once_each,
    ms, on,
    server::{Flavour, Reply, Server},
    support::result,
};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use tollgate::{Policy, Quota, redis::client::cmd};

const CALLERS: usize = 200_000;

/// What fits in a log, and whose logs are full.
const LOG: u64 = 1_000;
const LOG_CALLERS: usize = 200;

pub(crate) async fn measure(flavour: Flavour) {
    let scales = Scales::new(flavour);
    let url = &scales.server.url();
    let store = || contenders::store(url).build().unwrap();

    let tiers = [Quota::per_second(100).burst(200), Quota::per_hour(1_000), Quota::per_day(10_000)];
    for (name, quotas) in [("one token bucket", &tiers[..1]), ("three tiers", &tiers[..])] {
        let ours = scales.weigh(contenders::tollgate(store(), quotas), CALLERS, CALLERS).await;
        let plain =
            scales.weigh(contenders::plain(url, quotas).await, CALLERS, CALLERS * quotas.len());
        let case = on(flavour, &format!("bytes per caller, {name}"));
        result(BENCH, &case, "bytes", ours, "plain", plain.await);
    }

    let log = Policy::sliding_log("log", Quota::per_hour(LOG));
    let limiter = contenders::limiter(store(), [log].into_iter());
    let requests = LOG as usize * LOG_CALLERS;
    // A log and the ring of its times.
    let ours = scales.weigh(in_turns(limiter), requests, 2 * LOG_CALLERS).await;
    let sorted_set = scales.weigh(sorted_set_log(url).await, requests, LOG_CALLERS).await;
    let case = on(flavour, "bytes per request, sliding log");
    result(BENCH, &case, "bytes", ours, "sorted set", sorted_set);
}

/// A log as it is commonly kept: a member of a sorted set for each request.
async fn sorted_set_log(url: &str) -> Decide {
    let connection = connect(url).await;
    let time = AtomicU64::new(1_700_000_000_000_000);
    let add: Decide = Arc::new(move |caller| {
        let mut connection = connection.clone();
        let time = time.fetch_add(7, Relaxed);
        Box::pin(async move {
            let mut add = cmd("ZADD");
            add.arg(format!("log:customer:{caller:011}")).arg(time).arg(format!("{time}-0"));
            add.exec_async(&mut connection).await.unwrap();
        })
    });
    in_turns(add)
}

/// As many requests of each caller as fit in a log.
fn in_turns(decide: Decide) -> Decide {
    Arc::new(move |request| decide(request % LOG_CALLERS))
}

struct Scales {
    server: Server,
}

impl Scales {
    /// A server that keeps what has expired, so that nothing is gone before it is weighed.
    fn new(flavour: Flavour) -> Self {
        let server = Server::with(flavour, &["--enable-debug-command", "yes"]);
        let reply = server.command(&["DEBUG", "SET-ACTIVE-EXPIRE", "0"]);
        assert_eq!(reply, Reply::Status("OK".to_owned()));
        Self { server }
    }

    /// What the server grows by for each of so many decisions, which leave so many keys behind.
    async fn weigh(&self, decide: Decide, decisions: usize, keys: usize) -> f64 {
        // What a server needs only once is not weighed.
        decide(0).await;
        self.server.command(&["FLUSHALL", "SYNC"]);
        tokio::time::sleep(ms(200)).await;
        let before = self.used();
        once_each(&decide, decisions).await;
        // It may still be moving its tables.
        tokio::time::sleep(ms(500)).await;
        let grown = self.used() - before;

        let kept = self.server.command(&["DBSIZE"]);
        assert_eq!(kept, Reply::Int(keys as i64), "all are kept");
        grown / decisions as f64
    }

    fn used(&self) -> f64 {
        self.server.info("used_memory").unwrap().trim().parse().unwrap()
    }
}
