//! A lane: requests of one instance that wait for the server go together.
//!
//! A request that finds nothing in its way is sent at once, by its own caller. While calls are in
//! flight, others gather, and the next call takes them all: there is no timer, and nobody waits
//! longer than for the calls before.

use super::{
    codec::{self, Ask, Told},
    error::StoreError,
    scripts::DECIDE,
    server::Server,
};
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
use tokio::{runtime::Handle, sync::oneshot, time::timeout};

#[derive(Debug)]
pub(super) struct Lane {
    server: Arc<Server>,
    limits: Limits,
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
    in_flight: usize,
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
        Self { server, limits, queue, calls: AtomicU64::new(0), requests: AtomicU64::new(0) }
    }

    /// Has a request decided. Dropping the future takes the request out of the queue; what is on its
    /// way already may still be charged.
    pub(super) async fn ask(self: &Arc<Self>, ask: Ask) -> Result<Told, StoreError> {
        loop {
            let receiver = {
                let mut queue = self.queue.lock();
                if queue.in_flight < self.limits.in_flight {
                    queue.in_flight += 1;
                    None
                } else {
                    let (answer, receiver) = oneshot::channel();
                    queue.waiting.push_back(Waiting { ask: ask.clone(), answer });
                    Some(receiver)
                }
            };
            let Some(receiver) = receiver else {
                let _slot = Slot { lane: self.clone(), runtime: Handle::current() };
                let mut told = self.send(&[&ask]).await?;
                return told.pop().ok_or_else(unreadable);
            };
            // Who was to send it is gone, and it was not sent.
            if let Ok(answer) = receiver.await {
                return answer;
            }
        }
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
/// middle, the right goes to those who wait.
struct Slot {
    lane: Arc<Lane>,
    runtime: Handle,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut queue = self.lane.queue.lock();
        if queue.waiting.is_empty() {
            queue.in_flight -= 1;
            return;
        }
        // A runtime that is shut down drops the task here and now.
        drop(queue);
        self.runtime.spawn(Drain { lane: self.lane.clone(), is_done: false }.run());
    }
}

/// The right to have a call in flight, for those who wait.
struct Drain {
    lane: Arc<Lane>,
    is_done: bool,
}

impl Drain {
    /// Sends what waits until nothing does.
    async fn run(mut self) {
        let Lane { queue, limits, .. } = &*self.lane;
        loop {
            let mut batch = {
                let mut queue = queue.lock();
                let batch = queue.next_batch(limits.batch);
                if batch.0.is_empty() {
                    queue.in_flight -= 1;
                    self.is_done = true;
                    return;
                }
                batch
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
        }
    }
}

impl Drop for Drain {
    /// If it is not done, its runtime was shut down. Others may wait on another one: they try anew.
    fn drop(&mut self) {
        if !self.is_done {
            let mut queue = self.lane.queue.lock();
            queue.in_flight -= 1;
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
fn unreadable() -> StoreError {
    StoreError::Refused {
        code: "UNREADABLE".to_owned(),
        message: "the script's reply cannot be read; is this a Redis or Valkey server?".to_owned(),
    }
}
