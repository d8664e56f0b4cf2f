//! The sliding log: the exact times of what was spent within the last window.
//!
//! No window of any position admits more than the limit. The price is a timestamp per unit, eight
//! bytes, in a ring that grows up to the limit; a decision looks at one of them.

use super::{Algorithm, GivenBack, Mark, Spent};
use crate::quota::{Quota, QuotaError};
use std::collections::VecDeque;

/// The largest limit: 800 kB of timestamps a key.
pub(crate) const MAX_LIMIT: u64 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlidingLog {
    limit: u64,
    window_us: u64,
}

/// The times of the units spent, oldest first.
pub(crate) type State = VecDeque<u64>;

impl SlidingLog {
    pub(crate) fn new(quota: &Quota) -> Result<Self, QuotaError> {
        quota.validate()?;
        if quota.has_burst() {
            return Err(QuotaError::BurstUnsupported);
        }
        if quota.limit() > MAX_LIMIT {
            return Err(QuotaError::LogTooLong { max: MAX_LIMIT });
        }
        Ok(Self { limit: quota.limit(), window_us: quota.period().fixed_us()? })
    }

    /// What another engine needs to know to decide the same.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self) -> [u64; 6] {
        [self.limit, self.window_us, 0, 0, 0, 0]
    }
}

impl Algorithm for SlidingLog {
    type State = State;

    fn settle(&self, log: &mut State, now_us: u64) -> bool {
        // A clock that stepped back by less than a window just waits for the times on record.
        let far_ahead = log.back().is_some_and(|&newest| newest > now_us + self.window_us);
        if far_ahead {
            log.iter_mut().for_each(|time| *time = (*time).min(now_us));
        }
        while log.front().is_some_and(|&oldest| oldest + self.window_us <= now_us) {
            log.pop_front();
        }
        far_ahead
    }

    fn remaining(&self, log: &State, _now_us: u64) -> u64 {
        self.limit.saturating_sub(log.len() as u64)
    }

    fn wait(&self, log: &State, now_us: u64, cost: u64) -> Option<u64> {
        if cost > self.limit {
            return None;
        }
        // So many of the oldest have to leave first.
        let leaving = (log.len() as u64 + cost).saturating_sub(self.limit);
        match leaving.checked_sub(1) {
            None => Some(0),
            Some(last) => Some(log[last as usize] + self.window_us - now_us),
        }
    }

    fn charge(&self, log: &mut State, now_us: u64, cost: u64) {
        let time = log.back().map_or(now_us, |&newest| newest.max(now_us));
        log.extend(std::iter::repeat_n(time, cost as usize));
    }

    fn take_back(&self, log: &mut State, _now_us: u64, cost: u64) {
        log.truncate(log.len().saturating_sub(cost as usize));
    }

    fn refund(
        &self,
        log: &mut State,
        _now_us: u64,
        spent: &Spent,
        _mark: Option<&mut Mark>,
    ) -> GivenBack {
        // Its own times and no others: an older time in the place of a newer one would leave sooner.
        let end = log.partition_point(|&time| time <= spent.time_us);
        let start = log.partition_point(|&time| time < spent.time_us);
        let cost = usize::try_from(spent.cost).unwrap_or(usize::MAX);
        let start = start.max(end.saturating_sub(cost));
        log.drain(start..end);
        GivenBack::default()
    }

    fn fresh_at(&self, log: &State) -> u64 {
        log.back().map_or(0, |&newest| newest + self.window_us)
    }

    fn allotment(&self) -> (u64, u64) {
        (self.limit, self.window_us)
    }

    fn horizon_us(&self) -> u64 {
        self.window_us
    }
}
