//! One instance of the service, in a process of its own.

use crate::{
    BoxError, QUOTA,
    child::{Child, parent_is_done},
};
use axum::{
    Extension, Router,
    extract::Request,
    http::HeaderValue,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use std::{io::BufRead, io::BufReader, net::SocketAddr, time::Duration};
use tokio::{net::TcpListener, task};
use tollgate::{
    Decision, FailureMode, Policy, RateLimitLayer, Rejection, key::Global, redis::RedisStore,
};

/// The response header that says when a request was decided, in microseconds.
pub(crate) const DECIDED_AT: &str = "x-decided-at";

/// An instance, as it is seen from the process that starts it. It ends when this is dropped.
pub(crate) struct Instance(Child);

impl Instance {
    pub(crate) fn start(state: &[&str]) -> Result<Self, BoxError> {
        Ok(Self(Child::start(&[&["--instance"], state].concat())?))
    }

    /// Where it listens. Once it says so, it is ready.
    pub(crate) async fn address(&mut self) -> Result<SocketAddr, BoxError> {
        let stdout = self.0.stdout();
        let line = task::spawn_blocking(|| {
            let mut line = String::new();
            if let Some(stdout) = stdout {
                BufReader::new(stdout).read_line(&mut line)?;
            }
            Ok::<_, std::io::Error>(line)
        });
        line.await??.trim().parse().map_err(|_| "an instance of the service did not start".into())
    }
}

/// Runs an instance with its state in `local` memory, or in `redis`, at a URL and under a namespace.
pub(crate) async fn serve(state: &[&str]) -> Result<(), BoxError> {
    let limits = RateLimitLayer::builder();
    // This is all that makes one limit of four.
    let limits = match *state {
        ["redis", url, namespace] => limits.store(
            RedisStore::builder(url)
                .namespace(namespace)
                // On a busy machine a demonstration would rather wait than let failure modes answer.
                .deadline(Duration::from_secs(2))
                .build()?,
        ),
        _ => limits,
    };
    let policy = Policy::token_bucket("all", QUOTA);
    // What Redis does not decide is rejected, and the demonstration then fails.
    let policy = policy.on_store_failure(FailureMode::Closed);
    let limits = limits.policy(policy.key(Global)).build()?;
    let app = Router::new()
        .route("/", get(async |decision: Option<Extension<Decision>>| (decision, "hello\n")))
        .layer(limits)
        .layer(middleware::from_fn(say_when));

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    tokio::select! {
        served = async { axum::serve(listener, app).await } => Ok(served?),
        () = parent_is_done() => Ok(()),
    }
}

/// Middleware outside of the limit that tells when a request was decided, by the clock of whoever
/// counts. The rejection is in the response; the decision is there because the handler put it there.
async fn say_when(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await.into_response();
    let extensions = response.extensions();
    let decision = extensions.get::<Decision>().map(Decision::time);
    let time = decision.or_else(|| extensions.get::<Rejection>().map(Rejection::time));
    if let Some(time) = time {
        let time = HeaderValue::from(time.as_micros() as u64);
        response.headers_mut().insert(DECIDED_AT, time);
    }
    response
}
