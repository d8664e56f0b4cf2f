//! All that is promised of limits in Redis and Valkey, once more with a store of shards.

#[path = "redis.rs"]
mod redis;
