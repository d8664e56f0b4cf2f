//! The stack at work: charges in, decision out. Knows no HTTP.

mod builder;
#[cfg(feature = "redis")]
mod elsewhere;
mod gate;
mod rates;

pub use builder::LimiterBuilder;

#[cfg(feature = "redis")]
use crate::remote::{Portion, Remote};
use crate::{
    clock::Clock,
    concurrency::{Held, Permit, Place, Slots},
    decision::{Decision, Outcome, Outcomes, Reason, Rejection, Verdict},
    policy::stack::Stack,
    shed::Aboard,
    store::{Bill, Mode, Slot},
    turn::{Counted, Lines, Refund, Turn},
};
use gate::Gate;
use http::request::Parts;
use rates::Rates;
use std::{
    fmt,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::Poll,
};

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
    rates: Rates,
    #[cfg(feature = "redis")]
    remote: Option<Remote>,
    clock: Clock,
    /// The requests that wait for their turn; `None` if no policy holds requests back.
    lines: Option<Lines>,
    /// The slots that requests hold; `None` if no policy limits concurrency.
    slots: Option<Arc<Slots>>,
    /// The load shedders, if there are any.
    gate: Option<Gate<R>>,
}

/// The decision to let a request go on.
pub(crate) struct Admitted {
    pub(crate) decision: Decision,
    /// Its wait for its turn, if it has to.
    pub(crate) turn: Option<Box<Turn>>,
    /// What it holds until it is over.
    pub(crate) permit: Option<Permit>,
}

/// What comes with a decision that is made at once.
#[derive(Default)]
pub(crate) struct Extras {
    pub(crate) turn: Option<Box<Turn>>,
    pub(crate) permit: Option<Permit>,
    /// A request that was rejected waits for a slot: this is the decision that counts.
    pub(crate) deciding: Option<Deciding>,
}

/// A decision that takes time: a store elsewhere is asked, or there may be a slot later.
pub(crate) type Deciding = Pin<Box<dyn Future<Output = Result<Admitted, Rejection>> + Send>>;

/// What came of asking for all that a bill is for.
#[derive(Default)]
struct Acquired {
    admitted: bool,
    time_us: u64,
    /// What holds the slots from now on, if any policy has slots.
    permit: Option<Permit>,
}

/// How often those who wait for a slot look again, where others may release it elsewhere, or the limit may
/// grow.
const LOOK_AGAIN_US: u64 = 25_000;

impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts a new limiter.
    #[must_use]
    pub fn builder() -> LimiterBuilder<R> {
        LimiterBuilder::new()
    }

    /// Decides a request, and charges it to all policies that apply if it is admitted.
    ///
    /// Where a leaky bucket holds requests back, the decision's [`delay`](Decision::delay) is to be
    /// waited by the caller; [`ready`](Self::ready) waits by itself.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on; it was charged nothing then. So it is if the state is
    /// in Redis and not deferred, for whose answer only [`check_async`](Self::check_async) and `ready` can wait, or if
    /// requests in flight are counted, by a concurrency limit or a load shedder: that is for
    /// [`acquire`](Self::acquire).
    pub fn check(&self, request: &R) -> Result<Decision, Rejection> {
        self.needs_no_answer()?;
        self.needs_no_permit()?;
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
        self.needs_no_permit()?;
        self.acquire(request).await.map(|(decision, _)| decision)
    }

    /// Decides a request, waits for its turn and for a slot where policies have it wait, and holds the
    /// slots that it takes: keep the permit for as long as the request is in flight.
    ///
    /// Dropping the future while it waits gives everything back. Waiting needs a tokio runtime with its
    /// timer enabled.
    ///
    /// ```
    /// use tollgate::{Limiter, Policy, key::Key};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let limiter = Limiter::<str>::builder()
    ///     .key(|tenant: &str| Key::from(tenant))
    ///     .policy(Policy::concurrency("jobs", 1))
    ///     .build()
    ///     .unwrap();
    ///
    /// let (_, permit) = limiter.acquire("acme").await.unwrap();
    /// assert!(limiter.acquire("acme").await.is_err());
    /// drop(permit);
    /// assert!(limiter.acquire("acme").await.is_ok());
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on; it was charged nothing and holds nothing then.
    pub async fn acquire(&self, request: &R) -> Result<(Decision, Permit), Rejection> {
        let admitted = match self.ask(request, Mode::Charge, true) {
            Some(deciding) => deciding.await?,
            None => {
                let mut extras = Extras::default();
                match self.admit(request, &mut extras) {
                    Ok(decision) => Admitted { decision, turn: extras.turn, permit: extras.permit },
                    Err(rejection) => match extras.deciding {
                        Some(deciding) => deciding.await?,
                        None => return Err(rejection),
                    },
                }
            }
        };
        if let Some(turn) = admitted.turn {
            turn.await;
        }
        let permit = admitted.permit.unwrap_or_default().until_dropped();
        permit.goes_on();
        Ok((admitted.decision, permit))
    }

    /// [`acquire`](Self::acquire) without waiting: neither for a turn, which the decision's
    /// [`delay`](Decision::delay) tells, nor for a slot.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on now; it was charged nothing and holds nothing then. So it
    /// is if the state is in Redis.
    pub fn try_acquire(&self, request: &R) -> Result<(Decision, Permit), Rejection> {
        self.needs_no_answer()?;
        let aboard = self.board(request)?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill_here(request, &mut bill, &mut outcomes)?;
        let acquired = self.shared.acquire(&bill, &mut outcomes, Mode::Charge, None);
        let admitted = self.conclude(outcomes, acquired, None)?.with(aboard).by(&bill);
        Ok((admitted.decision, admitted.permit.unwrap_or_default().until_dropped()))
    }

    /// How many slots of a policy are held in this process, by all keys together. `None` if there is no
    /// policy of that name that limits concurrency.
    #[must_use]
    pub fn in_flight(&self, policy: &str) -> Option<u64> {
        let slots = self.shared.slots.as_ref()?;
        slots.position(policy).map(|policy| slots.taken(policy))
    }

    /// What [`check`](Self::check) would answer now, without charging anything. Load shedders are not
    /// asked.
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
    /// were charged: those of a `peek` were not, and a [`reset`](Self::reset) has forgotten those before it.
    ///
    /// Where several are given back in another order than they were charged in, a bucket may give back
    /// less than is left, never more: at least what was charged less what has drained since.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the key of the request can no longer be found, or a policy's function fails.
    pub fn refund(&self, request: &R, decision: &Decision) -> Result<(), Rejection> {
        self.needs_no_answer()?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill(request, &mut bill, &mut outcomes)?;
        if decision.stood_in {
            self.shared.rates.stand_in(&mut bill, &mut outcomes);
        }
        self.give_back(&bill, &mut outcomes, decision);
        Ok(())
    }

    /// Gives back what was charged by `decision` in this process.
    fn give_back(&self, bill: &Bill, outcomes: &mut [Outcome], decision: &Decision) {
        Self::recall(outcomes, decision);
        let Shared { rates, clock, lines, .. } = &*self.shared;
        let mut refund = || rates.refund(bill, outcomes, clock.now_us(), decision.time_us);
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
                // By another quota, a height says nothing.
                outcome.height = if same_quota { charged.height } else { 0 };
            }
        }
    }

    /// Forgets what is known of the keys of `request`: they are as good as new. A store that is told of
    /// decisions afterwards forgets them a moment later.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request has no key, or a policy's function fails.
    pub fn reset(&self, request: &R) -> Result<(), Rejection> {
        self.needs_no_answer()?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill(request, &mut bill, &mut outcomes)?;
        self.shared.rates.reset(bill, outcomes);
        Ok(())
    }

    /// [`check`](Self::check), wherever the state is.
    ///
    /// # Errors
    ///
    /// [`Rejection`] if the request may not go on; it was charged nothing then.
    pub async fn check_async(&self, request: &R) -> Result<Decision, Rejection> {
        self.needs_no_permit()?;
        match self.ask(request, Mode::Charge, false) {
            Some(deciding) => deciding.await.map(|admitted| admitted.decision),
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
            Some(deciding) => deciding.await.map(|admitted| admitted.decision),
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
            return self.refund_parts(remote, bill, outcomes, decision).await;
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
        #[cfg(feature = "redis")]
        if let Some(deferred) = &self.shared.rates.deferred {
            let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
            self.write_bill(request, &mut bill, &mut outcomes)?;
            let reset = deferred.reset(bill, outcomes).await;
            return reset.ok_or_else(|| self.unavailable(deferred.first_policy()));
        }
        self.reset(request)
    }

    /// Tells a [`DeferredStore`](crate::redis::DeferredStore) all that it was not told yet, and takes over
    /// how things stand there; for a service that is about to end. With other stores there is nothing
    /// to do.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    pub async fn flush(&self) {
        if let Some(deferred) = &self.shared.rates.deferred {
            deferred.flush().await;
        }
    }

    /// How many keys are kept in this process at the moment.
    #[must_use]
    pub fn tracked_keys(&self) -> usize {
        self.shared.rates.tracked_keys()
    }

    /// Decides a request at once. One that has to wait gets a place in line, and what it waits for, and
    /// what it holds, is in `extras`.
    #[inline]
    pub(crate) fn admit(&self, request: &R, extras: &mut Extras) -> Result<Decision, Rejection> {
        let Shared { lines, slots, gate, .. } = &*self.shared;
        if lines.is_none() && slots.is_none() && gate.is_none() {
            self.decide(request, Mode::Charge)
        } else {
            self.admit_to_lines(request, extras)
        }
    }

    #[inline(never)]
    fn admit_to_lines(&self, request: &R, extras: &mut Extras) -> Result<Decision, Rejection> {
        let aboard = self.board(request)?;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill_here(request, &mut bill, &mut outcomes)?;
        // Who may wait is decided again, from the beginning.
        let again = self.may_wait(&bill).then(|| outcomes.clone());
        match self.decide_here(&bill, outcomes, None) {
            Ok(admitted) => {
                let Admitted { decision, turn, permit } = admitted.with(aboard);
                (extras.turn, extras.permit) = (turn, permit);
                Ok(decision)
            }
            Err(rejection) => {
                if let Some(outcomes) = again
                    && let Some(place) = self.line_up(&rejection, &bill, None)
                {
                    let waiting =
                        self.clone().wait_for_slots(place, bill, outcomes, rejection.clone());
                    let waiting = async { waiting.await.map(|admitted| admitted.with(aboard)) };
                    extras.deciding = Some(Box::pin(waiting));
                }
                Err(rejection)
            }
        }
    }

    /// Has the load shedders let a request in. `None` if there are none.
    fn board(&self, request: &R) -> Result<Option<Aboard>, Rejection> {
        let boarded = self.shared.gate.as_ref().map(|gate| gate.admit(request)).transpose();
        boarded.map_err(|reason| self.rejection(reason))
    }

    /// Decides a bill by the state of this process. `place` is that of the request in the line for a slot.
    fn decide_here(
        &self,
        bill: &Bill,
        mut outcomes: Outcomes,
        place: Option<&Place>,
    ) -> Result<Admitted, Rejection> {
        let shared = &self.shared;
        let mut acquired = Acquired::default();
        let mut acquire = |outcomes: &mut [Outcome]| {
            acquired = shared.acquire(bill, outcomes, Mode::Charge, place);
            acquired.admitted.then_some(acquired.time_us)
        };
        let turn = match &shared.lines {
            None => {
                acquire(&mut outcomes);
                None
            }
            Some(lines) => {
                let places = lines.join(Counted::Here, bill, &mut outcomes, acquire);
                (!places.is_empty()).then(|| {
                    let charged = (bill.clone(), outcomes.clone());
                    let refund = self.refund_here(acquired.time_us);
                    Box::new(Turn::new(lines, places, &shared.clock, charged, refund))
                })
            }
        };
        self.conclude(outcomes, acquired, turn).map(|admitted| admitted.by(bill))
    }

    /// What comes of a bill.
    fn conclude(
        &self,
        mut outcomes: Outcomes,
        Acquired { admitted, time_us, permit }: Acquired,
        turn: Option<Box<Turn>>,
    ) -> Result<Admitted, Rejection> {
        let shared = &self.shared;
        let delay_us = outcomes.iter().map(|outcome| outcome.delay_us).max().unwrap_or(0);
        shared.stack.sort(&mut outcomes);
        if !admitted {
            return Err(Rejection::of_limits(outcomes, time_us));
        }
        let decision = Decision::new(outcomes, time_us, delay_us);
        Ok(Admitted { decision, turn, permit })
    }

    /// Whether a request may have to wait for a slot.
    fn may_wait(&self, bill: &Bill) -> bool {
        let slots = self.shared.slots.as_ref();
        let has_line = |slots: &Arc<Slots>, slot: &Slot| slots.plan(slot.policy).queue.is_some();
        slots.is_some_and(|slots| bill.slots.iter().any(|slot| has_line(slots, slot)))
    }

    /// A place in line for a request that was rejected for nothing but slots, if there is one and it
    /// has none.
    fn line_up(&self, rejection: &Rejection, bill: &Bill, place: Option<Place>) -> Option<Place> {
        let slots = self.shared.slots.as_ref()?;
        let mut full = None;
        for outcome in rejection.outcomes.iter().filter(|outcome| !outcome.is_admitted()) {
            let of_outcome = |slot: &&Slot| slots.plan(slot.policy).name == outcome.policy;
            let slot = bill.slots.iter().find(of_outcome)?;
            if outcome.verdict != Verdict::Full || slots.plan(slot.policy).queue.is_none() {
                return None;
            }
            full = full.or(Some(slot));
        }
        let full = full?;
        match place {
            Some(place) if place.is_for(full) => Some(place),
            _ => slots.join(full),
        }
    }

    /// Waits until there are slots for a request, or its time is up.
    async fn wait_for_slots(
        self,
        mut place: Place,
        mut bill: Bill,
        outcomes: Outcomes,
        mut rejection: Rejection,
    ) -> Result<Admitted, Rejection> {
        loop {
            if !self.called(&mut place).await {
                return Err(rejection);
            }
            if let Some(slots) = &self.shared.slots {
                slots.bring_to_date(&mut bill.slots);
            }
            let again = (bill.clone(), outcomes.clone());
            rejection = match self.decide_again(again, &place).await {
                Ok(admitted) => return Ok(admitted),
                Err(rejection) => rejection,
            };
            place = match self.line_up(&rejection, &bill, Some(place)) {
                Some(place) => place,
                None => return Err(rejection),
            };
        }
    }

    /// Waits to be called to look again for a slot. False if the time for that is up.
    async fn called(&self, place: &mut Place) -> bool {
        let looks_again = self.asks_elsewhere() || place.has_moving_limit();
        let mut look_again = looks_again.then(|| self.shared.clock.sleep(LOOK_AGAIN_US));
        poll_fn(|cx| {
            if place.poll_called(cx).is_ready() {
                return Poll::Ready(true);
            }
            if place.poll_time_up(cx).is_ready() {
                return Poll::Ready(false);
            }
            match &mut look_again {
                Some(sleep) if place.is_first() => sleep.poll(cx).map(|()| true),
                _ => Poll::Pending,
            }
        })
        .await
    }

    async fn decide_again(
        &self,
        (bill, outcomes): (Bill, Outcomes),
        place: &Place,
    ) -> Result<Admitted, Rejection> {
        #[cfg(feature = "redis")]
        if self.asks_elsewhere() {
            let mut asked = Portion { bill, outcomes };
            return self.decide_elsewhere(&mut asked, Mode::Charge, true, Some(place)).await;
        }
        self.decide_here(&bill, outcomes, Some(place))
    }

    /// Gives back what was charged in this process at `time_us`.
    fn refund_here(&self, time_us: u64) -> Refund {
        let limiter = self.clone();
        Box::new(move |bill, outcomes| {
            let shared = &limiter.shared;
            shared.rates.refund(bill, outcomes, shared.clock.now_us(), time_us)
        })
    }

    /// Whether the state is elsewhere.
    pub(crate) fn asks_elsewhere(&self) -> bool {
        #[cfg(feature = "redis")]
        return self.shared.remote.is_some();
        #[cfg(not(feature = "redis"))]
        false
    }

    /// The first shedder, or policy that limits concurrency.
    pub(crate) fn holder(&self) -> Option<&'static str> {
        let Shared { slots, gate, .. } = &*self.shared;
        let shedder = gate.as_ref().map(Gate::name);
        shedder.or_else(|| slots.as_ref().map(|slots| slots.plan(0).name))
    }

    /// Refuses what returns no permit, where requests hold some.
    #[inline]
    fn needs_no_permit(&self) -> Result<(), Rejection> {
        match self.holder() {
            None => Ok(()),
            Some(name) => Err(self.holds_something(name)),
        }
    }

    #[cold]
    fn holds_something(&self, policy: &'static str) -> Rejection {
        let message = "requests count until they are over; call `acquire`, or `try_acquire`";
        self.rejection(Reason::Faulty { policy, message: message.to_owned() })
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
        let shared = &self.shared;
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        self.write_bill_here(request, &mut bill, &mut outcomes)?;
        let Acquired { admitted, time_us, .. } = shared.acquire(&bill, &mut outcomes, mode, None);
        shared.stack.sort(&mut outcomes);
        if !admitted {
            return Err(Rejection::of_limits(outcomes, time_us));
        }
        let delay_us = match &shared.lines {
            None => 0,
            Some(_) => outcomes.iter().map(|outcome| outcome.delay_us).max().unwrap_or(0),
        };
        let mut decision = Decision::new(outcomes, time_us, delay_us);
        decision.stood_in = bill.stands_in;
        Ok(decision)
    }

    /// Writes what a request is to be charged in this process.
    #[inline]
    fn write_bill_here(
        &self,
        request: &R,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
    ) -> Result<(), Rejection> {
        self.write_bill(request, bill, outcomes)?;
        let Shared { rates, clock, .. } = &*self.shared;
        let prepared = rates.prepare(bill, outcomes, || clock.now_us());
        prepared.map_err(|policy| self.unavailable(policy))
    }

    #[cold]
    fn unavailable(&self, policy: &'static str) -> Rejection {
        self.rejection(Reason::Unavailable { policy })
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

impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts to decide a request, if the state is elsewhere. It stands in line only if it `waits`.
    #[cfg(not(feature = "redis"))]
    #[expect(clippy::unused_self, reason = "the state is here")]
    pub(crate) fn ask(&self, _request: &R, _mode: Mode, _waits: bool) -> Option<Deciding> {
        None
    }
}

impl Admitted {
    /// It was decided by that bill.
    fn by(mut self, bill: &Bill) -> Self {
        self.decision.stood_in = bill.stands_in;
        self
    }

    /// The request holds that, too.
    fn with(mut self, aboard: Option<Aboard>) -> Self {
        if let Some(aboard) = aboard {
            self.permit = Some(self.permit.unwrap_or_default().aboard(aboard));
        }
        self
    }
}

impl<R: ?Sized + 'static> Shared<R> {
    /// Asks for all that a bill is for. This is where a decision reads the time, once.
    #[inline]
    fn acquire(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        mode: Mode,
        place: Option<&Place>,
    ) -> Acquired {
        let time_us = self.clock.now_us();
        match &self.slots {
            Some(slots) if !bill.slots.is_empty() => {
                self.acquire_slots(slots, bill, outcomes, mode, place, time_us)
            }
            _ => {
                let admitted = self.rates.acquire(bill, outcomes, time_us, mode);
                Acquired { admitted, time_us, permit: None }
            }
        }
    }

    #[inline(never)]
    fn acquire_slots(
        &self,
        slots: &Arc<Slots>,
        bill: &Bill,
        outcomes: &mut [Outcome],
        mode: Mode,
        place: Option<&Place>,
        time_us: u64,
    ) -> Acquired {
        slots.at(time_us);
        let (rates, held) = outcomes.split_at_mut(bill.charges.len());
        let taken = slots.take(&bill.slots, held, mode, place, |fit| {
            // What rates have to say is told in any case.
            let mode = if fit { mode } else { Mode::Peek };
            self.rates.acquire(bill, rates, time_us, mode)
        });
        let permit = taken.map(|taken| Permit::from(Held::new(slots, taken, time_us)));
        Acquired { admitted: permit.is_some(), time_us, permit }
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
            .field("rates", &self.shared.rates)
            .finish_non_exhaustive()
    }
}
