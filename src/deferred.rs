//! Deciding by what is counted here, and telling a store elsewhere of it in the background.
//!
//! Every interval a task sends what was admitted since, summed up by key and policy, and has it counted
//! whether there is room for it or not. The answers tell how things stood, and with what was sent and what
//! was admitted meanwhile on top, that takes the place of the state here: so an instance's state is that
//! of the fleet as of its last answer, and its own of now.

use crate::{
    background::Background,
    clock::Clock,
    decision::{Outcome, Outcomes},
    key::Fingerprint,
    remote::{Count, FallenBack, Portion, Remote},
    store::{
        Bill, Mode, Refunds,
        local::Local,
        redis::{DeferredStore, Tally},
    },
};
use futures_util::stream::{StreamExt, iter};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::{
    collections::HashMap,
    fmt, mem,
    sync::{Arc, Weak},
};
use tokio::sync::Mutex as AsyncMutex;

pub(crate) struct Deferred {
    counts: Arc<Counts>,
    teller: Background,
    /// When this is gone, the task tells what is left, and ends.
    in_use: Arc<()>,
}

struct Counts {
    remote: Remote,
    /// The whole limit of every policy, as far as its state is known here.
    local: Local,
    untold: Box<[Mutex<Untold>]>,
    /// Sums are sent, and forgotten, by one at a time.
    telling: AsyncMutex<()>,
    clock: Clock,
    interval_us: u64,
    tally: Arc<Tally>,
}

/// What the store was not told yet, of some identities.
#[derive(Default)]
struct Untold {
    identities: HashMap<Identity, Sums>,
    /// When the oldest of it was admitted.
    since_us: u64,
}

/// A key space, and a key in it.
type Identity = (u32, Fingerprint);

type Sums = SmallVec<[Sum; 1]>;

/// What a policy admitted of one identity.
struct Sum {
    count: Count,
    /// What was given back that may have been told before: how much, and when that was charged.
    given_back: Vec<(u64, u64)>,
}

/// Requests lock one of so many parts of what is untold.
const PARTS: usize = 16;

/// The most identities in each of them.
const MOST_UNTOLD: usize = 1 << 14;

/// How many identities are on their way to the store at a time: some batches.
const AT_ONCE: usize = 256;

impl Deferred {
    pub(crate) fn new(store: &DeferredStore, remote: Remote, local: Local, clock: Clock) -> Self {
        let counts = Counts {
            remote,
            local,
            untold: (0..PARTS).map(|_| Mutex::default()).collect(),
            telling: AsyncMutex::new(()),
            clock,
            interval_us: store.interval.as_micros() as u64,
            tally: store.tally.clone(),
        };
        let (counts, teller) = (Arc::new(counts), Background::default());
        Self { counts, teller, in_use: Arc::default() }
    }

    /// Makes of a bill what failure modes make of it, if not all that it is about can be asked. The error
    /// is a policy that lets nothing pass then.
    pub(crate) fn stand_in(
        &self,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
        now_us: u64,
    ) -> Result<(), &'static str> {
        if self.counts.remote.reaches(bill) {
            return Ok(());
        }
        // Telling it of nothing finds out whether it is back.
        self.note(bill, |_| 0, now_us);
        self.fall_back(bill, outcomes)
    }

    /// The same in any case.
    pub(crate) fn fall_back(
        &self,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
    ) -> Result<(), &'static str> {
        let slots = mem::take(&mut bill.slots);
        let of_slots: Outcomes = outcomes.drain(bill.charges.len()..).collect();
        let portion = Portion { bill: mem::take(bill), outcomes: mem::take(outcomes) };
        let FallenBack { bill: rest, outcomes: of_rest, .. } =
            self.counts.remote.fall_back(&portion)?;
        (*bill, *outcomes) = (rest, of_rest);
        (bill.slots, bill.stands_in) = (slots, true);
        outcomes.extend(of_slots);
        Ok(())
    }

    /// Decides a bill by what is known here.
    pub(crate) fn acquire(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        now_us: u64,
        mode: Mode,
    ) -> bool {
        let admitted = self.counts.local.acquire(bill, outcomes, now_us, mode);
        if admitted && mode == Mode::Charge {
            self.note(bill, |index| outcomes[index].cost, now_us);
        }
        admitted
    }

    /// Notes what each charge of a bill is to be told of.
    fn note(&self, bill: &Bill, cost: impl Fn(usize) -> u64, now_us: u64) {
        self.counts.note(bill, cost, now_us);
        self.teller.keep(|| keep_telling(self.counts.clone(), Arc::downgrade(&self.in_use)));
    }

    /// Gives back what a bill was charged at `spent_us`, as its outcomes tell.
    pub(crate) fn refund(
        &self,
        bill: &Bill,
        outcomes: &mut [Outcome],
        now_us: u64,
        spent_us: u64,
    ) -> Refunds {
        let refunds = self.counts.local.refund(bill, outcomes, now_us, spent_us);
        self.note(bill, |_| 0, now_us);
        self.counts.give_back(bill, outcomes, spent_us);
        refunds
    }

    /// Forgets all that is known here of those whom a bill is for. The future has the store forget it.
    pub(crate) fn reset(
        &self,
        bill: Bill,
        outcomes: Outcomes,
    ) -> impl Future<Output = Option<()>> + Send + 'static {
        let counts = self.counts.clone();
        counts.forget(&bill);
        async move {
            // What is on its way would come back.
            let _turn = counts.telling.lock().await;
            counts.forget(&bill);
            counts.remote.reset(&bill, &outcomes).await
        }
    }

    /// Tells the store all that it was not told yet.
    pub(crate) fn flush(&self) -> impl Future<Output = ()> + Send + 'static {
        let counts = self.counts.clone();
        async move { counts.tell().await }
    }

    pub(crate) fn tracked_keys(&self) -> usize {
        self.counts.local.tracked_keys()
    }

    /// The policy that stands for all where none is to blame.
    pub(crate) fn first_policy(&self) -> &'static str {
        self.counts.remote.first_policy()
    }
}

async fn keep_telling(counts: Arc<Counts>, in_use: Weak<()>) {
    let mut spent_us = 0;
    loop {
        counts.clock.sleep(counts.interval_us.saturating_sub(spent_us)).await;
        let is_last = in_use.strong_count() == 0;
        let began_us = counts.clock.now_us();
        counts.tell().await;
        if is_last {
            return;
        }
        spent_us = counts.clock.now_us().saturating_sub(began_us);
    }
}

impl Counts {
    fn note(&self, bill: &Bill, cost: impl Fn(usize) -> u64, now_us: u64) {
        for (index, charge) in bill.charges.iter().enumerate() {
            let identity = (charge.space, charge.fingerprint);
            let mut untold = self.untold(identity).lock();
            let Untold { identities, since_us } = &mut *untold;
            if identities.is_empty() {
                *since_us = now_us;
            }
            if identities.len() >= MOST_UNTOLD && !identities.contains_key(&identity) {
                self.tally.lost(1);
                continue;
            }
            let sums = identities.entry(identity).or_default();
            let (rule, cost) = (charge.rule(&bill.rules).copied(), cost(index));
            match sums.iter_mut().find(|sum| sum.count.charge.policy == charge.policy) {
                Some(Sum { count, .. }) => {
                    (count.rule, count.cost) = (rule, count.cost.saturating_add(cost));
                }
                None => {
                    let count = Count { charge: *charge, rule, cost };
                    sums.push(Sum { count, given_back: Vec::new() });
                }
            }
        }
    }

    /// Takes out of the sums what was given back, or notes that it is to be given back.
    fn give_back(&self, bill: &Bill, outcomes: &[Outcome], spent_us: u64) {
        for (charge, outcome) in bill.charges.iter().zip(outcomes) {
            let identity = (charge.space, charge.fingerprint);
            let mut untold = self.untold(identity).lock();
            let sums = untold.identities.get_mut(&identity).into_iter().flatten();
            for Sum { count, given_back } in
                sums.filter(|sum| sum.count.charge.policy == charge.policy)
            {
                let still_here = count.cost.min(outcome.cost);
                count.cost -= still_here;
                if still_here < outcome.cost {
                    given_back.push((outcome.cost - still_here, spent_us));
                }
            }
        }
    }

    async fn tell(&self) {
        let _turn = self.telling.lock().await;
        let (mut identities, mut oldest_us) = (Vec::new(), u64::MAX);
        for untold in &self.untold {
            let Untold { identities: some, since_us } = mem::take(&mut *untold.lock());
            if !some.is_empty() {
                oldest_us = oldest_us.min(since_us);
                identities.extend(some);
            }
        }
        if identities.is_empty() {
            return;
        }
        iter(identities)
            .for_each_concurrent(AT_ONCE, |(identity, sums)| self.tell_of(identity, sums))
            .await;
        self.tally.lagged(self.clock.now_us().saturating_sub(oldest_us));
    }

    async fn tell_of(&self, identity: Identity, sums: Sums) {
        for Sum { count, given_back } in &sums {
            for &(cost, spent_us) in given_back {
                if self.remote.uncount(count, cost, spent_us).await.is_none() {
                    self.tally.lost(1);
                }
            }
        }
        let counts: SmallVec<[Count; 1]> = sums.iter().map(|sum| sum.count).collect();
        let Some(told) = self.remote.count(&counts).await else {
            self.tally.lost(counts.len());
            return;
        };
        self.tally.told(counts.len());
        let now_us = self.clock.now_us();
        for (Count { charge, rule, cost }, numbers) in counts.iter().zip(&told.states) {
            let meanwhile = self.untold_of(identity, charge.policy);
            let told = (*numbers, told.time_us);
            let cost = cost.saturating_add(meanwhile);
            self.local.take_in(charge, rule.as_ref(), told, now_us, cost);
        }
    }

    fn forget(&self, bill: &Bill) {
        for charge in &bill.charges {
            let identity = (charge.space, charge.fingerprint);
            self.untold(identity).lock().identities.remove(&identity);
        }
        self.local.reset(bill);
    }

    fn untold(&self, (_, fingerprint): Identity) -> &Mutex<Untold> {
        &self.untold[fingerprint.upper as usize % PARTS]
    }

    /// What the store was not told yet of one policy.
    fn untold_of(&self, identity: Identity, policy: u32) -> u64 {
        let untold = self.untold(identity).lock();
        let sums = untold.identities.get(&identity).into_iter().flatten();
        sums.filter(|sum| sum.count.charge.policy == policy).map(|sum| sum.count.cost).sum()
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Deferred")
            .field("interval_us", &self.counts.interval_us)
            .finish_non_exhaustive()
    }
}
