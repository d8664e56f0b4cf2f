//! Leases: slots in Redis that requests of this instance hold.
//!
//! A lease is taken by the call that decides its request. A task makes all of them last, in batches, for as
//! long as their requests take, and ends them when those are over (`keeper.rs`). A request that is over only
//! leaves a note, so it needs no runtime and never waits. If this process dies, its leases run out.

use super::{
    codec::{Ask, HeldSlots, LeaseId, SlotSet},
    keeper::Keeper,
    node::Node,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    mem,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{runtime::Handle, sync::Notify, time::Instant};

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
    pub(super) length: Duration,
    /// What ids are made from.
    seed: RandomState,
    last_id: AtomicU64,
    pub(super) book: Mutex<Book>,
    /// Told when there is something to end.
    pub(super) ended: Notify,
    pub(super) lost: AtomicU64,
}

/// What is known of the leases of this instance on one node.
#[derive(Default)]
pub(super) struct Book {
    pub(super) held: HashMap<LeaseId, Entry>,
    /// What is to end.
    pub(super) ending: Ending,
    /// What the server is being told of.
    leaving: Ending,
    /// What may have been taken after it was ended, and so is to end once more.
    pub(super) ending_later: Vec<Ended>,
    /// Who keeps the leases, and when that was last heard of.
    keeper: Option<(u64, Instant)>,
    last_keeper: u64,
}

type Ending = HashMap<SlotSet, Vec<Ended>>;

/// A lease that is over.
#[derive(Clone, Copy)]
pub(super) struct Ended {
    pub(super) id: LeaseId,
    pub(super) slots: HeldSlots,
    /// When it was over at the latest.
    since: Instant,
}

pub(super) struct Entry {
    pub(super) slots: Box<[HeldSlots]>,
    pub(super) was_lost: Arc<AtomicBool>,
}

/// The most leases in a call, and the most slots, but for those of one lease: the server does nothing
/// else meanwhile.
pub(super) const BATCH: usize = 500;
pub(super) const BATCH_SLOTS: u64 = 5_000;

/// The most leases of a set that a request ends in passing, and of all its sets.
const IN_PASSING: usize = 16;
const IN_PASSING_IN_ALL: usize = 255;

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
    fn new_id(&self) -> LeaseId {
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
            let room = |ask: &Ask| IN_PASSING.min(IN_PASSING_IN_ALL - ask.ended.len());
            // What is on its way already may arrive later than this.
            let leaving = book.leaving.get(set).into_iter().flatten().take(room(ask));
            ask.ended.extend(leaving.map(|ended| (*charge, ended.id, ended.slots.1)));
            let taken = book.take(*set, room(ask));
            ask.ended.extend(taken.iter().map(|ended| (*charge, ended.id, ended.slots.1)));
            ended.extend(taken);
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

impl Ended {
    pub(super) fn now(id: LeaseId, slots: HeldSlots) -> Self {
        Self { id, slots, since: Instant::now() }
    }
}

impl Book {
    pub(super) fn end(&mut self, leases: impl IntoIterator<Item = Ended>) {
        for ended in leases {
            self.ending.entry(ended.slots.0).or_default().push(ended);
        }
    }

    /// The first so many of those of a set that are to end.
    fn take(&mut self, set: SlotSet, most: usize) -> Vec<Ended> {
        let Some(ending) = self.ending.get_mut(&set) else {
            return Vec::new();
        };
        let rest = ending.split_off(ending.len().min(most));
        let taken = mem::replace(ending, rest);
        if ending.is_empty() {
            self.ending.remove(&set);
        }
        taken
    }

    /// What the server is to be told of next.
    pub(super) fn next_to_end(&mut self) -> Vec<Ended> {
        let (mut batch, mut slots) = (Vec::new(), 0);
        while batch.len() < BATCH
            && slots < BATCH_SLOTS
            && let Some((set, ending)) = self.ending.iter().next()
        {
            let (set, mut most) = (*set, 0);
            for ended in ending.iter().take(BATCH - batch.len()) {
                if slots >= BATCH_SLOTS {
                    break;
                }
                slots += ended.slots.1;
                most += 1;
            }
            let taken = self.take(set, most);
            batch.extend_from_slice(&taken);
            self.leaving.entry(set).or_default().extend(taken);
        }
        batch
    }

    /// The server has been told, but of those that failed.
    pub(super) fn told(&mut self, failed: Vec<Ended>) {
        self.leaving.clear();
        self.end(failed);
    }

    /// Nobody tells the server any more.
    pub(super) fn untold(&mut self) {
        let leaving = mem::take(&mut self.leaving);
        self.end(leaving.into_values().flatten());
    }

    /// Forgets what has run out by itself, for it was over so long ago.
    pub(super) fn forget(&mut self, length: Duration) {
        self.ending.retain(|_, ending| {
            ending.retain(|ended| ended.since.elapsed() <= length);
            !ending.is_empty()
        });
        self.ending_later.retain(|ended| ended.since.elapsed() <= length);
    }

    /// The keeper is still there. False if another one has taken its place.
    pub(super) fn beat(&mut self, number: u64) -> bool {
        let is_keeper = self.keeper.is_some_and(|(keeper, _)| keeper == number);
        if is_keeper {
            self.keeper = Some((number, Instant::now()));
        }
        is_keeper
    }

    /// The keeper goes.
    pub(super) fn leave(&mut self, number: u64) {
        if self.beat(number) {
            self.keeper = None;
        }
    }

    /// The number of a new keeper, if there is none, or none that was heard of for so long.
    fn hire(&mut self, patience: Duration) -> Option<u64> {
        if self.keeper.is_some_and(|(_, beat)| beat.elapsed() < patience) {
            return None;
        }
        self.last_keeper += 1;
        self.keeper = Some((self.last_keeper, Instant::now()));
        Some(self.last_keeper)
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
        ended: Vec<Ended>,
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

    /// Sees to it that somebody keeps the leases, if there is a runtime to do so. The runtime of whoever
    /// does so now may not be driven any more.
    fn keep(&self) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let patience = 2 * (self.node.leases.length + self.node.deadline);
        let hired = self.node.leases.book.lock().hire(patience);
        if let Some(number) = hired {
            // A runtime that is shut down drops the task here and now.
            runtime.spawn(Keeper::new(self.node.clone(), number).run());
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
                    book.end(entry.slots.iter().map(|slots| Ended::now(self.id, *slots)));
                }
            }
            Stage::Asked { slots, ended } => {
                let ending = slots.iter().map(|slots| Ended::now(self.id, *slots));
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
