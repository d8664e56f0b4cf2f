//! What a cluster adds to one server: a decision about one identity is one call on either.

use crate::{
    BENCH, KEYS,
    clusters::Cluster,
    contenders::{self, ample},
    cores,
    load::{Crowd, Seen, drive, once_each},
    ms, on, secs,
    server::Flavour,
    support::result,
};
use tollgate::redis::RedisStore;

const ROUNDS: usize = 9;

pub(crate) async fn measure(flavour: Flavour) {
    let server = cores::start(flavour);
    let cluster = Cluster::start(flavour, false);
    cluster.nodes.iter().for_each(cores::keep_apart);
    let one = contenders::store(&server.url()).build().unwrap();
    let many = RedisStore::cluster(cluster.urls()).deadline(secs(10)).build().unwrap();
    let contenders = [many, one].map(|store| contenders::tollgate(store, &ample(1)));
    for contender in &contenders {
        once_each(contender, KEYS).await;
    }
    for (callers, keys) in [(1, KEYS), (16, KEYS), (64, KEYS), (1, 1), (16, 1), (64, 1)] {
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
        let [many, one] = rounds.map(|rounds| Seen::median(&rounds));
        let callers = if callers == 1 { "1 caller".into() } else { format!("{callers} callers") };
        let keys = if keys == 1 { ", hot key" } else { "" };
        for (index, percentile) in ["p50", "p99"].iter().enumerate() {
            let case = on(flavour, &format!("cluster of three, {callers}{keys}, {percentile}"));
            let (ours, peer) = (many.latencies[index], one.latencies[index]);
            result(BENCH, &case, "µs", ours, "tollgate on one server", peer);
        }
        let case = on(flavour, &format!("cluster of three, {callers}{keys}"));
        let peer = "tollgate on one server";
        result(BENCH, &case, "decisions/s", many.per_second, peer, one.per_second);
    }
}
