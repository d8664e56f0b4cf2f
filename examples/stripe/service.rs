//! The service, and the four limiters around it.

use crate::{
    BoxError,
    database::{CONNECTIONS, Database},
};
use axum::{
    Router,
    extract::State,
    http::{Method, header::AUTHORIZATION, request::Parts},
    routing::{get, post},
};
use std::{net::SocketAddr, time::Duration};
use tokio::net::TcpListener;
use tollgate::{
    BuildError, ByMethod, Policy, Quota, RateLimitLayer,
    key::BearerToken,
    shed::{FleetShedder, ShedderError, Utilization, WorkerShedder},
};

/// How many requests this instance can work on at a time.
const WORKERS: u32 = 40;

/// The names of the limiters, in the order in which they are asked.
pub(crate) const LIMITERS: [&str; 4] = [BUSY, FLEET, RATE, IN_FLIGHT];

/// The one that takes the least important requests first.
pub(crate) const BUSY: &str = "workers";
const FLEET: &str = "fleet";
const RATE: &str = "rate";
const IN_FLIGHT: &str = "in-flight";

/// The four limiters, from the cheapest to the dearest. A request that one of them turns away costs nothing
/// in those behind it.
///
/// 1. How busy is this instance? That is one number, read without a lock. It is Stripe's last line of
///    defence, and here the first that is asked.
/// 2. How much has the fleet in flight? Two numbers behind a lock. They are in this process even if the
///    fleet has a store: nobody waits for that.
/// 3. and 4. How fast is this API key, and how much has it in flight? A key is to be found and hashed,
///    there is a state for each, and if that is in Redis, a request waits for an answer: one for
///    both.
///
/// The layer asks shedders before policies, in whatever order they are given to it. What is turned away by
/// a shedder takes nothing from its key's budget, for it is not the caller's fault.
fn limits(workers: WorkerShedder, fleet: FleetShedder) -> Result<RateLimitLayer, BuildError> {
    RateLimitLayer::builder()
        .priority(ByMethod::new().critical(is_charge).test_key_prefix(AUTHORIZATION, "sk_test_"))
        .shedder(workers)
        .shedder(fleet)
        .key(BearerToken)
        .policy(Policy::token_bucket(RATE, Quota::per_second(28).burst(14)))
        .policy(Policy::concurrency(IN_FLIGHT, 8))
        .build()
}

fn is_charge(parts: &Parts) -> bool {
    parts.method == Method::POST && parts.uri.path() == "/v1/charges"
}

/// Sheds when more than 32 of the 40 workers have something to do, and lets back in when fewer than 28 have.
///
/// It is in a hurry, so that there is something to see: by default it takes 28 s until an instance that
/// is fully busy sheds anything, and 120 s more until everything is shed that may be. A service should
/// have that patience, or it will swing.
fn workers() -> Result<WorkerShedder, ShedderError> {
    WorkerShedder::builder(BUSY)
        .utilization(Utilization::in_flight(WORKERS))
        .grace(Duration::from_secs(1))
        .full_after(Duration::from_secs(8))
        .sample_every(Duration::from_millis(50))
        // If this program does not get to run for a second, nothing is known of that second.
        .longest_step(Duration::from_millis(200))
        .build()
}

/// Keeps as many of the database's connections for charges as they need in bad times: 27 of 60. The others
/// notice at once when the database is slow; it is the same for all of them, until the workers'
/// shedder has found out who should go.
///
/// The fleet is this one process. With `.store(RedisStore::builder(url).build()?)` it is as many as there
/// are.
fn fleet() -> Result<FleetShedder, ShedderError> {
    FleetShedder::builder(FLEET, CONNECTIONS).reserve(0.45).build()
}

async fn ask(State(database): State<Database>) -> &'static str {
    database.query().await;
    "done\n"
}

/// The service at work.
pub(crate) struct Service {
    pub(crate) address: SocketAddr,
    /// To look at.
    pub(crate) workers: WorkerShedder,
}

impl Service {
    /// Serves at a free port.
    pub(crate) async fn start(database: Database) -> Result<Self, BoxError> {
        let workers = workers()?;
        let app = Router::new()
            .route("/v1/charges", get(ask).post(ask))
            .route("/v1/customers", post(ask))
            .with_state(database)
            .layer(limits(workers.clone(), fleet()?)?);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(Self { address, workers })
    }
}
