//! From what a script told about a state to what a policy says: the same functions say it that do so
//! for state in this process.

use super::codec::Told;
use crate::{
    algorithm::{self, Algorithm, Mark, SlidingLog},
    decision::{Outcome, Verdict},
    store::{
        Rule, Slot,
        local::state::{Decide, Step},
    },
};

/// Fills in the outcomes of a request whose states were told, in the order of `rules`.
pub(crate) fn fill_in<'a>(
    told: &Told,
    rules: impl Iterator<Item = &'a Rule>,
    outcomes: &mut [Outcome],
    charging: bool,
) {
    let charging = charging && told.admitted;
    let mut decide = Decide::new(charging);
    let now_us = told.time_us;
    for ((rule, outcome), numbers) in rules.zip(outcomes).zip(&told.states) {
        match rule {
            Rule::Meter(meter) => {
                fill_in_told(meter, *numbers, now_us, outcome, &mut decide);
                if outcome.height > 0 {
                    let [_, given_back, span_us] = *numbers;
                    let mark = Mark::told(given_back, span_us);
                    outcome.height = meter.height_with(&mark, outcome.height);
                }
            }
            Rule::FixedWindow(window) => {
                fill_in_told(window, *numbers, now_us, outcome, &mut decide);
            }
            Rule::SlidingWindow(window) => {
                fill_in_told(window, *numbers, now_us, outcome, &mut decide);
            }
            Rule::SlidingLog(log) => fill_in_log(log, *numbers, now_us, outcome, charging),
        }
    }
}

/// The same for an algorithm whose whole state was told.
fn fill_in_told<A: algorithm::Told>(
    algorithm: &A,
    numbers: [u64; 3],
    now_us: u64,
    outcome: &mut Outcome,
    decide: &mut Decide,
) {
    let mut state = algorithm.state_told(numbers, now_us, now_us);
    decide.take(algorithm, &mut state, now_us, outcome);
}

/// The same for a log, of which only what matters was told: how many times are in it, which of them
/// has to leave before one more unit can be spent, and which before this request can be admitted. If
/// somebody else wrote to the log, these may be no times at all.
fn fill_in_log(
    log: &SlidingLog,
    [length, next_us, last_us]: [u64; 3],
    now_us: u64,
    outcome: &mut Outcome,
    charging: bool,
) {
    let (limit, window_us) = log.allotment();
    let cost = outcome.cost;
    let left = limit.saturating_sub(length);
    let until_gone_us =
        |time_us: u64| (time_us + window_us).saturating_sub(now_us).min(2 * window_us);
    outcome.verdict = match () {
        () if cost <= left => Verdict::Admitted,
        () if cost <= limit => Verdict::Wait(until_gone_us(last_us).max(1)),
        () => Verdict::Never,
    };
    let spent = if charging { cost } else { 0 };
    outcome.remaining = left - spent;
    outcome.reset_us = match (length, spent) {
        (0, 0) => 0,
        // The oldest is what was just spent.
        (0, _) => window_us,
        _ => until_gone_us(next_us),
    };
}

/// The same for slots, of which so many were held before.
pub(crate) fn fill_in_slot(slot: &Slot, held: u64, outcome: &mut Outcome, charging: bool) {
    let free = slot.limit.saturating_sub(held);
    outcome.verdict = slot.verdict(free, false);
    outcome.remaining = free.saturating_sub(if charging { slot.cost } else { 0 });
}

/// What the refund script has to know of the moment at which something was spent.
pub(crate) fn memory(rule: &Rule, spent_us: u64, height: u64) -> u64 {
    match rule {
        Rule::Meter(_) => height,
        Rule::FixedWindow(window) => window.memory(spent_us),
        Rule::SlidingWindow(_) | Rule::SlidingLog(_) => 0,
    }
}
