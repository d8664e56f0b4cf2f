//! The sliding window counter: this window's count, and the last one's, weighted by how much of it
//! the sliding window still covers.
//!
//! It takes what was spent in the last window as spread evenly over it, as Cloudflare's limiter does
//! (<https://blog.cloudflare.com/counting-things-a-lot-of-different-things/>). Nothing is rounded:
//! `current * window + previous * (window - elapsed) + cost * window <= limit * window`.

use super::{Algorithm, MAX_PRODUCT, TICKS_US};
use crate::policy::quota::{Quota, QuotaError};

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
    /// The window's length that the counts above were counted over; 0 for a key never seen.
    pub(crate) window_us: u64,
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

    /// What is left, in units times ticks.
    const fn headroom(&self, state: &State, now_us: u64) -> u64 {
        let current = state.current * self.window;
        let previous = state.previous * (self.window - self.elapsed(state, now_us));
        (self.limit * self.window).saturating_sub(current + previous)
    }

    const fn start_of_window_at(&self, now_us: u64) -> u64 {
        now_us - now_us % self.window_us()
    }

    /// Starts over in the window of `now_us`, with everything that was used put to this window.
    fn restart(&self, state: &mut State, now_us: u64, used: u64) {
        *state = State {
            start_us: self.start_of_window_at(now_us),
            current: used.min(self.limit),
            previous: 0,
            window_us: self.window_us(),
        };
    }
}

/// Moves on to the window of `now_us`, which begins at `start_us`.
fn slide(state: &mut State, start_us: u64) {
    if state.start_us >= start_us {
        return;
    }
    let adjacent = state.start_us + state.window_us == start_us;
    state.previous = if adjacent { state.current } else { 0 };
    state.current = 0;
    state.start_us = start_us;
}

impl Algorithm for SlidingWindow {
    type State = State;

    fn settle(&self, state: &mut State, now_us: u64) -> bool {
        let window_us = self.window_us();
        if state.window_us == 0 {
            self.restart(state, now_us, 0);
            return false;
        }
        if state.window_us != window_us {
            let old_us = state.window_us;
            slide(state, now_us - now_us % old_us);
            let left = old_us - now_us.saturating_sub(state.start_us);
            let previous = u128::from(state.previous) * u128::from(left);
            let used = state.current + previous.div_ceil(u128::from(old_us)) as u64;
            self.restart(state, now_us, used);
            return true;
        }
        // A clock that stepped back by less than a full refill just waits for the window on record.
        if state.start_us > now_us + 2 * window_us {
            self.restart(state, now_us, state.current + state.previous);
            return true;
        }
        slide(state, self.start_of_window_at(now_us));
        // A lower limit than before: what was used beyond it no longer counts.
        state.current = state.current.min(self.limit);
        state.previous = state.previous.min(self.limit);
        false
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

    fn refund(&self, state: &mut State, now_us: u64, spent_us: u64, cost: u64) {
        if spent_us >= state.start_us {
            self.take_back(state, now_us, cost);
        } else if spent_us + self.window_us() >= state.start_us {
            state.previous = state.previous.saturating_sub(cost);
        }
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
}
