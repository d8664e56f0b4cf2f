//! Gives each plan its own quota, looked up for each request.
//!
//! The plan may change at any time, and a caller who moves to another one keeps what it has used.
//! Internal callers are not limited at all.
//!
//! ```text
//! cargo run --example plans
//! ```

use axum::{Router, body::Body, routing::get};
use http::{Request, StatusCode, request::Parts};
use std::{
    collections::HashMap,
    error::Error,
    sync::{Arc, PoisonError, RwLock},
};
use tollgate::{BuildError, Policy, Quota, RateLimitLayer, key::Header};
use tower::ServiceExt;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Plan {
    Free,
    Pro,
    Internal,
}

/// The callers' plans, by their API keys. This may as well be a cache of what a database says; it is
/// asked for each request and must not block.
#[derive(Clone, Debug)]
struct Plans(Arc<RwLock<HashMap<&'static str, Plan>>>);

impl Plans {
    /// The plan of whoever sent the request; of an unknown caller, the free one.
    fn of(&self, parts: &Parts) -> Plan {
        let key = parts.headers.get("x-api-key").and_then(|key| key.to_str().ok());
        let plans = self.0.read().unwrap_or_else(PoisonError::into_inner);
        key.and_then(|key| plans.get(key).copied()).unwrap_or(Plan::Free)
    }

    fn set(&self, key: &'static str, plan: Plan) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(key, plan);
    }
}

fn limits(plans: &Plans) -> Result<RateLimitLayer, BuildError> {
    let (is_limited, quota) = (plans.clone(), plans.clone());
    RateLimitLayer::builder()
        .policy(
            Policy::token_bucket("plan", Quota::per_hour(5))
                .key(Header::from_static("x-api-key"))
                .when(move |parts| is_limited.of(parts) != Plan::Internal)
                .quota_for(move |parts| match quota.of(parts) {
                    Plan::Pro => Some(Quota::per_hour(20)),
                    // The quota that the policy was made with.
                    Plan::Free | Plan::Internal => None,
                }),
        )
        .build()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let plans = Plans(Arc::new(RwLock::new(HashMap::from([
        ("ann", Plan::Free),
        ("ben", Plan::Pro),
        ("job", Plan::Internal),
    ]))));
    let app = Router::new().route("/", get(|| async { "hello" })).layer(limits(&plans)?);

    assert_eq!(admitted(&app, "ann", 30).await?, 5);
    assert_eq!(admitted(&app, "ben", 30).await?, 20);
    assert_eq!(admitted(&app, "job", 30).await?, 30);

    println!("ann upgrades to the pro plan");
    plans.set("ann", Plan::Pro);
    assert_eq!(admitted(&app, "ann", 30).await?, 15, "20, of which 5 are used");
    Ok(())
}

/// Sends so many requests and counts those that get through.
async fn admitted(app: &Router, key: &str, requests: u32) -> Result<u32, Box<dyn Error>> {
    let mut admitted = 0;
    let mut last = None;
    for _ in 0..requests {
        let request = Request::get("/").header("x-api-key", key).body(Body::empty())?;
        let response = app.clone().oneshot(request).await?;
        match response.status() {
            StatusCode::OK => admitted += 1,
            StatusCode::TOO_MANY_REQUESTS => {}
            other => return Err(format!("{key} got {other}").into()),
        }
        last = response.headers().get("ratelimit-policy").cloned();
    }
    println!("{key}: {admitted} of {requests} admitted, ratelimit-policy: {last:?}");
    Ok(admitted)
}
