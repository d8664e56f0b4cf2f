//! Decisions on state in Redis and Valkey: how many a second, how long they take, how much memory.
//!
//! `cargo bench --bench redis [-- throughput | latency | memory | leases | cluster | deferred | settings]`
//!
//! It starts its own servers on loopback ports: redis-server 7.0 and Valkey 9, where tests/run.sh puts
//! them. Client and servers have a core each where there is `taskset`. All quotas admit everything, so
//! that each decision also writes, except where memory is weighed.
//!
//! Of `decisions/s` more is better: there a ratio above 1 is tollgate's advantage. Of `µs` and `bytes`
//! less is.
//!
//! - `throughput`: callers that decide one request after the other, as fast as they get answers, over
//!   100k keys in turns or one hot key, with one policy or a stack of three. What a decision costs in
//!   CPU is printed, too: on a machine that does other things meanwhile, that says more.
//! - `latency`: requests that come at random moments, half as many as could be decided.
//! - `memory`: what the server's `used_memory` grows by.
//! - `leases`: slots of a concurrency limit, taken and released, and what it costs to hold many.
//! - `cluster`: decisions about one identity on a cluster of three, against the same on one server.
//! - `deferred`: decisions that the store is told of afterwards, and how much later that is.
//! - `settings`: batch sizes and batches in flight against each other; only on demand.
//!
//! The peer `plain` is one call of one script for each policy, over one multiplexed connection; `bb8-redis`
//! the same on connections of a pool with its defaults; `redis-benchmark` calls tollgate's script with full
//! batches, which is what the server could do if clients cost nothing. `limitador` takes part if its
//! program was built: see benches/limitador.

// The line that each figure ends with is shared with the other benches.
#[allow(dead_code, reason = "the timing of operations that do not wait is not needed here")]
#[path = "../support/mod.rs"]
mod support;

#[allow(dead_code, reason = "tests do more with a server")]
#[path = "../../tests/support/server.rs"]
mod server;

#[allow(dead_code, reason = "tests do with them what benches do not")]
#[path = "../../tests/support/sentinels.rs"]
mod sentinels;

#[allow(dead_code, reason = "tests move slots")]
#[path = "../../tests/support/clusters.rs"]
mod clusters;

mod ceiling;
mod cluster;
mod contenders;
mod cores;
mod deferred;
mod latency;
mod leases;
mod load;
mod memory;
mod settings;
mod throughput;

use server::Flavour;
use std::{env, process::exit, time::Duration};

const BENCH: &str = "redis";

const KEYS: usize = 100_000;

fn main() {
    // cargo adds `--bench`.
    let groups: Vec<_> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let asked = |group: &str| groups.iter().any(|asked| asked == group);
    const GROUPS: [&str; 7] =
        ["throughput", "latency", "memory", "leases", "cluster", "deferred", "settings"];
    if let Some(unknown) = groups.iter().find(|group| !GROUPS.contains(&group.as_str())) {
        eprintln!("there is no group `{unknown}`; there are {}", GROUPS.join(", "));
        exit(2);
    }

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        for flavour in [Flavour::Redis7, Flavour::Valkey9] {
            if groups.is_empty() || asked("throughput") {
                throughput::measure(flavour).await;
            }
            if groups.is_empty() || asked("latency") {
                latency::measure(flavour).await;
            }
            if groups.is_empty() || asked("memory") {
                memory::measure(flavour).await;
            }
            if groups.is_empty() || asked("leases") {
                leases::measure(flavour).await;
            }
            if groups.is_empty() || asked("cluster") {
                cluster::measure(flavour).await;
            }
            if groups.is_empty() || asked("deferred") {
                deferred::measure(flavour).await;
            }
            if asked("settings") {
                settings::measure(flavour).await;
            }
        }
    });
}

/// The name of a case on a server.
fn on(flavour: Flavour, case: &str) -> String {
    match flavour {
        Flavour::Redis7 => case.to_owned(),
        Flavour::Redis62 => format!("{case}, redis 6.2"),
        Flavour::Valkey9 => format!("{case}, valkey 9"),
    }
}

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}
