//! What the benches share: interleaved timing, medians, and the line that each figure ends with.

use serde_json::json;
use std::{
    hint::black_box,
    sync::{Barrier, Mutex},
    time::{Duration, Instant},
};

/// Rounds of each case: every contender runs once in each, and the median of a contender's rounds
/// is its figure.
pub(crate) const ROUNDS: usize = 7;

/// The time of one run of one contender.
const RUN: Duration = Duration::from_millis(100);

/// What a contender does; it is given a number that counts up.
pub(crate) type Operation<'a> = Box<dyn Fn(usize) + Sync + 'a>;

/// Nanoseconds per operation of each contender: all threads together, median of interleaved rounds.
pub(crate) fn interleave(contenders: &[Operation<'_>], threads: usize) -> Vec<f64> {
    let mut rounds = vec![Vec::new(); contenders.len()];
    for round in 0..ROUNDS + 1 {
        for (contender, times) in contenders.iter().zip(&mut rounds) {
            let time = run(contender, threads, round);
            // The first round only warms up.
            if round > 0 {
                times.push(time);
            }
        }
    }
    rounds.into_iter().map(median).collect()
}

fn run(operation: &(dyn Fn(usize) + Sync), threads: usize, round: usize) -> f64 {
    let barrier = Barrier::new(threads);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (barrier, results) = (&barrier, &results);
            scope.spawn(move || {
                // Every thread and every round walks through the keys from another place.
                let mut index = (thread * 7 + round * 13) * 104_729;
                barrier.wait();
                let start = now();
                let mut operations = 0_u64;
                while start.elapsed() < RUN {
                    for _ in 0..512 {
                        operation(black_box(index));
                        index += 1;
                    }
                    operations += 512;
                }
                results.lock().unwrap().push((operations, start.elapsed()));
            });
        }
    });
    let results = results.into_inner().unwrap();
    // Operations per nanosecond of all threads together.
    let rate: f64 = results.iter().map(|(n, time)| *n as f64 / time.as_nanos() as f64).sum();
    1.0 / rate
}

/// The present, to time a stretch of work by.
#[expect(clippy::disallowed_methods, reason = "a bench is about real time")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The line of one figure against one peer.
pub(crate) fn result(
    bench: &str,
    case: &str,
    unit: &str,
    tollgate: f64,
    peer: &str,
    peer_value: f64,
) {
    let round = |value: f64, to: f64| (value * to).round() / to;
    let line = json!({
        "bench": bench,
        "case": case,
        "unit": unit,
        "tollgate": round(tollgate, 10.0),
        "peer": peer,
        "peer_value": round(peer_value, 10.0),
        "ratio": round(tollgate / peer_value, 1_000.0),
    });
    println!("RESULT {line}");
}
