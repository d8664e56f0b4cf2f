//! The limit in front of a service that does a number of requests at once and lets others wait, on
//! simulated time.

use super::{Adaptive, AdaptiveBuilder, draw};
use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

const START_US: u64 = 1_796_000_000_123_457;
const MS: u64 = 1_000;

/// A service, the requests that come to it, and the limit between them.
struct World {
    adaptive: Adaptive,
    now_us: u64,
    next_arrival_us: u64,
    /// When each server has done what waits for it.
    servers: BinaryHeap<Reverse<u64>>,
    /// How long a request takes on average.
    mean_us: u64,
    /// One request in so many takes twenty times as long.
    outliers: Option<u64>,
    /// What is in flight: when it ends, when it started, with how many.
    in_flight: BinaryHeap<Reverse<(u64, u64, u64)>>,
    random: u64,
}

/// What a stretch of time brought.
#[derive(Debug)]
struct Stretch {
    done_per_s: f64,
    /// The limit outside of probes.
    least: u64,
    most: u64,
    /// On average over the requests.
    mean: f64,
    last: u64,
    /// The part of the time that probes took.
    probing: f64,
    median_us: u64,
}

impl World {
    fn new(builder: AdaptiveBuilder, servers: usize, mean_us: u64) -> Self {
        Self {
            adaptive: builder.build_with(7).expect("valid settings"),
            now_us: START_US,
            next_arrival_us: START_US,
            servers: vec![Reverse(0); servers].into(),
            mean_us,
            outliers: None,
            in_flight: BinaryHeap::new(),
            random: 11,
        }
    }

    /// How many requests the service can do in a second.
    fn capacity(&self) -> f64 {
        self.servers.len() as f64 * 1e6 / self.mean_us as f64
    }

    fn resize(&mut self, servers: usize) {
        self.servers = vec![Reverse(self.now_us); servers].into();
    }

    /// Half of the mean and an exponential half: its standard deviation is half of the mean, too.
    fn service_us(&mut self) -> u64 {
        let many = if self.outliers.is_some_and(|one_in| draw(&mut self.random, one_in - 1) == 0) {
            20
        } else {
            1
        };
        many * (self.mean_us / 2 + self.exponential(self.mean_us as f64 / 2.0))
    }

    fn exponential(&mut self, mean: f64) -> u64 {
        let uniform = (draw(&mut self.random, 1 << 32) + 1) as f64 / ((1_u64 << 32) + 2) as f64;
        (-uniform.ln() * mean) as u64
    }

    fn run(&mut self, per_second: f64, duration: Duration) -> Stretch {
        let (start_us, end_us) = (self.now_us, self.now_us + duration.as_micros() as u64);
        let (mut done, mut probing_us, mut latencies_us) = (0_u64, 0, Vec::new());
        let (mut least, mut most, mut sum) = (u64::MAX, 0, 0);
        self.next_arrival_us = self.now_us;
        loop {
            let next_end_us = self.in_flight.peek().map_or(u64::MAX, |next| next.0.0);
            let next_us = next_end_us.min(self.next_arrival_us);
            if next_us >= end_us {
                break;
            }
            if self.adaptive.0.finder.lock().probe.is_some() {
                probing_us += next_us - self.now_us;
            }
            self.now_us = next_us;
            if next_end_us == next_us {
                let Some(Reverse((_, started_us, in_flight))) = self.in_flight.pop() else { break };
                self.adaptive.sample(self.now_us, started_us, in_flight);
                done += 1;
                latencies_us.push(next_us - started_us);
                let limit = self.adaptive.0.finder.lock().limit as u64;
                (least, most, sum) = (limit.min(least), limit.max(most), sum + limit);
            } else {
                self.arrive();
                self.next_arrival_us += self.exponential(1e6 / per_second);
            }
        }
        self.now_us = end_us;
        latencies_us.sort_unstable();
        Stretch {
            done_per_s: done as f64 / duration.as_secs_f64(),
            least,
            most,
            mean: sum as f64 / done as f64,
            last: self.adaptive.0.finder.lock().limit as u64,
            probing: probing_us as f64 / (end_us - start_us) as f64,
            median_us: latencies_us.get(latencies_us.len() / 2).copied().unwrap_or(0),
        }
    }

    fn arrive(&mut self) {
        let in_flight = self.in_flight.len() as u64 + 1;
        if in_flight > self.adaptive.limit_at(self.now_us) {
            return;
        }
        let service_us = self.service_us();
        let Some(Reverse(free_us)) = self.servers.pop() else { return };
        let end_us = free_us.max(self.now_us) + service_us;
        self.servers.push(Reverse(end_us));
        self.in_flight.push(Reverse((end_us, self.now_us, in_flight)));
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const SERVERS: usize = 20;
const BAND: std::ops::RangeInclusive<u64> = 20..=40;

/// Between what the servers can do at once and twice as much. Chance may take the limit out of that
/// for some windows.
fn near(mean: f64) -> bool {
    (20.0..=40.0).contains(&mean)
}

/// A service that is called three times as much as it can take, with the limit found.
fn overloaded(mean_us: u64) -> World {
    let mut world = World::new(Adaptive::builder(), SERVERS, mean_us);
    world.run(3.0 * world.capacity(), seconds(20));
    world
}

#[test]
fn it_finds_the_limit_from_below_and_from_above() {
    for initial in [3, 20, 1_000] {
        let mut world = World::new(Adaptive::builder().initial(initial), SERVERS, 10 * MS);
        let capacity = world.capacity();
        let first = world.run(3.0 * capacity, seconds(5));
        let then = world.run(3.0 * capacity, seconds(130));
        assert!(first.done_per_s > 0.85 * capacity, "{first:?}");
        assert!(BAND.contains(&first.last), "{first:?}");
        assert!(then.done_per_s > 0.98 * capacity, "{then:?}");
        assert!(then.least >= 10 && then.most <= 50 && near(then.mean), "{then:?}");
        assert!(then.probing < 0.01, "{then:?}");
    }
}

#[test]
fn services_of_other_sizes_and_speeds() {
    for (servers, mean_us) in
        [(4, 10 * MS), (100, 5 * MS), (20, MS), (20, 100 * MS), (20, 1_000 * MS)]
    {
        let mut world = World::new(Adaptive::builder(), servers, mean_us);
        let capacity = world.capacity();
        world.run(2.0 * capacity, Duration::from_micros(200 * mean_us.max(50 * MS)));
        let then = world.run(2.0 * capacity, Duration::from_micros(200 * mean_us.max(50 * MS)));
        assert!(then.done_per_s > 0.9 * capacity, "{then:?}");
        assert!((servers as f64..=2.0 * servers as f64 + 4.0).contains(&then.mean), "{then:?}");
        assert!(then.median_us < 2 * mean_us, "{then:?}");
    }
}

#[test]
fn a_lasting_mild_overload_does_not_take_it_up() {
    let mut world = World::new(Adaptive::builder(), SERVERS, 100 * MS);
    let capacity = world.capacity();
    world.run(1.1 * capacity, seconds(60));
    for _ in 0..6 {
        let stretch = world.run(1.1 * capacity, seconds(300));
        assert!(stretch.done_per_s > 0.95 * capacity, "{stretch:?}");
        assert!(stretch.most <= 80 && stretch.least >= 10, "{stretch:?}");
        assert!(near(stretch.mean), "{stretch:?}");
        assert!(stretch.median_us < 150 * MS, "{stretch:?}");
    }
}

#[test]
fn it_does_not_grow_while_idle() {
    let mut world = World::new(Adaptive::builder(), SERVERS, 10 * MS);
    // Two in flight.
    let stretch = world.run(200.0, seconds(600));
    assert!(stretch.most <= 20 && stretch.least >= 18, "{stretch:?}");
}

#[test]
fn it_follows_a_service_that_is_slower_for_good() {
    let mut world = overloaded(10 * MS);
    world.mean_us = 30 * MS;
    let capacity = world.capacity();
    let first = world.run(3.0 * capacity, seconds(5));
    let then = world.run(3.0 * capacity, seconds(120));
    assert!(first.done_per_s > 0.7 * capacity, "{first:?}");
    assert!(then.done_per_s > 0.95 * capacity, "{then:?}");
    assert!(BAND.contains(&then.last), "{then:?}");
}

#[test]
fn it_follows_a_service_that_is_faster_for_good() {
    let mut world = overloaded(30 * MS);
    world.mean_us = 10 * MS;
    let capacity = world.capacity();
    let first = world.run(3.0 * capacity, seconds(70));
    let then = world.run(3.0 * capacity, seconds(60));
    assert!(first.done_per_s > 0.95 * capacity, "{first:?}");
    // Never slower than it was.
    assert!(first.median_us < 50 * MS, "{first:?}");
    assert!(BAND.contains(&then.last) && then.done_per_s > 0.98 * capacity, "{then:?}");
}

#[test]
fn it_follows_a_service_that_loses_servers_and_gets_them_back() {
    let mut world = overloaded(10 * MS);
    let load = 3.0 * world.capacity();
    world.resize(5);
    let capacity = world.capacity();
    world.run(load, seconds(5));
    let then = world.run(load, seconds(60));
    assert!(then.done_per_s > 0.95 * capacity, "{then:?}");
    assert!(then.most <= 15 && then.median_us < 25 * MS, "{then:?}");

    world.resize(SERVERS);
    let capacity = world.capacity();
    let then = world.run(load, seconds(10));
    assert!(then.done_per_s > 0.95 * capacity, "{then:?}");
    assert!(BAND.contains(&then.last), "{then:?}");
}

#[test]
fn failures_that_are_fast_do_not_starve_what_comes_after() {
    let mut world = overloaded(10 * MS);
    let capacity = world.capacity();
    world.mean_us = 100;
    world.run(capacity, seconds(70));
    world.mean_us = 10 * MS;
    let first = world.run(2.0 * capacity, seconds(5));
    let then = world.run(2.0 * capacity, seconds(30));
    assert!(first.done_per_s > 0.8 * capacity, "{first:?}");
    assert!(then.done_per_s > 0.95 * capacity && BAND.contains(&then.last), "{then:?}");
}

#[test]
fn one_outlier_in_a_hundred_does_not_matter() {
    let mut world = World::new(Adaptive::builder(), SERVERS, 10 * MS);
    world.outliers = Some(100);
    // They take a fifth of the service.
    let capacity = world.capacity() / 1.19;
    world.run(3.0 * capacity, seconds(10));
    let then = world.run(3.0 * capacity, seconds(120));
    assert!(then.done_per_s > 0.95 * capacity, "{then:?}");
    assert!(then.least >= 10 && then.most <= 50 && near(then.mean), "{then:?}");
}
