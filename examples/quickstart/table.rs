//! The table at the end.

use crate::{POLICIES, callers::Tally, latency::Latencies, model::Verdict};
use std::time::Duration;

pub(crate) fn print(tallies: &[Tally], verdict: &Verdict, latencies: &Latencies) {
    println!("\n{:38}rejected by (a request may be by several)", "");
    print!("{:8}{:>8}{:>11}{:>11}", "caller", "sent", "admitted", "allowed");
    POLICIES.iter().for_each(|policy| print!("{policy:>11}"));
    println!();
    let row = |name: &str, tallies: &[Tally]| {
        let sum = |count: &dyn Fn(&Tally) -> u64| tallies.iter().map(count).sum::<u64>();
        let (sent, admitted) = (sum(&|tally| tally.sent), sum(&|tally| tally.admitted));
        let allowed = sum(&|tally| verdict.allowed(tally.caller));
        print!("{name:8}{sent:>8}{admitted:>11}{allowed:>11}");
        POLICIES.iter().for_each(|policy| {
            print!("{:>11}", sum(&|tally| tally.rejected_by(policy)));
        });
        println!();
    };
    for tally in tallies {
        row(tally.caller, std::slice::from_ref(tally));
    }
    row("all", tallies);

    let Latencies { plain, limited } = latencies;
    println!("\n{:8}{:>11}{:>11}   {} requests each", "layer", "p50", "p99", plain.len());
    let [p50, p99] = [50, 99].map(|percent| move |times: &[_]| percentile(times, percent));
    for (name, times) in [("without", plain), ("with", limited)] {
        println!("{name:8}{:>8.1} µs{:>8.1} µs", p50(times), p99(times));
    }
    let (p50, p99) = (p50(limited) - p50(plain), p99(limited) - p99(plain));
    println!("{:8}{p50:>+8.1} µs{p99:>+8.1} µs\n", "adds");
    if cfg!(debug_assertions) {
        println!("This is a debug build. The latencies mean more with --release.\n");
    }
}

/// A percentile of sorted times, in microseconds.
fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).map_or(f64::NAN, |time| time.as_nanos() as f64 / 1_000.0)
}
