//! A store that is elsewhere, as the limiter sees it: bills go out, and come back decided or not.

use crate::{
    concurrency::Slot,
    decision::{Allotment, Outcome, Outcomes},
    policy::{FailureMode, stack::BuildError},
    store::{
        Bill, Mode, Rule,
        local::Plan,
        redis::{
            Ask, AskedCharge, CodedRule, Lease, MOST_LEASED, PolicyId, RedisStore, fill_in,
            fill_in_slots, memory,
        },
    },
};
use smallvec::SmallVec;
use std::collections::HashMap;
use tokio::sync::Semaphore;

pub(crate) struct Remote {
    store: RedisStore,
    policies: Box<[Policy]>,
    slots: Box<[SlotPolicy]>,
    /// Refunds are made one after the other, so that a crowd that gives up leaves connections to those
    /// who decide.
    refunds: Semaphore,
}

/// A policy, as the store knows it.
struct Policy {
    name: &'static str,
    rule: Rule,
    /// What this instance gives out by itself.
    share: Allotment,
    id: PolicyId,
    coded: CodedRule,
    failure_mode: FailureMode,
}

/// The same of one that limits concurrency.
struct SlotPolicy {
    name: &'static str,
    id: PolicyId,
    failure_mode: FailureMode,
}

/// What a store has decided.
pub(crate) struct Answer {
    pub(crate) admitted: bool,
    /// The store's present.
    pub(crate) time_us: u64,
    /// The slots that are held there now.
    pub(crate) lease: Option<Lease>,
}

/// What is left of a bill that a store did not decide.
#[derive(Default)]
pub(crate) struct FallenBack {
    pub(crate) bill: Bill,
    pub(crate) outcomes: Outcomes,
    /// Slots that are taken whether they are free or not.
    pub(crate) uncounted: SmallVec<[Slot; 1]>,
}

impl Remote {
    pub(crate) fn new(
        store: RedisStore,
        policies: impl Iterator<Item = (&'static str, Rule, FailureMode)>,
        shares: &[Plan],
        slots: impl Iterator<Item = (&'static str, FailureMode)>,
    ) -> Result<Self, BuildError> {
        let policy = |((name, rule, failure_mode), share): (_, &Plan)| {
            let id = PolicyId::new(name, &rule);
            let (share, coded) = (share.rule.allotment(), CodedRule::new(id, &rule));
            Policy { name, rule, share, id, coded, failure_mode }
        };
        let policies: Box<[Policy]> = policies.zip(shares).map(policy).collect();
        let slots = slots.map(|(name, failure_mode)| {
            let id = PolicyId::of_slots(name);
            SlotPolicy { name, id, failure_mode }
        });
        let slots: Box<[SlotPolicy]> = slots.collect();
        let of_rates = policies.iter().map(|policy| (policy.id, policy.name));
        let ids = of_rates.chain(slots.iter().map(|policy| (policy.id, policy.name)));
        let mut seen = HashMap::new();
        for (id, name) in ids {
            if let Some(other) = seen.insert(id, name) {
                let policies = [other, name].map(str::to_owned);
                return Err(BuildError::SameRecords { policies });
            }
        }
        Ok(Self { store, policies, slots, refunds: Semaphore::new(1) })
    }

    /// Has a bill decided, but for the slots of this process. Fills in the outcomes. `None` if the store did
    /// not decide.
    pub(crate) async fn acquire(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        mode: Mode,
    ) -> Option<Answer> {
        let mut ask = self.ask(bill, outcomes, mode);
        let slots: SmallVec<[Slot; 1]> = bill.slots_elsewhere().iter().map(leasable).collect();
        ask.charges.extend(slots.iter().map(|slot| {
            let id = self.slots[slot.policy as usize].id;
            let rule = CodedRule::of_slots(id, slot.limit, self.store.lease_us());
            AskedCharge { fingerprint: slot.fingerprint, rule, cost: slot.cost }
        }));
        let (told, lease) = self.store.decide(ask).await?;
        let charging = mode == Mode::Charge;
        let (rates, held) = outcomes.split_at_mut(bill.charges.len());
        fill_in(&told, self.rules(bill), rates, charging);
        let held = &mut held[bill.slots_here().len()..];
        fill_in_slots(&told, bill.charges.len(), &slots, held, charging);
        Some(Answer { admitted: told.admitted, time_us: told.time_us, lease })
    }

    /// Gives back what a bill was charged at `spent_us`, as its outcomes tell.
    pub(crate) async fn refund(
        &self,
        bill: &Bill,
        outcomes: &[Outcome],
        spent_us: u64,
    ) -> Option<()> {
        let memories = self.rules(bill).zip(outcomes);
        let memories: Vec<_> =
            memories.map(|(rule, outcome)| memory(rule, spent_us, outcome)).collect();
        let ask = self.ask(bill, outcomes, Mode::Charge);
        let _turn = self.refunds.acquire().await.ok()?;
        self.store.refund(&ask, spent_us, &memories).await
    }

    /// Forgets all that is known of those whom a bill is for.
    pub(crate) async fn reset(&self, bill: &Bill, outcomes: &[Outcome]) -> Option<()> {
        self.store.reset(&self.ask(bill, outcomes, Mode::Peek)).await
    }

    /// What is left of a bill that the store did not decide, to be decided in this process: what the
    /// policies that want that charge, against this instance's share. The error is the first policy that
    /// lets nothing pass.
    pub(crate) fn fall_back(
        &self,
        bill: &Bill,
        outcomes: &[Outcome],
    ) -> Result<FallenBack, &'static str> {
        let mut rest = FallenBack::default();
        rest.bill.rules.clone_from(&bill.rules);
        for (charge, outcome) in bill.charges.iter().zip(outcomes) {
            let policy = &self.policies[charge.policy()];
            match policy.failure_mode {
                FailureMode::Closed => return Err(policy.name),
                FailureMode::Open => {}
                FailureMode::Local => {
                    let (mut charge, mut outcome) = (*charge, *outcome);
                    outcome.quota = policy.share;
                    if charge.rule > 0 {
                        // Behind each rule that was looked up stands that of the share.
                        outcome.quota = bill.rules[charge.rule as usize].allotment();
                        charge.rule += 1;
                    }
                    rest.bill.charges.push(charge);
                    rest.outcomes.push(outcome);
                }
            }
        }
        for slot in bill.slots_elsewhere() {
            let policy = &self.slots[slot.policy as usize];
            match policy.failure_mode {
                FailureMode::Closed => return Err(policy.name),
                FailureMode::Open => rest.uncounted.push(*slot),
                FailureMode::Local => {
                    let limit = match slot.limit / u64::from(self.store.instances()) {
                        // Whoever may have one at all may have it everywhere.
                        0 => slot.limit.min(1),
                        share => share,
                    };
                    rest.bill.slots.push(Slot { limit, ..*slot });
                    let quota = Allotment::of_slots(limit);
                    rest.outcomes.push(Outcome::open(policy.name, quota, slot.cost));
                }
            }
        }
        Ok(rest)
    }

    /// The policy that stands for all where none is to blame.
    pub(crate) fn first_policy(&self) -> &'static str {
        let of_rates = self.policies.iter().map(|policy| policy.name);
        of_rates.chain(self.slots.iter().map(|policy| policy.name)).next().unwrap_or_default()
    }

    fn ask(&self, bill: &Bill, outcomes: &[Outcome], mode: Mode) -> Ask {
        let charges = bill.charges.iter().zip(outcomes).map(|(charge, outcome)| {
            let policy = &self.policies[charge.policy()];
            let rule = match charge.rule(&bill.rules) {
                None => policy.coded.clone(),
                Some(rule) => CodedRule::new(policy.id, rule),
            };
            AskedCharge { fingerprint: charge.fingerprint, rule, cost: outcome.cost }
        });
        let (prefix, charges) = (self.store.prefix().clone(), charges.collect());
        Ask::new(prefix, charges, mode == Mode::Peek)
    }

    /// The rules that the charges of a bill are held against.
    fn rules<'a>(&'a self, bill: &'a Bill) -> impl Iterator<Item = &'a Rule> {
        let rule = |policy: usize| &self.policies[policy].rule;
        bill.charges
            .iter()
            .map(move |charge| charge.rule(&bill.rules).unwrap_or_else(|| rule(charge.policy())))
    }
}

/// What a request cannot hold on a lease it can never have.
fn leasable(slot: &Slot) -> Slot {
    let cost = if slot.cost > MOST_LEASED { u64::MAX } else { slot.cost };
    Slot { cost, ..*slot }
}
