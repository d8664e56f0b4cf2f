mod algorithm;
mod clock;
mod decision;
pub mod key;
mod limiter;
mod policy;
mod store;
mod turn;

pub use clock::Clock;
#[cfg(any(test, feature = "test-util"))]
pub use clock::ManualClock;
pub use decision::{Decision, Outcome, Reason, Rejection};
pub use limiter::{Limiter, LimiterBuilder};
pub use policy::{Period, Policy, Quota, QuotaError, stack::BuildError};
pub use store::LocalStore;
