//! Limits a gRPC server by a layer around all of it and an interceptor for a single service.
//!
//! The service is the health service that comes with tonic. A call over a limit gets the status
//! `RESOURCE_EXHAUSTED` and is told how long to wait before the next attempt.
//!
//! ```text
//! cargo run --example tonic --features tonic
//! ```

use std::{error::Error, time::Duration};
use tokio::net::TcpListener;
use tollgate::{
    Policy, Quota, RateLimitLayer,
    key::{Header, PeerIp},
};
use tonic::{
    Code, Request, Status,
    metadata::MetadataValue,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint, Server, server::TcpIncoming},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

async fn serve(listener: TcpListener) -> Result<(), Box<dyn Error + Send + Sync>> {
    // All calls of an address, to whichever service.
    let per_peer = RateLimitLayer::builder()
        .key(PeerIp::new())
        .policy(Policy::token_bucket("per-peer", Quota::per_hour(8)))
        .build()?;
    // The calls to one service, by a tenant that their metadata name. What the interceptor rejects
    // has gone through the layer already and is counted there.
    let per_tenant = RateLimitLayer::builder()
        .key(Header::from_static("x-tenant"))
        .policy(Policy::token_bucket("per-tenant", Quota::per_second(1).burst(2)))
        .build()?;

    let (_, health) = tonic_health::server::health_reporter();
    Server::builder()
        .layer(per_peer)
        .add_service(InterceptedService::new(health, per_tenant.interceptor()?))
        .serve_with_incoming(TcpIncoming::from(listener))
        .await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let server = format!("http://{}", listener.local_addr()?);
    tokio::spawn(serve(listener));
    let mut client = HealthClient::new(Endpoint::from_shared(server)?.connect().await?);

    // Two calls at once for each tenant ...
    for tenant in ["acme", "acme", "globex", "globex"] {
        check(&mut client, tenant).await?;
    }
    let wait = limited_by("per-tenant", check(&mut client, "acme").await)?;
    // ... and whoever waits as long as it is told is admitted again.
    tokio::time::sleep(wait).await;
    check(&mut client, "acme").await?;

    // Eight calls from this address, whomever they are for.
    for tenant in ["initech", "umbrella"] {
        check(&mut client, tenant).await?;
    }
    limited_by("per-peer", check(&mut client, "hooli").await)?;
    Ok(())
}

async fn check(client: &mut HealthClient<Channel>, tenant: &'static str) -> Result<(), Status> {
    let mut request = Request::new(HealthCheckRequest::default());
    request.metadata_mut().insert("x-tenant", MetadataValue::from_static(tenant));
    let answer = client.check(request).await;
    match &answer {
        Ok(_) => println!("{tenant:8}  admitted"),
        Err(status) => println!(
            "{tenant:8}  {:?}: {} grpc-retry-pushback-ms: {:?}",
            status.code(),
            status.message(),
            status.metadata().get("grpc-retry-pushback-ms"),
        ),
    }
    answer.map(|_| ())
}

/// How long a call that was limited by this policy is told to wait.
fn limited_by(policy: &str, answer: Result<(), Status>) -> Result<Duration, Box<dyn Error>> {
    let Err(status) = answer else {
        return Err(format!("the call was not limited by {policy}").into());
    };
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains(policy), "{status}");
    let pushback = status.metadata().get("grpc-retry-pushback-ms").ok_or("no pushback")?;
    Ok(Duration::from_millis(pushback.to_str()?.parse()?))
}
