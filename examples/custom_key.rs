//! Counts by keys of one's own: closures, tuples, and what an authentication layer found out.
//!
//! It also shows what a policy can do with requests that have no key for it.
//!
//! ```text
//! cargo run --example custom_key
//! ```

use axum::{
    Router,
    body::Body,
    extract::Request,
    http::{StatusCode, request::Parts},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::get,
};
use std::error::Error;
use tollgate::{
    Policy, Quota, RateLimitLayer,
    key::{Extension, Header, Key, Method, MissingKey},
};
use tower::ServiceExt;

/// Who is calling, once the token is checked.
#[derive(Clone, Debug)]
struct User {
    id: u64,
    team: String,
}

/// Puts the user into the request extensions, or turns the request away.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let user = match token {
        Some("Bearer ann") => User { id: 1, team: "red".to_owned() },
        Some("Bearer ben") => User { id: 2, team: "red".to_owned() },
        Some("Bearer eve") => User { id: 3, team: "blue".to_owned() },
        _ => return StatusCode::UNAUTHORIZED.into_response(),
    };
    request.extensions_mut().insert(user);
    next.run(request).await
}

/// Each team's budget per method, and each user's. Nobody has to guess a token to use up the budget
/// of another: what was not authenticated does not get here.
fn authenticated() -> Result<Router, Box<dyn Error>> {
    let user = Extension::by(|user: &User| user.id);
    let team = Extension::by(|user: &User| user.team.clone());
    let limits = RateLimitLayer::builder()
        .policy(Policy::token_bucket("user", Quota::per_hour(3)).key(user))
        .policy(Policy::token_bucket("team-method", Quota::per_hour(4)).key((team, Method)))
        .build()?;
    // The layer that is added last is the outermost and runs first.
    Ok(app().layer(limits).layer(from_fn(authenticate)))
}

/// A closure makes the key of anything in the request. `None` means that there is no key.
fn tenant(parts: &Parts) -> Option<Key> {
    let (tenant, rest) = parts.uri.host()?.split_once('.')?;
    (rest == "example.com").then(|| Key::from(tenant))
}

fn by_tenant(missing_key: MissingKey) -> Result<Router, Box<dyn Error>> {
    let limits = RateLimitLayer::builder()
        .policy(
            Policy::token_bucket("tenant", Quota::per_hour(1)).key(tenant).missing_key(missing_key),
        )
        // Partners have a budget of their own; whoever is none needs no such header.
        .policy(
            Policy::token_bucket("partner", Quota::per_hour(1))
                .key(Header::from_static("x-partner"))
                .missing_key(MissingKey::Skip),
        )
        .build()?;
    Ok(app().layer(limits))
}

fn app() -> Router {
    Router::new().route("/", get(|| async { "hello" }).post(|| async { "done" }))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let app = authenticated()?;
    let call = |method, token| {
        Request::builder()
            .method(method)
            .uri("/")
            .header("authorization", token)
            .body(Body::empty())
    };
    println!("users and teams");
    // Ann has 3, whatever the methods are.
    for (method, expected) in [("GET", 200), ("GET", 200), ("POST", 200), ("POST", 429)] {
        expect(&app, call(method, "Bearer ann")?, expected).await?;
    }
    // Ben is of the same team, which has 4 for each method.
    for expected in [200, 200, 429] {
        expect(&app, call("GET", "Bearer ben")?, expected).await?;
    }
    expect(&app, call("POST", "Bearer ben")?, 200).await?;
    expect(&app, call("GET", "Bearer eve")?, 200).await?;
    expect(&app, call("GET", "Bearer guess")?, 401).await?;

    // With a key, all three are the same; without one, the second request tells them apart.
    for (missing_key, without_key) in [
        (MissingKey::Reject, [400, 400]),
        (MissingKey::Skip, [200, 200]),
        (MissingKey::Share, [200, 429]),
    ] {
        println!("tenants, {missing_key:?} those without a key");
        let app = by_tenant(missing_key)?;
        for (uri, expected) in [
            ("http://acme.example.com/", [200, 429]),
            ("http://globex.example.com/", [200, 429]),
            ("http://example.com/", without_key),
        ] {
            for expected in expected {
                expect(&app, Request::get(uri).body(Body::empty())?, expected).await?;
            }
        }
    }

    println!("partners");
    let app = by_tenant(MissingKey::Skip)?;
    for expected in [200, 429] {
        let request = Request::get("/").header("x-partner", "p1").body(Body::empty())?;
        expect(&app, request, expected).await?;
    }
    Ok(())
}

/// Sends a request and fails if the answer's status is not the expected one.
async fn expect(app: &Router, request: Request, status: u16) -> Result<(), Box<dyn Error>> {
    let call = format!("{} {}", request.method(), request.uri());
    let got = app.clone().oneshot(request).await?.status();
    println!("  {call}: {got}");
    if got != status { Err(format!("{call} got {got} instead of {status}").into()) } else { Ok(()) }
}
