//! The fleet usage load shedder: a part of the fleet's capacity is kept for critical requests.

mod count;
#[cfg(feature = "redis")]
mod link;

use super::{Aboard, Held, Shed, error::ShedderError, law::ONE, patience::Patience};
#[cfg(feature = "redis")]
use crate::store::redis::RedisStore;
use crate::{
    name::{intern, is_name},
    priority::Priority,
    random::Dice,
};
use count::{Bounds, Load};
#[cfg(feature = "redis")]
use link::{Link, News, Options};
use parking_lot::Mutex;
#[cfg(feature = "redis")]
use parking_lot::MutexGuard;
use std::{
    borrow::Cow,
    fmt,
    ops::RangeInclusive,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// Keeps a part of the fleet's capacity for critical requests: others are turned away when too much
/// is in flight. See [the module](super) for how.
///
/// Clones share everything. Shedders that are built one by one count as an instance of the fleet each,
/// also in one process.
///
/// ```
/// use tollgate::{Priority, shed::FleetShedder};
///
/// # fn main() -> Result<(), tollgate::shed::ShedderError> {
/// // Without a store, the fleet is this process.
/// let fleet = FleetShedder::builder("fleet", 10).reserve(0.3).build()?;
/// let reads: Vec<_> = (0..7).map(|_| fleet.admit(Priority::Read)).collect::<Result<_, _>>().unwrap();
/// assert!(fleet.admit(Priority::Read).is_err());
/// assert!(fleet.admit(Priority::Critical).is_ok());
/// drop(reads);
/// assert!(fleet.admit(Priority::Read).is_ok());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct FleetShedder {
    shared: Arc<Shared>,
}

/// Puts a [`FleetShedder`] together.
pub struct FleetShedderBuilder {
    name: Cow<'static, str>,
    capacity: u32,
    reserve: f64,
    cap_critical: bool,
    critical: Priority,
    retry_after: RangeInclusive<Duration>,
    #[cfg(feature = "redis")]
    options: Options,
}

struct Shared {
    name: &'static str,
    bounds: Bounds,
    critical: Priority,
    patience: Patience,
    dice: Dice,
    turned_away: AtomicU64,
    state: Mutex<State>,
    #[cfg(feature = "redis")]
    link: Option<Link>,
}

#[derive(Default)]
struct State {
    /// What this instance has in flight.
    own: Load,
    #[cfg(feature = "redis")]
    news: News,
}

/// What a decision goes by.
struct View {
    /// What other instances have in flight.
    elsewhere: Load,
    /// By how many the capacity is divided.
    divided_by: u64,
}

// === impl FleetShedder ===

impl FleetShedder {
    /// A shedder of this name for a fleet that can have so many requests in flight, 1 or more. The name
    /// has to be of the form `[A-Za-z][A-Za-z0-9_.-]{0,63}`, and is the same on all instances.
    #[must_use]
    pub fn builder(name: impl Into<Cow<'static, str>>, capacity: u32) -> FleetShedderBuilder {
        FleetShedderBuilder {
            name: name.into(),
            capacity,
            reserve: 0.2,
            cap_critical: false,
            critical: Priority::Critical,
            retry_after: Duration::from_secs(1)..=Duration::from_secs(3),
            #[cfg(feature = "redis")]
            options: Options::default(),
        }
    }

    /// Lets a request in, or turns it away. What is returned has to be kept until the request is over.
    ///
    /// With a store, the first call in a tokio runtime starts to tell the fleet from there.
    ///
    /// # Errors
    ///
    /// [`Shed`] if there is no room for a request of this priority.
    pub fn admit(&self, priority: Priority) -> Result<Aboard, Shed> {
        self.seat(priority).map(|seat| Aboard::one(Held::Fleet(seat)))
    }

    #[inline]
    pub(super) fn seat(&self, priority: Priority) -> Result<Seat, Shed> {
        let shared = &self.shared;
        let is_critical = priority >= shared.critical;
        let is_in = shared.enter(is_critical);
        // What is told first has the first request in it.
        #[cfg(feature = "redis")]
        if let Some(link) = &shared.link {
            link.keep_telling(shared);
        }
        if is_in {
            return Ok(Seat { shared: shared.clone(), is_critical });
        }
        shared.turned_away.fetch_add(1, Relaxed);
        let retry_after_us = shared.patience.draw_us(&shared.dice);
        Err(Shed { shedder: shared.name, retry_after_us })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.shared.name
    }

    /// How many requests this instance has turned away so far.
    #[must_use]
    pub fn turned_away(&self) -> u64 {
        self.shared.turned_away.load(Relaxed)
    }

    /// How many requests can be in flight in the fleet.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.shared.bounds.capacity
    }

    /// How many requests are in flight, those of other instances as of when they were last heard of. When
    /// this instance decides [by its share](Self::is_alone), it is only its own.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        let now_us = self.shared.now_us();
        let state = self.shared.state.lock();
        self.shared.view(&state, now_us).elsewhere.plus(state.own).total()
    }

    /// How many requests this instance has in flight.
    #[must_use]
    pub fn own_in_flight(&self) -> u64 {
        self.shared.state.lock().own.total()
    }

    /// Whether it has a store and heard nothing from it for a lease, and so decides by this instance's
    /// share of the capacity.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        #[cfg(feature = "redis")]
        if let Some(link) = &self.shared.link {
            let now_us = link.now_us();
            return !link.is_fresh(&self.shared.state.lock().news, now_us);
        }
        false
    }

    /// How many instances there are, as of when they were last heard of.
    #[must_use]
    pub fn instances(&self) -> u64 {
        #[cfg(feature = "redis")]
        if let Some(link) = &self.shared.link {
            return link.instances(&self.shared.state.lock().news);
        }
        1
    }
}

impl Shared {
    /// The time by which news get old.
    fn now_us(&self) -> u64 {
        #[cfg(feature = "redis")]
        if let Some(link) = &self.link {
            return link.now_us();
        }
        0
    }

    #[cfg_attr(not(feature = "redis"), expect(unused_variables, reason = "there are no news"))]
    fn view(&self, state: &State, now_us: u64) -> View {
        #[cfg(feature = "redis")]
        if let Some(link) = &self.link {
            return link.view(&state.news, now_us);
        }
        View { elsewhere: Load::default(), divided_by: 1 }
    }

    fn enter(&self, is_critical: bool) -> bool {
        let now_us = self.now_us();
        let mut state = self.state.lock();
        let View { elsewhere, divided_by } = self.view(&state, now_us);
        let bounds = self.bounds.shared_by(divided_by);
        if !bounds.admit(elsewhere.plus(state.own), is_critical) {
            return false;
        }
        *state.own.of(is_critical) += 1;
        #[cfg(feature = "redis")]
        self.after_change(state);
        true
    }

    fn leave(&self, is_critical: bool) {
        let mut state = self.state.lock();
        *state.own.of(is_critical) -= 1;
        #[cfg(feature = "redis")]
        self.after_change(state);
    }

    /// The fleet should know at once of what is a lot.
    #[cfg(feature = "redis")]
    #[inline]
    fn after_change(&self, mut state: MutexGuard<'_, State>) {
        let Some(link) = &self.link else { return };
        let own = state.own;
        if state.news.becomes_urgent(own, self.bounds.capacity) {
            drop(state);
            link.wake();
        }
    }
}

#[cfg(feature = "redis")]
impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            // Its task finds out that nobody is left, and says goodbye.
            link.wake();
        }
    }
}

impl fmt::Debug for FleetShedder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetShedder")
            .field("name", &self.name())
            .field("capacity", &self.capacity())
            .field("in_flight", &self.in_flight())
            .field("own_in_flight", &self.own_in_flight())
            .finish_non_exhaustive()
    }
}

/// The place of a request that was let in.
pub(super) struct Seat {
    shared: Arc<Shared>,
    is_critical: bool,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.shared.leave(self.is_critical);
    }
}

// === impl FleetShedderBuilder ===

impl FleetShedderBuilder {
    /// What share of the capacity is kept for critical requests, from 0 to less than 1. It is rounded up
    /// to whole requests, and leaves others one at least. Default: 0.2.
    #[must_use]
    pub fn reserve(mut self, share: f64) -> Self {
        self.reserve = share;
        self
    }

    /// Whether critical requests are turned away, too, when the whole capacity is in use. Default: no,
    /// they are always let in.
    #[must_use]
    pub fn cap_critical(mut self, cap: bool) -> Self {
        self.cap_critical = cap;
        self
    }

    /// From which priority on requests are critical. Default: [`Priority::Critical`].
    #[must_use]
    pub fn critical_from(mut self, priority: Priority) -> Self {
        self.critical = priority;
        self
    }

    /// In what time those who were turned away are told to come back; each gets a time of this range
    /// at random. Default: 1 to 3 s.
    #[must_use]
    pub fn retry_after(mut self, range: RangeInclusive<Duration>) -> Self {
        self.retry_after = range;
        self
    }

    /// Where the instances of the fleet tell each other how many requests they have in flight: those
    /// with the same server, namespace and name. Default: nowhere, the fleet is this process.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn store(mut self, store: RedisStore) -> Self {
        self.options.store = Some(store);
        self
    }

    /// How often this instance tells how many requests it has in flight, and hears of the others; 10 ms
    /// to 10 s. When its number has changed by more than a sixteenth of the capacity, it does so up to
    /// eight times as often. Default: 200 ms.
    ///
    /// Every call goes through all instances on the server, so hundreds of them should tick more slowly.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn tick(mut self, tick: Duration) -> Self {
        self.options.tick = tick;
        self
    }

    /// How long the word of an instance counts: at least two ticks, and 10 minutes at most. After that,
    /// an instance that was not heard of is taken to be gone, and one that heard nothing decides by its
    /// share. Default: 3 s.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.options.lease = lease;
        self
    }

    /// How many instances share the capacity, as long as nothing was heard of them. Default: the store's
    /// [`instances`](crate::redis::RedisStoreBuilder::instances).
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn instances(mut self, instances: u32) -> Self {
        self.options.instances = Some(instances);
        self
    }

    /// Ticks by this clock in place of tokio's.
    #[cfg(all(feature = "redis", any(test, feature = "test-util")))]
    #[cfg_attr(docsrs, doc(cfg(all(feature = "redis", feature = "test-util"))))]
    #[must_use]
    pub fn clock(mut self, clock: &crate::ManualClock) -> Self {
        self.options.clock = clock.into();
        self
    }

    /// Checks the settings. Nothing runs yet.
    ///
    /// # Errors
    ///
    /// [`ShedderError`] says which setting cannot be, and why.
    pub fn build(self) -> Result<FleetShedder, ShedderError> {
        let name = self.name;
        if !is_name(&name) {
            return Err(ShedderError::InvalidName { name: name.into_owned() });
        }
        let check = |in_range: bool, option, range| {
            let shedder = name.clone().into_owned();
            if in_range { Ok(()) } else { Err(ShedderError::OutOfRange { shedder, option, range }) }
        };
        check(self.capacity >= 1, "capacity", "1 or more")?;
        check((0.0..1.0).contains(&self.reserve), "reserve", "from 0 to less than 1")?;
        let patience = Patience::new(&self.retry_after, &name)?;
        #[cfg(feature = "redis")]
        let link = Link::new(self.options, &name, check)?;
        let shared = Shared {
            bounds: Bounds {
                capacity: self.capacity.into(),
                reserve: (self.reserve * ONE as f64).round() as u64,
                cap_critical: self.cap_critical,
            },
            critical: self.critical,
            patience,
            dice: Dice::new(),
            turned_away: AtomicU64::new(0),
            state: Mutex::default(),
            #[cfg(feature = "redis")]
            link,
            name: intern(name),
        };
        Ok(FleetShedder { shared: Arc::new(shared) })
    }
}

impl fmt::Debug for FleetShedderBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FleetShedderBuilder")
            .field("name", &self.name)
            .field("capacity", &self.capacity)
            .field("reserve", &self.reserve)
            .field("cap_critical", &self.cap_critical)
            .finish_non_exhaustive()
    }
}
