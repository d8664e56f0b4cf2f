//! The shedders of a limiter, in their order.

use super::{Aboard, Held, Shed, Shedder};
use crate::priority::Priority;

/// A request has to get past all of them.
#[derive(Debug)]
pub(crate) struct Shedders(Box<[Shedder]>);

impl Shedders {
    pub(crate) fn new(list: Vec<Shedder>) -> Self {
        Self(list.into())
    }

    /// Lets a request in, or turns it away. One that a later shedder turns away leaves nothing behind
    /// in those before.
    pub(crate) fn admit(&self, priority: Priority) -> Result<Aboard, Shed> {
        let mut aboard = Aboard::none();
        for shedder in &self.0 {
            aboard.hold(match shedder {
                Shedder::Worker(worker) => Held::Worker(worker.seat(priority)?),
                Shedder::Fleet(fleet) => Held::Fleet(fleet.seat(priority)?),
            });
        }
        Ok(aboard)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(Shedder::name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ManualClock,
        shed::{FleetShedder, Utilization, WorkerShedder},
    };
    use std::time::Duration;

    #[test]
    fn a_request_that_a_later_shedder_turns_away_leaves_nothing_behind() {
        let first = FleetShedder::builder("first", 10).build().unwrap();
        let worker = WorkerShedder::builder("worker").build().unwrap();
        let last = FleetShedder::builder("last", 1).reserve(0.0).build().unwrap();
        let shedders =
            Shedders::new(vec![first.clone().into(), worker.clone().into(), last.clone().into()]);
        assert_eq!(shedders.names().collect::<Vec<_>>(), ["first", "worker", "last"]);
        let in_flight = || [first.in_flight(), worker.in_flight(), last.in_flight()];

        let aboard = shedders.admit(Priority::Read).unwrap();
        assert_eq!(in_flight(), [1, 1, 1]);
        assert_eq!(shedders.admit(Priority::Read).unwrap_err().shedder, "last");
        assert_eq!(in_flight(), [1, 1, 1]);
        drop(aboard);
        assert_eq!(in_flight(), [0, 0, 0]);
    }

    #[test]
    fn the_first_that_sheds_is_named() {
        let clock = ManualClock::new();
        let worker = WorkerShedder::builder("worker")
            .utilization(Utilization::from_fn(|| 1.0))
            .longest_step(Duration::from_secs(1_000))
            .clock(&clock)
            .build()
            .unwrap();
        clock.advance(Duration::from_secs(148));
        worker.sample();
        let fleet = FleetShedder::builder("fleet", 1).build().unwrap();
        let shedders = Shedders::new(vec![worker.into(), fleet.clone().into()]);
        let shed = shedders.admit(Priority::Write).unwrap_err();
        assert_eq!(shed.shedder, "worker");
        assert!((5_000_000..=15_000_000).contains(&shed.retry_after_us));
        assert_eq!(fleet.in_flight(), 0);
        assert!(shedders.admit(Priority::Critical).is_ok());
    }

    #[test]
    fn two_shedders_take_no_memory_for_a_request() {
        let fleet = FleetShedder::builder("fleet", 10).build().unwrap();
        let shedders = Shedders::new(vec![fleet.clone().into(), fleet.into()]);
        assert!(!shedders.admit(Priority::Read).unwrap().0.spilled());
    }

    #[test]
    fn no_shedder_sheds_nothing() {
        assert!(Shedders::new(Vec::new()).admit(Priority::BestEffort).is_ok());
    }
}
