//! Where state is: real servers, and the ways of each instance to them.

use crate::{
    client::{DEADLINE, LEASE},
    support::{
        clusters::Cluster,
        fleet::names,
        ms,
        proxy::{self, Proxy},
        secs,
        sentinels::{Group, NAME},
        server::{Flavour, Reply, Server, wait_until},
    },
};
use std::iter;
use tokio::runtime::Runtime;
use tollgate::redis::{RedisStore, RedisStoreBuilder};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Standalone,
    /// Three primaries that know nothing of each other. Those that there are, are the first so many.
    Shards,
    /// A primary with two replicas, and three sentinels.
    Sentinel,
    /// Three primaries with a replica each.
    Cluster,
}

pub(crate) struct Topology {
    pub(crate) servers: Servers,
    /// By instance and server; none where servers are found by what others say.
    proxies: Vec<Vec<Proxy>>,
    /// Of a cluster, the primaries that are dead, and have been replaced by their replicas.
    replaced: Vec<usize>,
}

pub(crate) enum Servers {
    Alone(Vec<Server>),
    Sentinels(Group),
    Cluster(Cluster),
}

impl Kind {
    pub(crate) const ALL: [Self; 4] =
        [Self::Standalone, Self::Shards, Self::Sentinel, Self::Cluster];

    pub(crate) fn named(name: &str) -> Self {
        let named = |kind: &Self| format!("{kind:?}") == name;
        Self::ALL.into_iter().find(named).expect("the name of a topology")
    }

    /// How many servers faults can choose from.
    pub(crate) fn servers(self) -> u64 {
        match self {
            Self::Standalone | Self::Sentinel => 1,
            Self::Shards | Self::Cluster => 3,
        }
    }

    /// What an instance keeps its state in, on as many of the servers as there are now.
    pub(crate) fn store(self, urls: &[&str], servers: usize, instances: u32) -> RedisStore {
        let configure = |builder: RedisStoreBuilder| {
            let builder = builder.namespace("chaos").deadline(DEADLINE).lease(LEASE);
            builder.instances(instances).retry_every(ms(100), ms(400)).build().unwrap()
        };
        match self {
            Self::Standalone => configure(RedisStore::builder(urls[0])),
            Self::Shards => {
                let stores = urls.iter().map(|url| configure(RedisStore::builder(*url)));
                RedisStore::shards(iter::zip(["a", "b", "c"], stores).take(servers)).unwrap()
            }
            Self::Sentinel => configure(RedisStore::sentinel(urls.iter().copied(), NAME)),
            Self::Cluster => configure(RedisStore::cluster(urls.iter().copied())),
        }
    }
}

impl Topology {
    pub(crate) fn start(kind: Kind, flavour: Flavour, instances: u64, runtime: &Runtime) -> Self {
        let servers = match kind {
            Kind::Standalone | Kind::Shards => {
                Servers::Alone((0..kind.servers()).map(|_| Server::start(flavour)).collect())
            }
            Kind::Sentinel => Servers::Sentinels(Group::start(flavour, 2)),
            // Ranges of slots are given by a command that 6.2 does not know.
            Kind::Cluster if flavour == Flavour::Redis62 => {
                Servers::Cluster(Cluster::start(Flavour::Redis7, true))
            }
            Kind::Cluster => Servers::Cluster(Cluster::start(flavour, true)),
        };
        let proxies = match &servers {
            Servers::Alone(servers) => {
                let to_all = |_| {
                    let to = |server: &Server| runtime.block_on(Proxy::start(server.port()));
                    servers.iter().map(to).collect()
                };
                (0..instances).map(to_all).collect()
            }
            Servers::Sentinels(_) | Servers::Cluster(_) => Vec::new(),
        };
        Self { servers, proxies, replaced: Vec::new() }
    }

    /// What an instance is told of the servers.
    pub(crate) fn urls(&self, instance: u64) -> String {
        let urls = match &self.servers {
            Servers::Alone(_) => self.proxies[instance as usize].iter().map(Proxy::url).collect(),
            Servers::Sentinels(group) => group.urls(),
            Servers::Cluster(cluster) => cluster.urls(),
        };
        urls.join(",")
    }

    /// A server by its number; where there are replicas, the one that is the primary by now.
    pub(crate) fn server(&mut self, number: u64) -> &mut Server {
        let number = number as usize;
        match &mut self.servers {
            Servers::Alone(servers) => &mut servers[number],
            Servers::Sentinels(group) => {
                let port = group.named_port();
                group.servers.iter_mut().find(|server| server.port() == port).expect("one of them")
            }
            Servers::Cluster(cluster) => {
                let replaced = self.replaced.contains(&number);
                &mut cluster.nodes[if replaced { number + 3 } else { number }]
            }
        }
    }

    /// Has a replica take over, in good order.
    pub(crate) fn fail_over(&self) {
        let Servers::Sentinels(group) = &self.servers else {
            unreachable!("only sentinels are told to")
        };
        let port = group.named_port();
        group.fail_over();
        group.successor_of(port);
        // Until it knows that it is one, it decides as well.
        wait_until("the old primary is a replica", || !is_primary(group.server(port)));
    }

    /// Kills a primary that has a replica, and waits until that has taken over.
    pub(crate) fn kill_primary(&mut self, number: u64) {
        match &mut self.servers {
            Servers::Alone(_) => unreachable!("there are no replicas"),
            Servers::Sentinels(group) => {
                let port = group.named_port();
                let is_it = |server: &Server| server.port() == port;
                let old = group.servers.iter().position(is_it).expect("one of them");
                group.servers[old].kill();
                group.successor_of(port);
                group.servers[old].restart();
                wait_until("the old primary is a replica", || !is_primary(group.server(port)));
            }
            Servers::Cluster(cluster) => {
                let number = number as usize;
                cluster.nodes[number].kill();
                wait_until("its replica takes over", || is_primary(&cluster.nodes[number + 3]));
                self.replaced.push(number);
            }
        }
    }

    /// Moves a slot that has keys from a node of a cluster to the next.
    pub(crate) fn move_slot(&self, number: u64) {
        let Servers::Cluster(cluster) = &self.servers else {
            unreachable!("only clusters have slots")
        };
        let from = number as usize;
        let node = &cluster.nodes[from];
        if let Some(key) = names(node).first() {
            let slot = node.command(&["CLUSTER", "KEYSLOT", key]).number();
            cluster.move_slot(slot as u16, from, (from + 1) % 3);
        }
    }

    /// Has the network between an instance and one server, or all, do this.
    pub(crate) fn set(&self, instance: u64, server: Option<u64>, fault: proxy::Fault) {
        let proxies = &self.proxies[instance as usize];
        let chosen = |number: u64| server.is_none_or(|server| server == number);
        iter::zip(0.., proxies)
            .filter(|(number, _)| chosen(*number))
            .for_each(|(_, proxy)| proxy.set(fault));
    }
}

fn is_primary(server: &Server) -> bool {
    let role = server.try_command(&["ROLE"], secs(10));
    matches!(role, Ok(Reply::Array(role)) if role[0] == Reply::bulk("master"))
}
