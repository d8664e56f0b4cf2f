//! The guard before a store: no call lasts longer than the deadline, and while the store is down none
//! is made.

use super::breaker::{Breaker, Change, Settings, State};
use crate::clock::Clock;
use std::{
    fmt,
    future::Future,
    hash::{BuildHasher, RandomState},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, timeout_at};

pub(crate) struct Guard {
    breaker: Breaker,
    deadline: Duration,
    clock: Clock,
    hook: Option<Hook>,
    counters: Counters,
    last_warning_us: AtomicU64,
}

const WARNING_INTERVAL_US: u64 = 10_000_000;

/// Hears of every change of state.
pub(crate) type Hook = Box<dyn Fn(&StateChange) + Send + Sync>;

/// A store went out of use or came back.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateChange {
    /// It is not asked any more; policies answer by their failure modes.
    Down {
        /// The last of the failures that led to it.
        error: String,
    },
    /// It decides again.
    Up,
}

/// How a store is doing, and what it did since it was made. Refunds and resets count as
/// requests, and so does what instances of a fleet tell each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// Whether it is being asked: the circuit breaker is closed.
    pub is_up: bool,
    /// How many requests it decided.
    pub decided: u64,
    /// How many requests it failed to decide, those that were late among them.
    pub failed: u64,
    /// How many requests were not decided before the deadline.
    pub late: u64,
    /// How many requests it was not asked about, because it was down.
    pub skipped: u64,
    /// How often it went down.
    pub downs: u64,
}

impl Health {
    /// That of two stores together.
    pub(crate) const fn and(self, other: Self) -> Self {
        Self {
            is_up: self.is_up && other.is_up,
            decided: self.decided + other.decided,
            failed: self.failed + other.failed,
            late: self.late + other.late,
            skipped: self.skipped + other.skipped,
            downs: self.downs + other.downs,
        }
    }
}

#[derive(Default)]
struct Counters {
    decided: AtomicU64,
    failed: AtomicU64,
    late: AtomicU64,
    skipped: AtomicU64,
    downs: AtomicU64,
}

/// What a failed call says.
pub(crate) trait Failure: fmt::Display {
    /// Whether the store is to blame, rather than the call.
    fn is_outage(&self) -> bool;

    /// Whether there was no answer in time.
    fn is_late(&self) -> bool;
}

impl Guard {
    pub(crate) fn new(settings: &Settings, deadline: Duration, hook: Option<Hook>) -> Self {
        Self {
            breaker: Breaker::new(settings, RandomState::new().hash_one("jitter")),
            deadline,
            clock: Clock::system(),
            hook,
            counters: Counters::default(),
            last_warning_us: AtomicU64::new(0),
        }
    }

    /// Makes a call, unless the store is down. `None` means that the failure modes have to answer,
    /// now. Dropping the future says nothing about the store.
    pub(crate) async fn call<T, E: Failure>(
        &self,
        call: impl Future<Output = Result<T, E>>,
    ) -> Option<T> {
        self.call_until(Instant::now() + self.deadline, pin!(call)).await
    }

    /// The same for a call that is part of something that has begun before.
    pub(crate) async fn call_until<T, E: Failure>(
        &self,
        until: Instant,
        call: impl Future<Output = Result<T, E>>,
    ) -> Option<T> {
        let count = |counter: &AtomicU64| counter.fetch_add(1, Relaxed);
        let Ok(permit) = self.breaker.permit(self.clock.now_us()) else {
            count(&self.counters.skipped);
            return None;
        };
        let error = match timeout_at(until, call).await {
            Ok(Ok(value)) => {
                count(&self.counters.decided);
                self.tell(permit.success(self.clock.now_us()), "");
                return Some(value);
            }
            Ok(Err(error)) => {
                count(&self.counters.failed);
                if error.is_late() {
                    count(&self.counters.late);
                }
                if !error.is_outage() {
                    self.warn(&error);
                    return None;
                }
                error.to_string()
            }
            Err(_) => {
                count(&self.counters.failed);
                count(&self.counters.late);
                format!("no answer within {:?}", self.deadline)
            }
        };
        self.tell(permit.failure(self.clock.now_us()), &error);
        None
    }

    /// Whether calls are being made.
    pub(crate) fn is_up(&self) -> bool {
        self.breaker.state() == State::Closed
    }

    pub(crate) fn health(&self) -> Health {
        let Counters { decided, failed, late, skipped, downs } = &self.counters;
        Health {
            is_up: self.is_up(),
            decided: decided.load(Relaxed),
            failed: failed.load(Relaxed),
            late: late.load(Relaxed),
            skipped: skipped.load(Relaxed),
            downs: downs.load(Relaxed),
        }
    }

    /// Tells of a request that the store could not decide though it is in order. There may be many such,
    /// so this is not told of each.
    fn warn(&self, error: &impl fmt::Display) {
        let now_us = self.clock.now_us();
        let last_us = self.last_warning_us.load(Relaxed);
        if now_us.saturating_sub(last_us) >= WARNING_INTERVAL_US
            && self.last_warning_us.compare_exchange(last_us, now_us, Relaxed, Relaxed).is_ok()
        {
            tracing::warn!(target: "tollgate", %error, "the store could not decide a request");
        }
    }

    /// Tells of a change of state, once.
    fn tell(&self, change: Option<Change>, error: &str) {
        let change = match change {
            None => return,
            Some(Change::Opened) => {
                self.counters.downs.fetch_add(1, Relaxed);
                tracing::warn!(
                    target: "tollgate",
                    error,
                    "the store is down; policies answer by their failure modes"
                );
                StateChange::Down { error: error.to_owned() }
            }
            Some(Change::Closed) => {
                tracing::info!(target: "tollgate", "the store is back");
                StateChange::Up
            }
        };
        if let Some(hook) = &self.hook {
            // A hook that panics does not take the request with it.
            let _ = catch_unwind(AssertUnwindSafe(|| hook(&change)));
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("deadline", &self.deadline)
            .field("health", &self.health())
            .finish_non_exhaustive()
    }
}
