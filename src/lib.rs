//! A Tower middleware that limits who may call a service, how fast, how many at once, and who goes first
//! when there is not room for all.
//!
//! A [`RateLimitLayer`] wraps any tower service, an axum router, a tonic server, a hyper stack or
//! one that is not HTTP at all, with a stack of [policies](Policy). Each policy counts its
//! [keys](key), over time by one of five algorithms or [in flight](concurrency); a request is charged to
//! all policies that apply to it or, if one of them rejects it, to none. Before them stand
//! [load shedders](shed), which look at the state of the service instead of the caller.
//!
//! # Quick start
//!
//! ```
//! use axum::{Router, routing::get};
//! use tollgate::{Policy, Quota, RateLimitLayer, key::PeerIp};
//!
//! # fn app() -> Result<Router, tollgate::BuildError> {
//! let limits = RateLimitLayer::builder()
//!     .key(PeerIp::new())
//!     .policy(Policy::token_bucket("burst", Quota::per_second(10).burst(50)))
//!     .policy(Policy::fixed_window("daily", Quota::per_calendar_day(10_000)))
//!     .build()?;
//!
//! let app = Router::new().route("/", get(|| async { "hello" })).layer(limits);
//! // Serve it with its peers' addresses:
//! // axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())
//! # Ok(app)
//! # }
//! # app().unwrap();
//! ```
//!
//! A request over the limit is answered with 429, or for gRPC with status 8, and told when to come
//! back:
//!
//! ```text
//! HTTP/1.1 429 Too Many Requests
//! content-type: application/problem+json
//! cache-control: no-store
//! ratelimit-policy: "burst";q=50;w=5, "daily";q=10000;w=86400
//! ratelimit: "burst";r=0;t=1
//! retry-after: 1
//! ```
//!
//! # Promises
//!
//! Each is a test by that name.
//!
//! 1. **All or nothing.** A rejected request consumes nothing from any policy, whichever policy
//!    rejected it, in any order.
//! 2. **One round trip.** On one Redis the whole stack is one script call, and requests that wait at the
//!    same time share it. On a cluster or shards it is one call for each key that the request counts by, all
//!    sent at the same time, and a charge whose sibling was rejected is given back, and counted.
//! 3. **Exact.** Limits are integer arithmetic, and no window of any length admits more than the
//!    algorithm's own bound, which [`Policy`] states. The engine in this process and the one in Redis
//!    decide the same, bit for bit.
//! 4. **One clock.** A decision reads the time once, from the store that decides, and every header
//!    comes from that decision. A reset time that did not change is printed the same twice.
//! 5. **Honest waits.** A lone client that waits `Retry-After` seconds is admitted. `Retry-After` is
//!    never 0 and never early.
//! 6. **Never the weak link.** A decision elsewhere has a deadline. When the store is slow, full or
//!    gone, the policy's failure mode answers at once: open, closed (503, never 429), or this instance's
//!    share.
//! 7. **Nothing leaks.** What a request in flight holds is released exactly once on every path: at the end
//!    of the body, with an error or a panic, when the body is dropped or the call is cancelled; and in
//!    Redis, if the process dies, when its lease runs out.
//! 8. **Bounded memory.** Local state never exceeds its cap. What it forgets first is what equals a
//!    key never seen.
//! 9. **Keys don't collide and don't leak.** Key encoding is injective; the store sees a keyed or strong
//!    hash.
//! 10. **A rejection is a response.** The error type of an HTTP service stays what it was, so
//!     `Infallible` stays `Infallible`.
//! 11. **Shared by clone.** Every clone of a layer, and every service made from it, shares one budget.
//!     Two layers are two budgets, unless they share a namespace in Redis.
//!
//! And no request costs the service its life: a panic in a function that a policy was given turns
//! that one request away, with a clear answer, and leaves nothing locked or half charged.
//!
//! # Differences from tower's own limits
//!
//! tower's `RateLimit` has one budget for all callers, is not `Clone`, and waits in `poll_ready`.
//! tollgate counts by key, shares its state between clones, and sheds: it is always as ready as the
//! inner service, and a request over the limit is answered at once. Only a
//! [leaky bucket with a maximum delay](Policy::max_delay) and a concurrency limit with a
//! [queue](Policy::queue) hold requests back.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `axum` | yes | peer addresses and matched routes of axum |
//! | `redis` | | limits that hold for a fleet: state in Redis or Valkey |
//! | `cluster` | | the same on a Redis Cluster |
//! | `sentinel` | | the same, with a primary that Redis Sentinel names |
//! | `tonic` | | peer addresses of tonic, limits around a single gRPC service, an interceptor |
//! | `test-util` | | `ManualClock` |
//!
//! # Map of the code
//!
//! `layer` and [`RateLimit`] (`service`, `future`, `body`) are the way in for requests, `protocol`
//! says of which kind; `limiter` runs the stack and knows no HTTP; `policy` has policies and the
//! checked stack, `quota` what they give out; `algorithm` is pure integer functions; `store` keeps
//! state, here or in Redis; [`concurrency`] is slots and permits; [`shed`] and `priority` are who goes first; `remote` and `resilience` are what happens when that does not answer; [`key`] finds keys; [`reply`] turns decisions into headers and responses; `clock` alone
//! asks the system for the time.

#![cfg_attr(docsrs, feature(doc_cfg))]

/// The examples in the pages of `docs/` compile.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../docs/regions.md")]
struct Regions;

mod algorithm;
mod background;
mod body;
mod clock;
pub mod concurrency;
mod decision;
#[cfg(feature = "redis")]
mod deferred;
mod future;
#[cfg(feature = "tonic")]
mod interceptor;
pub mod key;
mod layer;
mod limiter;
mod name;
mod policy;
mod priority;
mod protocol;
mod quota;
mod random;
#[cfg(feature = "redis")]
mod remote;
pub mod reply;
#[cfg(feature = "redis")]
mod resilience;
mod service;
pub mod shed;
mod store;
mod turn;

pub use body::ResponseBody;
pub use clock::Clock;
#[cfg(any(test, feature = "test-util"))]
#[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
pub use clock::ManualClock;
pub use decision::{Decision, Outcome, Reason, Rejection};
pub use future::{CallFuture, ResponseFuture};
#[cfg(feature = "tonic")]
#[cfg_attr(docsrs, doc(cfg(feature = "tonic")))]
pub use interceptor::RateLimitInterceptor;
pub use layer::{RateLimitLayer, RateLimitLayerBuilder};
pub use limiter::{Limiter, LimiterBuilder};
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use policy::FailureMode;
pub use policy::{Policy, stack::BuildError};
pub use priority::{ByMethod, Classify, Priority};
pub use protocol::{CallError, Calls, Http, Protocol};
pub use quota::{Period, Quota, QuotaError};
pub use service::RateLimit;
#[cfg(feature = "redis")]
#[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
pub use store::redis;
pub use store::{LocalStore, Store};
