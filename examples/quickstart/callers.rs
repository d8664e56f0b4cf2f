//! Four callers who ask for more than they may.

use axum::{
    body::Bytes,
    http::{Method, Request, Response, StatusCode},
};
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::Value;
use std::{collections::BTreeMap, error::Error, net::SocketAddr, time::Duration};
use tokio::{sync::mpsc, time::Instant};

/// How long they keep calling.
pub(crate) const TIME: Duration = Duration::from_secs(4);

/// How somebody calls.
struct Habit {
    caller: &'static str,
    /// The methods, in turns.
    methods: &'static [Method],
    connections: u32,
    /// How long each connection waits between two calls.
    pause: Duration,
}

const HABITS: [Habit; 4] = [
    Habit {
        caller: "alice",
        methods: &[Method::GET],
        connections: 4,
        pause: Duration::from_millis(5),
    },
    Habit {
        caller: "bob",
        methods: &[Method::POST],
        connections: 2,
        pause: Duration::from_millis(10),
    },
    Habit {
        caller: "carol",
        methods: &[Method::GET, Method::GET, Method::POST],
        connections: 3,
        pause: Duration::from_millis(10),
    },
    Habit {
        caller: "dave",
        methods: &[Method::GET],
        connections: 1,
        pause: Duration::from_millis(40),
    },
];

/// What a caller has seen.
pub(crate) struct Tally {
    pub(crate) caller: &'static str,
    pub(crate) sent: u64,
    pub(crate) admitted: u64,
    /// How many requests each policy rejected. One request may be rejected by several.
    rejections: BTreeMap<String, u64>,
}

impl Tally {
    pub(crate) fn rejected_by(&self, policy: &str) -> u64 {
        self.rejections.get(policy).copied().unwrap_or_default()
    }
}

/// Calls the service as everybody is used to, and counts what it answers.
pub(crate) async fn overrun(server: SocketAddr) -> Result<Vec<Tally>, BoxError> {
    let start = Instant::now();
    let (sender, mut answers) = mpsc::channel(64);
    let mut tallies = Vec::new();
    for (index, habit) in HABITS.iter().enumerate() {
        tallies.push(Tally {
            caller: habit.caller,
            sent: 0,
            admitted: 0,
            rejections: BTreeMap::new(),
        });
        for _ in 0..habit.connections {
            let sender = sender.clone();
            tokio::spawn(async move {
                let client = Client::new(server);
                for method in habit.methods.iter().cycle() {
                    let answer = client.ask(method.clone(), habit.caller).await;
                    let sent = sender.send((index, answer)).await;
                    if sent.is_err() || start.elapsed() >= TIME {
                        return;
                    }
                    tokio::time::sleep(habit.pause).await;
                }
            });
        }
    }
    drop(sender);

    // Where standard error is no terminal, nothing is drawn.
    let progress = ProgressBar::new(TIME.as_millis() as u64);
    progress.set_style(ProgressStyle::with_template("{bar:40} {msg}")?);
    let (mut sent, mut admitted) = (0, 0);
    while let Some((index, answer)) = answers.recv().await {
        let tally = &mut tallies[index];
        let rejected_by = answer?;
        sent += 1;
        tally.sent += 1;
        if rejected_by.is_empty() {
            admitted += 1;
            tally.admitted += 1;
        }
        for policy in rejected_by {
            *tally.rejections.entry(policy).or_default() += 1;
        }
        progress.set_position(start.elapsed().as_millis() as u64);
        progress.set_message(format!("{admitted} of {sent} admitted"));
    }
    progress.finish_and_clear();
    Ok(tallies)
}

pub(crate) type BoxError = Box<dyn Error + Send + Sync>;

/// A client with one connection to the service, which it keeps.
pub(crate) struct Client {
    http: legacy::Client<HttpConnector, Empty<Bytes>>,
    url: String,
}

impl Client {
    pub(crate) fn new(server: SocketAddr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Self { http, url: format!("http://{server}/items") }
    }

    pub(crate) async fn call(
        &self,
        method: Method,
        api_key: &str,
    ) -> Result<Response<Bytes>, BoxError> {
        let request = Request::builder().method(method).uri(&self.url).header("x-api-key", api_key);
        let response = self.http.request(request.body(Empty::new())?).await?;
        // A connection can be used again when its response is read to the end.
        let (head, body) = response.into_parts();
        Ok(Response::from_parts(head, body.collect().await?.to_bytes()))
    }

    /// Calls and returns the policies that rejected the request, as the answer tells.
    async fn ask(&self, method: Method, api_key: &str) -> Result<Vec<String>, BoxError> {
        let response = self.call(method, api_key).await?;
        match response.status() {
            StatusCode::OK => Ok(Vec::new()),
            StatusCode::TOO_MANY_REQUESTS => {
                let mut problem: Value = serde_json::from_slice(response.body())?;
                Ok(serde_json::from_value(problem["violated-policies"].take())?)
            }
            status => Err(format!("{api_key} got an unexpected answer: {status}").into()),
        }
    }
}
