//! The states of an identity's policies in the words of its entry, and a decision on them.
//!
//! The first word of every state is the instant from which on it equals that of a key never seen,
//! or a later one. So a table can be swept without knowing what it holds.

use super::rings::{RingId, Rings};
use crate::{
    algorithm::{Algorithm, FixedWindow, Meter, Pace, SlidingLog, SlidingWindow},
    decision::Verdict,
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
    /// remember at which pace it was counted; the others carry all that they need.
    pub(super) fn new(offset: usize, kind: Kind, varies: bool) -> Self {
        let width = match kind {
            Kind::TokenBucket | Kind::LeakyBucket(_) if varies => 5,
            Kind::TokenBucket | Kind::LeakyBucket(_) | Kind::FixedWindow(_) | Kind::SlidingLog => 2,
            Kind::SlidingWindow => 4,
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
}

/// A state, taken out of its entry, with the algorithm that knows what it means.
pub(super) enum Loaded<'a> {
    Meter(&'a Meter, <Meter as Algorithm>::State),
    FixedWindow(&'a FixedWindow, <FixedWindow as Algorithm>::State),
    SlidingWindow(&'a SlidingWindow, <SlidingWindow as Algorithm>::State),
    /// A ring is decided on where it is.
    SlidingLog(&'a SlidingLog, RingId),
}

/// Evaluates the same expression whatever the algorithm is.
macro_rules! with {
    ($loaded:expr, $rings:expr, |$algorithm:ident, $state:ident| $body:expr) => {
        match $loaded {
            Loaded::Meter($algorithm, $state) => $body,
            Loaded::FixedWindow($algorithm, $state) => $body,
            Loaded::SlidingWindow($algorithm, $state) => $body,
            Loaded::SlidingLog($algorithm, ring) => {
                let $state = $rings.get(*ring);
                $body
            }
        }
    };
    ($loaded:expr, mut $rings:expr, |$algorithm:ident, $state:ident| $body:expr) => {
        match $loaded {
            Loaded::Meter($algorithm, $state) => $body,
            Loaded::FixedWindow($algorithm, $state) => $body,
            Loaded::SlidingWindow($algorithm, $state) => $body,
            Loaded::SlidingLog($algorithm, ring) => $rings.update(ring, |$state| $body),
        }
    };
}

/// What a policy says to a cost that it was not charged yet.
pub(super) struct Opinion {
    pub(super) verdict: Verdict,
    /// What remains without the charge.
    pub(super) remaining: u64,
}

impl<'a> Loaded<'a> {
    /// The state in `field` of an entry, brought to the present; `None` is a key never seen. Says
    /// also whether the state has to be kept even if nothing is charged.
    #[inline]
    pub(super) fn load(
        field: &Field,
        entry: Option<&[u64]>,
        rule: &'a Rule,
        rings: &mut Rings,
        now_us: u64,
    ) -> (Self, bool) {
        // A state of zeros is one that was never charged, whatever the algorithm.
        let words = entry.map_or(&[0; 5][..field.words.len()], |entry| &entry[field.words.clone()]);
        let mut taken_over = false;
        let mut loaded = match rule {
            Rule::Meter(meter) => {
                let (empty_at_us, spare) = (words[0], words[1]);
                let mut state = MeterState { empty_at_us, spare };
                if let [_, _, tick_us, drops_per_tick, drops_per_unit] = *words
                    && tick_us > 0
                {
                    let pace = Pace { tick_us, drops_per_tick, drops_per_unit };
                    taken_over = meter.take_over(&mut state, pace, now_us);
                }
                Self::Meter(meter, state)
            }
            Rule::FixedWindow(window) => {
                let (end_us, count) = (words[0], words[1]);
                Self::FixedWindow(window, FixedWindowState { end_us, count })
            }
            Rule::SlidingWindow(window) => {
                let (current, previous, window_us) = (words[1], words[2], words[3]);
                let start_us = words[0] - 2 * window_us;
                let state = SlidingWindowState { start_us, current, previous, window_us };
                Self::SlidingWindow(window, state)
            }
            Rule::SlidingLog(log) => Self::SlidingLog(log, RingId::from_word(words[1])),
        };
        let moved =
            with!(&mut loaded, mut rings, |algorithm, state| algorithm.settle(state, now_us));
        (loaded, taken_over || moved)
    }

    /// Puts the state back into `field` of its entry.
    #[inline]
    pub(super) fn store(&self, field: &Field, entry: &mut [u64], rings: &Rings) {
        let words = &mut entry[field.words.clone()];
        match self {
            Self::Meter(meter, state) => {
                (words[0], words[1]) = (state.empty_at_us, state.spare);
                if let [_, _, tick_us, drops_per_tick, drops_per_unit] = words {
                    let pace = meter.pace();
                    *tick_us = pace.tick_us;
                    *drops_per_tick = pace.drops_per_tick;
                    *drops_per_unit = pace.drops_per_unit;
                }
            }
            Self::FixedWindow(_, state) => (words[0], words[1]) = (state.end_us, state.count),
            Self::SlidingWindow(_, state) => {
                words[0] = state.start_us + 2 * state.window_us;
                (words[1], words[2], words[3]) = (state.current, state.previous, state.window_us);
            }
            Self::SlidingLog(log, ring) => {
                (words[0], words[1]) = (log.fresh_at(rings.get(*ring)), ring.to_word());
            }
        }
    }

    /// Whether there is room for `cost`.
    #[inline]
    pub(super) fn ask(&self, rings: &Rings, now_us: u64, cost: u64) -> Opinion {
        with!(self, rings, |algorithm, state| {
            let remaining = algorithm.remaining(state, now_us);
            let verdict = if cost <= remaining {
                Verdict::Admitted
            } else {
                algorithm.wait(state, now_us, cost).map_or(Verdict::Never, Verdict::Wait)
            };
            Opinion { verdict, remaining }
        })
    }

    /// Spends `cost`, for which there is room.
    #[inline]
    pub(super) fn charge(&mut self, rings: &mut Rings, now_us: u64, cost: u64) {
        with!(self, mut rings, |algorithm, state| algorithm.charge(state, now_us, cost));
    }

    /// Gives back `cost` that was spent at `spent_us`.
    pub(super) fn refund(&mut self, rings: &mut Rings, now_us: u64, spent_us: u64, cost: u64) {
        with!(self, mut rings, |algorithm, state| algorithm.refund(state, now_us, spent_us, cost));
    }

    /// How long until more than `remaining` can be spent.
    #[inline]
    pub(super) fn reset(&self, rings: &Rings, now_us: u64, remaining: u64) -> u64 {
        with!(self, rings, |algorithm, state| algorithm.reset(state, now_us, remaining))
    }

    /// How long `cost`, which was just charged, has to wait for its turn, if it has to; and how
    /// much sooner those behind it have theirs if it gives up its own.
    pub(super) fn delay(&self, now_us: u64, cost: u64) -> Option<(u64, u64)> {
        let Self::Meter(meter, state) = self else {
            return None;
        };
        match meter.delay(state, now_us) {
            0 => None,
            delay_us => Some((delay_us, meter.time_of(cost))),
        }
    }
}

type MeterState = <Meter as Algorithm>::State;
type FixedWindowState = <FixedWindow as Algorithm>::State;
type SlidingWindowState = <SlidingWindow as Algorithm>::State;
