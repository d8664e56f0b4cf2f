//! Concurrency limits with slots in this process and in Redis.

use super::{
    fleet::{names, patient, until},
    server::{Flavour, Server},
};
use tollgate::{Policy, RateLimitLayer, RateLimitLayerBuilder, key::Global, redis::RedisStore};

/// A layer with a concurrency limit named `in-flight`, and where its slots are.
pub(crate) struct Gate {
    pub(crate) layer: RateLimitLayer,
    pub(crate) redis: Option<(RedisStore, Server)>,
}

impl Gate {
    pub(crate) fn local(
        configure: impl FnOnce(RateLimitLayerBuilder) -> RateLimitLayerBuilder,
    ) -> Self {
        let layer = configure(RateLimitLayer::builder().key(Global)).build().unwrap();
        Self { layer, redis: None }
    }

    pub(crate) fn redis(
        configure: impl FnOnce(RateLimitLayerBuilder) -> RateLimitLayerBuilder,
    ) -> Self {
        let server = Server::start(Flavour::Redis7);
        let store = patient(&server).build().unwrap();
        let builder = RateLimitLayer::builder().key(Global).store(store.clone());
        Self { layer: configure(builder).build().unwrap(), redis: Some((store, server)) }
    }

    /// One of each kind.
    pub(crate) fn both(
        configure: impl Fn(RateLimitLayerBuilder) -> RateLimitLayerBuilder,
    ) -> [Self; 2] {
        [Self::local(&configure), Self::redis(&configure)]
    }

    /// So many slots for everybody together.
    pub(crate) fn slots(limit: u32) -> [Self; 2] {
        Self::both(|builder| builder.policy(Policy::concurrency("in-flight", limit)))
    }

    /// How many slots are held, as this process knows.
    pub(crate) fn held(&self) -> u64 {
        self.layer.limiter().in_flight("in-flight").unwrap()
    }

    /// Sees to it that so many slots are held, also as the server knows: there they are released in the
    /// background.
    pub(crate) async fn holds(&self, slots: u64) {
        assert_eq!(self.held(), slots);
        if let Some((store, server)) = &self.redis {
            until("the server counts the same", async || leases_on(server) == slots).await;
            assert_eq!(store.leases().lost, 0);
        }
    }

    /// The same, soon: somebody else is still at it.
    pub(crate) async fn comes_to_hold(&self, slots: u64) {
        until("so many slots are held", async || self.held() == slots).await;
        self.holds(slots).await;
    }
}

/// How many slots are held by all sets of leases on a server.
pub(crate) fn leases_on(server: &Server) -> u64 {
    let is_set = |name: &String| server.command(&["TYPE", name]).text() == "zset";
    let sets = names(server).into_iter().filter(is_set);
    sets.map(|set| server.command(&["ZCARD", &set]).number() as u64).sum()
}
