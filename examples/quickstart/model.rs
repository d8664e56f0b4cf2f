//! What the quotas allow, in the plainest words.
//!
//! This is not how the limiter counts. The model keeps a list of all that it admitted and looks
//! through all of it for each request: one is allowed if afterwards no stretch of time has more than
//! the quotas say. A stretch of time is measured by the times that the limiter decided at, in the
//! order in which it decided, so nothing is left to chance: every single decision has to be the same,
//! and the counts are equal, not just near. (They are not if the system's clock is set back
//! meanwhile: the limiter copes with that, the model does not.)

use crate::{QUOTAS, callers::Tally, ledger::Entry};
use std::{collections::BTreeMap, time::Duration};
use tollgate::{Period, Quota};

/// What came of a replay.
#[derive(Default)]
pub(crate) struct Verdict {
    allowed: BTreeMap<String, u64>,
    /// The first decision that the model would not have made.
    difference: Option<String>,
    decisions: usize,
}

/// Decides all requests anew.
pub(crate) fn replay(entries: &[Entry]) -> Verdict {
    let mut verdict = Verdict { decisions: entries.len(), ..Verdict::default() };
    let mut admitted: Vec<&Entry> = Vec::new();
    for entry in entries {
        let expected = rejected_by(&admitted, entry);
        if expected.is_empty() {
            admitted.push(entry);
            *verdict.allowed.entry(entry.caller.clone()).or_default() += 1;
        }
        if expected != entry.rejected_by && verdict.difference.is_none() {
            verdict.difference = Some(format!(
                "a request of {} at {:?} was rejected by {:?}, and should have been by {expected:?}",
                entry.caller, entry.time, entry.rejected_by,
            ));
        }
    }
    verdict
}

/// The policies that have to reject a request, given what was admitted before.
fn rejected_by(admitted: &[&Entry], request: &Entry) -> Vec<&'static str> {
    let now = request.time;
    let all = || admitted.iter();
    let own = || all().filter(|past| past.caller == request.caller);
    let own_writes = || own().filter(|past| past.is_write);
    let time = |past: &&Entry| past.time;

    let mut rejected_by = Vec::new();
    let mut check = |policy, allows: bool| {
        if !allows {
            rejected_by.push(policy);
        }
    };
    check("per-key", bucket_allows(QUOTAS.per_key, own().map(time), now));
    if request.is_write {
        check("writes", log_allows(QUOTAS.writes, own_writes().map(time), now));
    }
    check("hourly", window_allows(QUOTAS.hourly, own().map(time), now));
    check("everybody", bucket_allows(QUOTAS.everybody, all().map(time), now));
    rejected_by
}

/// A bucket admits in any stretch of time no more than its burst and what comes back in that time.
fn bucket_allows(
    quota: Quota,
    past: impl DoubleEndedIterator<Item = Duration>,
    now: Duration,
) -> bool {
    let period = micros(length(quota));
    past.rev().zip(2..).all(|(start, count)| {
        let stretch = micros(now) - micros(start);
        // count <= burst + stretch * limit / period, in whole numbers.
        count * period
            <= i128::from(quota.capacity()) * period + stretch * i128::from(quota.limit())
    })
}

/// A log admits in any stretch of one period no more than the limit.
fn log_allows(quota: Quota, past: impl Iterator<Item = Duration>, now: Duration) -> bool {
    let recent = past.filter(|&time| time + length(quota) > now).count();
    (recent as u64) < quota.limit()
}

/// A window that begins with the first request admits no more than the limit until it ends.
fn window_allows(quota: Quota, past: impl Iterator<Item = Duration>, now: Duration) -> bool {
    let (mut end, mut count) = (Duration::ZERO, 0);
    for time in past.chain([now]) {
        if time >= end {
            (end, count) = (time + length(quota), 0);
        }
        count += 1;
    }
    count <= quota.limit()
}

fn length(quota: Quota) -> Duration {
    match quota.period() {
        Period::Fixed(length) => length,
        period => unreachable!("no quota here is per {period}"),
    }
}

fn micros(time: Duration) -> i128 {
    time.as_micros() as i128
}

impl Verdict {
    /// How many requests of a caller the quotas allow.
    pub(crate) fn allowed(&self, caller: &str) -> u64 {
        self.allowed.get(caller).copied().unwrap_or_default()
    }

    /// Whether each caller was admitted exactly as often as is allowed, by each single decision, and
    /// each policy had something to reject.
    pub(crate) fn agrees_with(&self, tallies: &[Tally]) -> Result<(), String> {
        for tally in tallies {
            let (name, admitted) = (tally.caller, tally.admitted);
            let allowed = self.allowed(name);
            if admitted != allowed {
                return Err(format!(
                    "{name} was admitted {admitted} times, and the quotas allow {allowed}"
                ));
            }
        }
        if let Some(difference) = &self.difference {
            return Err(difference.clone());
        }
        let sent: u64 = tallies.iter().map(|tally| tally.sent).sum();
        if self.decisions as u64 != sent {
            return Err(format!("{sent} requests were sent, and {} decided", self.decisions));
        }
        for policy in crate::POLICIES {
            if tallies.iter().all(|tally| tally.rejected_by(policy) == 0) {
                return Err(format!(
                    "nobody got to the limit of `{policy}`, so nothing is known of it: this machine \
                     is too busy to send that many requests"
                ));
            }
        }
        Ok(())
    }
}
