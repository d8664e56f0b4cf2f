//! State in this process: a bounded, sharded map for each key space.
//!
//! A request locks one shard of each of its key spaces, in the order of the spaces, decides, writes
//! and lets go. No code but this crate's runs under a lock. Memory is given back by the requests
//! themselves: now and then one of them sweeps a shard, so no background thread is needed.

mod rings;
mod shard;
mod state;
mod table;

use super::{Bill, Charge, Fingerprint, Kind, Mode, Rule};
use parking_lot::{Mutex, MutexGuard};
use shard::Shard;
use smallvec::SmallVec;
use state::{Decide, Field, Refund, Step, TakeBack};
use std::{
    fmt,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// State in this process: how much of it may be kept.
///
/// Every key space (a distinct key extractor of the stack) has a map of its own with one fixed-size
/// entry per key: 16 bytes of fingerprint and 16 bytes for each of its policies (32 for a sliding
/// window, 40 for a bucket whose quota is looked up per request), at a load of 70 to 87 %. Keys
/// themselves are not kept. Sliding logs keep their timestamps beside it.
///
/// Keys whose state equals that of a key never seen are swept out as time goes by. When a map is
/// full all the same, the next new key takes the place of one that is fresh again, and if there is
/// none, of one that soonest would be: only then a caller gets a new budget too early, so make the
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

/// The map of a key space.
struct Space {
    shards: Box<[Padded]>,
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

/// A request sweeps at most about so many slots: well below a millisecond.
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
                let layout = shard::Layout { width: widths[space], fresh_at, logs: log_fields };
                Space::new(options, &layout, log_limit)
            })
            .collect();
        let entry = |(plan, field): (&Plan, Field)| Entry { rule: plan.rule, field };
        Self { spaces, policies: plans.iter().zip(fields).map(entry).collect() }
    }

    /// Decides a bill: charges all of it, or none, and fills in the answers. Returns whether all
    /// policies have room.
    pub(crate) fn acquire(&self, bill: &mut Bill, now_us: u64, mode: Mode) -> bool {
        let Bill { charges, rules } = bill;
        let admitted = match (charges.first(), charges.last()) {
            // Nearly all requests are counted in one space, and nothing has to be put in a list for
            // them.
            (Some(first), Some(last)) if first.space == last.space => {
                self.decide(&mut [self.hold(charges)], rules, now_us, mode)
            }
            _ => self.decide(&mut self.hold_all(charges), rules, now_us, mode),
        };
        for charge in charges {
            self.spaces[charge.space()].sweep(now_us);
        }
        admitted
    }

    #[inline(always)]
    fn decide(&self, held: &mut [Held<'_>], rules: &[Rule], now_us: u64, mode: Mode) -> bool {
        let mut charging = mode == Mode::Charge;
        if charging && held.iter().any(|held| held.slot.is_none()) {
            // Who is new takes up no room before it is admitted.
            charging = self.step(held, rules, now_us, Decide::new(false)).admitted;
            if charging {
                held.iter_mut().for_each(|held| held.enter(now_us));
            }
        }
        let decided = self.step(held, rules, now_us, Decide::new(charging));
        if charging && !decided.admitted {
            self.step(held, rules, now_us, TakeBack);
        }
        for held in held {
            held.shard.limit_logs(held.fingerprint, now_us);
        }
        decided.admitted
    }

    /// Takes a step on all charges, one after the other.
    #[inline(always)]
    fn step<S: Step>(&self, held: &mut [Held<'_>], rules: &[Rule], now_us: u64, mut step: S) -> S {
        for Held { shard, slot, charges, .. } in held {
            let Shard { table, rings, earliest_fresh_us, .. } = &mut **shard;
            let mut entry = slot.map(|slot| table.state_mut(slot));
            for charge in &mut **charges {
                let Entry { rule, field } = &self.policies[charge.policy()];
                let rule = charge.rule(rules).unwrap_or(rule);
                let entry = entry.as_deref_mut();
                let kept = field.step(entry, rule, rings, now_us, charge, &mut step);
                if let Some(fresh_at_us) = kept {
                    *earliest_fresh_us = (*earliest_fresh_us).min(fresh_at_us);
                }
            }
        }
        step
    }

    /// Gives back what a bill was charged at `spent_us`.
    pub(crate) fn refund(&self, bill: &mut Bill, now_us: u64, spent_us: u64) {
        let mut held = self.hold_all(&mut bill.charges);
        self.step(&mut held, &bill.rules, now_us, Refund { spent_us });
    }

    /// Forgets all that is known of those whom a bill is for.
    pub(crate) fn reset(&self, bill: &mut Bill) {
        for held in &mut self.hold_all(&mut bill.charges) {
            if let Some(slot) = held.slot {
                held.shard.remove(slot);
            }
        }
    }

    /// How many keys are kept at the moment, of all spaces together.
    pub(crate) fn tracked_keys(&self) -> usize {
        let shards = self.spaces.iter().flat_map(|space| &space.shards);
        shards.map(|shard| shard.0.lock().table.len()).sum()
    }

    /// Locks the shards of a bill's charges and finds their entries. Everybody locks in the order
    /// of the spaces, and no two shards of one space, so nobody waits for each other in a circle.
    fn hold_all<'a>(&'a self, charges: &'a mut [Charge]) -> SmallVec<[Held<'a>; 4]> {
        let spaces = charges.chunk_by_mut(|one, next| one.space == next.space);
        spaces.map(|charges| self.hold(charges)).collect()
    }

    /// Locks the shard of all charges of one space.
    #[inline(always)]
    fn hold<'a>(&'a self, charges: &'a mut [Charge]) -> Held<'a> {
        let Charge { space, fingerprint, .. } = charges[0];
        let shard = self.spaces[space as usize].shard(fingerprint).0.lock();
        let slot = shard.table.find(fingerprint).ok();
        Held { shard, slot, fingerprint, charges }
    }
}

impl fmt::Debug for Local {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Local").field("spaces", &self.spaces.len()).finish_non_exhaustive()
    }
}

/// A locked shard with the place of one who is counted in it, and what they are to be charged there.
struct Held<'a> {
    shard: MutexGuard<'a, Shard>,
    slot: Option<usize>,
    fingerprint: Fingerprint,
    charges: &'a mut [Charge],
}

impl Held<'_> {
    /// Gives one who is new an entry, unless all is free.
    #[cold]
    fn enter(&mut self, now_us: u64) {
        if self.slot.is_none() && self.charges.iter().any(|charge| charge.cost > 0) {
            self.slot = Some(self.shard.insert(self.fingerprint, now_us));
        }
    }
}

impl Space {
    fn new(options: &LocalStore, layout: &shard::Layout, log_limit: usize) -> Self {
        // Shards of a thousand keys or more are even enough, and swept in some microseconds.
        let mut shards = (options.max_keys / 1_024).next_power_of_two().clamp(1, 256);
        while log_limit > 0 && shards > 1 && options.max_log_entries / shards < log_limit {
            shards /= 2;
        }
        let bounds = shard::Bounds {
            keys: options.max_keys.div_ceil(shards),
            // A ring grows by doubling.
            log_entries: (options.max_log_entries / shards).max(2 * log_limit),
        };
        Self {
            shards: (0..shards)
                .map(|_| Padded(Mutex::new(Shard::new(layout.clone(), bounds))))
                .collect(),
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
        // A clock that stepped back wraps to a very long time: everything is due.
        if now_us.wrapping_sub(last_us) >= self.sweep_interval_us {
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
