//! Decisions on local state: nanoseconds each, and bytes per key.
//!
//! `cargo bench --bench local`
//!
//! tollgate, governor's keyed limiter and limitador's in-memory storage decide the same string keys
//! under a quota that admits everything, so that each decision also writes. limitador's figures are
//! of one thread, up to 100k keys; its million takes minutes to fill.

mod support;

use governor::{DefaultKeyedRateLimiter, RateLimiter};
use limitador::limit::{Context, Limit};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    env, fs,
    hash::{BuildHasherDefault, Hasher},
    hint::black_box,
    num::NonZeroU32,
    process::Command,
};
use support::{Operation, interleave, result};
use tollgate::{Limiter, LocalStore, Policy, Quota, key::Key};
use xxhash_rust::xxh3::xxh3_128_with_secret;

const BENCH: &str = "local";

fn main() {
    let arguments: Vec<_> = env::args().collect();
    if let [_, flag, contender, keys] = arguments.as_slice()
        && flag == "--bytes-per-key"
    {
        println!("{}", bytes_per_key(contender, keys.parse().unwrap()));
        return;
    }
    for (name, count) in [
        ("hot key", 1),
        ("1k strings", 1_000),
        ("100k strings", 100_000),
        ("1M strings", 1_000_000),
    ] {
        decisions(name, &keys(count));
    }
    stack_of_three(&keys(100_000));
    memory();
}

/// Keys in random order, so that no walk through them is a walk through a store's memory. Their own
/// bytes lie in that order, as those of a request just read lie in the cache.
fn keys(count: usize) -> Vec<String> {
    let mut numbers: Vec<_> = (0..count).collect();
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    for i in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        numbers.swap(i, (state % (i as u64 + 1)) as usize);
    }
    numbers.into_iter().map(key).collect()
}

fn key(number: usize) -> String {
    format!("customer:{number:011}")
}

fn decisions(case: &str, keys: &[String]) {
    let (tollgate, governor, floor) = (tollgate(1), governor(), Floor::new());
    for key in keys {
        let _ = tollgate.check(key);
        let _ = governor.check_key(key);
        floor.check(key);
    }
    for threads in [1, 2] {
        let contenders: [Operation<'_>; 3] = [
            Box::new(|i| {
                black_box(tollgate.check(&keys[i % keys.len()]).is_ok());
            }),
            Box::new(|i| {
                black_box(governor.check_key(&keys[i % keys.len()]).is_ok());
            }),
            Box::new(|i| {
                black_box(floor.check(&keys[i % keys.len()]));
            }),
        ];
        let times = interleave(&contenders, threads);
        let case = match threads {
            1 => format!("{case}, 1 thread"),
            _ => format!("{case}, {threads} threads"),
        };
        result(BENCH, &case, "ns/decision", times[0], "governor", times[1]);
        result(BENCH, &case, "ns/decision", times[0], "floor", times[2]);
        println!("  floor / governor: {:.2}", times[2] / times[1]);
    }
    if keys.len() > 100_000 {
        return;
    }
    let limitador = limitador();
    for key in keys {
        limitador(key);
    }
    let contenders: [Operation<'_>; 2] = [
        Box::new(|i| {
            black_box(tollgate.check(&keys[i % keys.len()]).is_ok());
        }),
        Box::new(|i| limitador(&keys[i % keys.len()])),
    ];
    let times = interleave(&contenders, 1);
    let case = format!("{case}, 1 thread");
    result(BENCH, &case, "ns/decision", times[0], "limitador", times[1]);
}

/// Three policies on one key against one.
fn stack_of_three(keys: &[String]) {
    let (three, one) = (tollgate(3), tollgate(1));
    for (case, keys) in
        [("three policies, hot key", &keys[..1]), ("three policies, 100k strings", keys)]
    {
        for key in keys {
            let _ = three.check(key);
            let _ = one.check(key);
        }
        for threads in [1, 2] {
            let contenders: [Operation<'_>; 2] = [
                Box::new(|i| {
                    black_box(three.check(&keys[i % keys.len()]).is_ok());
                }),
                Box::new(|i| {
                    black_box(one.check(&keys[i % keys.len()]).is_ok());
                }),
            ];
            let times = interleave(&contenders, threads);
            let threads = if threads == 1 { "1 thread" } else { "2 threads" };
            let case = format!("{case}, {threads}");
            result(BENCH, &case, "ns/decision", times[0], "tollgate, one policy", times[1]);
        }
    }
}

/// Each contender fills its store in a process of its own, which tells how much it grew.
fn memory() {
    const KEYS: usize = 1_000_000;
    let grown = |contender: &str| -> f64 {
        let output = Command::new(env::current_exe().unwrap())
            .args(["--bytes-per-key", contender, &KEYS.to_string()])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    };
    let case = "bytes per key, 1M strings";
    result(BENCH, case, "bytes/key", grown("tollgate"), "governor", grown("governor"));
    // A tenth for limitador, whose million takes minutes.
    let limitador = grown("limitador");
    result(
        BENCH,
        "bytes per key, 1M strings",
        "bytes/key",
        grown("tollgate"),
        "limitador",
        limitador,
    );
}

fn bytes_per_key(contender: &str, keys: usize) -> f64 {
    let resident = || -> f64 {
        let pages: f64 = fs::read_to_string("/proc/self/statm")
            .unwrap()
            .split_whitespace()
            .nth(1)
            .unwrap()
            .parse()
            .unwrap();
        pages * 4_096.0
    };
    match contender {
        "tollgate" => {
            // Nothing is fresh again, and so nothing is forgotten, before all are counted.
            let limiter = tollgate_by(1, Quota::per_hour);
            let before = resident();
            (0..keys).for_each(|number| {
                let _ = limiter.check(&key(number));
            });
            let grown = resident() - before;
            assert_eq!(limiter.tracked_keys(), keys, "all are kept");
            grown / keys as f64
        }
        "governor" => {
            let limiter = governor();
            let before = resident();
            (0..keys).for_each(|number| {
                let _ = limiter.check_key(&key(number));
            });
            let grown = resident() - before;
            assert_eq!(limiter.len(), keys, "all are kept");
            grown / keys as f64
        }
        _ => {
            let keys = keys / 10;
            let limiter = limitador();
            let before = resident();
            (0..keys).for_each(|number| limiter(&key(number)));
            (resident() - before) / keys as f64
        }
    }
}

/// The least that a decision on a fingerprint can be: a hash, the time, a lock, one look-up and one state,
/// and nothing to tell. No limiter that does the same and more takes less on the same machine.
struct Floor {
    secret: Box<[u8; 192]>,
    clock: quanta::Clock,
    start: quanta::Instant,
    shards: Vec<Padded>,
}

#[repr(align(128))]
struct Padded(Mutex<HashMap<u128, u64, BuildHasherDefault<Itself>>>);

/// Fingerprints are hashes already.
#[derive(Default)]
struct Itself(u64);

impl Hasher for Itself {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("fingerprints are numbers")
    }

    fn write_u128(&mut self, fingerprint: u128) {
        self.0 = (fingerprint >> 64) as u64;
    }
}

impl Floor {
    fn new() -> Self {
        let clock = quanta::Clock::new();
        let shards = (0..256).map(|_| Padded(Mutex::default())).collect();
        Self { secret: Box::new([0x5A; 192]), start: clock.now(), clock, shards }
    }

    /// The generic cell rate algorithm, with a unit each microsecond.
    fn check(&self, key: &str) -> bool {
        let fingerprint = xxh3_128_with_secret(key.as_bytes(), &*self.secret);
        let now_us = self.clock.now().duration_since(self.start).as_micros() as u64;
        let mut shard = self.shards[fingerprint as usize % self.shards.len()].0.lock();
        let arrival_us = shard.entry(fingerprint).or_default();
        let next_us = (*arrival_us).max(now_us) + 1;
        let admitted = next_us - now_us <= u64::from(BURST);
        if admitted {
            *arrival_us = next_us;
        }
        admitted
    }
}

/// So large that everything is admitted.
const BURST: u32 = 500_000_000;

fn tollgate(policies: u64) -> Limiter<String> {
    tollgate_by(policies, |number| Quota::per_second(number).burst(BURST.into()))
}

fn tollgate_by(policies: u64, quota: impl Fn(u64) -> Quota) -> Limiter<String> {
    let mut builder = Limiter::builder()
        .store(LocalStore::new().max_keys(2_000_000))
        .key(|name: &String| Key::from(name));
    for number in 1..=policies {
        builder = builder.policy(Policy::token_bucket(format!("policy-{number}"), quota(number)));
    }
    builder.build().unwrap()
}

fn governor() -> DefaultKeyedRateLimiter<String> {
    let quota = governor::Quota::per_second(NonZeroU32::MIN);
    RateLimiter::keyed(quota.allow_burst(NonZeroU32::new(BURST).unwrap()))
}

fn limitador() -> impl Fn(&String) + Sync {
    let limiter = limitador::RateLimiter::new(2_000_000);
    let user = "user".try_into().unwrap();
    let limit = Limit::new("bench", u64::from(BURST), 3_600, [], [user]);
    limiter.add_limit(limit);
    let namespace = "bench".into();
    move |key: &String| {
        let context = Context::from(HashMap::from([("user".to_owned(), key.clone())]));
        black_box(limiter.check_rate_limited_and_update(&namespace, &context, 1).is_ok());
    }
}
