//! From what a script told about a state to what a policy says: the same functions say it that do so
//! for state in this process.

use super::codec::Told;
use crate::{
    algorithm::{Algorithm, FixedWindowState, Mark, SlidingLog, SlidingWindowState},
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
        let [first, second, third] = *numbers;
        match rule {
            Rule::Meter(meter) => {
                decide.take(meter, &mut meter.state_at(now_us, first), now_us, outcome);
                if outcome.height > 0 {
                    let mark = Mark::told(second, third);
                    outcome.height = meter.height_with(&mark, outcome.height);
                }
            }
            Rule::FixedWindow(window) => {
                let mut state = FixedWindowState { end_us: first, count: second };
                decide.take(window, &mut state, now_us, outcome);
            }
            Rule::SlidingWindow(window) => {
                let mut state =
                    SlidingWindowState { start_us: first, current: second, previous: third };
                decide.take(window, &mut state, now_us, outcome);
            }
            Rule::SlidingLog(log) => fill_in_log(log, *numbers, now_us, outcome, charging),
        }
    }
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
pub(crate) fn memory(rule: &Rule, spent_us: u64, outcome: &Outcome) -> u64 {
    match rule {
        Rule::Meter(_) => outcome.height,
        Rule::FixedWindow(window) => window.memory(spent_us),
        Rule::SlidingWindow(_) | Rule::SlidingLog(_) => 0,
    }
}
