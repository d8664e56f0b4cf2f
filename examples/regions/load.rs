//! A caller that asks for more than it may, through all instances of its region at once.

use crate::{BoxError, INSTANCES, TIME};
use std::time::Duration;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tollgate::Limiter;

/// How often each instance is asked.
const PACE: Duration = Duration::from_millis(5);

/// What the caller of a region saw.
pub(crate) struct Run {
    pub(crate) region: &'static str,
    /// The longest time from a request to when the store had counted it, if it is told afterwards.
    pub(crate) lag: Option<Duration>,
    pub(crate) answers: Vec<Answer>,
}

#[derive(Clone, Copy)]
pub(crate) struct Answer {
    pub(crate) instance: usize,
    /// When it was asked for, since the beginning.
    pub(crate) at: Duration,
    pub(crate) admitted: bool,
    /// How long the decision took.
    pub(crate) took: Duration,
}

pub(crate) async fn overrun(instances: &[Limiter<str>]) -> Result<Vec<Answer>, BoxError> {
    for limiter in instances {
        // Somebody else: connections are made before anything is measured.
        limiter.check_async("warm-up").await?;
    }
    let start = Instant::now();
    let mut callers = JoinSet::new();
    for (instance, limiter) in instances.iter().enumerate() {
        let limiter = limiter.clone();
        callers.spawn(async move {
            let mut answers = Vec::new();
            // Instances take turns.
            let mut next = start + PACE * instance as u32 / INSTANCES as u32;
            while next < start + TIME {
                sleep_until(next).await;
                let asked = Instant::now();
                let admitted = limiter.check_async("alice").await.is_ok();
                let (at, took) = (asked - start, asked.elapsed());
                answers.push(Answer { instance, at, admitted, took });
                next += PACE;
            }
            answers
        });
    }
    Ok(callers.join_all().await.concat())
}
