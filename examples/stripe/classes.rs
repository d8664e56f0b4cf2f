//! Who sends what.

use axum::http::Method;
use tollgate::Priority;

/// Requests that are as important as each other.
pub(crate) struct Class {
    /// As the service sees it.
    pub(crate) priority: Priority,
    pub(crate) method: Method,
    pub(crate) path: &'static str,
    /// What API keys begin with. A number follows.
    pub(crate) key: &'static str,
    /// How many such keys there are.
    pub(crate) keys: usize,
    /// How many connections the clients have. On each there is one request a second.
    pub(crate) connections: usize,
}

/// From the most important to the least.
///
/// A request that takes `t` seconds is in flight for that long, so `n` requests a second have `n * t` in
/// flight. While the database is slow, that would be 26 charges, 23 other writes, 16 reads and 26 tests, of
/// which the limit for a single key leaves 8 reads and 8 tests. All together are more than there are
/// workers (40), and more than the database has connections (60). The charges alone are fewer, and with a
/// quarter of the other writes they keep 32 workers busy, which is where the shedder stops to shed
/// more.
pub(crate) static CLASSES: [Class; 4] = [
    Class {
        priority: Priority::Critical,
        method: Method::POST,
        path: "/v1/charges",
        key: "sk_live_",
        keys: 12,
        connections: 40,
    },
    Class {
        priority: Priority::Write,
        method: Method::POST,
        path: "/v1/customers",
        key: "sk_live_",
        keys: 12,
        connections: 36,
    },
    // Somebody's export, with one key for all.
    Class {
        priority: Priority::Read,
        method: Method::GET,
        path: "/v1/charges",
        key: "sk_live_export_",
        keys: 1,
        connections: 24,
    },
    // Somebody's load test. A test of a critical call is a test.
    Class {
        priority: Priority::BestEffort,
        method: Method::POST,
        path: "/v1/charges",
        key: "sk_test_",
        keys: 1,
        connections: 40,
    },
];
