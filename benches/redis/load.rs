//! Callers, and what they see.

use crate::{contenders::Decide, support::median};
use std::{fs, time::Duration};
use tokio::{task::JoinSet, time::Instant};

/// What the callers of one contender saw, in one round or in the median of some.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) per_second: f64,
    /// Percentiles of how long a decision took, in microseconds: the 50th, the 99th, the 99.9th.
    pub(crate) latencies: [f64; 3],
    /// Microseconds of CPU of this process for each decision.
    pub(crate) client_us: f64,
}

impl Seen {
    fn new(mut latencies: Vec<Duration>, time: Duration, cpu: Duration) -> Self {
        let count = latencies.len();
        assert!(count > 0, "nothing was decided");
        latencies.sort_unstable();
        let percentile = |permille: usize| {
            let index = (count * permille / 1_000).min(count - 1);
            latencies[index].as_nanos() as f64 / 1_000.0
        };
        Self {
            per_second: count as f64 / time.as_secs_f64(),
            latencies: [500, 990, 999].map(percentile),
            client_us: cpu.as_nanos() as f64 / 1_000.0 / count as f64,
        }
    }

    /// The median of each figure.
    pub(crate) fn median(rounds: &[Self]) -> Self {
        let of = |figure: fn(&Self) -> f64| median(rounds.iter().map(figure).collect());
        Self {
            per_second: of(|seen| seen.per_second),
            latencies: [
                of(|seen| seen.latencies[0]),
                of(|seen| seen.latencies[1]),
                of(|seen| seen.latencies[2]),
            ],
            client_us: of(|seen| seen.client_us),
        }
    }
}

/// Who asks, and about whom.
#[derive(Clone, Copy)]
pub(crate) struct Crowd {
    pub(crate) callers: usize,
    pub(crate) keys: usize,
}

/// Each caller asks for one decision after the other, for some time.
pub(crate) async fn drive(decide: &Decide, crowd: Crowd, round: usize, time: Duration) -> Seen {
    let (start, cpu) = (Instant::now(), cpu_time());
    let mut tasks = JoinSet::new();
    for caller in 0..crowd.callers {
        let decide = decide.clone();
        // Every caller and every round walks through the keys from another place.
        let mut index = (caller * 7 + round * 13) * 104_729;
        tasks.spawn(async move {
            let mut latencies = Vec::new();
            let mut before = Instant::now();
            while before - start < time {
                decide(scatter(index, crowd.keys)).await;
                let after = Instant::now();
                latencies.push(after - before);
                (before, index) = (after, index + 1);
            }
            latencies
        });
    }
    let latencies = tasks.join_all().await.concat();
    Seen::new(latencies, start.elapsed(), cpu_time() - cpu)
}

/// Requests come by themselves, at random moments, whether or not others were decided.
pub(crate) async fn pace(decide: &Decide, keys: usize, per_second: f64, time: Duration) -> Seen {
    let (start, cpu) = (Instant::now(), cpu_time());
    let mut tasks = JoinSet::new();
    let (mut due, mut state, mut index) = (Duration::ZERO, 0x2545_F491_4F6C_DD1D_u64, 0);
    while due < time {
        // A timer would not be fine enough.
        if start.elapsed() < due {
            tokio::task::yield_now().await;
            continue;
        }
        let (decide, from) = (decide.clone(), start + due);
        let key = scatter(index, keys);
        tasks.spawn(async move {
            decide(key).await;
            from.elapsed()
        });
        index += 1;
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let uniform = ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
        due += Duration::from_secs_f64(-uniform.ln() / per_second);
    }
    let latencies = tasks.join_all().await;
    Seen::new(latencies, start.elapsed(), cpu_time() - cpu)
}

/// Each of so many is decided once.
pub(crate) async fn once_each(decide: &Decide, count: usize) {
    const CALLERS: usize = 256;
    let mut tasks = JoinSet::new();
    for first in 0..CALLERS {
        let decide = decide.clone();
        tasks.spawn(async move {
            for index in (first..count).step_by(CALLERS) {
                decide(index).await;
            }
        });
    }
    tasks.join_all().await;
}

/// Walks through the keys in no order that memory would like.
fn scatter(index: usize, keys: usize) -> usize {
    index.wrapping_mul(0x9E37_79B9) % keys
}

/// The CPU that this thread used, which is the only one that does anything.
fn cpu_time() -> Duration {
    let text = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = text.split_whitespace().next().and_then(|nanos| nanos.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}
