//! The scripts that decide on the server. They live in `lua/`, where what they share is written once.

use redis::Script;
use std::sync::LazyLock;

/// The text of a script, and the hash that a server knows it by.
pub(super) struct KnownScript {
    pub(super) text: &'static str,
    pub(super) hash: String,
}

impl KnownScript {
    fn new(text: &'static str) -> Self {
        Self { text, hash: Script::new(text).get_hash().to_owned() }
    }
}

/// A script with all that it shares before it, and with a short way before most of that, if it has one.
macro_rules! with_shared {
    ($file:literal $(, short_way: $short_way:literal)?) => {
        LazyLock::new(|| {
            KnownScript::new(concat!(
                include_str!("../../../lua/shared/prelude.lua"),
                $(include_str!($short_way),)?
                include_str!("../../../lua/shared/calendar.lua"),
                include_str!("../../../lua/shared/meter.lua"),
                include_str!("../../../lua/shared/fixed_window.lua"),
                include_str!("../../../lua/shared/sliding_window.lua"),
                include_str!("../../../lua/shared/sliding_log.lua"),
                include_str!("../../../lua/shared/lease.lua"),
                include_str!("../../../lua/shared/leases.lua"),
                include_str!("../../../lua/shared/identity.lua"),
                include_str!($file),
            ))
        })
    };
}

/// Decides a batch of requests.
pub(super) static DECIDE: LazyLock<KnownScript> =
    with_shared!("../../../lua/decide.lua", short_way: "../../../lua/decide_buckets.lua");

/// Gives back what a request was charged.
pub(super) static REFUND: LazyLock<KnownScript> = with_shared!("../../../lua/refund.lua");

/// Forgets what is known of those whom a request is for.
pub(super) static RESET: LazyLock<KnownScript> = with_shared!("../../../lua/reset.lua");

/// Makes leases last, and ends others.
pub(super) static LEASES: LazyLock<KnownScript> = LazyLock::new(|| {
    KnownScript::new(concat!(
        include_str!("../../../lua/shared/prelude.lua"),
        include_str!("../../../lua/shared/lease.lua"),
        include_str!("../../../lua/leases.lua"),
    ))
});

/// Looks for what would be in the way.
pub(super) static CHECK: LazyLock<KnownScript> =
    LazyLock::new(|| KnownScript::new(include_str!("../../../lua/check.lua")));

/// Tells how many requests an instance has in flight, and finds out how many all have.
pub(super) static FLEET: LazyLock<KnownScript> =
    LazyLock::new(|| KnownScript::new(include_str!("../../../lua/fleet.lua")));
