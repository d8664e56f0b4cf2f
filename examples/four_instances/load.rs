//! Clients that ask for more than the limit, through all instances at once.

use crate::{BoxError, TIME, WARM_UP, instance::DECIDED_AT};
use axum::{
    body::Bytes,
    http::{Request, StatusCode},
};
use http_body_util::{BodyExt, Empty};
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::TokioExecutor,
};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::{net::SocketAddr, time::Duration};
use tokio::{sync::mpsc, time::Instant};

/// How many clients each instance has.
const CLIENTS: usize = 8;

/// How long a client waits between two requests. So an instance gets some hundreds a second.
const PAUSE: Duration = Duration::from_millis(10);

/// What the clients of all instances saw.
pub(crate) struct Run {
    /// By instance.
    pub(crate) tallies: Vec<Tally>,
    pub(crate) decisions: Vec<Sample>,
}

#[derive(Clone, Default)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) admitted: u64,
}

/// One decision.
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) instance: usize,
    pub(crate) time_us: u64,
    pub(crate) admitted: bool,
}

impl Run {
    pub(crate) fn admitted(&self) -> u64 {
        self.tallies.iter().map(|tally| tally.admitted).sum()
    }

    /// The first decision and the last, by the clock that they were made by.
    fn ends_us(&self) -> (u64, u64) {
        let times = || self.decisions.iter().map(|decision| decision.time_us);
        (times().min().unwrap_or(0), times().max().unwrap_or(0))
    }

    /// From the first decision to the last.
    pub(crate) fn span(&self) -> Duration {
        let (first_us, last_us) = self.ends_us();
        Duration::from_micros(last_us - first_us)
    }

    /// How many requests were sent and how many admitted a second, after the bursts were spent.
    pub(crate) fn per_second(&self) -> (f64, f64) {
        let (first_us, last_us) = self.ends_us();
        let from_us = first_us + WARM_UP.as_micros() as u64;
        let counted = || self.decisions.iter().filter(|decision| decision.time_us > from_us);
        let admitted = counted().filter(|decision| decision.admitted).count();
        let seconds = last_us.saturating_sub(from_us) as f64 / 1e6;
        (counted().count() as f64 / seconds, admitted as f64 / seconds)
    }
}

pub(crate) async fn overrun(title: &str, instances: &[SocketAddr]) -> Result<Run, BoxError> {
    let start = Instant::now();
    let (sender, mut answers) = mpsc::channel(64);
    for (instance, &address) in instances.iter().enumerate() {
        for _ in 0..CLIENTS {
            let sender = sender.clone();
            tokio::spawn(async move {
                let client = Client::new(address);
                // Every request that was sent is waited for, or decisions would be missing.
                while start.elapsed() < TIME {
                    let answer = client.ask(instance).await;
                    if sender.send(answer).await.is_err() {
                        return;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            });
        }
    }
    drop(sender);

    let display = Display::new(title, instances.len())?;
    let mut tallies = vec![Tally::default(); instances.len()];
    let mut decisions = Vec::new();
    while let Some(answer) = answers.recv().await {
        let decision: Sample = answer?;
        let tally = &mut tallies[decision.instance];
        tally.sent += 1;
        tally.admitted += u64::from(decision.admitted);
        decisions.push(decision);
        display.show(&tallies, start.elapsed());
    }
    Ok(Run { tallies, decisions })
}

/// A client with one connection to an instance, which it keeps.
struct Client {
    http: legacy::Client<HttpConnector, Empty<Bytes>>,
    url: String,
}

impl Client {
    fn new(instance: SocketAddr) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Self { http, url: format!("http://{instance}/") }
    }

    async fn ask(&self, instance: usize) -> Result<Sample, BoxError> {
        let request = Request::get(&self.url).body(Empty::new())?;
        let (head, body) = self.http.request(request).await?.into_parts();
        // A connection can be used again when its response is read to the end.
        let body = body.collect().await?.to_bytes();
        let admitted = match head.status {
            StatusCode::OK => true,
            StatusCode::TOO_MANY_REQUESTS => false,
            status => {
                let body = String::from_utf8_lossy(&body);
                return Err(format!("an instance answered {status}: {body}").into());
            }
        };
        let time_us = head.headers.get(DECIDED_AT).ok_or("a response does not say when")?;
        Ok(Sample { instance, time_us: time_us.to_str()?.parse()?, admitted })
    }
}

/// A line for each instance and one for all. Where standard error is no terminal, nothing is drawn.
struct Display {
    /// Draws the others.
    _lines: MultiProgress,
    instances: Vec<ProgressBar>,
    all: ProgressBar,
}

impl Display {
    fn new(title: &str, instances: usize) -> Result<Self, BoxError> {
        let lines = MultiProgress::new();
        let style = ProgressStyle::with_template("  {prefix:14} {msg}")?;
        let instances = (1..=instances).map(|number| {
            let line = lines.add(ProgressBar::no_length()).with_style(style.clone());
            line.with_prefix(format!("instance {number}"))
        });
        let instances = instances.collect();
        let all = lines.add(ProgressBar::new(TIME.as_millis() as u64));
        all.set_style(ProgressStyle::with_template("  {prefix:14} {msg} {bar:30}")?);
        all.set_prefix(title.to_owned());
        Ok(Self { _lines: lines, instances, all })
    }

    fn show(&self, tallies: &[Tally], elapsed: Duration) {
        let message = |sent: u64, admitted: u64| {
            let per_second = admitted as f64 / elapsed.as_secs_f64();
            format!("{admitted:5} of {sent:5} admitted, {per_second:4.0} a second")
        };
        for (line, tally) in self.instances.iter().zip(tallies) {
            line.set_message(message(tally.sent, tally.admitted));
        }
        let sum = |count: fn(&Tally) -> u64| tallies.iter().map(count).sum();
        self.all.set_message(message(sum(|tally| tally.sent), sum(|tally| tally.admitted)));
        self.all.set_position(elapsed.as_millis() as u64);
    }
}

impl Drop for Display {
    fn drop(&mut self) {
        self.instances.iter().chain([&self.all]).for_each(ProgressBar::finish_and_clear);
    }
}
