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
    /// The most connections.
    pub(super) connections: u32,
    /// Whether a call can be for one slot of a cluster only.
    #[cfg(feature = "cluster")]
    pub(super) by_slot: bool,
}

/// A call has no more charges and slots than this, unless one request has: the script holds so many keys
/// at a time.
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
    ask: Arc<Ask>,
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
    pub(super) async fn ask(self: &Arc<Self>, ask: Arc<Ask>) -> Result<Told, StoreError> {
        loop {
            let receiver = match self.lead_or_wait(&ask) {
                Ok(flight) => {
                    let (lane, runtime) = (self.clone(), Handle::current());
                    let _slot = Slot { lane, runtime, flight };
                    let mut told = self.send(&[&ask]).await?;
                    return told.pop().unwrap_or_else(|| Err(StoreError::unreadable()));
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
        ask: &Arc<Ask>,
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

    /// Has requests decided by one call, or one for each of their slots.
    async fn send(&self, asks: &[&Ask]) -> Result<Vec<Result<Told, StoreError>>, StoreError> {
        self.requests.fetch_add(asks.len() as u64, Relaxed);
        #[cfg(feature = "cluster")]
        if self.limits.by_slot && asks.len() > 1 {
            return Ok(Box::pin(self.send_by_slot(asks)).await);
        }
        self.calls.fetch_add(1, Relaxed);
        let has_msetex = self.server.has_msetex.load(Relaxed);
        let push_args = |command: &mut _| codec::push_batch(command, asks, has_msetex);
        let reply = self.server.run(&DECIDE, push_args).await?;
        let told = codec::read_reply(&reply, asks).ok_or_else(StoreError::unreadable)?;
        Ok(told.into_iter().map(Ok).collect())
    }

    #[cfg(feature = "cluster")]
    async fn send_by_slot(&self, asks: &[&Ask]) -> Vec<Result<Told, StoreError>> {
        let mut groups = Vec::<(u16, Vec<usize>)>::new();
        for (index, ask) in asks.iter().enumerate() {
            let slot = ask.slot();
            match groups.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, group)) => group.push(index),
                None => groups.push((slot, vec![index])),
            }
        }
        self.calls.fetch_add(groups.len() as u64, Relaxed);
        let of_group = |group: &[usize]| group.iter().map(|&index| asks[index]).collect::<Vec<_>>();
        let push_args = |command: &mut _, group: &(u16, Vec<usize>)| {
            codec::push_batch(command, &of_group(&group.1), false);
        };
        let replies = self.server.run_all(&DECIDE, &groups, push_args).await;
        let mut told: Vec<_> = asks.iter().map(|_| Err(StoreError::unreadable())).collect();
        for ((_, group), reply) in groups.iter().zip(replies) {
            let of_group = reply.and_then(|reply| {
                codec::read_reply(&reply, &of_group(group)).ok_or_else(StoreError::unreadable)
            });
            match of_group {
                Ok(of_group) => {
                    for (&index, one) in group.iter().zip(of_group) {
                        told[index] = Ok(one);
                    }
                }
                Err(error) => group.iter().for_each(|&index| told[index] = Err(error.clone())),
            }
        }
        told
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
            charges += waiting.ask.weight();
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
            let asks: Vec<_> = batch.0.iter().map(|waiting| &*waiting.ask).collect();
            let sent = timeout(limits.patience, self.lane.send(&asks)).await;
            match sent.unwrap_or(Err(StoreError::Late)) {
                Ok(told) => {
                    for (waiting, told) in batch.0.drain(..).zip(told) {
                        // Whoever does not wait any more has no use for it, nor has anybody else.
                        let _ = waiting.answer.send(told);
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
