//! Two regions with a store each: callers are near one of them, and counted there. First every request is
//! decided by the region's store, then instances decide by what they know, and tell it afterwards.
//!
//! The servers are processes of their own on the loopback interface; the instances of a region are tasks
//! with a limiter each.
//!
//! ```text
//! cargo run --release --example regions            # explains what was seen
//! cargo run --release --example regions -- --once  # ends after the table
//! ```

#[allow(dead_code, reason = "another example reads what its children print")]
#[path = "../four_instances/child.rs"]
mod child;
mod load;
#[allow(dead_code, reason = "another example takes the server that REDIS_URL names")]
#[path = "../four_instances/server.rs"]
mod server;
mod table;

use load::Run;
use server::Server;
use std::{env, error::Error, process::ExitCode, time::Duration};
use tollgate::{Limiter, Policy, Quota, Store, key::Key, redis::RedisStore};

const REGIONS: [&str; 2] = ["Paris", "Tokyo"];
const INSTANCES: usize = 3;

/// What a caller may in a region.
const RATE: u64 = 200;
const BURST: u64 = 100;

/// How often instances tell the store, when they tell it afterwards.
const INTERVAL: Duration = Duration::from_millis(50);

/// How long each region is overrun.
const TIME: Duration = Duration::from_secs(4);

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        // This program starts itself with these; they are for nobody else.
        ["--server", port] => server::keep(port).await,

        [] => demonstrate(false).await,
        ["--once"] => demonstrate(true).await,
        ["--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("regions: these are no arguments: {arguments:?}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("regions: {error}");
            ExitCode::FAILURE
        }
    }
}

const HELP: &str = "\
Overruns a limit in two regions with a store each for a few seconds: first every request is decided by the
region's store, then instances decide by what they know and tell it afterwards. Explains what was seen.

usage: regions [--once]

  --once   end after the table: with 0 if stores that are asked admitted no more than one bucket holds, and
           stores that are told no more than the documented lag adds, else with 1
  --help   show this";

async fn demonstrate(once: bool) -> Result<(), BoxError> {
    println!("{} regions, each with a store and {INSTANCES} instances of its own.", REGIONS.len());
    let mut runs = Vec::new();
    for deferred in [false, true] {
        let regions = REGIONS.map(|region| tokio::spawn(overrun(region, deferred)));
        for region in regions {
            runs.push(region.await??);
        }
    }
    table::print(&runs);
    if !once {
        table::explain();
    }
    runs.iter().try_for_each(table::check)
}

/// A region: its server, its instances, and a caller that asks all of them for more than it may.
async fn overrun(region: &'static str, deferred: bool) -> Result<Run, BoxError> {
    let server = Server::start().await?;
    let store = RedisStore::builder(&server.url[..]).namespace(region).build()?;
    // What a limiter is given is all that is different.
    let mut told = None;
    let store: Store =
        if deferred { told.insert(store.deferred(INTERVAL)?).clone().into() } else { store.into() };
    let instances = (0..INSTANCES).map(|_| instance(store.clone()));
    let instances: Vec<_> = instances.collect::<Result<_, _>>()?;
    let answers = load::overrun(&instances).await?;
    Ok(Run { region, lag: told.map(|told| told.health().longest_lag), answers })
}

fn instance(store: Store) -> Result<Limiter<str>, BoxError> {
    let limiter = Limiter::builder()
        .key(|caller: &str| Key::from(caller))
        .policy(Policy::token_bucket("per-region", Quota::per_second(RATE).burst(BURST)))
        .store(store)
        .build()?;
    Ok(limiter)
}
