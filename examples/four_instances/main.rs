//! Overruns a limit of 100 requests a second on four instances of a service: first with state in each
//! of them, then with state in Redis.
//!
//! The instances are processes of their own, which this program starts, and so is the server, unless
//! `REDIS_URL` names one. Everything is on the loopback interface.
//!
//! ```text
//! cargo run --release --example four_instances            # explains what was seen
//! cargo run --release --example four_instances -- --once  # ends after the table
//! ```

mod child;
mod instance;
mod load;
mod model;
mod server;
mod table;

use instance::Instance;
use load::Run;
use server::Server;
use std::{env, error::Error, process::ExitCode, time::Duration};
use tollgate::Quota;

/// What each instance says. With a burst an instance that gets no requests for a moment, on a busy
/// machine, can make up for it.
const QUOTA: Quota = Quota::per_second(RATE).burst(BURST);
const RATE: u64 = 100;
const BURST: u64 = 50;

const INSTANCES: usize = 4;

/// How long each kind of state is overrun.
const TIME: Duration = Duration::from_secs(4);

/// After how long the bursts are spent, and what is admitted a second is the rate alone.
const WARM_UP: Duration = Duration::from_secs(1);

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        // This program starts itself with these; they are for nobody else.
        ["--instance", state @ ..] => instance::serve(state).await,
        ["--server", port] => server::keep(port).await,

        [] => demonstrate(false).await,
        ["--once"] => demonstrate(true).await,
        ["--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("four_instances: these are no arguments: {arguments:?}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("four_instances: {error}");
            ExitCode::FAILURE
        }
    }
}

const HELP: &str = "\
Overruns a limit of 100 requests a second on four instances of a service for a few seconds: first with
state in each of them, then with state in Redis. Explains what was seen.

usage: four_instances [--once]

  --once   end after the table: with 0 if local state admitted about four times the limit and Redis
           exactly what one bucket allows, else with 1
  --help   show this

  REDIS_URL   a Redis or Valkey server, e.g. redis://127.0.0.1/; without it, redis-server is started";

async fn demonstrate(once: bool) -> Result<(), BoxError> {
    let server = Server::find().await?;
    println!("Four instances say \"{RATE} requests a second\". All of them get far more.");
    let mut local = overrun("local state", &["local"]).await?;
    for _ in 0..2 {
        // On a busy machine, an instance may get no requests for so long that its bucket is full.
        if table::is_about_four_times(&local) {
            break;
        }
        println!("Some of them got nothing for a while. Once more.");
        local = overrun("local state", &["local"]).await?;
    }
    // Two runs of this program on one server are two services.
    let namespace = format!("four-instances-{}", std::process::id());
    let redis = overrun("state in Redis", &["redis", &server.url, &namespace]).await?;

    table::print(&local, &redis);
    if !once {
        table::explain(&local, &redis);
    }
    table::check(&local, &redis)
}

/// Starts the instances with their state in one place, overruns them, and ends them.
async fn overrun(title: &str, state: &[&str]) -> Result<Run, BoxError> {
    let mut instances = Vec::new();
    for _ in 0..INSTANCES {
        instances.push(Instance::start(state)?);
    }
    let mut addresses = Vec::new();
    for instance in &mut instances {
        addresses.push(instance.address().await?);
    }
    load::overrun(title, &addresses).await
}
