//! All that is promised of limits in Redis and Valkey, once more with a server that a sentinel names.

#[path = "redis.rs"]
mod redis;
