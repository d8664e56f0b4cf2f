//! A primary, as an instance sees it: what is asked of it, and how it is doing.

use super::{
    checks::{self, Warning},
    codec::{self, Ask, Told},
    error::StoreError,
    lane::Lane,
    leases::{Lease, LeaseHealth, Leases},
    scripts::{REFUND, RESET},
    server::Server,
};
use crate::resilience::{Failure, Guard, Health, Hook, StateChange};
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{runtime::Handle, time::timeout};

pub(super) struct Node {
    pub(super) server: Arc<Server>,
    pub(super) lane: Arc<Lane>,
    pub(super) guard: Guard,
    pub(super) leases: Leases,
    /// What the names of all keys begin with.
    pub(super) prefix: Arc<str>,
    pub(super) deadline: Duration,
    pub(super) look_over: Arc<AtomicU8>,
}

/// The first request has the server looked over, and the first that it decides, if it was down then.
const DUE: u8 = 0;
const DONE: u8 = 1;
const DUE_WHEN_UP: u8 = 2;

impl Node {
    pub(super) fn health(&self) -> Health {
        self.guard.health()
    }

    pub(super) fn calls(&self) -> (u64, u64) {
        (self.lane.calls.load(Relaxed), self.lane.requests.load(Relaxed))
    }

    pub(super) fn lease_health(&self) -> LeaseHealth {
        self.leases.health()
    }

    /// Has a request decided. `None` means that the failure modes have to answer.
    pub(super) async fn decide(self: &Arc<Self>, mut ask: Ask) -> Option<(Told, Option<Lease>)> {
        self.look_over(DUE);
        let Self { guard, lane, .. } = &**self;
        let decision = guard.call(async {
            // If this is dropped, or fails, whatever was taken is given back.
            let mut lease = None;
            if ask.slots().next().is_some() && !ask.peeks {
                lease = Some(Leases::give(self, &mut ask));
            }
            let told = lane.ask(ask).await?;
            match &mut lease {
                Some(lease) if told.admitted => lease.hold(),
                _ => {
                    lease.take().map(Lease::refuse);
                }
            }
            Ok::<_, StoreError>((told, lease))
        });
        let decision = decision.await?;
        self.look_over(DUE_WHEN_UP);
        Some(decision)
    }

    /// Looks the server over in the background, if that is due.
    fn look_over(self: &Arc<Self>, due: u8) {
        let look_over = &self.look_over;
        if look_over.load(Relaxed) == due
            && look_over.compare_exchange(due, DONE, Relaxed, Relaxed).is_ok()
        {
            let node = self.clone();
            Handle::current().spawn(async move { node.warn().await });
        }
    }

    /// Gives back what a request was charged at `spent_us`, with what each algorithm has to know of
    /// that moment.
    pub(super) async fn refund(&self, ask: &Ask, spent_us: u64, memories: &[u64]) -> Option<()> {
        let push_args = |command: &mut _| codec::push_refund(command, ask, spent_us, memories);
        let refund = async { self.server.run(&REFUND, push_args).await.map(drop) };
        self.guard.call(refund).await
    }

    /// Forgets all that is known of those whom an ask is for.
    pub(super) async fn reset(&self, ask: &Ask) -> Option<()> {
        let push_args = |command: &mut _| codec::push_reset(command, ask);
        let reset = async { self.server.run(&RESET, push_args).await.map(drop) };
        self.guard.call(reset).await
    }

    pub(super) async fn check(&self) -> Result<Vec<Warning>, StoreError> {
        let key = format!("{}:check", self.prefix);
        // A connection may have to be made first.
        let patience = 10 * self.deadline;
        let looked_over = timeout(patience, checks::look_over(&self.server, &key)).await;
        looked_over.unwrap_or(Err(StoreError::Late))
    }

    async fn warn(&self) {
        match self.check().await {
            Ok(warnings) => {
                for warning in warnings {
                    tracing::warn!(target: "tollgate", "{warning}");
                }
            }
            Err(_) => self.look_over.store(DUE_WHEN_UP, Relaxed),
        }
    }
}

/// A server that was down may be another one now.
pub(super) fn hook(look_over: Arc<AtomicU8>, own: Option<Hook>) -> Hook {
    Box::new(move |change| {
        if *change == StateChange::Up {
            look_over.store(DUE, Relaxed);
        }
        if let Some(own) = &own {
            own(change);
        }
    })
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("guard", &self.guard).finish_non_exhaustive()
    }
}

impl Failure for StoreError {
    fn is_outage(&self) -> bool {
        Self::is_outage(self)
    }

    fn is_late(&self) -> bool {
        *self == Self::Late
    }
}
