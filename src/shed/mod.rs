//! Load shedders: when there is not room for all, what matters least goes.
//!
//! A rate limit protects a service from one caller; a load shedder protects it from all of them
//! together. It looks at the state of the service and not at who calls, so what it turns away is
//! answered with 503, and not with 429: the caller did nothing wrong. It goes by the
//! [`Priority`](crate::Priority) of a request, which a [classifier](crate::Classify) finds out.
//!
//! There are two, after Stripe's ("Scaling your API with rate limiters", 2017). Each admits a request
//! at once or turns it away at once: nothing waits, and nothing is asked over the network.
//!
//! # The worker utilization shedder
//!
//! A [`WorkerShedder`] looks at how busy this instance is, every second, as [`Utilization`] tells. When
//! it is too busy for long it sheds more and more, the least important class of requests first, and the
//! next one only when all of that is shed. When it is better it lets them back in, in the other
//! order. [`Critical`](crate::Priority::Critical) requests are never shed.
//!
//! It moves a level, which begins at rest, `-grace / full_after`. With the defaults, and `u` for the
//! utilization:
//!
//! ```text
//!             u / 0.7 - 1            if u < 0.7: recover
//! speed(u) =  0                      if 0.7 <= u < 0.8: hold
//!             (u - 0.8) / 0.2        otherwise: shed more
//!
//! level    =  level + min(elapsed, 28 s) * speed(u) / 120 s,    at least -28/120 and at most 1
//!
//! shed(i)  =  level * n - i,         at least 0 and at most 1
//! ```
//!
//! `shed(i)` is the probability with which a request of class `i` is turned away, of `n` classes of
//! which 0 is the least important. So an instance at full load sheds nothing for 28 s, and all but what is
//! critical 120 s later; at a utilization of 0.9 it takes 56 s and 240 s. At 0.35 it takes 240 s
//! from there until nothing is shed. It is slow on purpose, in both directions: a shedder that is as fast as
//! the load would take away the load that it answers to, let it back in, and swing. Between 0.7 and 0.8
//! nothing moves at all.
//!
//! This is how it answers to a load that it cannot change (`examples/shed_law.rs`):
//!
//! <div>
#![doc = include_str!("../../docs/shed-law.svg")]
//! </div>
//!
//! It needs no store. What is counted is whole numbers, so the same load over the same time leads to the
//! same level, whenever samples were taken.
//!
//! # The fleet usage shedder
//!
//! A [`FleetShedder`] knows how many requests the fleet can have in flight, its capacity `C`, and keeps
//! a part `R` of that for critical requests (by default a fifth):
//!
//! ```text
//! let in  =  others + 1 <= C - R  and  all + 1 <= C     if it is not critical
//!            always                                     if it is critical,
//!            all + 1 <= C                               or this, if critical requests are capped
//! ```
//!
//! `all` are the requests in flight, and `others` those that are not critical. Without a store these
//! are the ones of this process, and the bounds are exact. With one
#![cfg_attr(feature = "redis", doc = "([`store`](FleetShedderBuilder::store))")]
#![cfg_attr(not(feature = "redis"), doc = "(feature `redis`)")]
//! every instance tells it on a tick, by default every 200 ms, how many it has in flight, hears how
//! many all have, and decides by what it last heard of the others and by its own number as it is
//! now. No request waits for that, and it costs one call per instance and tick.
//!
//! ## How far off it can be
//!
//! What an instance knows of another was counted before that one's call, and is in use until the
//! answer to its own next call. If calls take less than a tick and are answered, it is never older than
//! two ticks and two calls: less than half a second. A request is let in if there is room by what
//! is known, so at any time
//!
//! ```text
//! in flight  <=  bound  +  what the other instances let in during the last two ticks and two calls
//! ```
//!
//! with `C - R` or `C` for the bound. It is never more than `N * bound` for `N` instances, since each keeps
//! the bound by itself. An instance whose own number has changed by a sixteenth of the capacity tells it
//! up to eight times as often, which makes the difference smaller when it matters.
//!
//! ## When something is not there
//!
//! An instance that heard nothing for a lease, by default 3 s, decides by its share: `C` divided by the
//! number of instances that there were last, one request at least. So does one that has just been
//! started, for the milliseconds until the first answer, where the number of instances is that of the
//! settings. What such an instance lets in comes on top of the above, up to its share. When none hears
//! anything, all of them together keep the bound. An instance
//! that dies is counted for one lease more; one that is dropped takes itself out. A server that lost its
//! data knows all again a tick later.
//!
//! # Putting them into service
//!
//! - Begin with rate limits. They do most of the work every day; shedders are for the days when that is
//!   not enough.
//! - Look before you shed. A worker shedder that is asked for nothing but critical requests sheds none,
//!   counts all, and tells by [`level`](WorkerShedder::level) and
//!   [`admitted_share`](WorkerShedder::admitted_share) what it would have done. Compare that with what
//!   the people on call would have wanted.
//! - Have a switch that turns each of them off without a deployment, and a graph of what each turns away.
//! - Choose a capacity that is not reached on a good day. A fleet shedder that sheds is an alarm: something
//!   needs more machines, or somebody sends more than is good.
//! - Decide what is critical by what the service is for, and keep it small. If everything is critical,
//!   nothing can be shed.
//! - Tell callers what a 503 with `Retry-After` means: come back, but not all at once. The times are
//!   varied for that.

mod error;
mod fleet;
mod law;
mod list;
mod patience;
mod utilization;
mod worker;

pub use error::ShedderError;
pub use fleet::{FleetShedder, FleetShedderBuilder};
pub(crate) use list::Shedders;
pub use utilization::Utilization;
pub use worker::{WorkerShedder, WorkerShedderBuilder};

use smallvec::SmallVec;
use std::{error::Error, fmt, time::Duration};

/// A load shedder, of either kind.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Shedder {
    /// Sheds when this instance is too busy.
    Worker(WorkerShedder),
    /// Sheds when the fleet has too much in flight.
    Fleet(FleetShedder),
}

impl Shedder {
    /// Its name.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Worker(shedder) => shedder.name(),
            Self::Fleet(shedder) => shedder.name(),
        }
    }
}

impl From<WorkerShedder> for Shedder {
    fn from(shedder: WorkerShedder) -> Self {
        Self::Worker(shedder)
    }
}

impl From<FleetShedder> for Shedder {
    fn from(shedder: FleetShedder) -> Self {
        Self::Fleet(shedder)
    }
}

/// What a request holds that was let in. Dropping it says that the request is over.
#[must_use = "the request is over when this is dropped"]
pub struct Aboard(SmallVec<[Held; 2]>);

/// A place in one shedder.
enum Held {
    Worker(#[expect(dead_code, reason = "it is dropped in the end")] worker::Seat),
    Fleet(#[expect(dead_code, reason = "it is dropped in the end")] fleet::Seat),
}

impl Aboard {
    pub(crate) fn none() -> Self {
        Self(SmallVec::new())
    }

    fn one(held: Held) -> Self {
        let mut aboard = Self::none();
        aboard.hold(held);
        aboard
    }

    fn hold(&mut self, held: Held) {
        self.0.push(held);
    }
}

impl fmt::Debug for Aboard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Aboard").field("shedders", &self.0.len()).finish()
    }
}

/// A request was turned away: nobody's limit is exceeded, but there is not room for all. Over HTTP that is
/// 503, Service Unavailable; for gRPC status 14, `UNAVAILABLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shed {
    pub(crate) shedder: &'static str,
    pub(crate) retry_after_us: u64,
}

impl Shed {
    /// The name of the shedder.
    #[must_use]
    pub fn shedder(&self) -> &'static str {
        self.shedder
    }

    /// When to try again. It is drawn at random, so that not all come back at once.
    #[must_use]
    pub fn retry_after(&self) -> Duration {
        Duration::from_micros(self.retry_after_us)
    }
}

impl fmt::Display for Shed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "turned away by load shedder `{}`", self.shedder)
    }
}

impl Error for Shed {}
