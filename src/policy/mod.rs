//! Policies: one named limit each, and the stacks that they form.

pub(crate) mod stack;

use crate::{
    algorithm::Anchor,
    concurrency::Limit,
    key::{FindKey, Key, KeyExtractor, MissingKey},
    quota::Quota,
    store::Kind,
};
use http::request::Parts;
use std::{borrow::Cow, collections::HashSet, fmt, sync::Arc, time::Duration};

/// One named limit: an algorithm with its quota, whom it counts, what a request costs, and to which
/// requests it applies. `R` is what a request is; for HTTP it is the [`Parts`] of the request.
///
/// ```
/// use http::{Method, request::Parts};
/// use std::time::Duration;
/// use tollgate::{Policy, Quota, key::{Global, Header}};
///
/// let per_key = Policy::token_bucket("per-key", Quota::per_second(100).burst(200))
///     .key(Header::from_static("x-api-key"));
/// let writes = Policy::sliding_window("writes", Quota::per_minute(600))
///     .key(Header::from_static("x-api-key"))
///     .when(|parts: &Parts| parts.method != Method::GET)
///     .cost(|parts: &Parts| if parts.uri.path() == "/batch" { 10 } else { 1 });
/// let everybody = Policy::leaky_bucket("everybody", Quota::per_second(1_000))
///     .max_delay(Duration::from_millis(50))
///     .key(Global);
/// # let _: [Policy; 3] = [per_key, writes, everybody];
/// ```
///
/// # Which algorithm
///
/// | | remembers | admits at most, in any stretch of time `t` |
/// |---|---|---|
/// | [`token_bucket`](Self::token_bucket) | 2 numbers | `burst + t * limit / period` |
/// | [`leaky_bucket`](Self::leaky_bucket) | 2 numbers | the same; with a maximum delay, evenly spaced |
/// | [`sliding_log`](Self::sliding_log) | a time per unit | `limit` in a period, exactly |
/// | [`sliding_window`](Self::sliding_window) | 3 numbers | about `limit` in a period, never `2 * limit` |
/// | [`fixed_window`](Self::fixed_window) | 2 numbers | `limit` in each window, `2 * limit` across a boundary |
///
/// Quotas too large to be counted in microseconds are counted in milliseconds or seconds; there `t`
/// is rounded up by one.
///
/// # When the clock steps back
///
/// A clock that steps back by less than a full refill never grants anything: policies wait until it
/// has caught up. After a larger step they count anew from the present, with everything that was
/// used still used.
pub struct Policy<R: ?Sized = Parts> {
    pub(crate) name: Cow<'static, str>,
    pub(crate) counts: Counts,
    pub(crate) key: Option<Arc<dyn FindKey<R>>>,
    pub(crate) missing_key: MissingKey,
    pub(crate) conditions: Vec<Condition<R>>,
    pub(crate) exempt: HashSet<Key>,
    pub(crate) cost: Cost<R>,
    pub(crate) quota_for: Option<QuotaFor<R>>,
    pub(crate) limit_for: Option<LimitFor<R>>,
    /// In how many parts it counts.
    pub(crate) parts: u32,
    #[cfg(feature = "redis")]
    pub(crate) failure_mode: FailureMode,
    /// An option that the algorithm does not have.
    pub(crate) misplaced: Option<&'static str>,
}

pub(crate) type Condition<R> = Box<dyn Fn(&R) -> bool + Send + Sync>;
pub(crate) type QuotaFor<R> = Box<dyn Fn(&R) -> Option<Quota> + Send + Sync>;
pub(crate) type LimitFor<R> = Box<dyn Fn(&R) -> Option<u32> + Send + Sync>;

/// What a policy answers when the store that counts for it is down, late or full.
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureMode {
    /// This instance counts alone, with the same algorithm and its share of the quota: the quota
    /// divided by the store's [`instances`](crate::redis::RedisStoreBuilder::instances).
    #[default]
    Local,
    /// Requests pass without being counted.
    Open,
    /// Requests are turned away with 503; for gRPC, status 14, `UNAVAILABLE`.
    Closed,
}

/// What a policy counts.
#[derive(Clone, Debug)]
pub(crate) enum Counts {
    /// Requests over time.
    Rate(Kind, Quota),
    /// Requests in flight.
    InFlight(InFlight),
}

/// How many requests may be in flight.
#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    pub(crate) limit: Limit,
    /// How many more may wait, and for how long.
    pub(crate) queue: Option<(usize, Duration)>,
    /// Whether each instance has slots of its own.
    pub(crate) per_instance: bool,
}

impl Counts {
    /// One of so many parts of it, if that is possible.
    fn part(&self, parts: u32) -> Option<Self> {
        match self {
            Self::Rate(kind, quota) => {
                let least = quota.limit().min(quota.capacity());
                let fits = parts > 0 && least >= u64::from(parts);
                fits.then(|| Self::Rate(*kind, quota.share(parts)))
            }
            Self::InFlight(InFlight { limit: Limit::Fixed(limit), queue, per_instance: false }) => {
                let limit = limit.checked_div(parts).filter(|limit| *limit > 0)?;
                let limit = Limit::Fixed(limit);
                Some(Self::InFlight(InFlight { limit, queue: *queue, per_instance: false }))
            }
            Self::InFlight(_) => None,
        }
    }
}

/// What a request costs.
pub(crate) enum Cost<R: ?Sized> {
    One,
    Of(Box<dyn Fn(&R) -> u64 + Send + Sync>),
}

impl<R: ?Sized> Policy<R> {
    /// Tokens come back at a steady rate, up to the burst; a request takes its cost in tokens. An
    /// idle caller can spend a whole burst at once. A new key has a full bucket.
    #[must_use]
    pub fn token_bucket(name: impl Into<Cow<'static, str>>, quota: Quota) -> Self {
        Self::rate(name, Kind::TokenBucket, quota)
    }

    /// Requests fill a bucket that leaks at a steady rate; one that would make it overflow is
    /// rejected. With [`max_delay`](Self::max_delay), one that would be too early is held back
    /// instead, first come first served.
    #[must_use]
    pub fn leaky_bucket(name: impl Into<Cow<'static, str>>, quota: Quota) -> Self {
        Self::rate(name, Kind::LeakyBucket(Duration::ZERO), quota)
    }

    /// Counts from zero in each window. Windows begin at whole multiples of the period since the
    /// Unix epoch, at the calendar's boundaries in UTC, or [at a key's first
    /// request](Self::from_first_hit).
    #[must_use]
    pub fn fixed_window(name: impl Into<Cow<'static, str>>, quota: Quota) -> Self {
        Self::rate(name, Kind::FixedWindow(Anchor::Epoch), quota)
    }

    /// Counts this window and weights the last one by how much of it still lies within a period of
    /// now. A good approximation of the sliding log for the memory of three numbers.
    #[must_use]
    pub fn sliding_window(name: impl Into<Cow<'static, str>>, quota: Quota) -> Self {
        Self::rate(name, Kind::SlidingWindow, quota)
    }

    /// Remembers when each unit was spent: exact, for 8 bytes a unit. For limits up to 100,000.
    #[must_use]
    pub fn sliding_log(name: impl Into<Cow<'static, str>>, quota: Quota) -> Self {
        Self::rate(name, Kind::SlidingLog, quota)
    }

    /// A key may have so many requests in flight at the same time, whatever their rate: each holds a slot
    /// until its response body has ended. See [`concurrency`](crate::concurrency).
    ///
    /// The limit is a number or, found by latency, [`Adaptive`](crate::concurrency::Adaptive).
    #[must_use]
    pub fn concurrency(name: impl Into<Cow<'static, str>>, limit: impl Into<Limit>) -> Self {
        let limit = limit.into();
        let per_instance = matches!(limit, Limit::Adaptive(_));
        Self::new(name, Counts::InFlight(InFlight { limit, queue: None, per_instance }))
    }

    fn rate(name: impl Into<Cow<'static, str>>, kind: Kind, quota: Quota) -> Self {
        Self::new(name, Counts::Rate(kind, quota))
    }

    fn new(name: impl Into<Cow<'static, str>>, counts: Counts) -> Self {
        Self {
            name: name.into(),
            counts,
            key: None,
            missing_key: MissingKey::default(),
            conditions: Vec::new(),
            exempt: HashSet::new(),
            cost: Cost::One,
            quota_for: None,
            limit_for: None,
            parts: 1,
            #[cfg(feature = "redis")]
            failure_mode: FailureMode::default(),
            misplaced: None,
        }
    }

    /// Windows begin at a key's first request instead of at fixed times. For fixed windows of fixed
    /// length only.
    #[must_use]
    pub fn from_first_hit(mut self) -> Self {
        match &mut self.counts {
            Counts::Rate(Kind::FixedWindow(anchor), _) => *anchor = Anchor::FirstHit,
            _ => self.misplaced = Some("from_first_hit"),
        }
        self
    }

    /// Holds requests back for up to so long, to space them evenly, instead of rejecting them at
    /// once. For leaky buckets only. Default: zero, which holds nothing back.
    ///
    /// With `Quota::per_second(5).burst(1)` and a maximum delay of 20 seconds, of a hundred requests
    /// that come at once the first goes on at once and then one every 200 ms. Whoever is cancelled
    /// while waiting gives up its place, and those behind move up.
    ///
    /// Use only [`Limiter::ready`](crate::Limiter::ready) and the layer with it: `check` takes a turn
    /// without standing in line, and after a `reset` newcomers do not wait for those in line.
    #[must_use]
    pub fn max_delay(mut self, max_delay: Duration) -> Self {
        match &mut self.counts {
            Counts::Rate(Kind::LeakyBucket(delay), _) => *delay = max_delay,
            _ => self.misplaced = Some("max_delay"),
        }
        self
    }

    /// Lets up to so many more requests of a key wait for a slot, for up to so long, first come first
    /// served. For concurrency limits only. Default: none waits.
    ///
    /// Whoever gives up while waiting gives up its place. With slots in Redis, each instance has a line of
    /// its own, in the order in which requests found no slot free; whoever is first in it asks again every
    /// 25 ms, or as soon as this instance releases a slot.
    #[must_use]
    pub fn queue(mut self, requests: usize, max_wait: Duration) -> Self {
        match &mut self.counts {
            Counts::InFlight(in_flight) => {
                in_flight.queue = (requests > 0).then_some((requests, max_wait));
            }
            Counts::Rate(..) => self.misplaced = Some("queue"),
        }
        self
    }

    /// Each instance has slots of its own, even if the stack's state is in Redis. For concurrency limits
    /// only. Default: an [`Adaptive`](crate::concurrency::Adaptive) limit is per instance, a number is for the fleet.
    #[must_use]
    pub fn per_instance(mut self) -> Self {
        match &mut self.counts {
            Counts::InFlight(in_flight) => in_flight.per_instance = true,
            Counts::Rate(..) => self.misplaced = Some("per_instance"),
        }
        self
    }

    /// Looks the limit up for each request, such as that of the caller's plan. `None` is the limit that the
    /// policy was made with; 0 turns the request away for good. For concurrency limits only.
    #[must_use]
    pub fn limit_for(mut self, limit: impl Fn(&R) -> Option<u32> + Send + Sync + 'static) -> Self {
        match self.counts {
            Counts::InFlight(_) => self.limit_for = Some(Box::new(limit)),
            Counts::Rate(..) => self.misplaced = Some("limit_for"),
        }
        self
    }

    /// Whom to count. Default: whom the stack counts, see
    /// [`LimiterBuilder::key`](crate::LimiterBuilder::key).
    #[must_use]
    pub fn key(mut self, key: impl KeyExtractor<R>) -> Self {
        self.key = Some(Arc::new(key));
        self
    }

    /// What to do with a request that has no key. Default: [`MissingKey::Reject`].
    #[must_use]
    pub const fn missing_key(mut self, missing_key: MissingKey) -> Self {
        self.missing_key = missing_key;
        self
    }

    /// Applies only to requests that fulfil the condition; several conditions must all be
    /// fulfilled. Default: applies to all.
    #[must_use]
    pub fn when(mut self, condition: impl Fn(&R) -> bool + Send + Sync + 'static) -> Self {
        self.conditions.push(Box::new(condition));
        self
    }

    /// Does not apply to these keys. They must be made like those of the key extractor: those of headers
    /// are bytes, `b"root".as_slice()`, and an [`IpAddr`](std::net::IpAddr) has to have the extractor's
    /// prefix. Default: none is exempt.
    #[must_use]
    pub fn exempt<K: Into<Key>>(mut self, keys: impl IntoIterator<Item = K>) -> Self {
        self.exempt.extend(keys.into_iter().map(Into::into));
        self
    }

    /// Counts each key in so many parts, each with its part of the limit, rounded down; requests take them in
    /// turns. Default: 1.
    ///
    /// It is for keys that nearly all requests have, such as [`Global`](crate::key::Global), on a cluster or
    /// shards: the parts are in different places, where the key would be in one, and keep one server busy.
    /// No more is admitted than by one part. A request may be rejected while another part has some left, by
    /// about the difference of one round; what is told of the limit is told of the part; and a refund may go
    /// to another part than that which was charged.
    #[must_use]
    pub const fn spread(mut self, parts: u32) -> Self {
        self.parts = parts;
        self
    }

    /// What a request costs, in units of the quota, or in slots. 0 is free; more than the quota's
    /// capacity can never be admitted, nor more than 10,000 slots of a fleet. Default: 1.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&R) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Cost::Of(Box::new(cost));
        self
    }

    /// What to answer when the store that counts is down, late or full. Default:
    /// [`FailureMode::Local`].
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub const fn on_store_failure(mut self, mode: FailureMode) -> Self {
        self.failure_mode = mode;
        self
    }

    /// Looks a quota up for each request, such as that of the caller's plan. `None` is the quota
    /// that the policy was made with; to leave a caller unlimited use [`when`](Self::when) or
    /// [`exempt`](Self::exempt).
    ///
    /// The quota should be a matter of the caller; for requests of different kinds make two policies,
    /// with [`when`](Self::when).
    ///
    /// A caller who moves to another quota keeps what it has used. Buckets take any quota; windows
    /// and logs only such as have the period of the policy's own, for what was counted over one
    /// period says nothing about another. A quota that cannot be, for that or another reason (see
    /// [`QuotaError`](crate::QuotaError)), rejects the request as the server's fault.
    #[must_use]
    pub fn quota_for(
        mut self,
        quota: impl Fn(&R) -> Option<Quota> + Send + Sync + 'static,
    ) -> Self {
        match self.counts {
            Counts::Rate(..) => self.quota_for = Some(Box::new(quota)),
            Counts::InFlight(_) => self.misplaced = Some("quota_for"),
        }
        self
    }
}

impl<R: ?Sized> fmt::Debug for Policy<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Policy")
            .field("name", &self.name)
            .field("counts", &self.counts)
            .finish_non_exhaustive()
    }
}
