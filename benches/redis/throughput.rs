//! How many decisions a second there are.

use crate::{
    BENCH, KEYS, ceiling,
    contenders::{self, Decide},
    cores,
    load::{Crowd, Seen, drive, once_each},
    ms, on,
    server::{Flavour, Server},
    support::{median, result},
};
use std::time::Duration;
use tollgate::redis::RedisStore;

/// Every contender runs once in each round, and the median of a contender's rounds is its figure.
const ROUNDS: usize = 5;

/// The time of one run of one contender.
const RUN: Duration = ms(300);

pub(crate) async fn measure(flavour: Flavour) {
    for policies in [1, 3] {
        // One for each stack: what another stack left there would have to be converted.
        let server = cores::start(flavour);
        let quotas = contenders::ample(policies);
        let url = &server.url();
        let store = contenders::store(url).build().unwrap();
        // It has to be known what the server can do.
        store.check().await.unwrap();
        let tollgate = contenders::tollgate(store.clone(), &quotas);
        let plain = contenders::plain(url, &quotas).await;
        let pool = contenders::pool(url, &quotas).await;
        // A limiter knows nearly all who come.
        for contender in [&tollgate, &plain] {
            once_each(contender, KEYS).await;
        }
        for keys in [KEYS, 1] {
            // The peers other than the plain way are not needed in every case.
            let is_main = flavour == Flavour::Redis7 && keys == KEYS;
            let callers: &[usize] = match flavour {
                Flavour::Redis7 => &[1, 16, 64, 256, 1_024],
                _ if keys == KEYS => &[1, 16, 256],
                _ => &[256],
            };
            for &callers in callers {
                let crowd = Crowd { callers, keys };
                let mut contenders = vec![("tollgate", tollgate.clone()), ("plain", plain.clone())];
                if is_main {
                    contenders.push(("bb8-redis", pool.clone()));
                }
                let case = Case { flavour, policies, crowd, server: &server, store: &store };
                case.measure(&contenders, is_main).await;
            }
        }
    }
    if contenders::limitador(&cores::start(flavour).url(), 1, 1, 1, 1).await.is_none() {
        println!(
            "limitador's program is not there; build it with\n  \
             cargo build --release --manifest-path benches/limitador/Cargo.toml \
             --target-dir benches/limitador/target"
        );
    }
}

struct Case<'a> {
    flavour: Flavour,
    policies: usize,
    crowd: Crowd,
    server: &'a Server,
    store: &'a RedisStore,
}

impl Case<'_> {
    async fn measure(&self, contenders: &[(&str, Decide)], with_limitador: bool) {
        let &Self { crowd, policies, server, .. } = self;
        let mut rounds = vec![Vec::new(); contenders.len()];
        let mut server_us = vec![Vec::new(); contenders.len()];
        let (mut limitador, mut ceiling) = (Vec::new(), Vec::new());
        let ceiling_load = match crowd.callers {
            256 => Some(ceiling::Load::new(server, policies, crowd.keys).await),
            _ => None,
        };
        for (_, decide) in contenders {
            drive(decide, crowd, 0, RUN / 3).await;
        }
        let before = self.store.calls();
        for round in 1..=ROUNDS {
            for (index, (_, decide)) in contenders.iter().enumerate() {
                let before = server_cpu_us(server);
                let seen = drive(decide, crowd, round, RUN).await;
                let decided = seen.per_second * RUN.as_secs_f64();
                server_us[index].push((server_cpu_us(server) - before) / decided);
                rounds[index].push(seen);
            }
            if let Some(load) = &ceiling_load {
                ceiling.push(load.per_second(server));
            }
            if with_limitador {
                let (url, millis) = (server.url(), RUN.as_millis() as u64);
                let Crowd { callers, keys } = crowd;
                let run = contenders::limitador(&url, callers, keys, policies, millis);
                limitador.extend(run.await);
            }
        }
        let after = self.store.calls();
        let per_call = (after.1 - before.1) as f64 / (after.0 - before.0) as f64;
        let seen: Vec<_> = rounds.iter().map(|rounds| Seen::median(rounds)).collect();

        let name = self.name();
        let ours = seen[0].per_second;
        for ((peer, _), theirs) in contenders.iter().zip(&seen).skip(1) {
            result(BENCH, &name, "decisions/s", ours, peer, theirs.per_second);
        }
        for (peer, rounds) in [("limitador", limitador), ("redis-benchmark", ceiling)] {
            if !rounds.is_empty() {
                result(BENCH, &name, "decisions/s", ours, peer, median(rounds));
            }
        }
        for (index, percentile) in ["p50", "p99", "p99.9"].iter().enumerate() {
            let [ours, plain] = [0, 1].map(|contender: usize| seen[contender].latencies[index]);
            result(BENCH, &format!("{name}, {percentile}"), "µs", ours, "plain", plain);
        }
        for (((contender, _), seen), server_us) in contenders.iter().zip(seen).zip(server_us) {
            println!(
                "  {contender}: {:.1} µs of the client's CPU for a decision, {:.1} µs of the server's",
                seen.client_us,
                median(server_us),
            );
        }
        println!("  tollgate: {per_call:.1} decisions in a call");
    }

    fn name(&self) -> String {
        let Crowd { callers, keys } = self.crowd;
        let callers = if callers == 1 { "1 caller".into() } else { format!("{callers} callers") };
        let policies = if self.policies == 1 { "one policy" } else { "three policies" };
        let keys = if keys == 1 { ", hot key" } else { "" };
        on(self.flavour, &format!("{callers}, {policies}{keys}"))
    }
}

/// The CPU that a server used so far, in microseconds.
fn server_cpu_us(server: &Server) -> f64 {
    let info = server.command(&["INFO", "cpu"]);
    let field = |name: &str| -> f64 {
        let mut fields = info.text().lines().filter_map(|line| line.split_once(':'));
        let value = fields.find(|(field, _)| *field == name).unwrap().1;
        value.trim().parse().unwrap()
    };
    (field("used_cpu_user") + field("used_cpu_sys")) * 1e6
}
