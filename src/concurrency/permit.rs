//! Permits: held slots, and who may keep them.

use super::slots::{Slots, Taken};
use crate::shed::Aboard;
#[cfg(feature = "redis")]
use crate::store::{Slot, redis::Lease};
#[cfg(feature = "redis")]
use smallvec::SmallVec;
use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The slots that a request holds, in all policies and load shedders that admitted it. They are free
/// again when the permit and all of its clones are dropped.
///
/// To drop it needs no runtime and never blocks. A request that holds no slots has a permit, too.
#[derive(Clone, Debug, Default)]
#[must_use = "the slots are free again when the permit is dropped"]
pub struct Permit(Arc<Held>);

/// The permits that a request holds, of all layers around its handler, in its extensions. They end with
/// the response body, unless somebody keeps them.
///
/// ```
/// use axum::{extract::Extension, response::Response};
/// use tollgate::concurrency::HeldPermits;
///
/// async fn handler(Extension(permits): Extension<HeldPermits>) -> Response {
///     let kept = permits.keep();
///     tokio::spawn(async move {
///         // The connection that this request upgraded is in flight until here.
///         drop(kept);
///     });
///     # unimplemented!()
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct HeldPermits(Vec<Weak<Held>>);

/// What an admitted request holds.
#[derive(Default)]
pub(crate) struct Held {
    /// In this process, and where that is.
    taken: Option<(Arc<Slots>, Taken)>,
    /// When the request was admitted or, if it had to wait after that, when it went on.
    since_us: AtomicU64,
    /// Whether the request is answered when this is dropped, rather than before, if at all.
    until_dropped: bool,
    /// In the fleet.
    #[cfg(feature = "redis")]
    leases: SmallVec<[Lease; 1]>,
    /// In load shedders.
    aboard: Option<Aboard>,
}

impl Held {
    pub(crate) fn new(slots: &Arc<Slots>, taken: Taken, since_us: u64) -> Self {
        let mut held = Self::default();
        (held.taken, held.since_us) = (Some((slots.clone(), taken)), since_us.into());
        held
    }

    fn answered(&self) {
        if let Some((slots, taken)) = &self.taken {
            slots.answered(taken, self.since_us.load(Relaxed));
        }
    }
}

#[cfg(feature = "redis")]
impl Held {
    /// Counts slots that a store elsewhere gave out, on these leases.
    pub(crate) fn take_elsewhere(&mut self, slots: &[Slot], leases: SmallVec<[Lease; 1]>) {
        self.take_anyway(slots);
        self.leases.extend(leases);
    }

    /// Counts slots that nobody else does.
    pub(crate) fn take_anyway(&mut self, slots: &[Slot]) {
        if let Some((counted_in, taken)) = &mut self.taken {
            taken.extend(counted_in.take_anyway(slots));
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.until_dropped {
            self.answered();
        }
        if let Some((slots, taken)) = &self.taken {
            taken.iter().for_each(|(slot, _)| slots.release(slot));
        }
    }
}

impl Permit {
    /// Whether the fleet forgot for a while that the request holds its slots: this process stood still for
    /// longer than a lease, or the server lost its state. Others may have had them meanwhile. It counts again
    /// since.
    #[cfg(feature = "redis")]
    #[cfg_attr(docsrs, doc(cfg(feature = "redis")))]
    #[must_use]
    pub fn was_lost(&self) -> bool {
        self.0.leases.iter().any(Lease::was_lost)
    }

    /// The request goes on only now: what it waited for, such as its turn or a store elsewhere, says nothing of
    /// the service.
    pub(crate) fn goes_on(&self) {
        if let Some((slots, _)) = &self.0.taken
            && let Some(now_us) = slots.time_of_start()
        {
            self.0.since_us.store(now_us, Relaxed);
        }
    }

    /// The request has been answered, which took as long as it is held now: what comes later is up to the
    /// client. That of a request that is cancelled says nothing.
    pub(crate) fn answered(&self) {
        self.0.answered();
    }

    /// The request is answered when the permit is dropped. Only for a permit that nobody else has yet.
    pub(crate) fn until_dropped(mut self) -> Self {
        if let Some(held) = Arc::get_mut(&mut self.0) {
            held.until_dropped = true;
        }
        self
    }

    /// Holds a place in load shedders, too. Only for a permit that nobody else has yet.
    pub(crate) fn aboard(mut self, aboard: Aboard) -> Self {
        if let Some(held) = Arc::get_mut(&mut self.0) {
            held.aboard = Some(aboard);
        }
        self
    }

    /// Holds the slots of another permit, too. Only for permits that nobody else has yet.
    #[cfg(feature = "redis")]
    pub(crate) fn with(mut self, mut other: Self) -> Self {
        if let (Some(held), Some(other)) = (Arc::get_mut(&mut self.0), Arc::get_mut(&mut other.0))
            && let (Some((_, taken)), Some((_, more))) = (&mut held.taken, &mut other.taken)
        {
            taken.extend(more.drain(..));
        }
        self
    }
}

impl From<Held> for Permit {
    fn from(held: Held) -> Self {
        Self(Arc::new(held))
    }
}

impl HeldPermits {
    /// Holds on to the permits until what this returns is dropped. Empty if the request is over already.
    pub fn keep(&self) -> Vec<Permit> {
        self.0.iter().filter_map(Weak::upgrade).map(Permit).collect()
    }

    pub(crate) fn add(&mut self, permit: &Permit) {
        self.0.push(Arc::downgrade(&permit.0));
    }
}

impl fmt::Debug for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let taken = self.taken.as_ref().map_or(0, |(_, taken)| taken.len());
        f.debug_struct("Held").field("slots", &taken).finish_non_exhaustive()
    }
}
