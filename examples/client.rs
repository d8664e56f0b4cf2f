//! Limits what a client sends: an HTTP client whose requests wait for their turn.
//!
//! A leaky bucket with a maximum delay holds requests back instead of rejecting them, so that each
//! host is called at an even pace however the requests come in.
//!
//! ```text
//! cargo run --example client
//! ```

use axum::{Router, extract::State, routing::get};
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::Empty;
use hyper_util::{client::legacy::Client, rt::TokioExecutor};
use std::{
    error::Error,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{net::TcpListener, task::JoinSet, time::Instant};
use tollgate::{Limiter, Policy, Quota, RateLimitLayer, key::Key};
use tower::{ServiceBuilder, ServiceExt};

type Outgoing = Request<Empty<Bytes>>;

const REQUESTS: u32 = 20;
const SPACING: Duration = Duration::from_millis(50);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (host, arrivals) = serve().await?;

    // `calls` makes a rejection an error of the client's own. The layer for HTTP services would
    // make it a response, and nobody could tell it from one of the host's.
    let limiter = Limiter::<Outgoing>::builder()
        .key(|request: &Outgoing| request.uri().authority().map(|host| Key::from(host.as_str())))
        .policy(
            Policy::leaky_bucket("pace", Quota::per_second(20).burst(1))
                .max_delay(Duration::from_secs(2)),
        )
        .build()?;
    let client = ServiceBuilder::new()
        .layer(RateLimitLayer::calls(limiter))
        .service(Client::builder(TokioExecutor::new()).build_http());

    // All are sent at once, and each waits for its turn.
    let start = Instant::now();
    let mut requests = JoinSet::new();
    for _ in 0..REQUESTS {
        let request = Request::get(format!("http://{host}/")).body(Empty::new())?;
        requests.spawn(client.clone().oneshot(request));
    }
    while let Some(response) = requests.join_next().await {
        assert_eq!(response??.status(), StatusCode::OK);
    }

    let arrivals = arrivals.lock().map_err(|_| "the server panicked")?;
    assert_eq!(arrivals.len(), REQUESTS as usize);
    for (turn, arrival) in (0..).zip(&*arrivals) {
        let (arrived, due) = (*arrival - start, SPACING * turn);
        println!("request {:2} arrived after {:6.1} ms", turn + 1, arrived.as_secs_f64() * 1_000.0);
        // The limiter counts by the wall clock and this program by another; they may differ a bit.
        assert!(arrived + Duration::from_millis(1) >= due, "before its turn at {due:?}");
        assert!(arrived <= due + Duration::from_millis(250), "long after its turn at {due:?}");
    }
    Ok(())
}

/// A server that notes when requests arrive.
async fn serve() -> Result<(String, Arc<Mutex<Vec<Instant>>>), Box<dyn Error>> {
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let note = |State(arrivals): State<Arc<Mutex<Vec<Instant>>>>| async move {
        let noted = arrivals.lock().map(|mut arrivals| arrivals.push(Instant::now()));
        noted.map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
    };
    let app = Router::new().route("/", get(note)).with_state(arrivals.clone());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let host = listener.local_addr()?.to_string();
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok((host, arrivals))
}
