//! State in this process: a bounded, sharded map for each key space.
//!
//! A request locks one shard of each of its key spaces, in the order of the spaces, decides, writes
//! and lets go. No code but this crate's runs under a lock. Memory is given back by the requests
//! themselves: now and then one of them sweeps a shard, so no background thread is needed.

mod marks;
mod rings;
mod shard;
pub(super) mod state;
mod table;

use super::{Bill, Charge, Kind, Mode, Refunds, Rule};
use crate::{algorithm::GivenBack, decision::Outcome, key::Fingerprint, quota::MAX_SPAN_US};
use marks::Marks;
use parking_lot::{Mutex, MutexGuard};
use rings::Rings;
use shard::Shard;
use state::{Decide, Field, Refund, Step, TakeBack};
use std::{
    fmt, slice,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// State in this process: how much of it may be kept.
///
/// Every key space (a distinct key extractor of the stack) has a map of its own with one fixed-size
/// entry per key: 16 bytes of fingerprint and 16 bytes for each of its policies (24 for a sliding
/// window, 48 for a bucket whose quota is looked up per request), at a load of 70 to 87 % while it fills. Keys
/// themselves are not kept. Sliding logs keep their timestamps beside it, and a bucket that was
/// [given something back](crate::Limiter::refund) out of order some 100 bytes for a while: at most one
/// in eight, and of others nothing is given back then that others lie above.
///
/// Keys whose state equals that of a key never seen are swept out as time goes by. When a map is
/// full all the same, the next new key takes the place of one that is fresh again, and if none was
/// found of late, of one that soonest is or will be: only then a caller gets a new budget too early, so make the
/// map larger than the number of callers that are near their limits at one time.
#[derive(Clone, Debug)]
pub struct LocalStore {
    max_keys: usize,
    max_log_entries: usize,
}

impl LocalStore {
    /// A store with the default bounds.
    #[must_use]
    pub const fn new() -> Self {
        Self { max_keys: 1_000_000, max_log_entries: 8_000_000 }
    }

    /// The most keys that are kept of each key space; at least 1. Default: 1,000,000, about 45 MB
    /// with one token bucket.
    ///
    /// A map is split into up to 256 shards with an equal share of this bound each. Keys spread over
    /// them evenly but not exactly so, and a full shard is full even if others are not: leave a few
    /// percent of room.
    #[must_use]
    pub const fn max_keys(mut self, max_keys: usize) -> Self {
        self.max_keys = if max_keys == 0 { 1 } else { max_keys };
        self
    }

    /// The most timestamps, of 8 bytes, that the sliding logs of each key space may have room for;
    /// a single full log is always allowed. Default: 8,000,000.
    #[must_use]
    pub const fn max_log_entries(mut self, max_log_entries: usize) -> Self {
        self.max_log_entries = max_log_entries;
        self
    }
}

impl Default for LocalStore {
    fn default() -> Self {
        Self::new()
    }
}

/// The state of all policies of a stack.
pub(crate) struct Local {
    spaces: Box<[Space]>,
    policies: Box<[Entry]>,
    /// Whether a charge that is taken back would leave something: a bucket that is counted by the terms
    /// of another quota from then on.
    asks_first: bool,
}

/// A policy, as the store sees it.
struct Entry {
    rule: Rule,
    /// Where its state stands in the entries of its space.
    field: Field,
}

/// What a store has to know of a policy beforehand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) space: usize,
    pub(crate) kind: Kind,
    pub(crate) rule: Rule,
    /// Whether its quota may be another one from request to request.
    pub(crate) varies: bool,
    /// The largest limit of its sliding log, 0 for other algorithms.
    pub(crate) log_limit: usize,
}

impl Plan {
    /// How far ahead the instant can be from which on the policy's state can be forgotten.
    fn horizon_us(&self) -> u64 {
        if self.varies { MAX_SPAN_US } else { self.rule.horizon_us() }
    }
}

/// The map of a key space.
struct Space {
    shards: Box<[Padded]>,
    keeps_logs: bool,
    /// The time between two sweeps of one shard each.
    sweep_interval_us: u64,
    last_sweep_us: AtomicU64,
    next_to_sweep: AtomicUsize,
}

/// A lock on cache lines of its own, so that neighbours don't slow each other down.
#[repr(align(128))]
struct Padded(Mutex<Shard>);

/// Every shard is swept once in this time, if there are any requests at all.
const SWEEP_ROUND_US: u64 = 1_000_000;

/// There is room for one mark for so many keys: about ten bytes more for each key at the very most.
const KEYS_PER_MARK: usize = 8;

/// A request sweeps no further shard after so many slots: about a millisecond.
const SWEEP_SLOTS: usize = 1 << 17;

impl Local {
    /// A store for the policies of a stack, whose spaces are numbered from 0.
    pub(crate) fn new(options: &LocalStore, plans: &[Plan]) -> Self {
        let spaces = plans.iter().map(|plan| plan.space + 1).max().unwrap_or(0);
        let mut widths = vec![0; spaces];
        let fields: Vec<_> = plans
            .iter()
            .map(|plan| {
                let field = Field::new(widths[plan.space], plan.kind, plan.varies);
                widths[plan.space] = field.end();
                field
            })
            .collect();
        let spaces = (0..spaces)
            .map(|space| {
                let of_space = || plans.iter().zip(&fields).filter(|(plan, _)| plan.space == space);
                let fresh_at = of_space().map(|(_, field)| field.fresh_at()).collect();
                let logs = of_space().filter(|(plan, _)| plan.kind == Kind::SlidingLog);
                let log_fields = logs.clone().map(|(_, field)| field.clone()).collect();
                let log_limit = logs.map(|(plan, _)| plan.log_limit).sum();
                let layout = shard::Layout {
                    width: widths[space],
                    fresh_at,
                    horizon_us: of_space().map(|(plan, _)| plan.horizon_us()).max().unwrap_or(0),
                    logs: log_fields,
                };
                Space::new(options, &layout, log_limit)
            })
            .collect();
        let entry = |(plan, field): (&Plan, Field)| Entry { rule: plan.rule, field };
        let asks_first = plans.len() > 1 && plans.iter().any(|plan| plan.varies);
        Self { spaces, policies: plans.iter().zip(fields).map(entry).collect(), asks_first }
    }

    /// Decides a bill: charges all of it, or none, and fills in the outcomes. Returns whether all
    /// policies have room.
    pub(crate) fn acquire(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        now_us: u64,
        mode: Mode,
    ) -> bool {
        let case = Case { rules: &bill.rules, now_us };
        let charging = mode == Mode::Charge;
        let mut admitted = true;
        if charging && self.asks_first {
            admitted = self.ask(&case, &bill.charges, outcomes);
        }
        let admitted = admitted && self.decide(&case, &bill.charges, outcomes, charging);
        for space in &self.spaces {
            space.sweep(now_us);
        }
        admitted
    }

    /// Decides the charges of the first space, and under its lock those of all that follow. Charges
    /// are made as soon as there is room, so that nearly all are looked at only once, and taken back
    /// if there is none for a later one.
    #[inline(always)]
    fn decide(
        &self,
        case: &Case<'_>,
        charges: &[Charge],
        outcomes: &mut [Outcome],
        charging: bool,
    ) -> bool {
        let Some(first) = charges.first() else {
            return true;
        };
        let of_space = first_space(charges);
        let mut shard = self.hold(first);
        let mut decide = Decide::new(charging);
        if !self.step(&mut shard, case, of_space, outcomes, &mut decide) {
            return self.decide_new(shard, case, charges, outcomes, charging);
        }
        let mut admitted = decide.admitted;
        if of_space.len() < charges.len() {
            admitted &= self.decide_rest(case, charges, outcomes, charging && admitted);
        }
        if charging && !admitted {
            self.take_back(&mut shard, case, of_space, outcomes);
        }
        if !shard.marks.is_empty() {
            self.heed_marks(&shard.marks, case, of_space, outcomes);
        }
        if self.spaces[first.space()].keeps_logs {
            shard.limit_logs(first.fingerprint, case.now_us);
        }
        admitted
    }

    /// Decides, and charges nothing.
    #[inline(never)]
    fn ask(&self, case: &Case<'_>, charges: &[Charge], outcomes: &mut [Outcome]) -> bool {
        self.decide(case, charges, outcomes, false)
    }

    /// The same for the charges behind those of the first space.
    #[inline(never)]
    fn decide_rest(
        &self,
        case: &Case<'_>,
        charges: &[Charge],
        outcomes: &mut [Outcome],
        charging: bool,
    ) -> bool {
        let end = first_space(charges).len();
        self.decide(case, &charges[end..], &mut outcomes[end..], charging)
    }

    /// The same for one who has no entry in the first space, and gets none before it is admitted.
    #[cold]
    fn decide_new(
        &self,
        mut shard: MutexGuard<'_, Shard>,
        case: &Case<'_>,
        charges: &[Charge],
        outcomes: &mut [Outcome],
        charging: bool,
    ) -> bool {
        let of_space = first_space(charges);
        let state = &mut shard.table.new_state();
        let mut decide = Decide::new(false);
        self.step_each(case, state, &mut Rings::new(), of_space, outcomes, &mut decide);
        let mut admitted = decide.admitted;
        admitted &= self.decide_rest(case, charges, outcomes, charging && admitted);
        let costs = outcomes[..of_space.len()].iter().any(|outcome| outcome.cost > 0);
        if charging && admitted && costs {
            let fingerprint = charges[0].fingerprint;
            shard.insert(fingerprint, case.now_us);
            self.step(&mut shard, case, of_space, outcomes, &mut Decide::new(true));
            self.heed_marks(&shard.marks, case, of_space, outcomes);
            shard.limit_logs(fingerprint, case.now_us);
        }
        admitted
    }

    /// What was charged to a bucket with a mark remembers it.
    #[cold]
    fn heed_marks(
        &self,
        marks: &Marks,
        case: &Case<'_>,
        charges: &[Charge],
        outcomes: &mut [Outcome],
    ) {
        for (charge, outcome) in charges.iter().zip(outcomes).filter(|(_, it)| it.height > 0) {
            if let Rule::Meter(meter) = self.rule(case, charge)
                && let Some(mark) = marks.get(charge)
                && mark.counts_at(case.now_us)
            {
                outcome.height = meter.height_with(mark, outcome.height);
            }
        }
    }

    #[cold]
    fn take_back(
        &self,
        shard: &mut Shard,
        case: &Case<'_>,
        charges: &[Charge],
        outcomes: &mut [Outcome],
    ) {
        self.step(shard, case, charges, outcomes, &mut TakeBack::new());
    }

    /// Gives back what a bill was charged at `spent_us`, as its outcomes tell.
    pub(crate) fn refund(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        now_us: u64,
        spent_us: u64,
    ) -> Refunds {
        let case = Case { rules: &bill.rules, now_us };
        let mut refunds = Refunds::new();
        while let Some(first) = bill.charges.get(refunds.len()) {
            let mut shard = self.hold(first);
            for charge in first_space(&bill.charges[refunds.len()..]) {
                let mut mark = shard.mark(charge, now_us);
                let given_back = GivenBack::default();
                let mut refund = Refund { spent_us, mark: mark.as_mut(), given_back };
                let outcome = slice::from_mut(&mut outcomes[refunds.len()]);
                self.step(&mut shard, &case, slice::from_ref(charge), outcome, &mut refund);
                refunds.push(refund.given_back);
                if let Some(mark) = mark.filter(|mark| mark.until_us > now_us) {
                    shard.marks.put(charge, mark);
                }
            }
        }
        refunds
    }

    /// Takes the same step on each of the charges of one space, if the entry is there.
    #[inline(always)]
    fn step(
        &self,
        shard: &mut Shard,
        case: &Case<'_>,
        charges: &[Charge],
        outcomes: &mut [Outcome],
        step: &mut impl Step,
    ) -> bool {
        let Some(entry) = shard.table.get_mut(charges[0].fingerprint) else {
            return false;
        };
        let fresh_at_us = self.step_each(case, entry, &mut shard.rings, charges, outcomes, step);
        shard.earliest_fresh_us = shard.earliest_fresh_us.min(fresh_at_us);
        true
    }

    /// Takes the same step on each charge of one entry. Returns from when on one of its states can
    /// be forgotten.
    #[inline(always)]
    fn step_each(
        &self,
        case: &Case<'_>,
        entry: &mut [u64],
        rings: &mut Rings,
        charges: &[Charge],
        outcomes: &mut [Outcome],
        step: &mut impl Step,
    ) -> u64 {
        let mut earliest_fresh_us = u64::MAX;
        for (charge, outcome) in charges.iter().zip(outcomes) {
            let field = &self.policies[charge.policy()].field;
            let rule = self.rule(case, charge);
            let fresh_at_us = field.step(entry, rule, rings, case.now_us, outcome, step);
            earliest_fresh_us = earliest_fresh_us.min(fresh_at_us);
        }
        earliest_fresh_us
    }

    /// The rule that a charge is held against.
    #[inline(always)]
    fn rule<'a>(&'a self, case: &Case<'a>, charge: &Charge) -> &'a Rule {
        charge.rule(case.rules).unwrap_or(&self.policies[charge.policy()].rule)
    }

    /// Forgets all that is known of those whom a bill is for.
    pub(crate) fn reset(&self, bill: &Bill) {
        for charge in &bill.charges {
            let mut shard = self.hold(charge);
            if let Ok(slot) = shard.table.find(charge.fingerprint) {
                shard.remove(slot);
            }
        }
    }

    /// Puts the state of a policy in place of what is known of it that another engine told in `numbers`
    /// at `told_us`, and counts `cost` on top of it.
    #[cfg(feature = "redis")]
    pub(crate) fn take_in(
        &self,
        charge: &Charge,
        rule: Option<&Rule>,
        (numbers, told_us): ([u64; 3], u64),
        now_us: u64,
        cost: u64,
    ) {
        let mut shard = self.hold(charge);
        let fingerprint = charge.fingerprint;
        if shard.table.get_mut(fingerprint).is_none() {
            shard.insert(fingerprint, now_us);
        }
        let Entry { rule: own, field } = &self.policies[charge.policy()];
        if let Some(entry) = shard.table.get_mut(fingerprint) {
            let rule = rule.unwrap_or(own);
            let fresh_at_us = field.take_in(entry, rule, (numbers, told_us), now_us, cost);
            shard.earliest_fresh_us = shard.earliest_fresh_us.min(fresh_at_us);
        }
    }

    /// How many keys are kept at the moment, of all spaces together.
    pub(crate) fn tracked_keys(&self) -> usize {
        let shards = self.spaces.iter().flat_map(|space| &space.shards);
        shards.map(|shard| shard.0.lock().table.len()).sum()
    }

    /// Locks the shard of a charge. Everybody locks in the order of the spaces, and no two shards of
    /// one space, so nobody waits for each other in a circle.
    #[inline(always)]
    fn hold(&self, charge: &Charge) -> MutexGuard<'_, Shard> {
        self.spaces[charge.space()].shard(charge.fingerprint).0.lock()
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("spaces", &self.spaces.len()).finish_non_exhaustive()
    }
}

/// The charges of the first space, of some at least.
#[inline(always)]
fn first_space(charges: &[Charge]) -> &[Charge] {
    let of_first = |charge: &Charge| charge.space == charges[0].space;
    // Nearly all requests are counted in one space.
    if charges.last().is_some_and(of_first) {
        return charges;
    }
    &charges[..charges.partition_point(of_first)]
}

/// What a request is to be held against if not the policies' own rules, and when.
struct Case<'a> {
    rules: &'a [Rule],
    now_us: u64,
}

impl Space {
    fn new(options: &LocalStore, layout: &shard::Layout, log_limit: usize) -> Self {
        // Shards of five hundred keys or more are even enough, and swept in some microseconds.
        let mut shards = (options.max_keys / 1_024).next_power_of_two().clamp(1, 256);
        // A ring grows by doubling.
        let largest_ring = 2 * log_limit;
        while shards > 1 && options.max_log_entries / shards < largest_ring {
            shards /= 2;
        }
        let keys =
            |shard| options.max_keys / shards + usize::from(shard < options.max_keys % shards);
        let bounds = |shard| shard::Bounds {
            keys: keys(shard),
            marks: keys(shard).div_ceil(KEYS_PER_MARK),
            log_entries: (options.max_log_entries / shards).max(largest_ring),
        };
        Self {
            shards: (0..shards)
                .map(|shard| Padded(Mutex::new(Shard::new(layout.clone(), bounds(shard)))))
                .collect(),
            keeps_logs: !layout.logs.is_empty(),
            sweep_interval_us: SWEEP_ROUND_US / shards as u64,
            last_sweep_us: AtomicU64::new(0),
            next_to_sweep: AtomicUsize::new(0),
        }
    }

    #[inline]
    fn shard(&self, fingerprint: Fingerprint) -> &Padded {
        // The number of shards is a power of two. Tables sort by the upper half.
        &self.shards[fingerprint.lower as usize & (self.shards.len() - 1)]
    }

    /// Sweeps as many shards as are due. Between two requests none are, and then all that have
    /// become due, up to a bound on the time that takes.
    #[inline]
    fn sweep(&self, now_us: u64) {
        let last_us = self.last_sweep_us.load(Relaxed);
        // Of two requests at one moment the later may have read the earlier time: that is no clock
        // that stepped back. One that stepped back by a round or more makes this wrap.
        let since_us = (now_us + SWEEP_ROUND_US - 1).wrapping_sub(last_us);
        if since_us >= self.sweep_interval_us + SWEEP_ROUND_US - 1 {
            self.sweep_since(last_us, now_us);
        }
    }

    #[cold]
    fn sweep_since(&self, last_us: u64, now_us: u64) {
        let claimed = self.last_sweep_us.compare_exchange(last_us, now_us, Relaxed, Relaxed);
        if claimed.is_err() {
            return;
        }
        let shards = self.shards.len();
        // After a step back the difference wraps to a very long time: everything is due.
        let due = (now_us.wrapping_sub(last_us) / self.sweep_interval_us).min(shards as u64);
        let mut slots = 0;
        for _ in 0..due {
            let next = self.next_to_sweep.fetch_add(1, Relaxed) % shards;
            slots += self.shards[next].0.lock().sweep(now_us);
            if slots > SWEEP_SLOTS {
                break;
            }
        }
    }
}
