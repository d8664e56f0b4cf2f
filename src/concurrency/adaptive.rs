//! A limit of requests in flight that finds itself, by latency.
//!
//! A service that does as many requests at once as it can makes all others wait. So when more are
//! in flight than it can do, latency rises above what a request takes alone, the baseline, and by
//! the ratio of the two one can tell how many are too many. The ratio and the step to the next limit
//! are those of the gradient controller in Envoy's adaptive concurrency filter, after Netflix's
//! concurrency-limits.
//!
//! What matters is where the baseline comes from. An average of what was seen adapts to a lasting
//! overload, and the limit creeps up with it (Gradient2); to hold the limit at its minimum for a
//! while (Envoy) turns most requests away. Here a probe halves the limit, as BBR does since its
//! second version. If latency falls by nearly half as well, it was all waiting and still is, so the
//! lower limit is kept and halved again; otherwise nobody waits any more, and what is seen is the
//! baseline. A probe takes nothing from a service that is less than half busy.

use crate::{clock::whole_us, random::draw};
use parking_lot::Mutex;
use std::{
    collections::hash_map::RandomState,
    error, fmt,
    hash::BuildHasher as _,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// How many latencies are kept of a window, the newest ones.
const KEPT: usize = 256;
/// Limits below it are exact as doubles and leave room for the mark in the published word.
const LARGEST: u64 = 1 << 32;
/// No window takes more of the limit than this leaves.
const LEAST_GRADIENT: f64 = 0.5;
/// Marks a published limit as that of a probe.
const PROBING: u64 = 1 << 63;

/// A limit of requests in flight that follows what the service can do. Clones share it.
///
/// It measures how long requests take and needs to know nothing else of the service. While latency
/// stays near the baseline, which is what a request takes when none waits, the limit grows, as far
/// as it is made use of; when latency rises because requests wait for each other, it shrinks. A service
/// that does `c` requests at once is given about `(1 + tolerance) * c + sqrt(limit)`, which is
/// a queue just long enough to keep it busy.
///
/// ```
/// use tollgate::concurrency::{Adaptive, AdaptiveError};
///
/// # fn limit() -> Result<Adaptive, AdaptiveError> {
/// let adaptive = Adaptive::builder().initial(50).max(500).build()?;
/// assert_eq!(adaptive.limit(), 50);
/// # Ok(adaptive)
/// # }
/// # limit().unwrap();
/// ```
///
/// # Windows
///
/// The limit is set anew once per window: `gradient * limit + sqrt(limit)`, where the gradient is
/// `(1 + tolerance) * baseline / median`, at least 1/2 and at most `1 + tolerance`. The median is that
/// of the window's latencies, so a few that are very long don't move it. The limit grows only if at
/// least three quarters of it were in flight at some time, and while less than half was, it shrinks only
/// for a median of more than twice what is tolerated. After each window latencies are left out for twice
/// the median: they still tell of the limit before.
///
/// # Probes
///
/// Once per [`probe_interval`](AdaptiveBuilder::probe_interval), and as soon as the limit is less
/// than half of what it was at most since the last time, the baseline is measured anew, with half of
/// the limit in force. If that lowers latency by 40 % or more, the half becomes the limit and the probe
/// goes on with half of that. A baseline that is higher than the last one by more than the tolerance is
/// looked at a second time, with half as many requests. So neither an overload, however long it lasts, nor a service that has become
/// slower or faster for good is mistaken for the other.
///
/// A probe ends without a result if too few requests end in
/// [`longest_probe`](AdaptiveBuilder::longest_probe), and does not begin if so few have ended before.
/// What the limit was is in force again then.
///
/// # What it cannot do
///
/// Requests that take very different times for reasons of their own should not share a limit: if the
/// mixture changes, so does the median, which looks like another service until the next probe. A
/// limit of less than 4 is not found, because `limit / 2 + sqrt(limit)` stays there. And the
/// defaults are for requests that take up to about two seconds; if they take longer, make the probe
/// and its interval longer.
#[derive(Clone, Debug)]
pub struct Adaptive(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The limit in force and the mark of a probe in one word, written under the lock only.
    published: AtomicU64,
    finder: Mutex<Finder>,
}

/// Makes an [`Adaptive`].
#[derive(Clone, Debug)]
#[must_use]
pub struct AdaptiveBuilder(Settings);

#[derive(Clone, Debug)]
struct Settings {
    initial: u64,
    min: u64,
    max: u64,
    tolerance: f64,
    window: Duration,
    window_samples: usize,
    probe_interval: Duration,
    probe_samples: usize,
    longest_probe: Duration,
}

/// Why an adaptive limit cannot be.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum AdaptiveError {
    /// The smallest limit is 0, which would allow nothing, ever.
    ZeroMin,
    /// The limits are not in order: smallest, initial, largest.
    Unordered {
        /// The smallest limit.
        min: u64,
        /// The initial limit.
        initial: u64,
        /// The largest limit.
        max: u64,
    },
    /// The largest limit is above 2^32.
    TooLarge,
    /// The tolerance is not a number from 0 to 10.
    Tolerance,
    /// A window or a probe needs no samples, or more than are kept, or a probe fewer than a window.
    Samples {
        /// How many samples are kept.
        kept: usize,
    },
    /// The window is shorter than a microsecond.
    ZeroWindow,
    /// The longest probe is shorter than a microsecond, or as long as the interval between probes.
    ProbeTooLong,
}

impl Adaptive {
    /// An adaptive limit to be.
    pub fn builder() -> AdaptiveBuilder {
        AdaptiveBuilder(Settings {
            initial: 20,
            min: 3,
            max: 1_000,
            tolerance: 0.25,
            window: Duration::from_millis(100),
            window_samples: 20,
            probe_interval: Duration::from_secs(60),
            probe_samples: 50,
            longest_probe: Duration::from_secs(10),
        })
    }

    /// How many requests may be in flight at the moment.
    #[must_use]
    pub fn limit(&self) -> u64 {
        // No other memory is read on the strength of this word, so its order with others is no
        // matter.
        self.0.published.load(Relaxed) & !PROBING
    }

    /// What a request takes when none waits, as last measured; `None` until it was.
    #[must_use]
    pub fn baseline(&self) -> Option<Duration> {
        self.0.finder.lock().baseline_us.map(Duration::from_micros)
    }

    /// How many requests may be in flight at this time.
    ///
    /// It differs from [`limit`](Self::limit) when a probe has lasted too long: that ends here, since
    /// as many requests as the probe allows may be of the kind that never ends.
    pub(crate) fn limit_at(&self, now_us: u64) -> u64 {
        let published = self.0.published.load(Relaxed);
        if published & PROBING == 0 {
            return published;
        }
        self.locked(|finder| finder.end_late_probe(now_us))
    }

    /// A request has ended that started at that time; so many were in flight then, itself included.
    pub(crate) fn sample(&self, now_us: u64, started_us: u64, in_flight: u64) {
        self.locked(|finder| finder.sample(now_us, started_us, in_flight));
    }

    fn new(settings: &Settings, seed: u64) -> Self {
        let finder = Finder::new(settings, seed);
        Self(Arc::new(Shared {
            published: AtomicU64::new(finder.in_force()),
            finder: Mutex::new(finder),
        }))
    }

    /// The limit that is in force after the change.
    fn locked(&self, change: impl FnOnce(&mut Finder)) -> u64 {
        let mut finder = self.0.finder.lock();
        change(&mut finder);
        let limit = finder.in_force();
        let mark = if finder.probe.is_some() { PROBING } else { 0 };
        // Most samples change nothing, and a store would take the word from the caches of those who
        // read it.
        if self.0.published.load(Relaxed) != limit | mark {
            self.0.published.store(limit | mark, Relaxed);
        }
        limit
    }
}

// === impl AdaptiveBuilder ===

impl AdaptiveBuilder {
    /// The limit until the first baseline is known. Default: 20 requests.
    pub const fn initial(mut self, limit: u64) -> Self {
        self.0.initial = limit;
        self
    }

    /// The smallest limit, in probes too. Default: 3 requests.
    pub const fn min(mut self, limit: u64) -> Self {
        self.0.min = limit;
        self
    }

    /// The largest limit, at most 2^32. Default: 1000 requests.
    pub const fn max(mut self, limit: u64) -> Self {
        self.0.max = limit;
        self
    }

    /// By what part of the baseline latency may rise before the limit shrinks, from 0 to 10. More
    /// makes a longer queue. Default: 0.25.
    pub const fn tolerance(mut self, part: f64) -> Self {
        self.0.tolerance = part;
        self
    }

    /// How often the limit is set anew, at most. Default: 100 milliseconds.
    pub const fn window(mut self, window: Duration) -> Self {
        self.0.window = window;
        self
    }

    /// How many requests must have ended for their median to say something; a window is as much longer
    /// as it takes. From 1 to 256. Default: 20.
    pub const fn window_samples(mut self, samples: usize) -> Self {
        self.0.window_samples = samples;
        self
    }

    /// How long after a probe the next one is, give or take a tenth by chance, so that instances
    /// don't probe together. Default: 60 seconds.
    ///
    /// For as long a service that has become faster may have a longer queue than it needs.
    pub const fn probe_interval(mut self, interval: Duration) -> Self {
        self.0.probe_interval = interval;
        self
    }

    /// How many requests a probe measures, from [`window_samples`](Self::window_samples) to 256.
    /// Default: 50.
    pub const fn probe_samples(mut self, samples: usize) -> Self {
        self.0.probe_samples = samples;
        self
    }

    /// How long half of the limit may be in force for a measurement, after the time that is left for
    /// what waited to go, twice the median latency. If it has fewer than
    /// [`probe_samples`](Self::probe_samples) then, those of a window are enough. Less than the interval.
    /// Default: 10 seconds.
    pub const fn longest_probe(mut self, longest: Duration) -> Self {
        self.0.longest_probe = longest;
        self
    }

    /// The adaptive limit.
    ///
    /// # Errors
    ///
    /// If a setting is out of its range (see [`AdaptiveError`]).
    pub fn build(self) -> Result<Adaptive, AdaptiveError> {
        self.build_with(RandomState::new().hash_one(0))
    }

    fn build_with(self, seed: u64) -> Result<Adaptive, AdaptiveError> {
        self.0.validate()?;
        Ok(Adaptive::new(&self.0, seed))
    }
}

impl Settings {
    fn validate(&self) -> Result<(), AdaptiveError> {
        let &Self { min, initial, max, .. } = self;
        if min == 0 {
            return Err(AdaptiveError::ZeroMin);
        }
        if min > initial || initial > max {
            return Err(AdaptiveError::Unordered { min, initial, max });
        }
        if max > LARGEST {
            return Err(AdaptiveError::TooLarge);
        }
        if !(0.0..=10.0).contains(&self.tolerance) {
            return Err(AdaptiveError::Tolerance);
        }
        let (window, probe) = (self.window_samples, self.probe_samples);
        if window == 0 || window > probe || probe > KEPT {
            return Err(AdaptiveError::Samples { kept: KEPT });
        }
        if whole_us(self.window) == 0 {
            return Err(AdaptiveError::ZeroWindow);
        }
        let longest_us = whole_us(self.longest_probe);
        if longest_us == 0 || longest_us >= whole_us(self.probe_interval) {
            return Err(AdaptiveError::ProbeTooLong);
        }
        Ok(())
    }
}

// === impl AdaptiveError ===

impl fmt::Display for AdaptiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroMin => f.write_str("the smallest limit must be at least 1"),
            Self::Unordered { min, initial, max } => write!(
                f,
                "the limits {min} (smallest), {initial} (initial) and {max} (largest) \
                 must not be smaller one than the one before; set those that are not"
            ),
            Self::TooLarge => f.write_str("the largest limit must be at most 2^32"),
            Self::Tolerance => {
                f.write_str("the tolerance must be a number from 0 to 10; 0.25 means a quarter")
            }
            Self::Samples { kept } => write!(
                f,
                "a window needs at least 1 sample, and a probe as many as a window and at most {kept}"
            ),
            Self::ZeroWindow => f.write_str("the window must be at least one microsecond"),
            Self::ProbeTooLong => f.write_str(
                "the longest probe must be at least one microsecond and shorter than the interval; \
                 make the interval longer",
            ),
        }
    }
}

impl error::Error for AdaptiveError {}

/// The search itself, for one thread.
#[derive(Debug)]
struct Finder {
    min: f64,
    max: f64,
    tolerance: f64,
    window_us: u64,
    window_samples: usize,
    probe_interval_us: u64,
    probe_samples: usize,
    longest_probe_us: u64,
    /// The limit outside of probes. Fractions add up.
    limit: f64,
    /// The greatest limit since the last probe.
    peak: f64,
    baseline_us: Option<u64>,
    probe: Option<Probe>,
    last_probe: Start,
    /// How long after the last probe the next one is due.
    probe_after_us: u64,
    window: Window,
    random: u64,
}

#[derive(Clone, Copy, Debug)]
struct Probe {
    /// The limit in force.
    level: f64,
    start_us: u64,
    /// The median before, at twice the level.
    before_us: u64,
    /// It has a second look at a baseline that is higher than the last one.
    again: bool,
}

impl Finder {
    fn new(settings: &Settings, seed: u64) -> Self {
        Self {
            min: settings.min as f64,
            max: settings.max as f64,
            tolerance: settings.tolerance,
            window_us: whole_us(settings.window),
            window_samples: settings.window_samples,
            probe_interval_us: whole_us(settings.probe_interval),
            probe_samples: settings.probe_samples,
            longest_probe_us: whole_us(settings.longest_probe),
            limit: settings.initial as f64,
            peak: settings.initial as f64,
            baseline_us: None,
            probe: None,
            last_probe: Start(u64::MAX),
            // The first window is followed by a probe.
            probe_after_us: 0,
            window: Window::new(),
            random: seed,
        }
    }

    fn in_force(&self) -> u64 {
        self.probe.map_or(self.limit, |probe| probe.level) as u64
    }

    fn sample(&mut self, now_us: u64, started_us: u64, in_flight: u64) {
        let elapsed_us = self.window.elapsed_us(now_us);
        // What started before a probe, or past its limit, may have waited.
        let counts = self.probe.is_none_or(|probe| {
            started_us >= probe.start_us.min(now_us) && in_flight as f64 <= probe.level
        });
        if counts && elapsed_us.is_some() {
            self.window.note(now_us.saturating_sub(started_us), in_flight);
        }
        let Some(elapsed_us) = elapsed_us else { return };
        match self.probe {
            Some(probe) => self.try_end_probe(now_us, probe, elapsed_us),
            None => self.try_end_window(now_us, elapsed_us),
        }
    }

    fn end_late_probe(&mut self, now_us: u64) {
        if let (Some(probe), Some(elapsed_us)) = (self.probe, self.window.elapsed_us(now_us)) {
            self.try_end_probe(now_us, probe, elapsed_us);
        }
    }

    fn try_end_window(&mut self, now_us: u64, elapsed_us: u64) {
        if elapsed_us < self.window_us || self.window.seen < self.window_samples {
            return;
        }
        let probe = self.probe_is_due(now_us) && elapsed_us <= self.longest_probe_us;
        // What a probe compares are medians of as many.
        if probe && self.window.seen < self.probe_samples {
            return;
        }
        let median_us = self.window.median_us();
        if probe {
            self.begin_probe(now_us, self.limit, median_us, false);
            return;
        }
        if let Some(baseline_us) = self.baseline_us {
            let gradient = gradient(self.tolerance, baseline_us, median_us);
            let next = gradient * self.limit + self.limit.sqrt();
            // Latency says little about a limit that nobody comes near to, unless there is far too
            // much of it: the medians of a few requests would wear the limit down by and by.
            let used = self.window.most_in_flight as f64 / self.limit;
            let founded = if next > self.limit { used >= 0.75 } else { used >= 0.5 };
            if founded || gradient <= LEAST_GRADIENT {
                self.limit = next.clamp(self.min, self.max);
                self.peak = self.peak.max(self.limit);
            }
        }
        self.restart_window(now_us, median_us);
    }

    fn probe_is_due(&mut self, now_us: u64) -> bool {
        // A limit that was halved because the service is slower for good would go on falling.
        let fell = self.limit < self.peak / 2.0;
        fell || self.last_probe.elapsed_us(now_us) >= self.probe_after_us
    }

    /// Half of that many requests are in flight for a while; the median is that of so many.
    fn begin_probe(&mut self, now_us: u64, of: f64, median_us: u64, again: bool) {
        let level = (of / 2.0).floor().max(self.min);
        self.probe = Some(Probe { level, start_us: now_us, before_us: median_us, again });
        self.restart_window(now_us, median_us);
    }

    fn try_end_probe(&mut self, now_us: u64, probe: Probe, elapsed_us: u64) {
        let seen = self.window.seen;
        let late = elapsed_us >= self.longest_probe_us;
        if seen < self.probe_samples && !late {
            return;
        }
        let mut median_us = probe.before_us;
        if seen >= self.window_samples {
            median_us = self.window.median_us();
            let waiting = is_waiting(median_us, probe.before_us);
            if waiting {
                self.limit = probe.level;
            }
            // It was lower before only if fewer were in flight than now.
            let baseline_us = median_us.min(probe.before_us);
            let known_us = self.baseline_us.replace(baseline_us);
            // What was measured while a load set in may not be comparable.
            let higher = known_us.is_none_or(|known_us| {
                baseline_us as f64 > (1.0 + self.tolerance) * known_us as f64
            });
            if (waiting || higher && !probe.again) && probe.level > self.min {
                self.begin_probe(now_us, probe.level, median_us, !waiting);
                return;
            }
        }
        self.probe = None;
        self.peak = self.limit;
        self.last_probe = Start(now_us);
        let tenth_us = self.probe_interval_us / 10;
        let least_us = self.probe_interval_us - tenth_us;
        self.probe_after_us =
            least_us.saturating_add(draw(&mut self.random, tenth_us.saturating_mul(2)));
        self.restart_window(now_us, median_us);
    }

    /// The limit has changed: what ends in the next two median latencies started before, for the most
    /// part. Not longer than a probe, for a clock that was set makes latencies of any length.
    fn restart_window(&mut self, now_us: u64, median_us: u64) {
        self.window.restart(now_us, median_us.saturating_mul(2).min(self.longest_probe_us));
    }
}

/// What part of the limit is right by the latency, not counting room to grow.
fn gradient(tolerance: f64, baseline_us: u64, median_us: u64) -> f64 {
    let tolerated = 1.0 + tolerance;
    let gradient = tolerated * baseline_us as f64 / median_us as f64;
    gradient.clamp(LEAST_GRADIENT, tolerated)
}

/// Whether requests still wait with half as many in flight. If all of them wait at either limit,
/// half the limit is half the latency; if none does, latency is the same.
fn is_waiting(median_us: u64, before_us: u64) -> bool {
    (median_us as f64) < 0.6 * before_us as f64
}

/// The latencies since some time.
struct Window {
    start: Start,
    /// For so long after the start, what ends is left out.
    settle_us: u64,
    /// How many there were, of which the last are kept.
    seen: usize,
    most_in_flight: u64,
    latencies_us: [u64; KEPT],
}

impl Window {
    fn new() -> Self {
        Self {
            start: Start(u64::MAX),
            settle_us: 0,
            seen: 0,
            most_in_flight: 0,
            latencies_us: [0; KEPT],
        }
    }

    fn restart(&mut self, now_us: u64, settle_us: u64) {
        self.start = Start(now_us);
        self.settle_us = settle_us;
        self.seen = 0;
        self.most_in_flight = 0;
    }

    /// How long latencies have been noted; `None` if they are left out.
    fn elapsed_us(&mut self, now_us: u64) -> Option<u64> {
        self.start.elapsed_us(now_us).checked_sub(self.settle_us)
    }

    fn note(&mut self, latency_us: u64, in_flight: u64) {
        self.latencies_us[self.seen % KEPT] = latency_us.max(1);
        self.seen = self.seen.saturating_add(1);
        self.most_in_flight = self.most_in_flight.max(in_flight);
    }

    /// The median of what is kept, the lower one of two; 1 if there is nothing.
    fn median_us(&mut self) -> u64 {
        let kept = &mut self.latencies_us[..self.seen.min(KEPT)];
        match kept.len().checked_sub(1) {
            None => 1,
            Some(last) => *kept.select_nth_unstable(last / 2).1,
        }
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window").field("seen", &self.seen).finish_non_exhaustive()
    }
}

/// When something began. If the clock goes back, it begins anew.
#[derive(Clone, Copy, Debug)]
struct Start(u64);

impl Start {
    fn elapsed_us(&mut self, now_us: u64) -> u64 {
        self.0 = self.0.min(now_us);
        now_us - self.0
    }
}

#[cfg(test)]
mod simulations;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START_US: u64 = 1_796_000_000_123_457;
    const MS: u64 = 1_000;
    const SECOND_US: u64 = 1_000_000;

    /// A limit, and the time.
    struct Bench {
        adaptive: Adaptive,
        now_us: u64,
    }

    impl Bench {
        fn new(builder: AdaptiveBuilder) -> Self {
            let adaptive = builder.build_with(7).expect("valid settings");
            Self { adaptive, now_us: START_US }
        }

        /// So many requests end, one every 5 ms, each of which took so long.
        fn end(&mut self, requests: usize, latency_us: u64, in_flight: u64) {
            for _ in 0..requests {
                self.now_us += 5 * MS;
                self.adaptive.sample(self.now_us, self.now_us - latency_us, in_flight);
            }
        }

        /// Until the next probe has begun.
        fn end_until_probe(&mut self, latency_us: u64, in_flight: u64) {
            for _ in 0..100_000 {
                self.end(1, latency_us, in_flight);
                if self.is_probing() {
                    return;
                }
            }
            panic!("no probe");
        }

        fn measure(&mut self, latency_us: u64) {
            self.end_until_probe(latency_us, 1);
            while self.is_probing() {
                self.end(1, latency_us, 1);
            }
            assert_eq!(self.adaptive.baseline(), Some(Duration::from_micros(latency_us)));
        }

        fn is_probing(&self) -> bool {
            self.adaptive.0.published.load(Relaxed) & PROBING != 0
        }
    }

    #[test]
    fn a_probe_halves_the_limit_and_gives_it_back() {
        let mut bench = Bench::new(Adaptive::builder());
        assert_eq!((bench.adaptive.limit(), bench.adaptive.baseline()), (20, None));
        bench.end_until_probe(10 * MS, 1);
        assert_eq!(bench.adaptive.limit(), 10);
        // Twice the median to settle, and the samples.
        bench.end(4 + 50, 10 * MS, 1);
        // The first baseline is looked at twice.
        assert_eq!((bench.is_probing(), bench.adaptive.limit()), (true, 5));
        bench.end(4 + 50, 10 * MS, 1);
        assert_eq!((bench.is_probing(), bench.adaptive.limit()), (false, 20));
        assert_eq!(bench.adaptive.baseline(), Some(Duration::from_millis(10)));

        // The next one is a minute later, to within a tenth, and one look is enough.
        let before_us = bench.now_us;
        bench.end_until_probe(10 * MS, 1);
        let interval_us = bench.now_us - before_us;
        assert!((54 * SECOND_US..67 * SECOND_US).contains(&interval_us), "{interval_us}");
        bench.end(4 + 50, 10 * MS, 1);
        assert_eq!((bench.is_probing(), bench.adaptive.limit()), (false, 20));
    }

    #[test]
    fn a_probe_goes_on_while_it_lowers_latency() {
        let mut bench = Bench::new(Adaptive::builder().initial(160));
        bench.end_until_probe(80 * MS, 160);
        for level in [80, 40, 20, 10] {
            assert_eq!(bench.adaptive.limit(), level);
            // What started before, or past the limit of the probe, does not count.
            bench.end(32, 80 * MS, 160);
            while bench.adaptive.limit() == level && bench.is_probing() {
                // Twenty at once.
                bench.end(1, 10 * MS * level.max(20) / 20, level);
            }
        }
        assert_eq!(bench.adaptive.limit(), 20);
        assert_eq!(bench.adaptive.baseline(), Some(Duration::from_millis(10)));
    }

    #[test]
    fn a_probe_that_gets_nothing_ends() {
        let mut bench = Bench::new(Adaptive::builder());
        bench.end_until_probe(10 * MS, 20);
        // Nothing ends any more, or only what started before.
        let settled_us = bench.now_us + 20 * MS;
        assert_eq!(bench.adaptive.limit_at(settled_us + 10 * SECOND_US - 1), 10);
        assert_eq!(bench.adaptive.limit(), 10);
        assert_eq!(bench.adaptive.limit_at(settled_us + 10 * SECOND_US), 20);
        assert_eq!(bench.adaptive.limit(), 20);
        assert_eq!(bench.adaptive.baseline(), None);
    }

    #[test]
    fn a_late_probe_with_enough_for_a_window_counts() {
        let mut bench = Bench::new(Adaptive::builder());
        bench.measure(10 * MS);
        bench.end_until_probe(10 * MS, 1);
        bench.end(4 + 20, 8 * MS, 1);
        assert!(bench.is_probing());
        bench.now_us += 10 * SECOND_US;
        assert_eq!(bench.adaptive.limit_at(bench.now_us), 20);
        assert_eq!(bench.adaptive.baseline(), Some(Duration::from_millis(8)));
    }

    #[test]
    fn few_requests_are_no_evidence() {
        let mut bench = Bench::new(Adaptive::builder());
        bench.measure(10 * MS);
        bench.end(19, 900 * MS, 20);
        bench.now_us += SECOND_US;
        assert_eq!(bench.adaptive.limit(), 20);
        bench.end(4, 900 * MS, 20);
        assert_eq!(bench.adaptive.limit(), 14, "20 / 2 + sqrt(20)");

        // Nor do they begin a probe that could not end.
        let mut bench = Bench::new(Adaptive::builder());
        for _ in 0..1_000 {
            bench.now_us += SECOND_US;
            bench.end(1, 10 * MS, 1);
            assert!(!bench.is_probing());
        }
    }

    #[test]
    fn it_moves_only_if_it_is_made_use_of() {
        let mut bench = Bench::new(Adaptive::builder());
        bench.measure(10 * MS);
        bench.end(1_000, 10 * MS, 14);
        bench.end(1_000, 20 * MS, 9);
        assert_eq!(bench.adaptive.limit(), 20);
        bench.end(24, 10 * MS, 15);
        assert_eq!(bench.adaptive.limit(), 29, "20 * 1.25 + sqrt(20)");
    }

    #[test]
    fn a_clock_that_is_set_stops_nothing() {
        for jump_us in [86_400 * SECOND_US, START_US] {
            let mut bench = Bench::new(Adaptive::builder());
            bench.measure(10 * MS);
            // Forward while all of these were on their way, and back again.
            bench.now_us += jump_us;
            bench.end(1_000, jump_us, 20);
            bench.now_us -= jump_us;
            bench.end(30_000, 10 * MS, 10);
            assert!(bench.adaptive.limit() >= 13, "{:?}", bench.adaptive);
            assert_eq!(bench.adaptive.baseline(), Some(Duration::from_millis(10)));
        }
    }

    #[test]
    fn the_gradient_is_the_published_one() {
        assert_eq!(gradient(0.25, 10, 10), 1.25);
        assert_eq!(gradient(0.25, 10, 1), 1.25);
        assert_eq!(gradient(0.25, 8, 10), 1.0);
        assert_eq!(gradient(0.25, 1, 10), 0.5);
        assert_eq!(gradient(0.0, 10, 10), 1.0);
    }

    #[test]
    fn settings_that_cannot_be_are_refused_by_name() {
        let error = |builder: AdaptiveBuilder| builder.build().expect_err("refused");
        let builder = Adaptive::builder;
        assert_eq!(error(builder().min(0)), AdaptiveError::ZeroMin);
        for (limits, min, initial, max) in [
            (builder().min(21), 21, 20, 1_000),
            (builder().max(19), 3, 20, 19),
            (builder().initial(1_001), 3, 1_001, 1_000),
        ] {
            assert_eq!(error(limits), AdaptiveError::Unordered { min, initial, max });
        }
        assert_eq!(error(builder().max(LARGEST + 1)), AdaptiveError::TooLarge);
        for tolerance in [-0.1, 10.1, f64::NAN, f64::INFINITY] {
            assert_eq!(error(builder().tolerance(tolerance)), AdaptiveError::Tolerance);
        }
        for samples in [
            builder().window_samples(0),
            builder().window_samples(51),
            builder().probe_samples(257),
        ] {
            assert_eq!(error(samples), AdaptiveError::Samples { kept: 256 });
        }
        assert_eq!(error(builder().window(Duration::from_nanos(999))), AdaptiveError::ZeroWindow);
        for probe in [
            builder().longest_probe(Duration::ZERO),
            builder().longest_probe(Duration::from_secs(60)),
            builder().probe_interval(Duration::from_secs(10)),
        ] {
            assert_eq!(error(probe), AdaptiveError::ProbeTooLong);
        }
        assert!(builder().max(LARGEST).build().is_ok());
        let text = error(builder().max(19)).to_string();
        assert!(text.contains("20 (initial) and 19 (largest)"), "{text}");
    }

    fn numbers() -> impl Strategy<Value = u64> {
        prop_oneof![
            4 => 0_u64..200_000,
            2 => START_US..START_US + 100 * SECOND_US,
            1 => any::<u64>(),
            1 => Just(u64::MAX),
        ]
    }

    proptest! {
        #[test]
        fn no_numbers_take_it_out_of_its_bounds(
            (min, initial, max) in (1_u64..50, 0_u64..50, 0_u64..2_000)
                .prop_map(|(min, more, most)| (min, min + more, min + more + most)),
            tolerance in 0.0..=10.0_f64,
            window_us in 1_u64..1_000,
            longest_us in 1_u64..5_000,
            samples in 1_usize..4,
            seed: u64,
            steps in proptest::collection::vec((numbers(), numbers(), numbers(), 1_u32..30), 1..60),
        ) {
            let adaptive = Adaptive::builder()
                .min(min)
                .initial(initial)
                .max(max)
                .tolerance(tolerance)
                .window(Duration::from_micros(window_us))
                .window_samples(samples)
                .probe_samples(samples * 2)
                .longest_probe(Duration::from_micros(longest_us))
                .probe_interval(Duration::from_micros(longest_us + 1))
                .build_with(seed)
                .unwrap();
            let bounds = min..=max;
            for (now_us, latency_us, in_flight, times) in steps {
                for later_us in 0..u64::from(times) {
                    let now_us = now_us.saturating_add(later_us * 100);
                    let started_us = now_us.wrapping_sub(latency_us);
                    adaptive.sample(now_us, started_us, in_flight);
                    prop_assert!(bounds.contains(&adaptive.limit()));
                    prop_assert!(bounds.contains(&adaptive.limit_at(now_us)));
                }
            }
            // Never stuck: a probe ends by itself.
            let now_us = 4 * START_US;
            adaptive.limit_at(now_us);
            let later_us = now_us + 2 * longest_us;
            adaptive.limit_at(later_us);
            prop_assert!(adaptive.0.finder.lock().probe.is_none());
        }
    }

    #[test]
    fn many_threads_agree_on_the_limit() {
        let adaptive = Adaptive::builder().build_with(7).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let adaptive = adaptive.clone();
                scope.spawn(move || {
                    for step in 0..20_000 {
                        let now_us = START_US + step * 200;
                        adaptive.sample(now_us, now_us - 500 - thread, adaptive.limit_at(now_us));
                        assert!((3..=1_000).contains(&adaptive.limit()));
                    }
                });
            }
        });
        assert_eq!(adaptive.limit(), adaptive.0.finder.lock().in_force());
        assert!(adaptive.limit() > 100, "it grew");
    }
}
