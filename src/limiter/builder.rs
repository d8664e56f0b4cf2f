//! From policies, a store and a clock to a limiter.

use super::{Limiter, Shared, gate::Gate, rates::Rates};
use crate::{
    clock::Clock,
    concurrency::Slots,
    key::{FindKey, KeyExtractor, Secret},
    policy::{
        Policy,
        stack::{BuildError, Stack},
    },
    priority::Classify,
    shed::{Shedder, Shedders},
    store::{LocalStore, Store, local::Local},
    turn::Lines,
};
#[cfg(feature = "redis")]
use crate::{
    deferred::Deferred,
    remote::Remote,
    store::{
        local::Plan,
        redis::{DeferredStore, RedisStore},
    },
};
use http::request::Parts;
use std::{fmt, sync::Arc};

/// Puts a [`Limiter`] together.
pub struct LimiterBuilder<R: ?Sized = Parts> {
    policies: Vec<Policy<R>>,
    key: Option<Arc<dyn FindKey<R>>>,
    store: LocalStore,
    #[cfg(feature = "redis")]
    elsewhere: Option<Elsewhere>,
    clock: Clock,
    shedders: Vec<Shedder>,
    classify: Option<Box<dyn Classify<R>>>,
}

/// A store that is not this process, and when it is asked or told.
#[cfg(feature = "redis")]
enum Elsewhere {
    Before(RedisStore),
    After(DeferredStore),
}

impl<R: ?Sized + 'static> LimiterBuilder<R> {
    pub(super) fn new() -> Self {
        Self {
            policies: Vec::new(),
            key: None,
            store: LocalStore::new(),
            #[cfg(feature = "redis")]
            elsewhere: None,
            clock: Clock::system(),
            shedders: Vec::new(),
            classify: None,
        }
    }

    /// Adds a policy below those that are there already. All of them are asked, and a request is
    /// charged to all that apply or to none, so their order changes only the order of outcomes.
    #[must_use]
    pub fn policy(mut self, policy: Policy<R>) -> Self {
        self.policies.push(policy);
        self
    }

    /// Whom to count, for policies that do not say so themselves. Default: none.
    #[must_use]
    pub fn key(mut self, key: impl KeyExtractor<R>) -> Self {
        self.key = Some(Arc::new(key));
        self
    }

    /// Where state is kept. Default: [`LocalStore::new`].
    ///
    /// A limiter whose state is in Redis keeps some in this process too, while Redis is out of reach, or
    /// because it is deferred; to bound that, give it a [`LocalStore`] as well.
    #[must_use]
    pub fn store(mut self, store: impl Into<Store>) -> Self {
        match store.into() {
            Store::Local(local) => self.store = local,
            #[cfg(feature = "redis")]
            Store::Redis(redis) => self.elsewhere = Some(Elsewhere::Before(redis)),
            #[cfg(feature = "redis")]
            Store::Deferred(deferred) => self.elsewhere = Some(Elsewhere::After(deferred)),
        }
        self
    }

    /// Where the time comes from. Default: [`Clock::system`].
    #[must_use]
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = clock.into();
        self
    }

    /// Adds a load shedder behind those that are there already. They are asked before all policies, so a
    /// request that is shed costs nothing, and is turned away whatever its limits.
    #[must_use]
    pub fn shedder(mut self, shedder: impl Into<Shedder>) -> Self {
        self.shedders.push(shedder.into());
        self
    }

    /// How important a request is, for load shedders. Default: none.
    #[must_use]
    pub fn priority(mut self, classify: impl Classify<R>) -> Self {
        self.classify = Some(Box::new(classify));
        self
    }

    /// Checks the stack and puts it to work.
    ///
    /// # Errors
    ///
    /// [`BuildError`] says which policy cannot be, and why.
    pub fn build(self) -> Result<Limiter<R>, BuildError> {
        let secret = self.secret();
        let stack = Stack::new(self.policies, self.key.as_ref(), secret, &self.shedders)?;
        let gate = match (self.shedders.first(), self.classify) {
            (None, _) => None,
            (Some(first), None) => {
                return Err(BuildError::NoPriority { shedder: first.name().to_owned() });
            }
            (Some(_), Some(classify)) => {
                Some(Gate { shedders: Shedders::new(self.shedders), classify })
            }
        };
        let lines = stack.shaper().map(|_| Lines::default());
        let slot_plans: Vec<_> = stack.slot_plans().collect();
        let plans = stack.plans();
        #[cfg(feature = "redis")]
        let (stack, plans, remote, deferred) = {
            let mut stack = stack;
            match self.elsewhere {
                None => (stack, plans, None, None),
                Some(Elsewhere::Before(redis)) => {
                    let (remote, shares) = reach(&mut stack, redis)?;
                    (stack, shares, Some(remote), None)
                }
                Some(Elsewhere::After(store)) => {
                    if let Some(policy) = stack.cannot_defer() {
                        return Err(BuildError::CannotDefer { policy: policy.to_owned() });
                    }
                    let (remote, shares) = reach(&mut stack, store.store.clone())?;
                    let local = Local::new(&self.store, &plans);
                    let deferred = Deferred::new(&store, remote, local, self.clock.clone());
                    (stack, shares, None, Some(deferred))
                }
            }
        };
        let slots = (!slot_plans.is_empty()).then(|| Arc::new(Slots::new(slot_plans, &self.clock)));
        let shared = Shared {
            rates: Rates {
                local: Local::new(&self.store, &plans),
                #[cfg(feature = "redis")]
                deferred,
            },
            stack,
            #[cfg(feature = "redis")]
            remote,
            clock: self.clock,
            lines,
            slots,
            gate,
        };
        Ok(Limiter { shared: Arc::new(shared) })
    }

    /// What keys are hashed under.
    fn secret(&self) -> Secret {
        #[cfg(feature = "redis")]
        match &self.elsewhere {
            None => {}
            Some(Elsewhere::Before(redis)) => return Secret::shared(redis.key()),
            Some(Elsewhere::After(deferred)) => return Secret::shared(deferred.store.key()),
        }
        Secret::random()
    }
}

/// A store elsewhere for the policies of a stack, and what each of them is for the one here that stands in
/// for it.
#[cfg(feature = "redis")]
fn reach<R: ?Sized + 'static>(
    stack: &mut Stack<R>,
    redis: RedisStore,
) -> Result<(Remote, Vec<Plan>), BuildError> {
    let shares = stack.shared_by(redis.instances());
    let remote = Remote::new(redis, stack.remote_plans(), &shares, stack.remote_slots())?;
    Ok((remote, shares))
}

impl<R: ?Sized> fmt::Debug for LimiterBuilder<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LimiterBuilder")
            .field("policies", &self.policies)
            .field("store", &self.store)
            .field("clock", &self.clock)
            .finish_non_exhaustive()
    }
}
