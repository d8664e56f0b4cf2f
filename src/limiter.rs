//! The stack at work: charges in, decision out. Knows no HTTP.

use crate::{
    clock::Clock,
    decision::{Decision, Outcome, Outcomes, Reason, Rejection},
    key::{FindKey, KeyExtractor, Secret},
    policy::{
        Policy,
        stack::{BuildError, Stack},
    },
    store::{Bill, LocalStore, Mode, Store, local::Local},
    turn::{Counted, Lines, Refund, Turn},
};
#[cfg(feature = "redis")]
use crate::{
    remote::Remote,
    store::{Lengths, redis::RedisStore},
    turn::Place,
};
use http::request::Parts;
use std::{fmt, future::Future, mem, pin::Pin, sync::Arc};
#[cfg(feature = "redis")]
use tokio::runtime::Handle;

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
    /// The state, or what stands in for it while it is elsewhere and out of reach.
    store: Local,
    #[cfg(feature = "redis")]
    remote: Option<Remote>,
    clock: Clock,
    /// The requests that wait for their turn; `None` if no policy holds requests back.
    lines: Option<Lines>,
}

/// Puts a [`Limiter`] together.
pub struct LimiterBuilder<R: ?Sized = Parts> {
    policies: Vec<Policy<R>>,
    key: Option<Arc<dyn FindKey<R>>>,
    store: LocalStore,
    #[cfg(feature = "redis")]
    remote: Option<RedisStore>,
    clock: Clock,
}

/// The decision to let a request go on, and its wait for its turn, if it has to.
pub(crate) type Admitted = (Decision, Option<Box<Turn>>);

/// A decision that a store elsewhere is asked for.
pub(crate) type Deciding = Pin<Box<dyn Future<Output = Result<Admitted, Rejection>> + Send>>;

impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts a new limiter.
    #[must_use]
    pub fn builder() -> LimiterBuilder<R> {
        LimiterBuilder {
            policies: Vec::new(),
            key: None,
            store: LocalStore::new(),
            #[cfg(feature = "redis")]
            remote: None,
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
    /// [`Rejection`] if the request may not go on; it was charged nothing then. So it is if the state is
    /// in Redis, for whose answer only [`check_async`](Self::check_async) and `ready` can wait.
    pub fn check(&self, request: &R) -> Result<Decision, Rejection> {
        self.needs_no_answer()?;
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
        let mut turn = None;
        let decision = match self.ask(request, Mode::Charge, true) {
            None => self.admit(request, &mut turn)?,
            Some(deciding) => {
                let (decision, waits) = deciding.await?;
                turn = waits;
                decision
            }
        };
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
        self.needs_no_answer()?;
        self.decide(request, Mode::Peek)
    }

    /// Gives back what `request` was charged by `decision`, as far as it has not come back by
    /// itself since. For requests that turned out to be free. Give back once, and only decisions that
    /// were charged: those of a `peek` were not.
    ///
    /// Where several are given back out of order, a bucket may count some of it as not come back yet,
    /// so that up to one burst more passes.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the key of the request can no longer be found, or a policy's function fails.
    pub fn refund(&self, request: &R, decision: &Decision) -> Result<(), Rejection> {
        self.needs_no_answer()?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill(request, &mut bill, &mut outcomes)?;
        self.give_back(&bill, &mut outcomes, decision);
        Ok(())
    }

    /// Gives back what was charged by `decision` in this process.
    fn give_back(&self, bill: &Bill, outcomes: &mut [Outcome], decision: &Decision) {
        Self::recall(outcomes, decision);
        let Shared { store, clock, lines, .. } = &*self.shared;
        let mut refund = || store.refund(bill, outcomes, clock.now_us(), decision.time_us);
        match lines {
            None => drop(refund()),
            Some(lines) => lines.give_back(bill, decision.time_us + decision.delay_us, refund),
        }
    }

    /// What was charged by `decision`, in place of what would be charged now.
    fn recall(outcomes: &mut [Outcome], decision: &Decision) {
        for outcome in outcomes {
            let charged = decision.outcomes.iter().find(|charged| charged.policy == outcome.policy);
            outcome.cost = charged.map_or(0, |charged| charged.cost);
            if let Some(charged) = charged {
                let same_quota = charged.quota == outcome.quota;
                // By another quota, what remained then says nothing: as if it was all there was.
                outcome.remaining = if same_quota { charged.remaining } else { u64::MAX };
                outcome.reset_us = if same_quota { charged.reset_us } else { 0 };
            }
        }
    }

    /// Forgets what is known of the keys of `request`: they are as good as new.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request has no key, or a policy's function fails.
    pub fn reset(&self, request: &R) -> Result<(), Rejection> {
        self.needs_no_answer()?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill(request, &mut bill, &mut outcomes)?;
        self.shared.store.reset(&bill);
        Ok(())
    }

    /// [`check`](Self::check), wherever the state is.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on; it was charged nothing then.
    pub async fn check_async(&self, request: &R) -> Result<Decision, Rejection> {
        match self.ask(request, Mode::Charge, false) {
            Some(deciding) => deciding.await.map(|(decision, _)| decision),
            None => self.check(request),
        }
    }

    /// [`peek`](Self::peek), wherever the state is.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request could not go on.
    pub async fn peek_async(&self, request: &R) -> Result<Decision, Rejection> {
        match self.ask(request, Mode::Peek, false) {
            Some(deciding) => deciding.await.map(|(decision, _)| decision),
            None => self.peek(request),
        }
    }

    /// [`refund`](Self::refund), wherever the state is.
    ///
    /// # Errors
    ///
    /// [`Rejection`] as for `refund`, and if the store does not answer; then it may or may not have
    /// been given back.
    pub async fn refund_async(&self, request: &R, decision: &Decision) -> Result<(), Rejection> {
        #[cfg(feature = "redis")]
        if let Some(remote) = &self.shared.remote {
            let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
            self.write_bill(request, &mut bill, &mut outcomes)?;
            if decision.stood_in {
                if let Ok((bill, mut outcomes)) = remote.fall_back(&bill, &outcomes) {
                    self.give_back(&bill, &mut outcomes, decision);
                }
                return Ok(());
            }
            Self::recall(&mut outcomes, decision);
            let refunded = remote.refund(&bill, &outcomes, decision.time_us).await;
            return refunded.ok_or_else(|| self.unavailable(remote.first_policy()));
        }
        self.refund(request, decision)
    }

    /// [`reset`](Self::reset), wherever the state is.
    ///
    /// # Errors
    ///
    /// [`Rejection`] as for `reset`, and if the store does not answer.
    pub async fn reset_async(&self, request: &R) -> Result<(), Rejection> {
        #[cfg(feature = "redis")]
        if let Some(remote) = &self.shared.remote {
            let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
            self.write_bill(request, &mut bill, &mut outcomes)?;
            let reset = remote.reset(&bill, &outcomes).await;
            return reset.ok_or_else(|| self.unavailable(remote.first_policy()));
        }
        self.reset(request)
    }

    /// How many keys are kept in this process at the moment.
    #[must_use]
    pub fn tracked_keys(&self) -> usize {
        self.shared.store.tracked_keys()
    }

    /// Decides a request; one that has to wait for its turn gets a place in line, and `turn` is set.
    #[inline]
    pub(crate) fn admit(
        &self,
        request: &R,
        turn: &mut Option<Box<Turn>>,
    ) -> Result<Decision, Rejection> {
        match &self.shared.lines {
            None => self.decide(request, Mode::Charge),
            Some(lines) => self.admit_in_line(lines, request, turn),
        }
    }

    #[inline(never)]
    fn admit_in_line(
        &self,
        lines: &Lines,
        request: &R,
        turn: &mut Option<Box<Turn>>,
    ) -> Result<Decision, Rejection> {
        let shared = &self.shared;
        self.decide_by(request, |bill, outcomes| {
            let (mut admitted, mut time_us) = (false, 0);
            let places = lines.join(Counted::Here, bill, outcomes, |outcomes| {
                (admitted, time_us) = shared.acquire(bill, outcomes, Mode::Charge);
                admitted.then_some(time_us)
            });
            if !places.is_empty() {
                let charged = (bill.clone(), Outcomes::from_slice(outcomes));
                let refund = self.refund_here(time_us);
                *turn = Some(Box::new(Turn::new(lines, places, &shared.clock, charged, refund)));
            }
            (admitted, time_us)
        })
    }

    /// Gives back what was charged in this process at `time_us`.
    fn refund_here(&self, time_us: u64) -> Refund {
        let limiter = self.clone();
        Box::new(move |bill, outcomes| {
            let shared = &limiter.shared;
            shared.store.refund(bill, outcomes, shared.clock.now_us(), time_us)
        })
    }

    /// Whether only the asynchronous methods can decide.
    #[cfg(feature = "tonic")]
    pub(crate) fn is_asynchronous(&self) -> bool {
        self.needs_no_answer().is_err()
    }

    /// Refuses what cannot wait for a store that is elsewhere.
    #[inline]
    fn needs_no_answer(&self) -> Result<(), Rejection> {
        #[cfg(feature = "redis")]
        if let Some(remote) = &self.shared.remote {
            let message =
                "the state is in Redis; call the method of this name that ends in `_async`";
            let reason =
                Reason::Faulty { policy: remote.first_policy(), message: message.to_owned() };
            return Err(self.rejection(reason));
        }
        Ok(())
    }

    fn rejection(&self, reason: Reason) -> Rejection {
        Rejection { reason, time_us: self.shared.clock.now_us(), outcomes: Outcomes::new() }
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
        let Decision { time_us, delay_us, outcomes, .. } = decision;
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
        let written = self.shared.stack.bill(request, bill, outcomes);
        written.map_err(|reason| self.rejection(*reason))
    }
}

/// The part of a limiter that asks a store elsewhere.
impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts to decide a request, if the state is elsewhere. It gets a place in line only if it
    /// `waits` for its turn.
    #[cfg(not(feature = "redis"))]
    fn ask(&self, _request: &R, _mode: Mode, _waits: bool) -> Option<Deciding> {
        None
    }

    #[cfg(feature = "redis")]
    pub(crate) fn ask(&self, request: &R, mode: Mode, waits: bool) -> Option<Deciding> {
        self.shared.remote.as_ref()?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        let written = self.write_bill(request, &mut bill, &mut outcomes);
        let limiter = self.clone();
        Some(Box::pin(async move {
            written?;
            limiter.decide_elsewhere(bill, outcomes, mode, waits).await
        }))
    }

    #[cfg(feature = "redis")]
    async fn decide_elsewhere(
        self,
        bill: Bill,
        mut outcomes: Outcomes,
        mode: Mode,
        waits: bool,
    ) -> Result<Admitted, Rejection> {
        let shared = &self.shared;
        let Some(remote) = shared.remote.as_ref().filter(|_| !bill.charges.is_empty()) else {
            return Ok((Decision { time_us: shared.clock.now_us(), ..Decision::open() }, None));
        };
        let lines = shared.lines.as_ref().filter(|_| waits);
        if let Some((admitted, time_us)) = remote.acquire(&bill, &mut outcomes, mode).await {
            // Its turn is so much later by any clock.
            let acquired = |_: &mut [Outcome]| admitted.then(|| shared.clock.now_us());
            let places =
                lines.map(|lines| lines.join(Counted::Elsewhere, &bill, &mut outcomes, acquired));
            let refund = self.refund_elsewhere(time_us);
            return self.conclude((bill, outcomes), admitted, time_us, places, refund);
        }
        let fallen_back = remote.fall_back(&bill, &outcomes);
        let (bill, mut outcomes) = fallen_back.map_err(|policy| self.unavailable(policy))?;
        let (mut admitted, mut time_us) = (false, 0);
        let mut acquire = |outcomes: &mut [Outcome]| {
            (admitted, time_us) = shared.acquire(&bill, outcomes, mode);
            admitted.then_some(time_us)
        };
        let places = match lines {
            Some(lines) => Some(lines.join(Counted::Here, &bill, &mut outcomes, acquire)),
            None => {
                acquire(&mut outcomes);
                None
            }
        };
        let refund = self.refund_here(time_us);
        let mut concluded = self.conclude((bill, outcomes), admitted, time_us, places, refund);
        if let Ok((decision, _)) = &mut concluded {
            decision.stood_in = true;
        }
        concluded
    }

    #[cfg(feature = "redis")]
    fn conclude(
        &self,
        (bill, mut outcomes): (Bill, Outcomes),
        admitted: bool,
        time_us: u64,
        places: Option<Vec<Arc<Place>>>,
        refund: Refund,
    ) -> Result<Admitted, Rejection> {
        let shared = &self.shared;
        let delay_us = outcomes.iter().map(|outcome| outcome.delay_us).max().unwrap_or(0);
        let charged = outcomes.clone();
        shared.stack.sort(&mut outcomes);
        if !admitted {
            return Err(Rejection::of_limits(outcomes, time_us));
        }
        let places = shared.lines.as_ref().zip(places.filter(|places| !places.is_empty()));
        let turn = places.map(|(lines, places)| {
            Box::new(Turn::new(lines, places, &shared.clock, (bill, charged), refund))
        });
        Ok((Decision { time_us, delay_us, outcomes, stood_in: false }, turn))
    }

    /// Gives back what was charged elsewhere at `time_us`, in the background. It is for those who come
    /// later: those who wait already were told when their turn is.
    #[cfg(feature = "redis")]
    fn refund_elsewhere(&self, time_us: u64) -> Refund {
        let (limiter, runtime) = (self.clone(), Handle::current());
        Box::new(move |bill, outcomes| {
            let (limiter, bill) = (limiter.clone(), bill.clone());
            let outcomes = Outcomes::from_slice(outcomes);
            let lengths_us = Lengths::from_elem(0, outcomes.len());
            runtime.spawn(async move {
                if let Some(remote) = &limiter.shared.remote {
                    remote.refund(&bill, &outcomes, time_us).await;
                }
            });
            lengths_us
        })
    }

    #[cfg(feature = "redis")]
    fn unavailable(&self, policy: &'static str) -> Rejection {
        self.rejection(Reason::Unavailable { policy })
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
    ///
    /// A limiter whose state is in Redis keeps some in this process too, while Redis is out of reach;
    /// to bound that, give it a [`LocalStore`] as well.
    #[must_use]
    pub fn store(mut self, store: impl Into<Store>) -> Self {
        match store.into() {
            Store::Local(local) => self.store = local,
            #[cfg(feature = "redis")]
            Store::Redis(redis) => self.remote = Some(redis),
        }
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
        let secret = self.secret();
        let stack = Stack::new(self.policies, self.key.as_ref(), secret)?;
        let lines = stack.shaper().map(|_| Lines::default());
        #[cfg(feature = "redis")]
        let (stack, plans, remote) = match self.remote {
            None => {
                let plans = stack.plans();
                (stack, plans, None)
            }
            Some(redis) => {
                let mut stack = stack;
                let plans = stack.shared_by(redis.instances());
                let remote = Remote::new(redis, stack.remote_plans(), &plans)?;
                (stack, plans, Some(remote))
            }
        };
        #[cfg(not(feature = "redis"))]
        let plans = stack.plans();
        let shared = Shared {
            store: Local::new(&self.store, &plans),
            stack,
            #[cfg(feature = "redis")]
            remote,
            clock: self.clock,
            lines,
        };
        Ok(Limiter { shared: Arc::new(shared) })
    }

    /// What keys are hashed under.
    fn secret(&self) -> Secret {
        #[cfg(feature = "redis")]
        if let Some(redis) = &self.remote {
            return Secret::shared(redis.key());
        }
        Secret::random()
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
