//! Overruns a limited axum service for a few seconds, and compares what was admitted with what the
//! quotas allow, decision by decision.
//!
//! It needs nothing but itself: the service and its callers are in this program.
//!
//! ```text
//! cargo run --release --example quickstart            # keeps serving, with curl lines to try
//! cargo run --release --example quickstart -- --once  # ends after the table
//! ```

mod callers;
mod latency;
mod ledger;
mod model;
mod table;

use axum::{
    Extension, Router,
    http::{Method, request::Parts},
    middleware,
    response::IntoResponse,
    routing::get,
};
use callers::{BoxError, Client};
use ledger::Ledger;
use std::{env, net::SocketAddr, process::ExitCode, time::Duration};
use tokio::net::TcpListener;
use tollgate::{
    BuildError, Decision, Policy, Quota, RateLimitLayer,
    key::{Global, Header},
};

/// How much the service allows.
struct Quotas {
    per_key: Quota,
    writes: Quota,
    hourly: Quota,
    everybody: Quota,
}

const QUOTAS: Quotas = Quotas {
    per_key: Quota::per_second(40).burst(80),
    writes: Quota::new(20, Duration::from_secs(2)),
    hourly: Quota::per_hour(150),
    everybody: Quota::per_second(90).burst(150),
};

/// The same that nobody reaches, to measure what being admitted costs.
const AMPLE: Quotas = Quotas {
    per_key: Quota::per_second(1_000_000),
    writes: Quota::new(100_000, Duration::from_secs(1)),
    hourly: Quota::per_hour(1_000_000_000),
    everybody: Quota::per_second(1_000_000),
};

/// The stack of the service: three limits for each API key and one for all together.
fn limits(quotas: &Quotas) -> Result<RateLimitLayer, BuildError> {
    RateLimitLayer::builder()
        .key(Header::from_static("x-api-key"))
        .policy(Policy::token_bucket("per-key", quotas.per_key))
        .policy(Policy::sliding_log("writes", quotas.writes).when(is_write))
        .policy(Policy::fixed_window("hourly", quotas.hourly).from_first_hit())
        .policy(Policy::leaky_bucket("everybody", quotas.everybody).key(Global))
        .build()
}

/// The names of its policies.
const POLICIES: [&str; 4] = ["per-key", "writes", "hourly", "everybody"];

fn is_write(parts: &Parts) -> bool {
    parts.method != Method::GET
}

/// The service itself.
fn app() -> Router {
    Router::new().route("/items", get(items).post(items))
}

/// Answers, and passes the decision on for the [`Ledger`].
async fn items(decision: Option<Extension<Decision>>) -> impl IntoResponse {
    (decision, "apples, pears\n")
}

/// Everything runs on one thread. So decisions are made one after another, which is what lets the
/// [`model`] replay them.
#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode, BoxError> {
    let mut once = false;
    for argument in env::args().skip(1) {
        match argument.as_str() {
            "--once" => once = true,
            "--help" | "-h" => {
                println!("{HELP}");
                return Ok(ExitCode::SUCCESS);
            }
            _ => {
                eprintln!("quickstart: there is no argument `{argument}`\n\n{HELP}");
                return Ok(ExitCode::from(2));
            }
        }
    }

    let ledger = Ledger::default();
    let recording = middleware::from_fn_with_state(ledger.clone(), ledger::record);
    let limited = serve(app().layer(limits(&QUOTAS)?).layer(recording)).await?;
    println!("Four callers overrun the limits of http://{limited} for {:?}.", callers::TIME);
    let tallies = callers::overrun(limited).await?;
    let decisions = ledger.close();

    println!("Requests with and without the layer take turns for {:?}.", latency::TIME);
    let ample = serve(app().layer(limits(&AMPLE)?)).await?;
    let plain = serve(app()).await?;
    let latencies = latency::compare(plain, ample).await?;

    let verdict = model::replay(&decisions);
    table::print(&tallies, &verdict, &latencies);
    if let Err(difference) = verdict.agrees_with(&tallies) {
        eprintln!("quickstart: {difference}");
        return Ok(ExitCode::FAILURE);
    }
    println!("All {} decisions are those that the quotas allow.", decisions.len());

    if !once {
        show_around(limited).await?;
        tokio::signal::ctrl_c().await?;
    }
    Ok(ExitCode::SUCCESS)
}

const HELP: &str = "\
Overruns a limited axum service for a few seconds, and compares what was admitted with what the
quotas allow. Then keeps serving until Ctrl-C, with curl lines to try.

usage: quickstart [--once]

  --once   end after the table: with 0 if every decision was right, else with 1
  --help   show this";

/// Serves at a free port.
async fn serve(app: Router) -> Result<SocketAddr, BoxError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

/// Prints curl lines, and what they show.
async fn show_around(address: SocketAddr) -> Result<(), BoxError> {
    println!(
        "\nServing until Ctrl-C. A new caller has all of its budgets, alice used up her hour's:"
    );
    let client = Client::new(address);
    for caller in ["erin", "alice"] {
        println!("\n  curl -i -H 'x-api-key: {caller}' http://{address}/items");
        let response = client.call(Method::GET, caller).await?;
        println!("    {:?} {}", response.version(), response.status());
        for (name, value) in response.headers() {
            println!("    {name}: {}", value.to_str()?);
        }
        println!("    {}", String::from_utf8_lossy(response.body()).trim_end());
    }
    println!("\nTwenty writes in two seconds, then 429, without a key 400:\n");
    println!(
        "  for i in $(seq 25); do curl -s -o /dev/null -w '%{{http_code}} ' \
         -X POST -H 'x-api-key: frank' http://{address}/items; done"
    );
    println!("  curl -i http://{address}/items");
    Ok(())
}
