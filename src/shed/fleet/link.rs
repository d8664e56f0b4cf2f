//! How the instances of a fleet know of each other: each tells a store how many requests it has in
//! flight, and is told how many all have. No request waits for that.

use super::{Shared, View, count::Load};
use crate::{
    background::Background,
    clock::{Clock, Sleep, Stopwatch},
    shed::error::ShedderError,
    store::redis::{FleetSum, RedisStore},
};
use std::{
    future::poll_fn,
    hash::{BuildHasher, RandomState},
    mem,
    pin::pin,
    sync::{Arc, Weak},
    task::Poll,
    time::Duration,
};
use tokio::sync::Notify;

/// The settings that need a store.
pub(super) struct Options {
    pub(super) store: Option<RedisStore>,
    pub(super) tick: Duration,
    pub(super) lease: Duration,
    pub(super) instances: Option<u32>,
    pub(super) clock: Clock,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            store: None,
            tick: Duration::from_millis(200),
            lease: Duration::from_secs(3),
            instances: None,
            clock: Clock::system(),
        }
    }
}

/// What was told and heard.
#[derive(Default)]
pub(super) struct News {
    /// The last that was told, whether it arrived or not.
    told: Load,
    /// Whether the next will be told at once.
    is_urgent: bool,
    /// The last that was heard.
    heard: Option<Heard>,
}

/// What other instances had in flight, at some time.
struct Heard {
    elsewhere: Load,
    /// How many instances there were, this one included.
    instances: u64,
    at_us: u64,
}

impl News {
    /// Whether what was told differs from what is by more than a sixteenth of the capacity; once, until
    /// it is told.
    pub(super) fn becomes_urgent(&mut self, own: Load, capacity: u64) -> bool {
        let is_urgent = own.distance(self.told) > (capacity / 16).max(1);
        is_urgent && !mem::replace(&mut self.is_urgent, true)
    }
}

pub(super) struct Link {
    wire: Arc<Wire>,
    stopwatch: Stopwatch,
    /// By how many the capacity is divided, as long as nothing was heard.
    instances: u64,
    teller: Background,
}

/// What the task that tells needs, even when the shedder is gone.
struct Wire {
    store: RedisStore,
    key: String,
    /// Which instance this is.
    id: String,
    tick_us: u64,
    lease_us: u64,
    clock: Clock,
    wake: Notify,
}

// === impl Link ===

impl Link {
    pub(super) fn new(
        options: Options,
        name: &str,
        check: impl Fn(bool, &'static str, &'static str) -> Result<(), ShedderError>,
    ) -> Result<Option<Self>, ShedderError> {
        let Options { store, tick, lease, instances, clock } = options;
        let ticks = Duration::from_millis(10)..=Duration::from_secs(10);
        check(ticks.contains(&tick), "tick", "10 ms to 10 s")?;
        let leases = 2 * tick..=Duration::from_secs(600);
        check(leases.contains(&lease), "lease", "two ticks at least and 10 minutes at most")?;
        check(instances != Some(0), "instances", "1 or more")?;
        let Some(store) = store else { return Ok(None) };
        store.use_for(false, true);
        let instances = instances.unwrap_or(store.instances()).into();
        let wire = Wire {
            key: format!("{}:{{fleet:{name}}}", store.prefix()),
            id: random_id(),
            tick_us: tick.as_micros() as u64,
            lease_us: lease.as_micros() as u64,
            wake: Notify::new(),
            clock: clock.clone(),
            store,
        };
        let (stopwatch, teller) = (clock.stopwatch(), Background::default());
        Ok(Some(Self { wire: Arc::new(wire), stopwatch, instances, teller }))
    }

    pub(super) fn now_us(&self) -> u64 {
        self.stopwatch.elapsed_us()
    }

    /// What was heard, if it is younger than a lease.
    fn fresh<'a>(&self, news: &'a News, now_us: u64) -> Option<&'a Heard> {
        let lease_us = self.wire.lease_us;
        news.heard.as_ref().filter(|heard| now_us.saturating_sub(heard.at_us) < lease_us)
    }

    pub(super) fn is_fresh(&self, news: &News, now_us: u64) -> bool {
        self.fresh(news, now_us).is_some()
    }

    pub(super) fn view(&self, news: &News, now_us: u64) -> View {
        match self.fresh(news, now_us) {
            Some(heard) => View { elsewhere: heard.elsewhere, divided_by: 1 },
            None => View { elsewhere: Load::default(), divided_by: self.instances(news) },
        }
    }

    pub(super) fn instances(&self, news: &News) -> u64 {
        news.heard.as_ref().map_or(self.instances, |heard| heard.instances)
    }

    #[inline]
    pub(super) fn keep_telling(&self, shared: &Arc<Shared>) {
        self.teller.keep(|| keep_telling(Arc::downgrade(shared), self.wire.clone()));
    }

    /// Has the task look after things before the next tick.
    pub(super) fn wake(&self) {
        self.wire.wake.notify_one();
    }
}

/// Instances don't know of each other when they choose; among so many, no two choose the same.
fn random_id() -> String {
    let random = RandomState::new();
    format!("{:016x}{:016x}", random.hash_one("instance"), random.hash_one("of a fleet"))
}

async fn keep_telling(shared: Weak<Shared>, wire: Arc<Wire>) {
    while let Some((own, began_us)) = shared.upgrade().and_then(|shared| shared.tell()) {
        let sum = wire.store.tell_fleet(
            &wire.key,
            &wire.id,
            wire.lease_us / 1_000,
            [own.critical, own.other],
        );
        let sum = sum.await;
        let spent_us = match shared.upgrade() {
            Some(shared) => shared.hear(own, began_us, sum),
            None => break,
        };
        wire.rest(spent_us).await;
    }
    // If it cannot be heard, it is gone after a lease.
    wire.store.tell_fleet(&wire.key, &wire.id, 0, [0, 0]).await;
}

impl Wire {
    /// Waits for the next tick, or for something urgent, which may come an eighth of a tick after the
    /// last call.
    async fn rest(&self, spent_us: u64) {
        let mut sleep = self.clock.sleep(self.tick_us.saturating_sub(spent_us));
        self.clock.sleep(self.tick_us / 8).await;
        let mut woken = pin!(self.wake.notified());
        poll_fn(|cx| match woken.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => Sleep::poll(&mut sleep, cx),
        })
        .await;
    }
}

impl Shared {
    /// What is to be told now, and when that is.
    fn tell(&self) -> Option<(Load, u64)> {
        let now_us = self.link.as_ref()?.now_us();
        let mut state = self.state.lock();
        state.news.told = state.own;
        state.news.is_urgent = false;
        Some((state.own, now_us))
    }

    /// Takes in what all have in flight, if there was an answer. Returns how long it took.
    fn hear(&self, told: Load, began_us: u64, sum: Option<FleetSum>) -> u64 {
        if let Some(FleetSum { critical, other, instances }) = sum {
            // Only what this instance told is in the sum. What came since then is not, nor is it needed.
            let elsewhere = Load { critical, other }.minus(told);
            let heard = Heard { elsewhere, instances: instances.max(1), at_us: began_us };
            self.state.lock().news.heard = Some(heard);
        }
        self.now_us().saturating_sub(began_us)
    }
}
