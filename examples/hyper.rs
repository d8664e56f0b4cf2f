//! Limits a plain hyper server by the address of its peers.
//!
//! hyper does not tell a service who is calling, so the address of each connection is put into the
//! requests that come in on it.
//!
//! ```text
//! cargo run --example hyper
//! ```

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::Client,
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
    service::TowerToHyperService,
};
use std::{convert::Infallible, error::Error, io, net::SocketAddr};
use tokio::net::TcpListener;
use tollgate::{
    Policy, Quota, RateLimitLayer,
    key::{PeerAddr, PeerIp},
};
use tower::ServiceBuilder;

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello\n")))
}

async fn serve(listener: TcpListener, limits: RateLimitLayer) -> io::Result<()> {
    loop {
        let (stream, peer) = listener.accept().await?;
        // Clones of a layer share one budget, whichever connection they are for.
        let service = ServiceBuilder::new()
            .map_request(move |request| with_peer(request, peer))
            .layer(limits.clone())
            .service_fn(hello);
        tokio::spawn(async move {
            let connection = auto::Builder::new(TokioExecutor::new());
            let service = TowerToHyperService::new(service);
            if let Err(error) = connection.serve_connection(TokioIo::new(stream), service).await {
                eprintln!("connection from {peer}: {error}");
            }
        });
    }
}

fn with_peer<B>(mut request: Request<B>, peer: SocketAddr) -> Request<B> {
    request.extensions_mut().insert(PeerAddr(peer));
    request
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limits = RateLimitLayer::builder()
        .key(PeerIp::new())
        .policy(Policy::token_bucket("per-peer", Quota::per_minute(3)))
        .build()?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(serve(listener, limits));

    let mut statuses = Vec::new();
    for _ in 0..5 {
        // A connection of its own for each request: they come from one address all the same.
        let client = Client::builder(TokioExecutor::new()).build_http();
        let request = Request::get(&url).body(Empty::<Bytes>::new())?;
        let response = client.request(request).await?;
        println!("{} ratelimit: {:?}", response.status(), response.headers().get("ratelimit"));
        statuses.push(response.status());
    }
    assert_eq!(statuses[..3], [StatusCode::OK; 3]);
    assert_eq!(statuses[3..], [StatusCode::TOO_MANY_REQUESTS; 2]);
    Ok(())
}
