//! Load shedders.

mod background;
mod error;
mod fleet;
mod law;
#[cfg_attr(not(test), expect(dead_code, reason = "the limiter will use it"))]
mod list;
mod patience;
mod utilization;
mod worker;

pub use error::ShedderError;
pub use fleet::{FleetShedder, FleetShedderBuilder};
#[expect(unused_imports, reason = "the limiter will use it")]
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
    fn none() -> Self {
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
