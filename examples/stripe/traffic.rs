//! Clients of all classes, each at its pace.

use crate::{
    BoxError,
    classes::{CLASSES, Class},
    tally::Event,
};
use axum::{
    body::Bytes,
    http::{Request, StatusCode, header::AUTHORIZATION},
};
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::Value;
use std::{net::SocketAddr, time::Duration};
use tokio::{
    sync::mpsc,
    time::{Instant, interval_at},
};

/// Between two requests on a connection. Slow answers take less, so that clients keep their pace.
const PERIOD: Duration = Duration::from_secs(1);

/// The class of a request, and what happened to it.
type Seen = Result<(usize, Event), BoxError>;

/// All clients. They end when this is dropped.
pub(crate) struct Traffic(mpsc::Receiver<Seen>);

impl Traffic {
    pub(crate) fn start(service: SocketAddr) -> Self {
        let start = Instant::now();
        let (sender, events) = mpsc::channel(1_024);
        for (index, class) in CLASSES.iter().enumerate() {
            for connection in 0..class.connections {
                let sender = sender.clone();
                let client = Client::new(service, class, connection);
                // They take turns, so that requests come evenly.
                let first = start + PERIOD * connection as u32 / class.connections as u32;
                tokio::spawn(async move {
                    // Nobody listens any more if one of these cannot be sent.
                    let tell = async |event: Result<Event, BoxError>| {
                        sender.send(event.map(|event| (index, event))).await
                    };
                    let mut turns = interval_at(first, PERIOD);
                    loop {
                        turns.tick().await;
                        let sent = tell(Ok(Event::Sent)).await;
                        if sent.is_err() || tell(client.ask().await).await.is_err() {
                            return;
                        }
                    }
                });
            }
        }
        Self(events)
    }

    pub(crate) async fn next(&mut self) -> Seen {
        self.0.recv().await.ok_or("all clients are gone")?
    }
}

/// A client with one connection, which it keeps.
struct Client {
    http: legacy::Client<HttpConnector, Empty<Bytes>>,
    class: &'static Class,
    url: String,
    credentials: String,
}

impl Client {
    fn new(service: SocketAddr, class: &'static Class, connection: usize) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new()).build(connector);
        let url = format!("http://{service}{}", class.path);
        let credentials = format!("Bearer {}{}", class.key, connection % class.keys);
        Self { http, class, url, credentials }
    }

    async fn ask(&self) -> Result<Event, BoxError> {
        let request = Request::builder()
            .method(self.class.method.clone())
            .uri(&self.url)
            .header(AUTHORIZATION, &self.credentials)
            .body(Empty::new())?;
        let (head, body) = self.http.request(request).await?.into_parts();
        // A connection can be used again when its response is read to the end.
        let body = body.collect().await?.to_bytes();
        match head.status {
            StatusCode::OK => Ok(Event::Served),
            StatusCode::TOO_MANY_REQUESTS => Ok(Event::Limited(limiters(&body)?)),
            StatusCode::SERVICE_UNAVAILABLE => Ok(Event::Shed(limiters(&body)?)),
            status => {
                let body = String::from_utf8_lossy(&body);
                Err(format!("{} was answered with {status}: {body}", self.url).into())
            }
        }
    }
}

/// Who turned a request away, by the problem details in the answer.
fn limiters(body: &[u8]) -> Result<Vec<String>, BoxError> {
    let mut problem: Value = serde_json::from_slice(body)?;
    Ok(serde_json::from_value(problem["violated-policies"].take())?)
}
