//! Limits a service that is not HTTP: a worker that takes jobs from a queue.
//!
//! Each tenant may run so many jobs a second. A job that comes too early is rejected with an error
//! that says how long to wait; it goes back into the queue after that time, and meanwhile the
//! worker goes on with the jobs of others. All of a tenant's jobs are told the same time, when one
//! of them will be admitted, so some come back in vain; to line them up use a leaky bucket with a
//! maximum delay, as in the example `client`.
//!
//! ```text
//! cargo run --example any_service
//! ```

use std::{collections::BTreeMap, convert::Infallible, error::Error, time::Duration};
use tokio::{sync::mpsc, time::Instant};
use tollgate::{CallError, Limiter, Policy, Quota, RateLimitLayer, key::Key};
use tower::{Service, ServiceBuilder, ServiceExt};

/// A call consumes its job, so one that may be rejected has to be cloned to be tried again.
#[derive(Clone, Debug)]
struct Job {
    tenant: &'static str,
    number: u32,
}

async fn run(job: Job) -> Result<String, Infallible> {
    Ok(format!("{} {}", job.tenant, job.number))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::<Job>::builder()
        .key(|job: &Job| Key::from(job.tenant))
        .policy(Policy::token_bucket("jobs", Quota::per_second(5)))
        .build()?;
    let mut worker =
        ServiceBuilder::new().layer(RateLimitLayer::calls(limiter)).service(tower::service_fn(run));

    let (queue, mut jobs) = mpsc::unbounded_channel();
    for (tenant, count) in [("big", 15), ("small", 3)] {
        for number in 1..=count {
            queue.send(Job { tenant, number })?;
        }
    }

    let start = Instant::now();
    let mut finished = BTreeMap::<_, Vec<Duration>>::new();
    let (mut unfinished, mut rejections) = (jobs.len(), 0);
    while unfinished > 0 {
        let job = jobs.recv().await.ok_or("the queue is closed")?;
        let tenant = job.tenant;
        match worker.ready().await?.call(job.clone()).await {
            Ok(done) => {
                println!("{:5} ms  {done}", start.elapsed().as_millis());
                finished.entry(tenant).or_default().push(start.elapsed());
                unfinished -= 1;
            }
            Err(CallError::Rejected(rejection)) => {
                rejections += 1;
                // No wait would ever do for a job that costs more than the whole quota.
                let Some(wait) = rejection.retry_after() else {
                    return Err(rejection.into());
                };
                let queue = queue.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(wait).await;
                    queue.send(job)
                });
            }
            Err(CallError::Inner(never)) => match never {},
        }
    }
    println!("{rejections} times a job was sent back to wait");

    // Five of the big tenant's jobs ran at once and the other ten took 2 s, five a second; nobody
    // else waited for them.
    let last = |tenant| finished[tenant].last().copied().unwrap_or_default();
    assert_eq!((finished["big"].len(), finished["small"].len()), (15, 3));
    assert!(last("big") >= Duration::from_millis(1_990), "too early: {:?}", last("big"));
    assert!(last("small") < last("big"), "the small tenant waited for the big one");
    Ok(())
}
