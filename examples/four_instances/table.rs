//! The table at the end, and what is to be seen in it.

use crate::{BURST, BoxError, INSTANCES, RATE, WARM_UP, load::Run, model};

pub(crate) fn print(local: &Run, redis: &Run) {
    println!("\n{:16}{:>8}{:>9}{:>12}{:>9}", "a second", "limit", "sent", "admitted", "ratio");
    for (state, run) in [("local state", local), ("state in Redis", redis)] {
        let (sent, admitted) = run.per_second();
        let ratio = admitted / RATE as f64;
        println!("{state:16}{RATE:>8}{sent:>9.0}{admitted:>12.1}{ratio:>9.2}");
    }
    println!("after {WARM_UP:?}, in which the burst of {BURST} is spent\n");
}

/// Whether local state admitted about as many times the limit as there are instances, and Redis
/// exactly what one bucket allows.
pub(crate) fn check(local: &Run, redis: &Run) -> Result<(), BoxError> {
    let allowed = model::one_bucket(&redis.decisions)
        .map_err(|difference| format!("Redis did not count as one bucket: {difference}"))?;
    let admitted = redis.admitted();
    if admitted != allowed {
        return Err(format!(
            "with Redis {admitted} were admitted, and one bucket allows {allowed}"
        )
        .into());
    }
    if !is_about_four_times(local) {
        return Err(format!(
            "with local state {:.0} a second were admitted, and {} are to be expected; is this machine \
             very busy?",
            local.per_second().1,
            RATE as usize * INSTANCES,
        )
        .into());
    }
    if let Some(idle) = redis.tallies.iter().position(|tally| tally.sent == tally.admitted) {
        return Err(
            format!("instance {} was not overrun; is this machine very busy?", idle + 1).into()
        );
    }
    println!("With Redis {admitted} requests were admitted: exactly what one bucket allows.");
    Ok(())
}

/// Whether each instance admitted about the limit.
pub(crate) fn is_about_four_times(run: &Run) -> bool {
    let expected = (RATE as usize * INSTANCES) as f64;
    (run.per_second().1 / expected - 1.0).abs() < 0.1
}

pub(crate) fn explain(local: &Run, redis: &Run) {
    let shares = |run: &Run| {
        let shares: Vec<_> = run.tallies.iter().map(|tally| tally.admitted.to_string()).collect();
        shares.join(", ")
    };
    let span = redis.span();
    let most = BURST + span.as_micros() as u64 * RATE / 1_000_000;
    println!(
        "With local state each instance counts for itself, and each keeps its word: they admitted
{} requests in {:.1} s. But whoever calls all of them gets {INSTANCES} times the
limit, and more with every instance that is added.

With state in Redis there is one bucket for all. Each request asks it, or all those together that wait
at an instance at the same time. The instances admitted {} requests, in what
shares ever they came, {} in all. The burst of {BURST} and {RATE} for each of the {:.3} seconds from the
first decision to the last make {most}, if the bucket is never full in between. And each decision was
compared with that of a plain model of one bucket, in the order of the times that Redis decided at:
see examples/four_instances/model.rs.

The difference in code is one line, `.store(RedisStore::builder(url).build()?)`: see
examples/four_instances/instance.rs.
",
        shares(local),
        local.span().as_secs_f64(),
        shares(redis),
        redis.admitted(),
        span.as_secs_f64(),
    );
}
