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
//! # For a fleet
//!
//! With [a store in Redis](crate::redis) slots are those of the fleet, and a permit is a lease: it ends when it is released, and if
//! its holder dies, when the [lease](crate::redis::RedisStoreBuilder::lease) runs out. Leases are taken by the script call that
//! decides the rate limits too, renewed in the background for as long as the request takes, and released
//! in the background. While Redis is out of reach, the policy's [failure mode](crate::FailureMode) answers.
//!
//! # Upgraded connections
//!
//! To HTTP, a request that upgrades its connection is over with the head of its response. Its handler can
//! take the permit along, see [`HeldPermits`].
//!
//! # Without a layer
//!
//! [`Limiter::acquire`](crate::Limiter::acquire) gives out [`Permit`]s, which hold their slots until they are dropped.

mod limit;
mod permit;
mod slots;

pub use limit::Limit;
pub use permit::{HeldPermits, Permit};

pub(crate) use permit::Held;
pub(crate) use slots::{Place, Slot, SlotPlan, Slots};
