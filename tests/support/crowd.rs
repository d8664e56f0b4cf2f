//! Requests that wait for their turn, on a clock that is moved by hand.

use super::us;
use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};
use tollgate::ManualClock;

/// A runtime that polls a future when it is new and after it was woken, and never else: who waits
/// for a wake-up that does not come waits for ever.
pub(crate) struct Crowd<'a, T> {
    clock: ManualClock,
    start: Duration,
    waiting: BTreeMap<usize, Waiter<'a, T>>,
    entered: usize,
}

struct Waiter<'a, T> {
    future: Pin<Box<dyn Future<Output = T> + 'a>>,
    woken: Arc<Woken>,
}

struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, SeqCst);
    }
}

impl<'a, T> Crowd<'a, T> {
    /// Times are told from now on.
    pub(crate) fn new(clock: &ManualClock) -> Self {
        Self { clock: clock.clone(), start: clock.now(), waiting: BTreeMap::new(), entered: 0 }
    }

    /// The first to enter is number 0.
    pub(crate) fn enter(&mut self, future: impl Future<Output = T> + 'a) -> usize {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.waiting.insert(self.entered, Waiter { future: Box::pin(future), woken });
        self.entered += 1;
        self.entered - 1
    }

    /// Drops one who waits.
    pub(crate) fn cancel(&mut self, number: usize) {
        assert!(self.waiting.remove(&number).is_some(), "{number} does not wait");
    }

    /// The number of one who waits, if anybody does.
    pub(crate) fn first(&self) -> Option<usize> {
        self.waiting.keys().next().copied()
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Polls everybody who was woken, and returns who is done, in order.
    pub(crate) fn run(&mut self) -> Vec<(usize, T)> {
        let mut done = Vec::new();
        while let Some((&number, waiter)) =
            self.waiting.iter_mut().find(|(_, waiter)| waiter.woken.0.swap(false, SeqCst))
        {
            let waker = Waker::from(waiter.woken.clone());
            let polled = waiter.future.as_mut().poll(&mut Context::from_waker(&waker));
            if let Poll::Ready(result) = polled {
                self.waiting.remove(&number);
                done.push((number, result));
            }
        }
        done
    }

    /// Moves the clock from one instant to the next at which somebody's turn may be, a whole
    /// multiple of `step`, until `end`. Returns who was done and when. Nobody may be done a
    /// microsecond before such an instant.
    pub(crate) fn run_until(&mut self, end: Duration, step: Duration) -> Vec<(usize, Duration)> {
        let mut done: Vec<_> =
            self.run().into_iter().map(|(number, _)| (number, self.time())).collect();
        while self.time() < end {
            let next = (self.time().as_micros() / step.as_micros() + 1) as u32 * step;
            self.clock.set(self.start + next - us(1));
            assert!(self.run().is_empty(), "somebody is early");
            self.clock.set(self.start + next);
            done.extend(self.run().into_iter().map(|(number, _)| (number, next)));
        }
        done
    }

    fn time(&self) -> Duration {
        self.clock.now() - self.start
    }
}
