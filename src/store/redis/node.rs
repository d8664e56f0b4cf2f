//! A primary, as an instance sees it: what is asked of it, and how it is doing.

use super::{
    checks::{self, Uses, Warning},
    codec::{self, Ask, Purpose, Told},
    connection::Source,
    error::StoreError,
    lane::{Lane, Limits},
    leases::{Lease, Leases},
    scripts::{KnownScript, REFUND, RESET},
    server::Server,
};
#[cfg(feature = "cluster")]
use super::{cluster::Cluster, scripts::DECIDE};
use crate::{
    clock::Clock,
    resilience::{Failure, Guard, Hook, StateChange, breaker},
};
use redis::{Cmd, Value};
#[cfg(feature = "cluster")]
use std::sync::Weak;
use std::{
    fmt,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU8, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    time::{Instant, timeout},
};

pub(super) struct Node {
    pub(super) server: Arc<Server>,
    lane: Arc<Lane>,
    pub(super) guard: Guard,
    pub(super) leases: Leases,
    /// What the names of all keys begin with.
    pub(super) prefix: Arc<str>,
    pub(super) deadline: Duration,
    look_over: Arc<AtomicU8>,
    pub(super) uses: Arc<Uses>,
    /// The cluster that it belongs to, if any.
    #[cfg(feature = "cluster")]
    cluster: Weak<Cluster>,
}

/// What all nodes of a store have in common.
pub(super) struct NodeSettings {
    pub(super) limits: Limits,
    pub(super) breaker: breaker::Settings,
    pub(super) lease: Duration,
    pub(super) prefix: Arc<str>,
    pub(super) clock: Option<Clock>,
    pub(super) hook: Option<Arc<Hook>>,
    pub(super) uses: Arc<Uses>,
}

impl NodeSettings {
    pub(super) fn node(&self, source: Source) -> Node {
        let server =
            Server { source, clock: self.clock.clone(), has_msetex: AtomicBool::new(false) };
        let (server, look_over) = (Arc::new(server), Arc::<AtomicU8>::default());
        let deadline = self.limits.patience;
        let hook = hook(look_over.clone(), self.hook.clone());
        Node {
            lane: Arc::new(Lane::new(server.clone(), self.limits)),
            server,
            guard: Guard::new(&self.breaker, deadline, Some(hook)),
            leases: Leases::new(self.lease),
            prefix: self.prefix.clone(),
            deadline,
            look_over,
            uses: self.uses.clone(),
            #[cfg(feature = "cluster")]
            cluster: Weak::new(),
        }
    }
}

/// The first request has the server looked over, and the first that it decides, if it was down then.
const DUE: u8 = 0;
const DONE: u8 = 1;
const DUE_WHEN_UP: u8 = 2;

impl Node {
    pub(super) fn calls(&self) -> (u64, u64) {
        (self.lane.calls.load(Relaxed), self.lane.requests.load(Relaxed))
    }

    /// The same as one of a cluster.
    #[cfg(feature = "cluster")]
    pub(super) fn of(mut self, cluster: Weak<Cluster>) -> Self {
        self.cluster = cluster;
        self
    }

    /// The node that has a slot now, if this is one of a cluster.
    pub(super) async fn owner_of(self: &Arc<Self>, slot: u16) -> Arc<Self> {
        #[cfg(feature = "cluster")]
        if let Some(cluster) = self.cluster.upgrade()
            && let Some(owner) = cluster.owner(slot).await
        {
            return owner;
        }
        let _ = slot;
        self.clone()
    }

    /// Whether a call to it can be for one slot only.
    pub(super) fn is_of_cluster(&self) -> bool {
        #[cfg(feature = "cluster")]
        return self.cluster.strong_count() > 0;
        #[cfg(not(feature = "cluster"))]
        false
    }

    /// Has a request decided. `None` means that the failure modes have to answer.
    pub(super) async fn decide(
        self: &Arc<Self>,
        mut ask: Arc<Ask>,
        until: Instant,
    ) -> Option<(Told, Option<Lease>)> {
        self.look_over(DUE);
        let call = pin!(async {
            // If this is dropped, or fails, whatever was taken is given back.
            let mut lease = None;
            if ask.slots().next().is_some() && ask.purpose == Purpose::Charge {
                lease = Some(Leases::give(self, Arc::make_mut(&mut ask)));
            }
            let told = self.ask(ask).await?;
            match &mut lease {
                Some(lease) if told.admitted => lease.hold(),
                _ => {
                    lease.take().into_iter().for_each(Lease::refuse);
                }
            }
            Ok::<_, StoreError>((told, lease))
        });
        let decision = self.guard.call_until(until, call).await?;
        self.look_over(DUE_WHEN_UP);
        Some(decision)
    }

    #[cfg(not(feature = "cluster"))]
    async fn ask(&self, ask: Arc<Ask>) -> Result<Told, StoreError> {
        self.lane.ask(ask).await
    }

    /// Has a request decided, wherever its slot is by now.
    #[cfg(feature = "cluster")]
    async fn ask(&self, ask: Arc<Ask>) -> Result<Told, StoreError> {
        let Some(cluster) = self.cluster.upgrade() else {
            return self.lane.ask(ask).await;
        };
        let again = ask.clone();
        match self.lane.ask(ask).await {
            Err(error) if error.redirects() => {
                let push_args = |command: &mut _| codec::push_batch(command, &[&again], false);
                let run = cluster.run(again.slot(), error, &DECIDE, &push_args);
                let reply = Box::pin(run).await?;
                let told = codec::read_reply(&reply, &[&again]).and_then(|mut told| told.pop());
                told.ok_or_else(StoreError::unreadable)
            }
            told => told,
        }
    }

    /// Runs a script for an ask.
    async fn run(
        &self,
        script: &KnownScript,
        ask: &Ask,
        push_args: impl Fn(&mut Cmd),
    ) -> Result<Value, StoreError> {
        self.run_on(|| ask.slot(), script, push_args).await
    }

    /// Runs a script, wherever its slot is by now.
    #[cfg_attr(not(feature = "cluster"), expect(unused_variables, reason = "there are no slots"))]
    pub(super) async fn run_on(
        &self,
        slot: impl FnOnce() -> u16,
        script: &KnownScript,
        push_args: impl Fn(&mut Cmd),
    ) -> Result<Value, StoreError> {
        let result = self.server.run(script, &push_args).await;
        #[cfg(feature = "cluster")]
        if let Err(error) = &result
            && error.redirects()
            && let Some(cluster) = self.cluster.upgrade()
        {
            return Box::pin(cluster.run(slot(), error.clone(), script, &push_args)).await;
        }
        result
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
        let refund = async { self.run(&REFUND, ask, push_args).await.map(drop) };
        self.guard.call(refund).await
    }

    /// Forgets all that is known of those whom an ask is for.
    pub(super) async fn reset(&self, ask: &Ask) -> Option<()> {
        let push_args = |command: &mut _| codec::push_reset(command, ask);
        let reset = async { self.run(&RESET, ask, push_args).await.map(drop) };
        self.guard.call(reset).await
    }

    pub(super) async fn check(&self) -> Result<Vec<Warning>, StoreError> {
        let key = self.check_key();
        // A connection may have to be made first.
        let patience = 10 * self.deadline;
        let looked_over =
            timeout(patience, checks::look_over(&self.server, &key, &self.uses)).await;
        looked_over.unwrap_or(Err(StoreError::Late))
    }

    #[cfg(not(feature = "cluster"))]
    fn check_key(&self) -> String {
        format!("{}:check", self.prefix)
    }

    /// A key for the check: in a cluster, one that belongs to this node.
    #[cfg(feature = "cluster")]
    fn check_key(&self) -> String {
        let tag = self.cluster.upgrade().and_then(|cluster| cluster.tag_of(self));
        match tag {
            None => format!("{}:check", self.prefix),
            Some(tag) => format!("{}:check:{{{tag}}}", self.prefix),
        }
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
fn hook(look_over: Arc<AtomicU8>, own: Option<Arc<Hook>>) -> Hook {
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
