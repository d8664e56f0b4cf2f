//! When those who were turned away should come back.

use super::error::ShedderError;
use crate::random::Dice;
use std::{ops::RangeInclusive, time::Duration};

/// A range from which each one's time is drawn, so that not all come back at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    least_us: u64,
    most_us: u64,
}

impl Patience {
    pub(super) fn new(
        range: &RangeInclusive<Duration>,
        shedder: &str,
    ) -> Result<Self, ShedderError> {
        const LONGEST: Duration = Duration::from_secs(86_400);
        if range.is_empty() || range.start().is_zero() || *range.end() > LONGEST {
            return Err(ShedderError::OutOfRange {
                shedder: shedder.to_owned(),
                option: "retry_after",
                range: "a range of times from more than none to a day at most",
            });
        }
        let us = |time: &Duration| time.as_micros() as u64;
        Ok(Self { least_us: us(range.start()).max(1), most_us: us(range.end()).max(1) })
    }

    pub(super) fn draw_us(self, dice: &Dice) -> u64 {
        self.least_us + dice.throw(self.most_us - self.least_us)
    }
}
