//! A shard: a table with its bounds, and what is forgotten when they are reached.

use super::{marks::Marks, rings::Rings, state::Field, table::Table};
use crate::{algorithm::Mark, key::Fingerprint, store::Charge};

/// In this order, what nearly all decisions need is on one cache line with the lock.
#[repr(C)]
pub(super) struct Shard {
    /// No entry is fresh before this instant. It may be too early, never too late.
    pub(super) earliest_fresh_us: u64,
    pub(super) marks: Marks,
    pub(super) table: Table,
    pub(super) rings: Rings,
    /// How many keys came in since the whole table was last looked through.
    inserted_since_sweep: usize,
    layout: Layout,
    bounds: Bounds,
}

/// What the words of an entry mean, as far as forgetting is concerned.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) width: usize,
    /// Where the instants stand after which the policies' states can be forgotten.
    pub(super) fresh_at: Box<[usize]>,
    /// How far ahead those instants can be.
    pub(super) horizon_us: u64,
    pub(super) logs: Box<[Field]>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) keys: usize,
    pub(super) marks: usize,
    pub(super) log_entries: usize,
}

/// How many entries are compared to find the one that is fresh soonest.
const CANDIDATES: usize = 64;

impl Shard {
    pub(super) fn new(layout: Layout, bounds: Bounds) -> Self {
        Self {
            earliest_fresh_us: u64::MAX,
            marks: Marks::new(),
            table: Table::new(layout.width),
            rings: Rings::new(),
            inserted_since_sweep: 0,
            layout,
            bounds,
        }
    }

    /// Adds an entry that is not there yet, and forgets another one if there are too many.
    pub(super) fn insert(&mut self, fingerprint: Fingerprint, now_us: u64) {
        self.inserted_since_sweep += 1;
        while self.table.len() >= self.bounds.keys {
            self.make_room(fingerprint, now_us);
        }
        self.table.insert(fingerprint);
    }

    /// Forgets others until the sliding logs take no more memory than they may.
    #[inline]
    pub(super) fn limit_logs(&mut self, fingerprint: Fingerprint, now_us: u64) {
        while self.rings.capacity() > self.bounds.log_entries && self.table.len() > 1 {
            self.make_room(fingerprint, now_us);
        }
    }

    /// Removes all that is fresh, and returns how many slots were looked at.
    pub(super) fn sweep(&mut self, now_us: u64) -> usize {
        self.marks.sweep(now_us, self.layout.horizon_us);
        if now_us < self.earliest_fresh_us {
            return 0;
        }
        self.inserted_since_sweep = 0;
        self.earliest_fresh_us = u64::MAX;
        let Self { table, rings, earliest_fresh_us, layout, .. } = self;
        let slots = table.slots();
        table.retain(|state| {
            let fresh_at_us = layout.fresh_at(state);
            let keep = fresh_at_us > now_us;
            if keep {
                *earliest_fresh_us = (*earliest_fresh_us).min(fresh_at_us);
            } else {
                layout.logs.iter().for_each(|log| rings.release(log.ring(state)));
            }
            keep
        });
        slots
    }

    /// The mark of a bucket, or one to leave there. `None` if there are too many to leave another.
    pub(super) fn mark(&mut self, charge: &Charge, now_us: u64) -> Option<Mark> {
        if let Some(mark) = self.marks.get(charge) {
            return Some(*mark);
        }
        if self.marks.len() >= self.bounds.marks {
            self.marks.sweep(now_us, self.layout.horizon_us);
        }
        (self.marks.len() < self.bounds.marks).then(Mark::default)
    }

    pub(super) fn remove(&mut self, slot: usize) {
        let state = self.table.state(slot);
        self.layout.logs.iter().for_each(|log| self.rings.release(log.ring(state)));
        self.table.remove(slot);
    }

    /// Forgets what is fresh; if that is nothing, the one that is fresh soonest of some, but not
    /// the one that room is made for. Looking through the whole table pays only once a part of it is
    /// new, so that a flood of new keys costs each of them no more than a look at some entries.
    fn make_room(&mut self, fingerprint: Fingerprint, now_us: u64) {
        if self.inserted_since_sweep * CANDIDATES >= self.table.slots() {
            let before = self.table.len();
            self.sweep(now_us);
            if self.table.len() < before {
                return;
            }
        }
        let (Ok(start) | Err(start)) = self.table.find(fingerprint);
        let table = &self.table;
        let soonest = (start..table.slots())
            .chain(0..start)
            .filter(|&slot| table.fingerprint(slot).is_some_and(|found| found != fingerprint))
            .take(CANDIDATES)
            .min_by_key(|&slot| self.layout.worth(table.state(slot), now_us));
        if let Some(slot) = soonest {
            self.remove(slot);
        }
    }
}

impl Layout {
    /// How much an entry is worth to be kept: the longer until it is fresh, the more. What a clock
    /// left behind that was far ahead of the present is worth nothing.
    fn worth(&self, state: &[u64], now_us: u64) -> u64 {
        let ahead_us = self.fresh_at(state).saturating_sub(now_us);
        if ahead_us > 2 * self.horizon_us { 0 } else { ahead_us }
    }

    /// From when on an entry can be forgotten.
    fn fresh_at(&self, state: &[u64]) -> u64 {
        self.fresh_at.iter().map(|&word| state[word]).max().unwrap_or(0)
    }
}
