//! The part of a limiter that asks a store elsewhere.

use super::{Acquired, Admitted, Deciding, Limiter};
use crate::{
    concurrency::{Held, Place},
    decision::{Outcome, Outcomes, Reason, Rejection, Verdict},
    remote::FallenBack,
    store::{Bill, Lengths, Mode},
    turn::{Counted, Refund, Turn},
};
use tokio::runtime::Handle;

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
        if bill.slots.is_empty() || !waits {
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
            return self.decide_here(bill, outcomes, place);
        };
        let mut held = self.hold_here(&bill, &mut outcomes, mode, place)?;
        if bill.charges.is_empty() && bill.slots_elsewhere().is_empty() {
            let acquired = Acquired { admitted: true, time_us: shared.clock.now_us(), held };
            return self.conclude(outcomes, acquired, None);
        }
        let lines = shared.lines.as_ref().filter(|_| waits);
        if let Some(answer) = remote.acquire(&bill, &mut outcomes, mode).await {
            let (admitted, time_us) = (answer.admitted, answer.time_us);
            if let Some(held) = held.as_mut().filter(|_| admitted && mode == Mode::Charge) {
                held.take_elsewhere(bill.slots_elsewhere(), answer.lease);
            }
            let turn = lines.and_then(|lines| {
                // Its turn is so much later by any clock.
                let acquired = |_: &mut [Outcome]| admitted.then(|| shared.clock.now_us());
                let places = lines.join(Counted::Elsewhere, &bill, &mut outcomes, acquired);
                (!places.is_empty()).then(|| {
                    let charged = (bill.clone(), outcomes.clone());
                    let refund = self.refund_elsewhere(time_us);
                    Box::new(Turn::new(lines, places, &shared.clock, charged, refund))
                })
            });
            return self.conclude(outcomes, Acquired { admitted, time_us, held }, turn);
        }
        let fallen_back = remote.fall_back(&bill, &outcomes);
        let FallenBack { bill: rest, outcomes: rest_outcomes, uncounted } =
            fallen_back.map_err(|policy| self.unavailable(policy))?;
        let here = &outcomes[bill.charges.len()..][..bill.slots_here().len()];
        let stood_in = match mode {
            Mode::Charge => self.decide_here(rest, rest_outcomes, place),
            Mode::Peek => self.look_here(&rest, rest_outcomes),
        };
        let mut admitted = stood_in?;
        admitted.decision.outcomes.extend_from_slice(here);
        shared.stack.sort(&mut admitted.decision.outcomes);
        admitted.decision.stood_in = true;
        if let Some(held) = &mut held {
            held.take_anyway(&uncounted);
        }
        admitted.permit = match (admitted.permit, held) {
            (Some(permit), Some(held)) => Some(permit.with(held)),
            (None, held) => held.map(Into::into),
            (permit, None) => permit,
        };
        Ok(admitted)
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
            let rejected = Acquired { admitted: false, time_us, held: None };
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

    pub(super) fn unavailable(&self, policy: &'static str) -> Rejection {
        self.rejection(Reason::Unavailable { policy })
    }
}
