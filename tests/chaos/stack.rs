//! Random stacks of policies, and requests to them.

use crate::{
    checker::Law,
    dice::Dice,
    support::{stacks::Algorithm, us},
};
use tollgate::{FailureMode, Limiter, Policy, Quota, key::Key, redis::RedisStore};

/// A request: what policies look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) user: u64,
    pub(crate) tenant: u64,
    pub(crate) weight: u64,
}

/// A policy, as the stack, the traffic and the checker have to know it.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) name: &'static str,
    counts: Counts,
    whom: Whom,
    /// Whether a request costs its weight, rather than 1.
    weighed: bool,
    failure_mode: FailureMode,
}

#[derive(Clone, Copy, Debug)]
enum Counts {
    Rate { algorithm: Algorithm, limit: u64, period_us: u64, burst: u64 },
    InFlight { limit: u64 },
}

#[derive(Clone, Copy, Debug)]
enum Whom {
    Everybody,
    Tenant,
    User,
}

const TENANTS: u64 = 2;
const USERS: u64 = 5;

/// Policies of a stack, in order.
const NAMES: [&str; 4] = ["first", "second", "third", "fourth"];

const ALGORITHMS: [Algorithm; 6] = crate::support::stacks::ALGORITHMS;

impl Call {
    pub(crate) fn any(dice: &mut Dice) -> Self {
        let (user, tenant) = (dice.within(0..USERS), dice.within(0..TENANTS));
        let weight = if dice.once_in(4) { dice.within(0..4) } else { 1 };
        Self { user, tenant, weight }
    }
}

impl Limit {
    fn any(name: &'static str, dice: &mut Dice) -> Self {
        let whom = dice.one_of(&[Whom::Everybody, Whom::Tenant, Whom::User, Whom::User]);
        // About as many as there are requests of such a key, so that each policy is the tightest at times.
        let per_second = dice.within(40..200) * whom.crowd();
        let period_us = dice.one_of(&[50_000, 200_000, 333_333, 1_000_000, 2_000_000]);
        let limit = (per_second * period_us / 1_000_000).max(4);
        let burst = match dice.within(0..3) {
            0 => limit,
            1 => (limit / 3).max(3),
            _ => limit * 2,
        };
        let algorithm = dice.one_of(&ALGORITHMS);
        Self {
            name,
            counts: Counts::Rate { algorithm, limit, period_us, burst },
            whom,
            weighed: dice.once_in(3),
            failure_mode: any_failure_mode(dice),
        }
    }

    fn any_slots(name: &'static str, dice: &mut Dice) -> Self {
        let whom = dice.one_of(&[Whom::Everybody, Whom::Tenant, Whom::User]);
        let limit = dice.within(2..6) * whom.crowd();
        let failure_mode = any_failure_mode(dice);
        Self { name, counts: Counts::InFlight { limit }, whom, weighed: false, failure_mode }
    }

    pub(crate) fn policy(&self) -> Policy<Call> {
        let policy = match self.counts {
            Counts::Rate { algorithm, limit, period_us, burst } => {
                let quota = Quota::new(limit, us(period_us));
                let quota = if algorithm.is_bucket() { quota.burst(burst) } else { quota };
                algorithm.policy(self.name, quota)
            }
            Counts::InFlight { limit } => Policy::concurrency(self.name, limit as u32),
        };
        let policy = match self.whom {
            Whom::Everybody => policy.key(|_: &Call| Key::from("everybody")),
            Whom::Tenant => policy.key(|call: &Call| Key::from(call.tenant)),
            Whom::User => policy.key(|call: &Call| Key::from(call.tenant * USERS + call.user)),
        };
        let policy = if self.weighed { policy.cost(|call: &Call| call.weight) } else { policy };
        policy.on_store_failure(self.failure_mode)
    }

    /// What its documentation says that it admits.
    pub(crate) fn law(&self) -> Law {
        match self.counts {
            Counts::InFlight { limit } => Law::Slots { limit },
            Counts::Rate { algorithm, limit, period_us, burst } => match algorithm {
                Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                    Law::Bucket { limit, period_us, burst }
                }
                Algorithm::FixedWindow => Law::FixedWindow { limit, period_us },
                Algorithm::FromFirstHit => Law::WindowFromFirstHit { limit, period_us },
                Algorithm::SlidingWindow => Law::SlidingWindow { limit, period_us },
                Algorithm::SlidingLog => Law::SlidingLog { limit, period_us },
            },
        }
    }

    pub(crate) fn is_of_slots(&self) -> bool {
        matches!(self.counts, Counts::InFlight { .. })
    }

    /// What the figures are listed under.
    pub(crate) fn kind(&self) -> String {
        match self.counts {
            Counts::InFlight { .. } => "Concurrency".to_owned(),
            Counts::Rate { algorithm, .. } => format!("{algorithm:?}"),
        }
    }

    /// A number for each key.
    pub(crate) fn key_of(&self, call: &Call) -> u64 {
        match self.whom {
            Whom::Everybody => 0,
            Whom::Tenant => call.tenant,
            Whom::User => call.tenant * USERS + call.user,
        }
    }
}

impl Whom {
    /// How many users share a key.
    fn crowd(self) -> u64 {
        match self {
            Self::Everybody => USERS * TENANTS,
            Self::Tenant => USERS,
            Self::User => 1,
        }
    }
}

/// Mostly that which counts.
fn any_failure_mode(dice: &mut Dice) -> FailureMode {
    match dice.within(0..12) {
        0 => FailureMode::Closed,
        1 => FailureMode::Open,
        _ => FailureMode::Local,
    }
}

/// Two to four policies; every other stack has slots as well.
pub(crate) fn any_stack(dice: &mut Dice) -> Vec<Limit> {
    let depth = dice.within(2..1 + NAMES.len() as u64) as usize;
    let mut stack: Vec<_> = NAMES[..depth].iter().map(|name| Limit::any(name, dice)).collect();
    if dice.once_in(2) {
        let index = dice.within(0..depth as u64) as usize;
        stack[index] = Limit::any_slots(NAMES[index], dice);
    }
    stack
}

pub(crate) fn limiter(store: RedisStore, stack: &[Limit]) -> Limiter<Call> {
    let builder = Limiter::builder().store(store);
    let builder = stack.iter().fold(builder, |builder, limit| builder.policy(limit.policy()));
    builder.build().unwrap()
}
