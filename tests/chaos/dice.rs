//! Numbers that are a function of a seed, by splitmix64 (Steele, Lea, Flood, "Fast splittable
//! pseudorandom number generators", 2014).

use std::{ops::Range, time::Duration};

#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// Dice for one purpose of several that share a seed.
    pub(crate) fn of(seed: u64, purpose: &[u64]) -> Self {
        let mut dice = Self(seed);
        for number in purpose {
            dice = Self(dice.next() ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
        dice
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    pub(crate) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    pub(crate) fn ms_within(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    /// True once in so many times.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.within(0..times) == 0
    }

    pub(crate) fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.within(0..of.len() as u64) as usize]
    }
}
