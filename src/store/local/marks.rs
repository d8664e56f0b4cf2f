//! The marks of buckets to which something was given back. They are beside the table, because hardly
//! any bucket has one, and because one may outlive the entry of its key.

use crate::{algorithm::Mark, key::Fingerprint, store::Charge};
use std::collections::BTreeMap;

/// The marks of a shard, by key and policy.
#[expect(clippy::box_collection, reason = "one word, on the cache line that every decision reads")]
pub(super) struct Marks(Option<Box<BTreeMap<(Fingerprint, u32), Mark>>>);

impl Marks {
    pub(super) const fn new() -> Self {
        Self(None)
    }

    #[inline]
    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.0.as_ref().map_or(0, |marks| marks.len())
    }

    /// The mark of a bucket.
    pub(super) fn get(&self, charge: &Charge) -> Option<&Mark> {
        self.0.as_ref()?.get(&(charge.fingerprint, charge.policy))
    }

    pub(super) fn put(&mut self, charge: &Charge, mark: Mark) {
        let marks = self.0.get_or_insert_default();
        marks.insert((charge.fingerprint, charge.policy), mark);
    }

    /// Forgets those that are too old, and those of a clock that was too far ahead of the present: by
    /// more than twice as much as a mark ever is, if no policy has a longer `horizon_us`.
    pub(super) fn sweep(&mut self, now_us: u64, horizon_us: u64) {
        if let Some(marks) = &mut self.0 {
            marks.retain(|_, mark| {
                let left_us = mark.until_us.saturating_sub(now_us);
                left_us > 0 && left_us <= 4 * horizon_us
            });
            if marks.is_empty() {
                self.0 = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_is_kept_until_it_is_of_no_use() {
        let charge =
            |policy| Charge { fingerprint: Fingerprint::from(7), policy, space: 0, rule: 0 };
        let mut marks = Marks::new();
        for (policy, until_us) in [(0, 150), (1, 200), (2, 100 + 401)] {
            let mut mark = Mark::default();
            mark.until_us = until_us;
            marks.put(&charge(policy), mark);
        }
        assert!(marks.get(&charge(3)).is_none());
        marks.sweep(100, 100);
        assert_eq!(marks.len(), 2, "one was of a clock that is far ahead");
        marks.sweep(150, 100);
        assert_eq!(marks.get(&charge(1)).map(|mark| mark.until_us), Some(200));
        assert_eq!(marks.len(), 1);
        marks.sweep(200, 100);
        assert!(marks.is_empty());
    }
}
