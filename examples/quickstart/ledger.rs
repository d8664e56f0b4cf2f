//! What the server decided, in order.

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::Response,
};
use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};
use tollgate::{Decision, Rejection};

/// The decisions of a server, until it is closed.
#[derive(Clone, Default)]
pub(crate) struct Ledger(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    list: Vec<Entry>,
    closed: bool,
}

/// One decision.
pub(crate) struct Entry {
    /// The time that the decision was made at and counted by.
    pub(crate) time: Duration,
    pub(crate) caller: String,
    pub(crate) is_write: bool,
    /// The policies that rejected the request; none if it was admitted.
    pub(crate) rejected_by: Vec<&'static str>,
}

impl Ledger {
    /// The entries up to now. There will be no others.
    pub(crate) fn close(&self) -> Vec<Entry> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        entries.closed = true;
        mem::take(&mut entries.list)
    }

    fn write(&self, entry: Entry) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !entries.closed {
            entries.list.push(entry);
        }
    }
}

/// Middleware outside of the rate limit that enters its decisions into the ledger.
///
/// The response of a request that was rejected has the rejection in its extensions; that of a
/// request that was admitted has the decision there, because the handler put it there. Between a
/// decision and its entry nothing waits, so that on one thread the entries are in the order of the
/// decisions.
pub(crate) async fn record(State(ledger): State<Ledger>, request: Request, next: Next) -> Response {
    let caller = request.headers().get("x-api-key").and_then(|key| key.to_str().ok());
    let caller = caller.unwrap_or_default().to_owned();
    let is_write = request.method() != "GET";

    let response = next.run(request).await;
    let extensions = response.extensions();
    let decided = match (extensions.get::<Decision>(), extensions.get::<Rejection>()) {
        (Some(decision), _) => Some((decision.time(), Vec::new())),
        (None, Some(rejection)) => Some((rejection.time(), rejection.policies().collect())),
        (None, None) => None,
    };
    if let Some((time, rejected_by)) = decided {
        ledger.write(Entry { time, caller, is_write, rejected_by });
    }
    response
}
