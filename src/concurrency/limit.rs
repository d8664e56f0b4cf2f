//! How many requests may be in flight.

use super::Adaptive;

/// How many requests may be in flight at the same time.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Limit {
    /// So many.
    Fixed(u32),
    /// As many as latency says.
    Adaptive(Adaptive),
}

impl Limit {
    /// The limit at the moment.
    pub(crate) fn now(&self) -> u64 {
        match self {
            Self::Fixed(limit) => u64::from(*limit),
            Self::Adaptive(adaptive) => adaptive.limit(),
        }
    }
}

impl From<u32> for Limit {
    fn from(limit: u32) -> Self {
        Self::Fixed(limit)
    }
}

impl From<Adaptive> for Limit {
    fn from(adaptive: Adaptive) -> Self {
        Self::Adaptive(adaptive)
    }
}
