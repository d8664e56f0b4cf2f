//! Limits on how many requests are in flight at the same time.
//!
//! A [`Policy::concurrency`](crate::Policy::concurrency) gives each key so many slots. A request that is admitted holds one, or
//! [its cost](crate::Policy::cost) in slots, until it is over: until the response body has ended, for however long that
//! streams, or the call was dropped, failed or panicked.
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{Policy, RateLimitLayer, key::Header};
//!
//! let layer = RateLimitLayer::builder()
//!     .key(Header::from_static("x-api-key"))
//!     .policy(Policy::concurrency("in-flight", 20).queue(10, Duration::from_secs(1)))
//!     .build()?;
//! # Ok::<(), tollgate::BuildError>(())
//! ```
//!
//! A request that finds no slot free is turned away with 429, and asked to come back in a second: nobody
//! knows when a slot will be free. With a [queue](crate::Policy::queue) it waits for its turn first.
//!
//! # Limits that find themselves
//!
//! Nobody has to know how many requests a service can do at once: an [`Adaptive`] limit finds that out by
//! latency, from the call of the inner service to the head of the response. It is one number for all
//! keys, so such a policy is best keyed by [`Global`](crate::key::Global), or by route.
//!
//! ```
//! use tollgate::{Policy, RateLimitLayer, concurrency::Adaptive, key::Global};
//!
//! let found = Adaptive::builder().max(500).build()?;
//! let layer = RateLimitLayer::builder()
//!     .policy(Policy::concurrency("capacity", found.clone()).key(Global))
//!     .build()?;
//! println!("{} at a time", found.limit());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # For a fleet
//!
//! With a store in Redis (feature `redis`) slots are those of the fleet, and a permit is a lease: it ends when it is
//! released, and if its holder dies, when the lease runs out (`RedisStoreBuilder::lease`). Leases are taken by the
//! script call that decides the rate limits too, renewed in the background for as long as the request takes,
//! and released in the background. While Redis is out of reach, the policy's `FailureMode` answers.
//!
//! # Upgraded connections
//!
//! To HTTP, a request that upgrades its connection is over with the head of its response. Its handler can
//! take the permit along, see [`HeldPermits`].
//!
//! # Without a layer
//!
//! [`Limiter::acquire`](crate::Limiter::acquire) gives out [`Permit`]s, which hold their slots until they are dropped.

mod adaptive;
mod limit;
mod permit;
mod slots;

pub use adaptive::{Adaptive, AdaptiveBuilder, AdaptiveError};
pub use limit::Limit;
pub use permit::{HeldPermits, Permit};

pub(crate) use permit::Held;
pub(crate) use slots::{Place, SlotPlan, Slots};
