//! How many requests may be in flight at once.

mod adaptive;

pub use adaptive::{Adaptive, AdaptiveBuilder, AdaptiveError};
