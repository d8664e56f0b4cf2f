//! Limits an axum service by the address of the client, and two of its routes more strictly.
//!
//! It serves HTTP/1.1 and HTTP/2 (with prior knowledge) until it is stopped:
//!
//! ```text
//! cargo run --release --example axum
//! cargo run --release --example axum -- 127.0.0.1:8080 --limit '1000/s burst 2000'
//! cargo run --release --example axum -- --behind-proxy 10.0.0.0/8 --behind-proxy 192.0.2.1
//!
//! curl -i http://127.0.0.1:3000/
//! curl -i http://127.0.0.1:3000/search/apples
//! curl http://127.0.0.1:3000/admitted
//! ```
//!
//! `/admitted` is not limited and tells how many requests the handler of `/` has served, to compare
//! with what a load generator counts.

use axum::{
    Extension, Router,
    extract::{Path, State},
    routing::get,
    serve::ListenerExt,
};
use std::{
    env,
    error::Error,
    fmt::Write as _,
    net::SocketAddr,
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};
use tokio::net::TcpListener;
use tollgate::{
    BuildError, Decision, Policy, Quota, RateLimitLayer,
    key::{ClientIp, Networks, RoutePath},
};

type Served = Arc<AtomicU64>;

fn app(limit: Quota, proxies: Networks) -> Result<Router, BuildError> {
    let per_client = RateLimitLayer::builder()
        // Without a trusted proxy, the client is whoever is at the other end of the connection.
        .key(ClientIp::x_forwarded_for(proxies))
        .policy(Policy::token_bucket("per-client", limit))
        .build()?;
    // What is dear to serve: 5 a second of each of these routes, for all clients together. What this
    // layer rejects has gone through the other one and is counted there. Where that matters, put
    // both policies into one stack, this one with a condition.
    let dear = RateLimitLayer::builder()
        .key(RoutePath)
        .policy(Policy::token_bucket("per-route", Quota::per_second(5)))
        .build()?;

    let served = Served::default();
    let dear_routes = Router::new()
        .route("/search/{term}", get(search))
        .route("/report", get(|| async { "report\n" }))
        .route_layer(dear);
    Ok(Router::new()
        .route("/", get(index))
        .merge(dear_routes)
        .layer(per_client)
        // Routes that are added after a layer are not inside of it.
        .route("/admitted", get(admitted))
        .with_state(served))
}

/// Tells what each policy said of this request.
async fn index(State(served): State<Served>, Extension(decision): Extension<Decision>) -> String {
    served.fetch_add(1, Relaxed);
    let mut text = String::new();
    for outcome in decision.outcomes() {
        let (left, limit) = (outcome.remaining(), outcome.limit());
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}: {left} of {limit} left", outcome.policy());
    }
    text
}

async fn search(Path(term): Path<String>) -> String {
    format!("nothing found for {term}\n")
}

async fn admitted(State(served): State<Served>) -> String {
    format!("{}\n", served.load(Relaxed))
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    if env::args().any(|argument| argument == "--help") {
        println!("{USAGE}");
        return Ok(ExitCode::SUCCESS);
    }
    let (address, app) = match configure(env::args().skip(1)) {
        Ok(configured) => configured,
        Err(error) => {
            eprintln!("axum: {error}\n{USAGE}");
            return Ok(ExitCode::from(2));
        }
    };
    // Small answers should not wait for the acknowledgement of the one before.
    let listener = TcpListener::bind(address).await?.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    println!("serving http://{address}/");
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(ExitCode::SUCCESS)
}

const USAGE: &str = "usage: axum [ADDRESS] [--limit QUOTA] [--behind-proxy NETWORK]...";

fn configure(
    mut arguments: impl Iterator<Item = String>,
) -> Result<(SocketAddr, Router), Box<dyn Error>> {
    let mut address = SocketAddr::from(([127, 0, 0, 1], 3000));
    let mut limit = Quota::per_second(100).burst(200);
    let mut proxies = Vec::new();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value"));
        match argument.as_str() {
            "--limit" => limit = value()?.parse()?,
            "--behind-proxy" => proxies.push(value()?),
            _ => {
                address = argument
                    .parse()
                    .map_err(|_| format!("`{argument}` is neither an address nor an option"))?;
            }
        }
    }
    Ok((address, app(limit, Networks::new(proxies)?)?))
}
