//! A store that is elsewhere, as the limiter sees it: bills go out, and come back decided or not.

use crate::{
    decision::{Allotment, Outcome, Outcomes},
    policy::{FailureMode, stack::BuildError},
    store::{
        Bill, Mode, Rule,
        local::Plan,
        redis::{Ask, AskedCharge, CodedRule, PolicyId, RedisStore, fill_in, memory},
    },
};
use tokio::sync::Semaphore;

pub(crate) struct Remote {
    store: RedisStore,
    policies: Box<[Policy]>,
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

impl Remote {
    pub(crate) fn new(
        store: RedisStore,
        policies: impl Iterator<Item = (&'static str, Rule, FailureMode)>,
        shares: &[Plan],
    ) -> Result<Self, BuildError> {
        let policy = |((name, rule, failure_mode), share): (_, &Plan)| {
            let id = PolicyId::new(name, &rule);
            let (share, coded) = (share.rule.allotment(), CodedRule::new(id, &rule));
            Policy { name, rule, share, id, coded, failure_mode }
        };
        let policies: Box<[Policy]> = policies.zip(shares).map(policy).collect();
        for (index, policy) in policies.iter().enumerate() {
            if let Some(other) = policies[..index].iter().find(|other| other.id == policy.id) {
                let policies = [other.name, policy.name].map(str::to_owned);
                return Err(BuildError::SameRecords { policies });
            }
        }
        Ok(Self { store, policies, refunds: Semaphore::new(1) })
    }

    /// Has a bill decided. Fills in the outcomes, and returns whether the request is admitted and the
    /// store's present. `None` if the store did not decide.
    pub(crate) async fn acquire(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        mode: Mode,
    ) -> Option<(bool, u64)> {
        let ask = self.ask(bill, outcomes, mode);
        let told = self.store.decide(ask).await?;
        fill_in(&told, self.rules(bill), outcomes, mode == Mode::Charge);
        Some((told.admitted, told.time_us))
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

    /// What is left of a bill that the store did not decide, to be decided in this process: the
    /// charges of the policies that want that, against this instance's share. The error is the first
    /// policy that lets nothing pass.
    pub(crate) fn fall_back(
        &self,
        bill: &Bill,
        outcomes: &[Outcome],
    ) -> Result<(Bill, Outcomes), &'static str> {
        let mut rest = Bill { rules: bill.rules.clone(), ..Bill::default() };
        let mut rest_outcomes = Outcomes::new();
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
                    rest.charges.push(charge);
                    rest_outcomes.push(outcome);
                }
            }
        }
        Ok((rest, rest_outcomes))
    }

    /// The policy that stands for all where none is to blame.
    pub(crate) fn first_policy(&self) -> &'static str {
        self.policies[0].name
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
        Ask { prefix, charges, peeks: mode == Mode::Peek }
    }

    /// The rules that the charges of a bill are held against.
    fn rules<'a>(&'a self, bill: &'a Bill) -> impl Iterator<Item = &'a Rule> {
        let rule = |policy: usize| &self.policies[policy].rule;
        bill.charges
            .iter()
            .map(move |charge| charge.rule(&bill.rules).unwrap_or_else(|| rule(charge.policy())))
    }
}
