//! How much longer a request takes with the layer around the service than without.

use crate::callers::{BoxError, Client};
use axum::http::{Method, StatusCode};
use std::{net::SocketAddr, time::Duration};
use tokio::time::Instant;

/// How long to measure.
pub(crate) const TIME: Duration = Duration::from_millis(1_500);

/// The first requests open connections and fill caches.
const WARM_UP: usize = 500;

/// Round trips, sorted.
#[derive(Default)]
pub(crate) struct Latencies {
    pub(crate) plain: Vec<Duration>,
    pub(crate) limited: Vec<Duration>,
}

/// Sends a request to one server, then to the other, and so on, so that what else goes on in the
/// machine is the same for both. All are writes, which all policies have to admit.
pub(crate) async fn compare(plain: SocketAddr, limited: SocketAddr) -> Result<Latencies, BoxError> {
    let (plain, limited) = (Client::new(plain), Client::new(limited));
    let mut latencies = Latencies::default();
    let start = Instant::now();
    for round in 0.. {
        if start.elapsed() >= TIME {
            break;
        }
        // Neither of them is always the first.
        let (without, with) = if round % 2 == 0 {
            let without = round_trip(&plain).await?;
            (without, round_trip(&limited).await?)
        } else {
            let with = round_trip(&limited).await?;
            (round_trip(&plain).await?, with)
        };
        if round >= WARM_UP {
            latencies.plain.push(without);
            latencies.limited.push(with);
        }
    }
    latencies.plain.sort_unstable();
    latencies.limited.sort_unstable();
    Ok(latencies)
}

async fn round_trip(client: &Client) -> Result<Duration, BoxError> {
    let start = Instant::now();
    let response = client.call(Method::POST, "probe").await?;
    let time = start.elapsed();
    match response.status() {
        StatusCode::OK => Ok(time),
        status => Err(format!("the probe got an unexpected answer: {status}").into()),
    }
}
