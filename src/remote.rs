//! A store that is elsewhere, as the limiter sees it: bills go out, and come back decided or not.

use crate::{
    decision::{Allotment, Origin, Outcome, Outcomes},
    policy::{FailureMode, stack::BuildError},
    store::{
        Bill, Charge, Mode, Rule, Slot,
        local::Plan,
        redis::{
            Ask, AskedCharge, CodedRule, Lease, MOST_LEASED, Place, PolicyId, Purpose, RedisStore,
            Told, fill_in, fill_in_slot, memory,
        },
    },
};
use futures_util::future::join_all;
use smallvec::{SmallVec, smallvec};
use std::{collections::HashMap, sync::Arc};
use tokio::{
    runtime::Handle,
    sync::Semaphore,
    time::{Instant, timeout_at},
};

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

/// A part of what a request asks for: charges and slots, with an outcome for each, in that order.
#[derive(Clone, Default)]
pub(crate) struct Portion {
    pub(crate) bill: Bill,
    pub(crate) outcomes: Outcomes,
}

/// What came of asking.
pub(crate) struct Answer {
    /// Whether all who answered admit the request.
    pub(crate) admitted: bool,
    /// The present of the first who answered.
    pub(crate) time_us: u64,
    /// What was not decided, if anything.
    pub(crate) missing: Option<Box<Portion>>,
    /// The slots that are held elsewhere now.
    pub(crate) leases: Leases,
    /// What has to be given back if the request is not admitted after all.
    pub(crate) granted: Vec<Grant>,
    /// Who counts what by which clock, if not all by one.
    pub(crate) origins: Option<Arc<[Origin]>>,
}

pub(crate) type Leases = SmallVec<[Lease; 1]>;

/// What a request was charged in one place.
pub(crate) struct Grant {
    place: Place,
    ask: Ask,
    time_us: u64,
    memories: Vec<u64>,
}

/// What was charged to one policy before the store is told of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Count {
    pub(crate) charge: Charge,
    /// The rule, if it is not the policy's own.
    pub(crate) rule: Option<Rule>,
    pub(crate) cost: u64,
}

/// The charges and slots of a portion that are in one place, by their indices.
struct Part {
    place: Place,
    charges: SmallVec<[usize; 3]>,
    slots: SmallVec<[usize; 1]>,
}

/// What is left of a portion that was not decided elsewhere.
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
        store.use_for(!slots.is_empty(), false);
        Ok(Self { store, policies, slots, refunds: Semaphore::new(1) })
    }

    /// Has a portion decided, wherever its parts are, at the same time; what was decided is left of it.
    /// Where one of several parts is rejected, what was charged for the others is to be given back.
    pub(crate) async fn acquire(
        &self,
        portion: &mut Portion,
        mode: Mode,
        until: Instant,
    ) -> Answer {
        let parts = self.parts(&portion.bill);
        let told = self.decide(&parts, portion, mode, until).await;
        let answers = parts.iter().zip(told);
        let mut answer = Answer {
            admitted: true,
            time_us: 0,
            missing: None,
            leases: Leases::new(),
            granted: Vec::new(),
            origins: None,
        };
        let mut answered = SmallVec::<[(&Part, Told); 1]>::new();
        let mut missing = SmallVec::<[&Part; 1]>::new();
        for (part, told) in answers {
            match told {
                Some((told, lease)) => {
                    answer.admitted &= told.admitted;
                    answer.leases.extend(lease);
                    answered.push((part, told));
                }
                None => missing.push(part),
            }
        }
        if let Some((_, told)) = answered.first() {
            answer.time_us = told.time_us;
        }
        let charging = mode == Mode::Charge;
        for (part, told) in &answered {
            // Leases end by themselves when they are dropped.
            let may_go_back = !answer.admitted || !missing.is_empty();
            if charging && told.admitted && may_go_back && !part.charges.is_empty() {
                let mut charged = portion.clone();
                self.fill_in(&mut charged, part, told, true);
                answer.granted.push(self.grant(&charged, part, told.time_us));
            }
            self.fill_in(portion, part, told, charging && answer.admitted);
        }
        if !answer.admitted {
            answer.leases.clear();
        }
        if parts.len() > 1 {
            let policies = answered.iter().flat_map(|(part, told)| {
                let time_us = told.time_us;
                part.charges.iter().map(move |&index| (index, time_us))
            });
            let origin = |(index, time_us): (usize, u64)| Origin {
                policy: portion.outcomes[index].policy,
                time_us,
                stood_in: false,
            };
            answer.origins = Some(policies.map(origin).collect());
        }
        if !missing.is_empty() {
            let of_parts = |parts: &[&Part]| {
                let mut rest = Portion::default();
                parts.iter().for_each(|part| rest.extend_from(portion, part));
                rest
            };
            let kept: SmallVec<[&Part; 1]> = answered.iter().map(|(part, _)| *part).collect();
            let kept = of_parts(&kept);
            answer.missing = Some(Box::new(of_parts(&missing)));
            *portion = kept;
        }
        answer
    }

    async fn decide(
        &self,
        parts: &[Part],
        portion: &Portion,
        mode: Mode,
        until: Instant,
    ) -> SmallVec<[Option<(Told, Option<Lease>)>; 1]> {
        let decide = |part: &Part| {
            let mut ask = self.ask(&portion.bill, &portion.outcomes, &part.charges, mode);
            ask.charges.extend(part.slots.iter().map(|&index| {
                let slot = leasable(&portion.bill.slots[index]);
                let id = self.slots[slot.policy as usize].id;
                let rule = CodedRule::of_slots(id, slot.limit, self.store.lease_us());
                AskedCharge { fingerprint: slot.fingerprint, rule, cost: slot.cost }
            }));
            self.store.decide(part.place, Arc::new(ask), until)
        };
        match parts {
            [part] => smallvec![decide(part).await],
            parts => join_all(parts.iter().map(decide)).await.into(),
        }
    }

    /// Fills in the outcomes of a part.
    fn fill_in(&self, portion: &mut Portion, part: &Part, told: &Told, charging: bool) {
        let Portion { bill, outcomes } = portion;
        let mut rates: Outcomes = part.charges.iter().map(|&index| outcomes[index]).collect();
        let rules = part.charges.iter().map(|&index| self.rule(bill, &bill.charges[index]));
        fill_in(told, rules, &mut rates, charging);
        for (&index, outcome) in part.charges.iter().zip(rates) {
            outcomes[index] = outcome;
        }
        let first = bill.charges.len();
        for (&index, [held, ..]) in part.slots.iter().zip(&told.states[part.charges.len()..]) {
            let slot = leasable(&bill.slots[index]);
            fill_in_slot(&slot, *held, &mut outcomes[first + index], charging && told.admitted);
        }
    }

    fn grant(&self, charged: &Portion, part: &Part, time_us: u64) -> Grant {
        let Portion { bill, outcomes } = charged;
        let ask = self.ask(bill, outcomes, &part.charges, Mode::Charge);
        let memories = self.memories(bill, outcomes, &part.charges, time_us);
        Grant { place: part.place, ask, time_us, memories }
    }

    /// What each algorithm has to know of the moment at which something was spent.
    fn memories(
        &self,
        bill: &Bill,
        outcomes: &[Outcome],
        charges: &[usize],
        spent_us: u64,
    ) -> Vec<u64> {
        let of = |&index: &usize| {
            memory(self.rule(bill, &bill.charges[index]), spent_us, outcomes[index].height)
        };
        charges.iter().map(of).collect()
    }

    /// When a request that is asked now has to be answered.
    pub(crate) fn until(&self) -> Instant {
        self.store.until()
    }

    /// Has counted what an identity was charged already. The answer tells how it was before, in the order
    /// of `counts`.
    pub(crate) async fn count(&self, counts: &[Count]) -> Option<Told> {
        let place = self.store.place_of(counts.first()?.charge.fingerprint);
        let ask = self.ask_of(counts.iter().map(|count| (count, count.cost)), Purpose::Count);
        let (told, _) = self.store.decide(place, Arc::new(ask), self.store.until()).await?;
        Some(told)
    }

    /// Gives back what was counted of one charge at `spent_us`, as far as it is sure not to have come back
    /// by itself.
    pub(crate) async fn uncount(&self, count: &Count, cost: u64, spent_us: u64) -> Option<()> {
        let place = self.store.place_of(count.charge.fingerprint);
        let rule = count.rule.as_ref().unwrap_or(&self.policies[count.charge.policy()].rule);
        // Nobody knows what was beneath it there.
        let memory = memory(rule, spent_us, 0);
        let ask = self.ask_of([(count, cost)].into_iter(), Purpose::Charge);
        self.store.refund(place, &ask, spent_us, &[memory]).await
    }

    /// Whether all that a bill is about can be asked.
    pub(crate) fn reaches(&self, bill: &Bill) -> bool {
        let mut charges = bill.charges.iter();
        charges.all(|charge| self.store.is_up(self.store.place_of(charge.fingerprint)))
    }

    /// Gives back what was granted to a request that was not admitted after all. That is done even if
    /// nobody waits for it, and nobody waits longer than until then.
    pub(crate) async fn give_back(&self, granted: Vec<Grant>, until: Instant) {
        if granted.is_empty() {
            return;
        }
        let store = self.store.clone();
        let give_back = async move {
            for Grant { place, ask, time_us, memories } in granted {
                let given = store.refund(place, &ask, time_us, &memories).await;
                store.count_given_back(given.is_some());
            }
        };
        // It fails only if the runtime is shut down.
        let _ = timeout_at(until, Handle::current().spawn(give_back)).await;
    }

    /// Gives back what a bill was charged, each policy at the time that `spent_us` tells.
    pub(crate) async fn refund(
        &self,
        bill: &Bill,
        outcomes: &[Outcome],
        spent_us: impl Fn(&'static str) -> u64,
    ) -> Option<()> {
        let _turn = self.refunds.acquire().await.ok()?;
        let mut refunded = Some(());
        for Part { place, charges, .. } in self.parts(bill) {
            let Some(&first) = charges.first() else {
                continue;
            };
            let spent_us = spent_us(outcomes[first].policy);
            let memories = self.memories(bill, outcomes, &charges, spent_us);
            let ask = self.ask(bill, outcomes, &charges, Mode::Charge);
            let refund = self.store.refund(place, &ask, spent_us, &memories).await;
            refunded = refunded.and(refund);
        }
        refunded
    }

    /// Forgets all that is known of those whom a bill is for.
    pub(crate) async fn reset(&self, bill: &Bill, outcomes: &[Outcome]) -> Option<()> {
        let mut reset = Some(());
        for Part { place, charges, .. } in self.parts(bill) {
            if !charges.is_empty() {
                let ask = self.ask(bill, outcomes, &charges, Mode::Peek);
                reset = reset.and(self.store.reset(place, &ask).await);
            }
        }
        reset
    }

    /// The parts of a bill, by where they are.
    fn parts(&self, bill: &Bill) -> SmallVec<[Part; 1]> {
        let mut parts = SmallVec::<[Part; 1]>::new();
        let mut part_at = |place: Place| {
            let known = parts.iter().position(|part| part.place == place);
            known.unwrap_or_else(|| {
                parts.push(Part { place, charges: SmallVec::new(), slots: SmallVec::new() });
                parts.len() - 1
            })
        };
        let of_charges: SmallVec<[usize; 3]> = bill
            .charges
            .iter()
            .map(|charge| part_at(self.store.place_of(charge.fingerprint)))
            .collect();
        let of_slots: SmallVec<[usize; 1]> =
            bill.slots.iter().map(|slot| part_at(self.store.place_of(slot.fingerprint))).collect();
        of_charges.iter().enumerate().for_each(|(index, &part)| parts[part].charges.push(index));
        of_slots.iter().enumerate().for_each(|(index, &part)| parts[part].slots.push(index));
        parts
    }

    /// What is left of a portion that was not decided elsewhere, to be decided in this process: what the
    /// policies that want that charge, against this instance's share. The error is the first policy that
    /// lets nothing pass.
    pub(crate) fn fall_back(&self, portion: &Portion) -> Result<FallenBack, &'static str> {
        let Portion { bill, outcomes } = portion;
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
        for slot in &bill.slots {
            let policy = &self.slots[slot.policy as usize];
            match policy.failure_mode {
                FailureMode::Closed => return Err(policy.name),
                FailureMode::Open => {
                    let cost = slot.cost.min(slot.limit);
                    rest.uncounted.push(Slot { cost, ..*slot });
                }
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

    fn ask(&self, bill: &Bill, outcomes: &[Outcome], charges: &[usize], mode: Mode) -> Ask {
        let charges = charges.iter().map(|&index| {
            let charge = &bill.charges[index];
            let policy = &self.policies[charge.policy()];
            let rule = match charge.rule(&bill.rules) {
                None => policy.coded.clone(),
                Some(rule) => CodedRule::new(policy.id, rule),
            };
            let cost = outcomes[index].cost;
            AskedCharge { fingerprint: charge.fingerprint, rule, cost }
        });
        let purpose = match mode {
            Mode::Charge => Purpose::Charge,
            Mode::Peek => Purpose::Peek,
        };
        Ask::new(self.store.prefix().clone(), charges.collect(), purpose)
    }

    fn ask_of<'a>(&self, counts: impl Iterator<Item = (&'a Count, u64)>, purpose: Purpose) -> Ask {
        let charges = counts.map(|(Count { charge, rule, .. }, cost)| {
            let policy = &self.policies[charge.policy()];
            let rule = match rule {
                None => policy.coded.clone(),
                Some(rule) => CodedRule::new(policy.id, rule),
            };
            AskedCharge { fingerprint: charge.fingerprint, rule, cost }
        });
        Ask::new(self.store.prefix().clone(), charges.collect(), purpose)
    }

    /// The rule that a charge is held against.
    fn rule<'a>(&'a self, bill: &'a Bill, charge: &Charge) -> &'a Rule {
        charge.rule(&bill.rules).unwrap_or_else(|| &self.policies[charge.policy()].rule)
    }
}

impl Portion {
    fn extend_from(&mut self, other: &Self, part: &Part) {
        if self.bill.rules.is_empty() {
            self.bill.rules.clone_from(&other.bill.rules);
        }
        let mut slot_outcomes: Outcomes = self.outcomes.drain(self.bill.charges.len()..).collect();
        for &index in &part.charges {
            self.bill.charges.push(other.bill.charges[index]);
            self.outcomes.push(other.outcomes[index]);
        }
        for &index in &part.slots {
            self.bill.slots.push(other.bill.slots[index]);
            slot_outcomes.push(other.outcomes[other.bill.charges.len() + index]);
        }
        self.outcomes.extend(slot_outcomes);
    }
}

/// What a request cannot hold on a lease it can never have.
fn leasable(slot: &Slot) -> Slot {
    let cost = if slot.cost > MOST_LEASED { u64::MAX } else { slot.cost };
    Slot { cost, ..*slot }
}
