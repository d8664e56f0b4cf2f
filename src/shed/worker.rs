//! The worker utilization load shedder: an instance that is too busy lets go of what matters least.

use super::{
    Aboard, Held, Shed,
    error::ShedderError,
    law::{Law, Level, ONE, Settings},
    patience::Patience,
    utilization::Utilization,
};
use crate::{
    background::Background,
    clock::{Clock, Stopwatch},
    name::{intern, is_name},
    priority::Priority,
    random::Dice,
};
use parking_lot::Mutex;
use std::{
    borrow::Cow,
    fmt,
    ops::RangeInclusive,
    sync::{
        Arc, Weak,
        atomic::{AtomicI64, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Sheds load from an instance that is too busy, gradually and the least important requests first. See
/// [the module](super) for how.
///
/// Clones share everything.
///
/// ```
/// use tollgate::{Priority, shed::{Utilization, WorkerShedder}};
///
/// # fn main() -> Result<(), tollgate::shed::ShedderError> {
/// let workers = WorkerShedder::builder("workers").utilization(Utilization::in_flight(100)).build()?;
/// match workers.admit(Priority::Read) {
///     // The request is in flight until this is dropped.
///     Ok(_aboard) => {}
///     Err(shed) => println!("503, come back in {:?}", shed.retry_after()),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct WorkerShedder {
    shared: Arc<Shared>,
}

/// Puts a [`WorkerShedder`] together.
#[derive(Debug)]
pub struct WorkerShedderBuilder {
    name: Cow<'static, str>,
    utilization: Utilization,
    settings: Settings,
    interval: Duration,
    classes: Vec<Priority>,
    retry_after: RangeInclusive<Duration>,
    clock: Clock,
}

struct Shared {
    name: &'static str,
    law: Law,
    /// Which requests are shed, the least important first.
    classes: Box<[Priority]>,
    source: Utilization,
    interval_us: u64,
    patience: Patience,
    dice: Dice,
    clock: Clock,
    stopwatch: Stopwatch,
    in_flight: AtomicU64,
    turned_away: AtomicU64,
    level: AtomicI64,
    /// In millionths.
    utilization: AtomicU64,
    /// When the last sample was taken.
    sampled_us: Mutex<u64>,
    sampler: Background,
}

/// No sample said anything yet.
const UNKNOWN: u64 = u64::MAX;

// === impl WorkerShedder ===

impl WorkerShedder {
    /// A shedder of this name, which has to be of the form `[A-Za-z][A-Za-z0-9_.-]{0,63}`.
    #[must_use]
    pub fn builder(name: impl Into<Cow<'static, str>>) -> WorkerShedderBuilder {
        WorkerShedderBuilder {
            name: name.into(),
            utilization: Utilization::tokio_workers(),
            settings: Settings::default(),
            interval: Duration::from_secs(1),
            classes: vec![Priority::BestEffort, Priority::Read, Priority::Write],
            retry_after: Duration::from_secs(5)..=Duration::from_secs(15),
            clock: Clock::system(),
        }
    }

    /// Lets a request in, or turns it away. What is returned has to be kept until the request is over.
    ///
    /// The first call in a tokio runtime starts to take samples there.
    ///
    /// # Errors
    ///
    /// [`Shed`] if the instance is too busy for a request of this priority.
    pub fn admit(&self, priority: Priority) -> Result<Aboard, Shed> {
        self.seat(priority).map(|seat| Aboard::one(Held::Worker(seat)))
    }

    #[inline]
    pub(super) fn seat(&self, priority: Priority) -> Result<Seat, Shed> {
        let shared = &self.shared;
        shared.sampler.keep(|| keep_sampling(Arc::downgrade(shared)));
        let share = shared.shed(priority);
        if share > 0 && shared.dice.throw(ONE - 1) < share {
            shared.turned_away.fetch_add(1, Relaxed);
            let retry_after_us = shared.patience.draw_us(&shared.dice);
            return Err(Shed { shedder: shared.name, retry_after_us });
        }
        shared.in_flight.fetch_add(1, Relaxed);
        Ok(Seat(shared.clone()))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.shared.name
    }

    /// How many requests it has turned away so far.
    #[must_use]
    pub fn turned_away(&self) -> u64 {
        self.shared.turned_away.load(Relaxed)
    }

    /// How far shedding is: 1 if all is shed that may be; 0 or less if nothing is. At rest it is
    /// `-grace / full_after`.
    #[must_use]
    pub fn level(&self) -> f64 {
        self.shared.law.level(Level(self.shared.level.load(Relaxed)))
    }

    /// The utilization of the last sample, from 0 to 1. `None` if no sample could be taken yet.
    #[must_use]
    pub fn utilization(&self) -> Option<f64> {
        let utilization = self.shared.utilization.load(Relaxed);
        (utilization != UNKNOWN).then(|| utilization as f64 / ONE as f64)
    }

    /// What share of the requests of a priority is let in now, from 0 to 1.
    #[must_use]
    pub fn admitted_share(&self, priority: Priority) -> f64 {
        (ONE - self.shared.shed(priority)) as f64 / ONE as f64
    }

    /// How many of the requests that it let in are in flight.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.shared.in_flight.load(Relaxed)
    }

    /// Takes a sample now, beside the timer. For those who don't use tokio, and for tests.
    ///
    /// A sample counts for the time since the one before, so it does not matter how often they are
    /// taken.
    pub fn sample(&self) {
        self.shared.sample();
    }
}

impl Shared {
    /// What share of the requests of a priority is shed, in millionths.
    #[inline]
    fn shed(&self, priority: Priority) -> u64 {
        let level = Level(self.level.load(Relaxed));
        if level <= Level(0) {
            return 0;
        }
        let class = self.classes.partition_point(|class| *class < priority);
        if class == self.classes.len() {
            return 0;
        }
        self.law.shed(level, class, self.classes.len())
    }

    /// Nobody knows what was before.
    fn begin(&self) {
        self.source.begin();
        *self.sampled_us.lock() = self.stopwatch.elapsed_us();
    }

    fn sample(&self) {
        // It may be a function of the user's, so no lock is held.
        let utilization = self.source.read(self.in_flight.load(Relaxed));
        let mut sampled_us = self.sampled_us.lock();
        let now_us = self.stopwatch.elapsed_us();
        let elapsed_us = now_us.saturating_sub(*sampled_us);
        *sampled_us = now_us;
        if let Some(utilization) = utilization {
            let level = Level(self.level.load(Relaxed));
            self.level.store(self.law.step(level, utilization, elapsed_us).0, Relaxed);
            self.utilization.store(utilization, Relaxed);
        }
    }
}

async fn keep_sampling(shedder: Weak<Shared>) {
    if let Some(shedder) = shedder.upgrade() {
        shedder.begin();
    }
    while let Some(sleep) =
        shedder.upgrade().map(|shedder| shedder.clock.sleep(shedder.interval_us))
    {
        sleep.await;
        if let Some(shedder) = shedder.upgrade() {
            shedder.sample();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.sampler.abort();
    }
}

impl fmt::Debug for WorkerShedder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerShedder")
            .field("name", &self.name())
            .field("source", &self.shared.source)
            .field("level", &self.level())
            .field("utilization", &self.utilization())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

/// The place of a request that was let in.
pub(super) struct Seat(Arc<Shared>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

// === impl WorkerShedderBuilder ===

impl WorkerShedderBuilder {
    /// What tells how busy the instance is. Default:
    /// [`Utilization::tokio_workers`].
    #[must_use]
    pub fn utilization(mut self, utilization: Utilization) -> Self {
        self.utilization = utilization;
        self
    }

    /// Below this utilization shedding goes back, the faster the less there is to do. Above 0, up to 1.
    /// Default: 0.7.
    #[must_use]
    pub fn recover_below(mut self, utilization: f64) -> Self {
        self.settings.recover_below = utilization;
        self
    }

    /// Above this utilization more is shed, the faster the more there is to do. Between it and
    /// [`recover_below`](Self::recover_below) shedding stays as it is. Above 0, below 1. Default: 0.8.
    #[must_use]
    pub fn shed_above(mut self, utilization: f64) -> Self {
        self.settings.shed_above = utilization;
        self
    }

    /// How long an instance that was at rest is fully busy before anything is shed. Default: 28 s.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.settings.grace = grace;
        self
    }

    /// How long it then takes at full utilization until all is shed that may be, and at none until
    /// nothing is. Default: 120 s.
    #[must_use]
    pub fn full_after(mut self, full_after: Duration) -> Self {
        self.settings.full_after = full_after;
        self
    }

    /// The most time that one sample can count for, however long ago the one before was. Default: 28 s.
    #[must_use]
    pub fn longest_step(mut self, longest_step: Duration) -> Self {
        self.settings.longest_step = longest_step;
        self
    }

    /// How often a sample is taken, 1 ms to an hour. Default: 1 s.
    ///
    /// Stripe samples every 8 s. The level is a sum over time, so the pace of shedding is the same with
    /// any interval, but a number of requests in flight says something of one moment only: many samples
    /// make a mean where a few make noise.
    #[must_use]
    pub fn sample_every(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Which requests may be shed, in any order. The least important class goes first, and the next one
    /// only when all of it is shed. Default: [`BestEffort`](Priority::BestEffort),
    /// [`Read`](Priority::Read), [`Write`](Priority::Write).
    ///
    /// A request belongs to the first class that is at least as important, and is never shed if there
    /// is none. [`Critical`](Priority::Critical) cannot be a class.
    #[must_use]
    pub fn classes(mut self, classes: impl IntoIterator<Item = Priority>) -> Self {
        self.classes = classes.into_iter().collect();
        self
    }

    /// In what time those who were turned away are told to come back; each gets a time of this range
    /// at random. Default: 5 to 15 s.
    #[must_use]
    pub fn retry_after(mut self, range: RangeInclusive<Duration>) -> Self {
        self.retry_after = range;
        self
    }

    /// Samples by this clock in place of tokio's.
    #[cfg(any(test, feature = "test-util"))]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    #[must_use]
    pub fn clock(mut self, clock: &crate::ManualClock) -> Self {
        self.clock = clock.into();
        self
    }

    /// Checks the settings. Nothing runs yet.
    ///
    /// # Errors
    ///
    /// [`ShedderError`] says which setting cannot be, and why.
    pub fn build(self) -> Result<WorkerShedder, ShedderError> {
        let Self { name, utilization, settings, interval, mut classes, retry_after, clock } = self;
        if !is_name(&name) {
            return Err(ShedderError::InvalidName { name: name.into_owned() });
        }
        utilization.check(&name)?;
        let law = Law::new(&settings, &name)?;
        let patience = Patience::new(&retry_after, &name)?;
        if !(Duration::from_millis(1)..=Duration::from_secs(3_600)).contains(&interval) {
            return Err(ShedderError::OutOfRange {
                shedder: name.into_owned(),
                option: "sample_every",
                range: "1 ms to an hour",
            });
        }
        classes.sort_unstable();
        classes.dedup();
        if classes.last().is_none_or(|last| *last == Priority::Critical) {
            return Err(ShedderError::Classes { shedder: name.into_owned() });
        }
        let shared = Shared {
            name: intern(name),
            law,
            classes: classes.into(),
            source: utilization,
            interval_us: interval.as_micros() as u64,
            patience,
            dice: Dice::new(),
            stopwatch: clock.stopwatch(),
            clock,
            in_flight: AtomicU64::new(0),
            turned_away: AtomicU64::new(0),
            level: AtomicI64::new(law.rest().0),
            utilization: AtomicU64::new(UNKNOWN),
            sampled_us: Mutex::new(0),
            sampler: Background::default(),
        };
        Ok(WorkerShedder { shared: Arc::new(shared) })
    }
}
