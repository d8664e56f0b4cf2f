//! Properties of all algorithms, against slow and obvious models.

use super::{
    Algorithm, Anchor, FixedWindow, Mark, Meter, Pace, SlidingLog, SlidingWindow, Spent, meter,
};
use crate::quota::{Period, Quota};
use proptest::prelude::*;
use std::time::Duration;

/// A request: how long after the last one, and at what cost.
type Step = (u64, u64);

/// A day in 2026; nothing special.
const START_US: u64 = 1_796_000_000_123_457;

/// Decides a request the way a store does, and returns the wait: 0 is admitted.
fn decide<A: Algorithm>(
    algorithm: &A,
    state: &mut A::State,
    now_us: u64,
    cost: u64,
) -> Option<u64> {
    algorithm.settle(state, now_us);
    let fits = cost <= algorithm.remaining(state, now_us);
    if cost > 0 {
        let wait = algorithm.wait(state, now_us, cost);
        assert_eq!(wait == Some(0), fits, "remaining and wait agree");
    }
    if fits {
        algorithm.charge(state, now_us, cost);
        return Some(0);
    }
    algorithm.wait(state, now_us, cost)
}

/// The times and costs of the requests that are admitted.
fn run<A: Algorithm>(algorithm: &A, steps: &[Step]) -> Vec<(u64, u64)> {
    let mut state = A::State::default();
    let mut now_us = START_US;
    let mut admitted = Vec::new();
    for &(gap_us, cost) in steps {
        now_us += gap_us;
        if decide(algorithm, &mut state, now_us, cost) == Some(0) {
            admitted.push((now_us, cost));
        }
    }
    admitted
}

/// What was admitted in each stretch of time that begins and ends with an admission.
fn stretches(admitted: &[(u64, u64)]) -> impl Iterator<Item = (u64, u64)> {
    (0..admitted.len()).flat_map(move |first| {
        let mut sum = 0;
        admitted[first..].iter().map(move |&(time, cost)| {
            sum += cost;
            (time - admitted[first].0, sum)
        })
    })
}

/// A lone client that waits as long as it is told is admitted, and not a microsecond earlier. The
/// reset is honest in the same way, and a state that can be forgotten is as good as new.
fn assert_honest<A>(algorithm: &A, steps: &[Step])
where
    A: Algorithm,
    A::State: Clone,
{
    let mut state = A::State::default();
    let mut now_us = START_US;
    for &(gap_us, cost) in steps {
        now_us += gap_us;
        let wait = decide(algorithm, &mut state, now_us, cost);
        let admits_at =
            |time_us, cost| decide(algorithm, &mut state.clone(), time_us, cost) == Some(0);
        if let Some(wait @ 1..) = wait {
            assert!(admits_at(now_us + wait, cost), "not admitted after the wait of {wait}");
            assert!(!admits_at(now_us + wait - 1, cost), "admitted before the wait of {wait}");
        }
        let remaining = algorithm.remaining(&state, now_us);
        let (limit, _) = algorithm.allotment();
        assert!(remaining <= limit);
        let reset = algorithm.reset(&state, now_us, remaining);
        if reset > 0 && remaining < limit {
            assert!(admits_at(now_us + reset, remaining + 1), "no more after the reset of {reset}");
            assert!(!admits_at(now_us + reset - 1, remaining + 1), "more before {reset}");
        }
        if cost <= remaining {
            let mut undone = state.clone();
            algorithm.charge(&mut undone, now_us, cost);
            algorithm.take_back(&mut undone, now_us, cost);
            assert_eq!(algorithm.remaining(&undone, now_us), remaining, "taken back");
            assert_eq!(algorithm.reset(&undone, now_us, remaining), reset, "taken back");
            assert_eq!(algorithm.fresh_at(&undone), algorithm.fresh_at(&state), "taken back");
        }
        let fresh_us = algorithm.fresh_at(&state).max(now_us);
        let mut later = state.clone();
        algorithm.settle(&mut later, fresh_us);
        assert_eq!(
            algorithm.remaining(&later, fresh_us),
            {
                let mut new = A::State::default();
                algorithm.settle(&mut new, fresh_us);
                algorithm.remaining(&new, fresh_us)
            },
            "fresh, but not like new"
        );
    }
}

/// Quotas from the microsecond to years, round and odd.
fn quota(max_limit: u64) -> impl Strategy<Value = Quota> {
    let limit = prop_oneof![1..=20_u64.min(max_limit), 1..=max_limit];
    let period = prop_oneof![
        (1_u64..100),
        (1_u64..5_000_000),
        (1_u64..100).prop_map(|n| n * 1_000_000),
        (1_u64..48).prop_map(|n| n * 3_600_000_000),
        (1_u64..1_000).prop_map(|n| n * 86_400_000_000),
    ];
    (limit, period).prop_map(|(limit, period)| Quota::new(limit, Duration::from_micros(period)))
}

fn bucket_quota() -> impl Strategy<Value = Quota> {
    (quota(1_000_000), proptest::option::of(1_u64..50)).prop_map(|(quota, burst)| match burst {
        Some(burst) => quota.burst(burst),
        None => quota,
    })
}

/// Requests about as close together as the quota allows them, with long pauses in between.
fn steps(quota: &Quota) -> impl Strategy<Value = Vec<Step>> + use<> {
    let period = match quota.period() {
        Period::Fixed(period) => period.as_micros() as u64,
        _ => 86_400_000_000,
    };
    let capacity = quota.capacity();
    let gap = prop_oneof![
        4 => Just(0),
        4 => 0..=period.div_ceil(quota.limit()) * 2,
        2 => 0..=period,
        1 => 0..=period * 3,
        1 => Just(3_600_000_000 * 24 * 365),
    ];
    let cost = prop_oneof![6 => 1..=capacity.min(3), 2 => 1..=capacity, 1 => 0..=capacity + 1];
    proptest::collection::vec((gap, cost), 1..80)
}

fn with_steps(quota: impl Strategy<Value = Quota>) -> impl Strategy<Value = (Quota, Vec<Step>)> {
    quota.prop_flat_map(|quota| (Just(quota), steps(&quota)))
}

// === token bucket and leaky bucket ===

/// Tokens in units of 1/period, so that a microsecond adds `limit` of them.
struct BucketModel {
    tokens: i128,
    last_us: i128,
}

impl BucketModel {
    fn decide(&mut self, quota: &Quota, tick_us: u64, now_us: u64, cost: u64) -> (bool, u64) {
        let period = quota.period().fixed_us().unwrap() as i128;
        let full = quota.capacity() as i128 * period;
        let now_us = (now_us - now_us % tick_us) as i128;
        self.tokens = (self.tokens + (now_us - self.last_us) * quota.limit() as i128).min(full);
        self.last_us = now_us;
        let cost = cost as i128 * period;
        let admitted = cost <= self.tokens;
        if admitted {
            self.tokens -= cost;
        }
        (admitted, (self.tokens / period) as u64)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_token_bucket_is_a_count_of_tokens((quota, steps) in with_steps(bucket_quota())) {
        let Ok(bucket) = Meter::new(&quota) else { return Ok(()) };
        let mut model = BucketModel { tokens: i128::MAX / 2, last_us: 0 };
        let mut state = meter::State::default();
        let mut now_us = START_US;
        for (gap_us, cost) in steps {
            now_us += gap_us;
            let admitted = decide(&bucket, &mut state, now_us, cost) == Some(0);
            let remaining = bucket.remaining(&state, now_us);
            let expected = model.decide(&quota, bucket.pace().tick_us, now_us, cost);
            prop_assert_eq!((admitted, remaining), expected);
        }
    }

    #[test]
    fn a_token_bucket_never_admits_more_than_its_bound((quota, steps) in with_steps(bucket_quota())) {
        let Ok(bucket) = Meter::new(&quota) else { return Ok(()) };
        let period = quota.period().fixed_us().unwrap() as u128;
        let tick_us = bucket.pace().tick_us;
        for (time_us, sum) in stretches(&run(&bucket, &steps)) {
            // Within one tick time stands still, so a stretch may hold one more than it is long.
            let time_us = u128::from(time_us + (tick_us - 1));
            let bound = u128::from(quota.capacity()) * period + time_us * u128::from(quota.limit());
            prop_assert!(u128::from(sum) * period <= bound);
        }
    }

    #[test]
    fn waits_of_a_token_bucket_are_honest((quota, steps) in with_steps(bucket_quota())) {
        if let Ok(bucket) = Meter::new(&quota) {
            assert_honest(&bucket, &steps);
        }
    }

    #[test]
    fn waits_of_a_shaping_bucket_are_honest(
        (quota, steps) in with_steps(bucket_quota()),
        max_delay_us in 0_u64..10_000_000,
    ) {
        if let Ok(bucket) = Meter::shaping(&quota, max_delay_us) {
            assert_honest(&bucket, &steps);
        }
    }

    #[test]
    fn a_shaping_bucket_spaces_departures((quota, steps) in with_steps(bucket_quota())) {
        let Ok(bucket) = Meter::shaping(&quota, 10_000_000) else { return Ok(()) };
        let mut state = meter::State::default();
        let mut now_us = START_US;
        let mut departures: Vec<(u64, u64)> = Vec::new();
        for (gap_us, cost) in steps {
            now_us += gap_us;
            bucket.settle(&mut state, now_us);
            let delay_us = if cost <= quota.capacity() { bucket.delay(&state, now_us, cost) } else { 0 };
            if cost <= quota.capacity() && decide(&bucket, &mut state, now_us, cost) == Some(0) {
                prop_assert!(delay_us <= 10_000_000);
                let departure_us = now_us + delay_us;
                prop_assert!(departures.last().is_none_or(|last| last.0 <= departure_us), "in order");
                departures.push((departure_us, cost));
            }
        }
        let period = quota.period().fixed_us().unwrap() as u128;
        let tick_us = bucket.pace().tick_us;
        for (time_us, sum) in stretches(&departures) {
            let time_us = u128::from(time_us + tick_us);
            let bound = u128::from(quota.capacity()) * period + time_us * u128::from(quota.limit());
            prop_assert!(u128::from(sum) * period <= bound);
        }
    }

    #[test]
    fn a_refunded_token_bucket_never_spent_it((quota, steps) in with_steps(bucket_quota())) {
        let Ok(bucket) = Meter::new(&quota) else { return Ok(()) };
        let mut state = meter::State::default();
        let mut now_us = START_US;
        for (gap_us, cost) in steps {
            now_us += gap_us;
            bucket.settle(&mut state, now_us);
            if (1..=bucket.remaining(&state, now_us)).contains(&cost) {
                let mut charged = state;
                bucket.charge(&mut charged, now_us, cost);
                let spent = Spent { time_us: now_us, cost, height: bucket.height(&charged) };
                bucket.refund(&mut charged, now_us, &spent, None);
                prop_assert_eq!(charged, state);
                bucket.charge(&mut state, now_us, cost);
            }
        }
    }

    /// Against a bucket that knows each charge by itself.
    #[test]
    fn what_is_given_back_was_left((bucket, moves) in with_moves()) {
        let mut queue = Queue::new(bucket);
        for next in moves {
            queue.go_on(next);
        }
    }

    #[test]
    fn what_is_kept_is_within_the_bound_whatever_is_given_back_and_when(
        (bucket, moves) in with_moves(),
    ) {
        let mut queue = Queue::new(bucket);
        for next in moves {
            queue.go_on(next);
        }
        let Pace { tick_us, drops_per_tick, drops_per_unit } = bucket.pace();
        let kept: Vec<_> = queue.kept.iter().map(|spent| (spent.time_us, spent.cost)).collect();
        for (time_us, sum) in stretches(&kept) {
            // Time stands still within a tick.
            let ticks = (bucket.horizon_us() + time_us).div_ceil(tick_us);
            let bound = u128::from(ticks) * u128::from(drops_per_tick);
            prop_assert!(u128::from(sum) * u128::from(drops_per_unit) <= bound);
        }
    }

    /// However many are under way at the same time, and in whatever order they go back.
    #[test]
    fn what_is_given_back_at_once_was_never_spent(
        quota in bucket_quota(),
        full in 0_u64..50,
        turns in proptest::collection::vec((any::<bool>(), 0_usize..8), 1..200),
    ) {
        let Ok(bucket) = Meter::new(&quota) else { return Ok(()) };
        let mut queue = Queue::new(bucket);
        queue.charge(full.min(quota.capacity()));
        let level = queue.state;
        let stays = queue.kept.len();
        for (charges, index) in turns {
            let under_way = queue.kept.len() - stays;
            if charges && queue.charge(1) {
                continue;
            }
            if under_way > 0 {
                queue.give_back(stays + index % under_way);
            }
        }
        while queue.kept.len() > stays {
            queue.give_back(stays);
        }
        prop_assert_eq!(queue.state, level);
    }

    /// Seen from real time, in which nothing goes back.
    #[test]
    fn a_clock_that_steps_back_never_grants_anything(
        (quota, steps) in with_steps(bucket_quota()),
        back_us in proptest::collection::vec(0_u64..1_000_000_000_000, 80),
        often in 1_usize..10,
    ) {
        let Ok(bucket) = Meter::new(&quota) else { return Ok(()) };
        let mut state = meter::State::default();
        let (mut real_us, mut clock_us) = (START_US, START_US);
        let mut admitted = Vec::new();
        for (index, (gap_us, cost)) in steps.into_iter().enumerate() {
            real_us += gap_us;
            clock_us += gap_us;
            if index % often == 0 {
                clock_us -= back_us[index];
            }
            if decide(&bucket, &mut state, clock_us, cost) == Some(0) {
                admitted.push((real_us, cost));
            }
        }
        let period = quota.period().fixed_us().unwrap() as u128;
        let tick_us = bucket.pace().tick_us;
        for (time_us, sum) in stretches(&admitted) {
            // Every step back may cut a tick short.
            let time_us = u128::from(time_us + 81 * (tick_us - 1));
            let bound = u128::from(quota.capacity()) * period + time_us * u128::from(quota.limit());
            prop_assert!(u128::from(sum) * period <= bound);
        }
    }

    #[test]
    fn a_looser_quota_never_turns_an_admissible_caller_away(
        (quota, steps) in with_steps(bucket_quota()),
        faster in 1_u64..50,
        larger in 0_u64..50,
        later_us in 0_u64..100_000_000,
        cost in 1_u64..50,
    ) {
        let looser = Quota::new(
            quota.limit() * faster,
            Duration::from_micros(quota.period().fixed_us().unwrap()),
        )
        .burst(quota.capacity() + larger);
        let (Ok(bucket), Ok(looser)) = (Meter::new(&quota), Meter::new(&looser)) else {
            return Ok(());
        };
        // Another tick is another rounding of the present.
        prop_assume!(bucket.pace().tick_us == looser.pace().tick_us);
        let mut state = meter::State::default();
        let mut now_us = START_US;
        for (gap_us, cost) in steps {
            now_us += gap_us;
            decide(&bucket, &mut state, now_us, cost);
        }
        now_us += later_us;
        let mut changed = state;
        bucket.settle(&mut state, now_us);
        looser.take_over(&mut changed, bucket.terms(), now_us);
        looser.settle(&mut changed, now_us);
        prop_assert!(looser.remaining(&changed, now_us) >= bucket.remaining(&state, now_us));
        if bucket.wait(&state, now_us, cost) == Some(0) {
            prop_assert_eq!(looser.wait(&changed, now_us, cost), Some(0));
        }
    }
}

/// What happens next to a bucket from which charges are given back.
#[derive(Clone, Copy, Debug)]
enum Move {
    Pass(u64),
    Charge(u64),
    /// Gives back one of those that were kept so far.
    GiveBack(usize),
}

/// Time passes by parts of what a full bucket takes to drain: what is remembered of give-backs is
/// forgotten after twice that.
fn with_moves() -> impl Strategy<Value = (Meter, Vec<Move>)> {
    let bucket = (bucket_quota(), prop_oneof![Just(0), 0_u64..10_000_000]);
    let bucket = bucket.prop_filter_map("no bucket", |(quota, max_delay_us)| {
        Some((quota.capacity(), Meter::shaping(&quota, max_delay_us).ok()?))
    });
    bucket.prop_flat_map(|(capacity, bucket)| {
        let full_us = bucket.horizon_us();
        let next = prop_oneof![
            2 => (0..=full_us / 50).prop_map(Move::Pass),
            2 => (0..=full_us / 4).prop_map(Move::Pass),
            1 => (0..=full_us * 5 / 2).prop_map(Move::Pass),
            4 => (1..=capacity.min(3)).prop_map(Move::Charge),
            3 => (1..=capacity).prop_map(Move::Charge),
            5 => (0_usize..12).prop_map(Move::GiveBack),
        ];
        (Just(bucket), proptest::collection::vec(next, 1..80))
    })
}

/// A bucket, and beside it what is left in it of each charge.
struct Queue {
    bucket: Meter,
    state: meter::State,
    mark: Mark,
    now_us: u64,
    settled_us: u64,
    /// Each charge that was not given back, in order; and all that are in the bucket, by their number.
    kept: Vec<Spent>,
    numbers: Vec<usize>,
    drops: Vec<u64>,
    /// How many charges there were when something was given back last.
    disturbed: usize,
}

impl Queue {
    fn new(bucket: Meter) -> Self {
        Self {
            bucket,
            state: meter::State::default(),
            mark: Mark::default(),
            now_us: START_US,
            settled_us: START_US,
            kept: Vec::new(),
            numbers: Vec::new(),
            drops: Vec::new(),
            disturbed: 0,
        }
    }

    fn go_on(&mut self, next: Move) {
        match next {
            Move::Pass(by_us) => self.now_us += by_us,
            Move::Charge(cost) => drop(self.charge(cost)),
            Move::GiveBack(index) if index < self.kept.len() => {
                // Mostly one of the last.
                self.give_back(self.kept.len() - 1 - index);
            }
            Move::GiveBack(_) => {}
        }
    }

    fn settle(&mut self) {
        self.bucket.settle(&mut self.state, self.now_us);
        // What is not needed any more is forgotten.
        if self.mark.until_us <= self.now_us {
            self.mark = Mark::default();
        }
        let Pace { tick_us, drops_per_tick, .. } = self.bucket.pace();
        let ticks = self.now_us / tick_us - self.settled_us / tick_us;
        self.settled_us = self.now_us;
        let mut drains = ticks.saturating_mul(drops_per_tick);
        for left in &mut self.drops {
            let drained = drains.min(*left);
            *left -= drained;
            drains -= drained;
        }
        assert_eq!(self.bucket.height(&self.state), self.drops.iter().sum::<u64>());
    }

    fn charge(&mut self, cost: u64) -> bool {
        self.settle();
        let Self { bucket, state, now_us, .. } = self;
        if decide(bucket, state, *now_us, cost) != Some(0) {
            return false;
        }
        let height = match bucket.height(state) {
            level if self.mark.counts_at(*now_us) => bucket.height_with(&self.mark, level),
            level => level,
        };
        self.kept.push(Spent { time_us: *now_us, cost, height });
        self.numbers.push(self.drops.len());
        self.drops.push(cost * bucket.pace().drops_per_unit);
        true
    }

    fn give_back(&mut self, index: usize) {
        self.settle();
        let (spent, number) = (self.kept.remove(index), self.numbers.remove(index));
        let before = self.bucket.height(&self.state);
        self.bucket.refund(&mut self.state, self.now_us, &spent, Some(&mut self.mark));
        let given = before - self.bucket.height(&self.state);
        let left = self.drops[number];
        assert!(given <= left, "{given} given back, {left} left");
        let Pace { tick_us, drops_per_unit, .. } = self.bucket.pace();
        let at_once = self.now_us / tick_us == spent.time_us / tick_us;
        assert!(!at_once || given == spent.cost * drops_per_unit, "all of it, at once");
        let is_undisturbed = number >= self.disturbed;
        assert!(!is_undisturbed || given == left, "all of it, if nothing else was given back");
        self.drops[number] -= given;
        self.disturbed = self.drops.len();
    }
}

/// More than can be counted is given back from beneath a charge: nothing is certain of it then but how
/// long it is ago.
#[test]
fn what_cannot_be_counted_gives_nothing_away() {
    let bucket = Meter::new(&Quota::new(4, Duration::from_secs(365 * 86_400))).unwrap();
    let mut queue = Queue::new(bucket);
    assert!(queue.charge(1));
    for _ in 0..2_000 {
        assert!(queue.charge(1));
        assert!(queue.charge(1));
        queue.give_back(1);
        queue.give_back(1);
        queue.now_us += 1_000;
    }
    assert!(queue.charge(1));
    assert!(queue.charge(1));
    queue.give_back(1);
    queue.go_on(Move::Pass(bucket.horizon_us() * 3 / 8));
    queue.give_back(1);
}

/// Both quotas are counted in the same coarse ticks, and of a present in the middle of one.
#[test]
fn what_drained_in_the_present_tick_is_not_counted_twice() {
    let period = Duration::from_secs(45_792_000);
    let bucket = Meter::new(&Quota::new(410_191, period)).unwrap();
    let looser = Meter::new(&Quota::new(44 * 410_191, period)).unwrap();
    assert_eq!((bucket.pace().tick_us, looser.pace().tick_us), (1_000_000, 1_000_000));
    for into_the_tick_us in [0, 1, 500_000, 999_999] {
        let mut state = meter::State::default();
        decide(&bucket, &mut state, START_US, 5);
        let now_us = START_US + into_the_tick_us;
        let mut changed = state;
        bucket.settle(&mut state, now_us);
        looser.take_over(&mut changed, bucket.terms(), now_us);
        looser.settle(&mut changed, now_us);
        assert_eq!(bucket.remaining(&state, now_us), 410_191 - 5);
        assert_eq!(looser.remaining(&changed, now_us), 44 * 410_191 - 5, "{into_the_tick_us}");
    }
}

// === windows and logs ===

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_fixed_window_counts_what_is_in_it(
        (quota, steps) in with_steps(quota(1_000)),
        anchor in prop_oneof![Just(Anchor::Epoch), Just(Anchor::FirstHit)],
    ) {
        let window = FixedWindow::new(&quota, anchor).unwrap();
        let period = quota.period().fixed_us().unwrap();
        let admitted = run(&window, &steps);
        let mut now_us = START_US;
        let mut next = admitted.iter().peekable();
        let mut opened = None;
        let mut counted = Vec::<(u64, u64)>::new();
        for (gap_us, cost) in steps {
            now_us += gap_us;
            let start_us = match (anchor, opened) {
                (Anchor::Epoch, _) => now_us / period * period,
                (Anchor::FirstHit, Some(start_us)) if now_us < start_us + period => start_us,
                (Anchor::FirstHit, _) => now_us,
            };
            let spent: u64 = counted.iter().filter(|hit| hit.0 >= start_us).map(|hit| hit.1).sum();
            if spent + cost <= quota.limit() {
                prop_assert_eq!(next.next(), Some(&(now_us, cost)));
                counted.push((now_us, cost));
                if cost > 0 {
                    opened = Some(start_us);
                }
            }
        }
        prop_assert_eq!(next.next(), None);
    }

    #[test]
    fn waits_of_a_fixed_window_are_honest(
        (quota, steps) in with_steps(quota(1_000)),
        anchor in prop_oneof![Just(Anchor::Epoch), Just(Anchor::FirstHit)],
    ) {
        assert_honest(&FixedWindow::new(&quota, anchor).unwrap(), &steps);
    }

    #[test]
    fn waits_of_calendar_windows_are_honest(
        limit in 1_u64..5,
        steps in proptest::collection::vec((0_u64..5 * 86_400_000_000, 0_u64..6), 1..60),
    ) {
        for quota in [
            Quota::per_calendar_day(limit),
            Quota::per_calendar_week(limit),
            Quota::per_calendar_month(limit),
        ] {
            assert_honest(&FixedWindow::new(&quota, Anchor::Epoch).unwrap(), &steps);
        }
    }

    #[test]
    fn a_sliding_window_weights_the_last_window((quota, steps) in with_steps(quota(1_000))) {
        let Ok(window) = SlidingWindow::new(&quota) else { return Ok(()) };
        let period = quota.period().fixed_us().unwrap();
        let admitted = run(&window, &steps);
        let mut next = admitted.iter().peekable();
        let mut counted = Vec::<(u64, u64)>::new();
        let mut now_us = START_US;
        for (gap_us, cost) in steps {
            now_us += gap_us;
            let start_us = now_us / period * period;
            let sum_between = |from: u64, to: u64| -> u128 {
                let hits = counted.iter().filter(|hit| from <= hit.0 && hit.0 < to);
                hits.map(|hit| u128::from(hit.1)).sum()
            };
            let current = sum_between(start_us, u64::MAX);
            let previous = sum_between(start_us - period, start_us);
            let left = u128::from(start_us + period - now_us);
            let width = u128::from(period);
            let sum = (current + u128::from(cost)) * width + previous * left;
            if sum <= u128::from(quota.limit()) * width {
                prop_assert_eq!(next.next(), Some(&(now_us, cost)));
                counted.push((now_us, cost));
            }
        }
        prop_assert_eq!(next.next(), None);
    }

    #[test]
    fn waits_of_a_sliding_window_are_honest((quota, steps) in with_steps(quota(1_000))) {
        if let Ok(window) = SlidingWindow::new(&quota) {
            assert_honest(&window, &steps);
        }
    }

    #[test]
    fn a_sliding_log_admits_its_limit_in_every_period((quota, steps) in with_steps(quota(1_000))) {
        let log = SlidingLog::new(&quota).unwrap();
        let period = quota.period().fixed_us().unwrap();
        let admitted = run(&log, &steps);
        for (time_us, sum) in stretches(&admitted) {
            prop_assert!(time_us >= period || sum <= quota.limit());
        }
        // And everything that fits is admitted.
        let mut next = admitted.iter().peekable();
        let mut now_us = START_US;
        let mut counted = Vec::<(u64, u64)>::new();
        for (gap_us, cost) in steps {
            now_us += gap_us;
            let live = counted.iter().filter(|hit| hit.0 + period > now_us);
            if live.map(|hit| hit.1).sum::<u64>() + cost <= quota.limit() {
                prop_assert_eq!(next.next(), Some(&(now_us, cost)));
                counted.push((now_us, cost));
            }
        }
        prop_assert_eq!(next.next(), None);
    }

    #[test]
    fn waits_of_a_sliding_log_are_honest((quota, steps) in with_steps(quota(1_000))) {
        assert_honest(&SlidingLog::new(&quota).unwrap(), &steps);
    }

    #[test]
    fn a_sliding_log_stays_exact_when_the_clock_steps_back(
        (quota, steps) in with_steps(quota(1_000)),
        back_us in proptest::collection::vec(0_u64..1_000_000_000_000, 80),
        often in 1_usize..10,
    ) {
        let log = SlidingLog::new(&quota).unwrap();
        let period = quota.period().fixed_us().unwrap();
        let mut state = Default::default();
        let (mut real_us, mut clock_us) = (START_US, START_US);
        let mut admitted = Vec::new();
        for (index, (gap_us, cost)) in steps.into_iter().enumerate() {
            real_us += gap_us;
            clock_us += gap_us;
            if index % often == 0 {
                clock_us -= back_us[index];
            }
            if decide(&log, &mut state, clock_us, cost) == Some(0) {
                admitted.push((real_us, cost));
            }
        }
        for (time_us, sum) in stretches(&admitted) {
            prop_assert!(time_us >= period || sum <= quota.limit());
        }
    }

    #[test]
    fn a_small_step_back_grants_no_window_anything(
        (quota, steps) in with_steps(quota(100)),
        back_us in 0_u64..1_000_000_000_000,
    ) {
        let back_us = back_us % quota.period().fixed_us().unwrap();
        let now_us = START_US + steps.iter().map(|step| step.0).sum::<u64>();
        fn check<A: Algorithm>(algorithm: &A, steps: &[Step], now_us: u64, back_us: u64)
        where
            A::State: Clone,
        {
            let mut state = A::State::default();
            let mut time_us = START_US;
            for &(gap_us, cost) in steps {
                time_us += gap_us;
                decide(algorithm, &mut state, time_us, cost);
            }
            let mut there = state.clone();
            algorithm.settle(&mut there, now_us);
            let mut back = state.clone();
            algorithm.settle(&mut back, now_us - back_us);
            assert!(
                algorithm.remaining(&back, now_us - back_us) <= algorithm.remaining(&there, now_us)
                    || algorithm.fresh_at(&state) <= now_us,
                "stepping back granted something"
            );
        }
        check(&FixedWindow::new(&quota, Anchor::Epoch).unwrap(), &steps, now_us, back_us);
        check(&SlidingLog::new(&quota).unwrap(), &steps, now_us, back_us);
        if let Ok(window) = SlidingWindow::new(&quota) {
            check(&window, &steps, now_us, back_us);
        }
    }
}
