//! How long decisions take at half of what could be decided, next to a command that does nothing.

use crate::{
    BENCH, KEYS, contenders, cores,
    load::{Crowd, Seen, drive, once_each, pace},
    ms, on,
    server::Flavour,
    support::{median, result},
};

const ROUNDS: usize = 7;

pub(crate) async fn measure(flavour: Flavour) {
    for (policies, name) in [(1, "one policy"), (3, "three policies")] {
        // One for each stack: what another stack left there would have to be converted.
        let server = cores::start(flavour);
        let url = &server.url();
        let store = contenders::store(url).build().unwrap();
        store.check().await.unwrap();
        let tollgate = contenders::tollgate(store, &contenders::ample(policies));
        let ping = contenders::ping(url).await;
        once_each(&tollgate, KEYS).await;

        let mut rates = Vec::new();
        let mut rounds = [Vec::new(), Vec::new()];
        // The first round only warms up.
        for round in 0..=ROUNDS {
            // What could be decided is another number every time on a machine that does other things.
            let crowd = Crowd { callers: 256, keys: KEYS };
            let half = drive(&tollgate, crowd, round, ms(200)).await.per_second / 2.0;
            for (contender, rounds) in [&tollgate, &ping].iter().zip(&mut rounds) {
                let seen = pace(contender, KEYS, half, ms(500)).await;
                if round > 0 {
                    rounds.push(seen);
                }
            }
            rates.push(half);
        }
        let [ours, ping] = rounds.map(|rounds| Seen::median(&rounds).latencies);
        println!("at {:.0} requests a second:", median(rates));
        for (index, percentile) in ["p50", "p99", "p99.9"].iter().enumerate() {
            let case = on(flavour, &format!("half of capacity, {name}, {percentile}"));
            result(BENCH, &case, "µs", ours[index], "PING", ping[index]);
        }
    }
}
