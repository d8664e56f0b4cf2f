//! The fixed window: a count, and the instant at which it starts again from zero.
//!
//! That instant is stored with the count, so a reset time is the same whenever it is asked for.
//! Around a boundary up to twice the limit can pass within one window's length; that is the bound
//! of this algorithm.

use super::{Algorithm, GivenBack, Mark, Spent, calendar};
use crate::quota::{Period, Quota, QuotaError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FixedWindow {
    limit: u64,
    span: Span,
}

/// Where windows begin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Anchor {
    /// At whole multiples of the period since the Unix epoch, for all keys alike.
    #[default]
    Epoch,
    /// At the first request of a key.
    FirstHit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Span {
    Aligned(u64),
    FirstHit(u64),
    Day,
    Week,
    Month,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) end_us: u64,
    pub(crate) count: u64,
}

impl FixedWindow {
    pub(crate) fn new(quota: &Quota, anchor: Anchor) -> Result<Self, QuotaError> {
        quota.validate()?;
        if quota.has_burst() {
            return Err(QuotaError::BurstUnsupported);
        }
        // Counts are compared with sums of counts.
        if quota.limit() > super::MAX_PRODUCT {
            return Err(QuotaError::TooLarge);
        }
        let span = match (quota.period(), anchor) {
            (Period::Day, Anchor::Epoch) => Span::Day,
            (Period::Week, Anchor::Epoch) => Span::Week,
            (Period::Month, Anchor::Epoch) => Span::Month,
            (period, Anchor::Epoch) => Span::Aligned(period.fixed_us()?),
            (period, Anchor::FirstHit) => Span::FirstHit(period.fixed_us()?),
        };
        Ok(Self { limit: quota.limit(), span })
    }

    fn end_of_window_at(&self, now_us: u64) -> u64 {
        match self.span {
            Span::Aligned(period) => (now_us / period + 1) * period,
            Span::FirstHit(period) => now_us + period,
            Span::Day => calendar::day_end(now_us),
            Span::Week => calendar::week_end(now_us),
            Span::Month => calendar::month_end(now_us),
        }
    }

    /// The longest that a window can be.
    const fn longest(&self) -> u64 {
        match self.span {
            Span::Aligned(period) | Span::FirstHit(period) => period,
            Span::Day => calendar::DAY_US,
            Span::Week => 7 * calendar::DAY_US,
            Span::Month => 31 * calendar::DAY_US,
        }
    }

    /// What another engine needs to know of that moment to give back what was spent.
    #[cfg(feature = "redis")]
    pub(crate) fn memory(&self, spent_us: u64) -> u64 {
        self.end_of_window_at(spent_us)
    }

    /// What another engine needs to know to decide the same.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self) -> [u64; 6] {
        let (span, period_us) = match self.span {
            Span::Aligned(period) => (0, period),
            Span::FirstHit(period) => (1, period),
            Span::Day => (2, 0),
            Span::Week => (3, 0),
            Span::Month => (4, 0),
        };
        [self.limit, span, period_us, self.longest(), 0, 0]
    }
}

impl Algorithm for FixedWindow {
    type State = State;

    fn settle(&self, state: &mut State, now_us: u64) -> bool {
        // A window in which nothing was spent is one that has not begun.
        if state.end_us <= now_us || state.count == 0 {
            *state = State { end_us: self.end_of_window_at(now_us), count: 0 };
            return false;
        }
        // A clock that stepped back by less than a window just waits for the end on record.
        let far_ahead = state.end_us - now_us > 2 * self.longest();
        if far_ahead {
            state.end_us = self.end_of_window_at(now_us);
        }
        far_ahead
    }

    fn remaining(&self, state: &State, _now_us: u64) -> u64 {
        self.limit.saturating_sub(state.count)
    }

    fn wait(&self, state: &State, now_us: u64, cost: u64) -> Option<u64> {
        if cost > self.limit {
            None
        } else if state.count + cost <= self.limit {
            Some(0)
        } else {
            Some(state.end_us - now_us)
        }
    }

    fn charge(&self, state: &mut State, _now_us: u64, cost: u64) {
        state.count += cost;
    }

    fn take_back(&self, state: &mut State, _now_us: u64, cost: u64) {
        state.count = state.count.saturating_sub(cost);
    }

    fn refund(
        &self,
        state: &mut State,
        now_us: u64,
        spent: &Spent,
        _mark: Option<&mut Mark>,
    ) -> GivenBack {
        let spent_in_this_window = match self.span {
            Span::FirstHit(period) => state.end_us <= spent.time_us + period,
            _ => state.end_us == self.end_of_window_at(spent.time_us),
        };
        if spent_in_this_window {
            self.take_back(state, now_us, spent.cost);
        }
        GivenBack::default()
    }

    fn fresh_at(&self, state: &State) -> u64 {
        if state.count == 0 { 0 } else { state.end_us }
    }

    fn allotment(&self) -> (u64, u64) {
        let window_us = match self.span {
            Span::Month => 0,
            _ => self.longest(),
        };
        (self.limit, window_us)
    }

    fn horizon_us(&self) -> u64 {
        self.longest()
    }

    /// The end of the window, even where its whole limit is left: the wait for more than that would
    /// be for ever.
    fn reset(&self, state: &State, now_us: u64, _remaining: u64) -> u64 {
        if state.count == 0 { 0 } else { state.end_us - now_us }
    }
}

#[cfg(feature = "redis")]
impl super::Told for FixedWindow {
    /// It is told when the window ends, and what was counted in it.
    fn state_told(&self, [end_us, count, _]: [u64; 3], told_us: u64, now_us: u64) -> State {
        // Clocks that agree on a window agree on its end; for others it is as far away.
        let end_us = match self.end_of_window_at(now_us) {
            own_end_us if own_end_us == end_us => end_us,
            _ => (end_us + now_us).saturating_sub(told_us),
        };
        State { end_us, count }
    }

    fn count(&self, state: &mut State, cost: u64) {
        state.count = state.count.max(state.count.saturating_add(cost).min(2 * self.limit));
    }
}
