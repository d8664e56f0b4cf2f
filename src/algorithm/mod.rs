//! Rate-limiting algorithms as pure integer functions of state, time and cost.
//!
//! No I/O, no clock, no locks. Times are whole microseconds since the Unix epoch. Every product
//! stays below 2^53, so that a store whose numbers are doubles can compute the same, bit for bit;
//! the constructors refuse quotas that would leave that range.
//!
//! The three steps of a decision are apart, because a request that passes several policies is
//! charged to all of them or to none: [`settle`](Algorithm::settle) brings a state to the present,
//! [`remaining`](Algorithm::remaining) and [`wait`](Algorithm::wait) tell, [`charge`](Algorithm::charge)
//! takes.

mod calendar;
mod fixed_window;
mod meter;
#[cfg(test)]
mod properties;
mod sliding_log;
mod sliding_window;

pub(crate) use fixed_window::{Anchor, FixedWindow};
pub(crate) use meter::{Mark, Meter, Pace, Terms};
pub(crate) use sliding_log::{MAX_LIMIT as MAX_LOG_LIMIT, SlidingLog};
pub(crate) use sliding_window::SlidingWindow;

/// The largest product that the constructors allow. A state may hold twice as much for a while,
/// after a step of the clock, and a cost comes on top: three times this is still below 2^53.
const MAX_PRODUCT: u64 = 1 << 51;

/// What time is counted in: the finest of these that keeps a quota's products in range.
const TICKS_US: [u64; 3] = [1, 1_000, 1_000_000];

/// A charge that was made some time ago.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spent {
    pub(crate) time_us: u64,
    pub(crate) cost: u64,
    /// The drops that were in the bucket right after it, and those that had been given back from it by
    /// then ([`Mark`]). 0 if that is not known.
    pub(crate) height: u64,
}

/// What came of giving back, for those who wait for their turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenBack {
    /// How much sooner those behind have it.
    pub(crate) by_us: u64,
    /// How many drops more are [counted](Mark) as given back, as if from beneath everybody: the heights of
    /// those who are ahead are so much higher than they seem.
    pub(crate) counted: u64,
}

pub(crate) trait Algorithm {
    /// What is remembered of one key. The default is a key never seen.
    type State: Default;

    /// Brings `state` to `now_us` without charging anything. Returns whether it was re-anchored,
    /// because the clock went back by more than a full refill or the quota is another one than
    /// before: then it has to be kept even if the request is rejected, or the wait that the
    /// rejection promises would not hold.
    fn settle(&self, state: &mut Self::State, now_us: u64) -> bool;

    /// The whole units that can be spent now. Like all that follow it needs a settled state.
    fn remaining(&self, state: &Self::State, now_us: u64) -> u64;

    /// The least time after which `cost`, at least 1, can be spent if nobody else spends anything;
    /// 0 is now, `None` is never.
    fn wait(&self, state: &Self::State, now_us: u64, cost: u64) -> Option<u64>;

    /// Spends `cost`, for which the wait was 0.
    fn charge(&self, state: &mut Self::State, now_us: u64, cost: u64);

    /// What has to be known of the charge that was just made, beside its time and cost, to give it back
    /// later: its [height](Spent::height).
    fn height(&self, _state: &Self::State) -> u64 {
        0
    }

    /// Undoes the charge of `cost` that was just made.
    fn take_back(&self, state: &mut Self::State, now_us: u64, cost: u64);

    /// Gives back what was spent, as far as it has not come back by itself. A bucket may have to leave a
    /// mark, in place of the one that it has; `None` if there is no room for any.
    fn refund(
        &self,
        state: &mut Self::State,
        now_us: u64,
        spent: &Spent,
        mark: Option<&mut Mark>,
    ) -> GivenBack;

    /// From when on the state equals that of a key never seen, so that it can be forgotten.
    fn fresh_at(&self, state: &Self::State) -> u64;

    /// The most that can remain, and the time in which so much comes back, in microseconds. The
    /// time is 0 where it has no fixed length.
    fn allotment(&self) -> (u64, u64);

    /// How far ahead [`fresh_at`](Self::fresh_at) can be, by a clock that never goes back.
    fn horizon_us(&self) -> u64;

    /// How long `cost`, for which there is room, will have to wait for its turn; 0 is not at all.
    fn delay(&self, _state: &Self::State, _now_us: u64, _cost: u64) -> u64 {
        0
    }

    /// How long until more than `remaining` can be spent; 0 if that is everything.
    fn reset(&self, state: &Self::State, now_us: u64, remaining: u64) -> u64 {
        // Beyond the capacity there is never more.
        self.wait(state, now_us, remaining + 1).unwrap_or(0)
    }
}

/// An algorithm whose states another engine can tell.
#[cfg(feature = "redis")]
pub(crate) trait Told: Algorithm {
    /// The state that another engine told in `numbers` at `told_us` by its own clock, as it is here at
    /// `now_us`.
    fn state_told(&self, numbers: [u64; 3], told_us: u64, now_us: u64) -> Self::State;

    /// Counts `cost` that was spent already, whether there was room for it or not. What is above twice
    /// the limit is not counted, so that products stay in range.
    fn count(&self, state: &mut Self::State, cost: u64);
}
