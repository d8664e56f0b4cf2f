//! A hash table of fixed-size entries, sorted by fingerprint.
//!
//! An entry is a 128-bit fingerprint and some words of state, side by side in one array, so that a
//! look-up of a key out of a million costs about one cache miss. Fingerprints come from a keyed
//! hash and are spread evenly: an entry's home is where its fingerprint would stand if they all
//! were equally far apart, and entries stand in the order of their fingerprints, at their home or as
//! little behind it as the others let them (ordered linear probing, Amble and Knuth 1974). A miss
//! ends at the first larger fingerprint, and growing, shrinking and sweeping are one pass from the
//! left to the right.

use crate::key::Fingerprint;
use smallvec::SmallVec;

/// Entries are at most this share of the homes, as a fraction.
const MAX_LOAD: (usize, usize) = (7, 8);

/// Slots behind the last home, for entries that were pushed beyond it.
const OVERFLOW: usize = 64;

/// The words of a fingerprint.
const FINGERPRINT: usize = 2;

/// The words of a cache line.
const LINE: usize = 8;

/// In this order, for what a look-up needs is to be on one cache line with the lock.
#[repr(C)]
pub(super) struct Table {
    /// All slots. An empty one has nobody's fingerprint; the last slot is always empty.
    words: Vec<u64>,
    homes: usize,
    /// Where the first slot begins: with a cache line, so that as few entries as can be reach over
    /// the end of one.
    first: u32,
    /// The words of an entry.
    width: u32,
    len: usize,
}

impl Table {
    /// An empty table for entries with so many words of state.
    pub(super) fn new(state_words: usize) -> Self {
        let width = (FINGERPRINT + state_words) as u32;
        Self { words: Vec::new(), homes: 0, first: 0, width, len: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    const fn width(&self) -> usize {
        self.width as usize
    }

    pub(super) fn slots(&self) -> usize {
        (self.words.len() - self.first as usize) / self.width()
    }

    /// Where a slot begins.
    #[inline]
    fn at(&self, slot: usize) -> usize {
        self.first as usize + slot * self.width()
    }

    /// The slot of an entry, or the one where it would have to be.
    pub(super) fn find(&self, wanted: Fingerprint) -> Result<usize, usize> {
        let mut slot = home(wanted, self.homes);
        // The last slot is always empty; only a table without any has no slot to end the search.
        while let Some(entry) = self.words.get(self.at(slot)..).and_then(<[u64]>::first_chunk) {
            let found = fingerprint(entry);
            if found == wanted {
                return Ok(slot);
            }
            if found == Fingerprint::NOBODY || found > wanted {
                break;
            }
            slot += 1;
        }
        Err(slot)
    }

    /// The state of an entry.
    #[inline]
    pub(super) fn get_mut(&mut self, wanted: Fingerprint) -> Option<&mut [u64]> {
        let (start, width) = (self.at(home(wanted, self.homes)), self.width());
        let mut rest = self.words.get_mut(start..)?;
        loop {
            let (entry, others) = rest.split_at_mut_checked(width)?;
            let (of, state) = entry.split_first_chunk_mut()?;
            let found = fingerprint(of);
            if found == wanted {
                return Some(state);
            }
            if found == Fingerprint::NOBODY || found > wanted {
                return None;
            }
            rest = others;
        }
    }

    /// The state of one who has no entry yet.
    #[cold]
    pub(super) fn new_state(&self) -> SmallVec<[u64; 8]> {
        SmallVec::from_elem(0, self.width() - FINGERPRINT)
    }

    /// The state of the entry in `slot`.
    pub(super) fn state(&self, slot: usize) -> &[u64] {
        let start = self.at(slot);
        &self.words[start + FINGERPRINT..start + self.width()]
    }

    /// Whose entry is in `slot`.
    pub(super) fn fingerprint(&self, slot: usize) -> Option<Fingerprint> {
        let found = fingerprint(self.words[self.at(slot)..].first_chunk()?);
        (found != Fingerprint::NOBODY).then_some(found)
    }

    /// Adds an entry that is not there yet, with a state of zeros.
    pub(super) fn insert(&mut self, fingerprint: Fingerprint) {
        if (self.len + 1) * MAX_LOAD.1 > self.homes * MAX_LOAD.0 {
            self.resize(self.homes + self.homes / 4 + 8);
        }
        loop {
            let Err(slot) = self.find(fingerprint) else {
                return;
            };
            let mut empty = slot;
            while self.fingerprint(empty).is_some() {
                empty += 1;
            }
            // The last slot has to stay empty: it ends every search.
            if empty + 1 < self.slots() {
                let (from, to) = (self.at(slot), self.at(empty));
                let next = self.at(slot + 1);
                self.words.copy_within(from..to, next);
                self.words[from..next].fill(0);
                self.words[from] = fingerprint.upper;
                self.words[from + 1] = fingerprint.lower;
                self.len += 1;
                return;
            }
            self.resize(self.homes + self.homes / 4 + 8);
        }
    }

    /// Removes the entry in `slot`.
    pub(super) fn remove(&mut self, slot: usize) {
        let mut end = slot + 1;
        while self.fingerprint(end).is_some_and(|displaced| home(displaced, self.homes) < end) {
            end += 1;
        }
        let (from, behind) = (self.at(slot), self.at(slot + 1)..self.at(end));
        self.words.copy_within(behind, from);
        let last = self.at(end - 1)..self.at(end);
        self.words[last].fill(0);
        self.len -= 1;
    }

    /// Keeps the entries whose state `keep` approves of, and gives memory back if few are left.
    pub(super) fn retain(&mut self, mut keep: impl FnMut(&[u64]) -> bool) {
        let mut next = 0;
        for slot in 0..self.slots() {
            let Some(fingerprint) = self.fingerprint(slot) else {
                continue;
            };
            let (from, end) = (self.at(slot), self.at(slot + 1));
            if keep(self.state(slot)) {
                let to = home(fingerprint, self.homes).max(next);
                next = to + 1;
                if to == slot {
                    continue;
                }
                let to = self.at(to);
                self.words.copy_within(from..end, to);
            } else {
                self.len -= 1;
            }
            self.words[from..end].fill(0);
        }
        if self.len < self.homes / 4 {
            self.resize(self.len + self.len / 2);
        }
    }

    /// Lays the entries out over at least so many homes.
    fn resize(&mut self, mut homes: usize) {
        while !self.try_resize(homes) {
            homes += homes / 8 + 8;
        }
    }

    fn try_resize(&mut self, homes: usize) -> bool {
        let slots = if homes == 0 { 0 } else { homes + OVERFLOW.min(homes) };
        let mut words = vec![0; slots * self.width() + LINE];
        let first = words.as_ptr().align_offset(LINE * size_of::<u64>()).min(LINE);
        words.truncate(first + slots * self.width());
        let mut next = 0;
        for entry in self.words[self.first as usize..].chunks_exact(self.width()) {
            let Some(entry_of) = entry.first_chunk() else { continue };
            let fingerprint = fingerprint(entry_of);
            if fingerprint == Fingerprint::NOBODY {
                continue;
            }
            let slot = home(fingerprint, homes).max(next);
            next = slot + 1;
            if next >= slots {
                return false;
            }
            words[first + slot * self.width()..first + next * self.width()].copy_from_slice(entry);
        }
        self.homes = homes;
        self.words = words;
        self.first = first as u32;
        true
    }
}

/// Whose entry it is.
#[inline]
fn fingerprint(&[upper, lower]: &[u64; FINGERPRINT]) -> Fingerprint {
    Fingerprint { upper, lower }
}

/// Where an entry stands in a table of `homes` homes if nobody is in its way.
#[inline]
fn home(fingerprint: Fingerprint, homes: usize) -> usize {
    // Scales it from 0..2^64 to 0..homes, which keeps the order.
    ((u128::from(fingerprint.upper) * homes as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug)]
    enum Op {
        Insert(Fingerprint, u64),
        Remove(Fingerprint),
        Retain(u64),
    }

    /// Few fingerprints, some of them crowded at either end.
    fn fingerprint() -> impl Strategy<Value = Fingerprint> {
        prop_oneof![
            1_u128..40,
            (0_u128..40).prop_map(|n| u128::MAX - n),
            (1_u128..200).prop_map(|n| n << 120 | n),
            (1_u128..200).prop_map(|n| n << 64),
        ]
        .prop_map(Fingerprint::from)
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (fingerprint(), any::<u64>()).prop_map(|(f, s)| Op::Insert(f, s)),
            2 => fingerprint().prop_map(Op::Remove),
            1 => (0_u64..4).prop_map(Op::Retain),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn a_table_is_a_map(ops in proptest::collection::vec(op(), 0..400)) {
            let mut table = Table::new(1);
            let mut model = BTreeMap::new();
            for op in ops {
                match op {
                    Op::Insert(fingerprint, state) => {
                        if table.find(fingerprint).is_err() {
                            prop_assert!(table.get_mut(fingerprint).is_none());
                            table.insert(fingerprint);
                        }
                        table.get_mut(fingerprint).unwrap()[0] = state;
                        model.insert(fingerprint, state);
                    }
                    Op::Remove(fingerprint) => {
                        let found = table.find(fingerprint);
                        prop_assert_eq!(found.is_ok(), model.remove(&fingerprint).is_some());
                        if let Ok(slot) = found {
                            table.remove(slot);
                        }
                    }
                    Op::Retain(residue) => {
                        table.retain(|state| state[0] % 4 != residue);
                        model.retain(|_, state| *state % 4 != residue);
                    }
                }
                prop_assert_eq!(table.len(), model.len());
                let entries: Vec<_> = (0..table.slots())
                    .filter_map(|slot| Some((table.fingerprint(slot)?, table.state(slot)[0])))
                    .collect();
                let expected: Vec<_> = model.iter().map(|(&f, &s)| (f, s)).collect();
                prop_assert_eq!(entries, expected, "sorted, and nothing lost");
                for &fingerprint in model.keys() {
                    prop_assert!(table.find(fingerprint).is_ok());
                }
            }
        }
    }

    #[test]
    fn memory_follows_the_number_of_entries() {
        let mut table = Table::new(2);
        let scattered = |n: u128| n.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835) | 1;
        for n in 1..=100_000 {
            table.insert(scattered(n).into());
            let bytes = table.words.len() * 8;
            assert!(n < 1_000 || bytes < 50 * n as usize, "{bytes} bytes for {n} entries");
        }
        table.retain(|_| false);
        assert_eq!((table.len(), table.slots()), (0, 0));
    }
}
