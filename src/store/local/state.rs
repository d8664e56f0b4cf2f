//! The states of an identity's policies in the words of its entry, and the steps of a decision on
//! them.
//!
//! The first word of every state is the instant from which on it equals that of a key never seen,
//! or a later one. So a table can be swept without knowing what it holds. A state of zeros is one
//! that was never charged, whatever the algorithm.

use super::rings::{RingId, Rings};
#[cfg(feature = "redis")]
use crate::algorithm::Told;
use crate::{
    algorithm::{
        Algorithm, FixedWindow, GivenBack, Mark, Meter, Pace, SlidingLog, SlidingWindow, Spent,
        Terms,
    },
    decision::{Outcome, Verdict},
    store::{Kind, Rule},
};
use std::ops::Range;

/// Where the state of a policy stands in an entry.
#[derive(Clone, Debug)]
pub(super) struct Field {
    words: Range<usize>,
}

impl Field {
    /// A field behind `offset` words. A meter whose quota `varies` from request to request has to
    /// remember the terms that it was counted by; the others carry all that they need.
    pub(super) fn new(offset: usize, kind: Kind, varies: bool) -> Self {
        let width = match kind {
            Kind::TokenBucket | Kind::LeakyBucket(_) if varies => 6,
            Kind::TokenBucket | Kind::LeakyBucket(_) | Kind::FixedWindow(_) | Kind::SlidingLog => 2,
            Kind::SlidingWindow => 3,
        };
        Self { words: offset..offset + width }
    }

    /// Where the next field begins.
    pub(super) fn end(&self) -> usize {
        self.words.end
    }

    /// Where the instant stands from which on this state can be forgotten.
    pub(super) fn fresh_at(&self) -> usize {
        self.words.start
    }

    /// The ring of a sliding log.
    pub(super) fn ring(&self, state: &[u64]) -> RingId {
        RingId::from_word(state[self.words.start + 1])
    }

    /// Brings the state of an entry to the present and takes a step on it, whatever the algorithm.
    /// If the state has to be kept, it is put back. Returns from when on what was put back can be
    /// forgotten.
    #[inline(always)]
    pub(super) fn step(
        &self,
        entry: &mut [u64],
        rule: &Rule,
        rings: &mut Rings,
        now_us: u64,
        outcome: &mut Outcome,
        step: &mut impl Step,
    ) -> u64 {
        let words = &mut entry[self.words.clone()];
        if let Rule::Meter(meter) = rule {
            return step_on_words(meter, words, now_us, outcome, step);
        }
        step_apart(rule, words, rings, now_us, outcome, step)
    }
}

#[cfg(feature = "redis")]
impl Field {
    /// Puts a state in place of what is there that another engine told in `numbers` at `told_us`, and
    /// counts `cost` on top of it. Returns from when on it can be forgotten.
    pub(super) fn take_in(
        &self,
        entry: &mut [u64],
        rule: &Rule,
        (numbers, told_us): ([u64; 3], u64),
        now_us: u64,
        cost: u64,
    ) -> u64 {
        let words = &mut entry[self.words.clone()];
        let told = (numbers, told_us);
        match rule {
            Rule::Meter(meter) => take_in(meter, words, told, now_us, cost),
            Rule::FixedWindow(window) => take_in(window, words, told, now_us, cost),
            Rule::SlidingWindow(window) => take_in(window, words, told, now_us, cost),
            // Nobody tells all that is in a log.
            Rule::SlidingLog(_) => NOT_KEPT,
        }
    }
}

#[cfg(feature = "redis")]
fn take_in<A: InWords + Told>(
    algorithm: &A,
    words: &mut [u64],
    (numbers, told_us): ([u64; 3], u64),
    now_us: u64,
    cost: u64,
) -> u64 {
    let mut state = algorithm.state_told(numbers, told_us, now_us);
    algorithm.settle(&mut state, now_us);
    algorithm.count(&mut state, cost);
    algorithm.write(&state, words)
}

/// A step of a decision.
pub(in crate::store) trait Step {
    /// Takes the step on a state that was brought to the present. Returns whether it was changed.
    fn take<A: Algorithm>(
        &mut self,
        algorithm: &A,
        state: &mut A::State,
        now_us: u64,
        outcome: &mut Outcome,
    ) -> bool;
}

/// Answers charges, and makes them until there is no room for one.
pub(in crate::store) struct Decide {
    charging: bool,
    /// Whether there was room for all so far.
    pub(in crate::store) admitted: bool,
}

/// Takes back the charges that were just made, and answers anew without them. Those are all before
/// the first for which there was no room.
pub(super) struct TakeBack {
    charged: bool,
}

/// Gives back what was charged some time ago.
pub(super) struct Refund<'a> {
    pub(super) spent_us: u64,
    /// The mark that a bucket has or may leave.
    pub(super) mark: Option<&'a mut Mark>,
    pub(super) given_back: GivenBack,
}

impl Decide {
    /// Makes charges only if it is `charging`.
    pub(in crate::store) const fn new(charging: bool) -> Self {
        Self { charging, admitted: true }
    }
}

impl TakeBack {
    pub(super) const fn new() -> Self {
        Self { charged: true }
    }
}

impl Step for Decide {
    #[inline(always)]
    fn take<A: Algorithm>(
        &mut self,
        algorithm: &A,
        state: &mut A::State,
        now_us: u64,
        outcome: &mut Outcome,
    ) -> bool {
        let cost = outcome.cost;
        let mut remaining = algorithm.remaining(state, now_us);
        let fits = cost <= remaining;
        outcome.verdict = if fits {
            Verdict::Admitted
        } else {
            algorithm.wait(state, now_us, cost).map_or(Verdict::Never, Verdict::Wait)
        };
        self.admitted &= fits;
        if fits && cost > 0 {
            outcome.delay_us = algorithm.delay(state, now_us, cost);
        }
        let charged = self.charging && self.admitted && cost > 0;
        if charged {
            algorithm.charge(state, now_us, cost);
            outcome.height = algorithm.height(state);
            remaining -= cost;
        }
        outcome.remaining = remaining;
        outcome.reset_us = algorithm.reset(state, now_us, remaining);
        charged
    }
}

impl Step for TakeBack {
    #[cold]
    fn take<A: Algorithm>(
        &mut self,
        algorithm: &A,
        state: &mut A::State,
        now_us: u64,
        outcome: &mut Outcome,
    ) -> bool {
        self.charged &= outcome.verdict == Verdict::Admitted;
        let charged = self.charged && outcome.cost > 0;
        if charged {
            algorithm.take_back(state, now_us, outcome.cost);
            outcome.remaining += outcome.cost;
            outcome.reset_us = algorithm.reset(state, now_us, outcome.remaining);
            outcome.delay_us = 0;
            outcome.height = 0;
        }
        charged
    }
}

impl Step for Refund<'_> {
    fn take<A: Algorithm>(
        &mut self,
        algorithm: &A,
        state: &mut A::State,
        now_us: u64,
        outcome: &mut Outcome,
    ) -> bool {
        let Outcome { cost, height, .. } = *outcome;
        let spent = Spent { time_us: self.spent_us, cost, height };
        self.given_back = algorithm.refund(state, now_us, &spent, self.mark.as_deref_mut());
        true
    }
}

/// The algorithms that are not worth being part of every decision's code.
#[inline(never)]
fn step_apart(
    rule: &Rule,
    words: &mut [u64],
    rings: &mut Rings,
    now_us: u64,
    outcome: &mut Outcome,
    step: &mut impl Step,
) -> u64 {
    match rule {
        Rule::Meter(meter) => step_on_words(meter, words, now_us, outcome, step),
        Rule::FixedWindow(window) => step_on_words(window, words, now_us, outcome, step),
        Rule::SlidingWindow(window) => step_on_words(window, words, now_us, outcome, step),
        Rule::SlidingLog(log) => step_on_ring(log, words, rings, now_us, outcome, step),
    }
}

/// In place of an instant, where a state did not change.
const NOT_KEPT: u64 = u64::MAX;

/// An algorithm whose state is so small that it stands in the words of an entry.
trait InWords: Algorithm {
    /// The state in `words`; and whether it has to be kept even if nothing is charged, because it
    /// was of another quota.
    fn read(&self, words: &[u64], now_us: u64) -> (Self::State, bool);

    /// Returns from when on the state can be forgotten.
    fn write(&self, state: &Self::State, words: &mut [u64]) -> u64;
}

/// Returns from when on the state can be forgotten, if it had to be put back.
#[inline(always)]
fn step_on_words<A: InWords>(
    algorithm: &A,
    words: &mut [u64],
    now_us: u64,
    outcome: &mut Outcome,
    step: &mut impl Step,
) -> u64 {
    let (mut state, taken_over) = algorithm.read(words, now_us);
    let moved = algorithm.settle(&mut state, now_us);
    let keep = step.take(algorithm, &mut state, now_us, outcome) | taken_over | moved;
    if keep { algorithm.write(&state, words) } else { NOT_KEPT }
}

/// The same for a log, whose ring is found by the second word.
#[inline(never)]
fn step_on_ring(
    log: &SlidingLog,
    words: &mut [u64],
    rings: &mut Rings,
    now_us: u64,
    outcome: &mut Outcome,
    step: &mut impl Step,
) -> u64 {
    let mut id = RingId::from_word(words[1]);
    let keep = rings.update(&mut id, |ring| {
        let moved = log.settle(ring, now_us);
        let keep = step.take(log, ring, now_us, outcome) | moved;
        if keep {
            words[0] = log.fresh_at(ring);
        }
        keep
    });
    words[1] = id.to_word();
    if keep { words[0] } else { NOT_KEPT }
}

impl InWords for Meter {
    #[inline(always)]
    fn read(&self, words: &[u64], now_us: u64) -> (Self::State, bool) {
        match *words {
            [empty_at_us, spare] => (self.pace().state(empty_at_us, spare), false),
            [empty_at_us, spare, tick_us, drops_per_tick, drops_per_unit, units] if tick_us > 0 => {
                let pace = Pace { tick_us, drops_per_tick, drops_per_unit };
                let mut state = pace.state(empty_at_us, spare);
                let changed = self.take_over(&mut state, Terms { pace, units }, now_us);
                (state, changed)
            }
            _ => (Self::State::default(), false),
        }
    }

    #[inline(always)]
    fn write(&self, state: &Self::State, words: &mut [u64]) -> u64 {
        let (empty_at_us, spare) = self.words_of(state);
        match words {
            [first, second] => (*first, *second) = (empty_at_us, spare),
            _ => {
                let Pace { tick_us, drops_per_tick, drops_per_unit } = self.pace();
                let counted = [
                    empty_at_us,
                    spare,
                    tick_us,
                    drops_per_tick,
                    drops_per_unit,
                    self.units_of(state),
                ];
                words.copy_from_slice(&counted);
            }
        }
        empty_at_us
    }
}

impl InWords for FixedWindow {
    fn read(&self, words: &[u64], _now_us: u64) -> (Self::State, bool) {
        (Self::State { end_us: words[0], count: words[1] }, false)
    }

    fn write(&self, state: &Self::State, words: &mut [u64]) -> u64 {
        (words[0], words[1]) = (state.end_us, state.count);
        words[0]
    }
}

impl InWords for SlidingWindow {
    fn read(&self, words: &[u64], _now_us: u64) -> (Self::State, bool) {
        let start_us = words[0].saturating_sub(self.horizon_us());
        (Self::State { start_us, current: words[1], previous: words[2] }, false)
    }

    fn write(&self, state: &Self::State, words: &mut [u64]) -> u64 {
        words[0] = state.start_us + self.horizon_us();
        (words[1], words[2]) = (state.current, state.previous);
        words[0]
    }
}
