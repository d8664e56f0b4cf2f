//! Who may come in, by how many there are: pure arithmetic.

use crate::shed::law::ONE;

/// How many requests are in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    pub(super) critical: u64,
    pub(super) other: u64,
}

impl Load {
    pub(super) fn total(self) -> u64 {
        self.critical.saturating_add(self.other)
    }

    pub(super) fn of(&mut self, is_critical: bool) -> &mut u64 {
        if is_critical { &mut self.critical } else { &mut self.other }
    }

    pub(super) fn plus(self, load: Self) -> Self {
        Self {
            critical: self.critical.saturating_add(load.critical),
            other: self.other.saturating_add(load.other),
        }
    }
}

#[cfg(feature = "redis")]
impl Load {
    pub(super) fn minus(self, load: Self) -> Self {
        Self {
            critical: self.critical.saturating_sub(load.critical),
            other: self.other.saturating_sub(load.other),
        }
    }

    /// How much has changed between the two.
    pub(super) fn distance(self, load: Self) -> u64 {
        self.critical.abs_diff(load.critical) + self.other.abs_diff(load.other)
    }
}

/// How many may be in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) capacity: u64,
    /// The share of the capacity that is kept for critical requests, in millionths.
    pub(super) reserve: u64,
    pub(super) cap_critical: bool,
}

impl Bounds {
    /// What one of so many instances may do alone.
    pub(super) fn shared_by(self, instances: u64) -> Self {
        Self { capacity: (self.capacity / instances.max(1)).max(1), ..self }
    }

    /// How many requests that are not critical may be in flight. It is never none.
    pub(super) fn for_others(&self) -> u64 {
        self.capacity - (self.capacity * self.reserve).div_ceil(ONE).min(self.capacity - 1)
    }

    /// Whether there is room for one more.
    pub(super) fn admit(&self, load: Load, is_critical: bool) -> bool {
        let has_room = load.total() < self.capacity;
        if is_critical {
            has_room || !self.cap_critical
        } else {
            has_room && load.other < self.for_others()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bounds(capacity: u64, reserve: u64) -> Bounds {
        Bounds { capacity, reserve, cap_critical: true }
    }

    #[test]
    fn the_reserve_is_rounded_up_and_leaves_one() {
        assert_eq!(bounds(10, 300_000).for_others(), 7);
        assert_eq!(bounds(10, 200_000).for_others(), 8);
        assert_eq!(bounds(11, 200_000).for_others(), 8);
        assert_eq!(bounds(3, 999_999).for_others(), 1);
        assert_eq!(bounds(1, 200_000).for_others(), 1);
        assert_eq!(bounds(5, 0).for_others(), 5);
    }

    #[test]
    fn critical_requests_are_capped_only_if_that_is_wanted() {
        let full = Load { critical: 2, other: 8 };
        let capped = bounds(10, 200_000);
        assert!(!capped.admit(full, true));
        assert!(Bounds { cap_critical: false, ..capped }.admit(full, true));
        assert!(!Bounds { cap_critical: false, ..capped }.admit(full, false));
    }

    #[test]
    fn critical_requests_take_room_from_the_others() {
        let uncapped = Bounds { cap_critical: false, ..bounds(10, 200_000) };
        assert!(uncapped.admit(Load { critical: 9, other: 0 }, false));
        assert!(!uncapped.admit(Load { critical: 10, other: 0 }, false));
        assert!(!uncapped.admit(Load { critical: 100, other: 0 }, false));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn shares_are_no_more_than_the_whole(
            capacity in 1_u64..=u64::from(u32::MAX), reserve in 0_u64..ONE, instances in 1_u64..1_000,
        ) {
            let whole = bounds(capacity, reserve);
            let share = whole.shared_by(instances);
            prop_assert!(share.capacity >= 1 && share.for_others() >= 1);
            prop_assert!(share.capacity * instances <= capacity.max(instances));
            prop_assert!(share.for_others() * instances <= whole.for_others().max(instances));
        }

        #[test]
        fn nothing_grows_past_its_bound(
            capacity in 1_u64..40, reserve in 0_u64..ONE,
            arrivals in proptest::collection::vec(any::<bool>(), 0..100),
        ) {
            let bounds = bounds(capacity, reserve);
            let mut load = Load::default();
            for is_critical in arrivals {
                if bounds.admit(load, is_critical) {
                    *load.of(is_critical) += 1;
                }
                prop_assert!(load.total() <= capacity && load.other <= bounds.for_others());
            }
        }
    }
}
