//! How busy this instance is.

use super::{error::ShedderError, law::millionths};
use crate::clock::{Clock, Stopwatch};
use parking_lot::Mutex;
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};
use tokio::runtime::{Handle, Id};

/// What a [`WorkerShedder`](super::WorkerShedder) takes for the utilization of this instance: 0 when it
/// is idle, 1 when it has no capacity left.
pub struct Utilization(Source);

enum Source {
    InFlight(u64),
    Workers(Workers),
    Function(Box<dyn Fn() -> f64 + Send + Sync>),
}

/// How many tasks find room in the queue of a worker of tokio. More of them overflow into the global
/// queue.
const LOCAL_QUEUE: usize = 256;

impl Utilization {
    /// How many of the requests that the shedder let in are in flight, of `capacity`: how many the
    /// instance can work on at a time, such as the connections of its pool or its worker processes.
    #[must_use]
    pub fn in_flight(capacity: u32) -> Self {
        Self(Source::InFlight(capacity.into()))
    }

    /// What share of the time the workers of the tokio runtime were busy between two samples. It is full
    /// when more than 256 tasks for each worker, as many as fit into its own queue, wait in the runtime's
    /// global queue.
    ///
    /// It is the runtime of whoever samples: the one in which the first request was admitted. A worker
    /// reports its time when it looks for other work, so a task that does not yield counts when it is
    /// done. What blocks in `spawn_blocking` counts nothing.
    #[must_use]
    pub fn tokio_workers() -> Self {
        Self(Source::Workers(Workers::default()))
    }

    /// The same, but full when more than `depth` tasks wait in the runtime's global queue.
    #[must_use]
    pub fn tokio_workers_or_queue(depth: usize) -> Self {
        Self(Source::Workers(Workers { depth: Some(depth), ..Workers::default() }))
    }

    /// What a function says: the load of the machine, the fill of a queue. It is called once per sample
    /// and should not block.
    ///
    /// What is above 1 is 1. When it panics or what it says is no number, nobody knows how busy the
    /// instance is, and shedding stays as it is.
    #[must_use]
    pub fn from_fn(utilization: impl Fn() -> f64 + Send + Sync + 'static) -> Self {
        Self(Source::Function(Box::new(utilization)))
    }

    pub(super) fn check(&self, shedder: &str) -> Result<(), ShedderError> {
        match self.0 {
            Source::InFlight(0) => Err(ShedderError::OutOfRange {
                shedder: shedder.to_owned(),
                option: "capacity",
                range: "1 or more",
            }),
            _ => Ok(()),
        }
    }

    /// A first look, for what is told by the difference of two.
    pub(super) fn begin(&self) {
        if let Source::Workers(workers) = &self.0 {
            workers.read();
        }
    }

    /// The utilization in millionths, if it is known.
    pub(super) fn read(&self, in_flight: u64) -> Option<u64> {
        let utilization = match &self.0 {
            Source::InFlight(capacity) => in_flight as f64 / *capacity as f64,
            Source::Workers(workers) => workers.read()?,
            Source::Function(function) => catch_unwind(AssertUnwindSafe(function)).ok()?,
        };
        (!utilization.is_nan()).then(|| millionths(utilization))
    }
}

impl fmt::Debug for Utilization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::InFlight(capacity) => write!(f, "Utilization::in_flight({capacity})"),
            Source::Workers(Workers { depth: None, .. }) => {
                f.write_str("Utilization::tokio_workers")
            }
            Source::Workers(Workers { depth: Some(depth), .. }) => {
                write!(f, "Utilization::tokio_workers_or_queue({depth})")
            }
            Source::Function(_) => f.write_str("Utilization::from_fn"),
        }
    }
}

/// The workers of a runtime.
#[derive(Default)]
struct Workers {
    depth: Option<usize>,
    last: Mutex<Option<Reading>>,
}

/// How long the workers had been busy, all together, at some time.
struct Reading {
    runtime: Id,
    busy: Duration,
    since: Stopwatch,
}

impl Workers {
    fn read(&self) -> Option<f64> {
        let runtime = Handle::try_current().ok()?;
        let metrics = runtime.metrics();
        let workers = metrics.num_workers();
        let busy = (0..workers).map(|worker| metrics.worker_total_busy_duration(worker)).sum();
        // Workers are busy by the time of the system, whatever clock the shedder has.
        let since = Clock::system().stopwatch();
        let reading = Reading { runtime: runtime.id(), busy, since };
        let last = self.last.lock().replace(reading)?;
        let elapsed_us = last.since.elapsed_us();
        if last.runtime != runtime.id() || elapsed_us == 0 {
            return None;
        }
        if metrics.global_queue_depth() > self.depth.unwrap_or(LOCAL_QUEUE * workers) {
            return Some(1.0);
        }
        let busy_us = busy.saturating_sub(last.busy).as_micros() as f64;
        Some(busy_us / (elapsed_us as f64 * workers as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        hint::spin_loop,
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering::Relaxed},
        },
        thread,
    };

    #[test]
    fn requests_in_flight_count_against_the_capacity() {
        let utilization = Utilization::in_flight(8);
        assert_eq!(
            [0, 6, 8, 9].map(|count| utilization.read(count).unwrap()),
            [0, 750_000, 1_000_000, 1_000_000]
        );
        assert!(Utilization::in_flight(0).check("test").is_err());
    }

    #[test]
    fn a_function_that_knows_nothing_is_not_believed() {
        assert_eq!(Utilization::from_fn(|| 0.25).read(0), Some(250_000));
        assert_eq!(Utilization::from_fn(|| f64::INFINITY).read(0), Some(1_000_000));
        assert_eq!(Utilization::from_fn(|| -3.0).read(0), Some(0));
        assert_eq!(Utilization::from_fn(|| f64::NAN).read(0), None);
        assert_eq!(Utilization::from_fn(|| panic!("on purpose")).read(0), None);
    }

    #[test]
    fn workers_are_known_only_in_a_runtime_and_after_a_first_look() {
        let utilization = Utilization::tokio_workers();
        assert_eq!(utilization.read(0), None);
        let runtime =
            || tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
        let first = runtime();
        let _guard = first.enter();
        assert_eq!(utilization.read(0), None);
        thread::sleep(Duration::from_millis(20));
        assert!(utilization.read(0).unwrap() < 1_000_000);
        // What another runtime did says nothing of this one.
        let second = runtime();
        let _guard = second.enter();
        assert_eq!(utilization.read(0), None);
    }

    #[test]
    fn busy_workers_are_seen() {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let is_done = Arc::new(AtomicBool::new(false));
        let done = is_done.clone();
        let busy = runtime.spawn(async move {
            while !done.load(Relaxed) {
                for _ in 0..1_000 {
                    spin_loop();
                }
                tokio::task::yield_now().await;
            }
        });
        let _guard = runtime.enter();
        let utilization = Utilization::tokio_workers();
        utilization.begin();
        // A busy machine may give the worker less than its time, but the worker has something to do
        // all the time.
        let mut most = 0;
        for _ in 0..200 {
            thread::sleep(Duration::from_millis(50));
            most = most.max(utilization.read(0).unwrap());
            if most > 500_000 {
                break;
            }
        }
        assert!(most > 500_000, "{most}");
        is_done.store(true, Relaxed);
        runtime.block_on(busy).unwrap();
    }

    #[test]
    fn a_long_global_queue_is_full_utilization() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _guard = runtime.enter();
        let utilization = Utilization::tokio_workers_or_queue(3);
        utilization.begin();
        // Nobody drives the runtime, so what is spawned waits.
        let waiting: Vec<_> = (0..4).map(|_| runtime.spawn(async {})).collect();
        thread::sleep(Duration::from_millis(5));
        assert_eq!(utilization.read(0), Some(1_000_000));
        drop(waiting);
        runtime.block_on(async {
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
        });
        thread::sleep(Duration::from_millis(5));
        assert!(utilization.read(0).unwrap() < 1_000_000);
    }
}
