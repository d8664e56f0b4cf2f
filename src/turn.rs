//! Waiting for one's turn, where a policy holds requests back.
//!
//! The store keeps no list of those who wait, only how much work is queued. Their order and the
//! instant at which each has its turn are kept here, as long as they wait, because one who is
//! cancelled gives up its place: what it was charged is given back, and all behind it move up.

use crate::{
    algorithm::GivenBack,
    clock::{Clock, Sleep},
    decision::{Outcome, Outcomes},
    key::Fingerprint,
    store::{Bill, Refunds},
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

/// All lines of a stack, by policy, identity and where that is counted. A line is in the order of the
/// turns.
#[derive(Clone, Default)]
pub(crate) struct Lines(Arc<Mutex<HashMap<LineId, Vec<Arc<Place>>>>>);

type LineId = (usize, Fingerprint, Counted);

/// Where the bucket is that a line waits for. What is given back here is nothing to those whose turn was
/// told elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Counted {
    Here,
    #[cfg(feature = "redis")]
    Elsewhere,
}

/// A place in a line.
pub(crate) struct Place {
    line: LineId,
    /// The index of the charge that waits.
    charge: usize,
    /// When its turn is, in microseconds since the Unix epoch.
    turn_us: AtomicU64,
    /// How long that was from when it joined.
    delay_us: u64,
    /// What was given back by those behind it. It is counted as if it had lain beneath all, but this one
    /// stands as high as before.
    above: AtomicU64,
    waiter: Mutex<Option<Waker>>,
}

impl Lines {
    /// Decides a request by `acquire`, which returns the present if the request is admitted, and puts
    /// it in line where it has to wait. Nobody joins or leaves meanwhile, so lines stay in the order
    /// of the decisions.
    pub(crate) fn join(
        &self,
        counted: Counted,
        bill: &Bill,
        outcomes: &mut [Outcome],
        acquire: impl FnOnce(&mut [Outcome]) -> Option<u64>,
    ) -> Vec<Arc<Place>> {
        let mut lines = self.0.lock();
        let Some(now_us) = acquire(outcomes) else {
            return Vec::new();
        };
        let mut places = Vec::new();
        for (index, (charge, outcome)) in bill.charges.iter().zip(outcomes).enumerate() {
            let delay_us = outcome.delay_us;
            if delay_us == 0 {
                continue;
            }
            let place = Arc::new(Place {
                line: (charge.policy(), charge.fingerprint, counted),
                charge: index,
                turn_us: AtomicU64::new(now_us + delay_us),
                delay_us,
                above: AtomicU64::new(0),
                waiter: Mutex::new(None),
            });
            lines.entry(place.line).or_default().push(place.clone());
            places.push(place);
        }
        places
    }

    /// Gives back what somebody who does not wait was charged, by `refund`. Those who have their turn
    /// after the one it had at `turn_us` move up.
    pub(crate) fn give_back(&self, bill: &Bill, turn_us: u64, refund: impl FnOnce() -> Refunds) {
        let mut moved_up = Vec::new();
        let lines = self.0.lock();
        for (charge, GivenBack { by_us, .. }) in bill.charges.iter().zip(refund()) {
            let line = lines.get(&(charge.policy(), charge.fingerprint, Counted::Here));
            let behind = line.into_iter().flatten();
            let behind = behind.filter(|place| by_us > 0 && place.turn_us.load(Relaxed) > turn_us);
            moved_up.extend(behind.filter_map(|place| place.move_up(by_us)));
        }
        drop(lines);
        moved_up.into_iter().for_each(Waker::wake);
    }

    /// Takes places out of their lines, and tells those behind each how much they move up, as
    /// `give_up` finds out.
    fn leave(&self, places: &[Arc<Place>], give_up: impl FnOnce() -> Vec<GivenBack>) {
        let mut moved_up = Vec::new();
        let mut lines = self.0.lock();
        for (place, GivenBack { by_us, counted }) in places.iter().zip(give_up()) {
            let Some(line) = lines.get_mut(&place.line) else {
                continue;
            };
            if let Some(index) = line.iter().position(|other| Arc::ptr_eq(other, place)) {
                line.remove(index);
                let (ahead, behind) = line.split_at(index);
                ahead.iter().for_each(|ahead| {
                    ahead.above.fetch_add(counted, Relaxed);
                });
                let behind = behind.iter().filter(|_| by_us > 0);
                moved_up.extend(behind.filter_map(|behind| behind.move_up(by_us)));
            }
            if line.is_empty() {
                lines.remove(&place.line);
            }
        }
        drop(lines);
        // Wakers are not ours, so they are called without a lock.
        moved_up.into_iter().for_each(Waker::wake);
    }
}

impl Place {
    /// When its turn is. After a clock that stepped back, that is no farther than twice the wait that
    /// it had in the first place.
    fn turn_us(&self, now_us: u64) -> u64 {
        let turn_us = self.turn_us.load(Relaxed);
        if turn_us <= now_us.saturating_add(2 * self.delay_us) {
            return turn_us;
        }
        let turn_us = now_us + self.delay_us;
        self.turn_us.store(turn_us, Relaxed);
        turn_us
    }

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
    /// What the request was charged, and what came of it.
    bill: Bill,
    outcomes: Outcomes,
    /// Gives it back.
    refund: Refund,
}

pub(crate) type Refund = Box<dyn Fn(&Bill, &mut [Outcome]) -> Refunds + Send + Sync>;

/// A sleep, and until when.
struct Asleep {
    until_us: u64,
    sleep: Sleep,
}

impl Turn {
    pub(crate) fn new(
        lines: &Lines,
        places: Vec<Arc<Place>>,
        clock: &Clock,
        (bill, outcomes): (Bill, Outcomes),
        refund: Refund,
    ) -> Self {
        let (lines, clock) = (lines.clone(), clock.clone());
        Self { lines, places, clock, sleep: None, bill, outcomes, refund }
    }

    /// When the last of its turns is.
    fn turn_us(&self, now_us: u64) -> u64 {
        self.places.iter().map(|place| place.turn_us(now_us)).max().unwrap_or(0)
    }
}

impl Future for Turn {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // First, so that moving up in the meantime is not missed.
        for place in &self.places {
            let old = place.waiter.lock().replace(cx.waker().clone());
            // Not under the lock: it may be the last of a task that waits in this line too.
            drop(old);
        }
        loop {
            let now_us = self.clock.now_us();
            let turn_us = self.turn_us(now_us);
            if turn_us <= now_us {
                let nothing = || vec![GivenBack::default(); self.places.len()];
                self.lines.leave(&self.places, nothing);
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
        let Self { lines, places, clock, bill, outcomes, refund, .. } = self;
        lines.leave(places, || {
            let now_us = clock.now_us();
            if places.iter().all(|place| place.turn_us(now_us) <= now_us) {
                return vec![GivenBack::default(); places.len()];
            }
            for place in places.iter() {
                outcomes[place.charge].height += place.above.load(Relaxed);
            }
            // A slot that has passed is nobody's any more.
            for place in places.iter().filter(|place| place.turn_us(now_us) <= now_us) {
                outcomes[place.charge].cost = 0;
            }
            let refunds = refund(bill, outcomes);
            places.iter().map(|place| refunds[place.charge]).collect()
        });
    }
}

impl fmt::Debug for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turn").field("places", &self.places.len()).finish_non_exhaustive()
    }
}
