//! How many requests the instances of a fleet have in flight.

use super::{Nodes, Place, RedisStore, StoreError, codec, scripts::FLEET};
use redis::from_redis_value;
use xxhash_rust::xxh3::xxh3_128;

/// What all instances have in flight, as they last told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FleetSum {
    pub(crate) critical: u64,
    pub(crate) other: u64,
    pub(crate) instances: u64,
}

impl RedisStore {
    /// Where a key is that is not that of an identity.
    fn place_of_name(&self, key: &str) -> Place {
        match &self.shared.nodes {
            #[cfg(feature = "cluster")]
            Nodes::Cluster(_) => Place(codec::slot_of_name(key).into()),
            Nodes::One(_) | Nodes::Shards(_) => self.place_of(xxh3_128(key.as_bytes()).into()),
        }
    }

    /// Tells how many critical and other requests an instance has in flight, which counts for so long,
    /// or with 0 that it is going. `None` if the server does not answer.
    pub(crate) async fn tell_fleet(
        &self,
        key: &str,
        id: &str,
        lease_ms: u64,
        load: [u64; 2],
    ) -> Option<FleetSum> {
        // One of them counts all.
        let node = self.node(self.place_of_name(key)).await?;
        let tell = async {
            let slot = || codec::slot_of_name(key);
            let reply = node.run_on(slot, &FLEET, |command| {
                command.arg(1).arg(key).arg(id).arg(lease_ms).arg(&load);
            });
            let (critical, other, instances) =
                from_redis_value(reply.await?).map_err(|_| StoreError::unreadable())?;
            Ok::<_, StoreError>(FleetSum { critical, other, instances })
        };
        node.guard.call(tell).await
    }
}
