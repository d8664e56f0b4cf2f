//! The table at the end, and what is to be seen in it.

use crate::{BURST, BoxError, INSTANCES, INTERVAL, RATE, load::Run};
use std::time::Duration;

impl Run {
    fn sent(&self) -> u64 {
        self.answers.len() as u64
    }

    fn admitted(&self) -> u64 {
        self.answers.iter().filter(|answer| answer.admitted).count() as u64
    }

    /// From the first request to the last answer.
    fn span(&self) -> Duration {
        let ends = self.answers.iter().map(|answer| answer.at + answer.took);
        ends.max().unwrap_or_default()
    }

    /// What one bucket holds over that time.
    fn one_bucket(&self) -> u64 {
        BURST + (RATE as f64 * self.span().as_secs_f64()).ceil() as u64
    }

    /// What instances may admit on top of it: each what it admits within a lag, at the most.
    fn lag_adds(&self) -> u64 {
        let Some(lag) = self.lag else { return 0 };
        let most_of = |instance| {
            let of_instance = self.answers.iter().filter(|answer| answer.instance == instance);
            let admitted = of_instance.filter(|answer| answer.admitted);
            let times: Vec<Duration> = admitted.map(|answer| answer.at).collect();
            let within = |from: Duration| {
                times.iter().filter(|&&time| (from..=from + lag).contains(&time)).count()
            };
            times.iter().map(|&from| within(from)).max().unwrap_or(0) as u64
        };
        (0..INSTANCES).map(most_of).sum()
    }

    /// Half of the decisions took no longer than the first, 99 % no longer than the second.
    fn took(&self) -> [Duration; 2] {
        let mut took: Vec<_> = self.answers.iter().map(|answer| answer.took).collect();
        took.sort();
        [50, 99].map(|percent| took.get(took.len() * percent / 100).copied().unwrap_or_default())
    }

    fn state(&self) -> &'static str {
        if self.lag.is_some() { "told afterwards" } else { "asked" }
    }
}

pub(crate) fn print(runs: &[Run]) {
    println!(
        "\n{:8}{:17}{:>6}{:>10}{:>12}{:>10}{:>10}{:>10}",
        "region", "its store is", "sent", "admitted", "one bucket", "p50", "p99", "lag"
    );
    for run in runs {
        let [p50, p99] = run.took().map(|took| format!("{} µs", took.as_micros()));
        let lag = run.lag.map_or("-".to_owned(), |lag| format!("{} ms", lag.as_millis()));
        println!(
            "{:8}{:17}{:>6}{:>10}{:>12}{p50:>10}{p99:>10}{lag:>10}",
            run.region,
            run.state(),
            run.sent(),
            run.admitted(),
            run.one_bucket(),
        );
    }
}

pub(crate) fn explain() {
    println!(
        "\nEach region admits what one bucket holds, {BURST} and {RATE} a second: a caller is limited where it \
         is,\nand no request crosses an ocean. A store that is told every {INTERVAL:?} adds nothing to a \
         request,\nand lets some more pass at first, when instances do not know of each other yet; it is \
         paid back."
    );
}

/// Stores that are asked admit what one bucket holds, and those that are told no more than a lag adds;
/// and neither admits much less.
pub(crate) fn check(run: &Run) -> Result<(), BoxError> {
    let (admitted, most) = (run.admitted(), run.one_bucket() + run.lag_adds());
    let least = run.one_bucket() * 9 / 10;
    if (least..=most).contains(&admitted) {
        return Ok(());
    }
    let (region, state) = (run.region, run.state());
    Err(format!("{region}, {state}: {admitted} admitted, which is not {least} to {most}").into())
}
