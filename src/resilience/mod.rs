//! What happens when a store does not answer: deadline, circuit breaker, failure modes.

pub(crate) mod breaker;
mod guard;

pub(crate) use guard::{Failure, Guard, Hook};
pub use guard::{Health, StateChange};
