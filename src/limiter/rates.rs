//! The rates that are decided in this process.

#[cfg(feature = "redis")]
use crate::deferred::Deferred;
use crate::{
    decision::{Outcome, Outcomes},
    store::{Bill, Mode, Refunds, local::Local},
};

#[derive(Debug)]
pub(super) struct Rates {
    /// The state, or what stands in for it while it is elsewhere and out of reach.
    pub(super) local: Local,
    /// The state of the fleet, as far as it is known here.
    #[cfg(feature = "redis")]
    pub(super) deferred: Option<Deferred>,
}

impl Rates {
    /// Makes of a bill what failure modes make of it, where that is how it has to be decided. The error is
    /// a policy that lets nothing pass then.
    #[inline]
    #[cfg_attr(not(feature = "redis"), expect(unused_variables, clippy::unused_self))]
    pub(super) fn prepare(
        &self,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
        now_us: impl FnOnce() -> u64,
    ) -> Result<(), &'static str> {
        #[cfg(feature = "redis")]
        if let Some(deferred) = &self.deferred {
            return deferred.stand_in(bill, outcomes, now_us());
        }
        Ok(())
    }

    /// Charges all of a bill, or nothing. Returns whether all policies have room.
    #[inline]
    pub(super) fn acquire(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        now_us: u64,
        mode: Mode,
    ) -> bool {
        #[cfg(feature = "redis")]
        if let Some(deferred) = self.deferred_for(bill) {
            return deferred.acquire(bill, outcomes, now_us, mode);
        }
        self.local.acquire(bill, outcomes, now_us, mode)
    }

    /// Gives back what a bill was charged at `spent_us`, as its outcomes tell.
    pub(super) fn refund(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        now_us: u64,
        spent_us: u64,
    ) -> Refunds {
        #[cfg(feature = "redis")]
        if let Some(deferred) = self.deferred_for(bill) {
            return deferred.refund(bill, outcomes, now_us, spent_us);
        }
        self.local.refund(bill, outcomes, now_us, spent_us)
    }

    /// Makes of a bill that of a decision that was made by the failure modes. Where one lets nothing pass,
    /// there was no such decision.
    #[cfg_attr(not(feature = "redis"), expect(unused_variables, clippy::unused_self))]
    pub(super) fn stand_in(&self, bill: &mut Bill, outcomes: &mut Outcomes) {
        #[cfg(feature = "redis")]
        if let Some(deferred) = &self.deferred
            && deferred.fall_back(bill, outcomes).is_err()
        {
            (*bill, *outcomes) = (Bill::default(), Outcomes::new());
        }
    }

    /// Forgets all that is known of those whom a bill is for.
    #[cfg_attr(not(feature = "redis"), expect(clippy::needless_pass_by_value, unused_variables))]
    pub(super) fn reset(&self, bill: Bill, outcomes: Outcomes) {
        self.local.reset(&bill);
        #[cfg(feature = "redis")]
        if let Some(deferred) = &self.deferred {
            let reset = deferred.reset(bill, outcomes);
            // Without a runtime nothing was told either.
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(reset);
            }
        }
    }

    pub(super) fn tracked_keys(&self) -> usize {
        let keys = self.local.tracked_keys();
        #[cfg(feature = "redis")]
        let keys = keys + self.deferred.as_ref().map_or(0, Deferred::tracked_keys);
        keys
    }

    /// What decides a bill, if the store is told of it later.
    #[cfg(feature = "redis")]
    #[inline]
    fn deferred_for(&self, bill: &Bill) -> Option<&Deferred> {
        self.deferred.as_ref().filter(|_| !bill.stands_in)
    }
}
