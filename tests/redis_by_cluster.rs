//! All that is promised of limits in Redis and Valkey, once more with a cluster.

#[path = "redis.rs"]
mod redis;
