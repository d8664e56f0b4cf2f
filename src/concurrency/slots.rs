//! Who holds the slots of concurrency limits in this process, and who waits for one.

use super::{Adaptive, Limit};
use crate::{
    clock::{Clock, Sleep, whole_us},
    decision::{Outcome, Verdict},
    key::Fingerprint,
    store::{Mode, Slot},
};
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasherDefault, Hash, Hasher},
    mem,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

/// What has to be known of a policy that limits concurrency.
#[derive(Clone, Debug)]
pub(crate) struct SlotPlan {
    pub(crate) name: &'static str,
    pub(crate) limit: Limit,
    /// How many requests of a key may wait, and for how long.
    pub(crate) queue: Option<(usize, Duration)>,
}

/// The slots that are held, by policy and key, in shards with a lock each. There is nothing to sweep: a
/// key is here only as long as a request of it is in flight or waits.
pub(crate) struct Slots {
    shards: Box<[Padded]>,
    plans: Box<[SlotPlan]>,
    clock: Clock,
    /// The limits that are found by latency, each with the index of its policy.
    adaptive: Box<[(u32, Adaptive)]>,
}

/// A lock on cache lines of its own, so that neighbours don't slow each other down.
#[derive(Default)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

type Shard = HashMap<Id, InFlight, BuildHasherDefault<AsItIs>>;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Id {
    policy: u32,
    fingerprint: Fingerprint,
}

#[derive(Default)]
struct InFlight {
    taken: u64,
    /// Those who wait, in the order in which they came.
    line: VecDeque<Arc<Waiter>>,
}

/// Slots that were taken, with how many of them were, by all requests together.
pub(crate) type Taken = SmallVec<[(Slot, u64); 1]>;

const SHARDS: usize = 64;

impl Slots {
    pub(crate) fn new(plans: Vec<SlotPlan>, clock: &Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Padded::default()).collect();
        let adaptive = plans.iter().enumerate().filter_map(|(policy, plan)| match &plan.limit {
            Limit::Adaptive(adaptive) => Some((policy as u32, adaptive.clone())),
            Limit::Fixed(_) => None,
        });
        let adaptive = adaptive.collect();
        Self { shards, plans: plans.into(), clock: clock.clone(), adaptive }
    }

    /// The present, if it matters when requests start.
    pub(crate) fn time_of_start(&self) -> Option<u64> {
        (!self.adaptive.is_empty()).then(|| self.clock.now_us())
    }

    /// Requests that started at that time have been answered.
    pub(crate) fn answered(&self, taken: &Taken, started_us: u64) {
        for (policy, adaptive) in &self.adaptive {
            for (_, in_flight) in taken.iter().filter(|(slot, _)| slot.policy == *policy) {
                adaptive.sample(self.clock.now_us(), started_us, *in_flight);
            }
        }
    }

    /// Gives slots that somebody waits for the limits that are found by now.
    pub(crate) fn bring_to_date(&self, slots: &mut [Slot]) {
        for slot in slots {
            if let Limit::Adaptive(adaptive) = &self.plan(slot.policy).limit {
                slot.limit = adaptive.limit();
            }
        }
    }

    /// Limits that are found by latency may have to be looked at even if nothing is answered.
    pub(crate) fn at(&self, now_us: u64) {
        self.adaptive.iter().for_each(|(_, adaptive)| {
            adaptive.limit_at(now_us);
        });
    }

    /// The index of a policy.
    pub(crate) fn position(&self, policy: &str) -> Option<u32> {
        let position = self.plans.iter().position(|plan| plan.name == policy);
        position.map(|position| position as u32)
    }

    pub(crate) fn plan(&self, policy: u32) -> &SlotPlan {
        &self.plans[policy as usize]
    }

    /// Takes slots if all of them are free and `rest` admits the request as well, which is told whether
    /// they are. Nobody else takes or sees a slot meanwhile. Fills in the outcomes.
    ///
    /// Whoever waits is first: others find no slot free until those have theirs. `place` is that of the
    /// request itself.
    pub(crate) fn take(
        &self,
        slots: &[Slot],
        outcomes: &mut [Outcome],
        mode: Mode,
        place: Option<&Place>,
        rest: impl FnOnce(bool) -> bool,
    ) -> Option<Taken> {
        let mut shards = self.lock(slots);
        let mut fit = true;
        for (slot, outcome) in slots.iter().zip(&mut *outcomes) {
            let held = shards.get(slot).get(&slot.id());
            let taken = held.map_or(0, |held| held.taken);
            let others_wait = held.is_some_and(|held| held.others_wait(place));
            outcome.remaining = slot.limit.saturating_sub(taken);
            outcome.verdict = slot.verdict(outcome.remaining, others_wait);
            fit &= outcome.verdict == Verdict::Admitted;
        }
        if !rest(fit) || !fit {
            return None;
        }
        if mode == Mode::Peek {
            return Some(Taken::new());
        }
        let taken = slots.iter().zip(outcomes).map(|(slot, outcome)| {
            outcome.remaining -= slot.cost;
            (*slot, shards.get(slot).take(slot))
        });
        Some(taken.collect())
    }

    /// Whether others wait for a slot in this process.
    #[cfg(feature = "redis")]
    pub(crate) fn others_wait(&self, slot: &Slot, place: Option<&Place>) -> bool {
        let shard = self.shards[slot.shard()].0.lock();
        shard.get(&slot.id()).is_some_and(|held| held.others_wait(place))
    }

    /// Takes slots whether they are free or not: somebody else has decided that they are.
    #[cfg(feature = "redis")]
    pub(crate) fn take_anyway(&self, slots: &[Slot]) -> Taken {
        let mut shards = self.lock(slots);
        slots.iter().map(|slot| (*slot, shards.get(slot).take(slot))).collect()
    }

    /// Gives slots back that were taken.
    pub(crate) fn release(&self, slot: &Slot) {
        let next = {
            let mut shard = self.shards[slot.shard()].0.lock();
            let Some(held) = shard.get_mut(&slot.id()) else {
                return;
            };
            held.taken = held.taken.saturating_sub(slot.cost);
            let next = held.line.front().and_then(|first| first.call());
            held.is_over().then(|| shard.remove(&slot.id()));
            next
        };
        // Wakers are not ours, so they are called without a lock.
        next.into_iter().for_each(Waker::wake);
    }

    /// A place at the end of the line for a slot, if the policy has a line and that has room.
    pub(crate) fn join(self: &Arc<Self>, slot: &Slot) -> Option<Place> {
        let (most, max_wait) = self.plan(slot.policy).queue?;
        let mut shard = self.shards[slot.shard()].0.lock();
        let line = &mut shard.entry(slot.id()).or_default().line;
        if line.len() >= most {
            return None;
        }
        // Whoever is first looks once more: the slot may have been released just before.
        let waiter = Arc::new(Waiter::new(line.is_empty()));
        line.push_back(waiter.clone());
        drop(shard);
        let until_us = self.clock.now_us().saturating_add(whole_us(max_wait));
        Some(Place { slots: self.clone(), slot: *slot, waiter, until_us, sleep: None })
    }

    /// How many slots of a policy are taken, of all keys.
    pub(crate) fn taken(&self, policy: u32) -> u64 {
        let of_shard = |shard: &Padded| {
            let shard = shard.0.lock();
            let held = shard.iter().filter(|(id, _)| id.policy == policy);
            held.map(|(_, held)| held.taken).sum::<u64>()
        };
        self.shards.iter().map(of_shard).sum()
    }

    /// Locks the shards of slots, in ascending order.
    fn lock(&self, slots: &[Slot]) -> Locked<'_> {
        let mut indices: SmallVec<[usize; 1]> = slots.iter().map(Slot::shard).collect();
        indices.sort_unstable();
        indices.dedup();
        Locked(indices.iter().map(|&index| (index, self.shards[index].0.lock())).collect())
    }
}

struct Locked<'a>(SmallVec<[(usize, MutexGuard<'a, Shard>); 1]>);

impl Locked<'_> {
    fn get(&mut self, slot: &Slot) -> &mut Shard {
        let at = self.0.iter().position(|(index, _)| *index == slot.shard());
        &mut self.0[at.expect("the shards of all slots are locked")].1
    }
}

impl Slot {
    const fn id(&self) -> Id {
        Id { policy: self.policy, fingerprint: self.fingerprint }
    }

    const fn shard(&self) -> usize {
        // The lower half picks the place within the shard.
        self.fingerprint.upper as usize % SHARDS
    }

    /// What the policy says when so many slots are free.
    pub(crate) const fn verdict(&self, free: u64, others_wait: bool) -> Verdict {
        if self.cost == 0 || self.cost <= free && !others_wait {
            Verdict::Admitted
        } else if self.cost <= self.limit {
            Verdict::Full
        } else {
            Verdict::Never
        }
    }
}

trait Take {
    /// Takes slots, and returns how many are taken then.
    fn take(&mut self, slot: &Slot) -> u64;
}

impl Take for Shard {
    fn take(&mut self, slot: &Slot) -> u64 {
        if slot.cost == 0 {
            return self.get(&slot.id()).map_or(0, |held| held.taken);
        }
        let held = self.entry(slot.id()).or_default();
        held.taken = held.taken.saturating_add(slot.cost);
        held.taken
    }
}

impl InFlight {
    /// Whether somebody waits who is not the one at `place`.
    fn others_wait(&self, place: Option<&Place>) -> bool {
        let first = self.line.front();
        first.is_some_and(|first| place.is_none_or(|place| !Arc::ptr_eq(first, &place.waiter)))
    }

    fn is_over(&self) -> bool {
        self.taken == 0 && self.line.is_empty()
    }
}

impl Hash for Id {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.fingerprint.lower ^ u64::from(self.policy));
    }
}

/// Fingerprints are hashes already.
#[derive(Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
    fn write(&mut self, _bytes: &[u8]) {
        unreachable!("ids are hashed as one number");
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

// === waiting ===

/// Somebody in a line.
struct Waiter(Mutex<Call>);

/// Whether somebody was called, and whom to wake for it.
struct Call {
    is_called: bool,
    waker: Option<Waker>,
}

impl Waiter {
    fn new(is_called: bool) -> Self {
        Self(Mutex::new(Call { is_called, waker: None }))
    }

    /// Calls the one who waits to look again. Returns whom to wake.
    fn call(&self) -> Option<Waker> {
        let mut call = self.0.lock();
        call.is_called = true;
        call.waker.take()
    }
}

/// A place in the line for a slot. Dropping it leaves the line.
pub(crate) struct Place {
    slots: Arc<Slots>,
    slot: Slot,
    waiter: Arc<Waiter>,
    /// Until when it waits.
    until_us: u64,
    sleep: Option<Sleep>,
}

impl Place {
    /// Whether it is one in the line for this slot.
    pub(crate) fn is_for(&self, slot: &Slot) -> bool {
        self.slot.id() == slot.id()
    }

    /// Whether the limit may be another one later.
    pub(crate) fn has_moving_limit(&self) -> bool {
        matches!(self.slots.plan(self.slot.policy).limit, Limit::Adaptive(_))
    }

    /// Waits to be called, which those are who are first in line when there may be a slot for them.
    pub(crate) fn poll_called(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut call = self.waiter.0.lock();
        if mem::take(&mut call.is_called) {
            return Poll::Ready(());
        }
        let old = call.waker.replace(cx.waker().clone());
        drop(call);
        // Not under the lock: it may be the last of a task that waits in this line too.
        drop(old);
        Poll::Pending
    }

    /// Waits until it has waited for as long as it may.
    pub(crate) fn poll_time_up(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Self { slots, until_us, sleep, .. } = self;
        let clock = &slots.clock;
        // Made here, where there is a runtime, if there is any.
        let sleep =
            sleep.get_or_insert_with(|| clock.sleep(until_us.saturating_sub(clock.now_us())));
        sleep.poll(cx)
    }

    /// Whether it is first in line.
    pub(crate) fn is_first(&self) -> bool {
        let shard = self.slots.shards[self.slot.shard()].0.lock();
        let held = shard.get(&self.slot.id());
        held.is_some_and(|held| !held.others_wait(Some(self)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let next = {
            let mut shard = self.slots.shards[self.slot.shard()].0.lock();
            let Some(held) = shard.get_mut(&self.slot.id()) else {
                return;
            };
            let line = &mut held.line;
            let Some(at) = line.iter().position(|waiter| Arc::ptr_eq(waiter, &self.waiter)) else {
                return;
            };
            line.remove(at);
            // Whoever is first now may have more luck.
            let next = if at == 0 { line.front().and_then(|first| first.call()) } else { None };
            held.is_over().then(|| shard.remove(&self.slot.id()));
            next
        };
        next.into_iter().for_each(Waker::wake);
    }
}
