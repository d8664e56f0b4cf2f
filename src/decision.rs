//! What was decided, in numbers.

use crate::{key::KeyError, priority::Priority};
use smallvec::SmallVec;
#[cfg(feature = "redis")]
use std::sync::Arc;
use std::{error, fmt, time::Duration};

/// The answer to a request that may go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub(crate) time_us: u64,
    pub(crate) delay_us: u64,
    pub(crate) outcomes: Outcomes,
    /// This process stood in for a store elsewhere.
    pub(crate) stood_in: bool,
    /// Who counted what, if not all was counted in one place.
    #[cfg(feature = "redis")]
    pub(crate) origins: Option<Arc<[Origin]>>,
}

/// Who counted for a policy.
#[cfg(feature = "redis")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    pub(crate) policy: &'static str,
    pub(crate) time_us: u64,
    /// It was this process, in place of a store elsewhere.
    pub(crate) stood_in: bool,
}

/// The answer to a request that may not go on. Nothing was charged for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    pub(crate) reason: Reason,
    pub(crate) time_us: u64,
    pub(crate) outcomes: Outcomes,
}

/// Why a request may not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// One or more policies have nothing left for it; their [`Outcome`]s say until when.
    Limited,
    /// It costs more than a policy's whole capacity, so that no wait would ever do.
    TooCostly,
    /// It has no key for a policy that needs one.
    NoKey {
        /// The policy.
        policy: &'static str,
        /// What is missing.
        error: KeyError,
    },
    /// A function that the stack was built with panicked, or gave a quota that cannot be.
    Faulty {
        /// The policy.
        policy: &'static str,
        /// What went wrong. It is not shown to clients.
        message: String,
    },
    /// The store that counts could not be asked, and the policy is one that lets nothing pass then.
    Unavailable {
        /// The policy.
        policy: &'static str,
    },
    /// There is not room for all, and others are more important: a load shedder turned it away.
    Shed {
        /// The load shedder.
        shedder: &'static str,
        /// How important the request is.
        priority: Priority,
        /// When to come back.
        retry_after: Duration,
    },
}

/// What one policy said. Policies that did not apply to the request have no outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    pub(crate) policy: &'static str,
    pub(crate) quota: Allotment,
    pub(crate) remaining: u64,
    pub(crate) cost: u64,
    pub(crate) reset_us: u64,
    /// How long the request has to wait for its turn by this policy; 0 is not at all.
    pub(crate) delay_us: u64,
    /// How high what it was charged stands in its bucket, for giving it back
    /// ([`Spent::height`](crate::algorithm::Spent)); 0 if it was not charged.
    pub(crate) height: u64,
    pub(crate) verdict: Verdict,
}

/// Whether one policy had room for the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Admitted,
    /// Not for so many microseconds, and then yes if nobody else spends anything.
    Wait(u64),
    /// Not now, and nobody knows for how long: all slots are held.
    Full,
    /// Never: the cost is above the capacity.
    Never,
}

/// What a policy gives out, in the terms that clients are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allotment {
    /// At least as much as can remain.
    pub(crate) limit: u64,
    /// The time in which so much comes back; 0 for months, which differ.
    pub(crate) window_us: u64,
}

/// What stands for a window where there is none: slots come back when they are released.
const NO_WINDOW: u64 = u64::MAX;

/// How long to wait for what nobody knows about: soon enough to be of use, and late enough not to be a
/// burden.
const UNKNOWN_WAIT_US: u64 = 1_000_000;

/// Most stacks are no deeper than three; only deeper ones allocate.
pub(crate) type Outcomes = SmallVec<[Outcome; 3]>;

impl Allotment {
    pub(crate) const fn of_slots(limit: u64) -> Self {
        Self { limit, window_us: NO_WINDOW }
    }

    /// Whether it is of requests in flight, rather than of requests over time.
    pub(crate) const fn is_of_slots(&self) -> bool {
        self.window_us == NO_WINDOW
    }
}

impl Decision {
    /// A decision that was made in one place.
    #[inline]
    pub(crate) const fn new(outcomes: Outcomes, time_us: u64, delay_us: u64) -> Self {
        Self {
            time_us,
            delay_us,
            outcomes,
            stood_in: false,
            #[cfg(feature = "redis")]
            origins: None,
        }
    }

    /// What each policy that applied said, in the order of the stack.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// The outcome of the policy nearest its limit: the one that will reject first if requests
    /// like this one go on. `None` if no policy applied.
    #[must_use]
    pub fn tightest(&self) -> Option<&Outcome> {
        tightest(&self.outcomes)
    }

    /// How long the request has to wait for its turn, where a policy shapes traffic. The layer and
    /// [`Limiter::ready`](crate::Limiter::ready) wait by themselves.
    #[must_use]
    pub const fn delay(&self) -> Duration {
        Duration::from_micros(self.delay_us)
    }

    /// When this was decided, since the Unix epoch, by the clock of the store.
    ///
    /// The time is read right before the decision, so of two decisions that are made at the same
    /// moment on two threads, the first may have the later time.
    #[must_use]
    pub const fn time(&self) -> Duration {
        Duration::from_micros(self.time_us)
    }

    /// When this was decided for one of the policies. It is [`time`](Self::time), unless policies are
    /// counted in several places, each of which has a clock of its own.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn time_of(&self, policy: &str) -> Duration {
        let time_us = self.origin_of(policy).map_or(self.time_us, |origin| origin.time_us);
        Duration::from_micros(time_us)
    }

    /// Whether this process answered for one of the policies, because the store that counts for it was out
    /// of reach: against this instance's share, see [`FailureMode`](crate::FailureMode).
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn stood_in_for(&self, policy: &str) -> bool {
        self.origin_of(policy).map_or(self.stood_in, |origin| origin.stood_in)
    }

    #[cfg(feature = "redis")]
    fn origin_of(&self, policy: &str) -> Option<&Origin> {
        self.origins
            .iter()
            .flat_map(|origins| origins.iter())
            .find(|origin| origin.policy == policy)
    }
}

impl Rejection {
    /// The rejection of a request for which not all policies had room.
    pub(crate) fn of_limits(mut outcomes: Outcomes, time_us: u64) -> Self {
        // Nobody has a turn to wait for.
        outcomes.iter_mut().for_each(|outcome| outcome.delay_us = 0);
        let fits = outcomes.iter().all(|outcome| outcome.verdict != Verdict::Never);
        let reason = if fits { Reason::Limited } else { Reason::TooCostly };
        Self { reason, time_us, outcomes }
    }

    /// Why.
    #[must_use]
    pub const fn reason(&self) -> &Reason {
        &self.reason
    }

    /// What each policy that was asked said, in the order of the stack; also those that would have
    /// admitted the request, with what they still have.
    #[must_use]
    pub fn outcomes(&self) -> &[Outcome] {
        &self.outcomes
    }

    /// The names of all policies that rejected the request, in the order of the stack, or that of the load
    /// shedder.
    pub fn policies(&self) -> impl Iterator<Item = &'static str> {
        let alone = match self.reason {
            Reason::NoKey { policy, .. }
            | Reason::Faulty { policy, .. }
            | Reason::Unavailable { policy } => Some(policy),
            Reason::Shed { shedder, .. } => Some(shedder),
            Reason::Limited | Reason::TooCostly => None,
        };
        let rejecting = self.outcomes.iter().filter(|outcome| !outcome.is_admitted());
        alone.into_iter().chain(rejecting.map(Outcome::policy))
    }

    /// The rejecting outcome with the longest wait. `None` if the request was not rejected for a
    /// limit.
    #[must_use]
    pub fn tightest(&self) -> Option<&Outcome> {
        match self.reason {
            Reason::Limited | Reason::TooCostly => tightest(&self.outcomes),
            Reason::NoKey { .. }
            | Reason::Faulty { .. }
            | Reason::Unavailable { .. }
            | Reason::Shed { .. } => None,
        }
    }

    /// After how long the request would be admitted if nobody else spends anything meanwhile: the
    /// longest wait of all rejecting policies, to the microsecond. `None` if no wait would do. Where nobody
    /// knows, a second: if all slots are held, or the store could not be asked. What a load shedder says
    /// is chosen at random from a range, so that those who were turned away don't come back together.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after_us().map(Duration::from_micros)
    }

    /// When this was decided, since the Unix epoch, by the clock of the store.
    #[must_use]
    pub const fn time(&self) -> Duration {
        Duration::from_micros(self.time_us)
    }

    pub(crate) fn retry_after_us(&self) -> Option<u64> {
        match self.reason {
            Reason::Limited => {
                let wait_us = |outcome: &Outcome| match outcome.verdict {
                    Verdict::Full => Some(UNKNOWN_WAIT_US),
                    _ => outcome.wait_us(),
                };
                self.outcomes.iter().filter_map(wait_us).max()
            }
            Reason::Unavailable { .. } => Some(UNKNOWN_WAIT_US),
            Reason::Shed { retry_after, .. } => Some(retry_after.as_micros() as u64),
            Reason::TooCostly | Reason::NoKey { .. } | Reason::Faulty { .. } => None,
        }
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |f: &mut fmt::Formatter<'_>| {
            for (index, policy) in self.policies().enumerate() {
                write!(f, "{}`{policy}`", if index == 0 { " " } else { ", " })?;
            }
            Ok(())
        };
        match &self.reason {
            Reason::Limited => {
                f.write_str("limited by")?;
                named(f)?;
                match self.retry_after() {
                    Some(wait) => write!(f, "; retry after {wait:?}"),
                    None => Ok(()),
                }
            }
            Reason::TooCostly => {
                f.write_str("costs more than the whole capacity of")?;
                named(f)
            }
            Reason::NoKey { policy, error } => write!(f, "no key for policy `{policy}`: {error}"),
            Reason::Faulty { policy, message } => write!(f, "policy `{policy}`: {message}"),
            Reason::Unavailable { policy } => {
                write!(f, "policy `{policy}` could not be asked, and lets nothing pass then")
            }
            Reason::Shed { shedder, priority, retry_after } => {
                write!(f, "shed by `{shedder}` at priority {priority}; retry after {retry_after:?}")
            }
        }
    }
}

impl error::Error for Rejection {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &self.reason {
            Reason::NoKey { error, .. } => Some(error),
            Reason::Limited
            | Reason::TooCostly
            | Reason::Faulty { .. }
            | Reason::Unavailable { .. }
            | Reason::Shed { .. } => None,
        }
    }
}

impl Outcome {
    /// What stands for a policy until a store has answered.
    #[inline]
    pub(crate) const fn open(policy: &'static str, quota: Allotment, cost: u64) -> Self {
        let verdict = Verdict::Never;
        Self { policy, quota, cost, remaining: 0, reset_us: 0, delay_us: 0, height: 0, verdict }
    }

    /// The policy's name.
    #[must_use]
    pub const fn policy(&self) -> &'static str {
        self.policy
    }

    /// What clients are told as the limit: the larger of limit and burst, or all that fits into the
    /// queue of a leaky bucket that shapes. With a burst below the limit, less can remain.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.quota.limit
    }

    /// What is left to spend now, in whole units, after this request.
    #[must_use]
    pub const fn remaining(&self) -> u64 {
        self.remaining
    }

    /// What this request costs.
    #[must_use]
    pub const fn cost(&self) -> u64 {
        self.cost
    }

    /// How long until more than [`remaining`](Self::remaining) can be spent; zero if everything can
    /// be spent already.
    #[must_use]
    pub const fn reset_after(&self) -> Duration {
        Duration::from_micros(self.reset_us)
    }

    /// Whether this policy had room for the request.
    #[must_use]
    pub const fn is_admitted(&self) -> bool {
        matches!(self.verdict, Verdict::Admitted)
    }

    /// After how long this policy would have room for the request. `None` if it had room, never will, or
    /// if nobody knows, as with slots.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.wait_us().map(Duration::from_micros)
    }

    fn wait_us(&self) -> Option<u64> {
        match self.verdict {
            Verdict::Wait(wait) => Some(wait),
            Verdict::Admitted | Verdict::Full | Verdict::Never => None,
        }
    }

    /// Whether this policy limits how many requests are in flight, rather than how many come over time.
    /// [`limit`](Self::limit), [`remaining`](Self::remaining) and [`cost`](Self::cost) are in slots then.
    #[must_use]
    pub const fn is_concurrency(&self) -> bool {
        self.quota.is_of_slots()
    }

    /// Orders outcomes from the loosest to the tightest: any rejection before any admission, the
    /// longer wait before the shorter, then fewer such requests left, then the later reset.
    fn tightness(&self) -> (u64, u64, u64) {
        let wait = match self.verdict {
            // What is held comes back by itself, so requests one after the other never run out of it.
            Verdict::Admitted if self.is_concurrency() => return (0, 0, 0),
            Verdict::Admitted => 0,
            Verdict::Wait(wait) => wait,
            Verdict::Full => UNKNOWN_WAIT_US,
            Verdict::Never => u64::MAX,
        };
        let requests_left = self.remaining / self.cost.max(1);
        (wait, u64::MAX - requests_left, self.reset_us)
    }
}

fn tightest(outcomes: &[Outcome]) -> Option<&Outcome> {
    match outcomes {
        [] => None,
        [only] => Some(only),
        // The first of equals, which `max_by_key` from the back is.
        several => several.iter().rev().max_by_key(|outcome| outcome.tightness()),
    }
}
