//! The part of a limiter that asks a store elsewhere.

use super::{Acquired, Admitted, Deciding, Limiter};
use crate::{
    algorithm::GivenBack,
    concurrency::{Held, Permit, Place},
    decision::{Decision, Origin, Outcome, Outcomes, Rejection, Verdict},
    remote::{Answer, FallenBack, Grant, Portion, Remote},
    store::{Bill, Mode, Refunds},
    turn::{Counted, Refund, Turn},
};
use std::{future::ready, mem, sync::Arc};
use tokio::runtime::Handle;

/// How something was asked for elsewhere.
struct How<'a> {
    /// The slots of this process that the request holds.
    held: Option<Held>,
    /// What those policies said.
    here: Vec<Outcome>,
    mode: Mode,
    /// Whether it stands in line.
    waits: bool,
    /// Where it stands in line for a slot.
    place: Option<&'a Place>,
}

/// A request that was rejected, with what is to be given back.
struct Rejected {
    rejection: Rejection,
    granted: Vec<Grant>,
}

impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts to decide a request, if the state is elsewhere. It stands in line only if it `waits`.
    pub(crate) fn ask(&self, request: &R, mode: Mode, waits: bool) -> Option<Deciding> {
        self.shared.remote.as_ref()?;
        let boarded = match mode {
            Mode::Charge => self.board(request),
            Mode::Peek => Ok(None),
        };
        let mut asked = Portion::default();
        let boarded = boarded.and_then(|aboard| {
            self.write_bill(request, &mut asked.bill, &mut asked.outcomes)?;
            Ok(aboard)
        });
        let limiter = self.clone();
        Some(match boarded {
            Ok(aboard) => Box::pin(async move {
                let admitted = limiter.decide_or_wait(&mut asked, mode, waits).await?;
                Ok(admitted.with(aboard))
            }),
            Err(rejection) => Box::pin(ready(Err(rejection))),
        })
    }

    async fn decide_or_wait(
        &self,
        asked: &mut Portion,
        mode: Mode,
        waits: bool,
    ) -> Result<Admitted, Rejection> {
        if waits && self.may_wait(&asked.bill) {
            return Box::pin(self.decide_in_line(asked, mode)).await;
        }
        self.decide_elsewhere(asked, mode, waits, None).await
    }

    /// Decides a request that waits for slots if there are none.
    async fn decide_in_line(&self, asked: &mut Portion, mode: Mode) -> Result<Admitted, Rejection> {
        let Portion { bill, outcomes } = asked.clone();
        match self.decide_elsewhere(asked, mode, true, None).await {
            Ok(admitted) => Ok(admitted),
            Err(rejection) => match self.line_up(&rejection, &bill, None) {
                Some(place) => self.clone().wait_for_slots(place, bill, outcomes, rejection).await,
                None => Err(rejection),
            },
        }
    }

    /// Decides what is asked for, of which nothing is left then.
    ///
    /// Each decision is such a future, so what few of them come to is in boxes of its own.
    pub(super) async fn decide_elsewhere(
        &self,
        asked: &mut Portion,
        mode: Mode,
        waits: bool,
        place: Option<&Place>,
    ) -> Result<Admitted, Rejection> {
        let shared = &self.shared;
        let Some(remote) = &shared.remote else {
            return self.decide_here(&asked.bill, mem::take(&mut asked.outcomes), place);
        };
        let held = self.hold_here(&asked.bill, &mut asked.outcomes, mode, place)?;
        if asked.bill.charges.is_empty() && asked.bill.slots_elsewhere().is_empty() {
            let (time_us, permit) = (shared.clock.now_us(), held.map(Permit::from));
            let acquired = Acquired { admitted: true, time_us, permit };
            return self.conclude(mem::take(&mut asked.outcomes), acquired, None);
        }
        let here = asked.take_what_is_here();
        let until = remote.until();
        let answer = remote.acquire(asked, mode, until).await;
        let how = How { held, here, mode, waits, place };
        match self.conclude_parts(remote, asked, answer, how) {
            Ok((admitted, None)) => Ok(admitted),
            Ok((admitted, Some(stood_in))) => {
                Ok(Box::pin(self.with_stand_in(admitted, *stood_in, &asked.bill)).await)
            }
            Err(rejected) => {
                let Rejected { rejection, granted } = *rejected;
                if !granted.is_empty() {
                    Box::pin(remote.give_back(granted, until)).await;
                }
                Err(rejection)
            }
        }
    }

    /// What comes of what was decided elsewhere, and beside it of what was not and has to be decided here.
    /// If the request is rejected, what is to be given back comes along.
    fn conclude_parts(
        &self,
        remote: &Remote,
        answered: &mut Portion,
        answer: Answer,
        how: How<'_>,
    ) -> Result<(Admitted, Option<Box<Admitted>>), Box<Rejected>> {
        let shared = &self.shared;
        let How { mut held, here, mode, waits, place } = how;
        let Answer { admitted, time_us, missing, leases, granted, origins } = answer;
        let (bill, mut outcomes) = (&answered.bill, mem::take(&mut answered.outcomes));
        if !admitted {
            outcomes.extend(here);
            let rejected = Acquired { admitted, time_us, permit: None };
            return match self.conclude(outcomes, rejected, None) {
                Ok(admitted) => Ok((admitted, None)),
                Err(rejection) => Err(Box::new(Rejected { rejection, granted })),
            };
        }
        let stood_in = match &missing {
            None => None,
            Some(portion) => match self.stand_in(remote, portion, mode, place, &mut held) {
                Ok(stood_in) => Some(Box::new(stood_in)),
                Err(rejection) => return Err(Box::new(Rejected { rejection, granted })),
            },
        };
        if let Some(held) = held.as_mut().filter(|_| mode == Mode::Charge) {
            held.take_elsewhere(&bill.slots, leases);
        }
        let time_us = match &stood_in {
            Some(stood_in) if bill.charges.is_empty() => stood_in.decision.time_us,
            _ => time_us,
        };
        let turn = shared.lines.as_ref().filter(|_| waits).and_then(|lines| {
            // Its turn is so much later by any clock.
            let acquired = |_: &mut [Outcome]| Some(shared.clock.now_us());
            let places = lines.join(Counted::Elsewhere, bill, &mut outcomes, acquired);
            (!places.is_empty()).then(|| {
                let charged = (bill.clone(), outcomes.clone());
                let refund = self.refund_elsewhere(time_us, origins.clone());
                Box::new(Turn::new(lines, places, &shared.clock, charged, refund))
            })
        });
        outcomes.extend(here);
        let acquired = Acquired { admitted, time_us, permit: held.map(Permit::from) };
        let decided = self.conclude(outcomes, acquired, turn);
        let rejected = |rejection| Box::new(Rejected { rejection, granted: Vec::new() });
        let mut admitted = decided.map_err(rejected)?;
        admitted.decision.origins = origins;
        Ok((admitted, stood_in))
    }

    /// Decides here what was not decided elsewhere, by the failure modes.
    fn stand_in(
        &self,
        remote: &Remote,
        portion: &Portion,
        mode: Mode,
        place: Option<&Place>,
        held: &mut Option<Held>,
    ) -> Result<Admitted, Rejection> {
        let fallen_back = remote.fall_back(portion);
        let FallenBack { bill, outcomes, uncounted } =
            fallen_back.map_err(|policy| self.unavailable(policy))?;
        let stood_in = match mode {
            Mode::Charge => self.decide_here(&bill, outcomes, place),
            Mode::Peek => self.look_here(&bill, outcomes),
        };
        let stood_in = stood_in?;
        if let Some(held) = held.as_mut().filter(|_| mode == Mode::Charge) {
            held.take_anyway(&uncounted);
        }
        Ok(stood_in)
    }

    /// A decision that was made in part elsewhere and in part here.
    async fn with_stand_in(&self, elsewhere: Admitted, here: Admitted, asked: &Bill) -> Admitted {
        let Admitted { mut decision, mut turn, permit } = elsewhere;
        if asked.charges.is_empty() && asked.slots.is_empty() {
            // Nothing was decided elsewhere.
            decision.stood_in = true;
            turn = here.turn;
        } else {
            let own = here.decision.outcomes.iter().map(|outcome| outcome.policy);
            let time_us = here.decision.time_us;
            let own = own.map(|policy| Origin { policy, time_us, stood_in: true });
            decision.origins = Some(
                decision.origins.iter().flat_map(|all| all.iter().copied()).chain(own).collect(),
            );
            if let Some(turn) = here.turn {
                // One after the other: the later of both is when it is over.
                turn.await;
            }
        }
        decision.outcomes.extend(here.decision.outcomes);
        decision.delay_us = decision.delay_us.max(here.decision.delay_us);
        self.shared.stack.sort(&mut decision.outcomes);
        let permit = match (permit, here.permit) {
            (Some(permit), Some(other)) => Some(permit.with(other)),
            (permit, other) => permit.or(other),
        };
        Admitted { decision, turn, permit }
    }

    /// Holds the slots of this process that a request asks for, before anybody else is asked. `None` if it
    /// does not ask for any slots.
    fn hold_here(
        &self,
        bill: &Bill,
        outcomes: &mut Outcomes,
        mode: Mode,
        place: Option<&Place>,
    ) -> Result<Option<Held>, Rejection> {
        let Some(slots) = self.shared.slots.as_ref().filter(|_| !bill.slots.is_empty()) else {
            return Ok(None);
        };
        let time_us = self.shared.clock.now_us();
        slots.at(time_us);
        let (here, elsewhere) = (bill.slots_here(), bill.slots_elsewhere());
        let (here_outcomes, other_outcomes) =
            outcomes[bill.charges.len()..].split_at_mut(here.len());
        let mut nobody_waits = true;
        for (slot, outcome) in elsewhere.iter().zip(&mut *other_outcomes) {
            // Whoever waits in this process is first.
            if slots.others_wait(slot, place) {
                (outcome.verdict, nobody_waits) = (Verdict::Full, false);
            }
        }
        let taken = slots.take(here, here_outcomes, mode, place, |fit| fit && nobody_waits);
        let Some(taken) = taken else {
            // Policies elsewhere were not asked, and have said nothing.
            let waited_for = other_outcomes.iter().filter(|other| other.verdict == Verdict::Full);
            let told = here_outcomes.iter().chain(waited_for).copied().collect();
            let rejected = Acquired { admitted: false, time_us, permit: None };
            return self.conclude(told, rejected, None).map(|_| None);
        };
        Ok(Some(Held::new(slots, taken, time_us)))
    }

    /// What a bill would come to by the state of this process.
    fn look_here(&self, bill: &Bill, mut outcomes: Outcomes) -> Result<Admitted, Rejection> {
        let acquired = self.shared.acquire(bill, &mut outcomes, Mode::Peek, None);
        self.conclude(outcomes, acquired, None)
    }

    /// Gives back what was charged elsewhere at `time_us`, in the background. It is for those who come
    /// later: those who wait already were told when their turn is.
    fn refund_elsewhere(&self, time_us: u64, origins: Option<Arc<[Origin]>>) -> Refund {
        let (limiter, runtime) = (self.clone(), Handle::current());
        Box::new(move |bill, outcomes| {
            let (limiter, bill, origins) = (limiter.clone(), bill.clone(), origins.clone());
            let outcomes = Outcomes::from_slice(outcomes);
            let refunds = Refunds::from_elem(GivenBack::default(), outcomes.len());
            runtime.spawn(async move {
                if let Some(remote) = &limiter.shared.remote {
                    let spent_us = |policy| spent_us(origins.as_deref(), policy, time_us);
                    remote.refund(&bill, &outcomes, spent_us).await;
                }
            });
            refunds
        })
    }

    /// Gives back what was charged by a decision, wherever that was.
    pub(super) async fn refund_parts(
        &self,
        remote: &Remote,
        mut bill: Bill,
        mut outcomes: Outcomes,
        decision: &Decision,
    ) -> Result<(), Rejection> {
        bill.slots.clear();
        outcomes.truncate(bill.charges.len());
        let (mut here, mut elsewhere) = (Portion::default(), Portion::default());
        for (charge, outcome) in bill.charges.iter().zip(outcomes) {
            let portion =
                if decision.stood_in_for(outcome.policy) { &mut here } else { &mut elsewhere };
            portion.bill.charges.push(*charge);
            portion.outcomes.push(outcome);
        }
        here.bill.rules.clone_from(&bill.rules);
        elsewhere.bill.rules = bill.rules;
        if let Ok(mut rest) = remote.fall_back(&here)
            && !rest.bill.charges.is_empty()
        {
            self.give_back(&rest.bill, &mut rest.outcomes, decision);
        }
        Self::recall(&mut elsewhere.outcomes, decision);
        let spent_us = |policy| spent_us(decision.origins.as_deref(), policy, decision.time_us);
        let refunded = remote.refund(&elsewhere.bill, &elsewhere.outcomes, spent_us).await;
        refunded.ok_or_else(|| self.unavailable(remote.first_policy()))
    }
}

impl Portion {
    /// Leaves what is to be decided elsewhere. Returns the outcomes of the slots of this process.
    fn take_what_is_here(&mut self) -> Vec<Outcome> {
        let (first, here) = (self.bill.charges.len(), self.bill.slots_here().len());
        self.bill.slots.drain(..here);
        self.outcomes.drain(first..first + here).collect()
    }
}

/// When something was charged for a policy.
fn spent_us(origins: Option<&[Origin]>, policy: &str, time_us: u64) -> u64 {
    let origin = origins.and_then(|origins| origins.iter().find(|origin| origin.policy == policy));
    origin.map_or(time_us, |origin| origin.time_us)
}
