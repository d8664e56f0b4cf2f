//! What one bucket allows, in the plainest words.

use crate::{BURST, RATE, load::Sample};

/// Decides all requests anew with one bucket, and returns how many it admits. An error says which
/// decision it would not have made.
///
/// The bucket is fed in the order of time, with the times that Redis decided at. Redis runs one script
/// after another, so of two decisions with different times, the earlier time was the earlier decision.
/// Requests that were decided together, or in the same microsecond, have equal times; among those it
/// does not matter who came first, because all of them cost the same: a bucket with three tokens
/// admits three of them, whichever these are. So the admitted ones are put first, and then every
/// single decision has to be equal. Nothing is allowed for.
///
/// (They are not equal if the server's clock is set back meanwhile: the limiter copes with that, the
/// model does not.)
pub(crate) fn one_bucket(decisions: &[Sample]) -> Result<u64, String> {
    // In microseconds of refilling; a token is what comes back in so many.
    const TOKEN: u64 = 1_000_000 / RATE;
    const FULL: u64 = BURST * TOKEN;

    let mut decisions = decisions.to_vec();
    decisions.sort_by_key(|decision| (decision.time_us, !decision.admitted));
    let (mut level, mut last_us, mut admitted) = (FULL, 0, 0);
    for Sample { instance, time_us, admitted: was_admitted } in decisions {
        level = FULL.min(level + (time_us - last_us));
        last_us = time_us;
        let allowed = level >= TOKEN;
        if allowed {
            level -= TOKEN;
            admitted += 1;
        }
        if allowed != was_admitted {
            let [did, should] = [was_admitted, allowed]
                .map(|admitted| if admitted { "admitted" } else { "rejected" });
            return Err(format!(
                "instance {} {did} a request at {time_us} µs that one bucket would have {should}",
                instance + 1,
            ));
        }
    }
    Ok(admitted)
}
