//! Where state lives, and the shape of what is asked of it.
//!
//! A store gets the charges of one request and decides them together: all are made or none.

pub(crate) mod local;
#[cfg(feature = "redis")]
pub mod redis;

use crate::{
    algorithm::{Algorithm, Anchor, FixedWindow, GivenBack, Meter, SlidingLog, SlidingWindow},
    decision::Allotment,
    key::Fingerprint,
    quota::{Quota, QuotaError},
};
use smallvec::SmallVec;
use std::time::Duration;

pub use local::LocalStore;

/// Where state is kept.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Store {
    /// In this process.
    Local(LocalStore),
    /// In Redis or Valkey.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    Redis(redis::RedisStore),
    /// In this process, and told to Redis or Valkey in the background.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    Deferred(redis::DeferredStore),
}

impl From<LocalStore> for Store {
    fn from(store: LocalStore) -> Self {
        Self::Local(store)
    }
}

#[cfg(feature = "redis")]
impl From<redis::RedisStore> for Store {
    fn from(store: redis::RedisStore) -> Self {
        Self::Redis(store)
    }
}

#[cfg(feature = "redis")]
impl From<redis::DeferredStore> for Store {
    fn from(store: redis::DeferredStore) -> Self {
        Self::Deferred(store)
    }
}

/// An algorithm with its quota: all that a store needs to know of a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    Meter(Meter),
    FixedWindow(FixedWindow),
    SlidingWindow(SlidingWindow),
    SlidingLog(SlidingLog),
}

/// Which algorithm, before it is given a quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    TokenBucket,
    /// With how long a request may be held back; zero polices.
    LeakyBucket(Duration),
    FixedWindow(Anchor),
    SlidingWindow,
    SlidingLog,
}

/// Which policy is to charge a request, and to whom.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    /// Whom the policy counts.
    pub(crate) fingerprint: Fingerprint,
    /// The index of the policy in its stack.
    pub(crate) policy: u32,
    /// Which of the stack's key spaces the policy counts in.
    pub(crate) space: u32,
    /// The rule to hold the request against, counted from 1 among the bill's own; 0 is the policy's.
    pub(crate) rule: u32,
}

/// The slots that a request asks for by one policy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// Whom the policy counts.
    pub(crate) fingerprint: Fingerprint,
    /// The index of the policy among those that limit concurrency.
    pub(crate) policy: u32,
    /// How many slots there are.
    pub(crate) limit: u64,
    /// How many the request takes.
    pub(crate) cost: u64,
    /// Whether they are those of this process, wherever else state is.
    pub(crate) per_instance: bool,
}

/// All that one request is to be charged. Charges are in ascending order of their spaces, and those
/// of one space have one fingerprint. Beside it is an outcome for each charge, with its cost, where
/// the store fills in what it says to that.
#[derive(Clone, Debug, Default)]
pub(crate) struct Bill {
    pub(crate) charges: SmallVec<[Charge; 3]>,
    /// The slots that it asks for, whose outcomes are behind those of the charges.
    pub(crate) slots: SmallVec<[Slot; 1]>,
    /// Rules of quotas that were looked up for this request; behind each that of this instance's
    /// share of it, if the state is elsewhere.
    pub(crate) rules: Vec<Rule>,
    /// Whether it is what failure modes made of another one.
    pub(crate) stands_in: bool,
}

/// What came of giving back each charge of a bill.
pub(crate) type Refunds = SmallVec<[GivenBack; 3]>;

/// Whether a decision takes what it grants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Charge,
    Peek,
}

#[cfg(feature = "redis")]
impl Bill {
    /// The slots of this process, which come first.
    pub(crate) fn slots_here(&self) -> &[Slot] {
        &self.slots[..self.slots.partition_point(|slot| slot.per_instance)]
    }

    /// The slots of the fleet.
    pub(crate) fn slots_elsewhere(&self) -> &[Slot] {
        &self.slots[self.slots_here().len()..]
    }
}

impl Charge {
    pub(crate) const fn policy(&self) -> usize {
        self.policy as usize
    }

    pub(crate) const fn space(&self) -> usize {
        self.space as usize
    }

    /// The rule among the bill's own, if it is one of those.
    pub(crate) fn rule<'a>(&self, rules: &'a [Rule]) -> Option<&'a Rule> {
        (self.rule > 0).then(|| &rules[self.rule as usize - 1])
    }
}

impl Rule {
    pub(crate) fn new(kind: Kind, quota: &Quota) -> Result<Self, QuotaError> {
        Ok(match kind {
            Kind::TokenBucket => Self::Meter(Meter::new(quota)?),
            Kind::LeakyBucket(max_delay) => {
                let max_delay_us = u64::try_from(max_delay.as_micros());
                let max_delay_us = max_delay_us.map_err(|_| QuotaError::TooLong)?;
                Self::Meter(Meter::shaping(quota, max_delay_us)?)
            }
            Kind::FixedWindow(anchor) => Self::FixedWindow(FixedWindow::new(quota, anchor)?),
            Kind::SlidingWindow => Self::SlidingWindow(SlidingWindow::new(quota)?),
            Kind::SlidingLog => Self::SlidingLog(SlidingLog::new(quota)?),
        })
    }

    /// The same for a policy whose quota is looked up per request.
    pub(crate) fn varying(self) -> Self {
        match self {
            Self::Meter(meter) => Self::Meter(meter.varying()),
            other => other,
        }
    }

    /// How far ahead the instant can be from which on a state can be forgotten.
    pub(crate) fn horizon_us(&self) -> u64 {
        match self {
            Self::Meter(meter) => meter.horizon_us(),
            Self::FixedWindow(window) => window.horizon_us(),
            Self::SlidingWindow(window) => window.horizon_us(),
            Self::SlidingLog(log) => log.horizon_us(),
        }
    }

    pub(crate) fn allotment(&self) -> Allotment {
        let (limit, window_us) = match self {
            Self::Meter(meter) => meter.allotment(),
            Self::FixedWindow(window) => window.allotment(),
            Self::SlidingWindow(window) => window.allotment(),
            Self::SlidingLog(log) => log.allotment(),
        };
        Allotment { limit, window_us }
    }

    /// What another engine needs to know to decide the same; what the numbers are is said where the
    /// other engine reads them.
    #[cfg(feature = "redis")]
    pub(crate) fn numbers(&self) -> [u64; 6] {
        match self {
            Self::Meter(meter) => meter.numbers(),
            Self::FixedWindow(window) => window.numbers(),
            Self::SlidingWindow(window) => window.numbers(),
            Self::SlidingLog(log) => log.numbers(),
        }
    }
}
