//! Stripe's four limiters in one layer, while the database behind the service is slow for some seconds
//! and then is not.
//!
//! It needs nothing but itself: the service, its database and its clients are in this program. Four
//! classes of requests come in, at a steady pace: charges, which are critical, other writes, reads, and
//! what test keys send. The table shows what each class gets.
//!
//! ```text
//! cargo run --release --example stripe            # slow and normal in turns, until Ctrl-C
//! cargo run --release --example stripe -- --once  # slow once, ends after half a minute
//! ```

mod classes;
mod database;
mod service;
mod table;
mod tally;
mod traffic;
mod verdict;

use database::{Database, Speed};
use service::Service;
use std::{env, error::Error, mem, process::ExitCode, time::Duration};
use table::Table;
use tally::Tallies;
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tollgate::shed::WorkerShedder;
use traffic::Traffic;
use verdict::Verdict;

/// How long the service is watched before the database gets slow.
const BEFORE: Duration = Duration::from_secs(3);

/// How long the database is slow: until the three classes that may be shed are, and a little more.
const SLOW: Duration = Duration::from_secs(13);

/// How long it then is not: until they are all back.
const AFTER: Duration = Duration::from_secs(11);

/// How often is looked at what each class got.
const TICK: Duration = Duration::from_secs(1);

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

#[tokio::main]
async fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        [] => tokio::select! {
            result = keep_switching() => result,
            stop = tokio::signal::ctrl_c() => stop.map_err(BoxError::from),
        },
        ["--once"] => switch_once().await,
        ["--help" | "-h"] => {
            println!("{HELP}");
            Ok(())
        }
        _ => {
            eprintln!("stripe: these are no arguments: {arguments:?}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stripe: {error}");
            ExitCode::FAILURE
        }
    }
}

const HELP: &str = "\
Sends critical, write, read and test requests to a service with Stripe's four limiters, whose database
gets slow and normal again, until Ctrl-C. Shows what each class of requests gets.

usage: stripe [--once]

  --once   end after the database was slow once: with 0 if no critical request was shed, the classes went
           and came back in order, and each limiter had something to do, else with 1
  --help   show this";

async fn switch_once() -> Result<(), BoxError> {
    let mut show = Show::start().await?;
    show.go_on(Speed::Normal, BEFORE).await?;
    let verdict = show.switch().await?;
    show.table.end(&show.all);
    println!("{}", verdict.check(&show.all)?);
    Ok(())
}

async fn keep_switching() -> Result<(), BoxError> {
    let mut show = Show::start().await?;
    show.go_on(Speed::Normal, BEFORE).await?;
    loop {
        let verdict = show.switch().await?;
        // On a machine that is very busy, one round may be spoilt.
        let said = verdict.check(&show.all).unwrap_or_else(|difference| difference);
        show.table.say(&said);
    }
}

/// A service at work, its clients, and what is seen of them.
struct Show {
    database: Database,
    workers: WorkerShedder,
    traffic: Traffic,
    table: Table,
    start: Instant,
    /// What the clients got since the start.
    all: Tallies,
}

impl Show {
    async fn start() -> Result<Self, BoxError> {
        let database = Database::default();
        let Service { address, workers } = Service::start(database.clone()).await?;
        Ok(Self {
            database,
            workers,
            traffic: Traffic::start(address),
            table: Table::new()?,
            start: Instant::now(),
            all: Tallies::default(),
        })
    }

    /// Makes the database slow and then normal again.
    async fn switch(&mut self) -> Result<Verdict, BoxError> {
        let mut verdict = Verdict::default();
        for (time, tallies) in self.go_on(Speed::Slow, SLOW).await? {
            verdict.see_going(time, &tallies);
        }
        for (time, tallies) in self.go_on(Speed::Normal, AFTER).await? {
            verdict.see_coming_back(time, &tallies);
        }
        Ok(verdict)
    }

    /// Goes on for some time with the database at this speed. Returns what each class got in each
    /// tick, and when that was.
    async fn go_on(
        &mut self,
        speed: Speed,
        time: Duration,
    ) -> Result<Vec<(Duration, Tallies)>, BoxError> {
        self.database.set(speed);
        self.table.begin(speed);
        let mut ticks = interval_at(Instant::now() + TICK, TICK);
        // A tick that is late is a long one, and the next one is not a short one.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut seen, mut tallies) = (Vec::new(), Tallies::default());
        while TICK * (seen.len() as u32) < time {
            tokio::select! {
                event = self.traffic.next() => {
                    let (class, event) = event?;
                    tallies[class].count(&event);
                    self.all[class].count(&event);
                }
                now = ticks.tick() => {
                    let elapsed = now - self.start;
                    self.table.show(elapsed, &tallies, &self.workers);
                    seen.push((elapsed, mem::take(&mut tallies)));
                }
            }
        }
        Ok(seen)
    }
}
