//! A lane: requests of one instance that wait for the server go together.
//!
//! A request that finds no call in flight is sent at once, by its own caller. While a call is in
//! flight, others gather, and the next call takes them all: there is no timer, and nobody waits
//! longer than for the call before. Another call at the same time is worth its price only when there
//! is a full batch for it.

use super::{
    codec::{self, Ask, Told},
    error::StoreError,
    scripts::DECIDE,
    server::Server,
};
use crate::clock::Clock;
use parking_lot::Mutex;
use redis::Value;
use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::oneshot, task::yield_now, time::timeout};

#[derive(Debug)]
pub(super) struct Lane {
    server: Arc<Server>,
    limits: Limits,
    clock: Clock,
    queue: Mutex<Queue>,
    pub(super) calls: AtomicU64,
    pub(super) requests: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// The most requests in a call.
    pub(super) batch: usize,
    /// The most calls at a time.
    pub(super) in_flight: usize,
    /// How long a call may take.
    pub(super) patience: Duration,
}

/// A call has no more charges than this: the script holds so many keys at a time.
const MOST_CHARGES: usize = 1_500;

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Waiting>,
    flights: Vec<Flight>,
    last_flight: u64,
}

/// The right to have a call in flight.
#[derive(Debug)]
struct Flight {
    number: u64,
    /// When its call was made.
    since_us: u64,
}

/// A request in the queue, and who waits for its answer.
#[derive(Debug)]
struct Waiting {
    ask: Ask,
    answer: oneshot::Sender<Result<Told, StoreError>>,
}

impl Lane {
    pub(super) fn new(server: Arc<Server>, limits: Limits) -> Self {
        let queue = Mutex::new(Queue::default());
        let (calls, requests) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { server, limits, clock: Clock::system(), queue, calls, requests }
    }

    /// Has a request decided. Dropping the future takes the request out of the queue; what is on its
    /// way already may still be charged.
    pub(super) async fn ask(self: &Arc<Self>, ask: Ask) -> Result<Told, StoreError> {
        loop {
            let receiver = match self.lead_or_wait(&ask) {
                Ok(flight) => {
                    let (lane, runtime) = (self.clone(), Handle::current());
                    let _slot = Slot { lane, runtime, flight };
                    let mut told = self.send(&[&ask]).await?;
                    return told.pop().ok_or_else(unreadable);
                }
                Err(receiver) => receiver,
            };
            // Who was to send it is gone, and it was not sent.
            if let Ok(answer) = receiver.await {
                return answer;
            }
        }
    }

    /// The right to send a request at once, or the other end of its place in the queue.
    fn lead_or_wait(
        self: &Arc<Self>,
        ask: &Ask,
    ) -> Result<u64, oneshot::Receiver<Result<Told, StoreError>>> {
        let now_us = self.clock.now_us();
        let mut queue = self.queue.lock();
        // A caller that does not go on with its future keeps others from sending for a while only.
        let patience_us = self.limits.patience.as_micros() as u64 / 2;
        queue.flights.retain(|flight| now_us.saturating_sub(flight.since_us) < patience_us);
        if queue.flights.is_empty() {
            return Ok(queue.take_off(now_us));
        }
        let (answer, receiver) = oneshot::channel();
        queue.waiting.push_back(Waiting { ask: ask.clone(), answer });
        let is_full = queue.waiting.len() >= self.limits.batch;
        if is_full && queue.flights.len() < self.limits.in_flight {
            let flight = queue.take_off(now_us);
            drop(queue);
            self.drain(flight, &Handle::current());
        }
        Err(receiver)
    }

    fn drain(self: &Arc<Self>, flight: u64, runtime: &Handle) {
        // A runtime that is shut down drops the task here and now.
        runtime.spawn(Drain { lane: self.clone(), flight, is_done: false }.run());
    }

    async fn send(&self, asks: &[&Ask]) -> Result<Vec<Told>, StoreError> {
        self.calls.fetch_add(1, Relaxed);
        self.requests.fetch_add(asks.len() as u64, Relaxed);
        let has_msetex = self.server.has_msetex.load(Relaxed);
        let push_args = |command: &mut _| codec::push_batch(command, asks, has_msetex);
        match self.server.run(&DECIDE, push_args).await? {
            Value::BulkString(reply) => codec::read_told(&reply, asks).ok_or_else(unreadable),
            _ => Err(unreadable()),
        }
    }
}

impl Queue {
    fn take_off(&mut self, now_us: u64) -> u64 {
        self.last_flight += 1;
        self.flights.push(Flight { number: self.last_flight, since_us: now_us });
        self.last_flight
    }

    /// Ends a flight. It may have been given up already.
    fn land(&mut self, number: u64) {
        self.flights.retain(|flight| flight.number != number);
    }

    /// The next call of a flight, if it is worth it.
    fn next_call(&mut self, number: u64, most: usize, now_us: u64) -> Option<Batch> {
        let is_full = self.waiting.len() >= most;
        let flight = self.flights.iter_mut().find(|flight| flight.number == number)?;
        flight.since_us = now_us;
        let batch = if is_full || self.flights.len() == 1 {
            self.next_batch(most)
        } else {
            Batch(Vec::new())
        };
        if batch.0.is_empty() {
            self.land(number);
            return None;
        }
        Some(batch)
    }

    /// The requests that have waited longest, without those that nobody waits for any more.
    fn next_batch(&mut self, most: usize) -> Batch {
        let mut batch = Vec::with_capacity(most.min(self.waiting.len()));
        let mut charges = 0;
        while batch.len() < most
            && let Some(waiting) = self.waiting.pop_front()
        {
            if waiting.answer.is_closed() {
                continue;
            }
            charges += waiting.ask.charges.len();
            if charges > MOST_CHARGES && !batch.is_empty() {
                self.waiting.push_front(waiting);
                break;
            }
            batch.push(waiting);
        }
        Batch(batch)
    }
}

/// The right to have a call in flight, in the hands of a caller. When it is done, or dropped in the
/// middle, the right goes to those who wait, unless another call will take them.
struct Slot {
    lane: Arc<Lane>,
    runtime: Handle,
    flight: u64,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut queue = self.lane.queue.lock();
        let is_last = queue.flights.iter().all(|flight| flight.number == self.flight);
        if queue.waiting.is_empty() || queue.flights.is_empty() || !is_last {
            queue.land(self.flight);
            return;
        }
        drop(queue);
        self.lane.drain(self.flight, &self.runtime);
    }
}

/// The right to have a call in flight, for those who wait.
struct Drain {
    lane: Arc<Lane>,
    flight: u64,
    is_done: bool,
}

impl Drain {
    /// Sends what waits until nothing does, or another call will take it.
    async fn run(mut self) {
        let Lane { queue, limits, clock, .. } = &*self.lane;
        loop {
            let call = queue.lock().next_call(self.flight, limits.batch, clock.now_us());
            let Some(mut batch) = call else {
                self.is_done = true;
                return;
            };
            let asks: Vec<_> = batch.0.iter().map(|waiting| &waiting.ask).collect();
            let sent = timeout(limits.patience, self.lane.send(&asks)).await;
            match sent.unwrap_or(Err(StoreError::Late)) {
                Ok(told) => {
                    for (waiting, told) in batch.0.drain(..).zip(told) {
                        // Whoever does not wait any more has no use for it, nor has anybody else.
                        let _ = waiting.answer.send(Ok(told));
                    }
                }
                Err(error) => batch.fail(&error),
            }
            // Whoever was answered may have another request at once: it goes with the next call.
            yield_now().await;
        }
    }
}

impl Drop for Drain {
    /// If it is not done, its runtime was shut down, or it panicked. Others who wait try anew.
    fn drop(&mut self) {
        if !self.is_done {
            let mut queue = self.lane.queue.lock();
            queue.land(self.flight);
            let waiting = mem::take(&mut queue.waiting);
            drop(queue);
            drop(waiting);
        }
    }
}

/// Requests that are on their way. What becomes of them is told to each.
struct Batch(Vec<Waiting>);

impl Batch {
    fn fail(&mut self, error: &StoreError) {
        for waiting in self.0.drain(..) {
            let _ = waiting.answer.send(Err(error.clone()));
        }
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        self.fail(&StoreError::no_connection("the runtime was shut down"));
    }
}

/// Whatever this is, it is no store.
pub(super) fn unreadable() -> StoreError {
    StoreError::Refused {
        code: "UNREADABLE".to_owned(),
        message: "the script's reply cannot be read; is this a Redis or Valkey server?".to_owned(),
    }
}
