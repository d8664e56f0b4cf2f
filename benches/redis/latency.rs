//! How long decisions take at half of what could be decided.

use crate::{
    BENCH, KEYS, contenders,
    load::{Crowd, Seen, drive, pace},
    ms, on,
    server::{Flavour, Server},
    support::{median, result},
};

const ROUNDS: usize = 5;

pub(crate) async fn measure(flavour: Flavour) {
    let server = Server::start(flavour);
    let url = &server.url();
    for (policies, name) in [(1, "one policy"), (3, "three policies")] {
        let store = contenders::store(url).build().unwrap();
        store.check().await.unwrap();
        let tollgate = contenders::tollgate(store, &contenders::ample(policies));
        let plain = contenders::plain(url, &contenders::ample(policies)).await;
        let ping = contenders::ping(url).await;

        let mut capacity = Vec::new();
        for round in 0..ROUNDS {
            let crowd = Crowd { callers: 256, keys: KEYS };
            capacity.push(drive(&tollgate, crowd, round, ms(300)).await.per_second);
        }
        let half = median(capacity) / 2.0;

        let mut rounds = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (contender, rounds) in [&tollgate, &ping, &plain].iter().zip(&mut rounds) {
                rounds.push(pace(contender, KEYS, half, ms(600)).await);
            }
        }
        let [ours, ping, plain] = rounds.map(|rounds| Seen::median(&rounds).latencies);
        println!("at {half:.0} requests a second:");
        for (index, percentile) in ["p50", "p99", "p99.9"].iter().enumerate() {
            let case = on(flavour, &format!("half of capacity, {name}, {percentile}"));
            result(BENCH, &case, "µs", ours[index], "PING", ping[index]);
            result(BENCH, &case, "µs", ours[index], "plain", plain[index]);
        }
    }
}
