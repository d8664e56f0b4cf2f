//! Waiting for one's turn, where a policy holds requests back.
//!
//! The store keeps no list of those who wait, only how much work is queued. Their order and the
//! instant at which each has its turn are kept here, as long as they wait, because one who is
//! cancelled gives up its place: what it was charged is given back, and all behind it move up.

use crate::{
    clock::{Clock, Sleep},
    key::Fingerprint,
    store::Bill,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
};

/// All lines of a stack, by policy and identity. A line is in the order of the turns.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<HashMap<LineId, Vec<Arc<Place>>>>>);

type LineId = (usize, Fingerprint);

/// A place in a line.
pub(crate) struct Place {
    line: LineId,
    /// When its turn is, in microseconds since the Unix epoch.
    turn_us: AtomicU64,
    /// How much sooner those behind it have their turn if it is given up.
    length_us: u64,
    waiter: Mutex<Option<Waker>>,
}

impl Lines {
    /// Decides a request by `acquire`, which returns the present, and puts the request in line where
    /// it has to wait. Nobody joins or leaves meanwhile, so lines stay in the order of the decisions.
    pub(crate) fn join(
        &self,
        bill: &mut Bill,
        acquire: impl FnOnce(&mut Bill) -> u64,
    ) -> Vec<Arc<Place>> {
        let mut lines = self.0.lock();
        let now_us = acquire(bill);
        let mut places = Vec::new();
        for charge in &bill.charges {
            let Some(queued) = charge.answer.queued else {
                continue;
            };
            let place = Arc::new(Place {
                line: (charge.policy(), charge.fingerprint),
                turn_us: AtomicU64::new(now_us + queued.delay_us),
                length_us: queued.length_us,
                waiter: Mutex::new(None),
            });
            lines.entry(place.line).or_default().push(place.clone());
            places.push(place);
        }
        places
    }

    /// Takes places out of their lines. If they are given up before their turn, as `given_up` finds
    /// out, those behind them move up.
    fn leave(&self, places: &[Arc<Place>], given_up: impl FnOnce() -> bool) {
        let mut moved_up = Vec::new();
        let mut lines = self.0.lock();
        let given_up = given_up();
        for place in places {
            let Some(line) = lines.get_mut(&place.line) else {
                continue;
            };
            if let Some(index) = line.iter().position(|other| Arc::ptr_eq(other, place)) {
                line.remove(index);
                if given_up {
                    moved_up
                        .extend(line[index..].iter().map(|behind| behind.move_up(place.length_us)));
                }
            }
            if line.is_empty() {
                lines.remove(&place.line);
            }
        }
        drop(lines);
        // Wakers are not ours, so they are called without a lock.
        moved_up.into_iter().flatten().for_each(Waker::wake);
    }
}

impl Place {
    /// Returns whom to tell.
    fn move_up(&self, by_us: u64) -> Option<Waker> {
        let turn_us = self.turn_us.load(Relaxed).saturating_sub(by_us);
        self.turn_us.store(turn_us, Relaxed);
        self.waiter.lock().take()
    }
}

/// The wait of one request for its turn. Dropping it gives up the place.
pub(crate) struct Turn {
    lines: Lines,
    places: Vec<Arc<Place>>,
    clock: Clock,
    sleep: Option<Asleep>,
    /// Gives back what the request was charged.
    give_back: Box<dyn Fn() + Send + Sync>,
}

/// A sleep, and until when.
struct Asleep {
    until_us: u64,
    sleep: Sleep,
}

impl Turn {
    pub(crate) fn new(
        lines: &Lines,
        places: Vec<Arc<Place>>,
        clock: Clock,
        give_back: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self { lines: lines.clone(), places, clock, sleep: None, give_back }
    }

    /// When the last of its turns is.
    fn turn_us(&self) -> u64 {
        let turns = self.places.iter().map(|place| place.turn_us.load(Relaxed));
        turns.max().unwrap_or(0)
    }
}

impl Future for Turn {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // First, so that moving up in the meantime is not missed.
        for place in &self.places {
            *place.waiter.lock() = Some(cx.waker().clone());
        }
        loop {
            let (turn_us, now_us) = (self.turn_us(), self.clock.now_us());
            if turn_us <= now_us {
                self.lines.leave(&self.places, || false);
                self.places.clear();
                return Poll::Ready(());
            }
            if self.sleep.as_ref().is_none_or(|asleep| asleep.until_us != turn_us) {
                self.sleep =
                    Some(Asleep { until_us: turn_us, sleep: self.clock.sleep(turn_us - now_us) });
            }
            let Some(asleep) = &mut self.sleep else {
                return Poll::Pending;
            };
            if asleep.sleep.poll(cx).is_pending() {
                return Poll::Pending;
            }
            // The timer and the clock need not agree; look at the clock again.
            self.sleep = None;
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if self.places.is_empty() {
            return;
        }
        self.lines.leave(&self.places, || {
            let given_up = self.turn_us() > self.clock.now_us();
            if given_up {
                (self.give_back)();
            }
            given_up
        });
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("turn_us", &self.turn_us()).finish_non_exhaustive()
    }
}
