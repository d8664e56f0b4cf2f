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
use std::sync::Arc;
use tokio::runtime::Handle;

/// How something was asked for elsewhere.
struct Asked<'a> {
    /// The slots of this process that the request holds.
    held: Option<Held>,
    /// What those policies said.
    here: Outcomes,
    mode: Mode,
    /// Whether it stands in line.
    waits: bool,
    /// Where it stands in line for a slot.
    place: Option<&'a Place>,
}

impl<R: ?Sized + 'static> Limiter<R> {
    /// Starts to decide a request, if the state is elsewhere. It stands in line only if it `waits`.
    pub(crate) fn ask(&self, request: &R, mode: Mode, waits: bool) -> Option<Deciding> {
        self.shared.remote.as_ref()?;
        let boarded = match mode {
            Mode::Charge => self.board(request),
            Mode::Peek => Ok(None),
        };
        let (mut bill, mut outcomes) = (Bill::default(), Outcomes::new());
        let written = match &boarded {
            Ok(_) => self.write_bill(request, &mut bill, &mut outcomes),
            Err(_) => Ok(()),
        };
        let limiter = self.clone();
        Some(Box::pin(async move {
            let aboard = boarded?;
            written?;
            let admitted = limiter.decide_or_wait(bill, outcomes, mode, waits).await?;
            Ok(admitted.with(aboard))
        }))
    }

    async fn decide_or_wait(
        self,
        bill: Bill,
        outcomes: Outcomes,
        mode: Mode,
        waits: bool,
    ) -> Result<Admitted, Rejection> {
        if !waits || !self.may_wait(&bill) {
            return self.decide_elsewhere(bill, outcomes, mode, waits, None).await;
        }
        let first = (bill.clone(), outcomes.clone());
        let decided = self.decide_elsewhere(first.0, first.1, mode, waits, None).await;
        let Err(rejection) = decided else {
            return decided;
        };
        match self.line_up(&rejection, &bill, None) {
            Some(place) => self.wait_for_slots(place, bill, outcomes, rejection).await,
            None => Err(rejection),
        }
    }

    pub(super) async fn decide_elsewhere(
        &self,
        bill: Bill,
        mut outcomes: Outcomes,
        mode: Mode,
        waits: bool,
        place: Option<&Place>,
    ) -> Result<Admitted, Rejection> {
        let shared = &self.shared;
        let Some(remote) = &shared.remote else {
            return self.decide_here(&bill, outcomes, place);
        };
        let held = self.hold_here(&bill, &mut outcomes, mode, place)?;
        if bill.charges.is_empty() && bill.slots_elsewhere().is_empty() {
            let (time_us, permit) = (shared.clock.now_us(), held.map(Permit::from));
            let acquired = Acquired { admitted: true, time_us, permit };
            return self.conclude(outcomes, acquired, None);
        }
        let (portion, here) = portions(bill, outcomes);
        let until = remote.until();
        let answer = remote.acquire(portion, mode, until).await;
        let asked = Asked { held, here, mode, waits, place };
        let decided = self.conclude_parts(remote, answer, asked).await;
        match decided {
            Ok(admitted) => Ok(admitted),
            Err((rejection, granted)) => {
                remote.give_back(granted, until).await;
                Err(rejection)
            }
        }
    }

    /// What comes of what was decided elsewhere, and of what was not and has to be decided here. If the
    /// request is rejected, what is to be given back comes along.
    async fn conclude_parts(
        &self,
        remote: &Remote,
        answer: Answer,
        asked: Asked<'_>,
    ) -> Result<Admitted, (Rejection, Vec<Grant>)> {
        let shared = &self.shared;
        let Asked { mut held, here, mode, waits, place } = asked;
        let Answer { admitted, time_us, answered, missing, leases, granted, origins } = answer;
        let Portion { bill, mut outcomes } = answered;
        if !admitted {
            outcomes.extend(here);
            let rejected = Acquired { admitted, time_us, permit: None };
            return match self.conclude(outcomes, rejected, None) {
                Ok(admitted) => Ok(admitted),
                Err(rejection) => Err((rejection, granted)),
            };
        }
        let stood_in = match &missing {
            None => None,
            Some(portion) => match self.stand_in(remote, portion, mode, place, &mut held).await {
                Ok(stood_in) => Some(stood_in),
                Err(rejection) => return Err((rejection, granted)),
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
            let places = lines.join(Counted::Elsewhere, &bill, &mut outcomes, acquired);
            (!places.is_empty()).then(|| {
                let charged = (bill.clone(), outcomes.clone());
                let refund = self.refund_elsewhere(time_us, origins.clone());
                Box::new(Turn::new(lines, places, &shared.clock, charged, refund))
            })
        });
        outcomes.extend(here);
        let acquired = Acquired { admitted, time_us, permit: held.map(Permit::from) };
        let decided = self.conclude(outcomes, acquired, turn);
        let mut admitted = decided.map_err(|rejection| (rejection, Vec::new()))?;
        admitted.decision.origins = origins;
        match stood_in {
            None => Ok(admitted),
            Some(stood_in) => Ok(self.with_stand_in(admitted, stood_in, &bill).await),
        }
    }

    /// Decides here what was not decided elsewhere, by the failure modes.
    async fn stand_in(
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

/// What is to be decided elsewhere, and the outcomes of the slots of this process.
fn portions(mut bill: Bill, mut outcomes: Outcomes) -> (Portion, Outcomes) {
    let (first, here) = (bill.charges.len(), bill.slots_here().len());
    let here_outcomes = outcomes.drain(first..first + here).collect();
    bill.slots.drain(..here);
    (Portion { bill, outcomes }, here_outcomes)
}

/// When something was charged for a policy.
fn spent_us(origins: Option<&[Origin]>, policy: &str, time_us: u64) -> u64 {
    let origin = origins.and_then(|origins| origins.iter().find(|origin| origin.policy == policy));
    origin.map_or(time_us, |origin| origin.time_us)
}
