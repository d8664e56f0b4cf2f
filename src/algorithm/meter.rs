//! The meter of token bucket and leaky bucket: a bucket that drains at a steady pace.
//!
//! A request pours its cost in; there is room for the burst. A token bucket counts the same bucket
//! from the other end: tokens are the room that is left. This is the generic cell rate algorithm
//! (ITU-T I.371, annex A) on whole numbers: the state is the instant at which the bucket runs
//! empty, the theoretical arrival time, with the fraction of a tick by which that is rounded up.
//!
//! The bucket is measured in drops. They are chosen so that a unit of cost is a whole number of
//! drops and so is what drains in a tick; nothing is ever rounded, and no token is lost or minted
//! over any length of time. With `limit` units per `period` ticks, reduced to lowest terms, a unit
//! is `period` drops and a tick drains `limit`.

use super::{Algorithm, GivenBack, MAX_PRODUCT, Spent, TICKS_US};
use crate::quota::{MAX_SPAN_US, Quota, QuotaError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Meter {
    pace: Pace,
    /// How many drops may be in the bucket without delaying anybody.
    burst: u64,
    /// How many drops may be in it at all: the burst, and for a shaping bucket its queue.
    capacity: u64,
    /// How many ticks a full bucket takes to run empty.
    full_ticks: u64,
    /// How many ticks the instant on record can be ahead before it must be a clock that stepped
    /// back.
    farthest_ticks: i64,
    /// The allotment that clients are told: units, and the microseconds in which they come back.
    shown: (u64, u64),
}

/// How fast a bucket drains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) tick_us: u64,
    pub(crate) drops_per_tick: u64,
    pub(crate) drops_per_unit: u64,
}

/// What the numbers of a state mean, and how much a full bucket held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) pace: Pace,
    /// How many units a full bucket holds, rounded up.
    pub(crate) units: u64,
}

/// What was given back to a bucket. It drains what came first, so what is left of a charge is known by
/// how much lies beneath it; and that is less once something beneath it is given back. So the drops
/// that are given back are counted, and each charge remembers how many they were when it was made.
///
/// After as long as a full bucket takes to drain, whatever was charged before the last give-back has
/// drained. Charges that are made later leave the mark out; those that were made earlier remember it, and
/// so it is kept for as long again. Nothing is counted where nothing lies above what is given back: of
/// most buckets there never is a mark.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Mark {
    /// How many drops were given back.
    given_back: u64,
    /// How many of them are a unit.
    drops_per_unit: u64,
    /// How long a full bucket takes to drain: by different quotas, the slowest of those that left the mark.
    span_us: u64,
    /// Until when it is kept.
    pub(crate) until_us: u64,
}

/// The most drops that are counted as given back, and the greatest height: doubles are exact up to here.
/// Beyond it nothing is certain of a charge but that its own drops did not drain before it was made.
const MOST_GIVEN_BACK: u64 = 1 << 53;

/// How many drops are in a bucket at the beginning of a tick. Fewer than none are what is missing
/// to a whole tick's; then it ran empty within the tick before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    tick: i64,
    level: i64,
}

impl Meter {
    /// A bucket that rejects what does not fit.
    pub(crate) fn new(quota: &Quota) -> Result<Self, QuotaError> {
        Self::shaping(quota, 0)
    }

    /// A bucket that lets up to `max_delay_us` of work queue above its burst.
    pub(crate) fn shaping(quota: &Quota, max_delay_us: u64) -> Result<Self, QuotaError> {
        quota.validate()?;
        let period_us = quota.period().fixed_us()?;
        if max_delay_us > MAX_SPAN_US {
            return Err(QuotaError::TooLong);
        }
        let mut refused = QuotaError::TooLarge;
        for tick_us in TICKS_US {
            match Self::with_tick(quota, period_us, max_delay_us, tick_us) {
                Ok(meter) => return Ok(meter),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    fn with_tick(
        quota: &Quota,
        period_us: u64,
        max_delay_us: u64,
        tick_us: u64,
    ) -> Result<Self, QuotaError> {
        let bounded = |product: u128| match u64::try_from(product) {
            Ok(product) if product <= MAX_PRODUCT => Ok(product),
            _ => Err(QuotaError::TooLarge),
        };
        let limit = u128::from(quota.limit()) * u128::from(tick_us);
        let divisor = gcd(limit, u128::from(period_us));
        let pace = Pace {
            tick_us,
            drops_per_tick: bounded(limit / divisor)?,
            drops_per_unit: bounded(u128::from(period_us) / divisor)?,
        };
        let burst = u128::from(quota.capacity()) * u128::from(pace.drops_per_unit);
        if !max_delay_us.is_multiple_of(tick_us) {
            return Err(QuotaError::TooLarge);
        }
        let queue = u128::from(max_delay_us / tick_us) * u128::from(pace.drops_per_tick);
        let capacity = bounded(burst + queue)?;
        let fill_ticks = capacity.div_ceil(pace.drops_per_tick);
        let fill_us = u128::from(fill_ticks) * u128::from(tick_us);
        if fill_us > u128::from(MAX_SPAN_US) {
            return Err(QuotaError::TooLong);
        }
        let terms = Terms { pace, units: capacity.div_ceil(pace.drops_per_unit) };
        let units = capacity / pace.drops_per_unit;
        let shown = if units > quota.limit() {
            (units, fill_us as u64)
        } else {
            (quota.limit(), period_us)
        };
        Ok(Self {
            pace,
            burst: burst as u64,
            capacity,
            full_ticks: fill_ticks,
            farthest_ticks: terms.farthest_ticks(),
            shown,
        })
    }

    pub(crate) const fn pace(&self) -> Pace {
        self.pace
    }

    /// The same for a bucket whose quota is looked up per request. It may hold more than a full
    /// one of the present quota, so how far ahead it is says nothing about the clock; instead, the
    /// terms that it was counted by are kept, for [`take_over`](Self::take_over).
    pub(crate) fn varying(mut self) -> Self {
        self.farthest_ticks = MAX_PRODUCT.div_ceil(self.pace.drops_per_tick) as i64;
        self
    }

    /// How long so many drops take to drain, rounded down.
    fn time_of(&self, drops: u64) -> u64 {
        let ticks_us = u128::from(drops) * u128::from(self.pace.tick_us);
        let us = ticks_us / u128::from(self.pace.drops_per_tick);
        u64::try_from(us).unwrap_or(u64::MAX)
    }

    /// The time from `now_us` until `drops` have drained, in microseconds.
    #[inline]
    fn time_to_drain(&self, state: &State, now_us: u64, drops: u64) -> u64 {
        if drops == 0 {
            return 0;
        }
        (state.tick as u64 + self.pace.ticks_to_drain(drops)) * self.pace.tick_us - now_us
    }

    /// Takes over a state that is on record as counted by other terms, those of another quota: what was
    /// used stays used. Returns whether it changed; then it has to be kept like one that
    /// [`settle`](Algorithm::settle) re-anchored.
    #[inline(never)]
    pub(crate) fn take_over(&self, state: &mut State, terms: Terms, now_us: u64) -> bool {
        let pace = terms.pace;
        let now = self.pace.ticks(now_us) as i64;
        let ahead = state.tick - pace.ticks(now_us) as i64;
        if ahead > terms.farthest_ticks() {
            *state = State { tick: now, level: self.capacity as i64 };
            return true;
        }
        if pace == self.pace {
            return false;
        }
        let drops = i128::from(ahead) * i128::from(pace.drops_per_tick) + i128::from(state.level);
        let drops = u128::try_from(drops).unwrap_or(0);
        let converted = (drops * u128::from(self.pace.drops_per_unit))
            .div_ceil(u128::from(pace.drops_per_unit));
        if converted == 0 {
            *state = State { tick: now, level: 0 };
            return false;
        }
        // A level is that of the beginning of a tick, before what has drained in it since. What was taken
        // over is that of the beginning of one of its own ticks.
        let since_us = (now_us % self.pace.tick_us).saturating_sub(now_us % pace.tick_us);
        let since_us = u128::from(since_us);
        let drained =
            (since_us * u128::from(self.pace.drops_per_tick)).div_ceil(self.pace.tick_us.into());
        let level = converted + drained;
        let countable = u128::from(self.countable());
        *state = State { tick: now, level: level.min(countable) as i64 };
        // What is on record stays where it would be forgotten, for so much rejects the request anyway,
        // and where it would drain slower from now on, until something is charged.
        level <= countable && self.pace.is_as_fast_as(pace)
    }

    /// The state as it is stored: the instant at which the bucket runs empty, rounded up to a whole
    /// tick, and how many drops less than a whole tick's the last tick has to drain.
    #[inline]
    pub(crate) fn words_of(&self, state: &State) -> (u64, u64) {
        let pace = self.pace;
        let ticks = pace.ticks_to_drain(state.level());
        if ticks == 0 {
            // Empty since whenever: a clock that is put back does not fill it.
            return (0, 0);
        }
        let empty_at_us = (state.tick as u64 + ticks) * pace.tick_us;
        (empty_at_us, ticks * pace.drops_per_tick - state.level())
    }

    /// The height of a charge after which so many drops were in a bucket whose mark counts. One that could
    /// outlive the mark, by another quota, leaves it out, which is safe.
    pub(crate) fn height_with(&self, mark: &Mark, level: u64) -> u64 {
        if self.horizon_us() > mark.span_us {
            return level;
        }
        level.saturating_add(mark.given_back).min(MOST_GIVEN_BACK)
    }

    /// What another engine needs to know to decide the same.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self) -> [u64; 6] {
        let Pace { tick_us, drops_per_tick, drops_per_unit } = self.pace;
        let farthest = self.terms().farthest_ticks() as u64;
        [tick_us, drops_per_tick, drops_per_unit, self.capacity, farthest, self.countable()]
    }

    /// How many units are on record as full: more where a bucket holds more, by another quota, or it
    /// would look like that of a clock that was put back.
    pub(crate) fn units_of(&self, state: &State) -> u64 {
        self.terms().units.max(state.level().div_ceil(self.pace.drops_per_unit))
    }

    /// What the numbers of its states mean.
    pub(crate) fn terms(&self) -> Terms {
        Terms { pace: self.pace, units: self.capacity.div_ceil(self.pace.drops_per_unit) }
    }

    /// The most drops that can be counted: what takes longer to drain than any quota may is as good
    /// as for ever.
    fn countable(&self) -> u64 {
        let longest =
            u128::from(MAX_SPAN_US / self.pace.tick_us) * u128::from(self.pace.drops_per_tick);
        longest.min(MAX_PRODUCT.into()) as u64
    }
}

impl Algorithm for Meter {
    type State = State;

    #[inline]
    fn settle(&self, state: &mut State, now_us: u64) -> bool {
        let tick = self.pace.ticks(now_us) as i64;
        // No longer time makes a difference, and so the product stays small.
        let farthest = self.farthest_ticks;
        let elapsed = (tick - state.tick).min(farthest + 1).max(-farthest - 1);
        let drops_per_tick = self.pace.drops_per_tick as i64;
        let level = (state.level - elapsed * drops_per_tick).max(0);
        let stepped_back = level > farthest * drops_per_tick;
        *state = State { tick, level: if stepped_back { self.capacity as i64 } else { level } };
        stepped_back
    }

    #[inline]
    fn remaining(&self, state: &State, _now_us: u64) -> u64 {
        self.capacity.saturating_sub(state.level()) / self.pace.drops_per_unit
    }

    #[inline]
    fn wait(&self, state: &State, now_us: u64, cost: u64) -> Option<u64> {
        let drops =
            cost.checked_mul(self.pace.drops_per_unit).filter(|&drops| drops <= self.capacity)?;
        let excess = (state.level() + drops).saturating_sub(self.capacity);
        Some(self.time_to_drain(state, now_us, excess))
    }

    #[inline]
    fn charge(&self, state: &mut State, _now_us: u64, cost: u64) {
        state.level += (cost * self.pace.drops_per_unit) as i64;
    }

    #[inline]
    fn height(&self, state: &State) -> u64 {
        state.level()
    }

    fn take_back(&self, state: &mut State, _now_us: u64, cost: u64) {
        let drops = cost.saturating_mul(self.pace.drops_per_unit);
        state.level = state.level().saturating_sub(drops) as i64;
    }

    fn refund(
        &self,
        state: &mut State,
        now_us: u64,
        spent: &Spent,
        mark: Option<&mut Mark>,
    ) -> GivenBack {
        let pace = self.pace;
        let known = mark.as_deref().copied().filter(|mark| mark.until_us > now_us);
        let known = known.unwrap_or_default();
        let given_back = known.given_back(pace.drops_per_unit);
        let sunk = if known.counts_at(spent.time_us) { given_back } else { 0 };
        let drops = spent.cost.saturating_mul(pace.drops_per_unit);
        // What was spent lay on top of all that was in the bucket. It began to drain no sooner than it
        // was spent, whatever was beneath it.
        let height = spent.height.saturating_sub(sunk).max(drops).min(self.capacity);
        let elapsed = pace.ticks(now_us).saturating_sub(pace.ticks(spent.time_us));
        let drained = elapsed.min(self.full_ticks) * pace.drops_per_tick;
        let top = height.saturating_sub(drained);
        let level = state.level();
        let left = drops.min(top).min(level);
        let mut counted = 0;
        if left > 0 && level > top {
            // What lies above it sinks.
            let Some(mark) = mark else { return GivenBack::default() };
            counted = left.min(MOST_GIVEN_BACK - given_back);
            let span_us = known.span_us.max(self.horizon_us());
            *mark = Mark {
                given_back: given_back + counted,
                drops_per_unit: pace.drops_per_unit,
                span_us,
                until_us: known.until_us.max(now_us + 2 * span_us),
            };
        }
        state.level = (level - left) as i64;
        GivenBack { by_us: self.time_of(left), counted }
    }

    #[inline]
    fn reset(&self, state: &State, now_us: u64, remaining: u64) -> u64 {
        let drops = (remaining + 1) * self.pace.drops_per_unit;
        if drops > self.capacity {
            return 0;
        }
        self.time_to_drain(state, now_us, (state.level() + drops).saturating_sub(self.capacity))
    }

    #[inline]
    fn delay(&self, state: &State, now_us: u64, cost: u64) -> u64 {
        // Most meters have no queue.
        if self.capacity == self.burst {
            return 0;
        }
        // Its turn is when all but the burst has drained.
        let level = state.level() + cost * self.pace.drops_per_unit;
        self.time_to_drain(state, now_us, level.saturating_sub(self.burst))
    }

    fn fresh_at(&self, state: &State) -> u64 {
        self.words_of(state).0
    }

    fn allotment(&self) -> (u64, u64) {
        self.shown
    }

    fn horizon_us(&self) -> u64 {
        self.full_ticks * self.pace.tick_us
    }
}

#[cfg(feature = "redis")]
impl super::Told for Meter {
    /// It is told how many drops are in the bucket.
    fn state_told(&self, [level, ..]: [u64; 3], _told_us: u64, now_us: u64) -> State {
        State { tick: self.pace.ticks(now_us) as i64, level: level as i64 }
    }

    fn count(&self, state: &mut State, cost: u64) {
        let drops = cost.saturating_mul(self.pace.drops_per_unit);
        let counted = state.level().saturating_add(drops).min(2 * self.capacity);
        state.level = state.level().max(counted) as i64;
    }
}

impl Mark {
    /// What another engine tells of a mark that counts.
    #[cfg(feature = "redis")]
    pub(crate) fn told(given_back: u64, span_us: u64) -> Self {
        Self { given_back, span_us, ..Self::default() }
    }

    /// Whether it counts for what is charged at some time.
    pub(crate) fn counts_at(&self, time_us: u64) -> bool {
        time_us + self.span_us <= self.until_us
    }

    /// How many drops were given back, if so many are a unit.
    fn given_back(&self, drops_per_unit: u64) -> u64 {
        if self.given_back == 0 || self.drops_per_unit == drops_per_unit {
            self.given_back
        } else {
            MOST_GIVEN_BACK
        }
    }
}

impl State {
    /// The drops in a bucket whose state is settled.
    #[inline]
    const fn level(&self) -> u64 {
        self.level as u64
    }
}

impl Terms {
    /// How many ticks ahead a state can be. No bucket takes longer than a full one to run empty; twice
    /// as long is a clock that stepped back by less than a full refill, and then it just waits.
    const fn farthest_ticks(&self) -> i64 {
        let drops = self.units * self.pace.drops_per_unit;
        2 * drops.div_ceil(self.pace.drops_per_tick) as i64
    }
}

impl Pace {
    /// A state that was stored as [`words`](Meter::words_of).
    #[inline]
    pub(crate) fn state(&self, empty_at_us: u64, spare: u64) -> State {
        State { tick: self.ticks(empty_at_us) as i64, level: -(spare as i64) }
    }

    #[inline]
    const fn ticks(&self, us: u64) -> u64 {
        // By far the most quotas count in microseconds, and a division is dear.
        if self.tick_us == 1 { us } else { us / self.tick_us }
    }

    fn is_as_fast_as(&self, other: Self) -> bool {
        self.rate() >= other.rate()
    }

    /// Units per microsecond. It only decides which terms a debt is kept in, so rounding does no harm.
    fn rate(&self) -> f64 {
        self.drops_per_tick as f64 / self.drops_per_unit as f64 / self.tick_us as f64
    }

    #[inline]
    const fn ticks_to_drain(&self, drops: u64) -> u64 {
        if self.drops_per_tick == 1 { drops } else { drops.div_ceil(self.drops_per_tick) }
    }
}

const fn gcd(mut a: u128, mut b: u128) -> u128 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}
