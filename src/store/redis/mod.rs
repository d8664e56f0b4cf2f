//! State shared by the fleet, in Redis or Valkey.
//!
//! All policies of a request are decided by one script call, all or nothing, by the server's clock.
//! Requests that wait at the same time go together. No request waits longer than the deadline: when
//! the server is slow, full or gone, each policy answers by its
//! [failure mode](crate::Policy::on_store_failure).
//!
//! ```no_run
//! use tollgate::{Policy, Quota, RateLimitLayer, key::PeerIp, redis::RedisStore};
//!
//! let layer = RateLimitLayer::builder()
//!     .store(RedisStore::builder("redis://127.0.0.1/").namespace("api").build()?)
//!     .key(PeerIp::new())
//!     .policy(Policy::token_bucket("burst", Quota::per_second(100)))
//!     .build()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answer;
mod checks;
#[cfg(feature = "cluster")]
mod cluster;
mod codec;
mod connection;
mod deferred;
mod error;
mod fleet;
mod keeper;
mod lane;
mod leases;
mod node;
mod scripts;
#[cfg(feature = "sentinel")]
mod sentinel;
mod server;
mod shards;

pub use crate::resilience::{Health, StateChange};
pub use bb8_redis;
pub use checks::Warning;
pub use deferred::{DeferredHealth, DeferredStore};
pub use error::StoreError;
pub use leases::LeaseHealth;
pub use redis as client;

pub(crate) use answer::{fill_in, fill_in_slot, memory};
pub(crate) use codec::{Ask, AskedCharge, CodedRule, MOST_LEASED, PolicyId, Purpose, Told};
pub(crate) use deferred::Tally;
pub(crate) use fleet::FleetSum;
pub(crate) use leases::Lease;

use crate::{
    clock::Clock,
    key::Fingerprint,
    resilience::{Hook, breaker},
};
use bb8::Pool;
use bb8_redis::RedisConnectionManager;
#[cfg(feature = "cluster")]
use cluster::Cluster;
use connection::Source;
use lane::Limits;
use node::{Node, NodeSettings};
use redis::{ConnectionInfo, IntoConnectionInfo};
use shards::Shards;
use std::{
    error::Error,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::time::{Instant, timeout_at};

/// State in Redis or Valkey, shared by all instances that name the same server and namespace.
///
/// A budget belongs to a namespace, the name of a policy and a key: layers that share those, in one
/// process or in many, share the budget. Give layers that should not a
/// [namespace](RedisStoreBuilder::namespace) each.
///
/// Clones share connections, and so do all layers that are built with one of them. Connections are
/// made when the first request needs them; a server that is not there does not keep a service from
/// starting.
///
/// # Rights
///
/// An ACL user needs no more than this, with the namespace in place of `api`, or `~tg:*` without one.
/// `+msetex` is of use where the server has it, and `+info` for [`check`](Self::check) to see more than
/// what is missing. A [`FleetShedder`](crate::shed::FleetShedder) takes `+hset +hdel +hgetall` as well, a
/// database other than 0 `+select`, and a pool of your own that tests its connections `+ping`.
///
/// ```text
/// ACL SETUSER api on >password ~tg:api:* -@all +evalsha +eval +time +mget +set +del
///     +getrange +setrange +pexpire +msetex +info
/// ```
///
/// Policies that limit concurrency take `+zadd +zrem +zcard +zremrangebyscore +pttl` as well.
#[derive(Clone, Debug)]
pub struct RedisStore {
    shared: Arc<Shared>,
}

struct Shared {
    nodes: Nodes,
    /// What the names of all keys begin with.
    prefix: Arc<str>,
    key: Arc<[u8]>,
    instances: u32,
    deadline: Duration,
    lease: Duration,
    given_back: [AtomicU64; 2],
}

/// The servers that state is on.
enum Nodes {
    One(Arc<Node>),
    Shards(Shards),
    #[cfg(feature = "cluster")]
    Cluster(Arc<Cluster>),
}

/// Where state is, among the nodes of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place(usize);

/// Puts a [`RedisStore`] together.
pub struct RedisStoreBuilder {
    source: Given,
    namespace: Option<String>,
    key: Vec<u8>,
    deadline: Duration,
    batch: usize,
    in_flight: usize,
    instances: u32,
    lease: Duration,
    breaker: breaker::Settings,
    hook: Option<Hook>,
    clock: Option<Clock>,
}

/// What a store was told about its server.
enum Given {
    Info(Box<Result<ConnectionInfo, redis::RedisError>>),
    Pool(Pool<RedisConnectionManager>),
    #[cfg(feature = "sentinel")]
    Sentinels(Box<sentinel::Given>),
    #[cfg(feature = "cluster")]
    Cluster(Vec<Result<ConnectionInfo, redis::RedisError>>),
}

/// Why a store cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The server's address is none.
    Address {
        /// Why. It does not repeat the address, which may hold a password.
        message: String,
    },
    /// The sentinels, or what was told of their primary, cannot be used.
    Sentinel {
        /// Why. It does not repeat addresses, which may hold passwords.
        message: String,
    },
    /// A namespace is not of the form `[A-Za-z0-9_.-]{1,64}`.
    Namespace {
        /// The namespace.
        namespace: String,
    },
    /// The nodes of a cluster cannot be used.
    Cluster {
        /// Why. It does not repeat addresses, which may hold passwords.
        message: String,
    },
    /// Shards cannot be those of one store.
    Shards {
        /// Why.
        message: String,
    },
    /// An option is zero, or larger than what makes sense.
    OutOfRange {
        /// The option.
        option: &'static str,
        /// The least and the most that it can be.
        range: &'static str,
    },
}

// === impl RedisStore ===

impl RedisStore {
    /// Starts a store on the server at `address`: a URL, or the client library's
    /// [`ConnectionInfo`].
    ///
    /// | URL | what it names |
    /// |---|---|
    /// | `redis://host:6379/0` | a server and a database on it |
    /// | `redis://user:password@host` | an ACL user |
    /// | `rediss://host` | TLS by rustls; the application has to install a crypto provider |
    /// | `unix:///run/redis.sock` | a unix socket |
    ///
    /// The server is spoken to in RESP3, which Redis knows since version 6.
    #[must_use]
    pub fn builder(address: impl IntoConnectionInfo) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Given::Info(Box::new(address.into_connection_info())))
    }

    /// Starts a store on connections of a pool that the application already has.
    ///
    /// The pool's own settings count: with bb8-redis's defaults every checkout sends a PING, a second
    /// round trip. Do not turn that off with `test_on_check_out(false)`: bb8-redis knows a broken
    /// connection by nothing else, and one that is not tested stays in the pool, where every request
    /// fails that it is given to. [`builder`](Self::builder) makes a pool that is faster and safe.
    #[must_use]
    pub fn from_pool(pool: Pool<RedisConnectionManager>) -> RedisStoreBuilder {
        RedisStoreBuilder::new(Given::Pool(pool))
    }

    /// Starts a store on the primary that Redis Sentinel knows by the name `primary`, such as
    /// `mymaster`.
    ///
    /// Sentinels are given by addresses as for [`builder`](Self::builder), with credentials of their own
    /// and the port, which is 26379 most often. Any that are alive will do. How to speak to the primary
    /// is told by [`primary`](RedisStoreBuilder::primary).
    ///
    /// ```
    /// use tollgate::redis::RedisStore;
    ///
    /// let sentinels = ["a", "b", "c"].map(|host| format!("redis://:password@sentinel-{host}:26379"));
    /// let store = RedisStore::sentinel(sentinels, "mymaster")
    ///     .primary("redis://api:password@primary/0")
    ///     .build()?;
    /// # Ok::<(), tollgate::redis::ConfigError>(())
    /// ```
    ///
    /// Each new connection goes to whom most of the sentinels that answer name, and counts when that
    /// server says itself that it is a primary. When there is another primary, all connections to the
    /// old one are dropped: at once when it says that it is a replica, and else within about a second,
    /// for the sentinels are asked so often. While none of them answers, the primary that they named
    /// last stays in use.
    ///
    /// After a fail-over the new primary may lack what the old one decided last: Redis replicates in the
    /// background. While there is no primary, each policy answers by its
    /// [failure mode](crate::Policy::on_store_failure), and
    /// [`retry_every`](RedisStoreBuilder::retry_every) says how soon the new one is found.
    ///
    /// Users of sentinels need `+sentinel|get-master-addr-by-name` there, before Redis 7 `+sentinel`; the
    /// primary's user needs `+role` beside the rights above, or else a replica is known only by its refusal
    /// to write.
    #[cfg(feature = "sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
    #[must_use]
    pub fn sentinel<S>(sentinels: S, primary: impl Into<String>) -> RedisStoreBuilder
    where
        S: IntoIterator<Item: IntoConnectionInfo>,
    {
        let sentinels =
            sentinels.into_iter().map(IntoConnectionInfo::into_connection_info).collect();
        let given = sentinel::Given { name: primary.into(), sentinels, primary: None };
        RedisStoreBuilder::new(Given::Sentinels(Box::new(given)))
    }

    /// Starts a store on a Redis Cluster, which is found through any of these nodes. They have the same
    /// user, password and TLS; URLs are those of [`builder`](Self::builder), without a database.
    ///
    /// All that belongs to one key is in one slot, and is decided by one call to the primary that has it.
    /// Calls for different keys go to one primary together. A request whose policies count by several
    /// keys is as many calls, at the same time; if one of them rejects it, what it was charged by others
    /// is [given back](Self::given_back).
    ///
    /// When a slot moves, its requests follow within the deadline; nothing is charged twice, because a node
    /// that sends elsewhere has done nothing. While a slot is on its way, the servers refuse calls with
    /// several keys, which [sliding logs](crate::Policy::sliding_log) and concurrency limits need: these
    /// are tried again until the deadline, and answered by their failure modes then.
    ///
    /// A primary that is down leaves the keys of its slots to their policies' failure modes, and no others.
    /// Users need `+cluster|slots` and `+asking` beside the rights above.
    #[cfg(feature = "cluster")]
    #[cfg_attr(docsrs, doc(cfg(feature = "cluster")))]
    #[must_use]
    pub fn cluster<S>(nodes: S) -> RedisStoreBuilder
    where
        S: IntoIterator<Item: IntoConnectionInfo>,
    {
        let nodes = nodes.into_iter().map(IntoConnectionInfo::into_connection_info).collect();
        RedisStoreBuilder::new(Given::Cluster(nodes))
    }

    /// Starts a store on several independent servers, or groups of them, each with a name of its own: what
    /// belongs to one key is on one of them, by rendezvous hashing of the key and the names.
    ///
    /// A server that is down leaves its keys to their policies' failure modes, and no others. A server that
    /// is added takes over its part of the keys, which begin anew there; those of others stay where they
    /// are. All of them need the same namespace, hash secret and lease; the number of instances is that of
    /// the first, and all other settings are each server's own.
    ///
    /// ```no_run
    /// use tollgate::redis::RedisStore;
    ///
    /// let shard = |address: &str| RedisStore::builder(address).namespace("api").build();
    /// let store = RedisStore::shards([
    ///     ("a", shard("redis://10.0.0.1/")?),
    ///     ("b", shard("redis://10.0.0.2/")?),
    /// ])?;
    /// # Ok::<(), tollgate::redis::ConfigError>(())
    /// ```
    ///
    /// A request whose policies count by several keys may have them on several servers. These are asked at
    /// the same time, and if one of them rejects it, what it was charged on others is
    /// [given back](Self::given_back).
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if there is no shard, or two have the same name or differ in those settings.
    pub fn shards<N: Into<String>>(
        shards: impl IntoIterator<Item = (N, Self)>,
    ) -> Result<Self, ConfigError> {
        let shards: Vec<(String, Self)> =
            shards.into_iter().map(|(name, store)| (name.into(), store)).collect();
        let Some((_, first)) = shards.first() else {
            return Err(ConfigError::Shards { message: "there is none".to_owned() });
        };
        let Shared { prefix, key, instances, deadline, lease, .. } = &*first.shared;
        let (prefix, key) = (prefix.clone(), key.clone());
        for (name, store) in &shards {
            let Shared { prefix: own_prefix, key: own_key, lease: own_lease, .. } = &*store.shared;
            if (own_prefix, own_key, own_lease) != (&prefix, &key, lease) {
                let message =
                    format!("`{name}` has another namespace, secret or lease than the first");
                return Err(ConfigError::Shards { message });
            }
        }
        let (instances, deadline, lease) = (*instances, *deadline, *lease);
        let mut nodes = Vec::new();
        for (name, store) in shards {
            let Nodes::One(node) = &store.shared.nodes else {
                let message = format!("`{name}` is not one server, or one group with sentinels");
                return Err(ConfigError::Shards { message });
            };
            nodes.push((name, node.clone()));
        }
        let nodes = Nodes::Shards(Shards::new(nodes)?);
        Ok(Self {
            shared: Arc::new(Shared {
                nodes,
                prefix,
                key,
                instances,
                deadline,
                lease,
                given_back: Default::default(),
            }),
        })
    }

    /// How the store is doing; of several servers, all of them together: up if all are.
    #[must_use]
    pub fn health(&self) -> Health {
        let healths = self.nodes().into_iter().map(|(_, node)| node.guard.health());
        healths.reduce(Health::and).unwrap_or_default()
    }

    /// How each server is doing: shards by their names, the nodes of a cluster by their addresses.
    #[must_use]
    pub fn server_health(&self) -> Vec<(String, Health)> {
        self.nodes().into_iter().map(|(name, node)| (name, node.guard.health())).collect()
    }

    /// How many script calls decided how many requests so far.
    #[must_use]
    pub fn calls(&self) -> (u64, u64) {
        let calls = self.nodes().into_iter().map(|(_, node)| node.calls());
        calls.fold((0, 0), |sum, (calls, requests)| (sum.0 + calls, sum.1 + requests))
    }

    /// How the leases of this instance are doing.
    #[must_use]
    pub fn leases(&self) -> LeaseHealth {
        let leases = self.nodes().into_iter().map(|(_, node)| node.leases.health());
        leases.reduce(LeaseHealth::and).unwrap_or_default()
    }

    /// Looks the server over: eviction, missing rights, its role, its version, its clock. The same is
    /// done, and logged as warnings, when the first request comes, and when the server was down and is
    /// back.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the server, or one of several, does not answer.
    pub async fn check(&self) -> Result<Vec<Warning>, StoreError> {
        let mut warnings = Vec::new();
        for (_, node) in self.nodes() {
            warnings.extend(node.check().await?);
        }
        Ok(warnings)
    }

    /// How often requests with keys on several servers were charged on one of them and then rejected by
    /// another, so that the charge was given back; and how often that failed, so that it stays.
    #[must_use]
    pub fn given_back(&self) -> (u64, u64) {
        let [given, failed] = self.shared.given_back.each_ref().map(|count| count.load(Relaxed));
        (given, failed)
    }

    pub(crate) fn count_given_back(&self, given: bool) {
        self.shared.given_back[usize::from(!given)].fetch_add(1, Relaxed);
    }

    pub(crate) fn prefix(&self) -> &Arc<str> {
        &self.shared.prefix
    }

    /// What keys are hashed with.
    pub(crate) fn key(&self) -> &[u8] {
        &self.shared.key
    }

    /// By how many a limit is divided where each instance has to count alone.
    pub(crate) fn instances(&self) -> u32 {
        self.shared.instances
    }

    /// When a request that is asked now has to be answered.
    pub(crate) fn until(&self) -> Instant {
        Instant::now() + self.shared.deadline
    }

    /// The length of a lease, in microseconds.
    pub(crate) fn lease_us(&self) -> u64 {
        self.shared.lease.as_micros() as u64
    }

    /// Where the state of an identity is.
    pub(crate) fn place_of(&self, fingerprint: Fingerprint) -> Place {
        match &self.shared.nodes {
            Nodes::One(_) => Place(0),
            Nodes::Shards(shards) => Place(shards.index_of(fingerprint)),
            #[cfg(feature = "cluster")]
            Nodes::Cluster(_) => Place(codec::slot_of(fingerprint).into()),
        }
    }

    /// Whether what is in a place can be asked: its circuit breaker is closed. What nobody knows yet can.
    pub(crate) fn is_up(&self, Place(place): Place) -> bool {
        match &self.shared.nodes {
            Nodes::One(node) => node.guard.is_up(),
            Nodes::Shards(shards) => shards.node(place).guard.is_up(),
            #[cfg(feature = "cluster")]
            Nodes::Cluster(cluster) => cluster.is_up(place as u16),
        }
    }

    /// Has a request decided whose identities are all in one place. `None` means that the failure modes
    /// have to answer.
    pub(crate) async fn decide(
        &self,
        place: Place,
        ask: Arc<Ask>,
        until: Instant,
    ) -> Option<(Told, Option<Lease>)> {
        let node = timeout_at(until, self.node(place)).await.ok()??;
        let decided = node.decide(ask, until).await;
        #[cfg(feature = "cluster")]
        if let (None, Nodes::Cluster(cluster)) = (&decided, &self.shared.nodes) {
            cluster.look_again();
        }
        decided
    }

    /// Gives back what a request was charged in one place at `spent_us`, with what each algorithm has to
    /// know of that moment.
    pub(crate) async fn refund(
        &self,
        place: Place,
        ask: &Ask,
        spent_us: u64,
        memories: &[u64],
    ) -> Option<()> {
        self.node(place).await?.refund(ask, spent_us, memories).await
    }

    /// Forgets all that is known of those whom an ask is for, who are in one place.
    pub(crate) async fn reset(&self, place: Place, ask: &Ask) -> Option<()> {
        self.node(place).await?.reset(ask).await
    }

    /// From now on slots are leased, or the instances of a fleet tell each other what they have in flight.
    pub(crate) fn use_for(&self, slots: bool, fleet: bool) {
        for (_, node) in self.nodes() {
            node.uses.slots.fetch_or(slots, Relaxed);
            node.uses.fleet.fetch_or(fleet, Relaxed);
        }
    }

    /// The node that has a place. `None` if nobody knows.
    async fn node(&self, Place(place): Place) -> Option<Arc<Node>> {
        match &self.shared.nodes {
            Nodes::One(node) => Some(node.clone()),
            Nodes::Shards(shards) => Some(shards.node(place).clone()),
            #[cfg(feature = "cluster")]
            Nodes::Cluster(cluster) => cluster.owner(place as u16).await,
        }
    }

    /// All nodes that are known, by the names that they have.
    fn nodes(&self) -> Vec<(String, Arc<Node>)> {
        match &self.shared.nodes {
            Nodes::One(node) => vec![(String::new(), node.clone())],
            Nodes::Shards(shards) => shards.nodes(),
            #[cfg(feature = "cluster")]
            Nodes::Cluster(cluster) => cluster.nodes(),
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("prefix", &self.prefix)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(node) => node.fmt(f),
            Self::Shards(shards) => shards.fmt(f),
            #[cfg(feature = "cluster")]
            Self::Cluster(cluster) => cluster.fmt(f),
        }
    }
}

// === impl RedisStoreBuilder ===

impl RedisStoreBuilder {
    fn new(source: Given) -> Self {
        Self {
            source,
            namespace: None,
            key: Vec::new(),
            deadline: Duration::from_millis(50),
            batch: 64,
            in_flight: 2,
            instances: 1,
            lease: Duration::from_secs(10),
            breaker: breaker::Settings::default(),
            hook: None,
            clock: None,
        }
    }

    /// How to speak to the primary that [sentinels](RedisStore::sentinel) name: user, password, database
    /// and TLS, as a URL or [`ConnectionInfo`] whose host and port are not used. Default: no user, the
    /// database 0, no TLS.
    ///
    /// With TLS, the primary's certificate has to be for what the sentinels name: an address, or a host
    /// with `sentinel announce-hostnames yes`.
    #[cfg(feature = "sentinel")]
    #[cfg_attr(docsrs, doc(cfg(feature = "sentinel")))]
    #[must_use]
    pub fn primary(mut self, settings: impl IntoConnectionInfo) -> Self {
        let mut given = match self.source {
            Given::Sentinels(given) => given,
            _ => Box::default(),
        };
        given.primary = Some(settings.into_connection_info());
        self.source = Given::Sentinels(given);
        self
    }

    /// What tells the keys of this application, or layer, from those of others on the same server:
    /// letters, digits, `_`, `.` and `-`. All keys then begin with `tg:` and it; without one, with
    /// `tg:`. Default: none.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// A secret to hash keys with, the same on all instances. The server sees only hashes of keys in
    /// any case; under a secret, not even guessable keys such as addresses can be told from them.
    /// Default: none, plain SHA-256.
    #[must_use]
    pub fn hash_secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.key = secret.into();
        self
    }

    /// How long a request may wait for its decision before the failure modes answer. Default: 50 ms.
    #[must_use]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The most requests that go to the server in one call. Default: 64.
    #[must_use]
    pub fn batch(mut self, requests: usize) -> Self {
        self.batch = requests;
        self
    }

    /// The most calls to the server at a time. Requests that come while one is on its way gather for
    /// the next, and another call is made beside it as soon as there are enough to fill it. Default: 2.
    #[must_use]
    pub fn in_flight(mut self, calls: usize) -> Self {
        self.in_flight = calls;
        self
    }

    /// How many instances share the limits. While the server is down, each allows that part of them
    /// by itself, where the failure mode is [`Local`](crate::FailureMode::Local). Default: 1.
    #[must_use]
    pub fn instances(mut self, instances: u32) -> Self {
        self.instances = instances;
        self
    }

    /// How long the slots that a request holds in the fleet outlive its instance: the length of a lease,
    /// which is renewed three times in it. An instance that is killed, or stopped for longer, frees its
    /// slots after so long. Default: 10 s.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How many failures in a row take the server out of use. Default: 5. So does half of at least 20
    /// calls in 10 s.
    #[must_use]
    pub fn failures_to_open(mut self, failures: u32) -> Self {
        self.breaker.failures = failures;
        self
    }

    /// After how long out of use a request tries whether the server is back; when it is not, twice as
    /// long, up to `longest`. Both are varied by up to a fifth, so that instances don't come back in
    /// step. Default: 500 ms, 5 s.
    #[must_use]
    pub fn retry_every(mut self, first: Duration, longest: Duration) -> Self {
        self.breaker.open_for = first;
        self.breaker.max_open_for = longest;
        self
    }

    /// Hears when the server goes out of use and when it comes back.
    #[must_use]
    pub fn on_state_change(mut self, hook: impl Fn(&StateChange) + Send + Sync + 'static) -> Self {
        self.hook = Some(Box::new(hook));
        self
    }

    /// Sends the time of `clock` along with every call, in place of the server's own.
    #[cfg(any(test, feature = "test-util"))]
    #[cfg_attr(docsrs, doc(cfg(feature = "test-util")))]
    #[must_use]
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.clock = Some(clock.into());
        self
    }

    /// Checks the settings. No connection is made yet.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] says which setting cannot be, and why.
    pub fn build(self) -> Result<RedisStore, ConfigError> {
        let prefix = match self.namespace {
            None => "tg".to_owned(),
            Some(namespace) if is_namespace(&namespace) => format!("tg:{namespace}"),
            Some(namespace) => return Err(ConfigError::Namespace { namespace }),
        };
        let check = |in_range: bool, option, range| {
            if in_range { Ok(()) } else { Err(ConfigError::OutOfRange { option, range }) }
        };
        check((1..=1_024).contains(&self.batch), "batch", "1 to 1024")?;
        check((1..=64).contains(&self.in_flight), "in_flight", "1 to 64")?;
        check(self.instances >= 1, "instances", "1 or more")?;
        let (least, most) = (Duration::from_millis(1), Duration::from_secs(60));
        check((least..=most).contains(&self.deadline), "deadline", "1 ms to 60 s")?;
        let (shortest, longest) = (Duration::from_millis(100), Duration::from_secs(3_600));
        check((shortest..=longest).contains(&self.lease), "lease", "100 ms to 1 h")?;
        let prefix: Arc<str> = prefix.into();
        let limits = Limits {
            batch: self.batch,
            in_flight: self.in_flight,
            patience: self.deadline,
            // Two more than calls: for refunds and checks, and for leases.
            connections: self.in_flight as u32 + 2,
            #[cfg(feature = "cluster")]
            by_slot: false,
        };
        let settings = NodeSettings {
            limits,
            breaker: self.breaker,
            lease: self.lease,
            prefix: prefix.clone(),
            clock: self.clock,
            hook: self.hook.map(Arc::new),
            uses: Arc::default(),
        };
        let one = |source| Nodes::One(Arc::new(settings.node(source)));
        let nodes = match self.source {
            Given::Pool(pool) => one(Source::Given(pool)),
            Given::Info(info) => one((*info)
                .and_then(|info| Source::own(&info, &limits))
                .map_err(|error| ConfigError::Address { message: error.to_string() })?),
            #[cfg(feature = "sentinel")]
            Given::Sentinels(given) => {
                one(Source::primary(given.check(self.deadline)?, self.deadline, limits.connections))
            }
            #[cfg(feature = "cluster")]
            Given::Cluster(seeds) => Nodes::Cluster(Cluster::new(seeds, settings)?),
        };
        let shared = Shared {
            nodes,
            prefix,
            key: self.key.into(),
            instances: self.instances,
            deadline: self.deadline,
            lease: self.lease,
            given_back: Default::default(),
        };
        Ok(RedisStore { shared: Arc::new(shared) })
    }
}

fn is_namespace(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte))
}

impl fmt::Debug for RedisStoreBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStoreBuilder")
            .field("namespace", &self.namespace)
            .field("deadline", &self.deadline)
            .field("batch", &self.batch)
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { message } => write!(
                f,
                "the server's address cannot be used: {message}; it has to be like \
                 `redis://user:password@host:6379/0`, `rediss://host` or `unix:///run/redis.sock`"
            ),
            Self::Sentinel { message } => write!(f, "the sentinels cannot be used: {message}"),
            Self::Namespace { namespace } => write!(
                f,
                "`{}` is no namespace; use 1 to 64 letters, digits, `_`, `.` or `-`",
                namespace.escape_debug()
            ),
            Self::Cluster { message } => write!(f, "the cluster's nodes cannot be used: {message}"),
            Self::Shards { message } => write!(
                f,
                "these cannot be the shards of a store: {message}; give it one or more, each with a \
                 name of its own, and all with the same namespace, secret and lease"
            ),
            Self::OutOfRange { option, range } => write!(f, "`{option}` has to be {range}"),
        }
    }
}

impl Error for ConfigError {}
