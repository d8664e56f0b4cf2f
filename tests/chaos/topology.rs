//! Where state is: real servers, and the ways of each instance to them.

use crate::{
    client::{DEADLINE, LEASE},
    support::{
        ms,
        proxy::{self, Proxy},
        sentinels::{Group, NAME},
        server::{Flavour, Server},
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
}

pub(crate) struct Topology {
    pub(crate) servers: Servers,
    /// By instance and server; none where servers are found by what others say.
    proxies: Vec<Vec<Proxy>>,
}

pub(crate) enum Servers {
    Alone(Vec<Server>),
    Sentinels(Group),
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Standalone, Self::Shards, Self::Sentinel];

    pub(crate) fn named(name: &str) -> Self {
        let named = |kind: &Self| format!("{kind:?}") == name;
        Self::ALL.into_iter().find(named).expect("the name of a topology")
    }

    /// How many servers faults can choose from.
    pub(crate) fn servers(self) -> u64 {
        match self {
            Self::Standalone | Self::Sentinel => 1,
            Self::Shards => 3,
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
        };
        let proxies = match &servers {
            Servers::Alone(servers) => {
                let to_all = |_| {
                    let to = |server: &Server| runtime.block_on(Proxy::start(server.port()));
                    servers.iter().map(to).collect()
                };
                (0..instances).map(to_all).collect()
            }
            Servers::Sentinels(_) => Vec::new(),
        };
        Self { servers, proxies }
    }

    /// What an instance is told of the servers.
    pub(crate) fn urls(&self, instance: u64) -> String {
        let urls = match &self.servers {
            Servers::Alone(_) => self.proxies[instance as usize].iter().map(Proxy::url).collect(),
            Servers::Sentinels(group) => group.urls(),
        };
        urls.join(",")
    }

    /// A server by its number.
    pub(crate) fn server(&mut self, number: u64) -> &mut Server {
        match &mut self.servers {
            Servers::Alone(servers) => &mut servers[number as usize],
            Servers::Sentinels(group) => {
                let port = group.named_port();
                group.servers.iter_mut().find(|server| server.port() == port).expect("one of them")
            }
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
