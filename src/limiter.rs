//! The stack at work: charges in, decision out. Knows no HTTP.

use crate::{
    clock::Clock,
    decision::{Decision, Outcome, Outcomes, Rejection},
    key::{FindKey, KeyExtractor},
    policy::{
        Policy,
        stack::{BuildError, Stack},
    },
    store::{Bill, LocalStore, Mode, local::Local},
    turn::{Lines, Turn},
};
use http::request::Parts;
use std::{fmt, mem, sync::Arc};

/// A stack of policies with its state, for any kind of request and without any service around it.
///
/// Clones share one budget. `R` is what a request is; the [layer](crate::RateLimitLayer) uses a
/// limiter of HTTP request [`Parts`].
///
/// ```
/// use tollgate::{Limiter, Policy, Quota, key::Key};
///
/// let limiter = Limiter::<str>::builder()
///     .key(|user: &str| Key::from(user))
///     .policy(Policy::token_bucket("burst", Quota::per_second(2)))
///     .policy(Policy::fixed_window("daily", Quota::per_calendar_day(1_000)))
///     .build()?;
///
/// assert!(limiter.check("alice").is_ok());
/// assert_eq!(limiter.check("alice").unwrap().tightest().unwrap().remaining(), 0);
///
/// let rejection = limiter.check("alice").unwrap_err();
/// assert_eq!(rejection.policies().collect::<Vec<_>>(), ["burst"]);
/// assert!(limiter.check("bob").is_ok());
/// # Ok::<(), tollgate::BuildError>(())
/// ```
pub struct Limiter<R: ?Sized = Parts> {
    shared: Arc<Shared<R>>,
}

struct Shared<R: ?Sized> {
    stack: Stack<R>,
    store: Local,
    clock: Clock,
    /// The requests that wait for their turn; `None` if no policy holds requests back.
    lines: Option<Lines>,
}

/// Puts a [`Limiter`] together.
pub struct LimiterBuilder<R: ?Sized = Parts> {
    policies: Vec<Policy<R>>,
    key: Option<Arc<dyn FindKey<R>>>,
    store: LocalStore,
    clock: Clock,
}

impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts a new limiter.
    #[must_use]
    pub fn builder() -> LimiterBuilder<R> {
        LimiterBuilder {
            policies: Vec::new(),
            key: None,
            store: LocalStore::new(),
            clock: Clock::system(),
        }
    }

    /// Decides a request, and charges it to all policies that apply if it is admitted.
    ///
    /// Where a leaky bucket holds requests back, the decision's [`delay`](Decision::delay) is to be
    /// waited by the caller; [`ready`](Self::ready) waits by itself.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on; it was charged nothing then.
    pub fn check(&self, request: &R) -> Result<Decision, Rejection> {
        self.decide(request, Mode::Charge)
    }

    /// Decides a request and waits until it is its turn. It returns at once unless a leaky bucket
    /// with a maximum delay holds it back.
    ///
    /// Dropping the future while it waits gives back all that the request was charged, and those
    /// behind it move up. Waiting needs a tokio runtime with its timer enabled.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on; it was charged nothing then.
    pub async fn ready(&self, request: &R) -> Result<Decision, Rejection> {
        let (decision, turn) = self.admit(request)?;
        if let Some(turn) = turn {
            turn.await;
        }
        Ok(decision)
    }

    /// What [`check`](Self::check) would answer now, without charging anything.
    ///
    /// What remains is told as it is before the request, not after it.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request could not go on.
    pub fn peek(&self, request: &R) -> Result<Decision, Rejection> {
        self.decide(request, Mode::Peek)
    }

    /// Gives back what `request` was charged by `decision`, as far as it has not come back by
    /// itself since. For requests that turned out to be free. Give back once, and only decisions of
    /// [`check`](Self::check) and [`ready`](Self::ready).
    ///
    /// Where several are given back out of order, a bucket may count some of it as not come back yet,
    /// so that up to one burst more passes.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the key of the request can no longer be found, or a policy's function fails.
    pub fn refund(&self, request: &R, decision: &Decision) -> Result<(), Rejection> {
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill(request, &mut bill, &mut outcomes)?;
        for outcome in &mut outcomes {
            let charged = decision.outcomes.iter().find(|charged| charged.policy == outcome.policy);
            outcome.cost = charged.map_or(0, |charged| charged.cost);
            if let Some(charged) = charged {
                let same_quota = charged.quota == outcome.quota;
                // By another quota, what remained then says nothing: as if it was all there was.
                outcome.remaining = if same_quota { charged.remaining } else { u64::MAX };
                outcome.reset_us = if same_quota { charged.reset_us } else { 0 };
            }
        }
        let Shared { store, clock, lines, .. } = &*self.shared;
        let mut refund = || store.refund(&bill, &mut outcomes, clock.now_us(), decision.time_us);
        match lines {
            None => drop(refund()),
            Some(lines) => lines.give_back(&bill, decision.time_us + decision.delay_us, refund),
        }
        Ok(())
    }

    /// Forgets what is known of the keys of `request`: they are as good as new.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request has no key, or a policy's function fails.
    pub fn reset(&self, request: &R) -> Result<(), Rejection> {
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill(request, &mut bill, &mut outcomes)?;
        self.shared.store.reset(&bill);
        Ok(())
    }

    /// How many keys are kept at the moment.
    #[must_use]
    pub fn tracked_keys(&self) -> usize {
        self.shared.store.tracked_keys()
    }

    /// Decides a request; one that has to wait for its turn gets a place in line.
    #[inline]
    pub(crate) fn admit(&self, request: &R) -> Result<(Decision, Option<Box<Turn>>), Rejection> {
        let shared = &self.shared;
        let Some(lines) = &shared.lines else {
            return self.decide(request, Mode::Charge).map(|decision| (decision, None));
        };
        self.admit_in_line(lines, request)
    }

    #[inline(never)]
    fn admit_in_line(
        &self,
        lines: &Lines,
        request: &R,
    ) -> Result<(Decision, Option<Box<Turn>>), Rejection> {
        let shared = &self.shared;
        let mut turn = None;
        let decision = self.decide_by(request, |bill, outcomes| {
            let (mut admitted, mut time_us) = (false, 0);
            let places = lines.join(bill, outcomes, |outcomes| {
                (admitted, time_us) = shared.acquire(bill, outcomes, Mode::Charge);
                admitted.then_some(time_us)
            });
            if !places.is_empty() {
                let limiter = self.clone();
                let refund = move |bill: &Bill, outcomes: &mut [Outcome]| {
                    let shared = &limiter.shared;
                    shared.store.refund(bill, outcomes, shared.clock.now_us(), time_us)
                };
                let (clock, bill) = (shared.clock.clone(), bill.clone());
                let outcomes = outcomes.iter().copied().collect();
                let refund = Box::new(refund);
                turn = Some(Box::new(Turn::new(lines, places, clock, bill, outcomes, refund)));
            }
            (admitted, time_us)
        })?;
        Ok((decision, turn))
    }

    pub(crate) fn stack(&self) -> &Stack<R> {
        &self.shared.stack
    }

    #[inline]
    fn decide(&self, request: &R, mode: Mode) -> Result<Decision, Rejection> {
        self.decide_by(request, |bill, outcomes| self.shared.acquire(bill, outcomes, mode))
    }

    /// Decides a request by `acquire`, which returns whether it may go on, and the present.
    #[inline]
    fn decide_by(
        &self,
        request: &R,
        acquire: impl FnOnce(&Bill, &mut [Outcome]) -> (bool, u64),
    ) -> Result<Decision, Rejection> {
        // A decision is large: it is written where the caller wants it, and not moved.
        let mut result = Ok(Decision::open());
        if let Ok(decision) = &mut result
            && let Err(rejection) = self.fill_in(decision, request, acquire)
        {
            result = Err(rejection);
        }
        result
    }

    #[inline]
    fn fill_in(
        &self,
        decision: &mut Decision,
        request: &R,
        acquire: impl FnOnce(&Bill, &mut [Outcome]) -> (bool, u64),
    ) -> Result<(), Rejection> {
        let Decision { time_us, delay_us, outcomes } = decision;
        let mut bill = Bill::default();
        self.write_bill(request, &mut bill, outcomes)?;
        let admitted;
        (admitted, *time_us) = acquire(&bill, outcomes);
        self.shared.stack.sort(outcomes);
        if !admitted {
            return Err(Rejection::of_limits(mem::take(outcomes), *time_us));
        }
        if self.shared.lines.is_some() {
            *delay_us = outcomes.iter().map(|outcome| outcome.delay_us).max().unwrap_or(0);
        }
        Ok(())
    }

    #[inline]
    fn write_bill(
        &self,
        request: &R,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
    ) -> Result<(), Rejection> {
        self.shared.stack.bill(request, bill, outcomes).map_err(|reason| Rejection {
            reason: *reason,
            time_us: self.shared.clock.now_us(),
            outcomes: Outcomes::new(),
        })
    }
}

impl<R: ?Sized + 'static> Shared<R> {
    /// Asks the store whether the request may go on, and returns the present with it. This is where
    /// a decision reads the time, once.
    #[inline]
    fn acquire(&self, bill: &Bill, outcomes: &mut [Outcome], mode: Mode) -> (bool, u64) {
        let time_us = self.clock.now_us();
        (self.store.acquire(bill, outcomes, time_us, mode), time_us)
    }
}

impl<R: ?Sized> Clone for Limiter<R> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<R: ?Sized> fmt::Debug for Limiter<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Limiter")
            .field("clock", &self.shared.clock)
            .field("store", &self.shared.store)
            .finish_non_exhaustive()
    }
}

impl<R: ?Sized + 'static> LimiterBuilder<R> {
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
    #[must_use]
    pub const fn store(mut self, store: LocalStore) -> Self {
        self.store = store;
        self
    }

    /// Where the time comes from. Default: [`Clock::system`].
    #[must_use]
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = clock.into();
        self
    }

    /// Checks the stack and puts it to work.
    ///
    /// # Errors
    ///
    /// [`BuildError`] says which policy cannot be, and why.
    pub fn build(self) -> Result<Limiter<R>, BuildError> {
        let stack = Stack::new(self.policies, self.key.as_ref())?;
        let store = Local::new(&self.store, &stack.plans());
        let lines = stack.shaper().map(|_| Lines::default());
        Ok(Limiter { shared: Arc::new(Shared { stack, store, clock: self.clock, lines }) })
    }
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
