//! How utilization becomes shedding: a control law in whole numbers.
//!
//! The law moves one number, the level, between rest, which is below zero, and one. While utilization
//! `u` is low, it sinks; in the dead zone it stays; above that, it rises:
//!
//! ```text
//! speed(u) = u / recover_below - 1                  if u < recover_below
//!            0                                      if recover_below <= u < shed_above
//!            (u - shed_above) / (1 - shed_above)    otherwise
//! level   += min(elapsed, longest_step) * speed(u) / full_after,   within [-grace / full_after, 1]
//! ```
//!
//! This is the law of Stripe's worker utilization load shedder ("Scaling your API with rate limiters",
//! 2017), with its constants as defaults. A positive level is spread over the classes of requests, one
//! after the other.
//!
//! Speeds are in millionths and levels in microseconds at full speed, times a million. Steps add up
//! exactly: at the same utilization, two steps are as one of their length.

use super::error::ShedderError;
use std::time::Duration;

/// Shares, speeds and probabilities are in millionths.
pub(super) const ONE: u64 = 1_000_000;

/// The constants, as they are set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) recover_below: f64,
    pub(super) shed_above: f64,
    pub(super) grace: Duration,
    pub(super) full_after: Duration,
    pub(super) longest_step: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            recover_below: 0.7,
            shed_above: 0.8,
            grace: Duration::from_secs(28),
            full_after: Duration::from_secs(120),
            longest_step: Duration::from_secs(28),
        }
    }
}

/// The constants, as the law counts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Law {
    recover_below: i64,
    shed_above: i64,
    rest: Level,
    full_after_us: i64,
    longest_step_us: i64,
}

/// How far shedding is. Ordered: a higher level never sheds less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Level(pub(super) i64);

/// The longest times that are counted. A day at full speed, in the units of a level, is below 2^57.
const LONGEST: Duration = Duration::from_secs(86_400);

impl Law {
    pub(super) fn new(settings: &Settings, shedder: &str) -> Result<Self, ShedderError> {
        let out_of_range = |option, range| {
            let shedder = shedder.to_owned();
            Err(ShedderError::OutOfRange { shedder, option, range })
        };
        let Settings { recover_below, shed_above, grace, full_after, longest_step } = *settings;
        // What is less than a millionth is nothing; and what is no number is in no range.
        if !(0.000_001..=1.0).contains(&recover_below) {
            return out_of_range("recover_below", "above 0 and at most 1");
        }
        if !(0.000_001..=0.999_999).contains(&shed_above) {
            return out_of_range("shed_above", "above 0 and below 1");
        }
        if recover_below > shed_above {
            return Err(ShedderError::Thresholds { shedder: shedder.to_owned() });
        }
        if grace > LONGEST {
            return out_of_range("grace", "at most a day");
        }
        let times = Duration::from_millis(1)..=LONGEST;
        if !times.contains(&full_after) {
            return out_of_range("full_after", "1 ms to a day");
        }
        if !times.contains(&longest_step) {
            return out_of_range("longest_step", "1 ms to a day");
        }
        let us = |time: Duration| time.as_micros() as i64;
        Ok(Self {
            recover_below: millionths(recover_below) as i64,
            shed_above: millionths(shed_above) as i64,
            rest: Level(-us(grace) * ONE as i64),
            full_after_us: us(full_after),
            longest_step_us: us(longest_step),
        })
    }

    /// Where the level is at first, and where it goes when all is well.
    pub(super) fn rest(&self) -> Level {
        self.rest
    }

    /// The level after some time at a utilization, in millionths.
    pub(super) fn step(&self, level: Level, utilization: u64, elapsed_us: u64) -> Level {
        let elapsed_us = i64::try_from(elapsed_us).unwrap_or(i64::MAX).min(self.longest_step_us);
        let full = self.full_after_us * ONE as i64;
        let moved = level.0 + elapsed_us * self.speed(utilization);
        Level(moved.clamp(self.rest.0, full))
    }

    fn speed(&self, utilization: u64) -> i64 {
        let one = ONE as i64;
        let utilization = utilization.min(ONE) as i64;
        if utilization < self.recover_below {
            (utilization - self.recover_below) * one / self.recover_below
        } else if utilization < self.shed_above {
            0
        } else {
            (utilization - self.shed_above) * one / (one - self.shed_above)
        }
    }

    /// The level in parts of one. It is negative at rest.
    pub(super) fn level(&self, level: Level) -> f64 {
        level.0 as f64 / (self.full_after_us as f64 * ONE as f64)
    }

    /// What share of a class is to be shed, in millionths. Class 0 of `classes` goes first.
    pub(super) fn shed(&self, level: Level, class: usize, classes: usize) -> u64 {
        let class_full = i128::from(self.full_after_us) * class as i128 * i128::from(ONE);
        let above = i128::from(level.0) * classes as i128 - class_full;
        u64::try_from(above / i128::from(self.full_after_us)).unwrap_or(0).min(ONE)
    }
}

/// A share in millionths. What is no number, or no share, is the nearest share.
pub(super) fn millionths(share: f64) -> u64 {
    // The conversion saturates, and makes 0 of what is no number.
    ((share * ONE as f64).round() as u64).min(ONE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND_US: u64 = 1_000_000;
    const CLASSES: usize = 3;

    fn law() -> Law {
        Law::new(&Settings::default(), "test").unwrap()
    }

    /// The level after some seconds at a utilization, sampled every second.
    fn after(law: &Law, from: Level, utilization: f64, secs: u64) -> Level {
        (0..secs).fold(from, |level, _| law.step(level, millionths(utilization), SECOND_US))
    }

    fn full(law: &Law) -> Level {
        after(law, law.rest(), 1.0, 1_000)
    }

    /// How many seconds it takes from one level to another.
    fn seconds(law: &Law, from: Level, utilization: f64, to: Level) -> u64 {
        (0..10_000).find(|&secs| after(law, from, utilization, secs) == to).expect("it comes there")
    }

    #[test]
    fn at_full_load_shedding_begins_after_28_s_and_is_full_120_s_later() {
        let law = law();
        assert_eq!(law.level(law.rest()), -28.0 / 120.0);
        assert_eq!(seconds(&law, law.rest(), 1.0, Level(0)), 28);
        assert_eq!(seconds(&law, law.rest(), 1.0, full(&law)), 28 + 120);
        assert_eq!(law.level(full(&law)), 1.0);
    }

    #[test]
    fn at_nine_tenths_it_takes_twice_as_long() {
        let law = law();
        assert_eq!(seconds(&law, law.rest(), 0.9, Level(0)), 56);
        assert_eq!(seconds(&law, law.rest(), 0.9, full(&law)), 56 + 240);
    }

    #[test]
    fn at_half_of_good_it_takes_240_s_from_full_to_none() {
        let law = law();
        assert_eq!(seconds(&law, full(&law), 0.35, Level(0)), 240);
        assert_eq!(seconds(&law, full(&law), 0.35, law.rest()), 240 + 56);
        assert_eq!(seconds(&law, full(&law), 0.0, Level(0)), 120);
    }

    #[test]
    fn in_the_dead_zone_nothing_moves() {
        let law = law();
        for level in [law.rest(), Level(0), after(&law, law.rest(), 1.0, 90), full(&law)] {
            for utilization in [0.7, 0.75, 0.799_999, 0.8] {
                assert_eq!(after(&law, level, utilization, 1_000), level);
            }
        }
    }

    #[test]
    fn classes_go_one_after_the_other() {
        let law = law();
        let shares = |secs: u64| {
            let level = after(&law, law.rest(), 1.0, 28 + secs);
            [0, 1, 2].map(|class| law.shed(level, class, CLASSES))
        };
        assert_eq!(shares(0), [0, 0, 0]);
        assert_eq!(shares(20), [500_000, 0, 0]);
        assert_eq!(shares(40), [ONE, 0, 0]);
        assert_eq!(shares(60), [ONE, 500_000, 0]);
        assert_eq!(shares(100), [ONE, ONE, 500_000]);
        assert_eq!(shares(120), [ONE, ONE, ONE]);
        assert_eq!(law.shed(law.rest(), 0, CLASSES), 0);
    }

    #[test]
    fn a_sampler_that_was_away_counts_for_the_longest_step() {
        let law = law();
        assert_eq!(law.step(law.rest(), ONE, u64::MAX), Level(0));
        assert_eq!(law.step(full(&law), 0, u64::MAX), after(&law, full(&law), 0.0, 28));
    }

    #[test]
    fn utilization_above_one_is_one() {
        let law = law();
        assert_eq!(law.step(law.rest(), 17 * ONE, SECOND_US), law.step(law.rest(), ONE, SECOND_US));
        assert_eq!(millionths(f64::NAN), 0);
        assert_eq!(millionths(-1.0), 0);
        assert_eq!(millionths(f64::INFINITY), ONE);
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        let secs = Duration::from_secs;
        let settings = Settings::default;
        let refused = |settings| Law::new(&settings, "test").unwrap_err().to_string();
        for recover_below in [0.0, -0.1, 1.1, f64::NAN] {
            let message = refused(Settings { recover_below, ..settings() });
            assert!(message.contains("`recover_below`"), "{message}");
        }
        for shed_above in [0.0, 1.0, f64::NAN] {
            let message = refused(Settings { shed_above, ..settings() });
            assert!(message.contains("`shed_above`"), "{message}");
        }
        let message = refused(Settings { recover_below: 0.9, ..settings() });
        assert!(message.contains("not be above"), "{message}");
        let message = refused(Settings { grace: secs(86_401), ..settings() });
        assert!(message.contains("`grace`"), "{message}");
        let message = refused(Settings { full_after: secs(0), ..settings() });
        assert!(message.contains("`full_after`"), "{message}");
        let message = refused(Settings { longest_step: secs(0), ..settings() });
        assert!(message.contains("`longest_step`"), "{message}");
        assert!(Law::new(&Settings { grace: secs(0), ..settings() }, "test").is_ok());
        assert!(Law::new(&Settings { recover_below: 0.8, ..settings() }, "test").is_ok());
    }

    fn any_settings() -> impl Strategy<Value = Settings> {
        let bounds = (0.01_f64..0.99, 0.01_f64..0.99);
        (bounds, 0_u64..100_000, 1_u64..1_000_000, 1_u64..100_000).prop_map(
            |((a, b), grace, full_after, longest_step)| Settings {
                recover_below: a.min(b),
                shed_above: a.max(b),
                grace: Duration::from_millis(grace),
                full_after: Duration::from_millis(full_after),
                longest_step: Duration::from_millis(longest_step),
            },
        )
    }

    /// Samples: the utilization, and the time since the sample before in microseconds.
    fn samples() -> impl Strategy<Value = Vec<(f64, u64)>> {
        proptest::collection::vec((0.0_f64..=1.0, 0_u64..100_000_000), 0..60)
    }

    /// The law as one would write it down.
    fn model(settings: &Settings, samples: &[(f64, u64)]) -> f64 {
        let Settings { recover_below, shed_above, .. } = *settings;
        let full = settings.full_after.as_secs_f64();
        let rest = -settings.grace.as_secs_f64() / full;
        samples.iter().fold(rest, |level, &(utilization, elapsed_us)| {
            let elapsed = (elapsed_us as f64 / 1e6).min(settings.longest_step.as_secs_f64());
            let speed = if utilization < recover_below {
                utilization / recover_below - 1.0
            } else if utilization < shed_above {
                0.0
            } else {
                (utilization - shed_above) / (1.0 - shed_above)
            };
            (level + elapsed * speed.clamp(-1.0, 1.0) / full).clamp(rest, 1.0)
        })
    }

    fn run(law: &Law, samples: &[(f64, u64)]) -> Level {
        samples.iter().fold(law.rest(), |level, &(utilization, elapsed_us)| {
            law.step(level, millionths(utilization), elapsed_us)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn the_law_is_what_one_would_write_down(settings in any_settings(), samples in samples()) {
            let law = Law::new(&settings, "test").unwrap();
            let (level, expected) = (law.level(run(&law, &samples)), model(&settings, &samples));
            // Thresholds and utilizations are rounded to millionths, which changes the speed by as many
            // millionths as the steepest slope, 100 here, and once more by the rounding of the speed.
            let steps: f64 = samples.iter().map(|&(_, us)| us as f64 / 1e6)
                .map(|elapsed| elapsed.min(settings.longest_step.as_secs_f64())).sum();
            let tolerance = 1e-9 + 302e-6 * steps / settings.full_after.as_secs_f64();
            prop_assert!((level - expected).abs() <= tolerance, "{level} {expected} {tolerance}");
        }

        #[test]
        fn more_load_never_sheds_less(
            settings in any_settings(),
            samples in samples(),
            more in proptest::collection::vec(0.0_f64..=1.0, 60),
        ) {
            let law = Law::new(&settings, "test").unwrap();
            let busier: Vec<_> =
                samples.iter().zip(more).map(|(&(u, us), more)| (u.max(more), us)).collect();
            let (level, busier) = (run(&law, &samples), run(&law, &busier));
            prop_assert!(level <= busier);
            for class in 0..CLASSES {
                prop_assert!(law.shed(level, class, CLASSES) <= law.shed(busier, class, CLASSES));
            }
        }

        #[test]
        fn what_is_less_important_is_shed_first(level in 0.0_f64..=1.0, classes in 1_usize..=255) {
            let law = law();
            let level = Level((level * full(&law).0 as f64) as i64);
            let shares: Vec<_> = (0..classes).map(|class| law.shed(level, class, classes)).collect();
            let partly = shares.iter().filter(|&&share| share > 0 && share < ONE).count();
            prop_assert!(shares.is_sorted_by(|a, b| a >= b) && partly <= 1, "{shares:?}");
        }

        #[test]
        fn at_constant_load_the_level_never_turns(
            settings in any_settings(),
            samples in samples(),
            load in 0.0_f64..=1.0,
        ) {
            let law = Law::new(&settings, "test").unwrap();
            let mut levels = vec![run(&law, &samples)];
            for &(_, elapsed_us) in &samples {
                levels.push(law.step(levels[levels.len() - 1], millionths(load), elapsed_us));
            }
            prop_assert!(levels.is_sorted() || levels.is_sorted_by(|a, b| a >= b), "{levels:?}");
        }

        #[test]
        fn when_samples_are_taken_makes_no_difference(
            loads in proptest::collection::vec((0.0_f64..=1.0, 1_usize..40), 1..6),
            jitter in proptest::collection::vec(-500_000_i64..=500_000, 240),
        ) {
            let law = law();
            let (mut level, mut jittered, mut count) = (law.rest(), law.rest(), 0);
            for (load, length) in loads {
                // The load changes at the end of a sample in both.
                let mut times: Vec<_> = (1..length as i64)
                    .map(|second| second * 1_000_000 + jitter[(count + second as usize) % 240])
                    .collect();
                times.push(length as i64 * 1_000_000);
                let mut last = 0;
                for time in times {
                    jittered = law.step(jittered, millionths(load), (time - last).max(0) as u64);
                    last = last.max(time);
                }
                level = after(&law, level, load, length as u64);
                count += length;
                prop_assert_eq!(level, jittered);
            }
        }
    }
}
