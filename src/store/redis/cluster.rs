//! A Redis Cluster: which primary has which slot, and how to follow when slots move.
//!
//! Each primary is a node with a lane, a guard and leases of its own, so one that is down is no matter to
//! the others. Which has which slot is asked when the first request comes, when a node sends elsewhere,
//! and when one fails to decide.

use super::{
    ConfigError,
    codec::{SLOTS_OF_CLUSTER, slot_of_tag},
    connection::Source,
    error::{Redirect, StoreError},
    node::{Node, NodeSettings},
    scripts::KnownScript,
};
use crate::clock::Clock;
use futures_util::future::select_ok;
use parking_lot::Mutex;
use redis::{Cmd, ConnectionAddr, ConnectionInfo, RedisError, Value, cmd};
use std::{
    fmt,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::Mutex as AsyncMutex,
    time::{sleep, timeout},
};

pub(super) struct Cluster {
    /// The nodes that the application named, through which the others are found.
    seeds: Box<[(String, Arc<Node>)]>,
    /// How to speak to all nodes.
    settings: ConnectionInfo,
    node_settings: NodeSettings,
    map: Mutex<Arc<Map>>,
    /// Whoever looks for the slots. Others wait for what comes of that.
    looking: AsyncMutex<()>,
    /// Before when not to look again.
    next_look_us: AtomicU64,
    clock: Clock,
    this: Weak<Self>,
}

/// Who has which slot.
struct Map {
    nodes: Vec<(String, Arc<Node>)>,
    /// For each slot an index in `nodes`, or [`NOBODY`].
    owners: Box<[u16]>,
    /// How many maps there were before.
    number: u64,
}

const NOBODY: u16 = u16::MAX;

/// How often to look for the slots at most. When a primary fails, that is how soon its successor is
/// found once the cluster has one.
const LOOK_EVERY_US: u64 = 100_000;

/// How long to wait for keys that are on their way, at first.
const PAUSE: Duration = Duration::from_millis(1);

impl Cluster {
    pub(super) fn new(
        seeds: Vec<Result<ConnectionInfo, RedisError>>,
        mut node_settings: NodeSettings,
    ) -> Result<Arc<Self>, ConfigError> {
        let unusable = |message: String| ConfigError::Cluster { message };
        node_settings.limits.by_slot = true;
        let seeds: Vec<_> = seeds
            .into_iter()
            .collect::<Result<_, _>>()
            .map_err(|error| unusable(error.to_string()))?;
        let Some(settings) = seeds.first().cloned() else {
            return Err(unusable("there is none; name one or more".to_owned()));
        };
        if seeds.iter().any(|seed| seed.redis_settings().db() != 0) {
            return Err(unusable("a cluster has no databases; leave out the number".to_owned()));
        }
        let names: Vec<_> = seeds
            .iter()
            .map(|seed| match seed.addr() {
                ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
                    Ok(format!("{host}:{port}"))
                }
                _ => Err(unusable("nodes are reached by TCP".to_owned())),
            })
            .collect::<Result<_, _>>()?;
        let mut error = None;
        let cluster = Arc::new_cyclic(|this: &Weak<Self>| {
            let seeds = names.into_iter().zip(&seeds).filter_map(|(name, seed)| {
                let source = Source::own(seed, &node_settings.limits);
                let source = source.map_err(|reason| error = Some(reason)).ok()?;
                let node = node_settings.node(source).of(this.clone());
                Some((name, Arc::new(node)))
            });
            let seeds = seeds.collect();
            let owners = vec![NOBODY; SLOTS_OF_CLUSTER.into()].into();
            Self {
                seeds,
                settings,
                node_settings,
                map: Mutex::new(Arc::new(Map { nodes: Vec::new(), owners, number: 0 })),
                looking: AsyncMutex::new(()),
                next_look_us: AtomicU64::new(0),
                clock: Clock::system(),
                this: this.clone(),
            }
        });
        match error {
            None => Ok(cluster),
            Some(error) => Err(unusable(error.to_string())),
        }
    }

    /// The node that has a slot, or if nobody has told, one that will send elsewhere.
    pub(super) async fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        let map = self.map();
        if let Some(node) = map.owner(slot) {
            return Some(node);
        }
        Box::pin(self.look(map.number)).await;
        self.map().owner(slot).or_else(|| {
            let nodes = self.nodes();
            nodes.get(usize::from(slot) % nodes.len()).map(|(_, node)| node.clone())
        })
    }

    /// Whether the node that has a slot can be asked, as far as anybody knows.
    pub(super) fn is_up(&self, slot: u16) -> bool {
        self.map().owner(slot).is_none_or(|node| node.guard.is_up())
    }

    /// All nodes that are known.
    pub(super) fn nodes(&self) -> Vec<(String, Arc<Node>)> {
        let map = self.map();
        if map.nodes.is_empty() { self.seeds.to_vec() } else { map.nodes.clone() }
    }

    /// Looks for the slots in the background.
    pub(super) fn look_again(&self) {
        if self.has_looked(self.clock.now_us()) {
            return;
        }
        if let Some(cluster) = self.this.upgrade() {
            let known = self.map().number;
            Handle::current().spawn(async move { cluster.look(known).await });
        }
    }

    /// Whether somebody has looked for them just now.
    fn has_looked(&self, now_us: u64) -> bool {
        // A clock that was put back must not keep anybody from looking.
        (1..=LOOK_EVERY_US).contains(&self.next_look_us.load(Relaxed).saturating_sub(now_us))
    }

    /// Asks who has which slot, unless somebody else has just done so.
    async fn look(&self, known: u64) {
        let patience = self.node_settings.limits.patience;
        let Ok(_looking) = timeout(patience, self.looking.lock()).await else {
            return;
        };
        let now_us = self.clock.now_us();
        if self.map().number != known || self.has_looked(now_us) {
            return;
        }
        self.next_look_us.store(now_us + LOOK_EVERY_US, Relaxed);
        let known = self.nodes();
        let others =
            self.seeds.iter().filter(|(seed, _)| known.iter().all(|(name, _)| name != seed));
        let asked = known.iter().chain(others).map(|(name, node)| {
            Box::pin(async move {
                let slots = node.server.source.query(cmd("CLUSTER").arg("SLOTS")).await?;
                read_slots(&slots, name).ok_or_else(StoreError::unreadable)
            })
        });
        // The first that answers; they agree but for moments.
        match timeout(patience, select_ok(asked)).await {
            Ok(Ok((ranges, _))) => self.install(&ranges),
            Ok(Err(error)) => tracing::debug!(target: "tollgate", %error, "no node told the slots"),
            Err(_) => tracing::debug!(target: "tollgate", "no node told the slots in time"),
        }
    }

    fn install(&self, ranges: &[Range]) {
        let mut owners = vec![NOBODY; SLOTS_OF_CLUSTER.into()];
        let mut nodes = Vec::<(String, Arc<Node>)>::new();
        for Range { first, last, address } in ranges {
            let Some(node) = self.node_at(address) else {
                continue;
            };
            let known = nodes.iter().position(|(name, _)| name == address);
            let index = known.unwrap_or_else(|| {
                nodes.push((address.clone(), node));
                nodes.len() - 1
            });
            owners[usize::from(*first)..=usize::from(*last)].fill(index as u16);
        }
        let mut map = self.map.lock();
        // Whoever had a slot that nobody has at the moment will know more.
        for (owner, before) in owners.iter_mut().zip(&map.owners) {
            if let (NOBODY, Some(before)) = (*owner, map.nodes.get(usize::from(*before))) {
                let known = nodes.iter().position(|(name, _)| *name == before.0);
                let index = known.unwrap_or_else(|| {
                    nodes.push(before.clone());
                    nodes.len() - 1
                });
                *owner = index as u16;
            }
        }
        let number = map.number + 1;
        *map = Arc::new(Map { nodes, owners: owners.into(), number });
    }

    /// The node at an address, known or new.
    fn node_at(&self, address: &str) -> Option<Arc<Node>> {
        let map = self.map();
        let mut known = map.nodes.iter().chain(&self.seeds);
        if let Some((_, node)) = known.find(|(name, _)| name == address) {
            return Some(node.clone());
        }
        let (host, port) = address.rsplit_once(':')?;
        let (host, port) = (host.to_owned(), port.parse().ok()?);
        let address = match self.settings.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        let settings = self.settings.clone().set_addr(address);
        let source = Source::own(&settings, &self.node_settings.limits).ok()?;
        Some(Arc::new(self.node_settings.node(source).of(self.this.clone())))
    }

    /// A node has said that a slot is at an address now.
    fn moved(&self, slot: u16, address: &str) -> Option<Arc<Node>> {
        let node = self.node_at(address)?;
        let mut map = self.map.lock();
        if map.nodes.get(usize::from(map.owners[usize::from(slot)])).is_some_and(|o| o.0 == address)
        {
            return map.owner(slot);
        }
        let mut nodes = map.nodes.clone();
        let known = nodes.iter().position(|(name, _)| name == address);
        let index = known.unwrap_or_else(|| {
            nodes.push((address.to_owned(), node));
            nodes.len() - 1
        });
        let node = nodes[index].1.clone();
        let mut owners = map.owners.clone();
        owners[usize::from(slot)] = index as u16;
        *map = Arc::new(Map { nodes, owners, number: map.number + 1 });
        drop(map);
        // Where one has moved, others have.
        self.look_again();
        Some(node)
    }

    /// Runs a script that a node has sent elsewhere, until it ran or the caller gives up. A node that sends
    /// elsewhere has not run it.
    pub(super) async fn run(
        &self,
        slot: u16,
        mut error: StoreError,
        script: &KnownScript,
        push_args: &impl Fn(&mut Cmd),
    ) -> Result<Value, StoreError> {
        let mut pause = PAUSE;
        for number in 0_u32.. {
            if number > 1 || error.redirect() == Some(Redirect::TryAgain) {
                // The keys, or the news of where they are, are on their way.
                sleep(pause).await;
                pause *= 2;
            }
            let lost = || StoreError::no_connection("nobody knows who has the slot");
            let result = match error.redirect() {
                None => return Err(error),
                Some(Redirect::Moved(address)) => {
                    let node = self.moved(slot, address).ok_or_else(lost)?;
                    node.server.run(script, push_args).await
                }
                Some(Redirect::Ask(address)) => {
                    let node = self.node_at(address).ok_or_else(lost)?;
                    node.server.run_asking(script, push_args).await
                }
                Some(Redirect::TryAgain) => {
                    let node = self.owner(slot).await.ok_or_else(lost)?;
                    node.server.run(script, push_args).await
                }
            };
            match result {
                Err(again) if again.redirects() => error = again,
                result => return result,
            }
        }
        Err(error)
    }

    /// A hash tag whose slot is a node's.
    pub(super) fn tag_of(&self, node: &Node) -> Option<String> {
        let map = self.map();
        let is_it = |(_, other): &(String, Arc<Node>)| std::ptr::eq(&raw const **other, node);
        let index = map.nodes.iter().position(is_it)? as u16;
        let mut tags = (0..100_000).map(|number: u32| number.to_string());
        tags.find(|tag| map.owners[usize::from(slot_of_tag(tag.as_bytes()))] == index)
    }

    fn map(&self) -> Arc<Map> {
        self.map.lock().clone()
    }
}

impl Map {
    fn owner(&self, slot: u16) -> Option<Arc<Node>> {
        let index = self.owners[usize::from(slot)];
        self.nodes.get(usize::from(index)).map(|(_, node)| node.clone())
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.nodes()).finish()
    }
}

/// Slots that one primary has.
#[derive(Debug, PartialEq, Eq)]
struct Range {
    first: u16,
    last: u16,
    address: String,
}

/// Reads what `CLUSTER SLOTS` says: for each range its first and last slot, its primary, its replicas; of
/// each the host, the port, and more. An empty host is that of the node that says so. `None` if it is
/// something else.
fn read_slots(reply: &Value, told_by: &str) -> Option<Vec<Range>> {
    let Value::Array(ranges) = reply else { return None };
    let range = |range: &Value| {
        let Value::Array(parts) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = &parts[..] else {
            return None;
        };
        let [host, Value::Int(port), ..] = &primary[..] else { return None };
        let host = match host {
            Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
            Value::SimpleString(host) => host.clone(),
            Value::Nil => String::new(),
            _ => return None,
        };
        let own = told_by.rsplit_once(':').map_or(told_by, |(host, _)| host);
        let host = if host.is_empty() || host == "?" { own } else { &host };
        let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
        let in_order = first <= last && last < SLOTS_OF_CLUSTER;
        in_order.then(|| Range { first, last, address: format!("{host}:{port}") })
    };
    ranges.iter().map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_which_slot_is_read() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let node = |host, port| Value::Array(vec![host, Value::Int(port), text("id")]);
        let range = |first, last, node| {
            Value::Array(vec![Value::Int(first), Value::Int(last), node, Value::Int(0)])
        };
        let reply = Value::Array(vec![
            range(0, 99, node(text("10.0.0.1"), 7_000)),
            range(100, 16_383, node(text(""), 7_001)),
        ]);
        let owned = |first, last, address: &str| Range { first, last, address: address.to_owned() };
        let ranges = vec![owned(0, 99, "10.0.0.1:7000"), owned(100, 16_383, "seed:7001")];
        assert_eq!(read_slots(&reply, "seed:6379"), Some(ranges));
        assert_eq!(read_slots(&Value::Array(vec![]), "seed:1"), Some(vec![]));
        for wrong in [
            Value::Okay,
            Value::Array(vec![Value::Nil]),
            Value::Array(vec![range(5, 4, node(text("a"), 1))]),
            Value::Array(vec![range(0, 16_384, node(text("a"), 1))]),
        ] {
            assert_eq!(read_slots(&wrong, "seed:1"), None, "{wrong:?}");
        }
    }
}
