//! The sliding window counter: this window's count, and the last one's, weighted by how much of it
//! the sliding window still covers.
//!
//! It takes what was spent in the last window as spread evenly over it, as Cloudflare's limiter does
//! (<https://blog.cloudflare.com/counting-things-a-lot-of-different-things/>). Nothing is rounded:
//! `current * window + previous * (window - elapsed) + cost * window <= limit * window`.

use super::{Algorithm, GivenBack, MAX_PRODUCT, Mark, Spent, TICKS_US};
use crate::quota::{Quota, QuotaError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlidingWindow {
    limit: u64,
    tick_us: u64,
    /// The window's length in ticks.
    window: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) start_us: u64,
    pub(crate) current: u64,
    pub(crate) previous: u64,
}

impl SlidingWindow {
    pub(crate) fn new(quota: &Quota) -> Result<Self, QuotaError> {
        quota.validate()?;
        if quota.has_burst() {
            return Err(QuotaError::BurstUnsupported);
        }
        let window_us = quota.period().fixed_us()?;
        // A window begins on a whole tick, so only ticks that divide it will do.
        let fits = |&tick_us: &u64| {
            window_us.is_multiple_of(tick_us)
                && u128::from(quota.limit()) * u128::from(window_us / tick_us)
                    <= u128::from(MAX_PRODUCT)
        };
        let tick_us = TICKS_US.into_iter().find(fits).ok_or(QuotaError::TooLarge)?;
        Ok(Self { limit: quota.limit(), tick_us, window: window_us / tick_us })
    }

    pub(crate) const fn window_us(&self) -> u64 {
        self.window * self.tick_us
    }

    /// The ticks that have passed of the window on record. A clock that stepped back stands at its
    /// beginning.
    const fn elapsed(&self, state: &State, now_us: u64) -> u64 {
        now_us.saturating_sub(state.start_us) / self.tick_us
    }

    /// What is left, in units times ticks. Counts of a much larger limit, in coarser ticks, may be on
    /// record; then there is nothing left.
    const fn headroom(&self, state: &State, now_us: u64) -> u64 {
        let left = self.window - self.elapsed(state, now_us);
        let current = state.current.saturating_mul(self.window);
        let used = current.saturating_add(state.previous.saturating_mul(left));
        (self.limit * self.window).saturating_sub(used)
    }

    const fn start_of_window_at(&self, now_us: u64) -> u64 {
        now_us - now_us % self.window_us()
    }

    /// What another engine needs to know to decide the same.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self) -> [u64; 6] {
        [self.limit, self.tick_us, self.window, MAX_PRODUCT / self.window, 0, 0]
    }
}

impl Algorithm for SlidingWindow {
    type State = State;

    fn settle(&self, state: &mut State, now_us: u64) -> bool {
        let window_us = self.window_us();
        let start_us = self.start_of_window_at(now_us);
        // A clock that stepped back by less than a full refill just waits for the window on record.
        let far_ahead = state.start_us > now_us + 2 * window_us;
        if far_ahead {
            // All that was used is put to the present window.
            let used = (state.current + state.previous).min(MAX_PRODUCT / self.window);
            *state = State { start_us, current: used, previous: 0 };
        } else if state.start_us < start_us {
            let adjacent = state.start_us + window_us == start_us;
            let previous = if adjacent { state.current } else { 0 };
            *state = State { start_us, current: 0, previous };
        }
        far_ahead
    }

    fn remaining(&self, state: &State, now_us: u64) -> u64 {
        self.headroom(state, now_us) / self.window
    }

    fn wait(&self, state: &State, now_us: u64, cost: u64) -> Option<u64> {
        if cost > self.limit {
            return None;
        }
        if cost * self.window <= self.headroom(state, now_us) {
            return Some(0);
        }
        // Either the last window slides out far enough while this one lasts, or this one has to
        // begin to slide out itself.
        let (start, sliding_out, kept) = if state.current + cost <= self.limit {
            (state.start_us, state.previous, state.current)
        } else {
            (state.start_us + self.window_us(), state.current, 0)
        };
        // The least elapsed time at which
        // `sliding_out * (window - elapsed) <= (limit - kept - cost) * window`.
        let room = (self.limit - kept - cost) * self.window;
        let elapsed = self.window - room / sliding_out;
        Some(start + elapsed * self.tick_us - now_us)
    }

    fn charge(&self, state: &mut State, _now_us: u64, cost: u64) {
        state.current += cost;
    }

    fn take_back(&self, state: &mut State, _now_us: u64, cost: u64) {
        state.current = state.current.saturating_sub(cost);
    }

    fn refund(
        &self,
        state: &mut State,
        now_us: u64,
        spent: &Spent,
        _mark: Option<&mut Mark>,
    ) -> GivenBack {
        if spent.time_us >= state.start_us {
            self.take_back(state, now_us, spent.cost);
        } else if spent.time_us + self.window_us() >= state.start_us {
            state.previous = state.previous.saturating_sub(spent.cost);
        }
        GivenBack::default()
    }

    fn fresh_at(&self, state: &State) -> u64 {
        state.start_us
            + match (state.current, state.previous) {
                (0, 0) => 0,
                (0, _) => self.window_us(),
                _ => 2 * self.window_us(),
            }
    }

    fn allotment(&self) -> (u64, u64) {
        (self.limit, self.window_us())
    }

    fn horizon_us(&self) -> u64 {
        2 * self.window_us()
    }
}

#[cfg(feature = "redis")]
impl super::Told for SlidingWindow {
    /// It is told when the window began, and what was counted in it and in the one before.
    fn state_told(&self, numbers: [u64; 3], told_us: u64, now_us: u64) -> State {
        let [start_us, current, previous] = numbers;
        // Clocks that agree on a window agree on its beginning; for others it is as long ago.
        let start_us = match self.start_of_window_at(now_us) {
            own_start_us if own_start_us == start_us => start_us,
            _ => (start_us + now_us).saturating_sub(told_us),
        };
        State { start_us, current, previous }
    }

    fn count(&self, state: &mut State, cost: u64) {
        state.current = state.current.max(state.current.saturating_add(cost).min(2 * self.limit));
    }
}
