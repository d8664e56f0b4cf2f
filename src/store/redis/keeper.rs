//! The task that makes leases last for as long as their requests take, and ends them when those are over.

use super::{
    codec::{self, HeldSlots, LeaseId},
    error::StoreError,
    leases::{BATCH, BATCH_SLOTS, Ended, Leases},
    node::Node,
    scripts::LEASES,
};
use futures_util::future::join_all;
use redis::Value;
use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};
use tokio::time::{Instant, sleep, timeout_at};

/// It runs while there are leases.
pub(super) struct Keeper {
    node: Arc<Node>,
    number: u64,
}

/// How often leases are made to last within the length of one.
const RENEWALS: u32 = 3;

/// How soon a call that failed is made again.
const PAUSE: Duration = Duration::from_millis(100);

/// What a server is told at once.
#[derive(Default)]
struct Call {
    /// Of a cluster.
    slot: u16,
    lasting: Vec<(LeaseId, HeldSlots)>,
    ending: Vec<Ended>,
}

/// What came of telling.
#[derive(Default)]
struct Told {
    /// Which of those that were to last had run out.
    lost: Vec<LeaseId>,
    /// Whether all are known to last.
    all_last: bool,
    /// Which of those that were to end may not have ended.
    failed: Vec<Ended>,
}

impl Keeper {
    pub(super) fn new(node: Arc<Node>, number: u64) -> Self {
        Self { node, number }
    }

    pub(super) async fn run(self) {
        let Leases { length, ended, book, .. } = &self.node.leases;
        let mut renewal = Instant::now() + *length / RENEWALS;
        loop {
            let _ = timeout_at(renewal, ended.notified()).await;
            // Somebody else may have taken its place, if its runtime stood still.
            if !book.lock().beat(self.number) {
                return;
            }
            let mut done = self.end(renewal).await;
            if Instant::now() >= renewal {
                done &= self.renew().await;
                renewal = Instant::now() + if done { *length / RENEWALS } else { PAUSE };
            }
            if !done {
                book.lock().forget(*length);
                sleep(PAUSE).await;
            }
            let mut book = book.lock();
            if !book.ending.is_empty() {
                ended.notify_one();
            } else if book.held.is_empty() && book.ending_later.is_empty() {
                book.leave(self.number);
                return;
            }
        }
    }

    /// Ends what is to end, until it is time for others to be made to last. False if something failed.
    async fn end(&self, until: Instant) -> bool {
        let book = &self.node.leases.book;
        loop {
            let batch = book.lock().next_to_end();
            if batch.is_empty() {
                return true;
            }
            let Told { failed, .. } = self.tell(&[], &batch).await;
            let done = failed.is_empty();
            book.lock().told(failed);
            if !done || Instant::now() >= until {
                return done;
            }
        }
    }

    /// Makes all leases last. False if something failed.
    async fn renew(&self) -> bool {
        let Leases { book, .. } = &self.node.leases;
        let mut held = Vec::new();
        {
            let mut book = book.lock();
            for (id, entry) in &book.held {
                held.extend(entry.slots.iter().map(|slots| (*id, *slots)));
            }
            let later = mem::take(&mut book.ending_later);
            book.end(later);
        }
        let mut done = true;
        for batch in batches(&held) {
            // Those that are over by now must not be taken anew.
            let is_held = |(id, _): &&(LeaseId, HeldSlots)| book.lock().held.contains_key(id);
            let batch: Vec<_> = batch.iter().filter(is_held).copied().collect();
            let told = self.tell(&batch, &[]).await;
            self.note_lost(&told.lost);
            done &= told.all_last;
            let mut book = book.lock();
            book.beat(self.number);
            // Nor must those that were over while the call was on its way.
            let over = batch.iter().filter(|(id, _)| !book.held.contains_key(id));
            let over: Vec<_> = over.map(|(id, slots)| Ended::now(*id, *slots)).collect();
            if !told.all_last {
                book.ending_later.extend_from_slice(&over);
            }
            book.end(over);
        }
        done
    }

    fn note_lost(&self, lost: &[LeaseId]) {
        if lost.is_empty() {
            return;
        }
        let leases = &self.node.leases;
        let book = leases.book.lock();
        for entry in lost.iter().filter_map(|id| book.held.get(id)) {
            entry.was_lost.store(true, Relaxed);
        }
        drop(book);
        leases.lost.fetch_add(lost.len() as u64, Relaxed);
        tracing::warn!(
            target: "tollgate",
            count = lost.len(),
            "leases of requests in flight had run out: for a while, others could have their slots"
        );
    }

    async fn tell(&self, lasting: &[(LeaseId, HeldSlots)], ending: &[Ended]) -> Told {
        let calls = self.calls(lasting, ending);
        let answers = join_all(calls.iter().map(|call| self.call(call))).await;
        let mut told = Told { all_last: true, ..Told::default() };
        for (call, answer) in calls.into_iter().zip(answers) {
            match answer {
                Some(lost) => {
                    let lost = lost.into_iter().filter_map(|index| call.lasting.get(index));
                    told.lost.extend(lost.map(|(id, _)| *id));
                }
                None => {
                    told.all_last &= call.lasting.is_empty();
                    told.failed.extend(call.ending);
                }
            }
        }
        told
    }

    /// What a server can be told at once: everything, or in a cluster what is in one slot.
    fn calls(&self, lasting: &[(LeaseId, HeldSlots)], ending: &[Ended]) -> Vec<Call> {
        let by_slot = self.node.is_of_cluster();
        let slot_of = |(set, _): &HeldSlots| if by_slot { set.place() } else { 0 };
        let mut calls = BTreeMap::<u16, Call>::new();
        for lease in lasting {
            calls.entry(slot_of(&lease.1)).or_default().lasting.push(*lease);
        }
        for ended in ending {
            calls.entry(slot_of(&ended.slots)).or_default().ending.push(*ended);
        }
        calls.into_iter().map(|(slot, call)| Call { slot, ..call }).collect()
    }

    /// Returns the indices of those that had run out. `None` if there was no answer.
    async fn call(&self, call: &Call) -> Option<Vec<usize>> {
        let Node { prefix, leases, .. } = &*self.node;
        let Call { slot, lasting, ending } = call;
        let ending: Vec<_> = ending.iter().map(|ended| (ended.id, ended.slots)).collect();
        let push_args = |command: &mut _| {
            codec::push_leases(command, prefix, leases.length_us(), lasting, &ending);
        };
        // In a cluster, that may be another node than the one that gave the lease.
        let node = self.node.owner_of(*slot).await;
        let run = async {
            match node.run_on(|| *slot, &LEASES, push_args).await? {
                Value::BulkString(reply) => {
                    codec::read_lost(&reply).ok_or_else(StoreError::unreadable)
                }
                _ => Err(StoreError::unreadable()),
            }
        };
        node.guard.call(run).await
    }
}

impl Drop for Keeper {
    /// It is done, or its runtime was shut down, or it panicked. The next request has another one.
    fn drop(&mut self) {
        let mut book = self.node.leases.book.lock();
        if book.beat(self.number) {
            book.untold();
            book.leave(self.number);
        }
    }
}

/// Parts of a list that are small enough for a call.
fn batches(mut leases: &[(LeaseId, HeldSlots)]) -> impl Iterator<Item = &[(LeaseId, HeldSlots)]> {
    std::iter::from_fn(move || {
        let (mut count, mut slots) = (0, 0);
        while count < leases.len().min(BATCH) && slots < BATCH_SLOTS {
            slots += leases[count].1.1;
            count += 1;
        }
        let (batch, rest) = leases.split_at(count);
        leases = rest;
        (count > 0).then_some(batch)
    })
}
