//! Numbers that nobody has to be unable to guess, by splitmix64 (Steele, Lea, Flood, "Fast splittable
//! pseudorandom number generators", 2014).

use std::{
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A number from 0 to `most`.
pub(crate) fn draw(random: &mut u64, most: u64) -> u64 {
    *random = random.wrapping_add(STEP);
    let mut bits = *random;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    ((u128::from(bits) * (u128::from(most) + 1)) >> 64) as u64
}

/// Dice that many threads throw.
#[derive(Debug)]
pub(crate) struct Dice(AtomicU64);

impl Dice {
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(RandomState::new().hash_one("dice")))
    }

    /// A number from 0 to `most`.
    pub(crate) fn throw(&self, most: u64) -> u64 {
        let mut random = self.0.fetch_add(STEP, Relaxed);
        draw(&mut random, most)
    }
}
