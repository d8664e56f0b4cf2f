//! Leases: slots in Redis that requests of this instance hold.
//!
//! A lease is taken by the call that decides its request. A task makes all of them last, in batches, for as
//! long as their requests take, and ends them when those are over. A request that is over only leaves a
//! note, so it needs no runtime and never waits. If this process dies, its leases run out.

use super::{
    codec::{self, Ask, HeldSlots, LeaseId, SlotSet},
    error::StoreError,
    node::Node,
    scripts::LEASES,
};
use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::Value;
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    hash::{BuildHasher, RandomState},
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

/// How the leases of an instance are doing, see
/// [`RedisStore::leases`](super::RedisStore::leases).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseHealth {
    /// How many requests hold slots on leases now.
    pub held: usize,
    /// How many leases are over, of which the server does not know yet.
    pub ending: usize,
    /// How many leases had run out, or were forgotten by the server, before they were made to last. They hold
    /// their slots again since, so there may have been more requests in flight than the limit.
    pub lost: u64,
}

impl LeaseHealth {
    pub(super) const fn and(self, other: Self) -> Self {
        Self {
            held: self.held + other.held,
            ending: self.ending + other.ending,
            lost: self.lost + other.lost,
        }
    }
}

pub(super) struct Leases {
    length: Duration,
    /// What ids are made from.
    seed: RandomState,
    last_id: AtomicU64,
    book: Mutex<Book>,
    /// Told when there is something to end.
    ended: Notify,
    lost: AtomicU64,
}

#[derive(Default)]
struct Book {
    held: HashMap<LeaseId, Entry>,
    /// What is to end.
    ending: Ending,
    /// What the server is being told of.
    leaving: Ending,
    /// What may have been taken after it was ended, and so is to end once more.
    ending_later: Vec<(LeaseId, HeldSlots)>,
    is_kept: bool,
}

/// Leases that are over, with how many slots each held.
type Ending = HashMap<SlotSet, Vec<(LeaseId, u64)>>;

struct Entry {
    slots: Box<[HeldSlots]>,
    was_lost: Arc<AtomicBool>,
}

/// The most leases in a call: the server does nothing else meanwhile.
const BATCH: usize = 500;

/// The most leases that a request ends in passing.
const IN_PASSING: usize = 16;

/// How often leases are made to last within the length of one.
const RENEWALS: u32 = 3;

/// How soon a call that failed is made again.
const PAUSE: Duration = Duration::from_millis(100);

impl Leases {
    pub(super) fn new(length: Duration) -> Self {
        Self {
            length,
            seed: RandomState::new(),
            last_id: AtomicU64::new(0),
            book: Mutex::default(),
            ended: Notify::new(),
            lost: AtomicU64::new(0),
        }
    }

    pub(super) fn length_us(&self) -> u64 {
        self.length.as_micros() as u64
    }

    /// An id that nobody else has: a keyed hash of a count, under a key of the process's own.
    pub(super) fn new_id(&self) -> LeaseId {
        let number = self.last_id.fetch_add(1, Relaxed);
        let mut id = [0; 16];
        for (half, bytes) in id.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&self.seed.hash_one((number, half)).to_le_bytes());
        }
        id
    }

    /// Makes an ask one for a lease. What this process knows to be over is ended by the same call, so
    /// nobody finds a slot taken that was released before.
    pub(super) fn give(node: &Arc<Node>, ask: &mut Ask) -> Lease {
        let this = &node.leases;
        let id = this.new_id();
        let slots: Box<[_]> = ask.slots().collect();
        let mut book = this.book.lock();
        let mut ended = Vec::new();
        for (charge, (set, _)) in &slots {
            // What is on its way already may arrive later than this.
            let leaving = book.leaving.get(set).into_iter().flatten().take(IN_PASSING);
            ask.ended.extend(leaving.map(|(id, slots)| (*charge, *id, *slots)));
            if let Some(ending) = book.ending.get_mut(set) {
                let rest = ending.split_off(ending.len().min(IN_PASSING));
                let taken = mem::replace(ending, rest);
                if ending.is_empty() {
                    book.ending.remove(set);
                }
                ask.ended.extend(taken.iter().map(|(id, slots)| (*charge, *id, *slots)));
                ended.extend(taken.into_iter().map(|(id, slots)| (id, (*set, slots))));
            }
        }
        drop(book);
        ask.lease = Some(id);
        let stage = Stage::Asked { slots: slots.iter().map(|(_, slots)| *slots).collect(), ended };
        Lease { node: node.clone(), id, stage, was_lost: Arc::default() }
    }

    pub(super) fn health(&self) -> LeaseHealth {
        let book = self.book.lock();
        let in_sets = |sets: &Ending| sets.values().map(Vec::len).sum::<usize>();
        LeaseHealth {
            held: book.held.len(),
            ending: in_sets(&book.ending) + in_sets(&book.leaving) + book.ending_later.len(),
            lost: self.lost.load(Relaxed),
        }
    }
}

impl Book {
    /// What the server is to be told of next.
    fn next_to_end(&mut self) -> Vec<(LeaseId, HeldSlots)> {
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(set) = self.ending.keys().next().copied()
        {
            let leases = self.ending.remove(&set).unwrap_or_default();
            batch.extend(leases.iter().map(|(id, slots)| (*id, (set, *slots))));
            self.leaving.insert(set, leases);
        }
        batch
    }

    fn end(&mut self, leases: impl IntoIterator<Item = (LeaseId, HeldSlots)>) {
        for (id, (set, slots)) in leases {
            self.ending.entry(set).or_default().push((id, slots));
        }
    }
}

/// Slots that a request holds, or has asked for. Dropping it ends the lease.
pub(crate) struct Lease {
    node: Arc<Node>,
    id: LeaseId,
    stage: Stage,
    was_lost: Arc<AtomicBool>,
}

enum Stage {
    /// The server may or may not have given them, and ended others.
    Asked {
        slots: Box<[HeldSlots]>,
        ended: Vec<(LeaseId, HeldSlots)>,
    },
    Held,
    Refused,
}

impl Lease {
    /// The server has given the slots.
    pub(super) fn hold(&mut self) {
        if let Stage::Asked { slots, .. } = mem::replace(&mut self.stage, Stage::Held) {
            let entry = Entry { slots, was_lost: self.was_lost.clone() };
            self.node.leases.book.lock().held.insert(self.id, entry);
            self.keep();
        }
    }

    /// The server has given nothing.
    pub(super) fn refuse(mut self) {
        self.stage = Stage::Refused;
    }

    /// Whether the server forgot it for a while.
    pub(crate) fn was_lost(&self) -> bool {
        self.was_lost.load(Relaxed)
    }

    /// Sees to it that somebody keeps the leases, if there is a runtime to do so.
    fn keep(&self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let mut book = self.node.leases.book.lock();
        if !mem::replace(&mut book.is_kept, true) {
            drop(book);
            // A runtime that is shut down drops the task here and now.
            runtime.spawn(
                Keeper { node: self.node.clone(), failing_since: None, is_done: false }.run(),
            );
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let leases = &self.node.leases;
        let mut book = leases.book.lock();
        match mem::replace(&mut self.stage, Stage::Refused) {
            Stage::Held => {
                if let Some(entry) = book.held.remove(&self.id) {
                    book.end(entry.slots.iter().map(|slots| (self.id, *slots)));
                }
            }
            Stage::Asked { slots, ended } => {
                let ending = slots.iter().map(|slots| (self.id, *slots));
                book.end(ending.clone().chain(ended));
                book.ending_later.extend(ending);
            }
            Stage::Refused => return,
        }
        drop(book);
        leases.ended.notify_one();
        self.keep();
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").finish_non_exhaustive()
    }
}

/// What the server is told at once.
#[derive(Default)]
struct Call {
    /// Of a cluster.
    slot: u16,
    lasting: Vec<(LeaseId, HeldSlots)>,
    /// Where those stand among all that are to last.
    indices: Vec<usize>,
    ending: Vec<(LeaseId, HeldSlots)>,
}

/// The task that keeps the leases, while there are any.
struct Keeper {
    node: Arc<Node>,
    /// Since when calls have failed.
    failing_since: Option<Instant>,
    is_done: bool,
}

impl Keeper {
    async fn run(mut self) {
        let node = self.node.clone();
        let Leases { length, ended, book, .. } = &node.leases;
        let mut renewal = Instant::now() + *length / RENEWALS;
        loop {
            let _ = timeout_at(renewal, ended.notified()).await;
            let mut done = self.end().await;
            if Instant::now() >= renewal {
                done &= self.renew().await;
                renewal = Instant::now() + if done { *length / RENEWALS } else { PAUSE };
            }
            if done {
                self.failing_since = None;
            } else {
                let since = *self.failing_since.get_or_insert_with(Instant::now);
                if since.elapsed() > *length {
                    // Whatever the server still knew of has run out by now.
                    let mut book = book.lock();
                    book.ending.clear();
                    book.ending_later.clear();
                }
                sleep(PAUSE).await;
            }
            if self.is_idle() {
                self.is_done = true;
                return;
            }
        }
    }

    /// Ends what is to end.
    async fn end(&self) -> bool {
        let book = &self.node.leases.book;
        loop {
            let batch = book.lock().next_to_end();
            if batch.is_empty() {
                return true;
            }
            let told = self.call(&[], &batch).await;
            let mut book = book.lock();
            book.leaving.clear();
            if told.is_none() {
                book.end(batch);
                return false;
            }
        }
    }

    /// Makes all leases last.
    async fn renew(&self) -> bool {
        let leases = &self.node.leases;
        let (held, later) = {
            let mut book = leases.book.lock();
            let mut held = Vec::new();
            for (id, entry) in &book.held {
                held.extend(entry.slots.iter().map(|slots| (*id, *slots)));
            }
            (held, mem::take(&mut book.ending_later))
        };
        leases.book.lock().end(later);
        let mut done = true;
        for batch in held.chunks(BATCH) {
            // Those that ended meanwhile must not be taken anew.
            let batch: Vec<_> = {
                let book = leases.book.lock();
                batch.iter().filter(|(id, _)| book.held.contains_key(id)).copied().collect()
            };
            match self.call(&batch, &[]).await {
                Some(lost) => self.note_lost(lost.into_iter().filter_map(|index| batch.get(index))),
                None => done = false,
            }
        }
        done & self.end().await
    }

    fn note_lost<'a>(&self, lost: impl Iterator<Item = &'a (LeaseId, HeldSlots)>) {
        let leases = &self.node.leases;
        let book = leases.book.lock();
        let mut count = 0;
        for (id, _) in lost {
            count += 1;
            if let Some(entry) = book.held.get(id) {
                entry.was_lost.store(true, Relaxed);
            }
        }
        drop(book);
        if count > 0 {
            leases.lost.fetch_add(count, Relaxed);
            tracing::warn!(
                target: "tollgate",
                count,
                "leases of requests in flight had run out: for a while, others could have their slots"
            );
        }
    }

    /// Tells the server. Returns which of those that are to last had run out.
    async fn call(
        &self,
        lasting: &[(LeaseId, HeldSlots)],
        ending: &[(LeaseId, HeldSlots)],
    ) -> Option<Vec<usize>> {
        let mut lost = Vec::new();
        let calls = self.calls(lasting, ending);
        let answers = join_all(calls.iter().map(|call| self.call_one(call))).await;
        for (call, answer) in calls.iter().zip(answers) {
            lost.extend(answer?.into_iter().filter_map(|index| call.indices.get(index)));
        }
        Some(lost)
    }

    /// What the server can be told at once: everything, or in a cluster what is in one slot.
    fn calls(
        &self,
        lasting: &[(LeaseId, HeldSlots)],
        ending: &[(LeaseId, HeldSlots)],
    ) -> Vec<Call> {
        let by_slot = self.node.is_of_cluster();
        let place = |(_, (set, _)): &(LeaseId, HeldSlots)| if by_slot { set.place() } else { 0 };
        let mut calls = BTreeMap::<u16, Call>::new();
        for (index, lease) in lasting.iter().enumerate() {
            let call = calls.entry(place(lease)).or_default();
            call.lasting.push(*lease);
            call.indices.push(index);
        }
        for lease in ending {
            calls.entry(place(lease)).or_default().ending.push(*lease);
        }
        let with_slot = |(slot, call)| Call { slot, ..call };
        calls.into_iter().map(with_slot).collect()
    }

    async fn call_one(&self, call: &Call) -> Option<Vec<usize>> {
        let Node { guard, prefix, leases, .. } = &*self.node;
        let Call { slot, lasting, ending, .. } = call;
        let push_args = |command: &mut _| {
            codec::push_leases(command, prefix, leases.length_us(), lasting, ending);
        };
        let run = async {
            match self.node.run_on(|| *slot, &LEASES, push_args).await? {
                Value::BulkString(reply) => {
                    codec::read_lost(&reply).ok_or_else(StoreError::unreadable)
                }
                _ => Err(StoreError::unreadable()),
            }
        };
        guard.call(run).await
    }

    /// Whether there is nothing to keep. Then this task is over.
    fn is_idle(&self) -> bool {
        let mut book = self.node.leases.book.lock();
        let Book { held, ending, ending_later, is_kept, .. } = &mut *book;
        let is_idle = held.is_empty() && ending.is_empty() && ending_later.is_empty();
        if is_idle {
            *is_kept = false;
        }
        is_idle
    }
}

impl Drop for Keeper {
    /// If it is not done, its runtime was shut down, or it panicked. The next request has another one.
    fn drop(&mut self) {
        if !self.is_done {
            self.node.leases.book.lock().is_kept = false;
        }
    }
}
