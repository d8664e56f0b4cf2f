//! A circuit breaker: a store that does not answer is left alone for a while.
//!
//! Closed, every call goes through and its outcome is counted. Too many failures open it: calls are
//! refused at once for an interval, so that nobody waits for a timeout. Then it is half-open: one
//! call, the probe, goes through while all others stay refused. Its success closes the breaker, its
//! failure opens it for the next, longer interval.

use crate::{clock::whole_us, random::draw};
use parking_lot::Mutex;
use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// When a breaker opens, and for how long.
///
/// The longest interval is also the longest time for which a store that is back goes unused, so it
/// is short by default: a probe every few seconds is no load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// So many failures in a row open it. 0 is like 1. By default 5.
    pub(crate) failures: u32,
    /// A failure also opens it when this share of the calls of the last [`window`](Self::window)
    /// has failed, in thousandths. Above 1000 it never does. By default 500.
    pub(crate) per_mille: u32,
    /// How many calls there must have been in the window for their share of failures to say
    /// something. By default 20.
    pub(crate) min_calls: u32,
    /// How far back calls are counted, to within a tenth of it. By default 10 seconds.
    pub(crate) window: Duration,
    /// The first interval. Every failed probe doubles it; success goes back to it. By default half
    /// a second.
    ///
    /// Intervals are drawn at random from 20 % below to 20 % above, so that processes that lost
    /// their store together don't all come back to it at the same time.
    pub(crate) open_for: Duration,
    /// The longest interval, which none exceeds, the first included. By default 5 seconds.
    pub(crate) max_open_for: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            failures: 5,
            per_mille: 500,
            min_calls: 20,
            window: Duration::from_secs(10),
            open_for: Duration::from_millis(500),
            max_open_for: Duration::from_secs(5),
        }
    }
}

/// What a breaker does with calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It lets all of them through.
    Closed,
    /// It refuses them. It stays open until the first call after the end of the interval.
    Open,
    /// It lets one through at a time.
    HalfOpen,
}

/// What an outcome changed. The two alternate, beginning with `Opened`: a failed probe changes
/// nothing that is worth telling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// From now on calls are refused.
    Opened,
    /// The store is back.
    Closed,
}

/// The breaker does not let a call through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// How long until a call may probe, never 0; `None` while a probe is out.
    pub(crate) wait_us: Option<u64>,
}

/// A circuit breaker. Clones share its state.
///
/// It does not ask for the time but is told, in microseconds by any clock. A clock that goes back
/// never makes an interval last longer than the longest one, counted from the first call after
/// that.
#[derive(Clone, Debug)]
pub(crate) struct Breaker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The machine's epoch and state in one word, written under its lock only: while the breaker is
    /// closed, a permit costs one load.
    gate: AtomicU64,
    machine: Mutex<Machine>,
}

impl Breaker {
    /// A closed breaker. Breakers with different seeds draw different intervals.
    pub(crate) fn new(settings: &Settings, seed: u64) -> Self {
        let machine = Machine::new(settings, seed);
        Self(Arc::new(Shared {
            gate: AtomicU64::new(machine.gate()),
            machine: Mutex::new(machine),
        }))
    }

    /// Asks to make a call.
    pub(crate) fn permit(&self, now_us: u64) -> Result<Permit, Refused> {
        let (epoch, state) = self.gate();
        if state == State::Closed {
            return Ok(Permit { breaker: self.clone(), epoch, probe: false });
        }
        let (epoch, probe) = self.locked(|machine| machine.permit(now_us))?;
        Ok(Permit { breaker: self.clone(), epoch, probe })
    }

    /// What it does with calls at the moment.
    pub(crate) fn state(&self) -> State {
        self.gate().1
    }

    fn gate(&self) -> (u64, State) {
        // No other memory is read on the strength of this word, so its order with others is no
        // matter.
        let gate = self.0.gate.load(Relaxed);
        let state = match gate % 4 {
            0 => State::Closed,
            1 => State::Open,
            _ => State::HalfOpen,
        };
        (gate / 4, state)
    }

    fn locked<T>(&self, change: impl FnOnce(&mut Machine) -> T) -> T {
        let mut machine = self.0.machine.lock();
        let epoch = machine.epoch;
        let result = change(&mut machine);
        if machine.epoch != epoch {
            self.0.gate.store(machine.gate(), Relaxed);
        }
        result
    }
}

/// Leave to make one call; its end is the call's outcome.
///
/// Dropped, it says nothing about the store: the call was cancelled, or its answer was of no
/// account. If it was the probe, the next call is the probe then. A call must come to an end, so
/// give it a timeout: as long as a probe is out, all other calls are refused.
#[derive(Debug)]
pub(crate) struct Permit {
    breaker: Breaker,
    epoch: u64,
    /// It holds the place of the probe and gives it back if dropped.
    probe: bool,
}

impl Permit {
    /// The store has answered. Says nothing if the breaker has changed its state since the call
    /// began.
    pub(crate) fn success(self, now_us: u64) -> Option<Change> {
        self.end(now_us, false)
    }

    /// The store has not answered. Says nothing if the breaker has changed its state since the call
    /// began.
    pub(crate) fn failure(self, now_us: u64) -> Option<Change> {
        self.end(now_us, true)
    }

    fn end(mut self, now_us: u64, failed: bool) -> Option<Change> {
        self.probe = false;
        self.breaker.locked(|machine| machine.outcome(self.epoch, now_us, failed))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.probe {
            self.breaker.locked(Machine::give_back);
        }
    }
}

/// The breaker itself, for one thread.
#[derive(Debug)]
struct Machine {
    failures: u32,
    per_mille: u32,
    min_calls: u32,
    slice_us: u64,
    open_for_us: u64,
    max_open_for_us: u64,
    /// Grows with every change of state. An outcome counts in the epoch of its permit only.
    epoch: u64,
    phase: Phase,
    tally: Tally,
    /// What the next interval is before chance has its say.
    next_open_for_us: u64,
    random: u64,
}

#[derive(Debug)]
enum Phase {
    Closed,
    Open { since_us: u64, for_us: u64 },
    HalfOpen { probing: bool },
}

impl Machine {
    fn new(settings: &Settings, seed: u64) -> Self {
        let max_open_for_us = whole_us(settings.max_open_for);
        let open_for_us = whole_us(settings.open_for).min(max_open_for_us);
        Self {
            failures: settings.failures,
            per_mille: settings.per_mille,
            min_calls: settings.min_calls,
            slice_us: whole_us(settings.window).div_ceil(SLICES).max(1),
            open_for_us,
            max_open_for_us,
            epoch: 0,
            phase: Phase::Closed,
            tally: Tally::default(),
            next_open_for_us: open_for_us,
            random: seed,
        }
    }

    fn gate(&self) -> u64 {
        let state = match self.phase {
            Phase::Closed => 0,
            Phase::Open { .. } => 1,
            Phase::HalfOpen { .. } => 2,
        };
        self.epoch * 4 + state
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.epoch += 1;
    }

    /// The epoch of the permit, and whether it is the probe's.
    fn permit(&mut self, now_us: u64) -> Result<(u64, bool), Refused> {
        match &mut self.phase {
            // It has been closed since the gate was read.
            Phase::Closed => return Ok((self.epoch, false)),
            Phase::Open { since_us, for_us } => {
                // If the clock went back, the interval begins anew.
                *since_us = now_us.min(*since_us);
                let wait_us = for_us.saturating_sub(now_us - *since_us);
                if wait_us > 0 {
                    return Err(Refused { wait_us: Some(wait_us) });
                }
                self.enter(Phase::HalfOpen { probing: true });
            }
            Phase::HalfOpen { probing } => {
                if mem::replace(probing, true) {
                    return Err(Refused { wait_us: None });
                }
            }
        }
        Ok((self.epoch, true))
    }

    fn outcome(&mut self, epoch: u64, now_us: u64, failed: bool) -> Option<Change> {
        if epoch != self.epoch {
            return None;
        }
        match self.phase {
            Phase::Closed => {
                self.tally.note(now_us / self.slice_us, failed);
                (failed && self.too_many()).then(|| {
                    self.open(now_us);
                    Change::Opened
                })
            }
            // No permit is of an epoch in which it was open.
            Phase::Open { .. } => None,
            Phase::HalfOpen { .. } if failed => {
                self.open(now_us);
                None
            }
            Phase::HalfOpen { .. } => {
                self.tally = Tally::default();
                self.next_open_for_us = self.open_for_us;
                self.enter(Phase::Closed);
                Some(Change::Closed)
            }
        }
    }

    /// Only the probe has a place to give back, and until its end nothing changes the state.
    fn give_back(&mut self) {
        if let Phase::HalfOpen { probing } = &mut self.phase {
            *probing = false;
        }
    }

    fn too_many(&self) -> bool {
        if self.tally.streak >= self.failures {
            return true;
        }
        let (calls, failed) = self.tally.sum();
        calls >= u64::from(self.min_calls) && failed * 1_000 >= calls * u64::from(self.per_mille)
    }

    fn open(&mut self, now_us: u64) {
        let about_us = self.next_open_for_us;
        // At the longest interval only what is below is left to chance. To draw first and cut
        // after would make half of all intervals the same.
        let least_us = about_us - about_us / 5;
        let most_us = about_us.saturating_add(about_us / 5).min(self.max_open_for_us);
        let for_us = least_us + draw(&mut self.random, most_us - least_us);
        self.next_open_for_us = about_us.saturating_mul(2).min(self.max_open_for_us);
        self.enter(Phase::Open { since_us: now_us, for_us });
    }
}

const SLICES: u64 = 10;

/// The outcomes since the breaker was closed.
#[derive(Debug, Default)]
struct Tally {
    /// Failures in a row.
    streak: u32,
    /// The number of the newest slice of time; the window is this one and those before it.
    newest: u64,
    slices: [Slice; SLICES as usize],
}

#[derive(Clone, Copy, Debug, Default)]
struct Slice {
    calls: u32,
    failed: u32,
}

impl Tally {
    fn note(&mut self, slice: u64, failed: bool) {
        if slice.abs_diff(self.newest) >= SLICES {
            self.slices = Default::default();
            self.newest = slice;
        }
        while self.newest < slice {
            self.newest += 1;
            *self.current() = Slice::default();
        }
        // A time from before that, whether the clock went back a little or another thread was
        // faster, counts as now.
        let current = self.current();
        current.calls = current.calls.saturating_add(1);
        current.failed = current.failed.saturating_add(u32::from(failed));
        self.streak = if failed { self.streak.saturating_add(1) } else { 0 };
    }

    fn current(&mut self) -> &mut Slice {
        &mut self.slices[(self.newest % SLICES) as usize]
    }

    /// Calls and failures in the window.
    fn sum(&self) -> (u64, u64) {
        self.slices.iter().fold((0, 0), |(calls, failed), slice| {
            (calls + u64::from(slice.calls), failed + u64::from(slice.failed))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{
        sync::{Barrier, atomic::AtomicUsize},
        thread,
    };

    const START_US: u64 = 1_796_000_000_123_457;
    const SECOND_US: u64 = 1_000_000;
    /// The defaults' longest interval.
    const LONGEST_US: u64 = 5 * SECOND_US;

    fn breaker() -> Breaker {
        Breaker::new(&Settings::default(), 7)
    }

    fn succeed(breaker: &Breaker, now_us: u64) -> Option<Change> {
        breaker.permit(now_us).expect("a permit").success(now_us)
    }

    fn fail(breaker: &Breaker, now_us: u64) -> Option<Change> {
        breaker.permit(now_us).expect("a permit").failure(now_us)
    }

    fn open(breaker: &Breaker, now_us: u64) {
        while fail(breaker, now_us).is_none() {}
        assert_eq!(breaker.state(), State::Open);
    }

    /// The probe that is due in a while, and when that is.
    fn probe(breaker: &Breaker, now_us: u64) -> (Permit, u64) {
        let due_us = now_us + wait_us(breaker, now_us);
        (breaker.permit(due_us).expect("the probe"), due_us)
    }

    fn wait_us(breaker: &Breaker, now_us: u64) -> u64 {
        breaker.permit(now_us).expect_err("refused").wait_us.expect("no probe is out")
    }

    #[test]
    fn consecutive_failures_open_it() {
        let breaker = breaker();
        for _ in 0..100 {
            for _ in 0..4 {
                assert_eq!(fail(&breaker, START_US), None);
                // Not by their share.
                assert_eq!(succeed(&breaker, START_US), None);
                assert_eq!(succeed(&breaker, START_US), None);
            }
        }
        for _ in 0..4 {
            assert_eq!(fail(&breaker, START_US), None);
        }
        assert_eq!(breaker.state(), State::Closed);
        assert_eq!(fail(&breaker, START_US), Some(Change::Opened));
        assert_eq!(breaker.state(), State::Open);
        assert!(breaker.permit(START_US).is_err());
    }

    #[test]
    fn a_share_of_failures_opens_it() {
        let breaker = breaker();
        for _ in 0..9 {
            assert_eq!(succeed(&breaker, START_US), None);
            assert_eq!(fail(&breaker, START_US), None);
        }
        assert_eq!(succeed(&breaker, START_US), None);
        assert_eq!(fail(&breaker, START_US), Some(Change::Opened), "10 of 20");
    }

    #[test]
    fn a_success_never_opens_it() {
        let settings = Settings { failures: u32::MAX, ..Settings::default() };
        let breaker = Breaker::new(&settings, 0);
        for _ in 0..19 {
            assert_eq!(fail(&breaker, START_US), None);
        }
        assert_eq!(succeed(&breaker, START_US), None, "19 of 20");
        assert_eq!(fail(&breaker, START_US), Some(Change::Opened));
    }

    #[test]
    fn failures_before_the_window_are_forgotten() {
        let breaker = breaker();
        for _ in 0..9 {
            assert_eq!(succeed(&breaker, START_US), None);
            assert_eq!(fail(&breaker, START_US), None);
        }
        let later_us = START_US + 10 * SECOND_US;
        for _ in 0..9 {
            assert_eq!(succeed(&breaker, later_us), None);
            assert_eq!(fail(&breaker, later_us), None);
        }
    }

    #[test]
    fn dropped_permits_say_nothing() {
        let breaker = breaker();
        for _ in 0..4 {
            assert_eq!(fail(&breaker, START_US), None);
        }
        for _ in 0..100 {
            drop(breaker.permit(START_US));
        }
        assert_eq!(fail(&breaker, START_US), Some(Change::Opened), "still in a row");
    }

    #[test]
    fn open_it_refuses_until_the_interval_is_over() {
        let breaker = breaker();
        open(&breaker, START_US);
        let wait_us = wait_us(&breaker, START_US);
        for passed_us in [0, 1, wait_us / 2, wait_us - 1] {
            let refused = breaker.permit(START_US + passed_us).expect_err("still open");
            assert_eq!(refused.wait_us, Some(wait_us - passed_us));
        }
        assert_eq!(breaker.state(), State::Open);
        assert!(breaker.permit(START_US + wait_us).is_ok());
    }

    #[test]
    fn half_open_it_lets_exactly_one_through() {
        let breaker = breaker();
        open(&breaker, START_US);
        let (probe, now_us) = probe(&breaker, START_US);
        assert_eq!(breaker.state(), State::HalfOpen);
        for later_us in [0, 1, SECOND_US, 1_000 * SECOND_US] {
            let refused = breaker.permit(now_us + later_us).expect_err("a probe is out");
            assert_eq!(refused.wait_us, None);
        }
        assert_eq!(probe.success(now_us), Some(Change::Closed));
        assert_eq!(breaker.state(), State::Closed);
        let permits: Vec<_> = (0..10).map(|_| breaker.permit(now_us)).collect();
        assert!(permits.iter().all(Result::is_ok));
    }

    #[test]
    fn a_dropped_probe_gives_its_place_to_the_next() {
        let breaker = breaker();
        open(&breaker, START_US);
        let (probe, now_us) = probe(&breaker, START_US);
        drop(probe);
        for _ in 0..10 {
            let next = breaker.permit(now_us).expect("probes at once");
            assert!(breaker.permit(now_us).is_err());
            drop(next);
            assert_eq!(breaker.state(), State::HalfOpen);
        }
        assert_eq!(succeed(&breaker, now_us), Some(Change::Closed));
    }

    #[test]
    fn closed_again_it_counts_from_nothing() {
        let breaker = breaker();
        open(&breaker, START_US);
        let (probe, now_us) = probe(&breaker, START_US);
        assert_eq!(probe.success(now_us), Some(Change::Closed));
        for _ in 0..4 {
            assert_eq!(fail(&breaker, now_us), None);
        }
        assert_eq!(fail(&breaker, now_us), Some(Change::Opened));
        assert!(wait_us(&breaker, now_us) <= 600_000, "the first interval again");
    }

    #[test]
    fn outcomes_of_calls_from_before_a_change_dont_count() {
        let breaker = breaker();
        let mut late: Vec<_> =
            (0..20).map(|_| breaker.permit(START_US).expect("a permit")).collect();
        open(&breaker, START_US);
        let wait_open_us = wait_us(&breaker, START_US);
        assert_eq!(late.pop().and_then(|call| call.success(START_US)), None);
        assert_eq!(late.pop().and_then(|call| call.failure(START_US)), None);
        assert_eq!(wait_us(&breaker, START_US), wait_open_us, "open");

        let (probe, now_us) = probe(&breaker, START_US);
        assert_eq!(late.pop().and_then(|call| call.success(now_us)), None);
        assert_eq!(late.pop().and_then(|call| call.failure(now_us)), None);
        drop(late.pop());
        assert_eq!(breaker.state(), State::HalfOpen);
        assert!(breaker.permit(now_us).is_err(), "the probe is still out");

        assert_eq!(probe.success(now_us), Some(Change::Closed));
        for call in late {
            assert_eq!(call.failure(now_us), None);
        }
        assert_eq!(breaker.state(), State::Closed, "closed another time");
    }

    #[test]
    fn intervals_double_up_to_the_longest() {
        for seed in 0..200 {
            let breaker = Breaker::new(&Settings::default(), seed);
            let mut now_us = START_US;
            open(&breaker, now_us);
            for about_us in [500_000, 1_000_000, 2_000_000, 4_000_000, LONGEST_US, LONGEST_US] {
                let interval_us = wait_us(&breaker, now_us);
                let bounds = about_us * 4 / 5..=(about_us * 6 / 5).min(LONGEST_US);
                assert!(bounds.contains(&interval_us), "{interval_us} for {about_us}");
                now_us += interval_us;
                assert_eq!(fail(&breaker, now_us), None, "it was not closed in between");
                assert_eq!(breaker.state(), State::Open);
            }
        }
    }

    #[test]
    fn intervals_differ_by_seed_and_are_the_same_for_the_same_seed() {
        let interval_us = |seed| {
            let breaker = Breaker::new(&Settings::default(), seed);
            open(&breaker, START_US);
            wait_us(&breaker, START_US)
        };
        let mut intervals: Vec<_> = (0..1_000).map(interval_us).collect();
        assert_eq!(interval_us(0), intervals[0]);
        intervals.sort_unstable();
        assert!(intervals[50] < 420_000 && intervals[950] > 580_000, "evenly spread");
        intervals.dedup();
        assert!(intervals.len() > 950);
    }

    #[test]
    fn a_store_that_is_back_is_used_within_the_longest_interval() {
        for failed_probes in 0..10 {
            let breaker = breaker();
            let mut now_us = START_US;
            open(&breaker, now_us);
            for _ in 0..failed_probes {
                let (probe, due_us) = probe(&breaker, now_us);
                assert_eq!(probe.failure(due_us), None);
                now_us = due_us;
            }
            assert_eq!(succeed(&breaker, now_us + LONGEST_US), Some(Change::Closed));
        }
    }

    #[test]
    fn a_clock_that_steps_back_does_not_keep_it_open() {
        let breaker = breaker();
        open(&breaker, START_US);
        let long_ago_us = START_US - 1_000_000 * SECOND_US;
        assert!(breaker.permit(long_ago_us).is_err());
        assert!(breaker.permit(long_ago_us + LONGEST_US).is_ok());

        // A step within the interval makes it longer by no more than the step.
        let breaker = Breaker::new(&Settings::default(), 8);
        open(&breaker, START_US);
        assert!(breaker.permit(START_US + 300_000).is_err());
        assert!(breaker.permit(START_US + 100_000).is_err());
        assert!(breaker.permit(START_US + LONGEST_US).is_ok());
    }

    #[test]
    fn a_clock_that_steps_back_does_not_keep_old_failures() {
        let breaker = breaker();
        for _ in 0..9 {
            assert_eq!(succeed(&breaker, START_US), None);
            assert_eq!(fail(&breaker, START_US), None);
        }
        let earlier_us = START_US - 11 * SECOND_US;
        for _ in 0..9 {
            assert_eq!(succeed(&breaker, earlier_us), None);
            assert_eq!(fail(&breaker, earlier_us), None);
        }
    }

    #[test]
    fn senseless_settings_do_no_harm() {
        let zero = Settings {
            failures: 0,
            per_mille: 0,
            min_calls: 0,
            window: Duration::ZERO,
            open_for: Duration::ZERO,
            max_open_for: Duration::ZERO,
        };
        let breaker = Breaker::new(&zero, 0);
        assert_eq!(succeed(&breaker, 0), None);
        assert_eq!(fail(&breaker, 0), Some(Change::Opened));
        assert_eq!(fail(&breaker, 0), None, "probes at once");
        assert_eq!(succeed(&breaker, 0), Some(Change::Closed));

        let endless = Settings {
            failures: 1,
            per_mille: u32::MAX,
            min_calls: u32::MAX,
            window: Duration::MAX,
            open_for: Duration::MAX,
            max_open_for: Duration::MAX,
        };
        let breaker = Breaker::new(&endless, 0);
        assert_eq!(fail(&breaker, u64::MAX), Some(Change::Opened));
        assert!(breaker.permit(0).is_err());
        assert!(breaker.permit(u64::MAX).is_ok());

        let crossed =
            Settings { open_for: Duration::from_secs(9), failures: 1, ..Settings::default() };
        let breaker = Breaker::new(&crossed, 0);
        assert_eq!(fail(&breaker, START_US), Some(Change::Opened));
        assert!(wait_us(&breaker, START_US) <= LONGEST_US);
    }

    // === against a model ===

    #[derive(Clone, Debug)]
    enum Step {
        Advance(u64),
        Back(u64),
        /// Asks for a permit and keeps it.
        Permit,
        /// Ends one of the permits that are kept, some of them long after.
        End(prop::sample::Index, End),
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum End {
        Success,
        Failure,
        Drop,
    }

    /// Remembers everything: all outcomes, in order, and for all permits since when they are out.
    struct Model {
        settings: Settings,
        state: State,
        changes: usize,
        /// While closed: the slices and outcomes since then.
        outcomes: Vec<(u64, End)>,
        failed_probes: u32,
        open_until_us: u64,
        interval_us: u64,
        /// The change after which each permit was given, and whether it is the probe.
        permits: Vec<(usize, bool)>,
    }

    impl Model {
        fn new(settings: Settings) -> Self {
            Self {
                settings,
                state: State::Closed,
                changes: 0,
                outcomes: Vec::new(),
                failed_probes: 0,
                open_until_us: 0,
                interval_us: 0,
                permits: Vec::new(),
            }
        }

        fn enter(&mut self, state: State) {
            self.state = state;
            self.changes += 1;
        }

        fn permit(&mut self, now_us: u64) -> Result<(), Refused> {
            if self.state == State::Open {
                self.open_until_us = self.open_until_us.min(now_us + self.interval_us);
                if now_us < self.open_until_us {
                    return Err(Refused { wait_us: Some(self.open_until_us - now_us) });
                }
                self.enter(State::HalfOpen);
            }
            let probe = self.state == State::HalfOpen;
            if probe && self.permits.iter().any(|permit| permit.1) {
                return Err(Refused { wait_us: None });
            }
            self.permits.push((self.changes, probe));
            Ok(())
        }

        fn end(&mut self, index: usize, now_us: u64, end: End) -> Option<Change> {
            let (given, probe) = self.permits.swap_remove(index);
            if given != self.changes || end == End::Drop {
                return None;
            }
            if probe {
                if end == End::Failure {
                    self.failed_probes += 1;
                    self.enter(State::Open);
                    return None;
                }
                self.failed_probes = 0;
                self.outcomes.clear();
                self.enter(State::Closed);
                return Some(Change::Closed);
            }
            self.note(now_us, end);
            if end == End::Failure && self.too_many() {
                self.enter(State::Open);
                return Some(Change::Opened);
            }
            None
        }

        fn note(&mut self, now_us: u64, end: End) {
            let slice = now_us / (self.settings.window.as_micros() as u64).div_ceil(10);
            let newest = self.outcomes.last().map_or(slice, |last| last.0);
            // A long way back is like the beginning of time for what is in the window, but not for
            // what is in a row.
            if slice + 10 <= newest {
                self.outcomes.iter_mut().for_each(|outcome| outcome.0 = 0);
                self.outcomes.push((slice, end));
            } else {
                self.outcomes.push((slice.max(newest), end));
            }
        }

        fn too_many(&self) -> bool {
            let newest = self.outcomes.last().map_or(0, |last| last.0);
            let in_a_row =
                self.outcomes.iter().rev().take_while(|outcome| outcome.1 == End::Failure).count();
            let in_window = || self.outcomes.iter().filter(|outcome| outcome.0 + 10 > newest);
            let calls = in_window().count();
            let failed = in_window().filter(|outcome| outcome.1 == End::Failure).count();
            in_a_row >= self.settings.failures as usize
                || calls >= self.settings.min_calls as usize
                    && failed as f64 / calls as f64 >= f64::from(self.settings.per_mille) / 1_000.0
        }

        /// Where the interval's length may be.
        fn interval_bounds_us(&self) -> (f64, f64) {
            let open_for_us = self.settings.open_for.as_micros() as f64;
            let max_us = self.settings.max_open_for.as_micros() as f64;
            let about_us = (open_for_us * 2_f64.powf(self.failed_probes.into())).min(max_us);
            (about_us * 0.8, (about_us * 1.2).min(max_us))
        }
    }

    fn settings() -> impl Strategy<Value = Settings> {
        let us = |us: std::ops::RangeInclusive<u64>| us.prop_map(Duration::from_micros);
        (1..8_u32, 1..12_u32, 1..10_u32, us(1..=2_000), us(2..=300), us(0..=2_000)).prop_map(
            |(failures, tenths, min_calls, window, open_for, longer)| Settings {
                failures,
                per_mille: tenths * 100,
                min_calls,
                window,
                open_for,
                max_open_for: open_for + longer,
            },
        )
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let end = prop_oneof![
            4 => Just(End::Success),
            6 => Just(End::Failure),
            1 => Just(End::Drop),
        ];
        let step = prop_oneof![
            2 => (0_u64..100).prop_map(Step::Advance),
            1 => (0_u64..3_000).prop_map(Step::Advance),
            1 => prop_oneof![0_u64..100, 0_u64..10_000].prop_map(Step::Back),
            10 => Just(Step::Permit),
            10 => (any::<prop::sample::Index>(), end).prop_map(|(i, end)| Step::End(i, end)),
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn it_does_what_the_model_does(settings in settings(), steps in steps(), seed: u64) {
            let breaker = Breaker::new(&settings, seed);
            let mut model = Model::new(settings);
            let mut permits = Vec::new();
            let mut now_us = START_US;
            let mut last_change = Change::Closed;
            for step in steps {
                match step {
                    Step::Advance(by_us) => now_us += by_us,
                    Step::Back(by_us) => now_us -= by_us,
                    Step::Permit => {
                        let permit = breaker.permit(now_us);
                        let expected = model.permit(now_us);
                        prop_assert_eq!(permit.as_ref().err(), expected.as_ref().err());
                        permits.extend(permit);
                    }
                    Step::End(..) if permits.is_empty() => {}
                    Step::End(index, end) => {
                        let index = index.index(permits.len());
                        let permit = permits.swap_remove(index);
                        let changes = model.changes;
                        let expected = model.end(index, now_us, end);
                        let change = match end {
                            End::Success => permit.success(now_us),
                            End::Failure => permit.failure(now_us),
                            End::Drop => { drop(permit); None }
                        };
                        prop_assert_eq!(change, expected);
                        if let Some(change) = change {
                            prop_assert!(change != last_change, "changes alternate");
                            last_change = change;
                        }
                        if model.changes != changes && model.state == State::Open {
                            // Chance is the one thing that the model has to be told.
                            model.interval_us = wait_us(&breaker, now_us);
                            model.open_until_us = now_us + model.interval_us;
                            let (least_us, most_us) = model.interval_bounds_us();
                            let interval_us = model.interval_us as f64;
                            prop_assert!(least_us <= interval_us && interval_us <= most_us);
                        }
                    }
                }
                prop_assert_eq!(breaker.state(), model.state);
            }
            // Never stuck: when all calls have ended, the next one after an interval goes through.
            drop(permits);
            let _ = breaker.permit(now_us);
            let longest_us = settings.max_open_for.as_micros() as u64;
            prop_assert!(breaker.permit(now_us + longest_us).is_ok());
        }
    }

    // === many threads ===

    const THREADS: u64 = 8;

    #[test]
    fn of_many_threads_one_gets_the_probe() {
        for round in 0..200 {
            let breaker = Breaker::new(&Settings::default(), round);
            open(&breaker, START_US);
            let barrier = Barrier::new(THREADS as usize);
            let permits: Vec<_> = thread::scope(|scope| {
                let ask = || {
                    barrier.wait();
                    breaker.permit(START_US + LONGEST_US)
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(ask)).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(permits.iter().filter(|permit| permit.is_ok()).count(), 1);
        }
    }

    #[test]
    fn of_many_threads_one_sees_the_change() {
        for round in 0..200 {
            let breaker = Breaker::new(&Settings::default(), round);
            let barrier = Barrier::new(THREADS as usize);
            let changes: Vec<_> = thread::scope(|scope| {
                let call = || {
                    let permit = breaker.permit(START_US).expect("closed");
                    barrier.wait();
                    permit.failure(START_US)
                };
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(call)).collect();
                threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
            });
            assert_eq!(changes, [Change::Opened]);
        }
    }

    #[test]
    fn at_most_one_probe_is_out_at_any_time() {
        run_threads(Duration::from_micros(20));
        // One probe right after another.
        run_threads(Duration::ZERO);
    }

    fn run_threads(open_for: Duration) {
        let settings = Settings {
            failures: 2,
            open_for,
            max_open_for: Duration::from_micros(100),
            ..Settings::default()
        };
        let breaker = Breaker::new(&settings, 3);
        let now_us = AtomicU64::new(START_US);
        let (probes, probes_out) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (opened, closed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for seed in 0..THREADS {
                let (breaker, now_us) = (&breaker, &now_us);
                let (probes, probes_out, opened, closed) = (&probes, &probes_out, &opened, &closed);
                scope.spawn(move || {
                    let mut random = seed;
                    let mut late = Vec::new();
                    for _ in 0..20_000 {
                        let now_us = now_us.fetch_add(1, Relaxed);
                        let Ok(permit) = breaker.permit(now_us) else { continue };
                        if permit.probe {
                            probes.fetch_add(1, Relaxed);
                            assert_eq!(probes_out.fetch_add(1, Relaxed), 0, "two probes");
                            thread::yield_now();
                            probes_out.fetch_sub(1, Relaxed);
                        } else if draw(&mut random, 3) == 0 {
                            late.push(permit);
                            continue;
                        }
                        let end = |permit: Permit, random: &mut u64| match draw(random, 4) {
                            0 | 1 => permit.success(now_us),
                            2 | 3 => permit.failure(now_us),
                            _ => None,
                        };
                        let change = end(permit, &mut random);
                        let late = late.pop().filter(|_| draw(&mut random, 1) == 0);
                        let late = late.and_then(|permit| end(permit, &mut random));
                        for change in change.into_iter().chain(late) {
                            match change {
                                Change::Opened => opened.fetch_add(1, Relaxed),
                                Change::Closed => closed.fetch_add(1, Relaxed),
                            };
                        }
                    }
                });
            }
        });
        let closed = closed.into_inner();
        let is_closed = breaker.state() == State::Closed;
        assert_eq!(opened.into_inner(), closed + usize::from(!is_closed), "each change told once");
        assert!(closed > 10 && probes.into_inner() > 10, "something happened");
        assert!(breaker.permit(now_us.into_inner() + 100).is_ok(), "not stuck");
    }
}
