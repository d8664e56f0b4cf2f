//! Time. The only caller of the system's clocks.
//!
//! All of tollgate counts in whole microseconds since the Unix epoch, read once per decision.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

#[cfg(any(test, feature = "test-util"))]
pub use manual::ManualClock;

/// Where a local store takes its time from.
///
/// The default, [`Clock::system`], is the system's wall clock, which calendar windows need, read at
/// the price of a time stamp counter. It follows a wall clock that is set or slewed within a second;
/// what a step back does is written at [`Policy`](crate::Policy).
#[derive(Clone)]
pub struct Clock(Source);

#[derive(Clone)]
enum Source {
    System(Arc<SystemClock>),
    Function(Arc<dyn Fn() -> Duration + Send + Sync>),
    #[cfg(any(test, feature = "test-util"))]
    Manual(ManualClock),
}

impl Clock {
    /// The system's wall clock.
    #[must_use]
    pub fn system() -> Self {
        // Making one asks the processor what it is, which takes a virtual machine tens of microseconds.
        static SYSTEM: LazyLock<Arc<SystemClock>> = LazyLock::new(|| Arc::new(SystemClock::new()));
        Self(Source::System(SYSTEM.clone()))
    }

    /// A clock of one's own: a function that gives the time since the Unix epoch. It is called once
    /// per decision and must be fast, not panic, and not use a limiter.
    ///
    /// Requests that have to wait for their turn sleep by tokio's timer.
    #[must_use]
    pub fn from_fn(now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Source::Function(Arc::new(now)))
    }

    #[inline]
    pub(crate) fn now_us(&self) -> u64 {
        match &self.0 {
            Source::System(clock) => clock.now_us(),
            Source::Function(now) => saturating_us(now()),
            #[cfg(any(test, feature = "test-util"))]
            Source::Manual(clock) => clock.now_us(),
        }
    }

    /// Starts to take the time.
    pub(crate) fn stopwatch(&self) -> Stopwatch {
        match &self.0 {
            #[cfg(any(test, feature = "test-util"))]
            Source::Manual(clock) => Stopwatch::Manual(clock.clone(), clock.now_us()),
            _ => Stopwatch::Timer(tokio::time::Instant::now()),
        }
    }

    /// Sleeps for `duration_us`. It may wake early, so look at the clock again.
    pub(crate) fn sleep(&self, duration_us: u64) -> Sleep {
        match &self.0 {
            #[cfg(any(test, feature = "test-util"))]
            Source::Manual(clock) => Sleep::Manual(clock.sleep(duration_us)),
            _ => Sleep::Timer(Box::pin(tokio::time::sleep(Duration::from_micros(duration_us)))),
        }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::system()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Source::System(_) => "Clock::system",
            Source::Function(_) => "Clock::from_fn",
            #[cfg(any(test, feature = "test-util"))]
            Source::Manual(_) => "ManualClock",
        })
    }
}

/// How much time has passed. When the wall clock is set, that is no time: it goes by the clock that
/// tokio's timer sleeps by, which tests can pause.
#[derive(Clone, Debug)]
pub(crate) enum Stopwatch {
    Timer(tokio::time::Instant),
    #[cfg(any(test, feature = "test-util"))]
    Manual(ManualClock, u64),
}

impl Stopwatch {
    pub(crate) fn elapsed_us(&self) -> u64 {
        match self {
            Self::Timer(start) => saturating_us(start.elapsed()),
            #[cfg(any(test, feature = "test-util"))]
            Self::Manual(clock, start_us) => clock.now_us().saturating_sub(*start_us),
        }
    }
}

/// A sleep by a clock's time.
pub(crate) enum Sleep {
    Timer(Pin<Box<tokio::time::Sleep>>),
    #[cfg(any(test, feature = "test-util"))]
    Manual(manual::ManualSleep),
}

impl Sleep {
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match self {
            Self::Timer(sleep) => sleep.as_mut().poll(cx),
            #[cfg(any(test, feature = "test-util"))]
            Self::Manual(sleep) => sleep.poll(cx),
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        Self::poll(&mut self, cx)
    }
}

/// The last microsecond that is counted, in the year 2215; everything later is now. Twice a quota's
/// longest span on top of it stays below 2^53.
const END_OF_TIME_US: u64 = (1 << 53) - 2 * crate::quota::MAX_SPAN_US;

/// A duration in whole microseconds.
pub(crate) fn whole_us(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn saturating_us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).map_or(END_OF_TIME_US, |us| us.min(END_OF_TIME_US))
}

/// The wall clock, read through the time stamp counter: reading the counter costs a third of what
/// asking the system does. The counter is set against the wall clock once a second.
struct SystemClock {
    counter: quanta::Clock,
    start: u64,
    /// Microseconds per count, times 2^64.
    us_per_count: u64,
    /// The wall clock's time at `start`, as of the last setting.
    wall_at_start_us: AtomicU64,
    /// When to set it again, in microseconds since `start`.
    next_setting_us: AtomicU64,
}

const SETTING_INTERVAL_US: u64 = 1_000_000;

impl SystemClock {
    fn new() -> Self {
        let counter = quanta::Clock::new();
        let start = counter.raw();
        // Over some minutes the rounding to nanoseconds is nothing, and what is left of it is gone
        // with the next setting.
        let span = 1_u64 << 40;
        let span_ns = u128::from(counter.delta_as_nanos(0, span));
        let us_per_count = (span_ns << 64) / (u128::from(span) * 1_000);
        let clock = Self {
            counter,
            start,
            us_per_count: u64::try_from(us_per_count).unwrap_or(u64::MAX),
            wall_at_start_us: AtomicU64::new(0),
            next_setting_us: AtomicU64::new(0),
        };
        clock.set(clock.elapsed_us());
        clock
    }

    #[inline]
    fn now_us(&self) -> u64 {
        let elapsed_us = self.elapsed_us();
        if elapsed_us >= self.next_setting_us.load(Relaxed) {
            self.set(elapsed_us);
        }
        self.wall_at_start_us.load(Relaxed) + elapsed_us
    }

    #[inline]
    fn elapsed_us(&self) -> u64 {
        // One multiplication, where the counter's own conversion takes two and a shift.
        let counts = self.counter.raw().saturating_sub(self.start);
        ((u128::from(counts) * u128::from(self.us_per_count)) >> 64) as u64
    }

    #[cold]
    fn set(&self, elapsed_us: u64) {
        self.next_setting_us.store(elapsed_us + SETTING_INTERVAL_US, Relaxed);
        let wall_at_start_us = anchor(|| [self.elapsed_us(), wall_us(), self.elapsed_us()]);
        self.wall_at_start_us.store(wall_at_start_us, Relaxed);
    }
}

/// How often two clocks are read for readings that were not far apart.
const READINGS: usize = 5;

/// What one clock said when another one began, of readings of the other, the one, and the other again. A
/// thread may stand still between two readings, for as long as its process or the machine does; the clock
/// would be ahead by that. So the closest readings count, and the clock is rather late than early.
fn anchor(mut read: impl FnMut() -> [u64; 3]) -> u64 {
    let mut closest = (u64::MAX, 0);
    for _ in 0..READINGS {
        let [before_us, wall_us, after_us] = read();
        let apart_us = after_us.saturating_sub(before_us);
        if apart_us < closest.0 {
            closest = (apart_us, wall_us.saturating_sub(after_us));
        }
        if apart_us <= 1 {
            break;
        }
    }
    closest.1
}

#[expect(clippy::disallowed_methods, reason = "this is the one caller")]
fn wall_us() -> u64 {
    // A clock before 1970 is no clock to count by; it stands still at 0 until it is set.
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    saturating_us(since_epoch)
}

#[cfg(any(test, feature = "test-util"))]
mod manual {
    use super::{Clock, Source, saturating_us};
    use parking_lot::Mutex;
    use std::{
        sync::Arc,
        task::{Context, Poll, Waker},
        time::Duration,
    };

    /// A clock for tests: it stands still until it is moved, also backwards.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Limiter, ManualClock, Policy, Quota, key::Global};
    ///
    /// let clock = ManualClock::new();
    /// let limiter = Limiter::<str>::builder()
    ///     .clock(&clock)
    ///     .policy(Policy::token_bucket("api", Quota::per_second(1)).key(Global))
    ///     .build()?;
    ///
    /// assert!(limiter.check("anyone").is_ok());
    /// assert!(limiter.check("anyone").is_err());
    /// clock.advance(Duration::from_secs(1));
    /// assert!(limiter.check("anyone").is_ok());
    /// # Ok::<(), tollgate::BuildError>(())
    /// ```
    #[derive(Clone, Debug, Default)]
    pub struct ManualClock(Arc<Mutex<State>>);

    #[derive(Debug, Default)]
    struct State {
        now_us: u64,
        sleepers: Vec<(u64, Waker)>,
    }

    impl ManualClock {
        /// A clock that stands at the Unix epoch.
        #[must_use]
        pub fn new() -> Self {
            Self::default()
        }

        /// A clock that stands at a time since the Unix epoch.
        #[must_use]
        pub fn at(time: Duration) -> Self {
            let clock = Self::new();
            clock.set(time);
            clock
        }

        /// The time since the Unix epoch.
        #[must_use]
        pub fn now(&self) -> Duration {
            Duration::from_micros(self.now_us())
        }

        /// Moves the clock forward and wakes the requests whose turn has come.
        pub fn advance(&self, by: Duration) {
            self.set(self.now().saturating_add(by));
        }

        /// Sets the clock, also back, and wakes the requests whose turn has come.
        pub fn set(&self, time: Duration) {
            let mut due = Vec::new();
            {
                let mut state = self.0.lock();
                state.now_us = saturating_us(time);
                let now_us = state.now_us;
                state.sleepers.retain(|(until_us, waker)| {
                    let sleeping = *until_us > now_us;
                    if !sleeping {
                        due.push(waker.clone());
                    }
                    sleeping
                });
            }
            due.into_iter().for_each(Waker::wake);
        }

        pub(super) fn now_us(&self) -> u64 {
            self.0.lock().now_us
        }

        pub(super) fn sleep(&self, duration_us: u64) -> ManualSleep {
            ManualSleep { clock: self.clone(), until_us: self.now_us().saturating_add(duration_us) }
        }
    }

    impl From<&ManualClock> for Clock {
        fn from(clock: &ManualClock) -> Self {
            Self(Source::Manual(clock.clone()))
        }
    }

    pub(crate) struct ManualSleep {
        clock: ManualClock,
        until_us: u64,
    }

    impl ManualSleep {
        pub(super) fn poll(&self, cx: &Context<'_>) -> Poll<()> {
            let mut state = self.clock.0.lock();
            if state.now_us >= self.until_us {
                return Poll::Ready(());
            }
            state.sleepers.push((self.until_us, cx.waker().clone()));
            Poll::Pending
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_tells_the_wall_clocks_time() {
        let clock = Clock::system();
        let (before, now, after) = (wall_us(), clock.now_us(), wall_us());
        // The counter may drift a little between two settings.
        assert!(now + 10_000 >= before && now <= after + 10_000, "{before} {now} {after}");
    }

    /// Whenever a thread stands still while it reads them, and for however long.
    #[test]
    fn a_clock_is_not_ahead_because_its_thread_stood_still() {
        for still_at in [1, 2] {
            let mut readings = 0;
            let mut time_us = 5_000;
            let wall_at_start_us = anchor(|| {
                readings += 1;
                [0, 1, 2].map(|reading| {
                    let stands_still = readings == 1 && reading == still_at;
                    time_us += if stands_still { 2_000_000 } else { 1 };
                    if reading == 1 { T0_US + time_us } else { time_us }
                })
            });
            assert!((T0_US - 2..=T0_US).contains(&wall_at_start_us), "{wall_at_start_us}");
            assert!(readings <= READINGS);
        }
        // Not even if it does so every time.
        let mut time_us = 0;
        let wall_at_start_us = anchor(|| {
            time_us += 3_000;
            [time_us - 2_000, T0_US + time_us - 500, time_us]
        });
        assert_eq!(wall_at_start_us, T0_US - 500);
    }

    const T0_US: u64 = 20_000 * 86_400 * 1_000_000;

    #[test]
    fn times_that_no_quota_could_count_from_are_clamped() {
        let clock = Clock::from_fn(|| Duration::MAX);
        assert_eq!(clock.now_us(), END_OF_TIME_US);
    }
}
