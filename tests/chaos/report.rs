//! Figures of many rounds.

use crate::{
    checker::{Fullness, Span, Violation},
    client::{self, DEADLINE},
    log::{Answer, Decided},
    round::{Happened, Life, Plan, Round},
};
use std::{collections::BTreeMap, fmt, time::Duration};

#[derive(Default)]
pub(crate) struct Figures {
    rounds: u64,
    /// By answer.
    answers: BTreeMap<&'static str, u64>,
    /// How many were answered by an instance in place of the servers, and how many of those while nothing was
    /// wrong that the schedule knows of.
    stood_in: u64,
    strayed: u64,
    admissions: u64,
    given_back: u64,
    waits_us: Vec<u32>,
    /// Less what the machine took of them.
    own_waits_us: Vec<u32>,
    /// Waits that neither the deadline nor the machine explains.
    pub(crate) too_long: usize,
    pub(crate) violations: usize,
    /// By algorithm.
    fullness: BTreeMap<String, Fullness>,
    /// By fault, how long after its end the last request was not decided by servers.
    healing: BTreeMap<String, Vec<Duration>>,
}

/// What a request may wait longer than the deadline.
const GRACE: Duration = Duration::from_millis(10);

impl Figures {
    pub(crate) fn decisions(&self) -> u64 {
        self.answers.values().sum()
    }

    /// Adds a round, and says what was not as it should be.
    pub(crate) fn add(&mut self, plan: &Plan, round: &Round) -> Vec<String> {
        self.rounds += 1;
        let mut complaints = Vec::new();
        self.admissions += round.evidence.admissions.len() as u64;
        match round.evidence.check() {
            Ok(fullness) => {
                for (limit, full) in client::stack_of(plan.seed).iter().zip(fullness) {
                    let sum = self.fullness.entry(limit.kind()).or_default();
                    sum.of_servers = sum.of_servers.max(full.of_servers);
                    sum.together = sum.together.max(full.together);
                }
            }
            Err(violations) => {
                self.violations += violations.len();
                complaints.extend(violations.iter().map(Violation::to_string));
            }
        }
        for life in &round.lives {
            self.given_back += life.given_back;
            for decided in &life.decided {
                self.add_decision(decided);
                let noise_us = noise_us(life, decided);
                let bound_us = (DEADLINE + GRACE).as_micros() as u64;
                let own_wait_us = decided.wait_us.saturating_sub(noise_us);
                self.own_waits_us.push(own_wait_us.try_into().unwrap_or(u32::MAX));
                if own_wait_us > bound_us {
                    self.too_long += 1;
                    complaints.push(format!("noise {noise_us} us of {decided:?}"));
                }
                let is_excused = |span: &Span| {
                    span.from_us <= decided.asked.to_us && decided.asked.from_us <= span.to_us
                };
                if is_without_servers(decided) {
                    self.stood_in += 1;
                    let cut_off = &round.evidence.cut_off[life.instance as usize];
                    self.strayed += u64::from(!cut_off.iter().any(is_excused));
                }
            }
        }
        for happened in &round.faults {
            let healed = healed_after(round, happened);
            self.healing.entry(happened.fault.name()).or_default().push(healed);
        }
        complaints
    }

    fn add_decision(&mut self, decided: &Decided) {
        let answer = match decided.answer {
            Answer::Admitted => "admitted",
            Answer::Limited => "limited",
            Answer::Unavailable => "unavailable",
            Answer::GivenUp => "given up",
        };
        *self.answers.entry(answer).or_default() += 1;
        self.waits_us.push(decided.wait_us.try_into().unwrap_or(u32::MAX));
    }

    /// In how many of all decisions an instance answered by itself though nothing was known to be wrong.
    pub(crate) fn strayed(&self) -> f64 {
        self.strayed as f64 / self.decisions().max(1) as f64
    }
}

/// Rejections don't say who made them.
fn is_without_servers(decided: &Decided) -> bool {
    decided.answer == Answer::Unavailable || decided.charges.iter().any(|charge| charge.stood_in)
}

/// How much of a wait was the machine's.
fn noise_us(life: &Life, decided: &Decided) -> u64 {
    let Span { from_us, to_us } = decided.asked;
    // They are in order, and short but for pauses.
    let first = life.stalls.partition_point(|stall| stall.to_us <= from_us);
    let stalls = life.stalls[first..].iter().take_while(|stall| stall.from_us < to_us);
    let stalled = stalls.map(|stall| stall.to_us.min(to_us) - stall.from_us.max(from_us)).sum();
    decided.noise_us.max(stalled)
}

/// For how long after a fault instances go on to answer without servers, with no longer pauses than that.
fn healed_after(round: &Round, happened: &Happened) -> Duration {
    const PAUSE_US: u64 = 500_000;
    let end_us = happened.span.to_us;
    let mut healed_us = end_us;
    for instance in &happened.cut_off {
        let later = round
            .faults
            .iter()
            .filter(|other| other.cut_off.contains(instance) && other.span.to_us > end_us);
        let next_us = later.map(|other| other.span.from_us).min().unwrap_or(u64::MAX);
        let lives = round.lives.iter().filter(|life| life.instance == *instance);
        let alone = lives.flat_map(|life| &life.decided).filter(|one| is_without_servers(one));
        let mut times_us: Vec<_> = alone
            .map(|one| one.asked.from_us)
            .filter(|time_us| (end_us..next_us).contains(time_us))
            .collect();
        times_us.sort_unstable();
        let mut last_us = end_us;
        for time_us in times_us {
            if time_us - last_us > PAUSE_US {
                break;
            }
            last_us = time_us;
        }
        healed_us = healed_us.max(last_us);
    }
    Duration::from_micros(healed_us - end_us)
}

fn at_rank(sorted: &[u32], per_mille: usize) -> f64 {
    let index = (sorted.len() * per_mille / 1000).min(sorted.len().saturating_sub(1));
    f64::from(sorted.get(index).copied().unwrap_or_default()) / 1_000.0
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, answers, admissions, given_back, stood_in, strayed, .. } = self;
        let decisions = self.decisions();
        writeln!(f, "{decisions} decisions in {rounds} rounds: {answers:?}")?;
        writeln!(
            f,
            "{admissions} admissions checked, each by one policy, and {given_back} requests given back"
        )?;
        writeln!(
            f,
            "{stood_in} answered without the servers, {strayed} of them while nothing was known to be wrong"
        )?;
        for (what, waits) in
            [("waits", &self.waits_us), ("less what the machine took", &self.own_waits_us)]
        {
            let mut sorted = waits.clone();
            sorted.sort_unstable();
            let [half, most, nearly, all] =
                [500, 990, 999, 1000].map(|rank| at_rank(&sorted, rank));
            writeln!(f, "{what}: p50 {half} ms, p99 {most} ms, p99.9 {nearly} ms, max {all} ms")?;
        }
        let (deadline, too_long) = (DEADLINE + GRACE, self.too_long);
        writeln!(
            f,
            "waits of more than {deadline:?} that the machine does not explain: {too_long}"
        )?;
        for (kind, Fullness { of_servers, together }) in &self.fullness {
            writeln!(
                f,
                "{kind}: at most {of_servers:.3} of the bound by the servers, {together:.3} by all together"
            )?;
        }
        for (fault, healing) in &self.healing {
            let mut healing = healing.clone();
            healing.sort_unstable();
            let (count, half, most) =
                (healing.len(), healing[healing.len() / 2], healing[healing.len() - 1]);
            writeln!(f, "{fault}: {count} times, healed after {half:.0?}, at most {most:.0?}")?;
        }
        Ok(())
    }
}
