//! Random stacks of policies and traffic for them, and slow but obvious models of both.

use super::us;
use http::{Method, Request, request::Parts};
use proptest::{collection::vec, option, prelude::*};
use std::collections::HashMap;
use tollgate::{
    LimiterBuilder, Policy, Quota, RateLimitLayerBuilder,
    key::{Global, Header},
};

/// A policy: what a test can tell about it and what a model needs to know.
#[derive(Clone, Debug)]
pub(crate) struct Limit {
    pub(crate) name: &'static str,
    pub(crate) algorithm: Algorithm,
    pub(crate) limit: u64,
    pub(crate) period_us: u64,
    /// For buckets only.
    pub(crate) burst: Option<u64>,
    pub(crate) whom: Whom,
    /// What a request costs is this times its weight; `None` is 1 whatever it weighs.
    pub(crate) cost_per_weight: Option<u64>,
    pub(crate) only_posts: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Algorithm {
    TokenBucket,
    LeakyBucket,
    FixedWindow,
    FromFirstHit,
    SlidingWindow,
    SlidingLog,
}

pub(crate) const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::TokenBucket,
    Algorithm::LeakyBucket,
    Algorithm::FixedWindow,
    Algorithm::FromFirstHit,
    Algorithm::SlidingWindow,
    Algorithm::SlidingLog,
];

/// Whom a policy counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Whom {
    Everybody,
    User,
    Tenant,
    UserOfTenant,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) user: u16,
    pub(crate) tenant: u16,
    pub(crate) weight: u64,
    pub(crate) post: bool,
}

impl Algorithm {
    pub(crate) fn policy<R: ?Sized>(self, name: &'static str, quota: Quota) -> Policy<R> {
        match self {
            Self::TokenBucket => Policy::token_bucket(name, quota),
            Self::LeakyBucket => Policy::leaky_bucket(name, quota),
            Self::FixedWindow => Policy::fixed_window(name, quota),
            Self::FromFirstHit => Policy::fixed_window(name, quota).from_first_hit(),
            Self::SlidingWindow => Policy::sliding_window(name, quota),
            Self::SlidingLog => Policy::sliding_log(name, quota),
        }
    }

    pub(crate) fn is_bucket(self) -> bool {
        matches!(self, Self::TokenBucket | Self::LeakyBucket)
    }
}

impl Limit {
    pub(crate) fn policy(&self) -> Policy {
        let mut quota = Quota::new(self.limit, us(self.period_us));
        if let Some(burst) = self.burst {
            quota = quota.burst(burst);
        }
        let mut policy = self.algorithm.policy(self.name, quota);
        let [user, tenant] = ["x-user", "x-tenant"].map(Header::from_static);
        policy = match self.whom {
            Whom::Everybody => policy.key(Global),
            Whom::User => policy.key(user),
            Whom::Tenant => policy.key(tenant),
            Whom::UserOfTenant => policy.key((tenant, user)),
        };
        if let Some(factor) = self.cost_per_weight {
            policy = policy.cost(move |parts: &Parts| {
                factor * parts.headers["x-weight"].to_str().unwrap().parse::<u64>().unwrap()
            });
        }
        if self.only_posts {
            policy = policy.when(|parts: &Parts| parts.method == Method::POST);
        }
        policy
    }

    pub(crate) fn applies_to(&self, call: &Call) -> bool {
        call.post || !self.only_posts
    }

    pub(crate) fn cost_of(&self, call: &Call) -> u64 {
        self.cost_per_weight.map_or(1, |factor| factor * call.weight)
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.burst.unwrap_or(self.limit)
    }

    fn key_of(&self, call: &Call) -> Counted {
        match self.whom {
            Whom::Everybody => (None, None),
            Whom::User => (None, Some(call.user)),
            Whom::Tenant => (Some(call.tenant), None),
            Whom::UserOfTenant => (Some(call.tenant), Some(call.user)),
        }
    }

    /// What is left at `now` after all that was spent before.
    fn left(&self, spent: &[Spent], now: u64) -> u64 {
        let (limit, period) = (self.limit, self.period_us);
        let sum_since = |start: u64| -> u64 {
            spent.iter().filter(|spent| spent.time >= start).map(|spent| spent.cost).sum()
        };
        match self.algorithm {
            Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                // In parts of a token, `period` to each, of which a microsecond brings `limit`.
                let full = i128::from(self.capacity()) * i128::from(period);
                let (mut tokens, mut last) = (full, 0);
                let mut pass_to = |time: u64, tokens: &mut i128| {
                    *tokens = full.min(*tokens + i128::from(time - last) * i128::from(limit));
                    last = time;
                };
                for spent in spent {
                    pass_to(spent.time, &mut tokens);
                    tokens -= i128::from(spent.cost) * i128::from(period);
                }
                pass_to(now, &mut tokens);
                (tokens / i128::from(period)) as u64
            }
            Algorithm::FixedWindow => limit - sum_since(now - now % period),
            Algorithm::FromFirstHit => {
                let mut start = None;
                for spent in spent.iter().filter(|spent| spent.cost > 0) {
                    match start {
                        Some(start) if spent.time < start + period => {}
                        _ => start = Some(spent.time),
                    }
                }
                match start {
                    Some(start) if now < start + period => limit - sum_since(start),
                    _ => limit,
                }
            }
            Algorithm::SlidingWindow => {
                let start = now - now % period;
                let current = sum_since(start);
                let previous = sum_since(start - period) - current;
                let used = current * period + previous * (period - (now - start));
                (limit * period).saturating_sub(used) / period
            }
            Algorithm::SlidingLog => limit - sum_since((now + 1).saturating_sub(period)),
        }
    }
}

impl Call {
    pub(crate) fn request(&self) -> Request<()> {
        Request::builder()
            .method(if self.post { Method::POST } else { Method::GET })
            .header("x-user", self.user)
            .header("x-tenant", self.tenant)
            .header("x-weight", self.weight)
            .body(())
            .unwrap()
    }

    pub(crate) fn parts(&self) -> Parts {
        self.request().into_parts().0
    }
}

pub(crate) fn with_policies(
    builder: RateLimitLayerBuilder,
    stack: &[Limit],
) -> RateLimitLayerBuilder {
    stack.iter().fold(builder, |builder, limit| builder.policy(limit.policy()))
}

pub(crate) fn limiter_with_policies(builder: LimiterBuilder, stack: &[Limit]) -> LimiterBuilder {
    stack.iter().fold(builder, |builder, limit| builder.policy(limit.policy()))
}

// === the model ===

/// A stack that remembers everything that it ever let through.
pub(crate) struct Model<'a> {
    stack: &'a [Limit],
    /// By the index of the policy, and whom it counted.
    spent: HashMap<(usize, Counted), Vec<Spent>>,
}

/// The tenant and the user, as far as a policy tells them apart.
type Counted = (Option<u16>, Option<u16>);

#[derive(Clone, Copy, Debug)]
struct Spent {
    time: u64,
    cost: u64,
}

/// What a policy that applies says to a request, and what remains afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Opinion {
    pub(crate) policy: &'static str,
    pub(crate) admits: bool,
    pub(crate) remaining: u64,
}

impl<'a> Model<'a> {
    pub(crate) fn new(stack: &'a [Limit]) -> Self {
        Self { stack, spent: HashMap::new() }
    }

    /// Decides a request at `now`, in microseconds since the epoch.
    pub(crate) fn decide(&mut self, call: &Call, now: u64) -> Vec<Opinion> {
        let applying = || self.stack.iter().enumerate().filter(|(_, limit)| limit.applies_to(call));
        let mut opinions: Vec<_> = applying()
            .map(|(index, limit)| {
                let spent = self.spent.get(&(index, limit.key_of(call)));
                let remaining = limit.left(spent.map_or(&[], Vec::as_slice), now);
                Opinion { policy: limit.name, admits: limit.cost_of(call) <= remaining, remaining }
            })
            .collect();
        if opinions.iter().all(|opinion| opinion.admits) {
            for ((index, limit), opinion) in applying().zip(&mut opinions) {
                let cost = limit.cost_of(call);
                opinion.remaining -= cost;
                let spent = self.spent.entry((index, limit.key_of(call))).or_default();
                spent.push(Spent { time: now, cost });
            }
        }
        opinions
    }
}

// === strategies ===

const NAMES: [&str; 4] = ["first", "Second.v2", "third_one", "fourth-1"];

fn limit(name: &'static str) -> impl Strategy<Value = Limit> {
    let period_us = prop_oneof![
        Just(1_000_000_u64),
        Just(60_000_000),
        (1_u64..10).prop_map(|n| n * 1_000_000),
        1_000_u64..20_000_000,
    ];
    (
        proptest::sample::select(&ALGORITHMS),
        1_u64..9,
        period_us,
        option::of(1_u64..12),
        proptest::sample::select(&[Whom::Everybody, Whom::User, Whom::Tenant, Whom::UserOfTenant]),
        option::weighted(0.4, 0_u64..4),
        proptest::bool::weighted(0.2),
    )
        .prop_map(
            move |(algorithm, limit, period_us, burst, whom, cost_per_weight, only_posts)| {
                let burst = burst.filter(|_| algorithm.is_bucket());
                Limit {
                    name,
                    algorithm,
                    limit,
                    period_us,
                    burst,
                    whom,
                    cost_per_weight,
                    only_posts,
                }
            },
        )
}

/// One to four policies of any kind.
pub(crate) fn stack() -> impl Strategy<Value = Vec<Limit>> {
    (NAMES.map(limit), 1..=NAMES.len()).prop_map(|(limits, depth)| limits[..depth].to_vec())
}

fn call() -> impl Strategy<Value = Call> {
    (0_u16..2, 0_u16..2, prop_oneof![3 => Just(1_u64), 1 => 0_u64..4], any::<bool>())
        .prop_map(|(user, tenant, weight, post)| Call { user, tenant, weight, post })
}

/// Requests, each so many microseconds after the last one: often at once, seldom after a pause in
/// which everything comes back.
pub(crate) fn traffic(requests: usize) -> impl Strategy<Value = Vec<(u64, Call)>> {
    let gap_us = prop_oneof![
        4 => Just(0_u64),
        4 => 0_u64..1_000_000,
        2 => 0_u64..20_000_000,
        1 => 0_u64..200_000_000,
    ];
    vec((gap_us, call()), 1..requests)
}

/// Every caller that there is, with and without what only some policies apply to.
pub(crate) fn everybody() -> impl Iterator<Item = Call> {
    (0..8).map(|bits| Call {
        user: bits & 1,
        tenant: bits >> 1 & 1,
        weight: 1,
        post: bits & 4 != 0,
    })
}
