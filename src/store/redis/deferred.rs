//! A store that is told what was decided, rather than asked: its settings, and how that goes.

use super::{ConfigError, RedisStore};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// State that is decided upon in this process and shared by the fleet all the same, a moment later: what
/// was admitted is told to Redis or Valkey in the background, and how things stand there is taken over
/// from its answers. No request waits for the store, so decisions take no longer than local ones, and
/// [`Limiter::check`](crate::Limiter::check) and the tonic interceptor work with it.
///
/// ```no_run
/// use std::time::Duration;
/// use tollgate::{Policy, Quota, RateLimitLayer, key::PeerIp, redis::RedisStore};
///
/// let store = RedisStore::builder("redis://10.0.0.1/").namespace("edge").build()?;
/// let layer = RateLimitLayer::builder()
///     .store(store.deferred(Duration::from_millis(100))?)
///     .key(PeerIp::new())
///     .policy(Policy::token_bucket("burst", Quota::per_second(100)))
///     .build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # What it may let through
///
/// An instance learns what others admitted when it tells what it admitted itself: at the latest one
/// interval and one call after that. This is the detection lag. [`health`](Self::health) tells how long it
/// was.
///
/// Until then it decides by what it knows: what it admitted itself counts at once, and the whole limit
/// holds for it alone. So within one lag each instance admits at most what the algorithm allows one that is
/// alone. What all of them admitted on top of the limit is counted, and so it is paid back: a caller who
/// asks steadily gets what the quota says, over times that are long against the lag.
///
/// No more is counted than twice the limit, so that a caller is not locked out for long. Somebody who waits
/// until its limit has come back and then floods all of N instances within one lag gets N times the limit,
/// and pays back one: 2.5 times the quota in the long run on five instances. A window forgets what was
/// counted when it is over, and gives out up to N times the limit to those who flood it as it begins.
///
/// Where that is too much, ask the store for every request: without `deferred`.
///
/// # When the store is out of reach
///
/// When its circuit breaker opens, policies answer by their [failure
/// modes](crate::Policy::on_store_failure), for requests of which any key is kept there. What was not told
/// by then is [lost](DeferredHealth::lost): a call that failed may have been counted, and is not made
/// again. What is admitted meanwhile is not told later.
///
/// # What cannot be deferred
///
/// Sliding logs, whose point is that they are exact, and limits of requests in flight that are not
/// [per instance](crate::Policy::per_instance), since these are held rather than counted.
#[derive(Clone, Debug)]
pub struct DeferredStore {
    pub(crate) store: RedisStore,
    pub(crate) interval: Duration,
    pub(crate) tally: Arc<Tally>,
}

/// How it goes with telling a [`DeferredStore`], by all limiters that have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeferredHealth {
    /// How many sums were told so far: of the requests of one key and policy in an interval, one.
    pub told: u64,
    /// How many sums were not told, because the store did not answer, or there were too many to keep. Some
    /// of them may have been counted.
    pub lost: u64,
    /// How long after it was admitted the oldest request of the last interval was counted.
    pub lag: Duration,
    /// The longest that this ever was.
    pub longest_lag: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Tally {
    told: AtomicU64,
    lost: AtomicU64,
    lag_us: AtomicU64,
    longest_lag_us: AtomicU64,
}

impl RedisStore {
    /// The same state, but requests are decided in this process, and the store is told of them every
    /// `interval`: 1 ms to 60 s.
    ///
    /// The shorter, the less is admitted beyond the limit; the longer, the fewer calls. What
    /// [`DeferredStore`] says of both is worth a look before this is used.
    ///
    /// # Errors
    ///
    /// [`ConfigError::OutOfRange`] if the interval is too short or too long.
    pub fn deferred(self, interval: Duration) -> Result<DeferredStore, ConfigError> {
        if !(Duration::from_millis(1)..=Duration::from_secs(60)).contains(&interval) {
            return Err(ConfigError::OutOfRange { option: "interval", range: "1 ms to 60 s" });
        }
        Ok(DeferredStore { store: self, interval, tally: Arc::default() })
    }
}

impl DeferredStore {
    /// How it goes.
    #[must_use]
    pub fn health(&self) -> DeferredHealth {
        let Tally { told, lost, lag_us, longest_lag_us } = &*self.tally;
        DeferredHealth {
            told: told.load(Relaxed),
            lost: lost.load(Relaxed),
            lag: Duration::from_micros(lag_us.load(Relaxed)),
            longest_lag: Duration::from_micros(longest_lag_us.load(Relaxed)),
        }
    }
}

impl Tally {
    pub(crate) fn told(&self, sums: usize) {
        self.told.fetch_add(sums as u64, Relaxed);
    }

    pub(crate) fn lost(&self, sums: usize) {
        self.lost.fetch_add(sums as u64, Relaxed);
    }

    pub(crate) fn lagged(&self, us: u64) {
        self.lag_us.store(us, Relaxed);
        self.longest_lag_us.fetch_max(us, Relaxed);
    }
}
