//! Proves from what instances wrote down that limits held. It knows nothing of how tollgate counts: only
//! what is documented of each algorithm, and what each fault may add.
//!
//! Every admission is written into somebody's ledger: that of the servers or, while these are out of reach,
//! that of an instance. What faults may add is said in ledgers:
//!
//! | fault | what it may add | why |
//! |---|---|---|
//! | the servers are out of reach of an instance: killed, paused, cut off, slow, out of memory | the ledger of this instance, with its share of the quota | it does not know what the others and the servers count |
//! | state is lost: a restart with nothing in it, a flush, a write that no replica had | another ledger of the servers | what was spent is forgotten |
//! | an instance is started anew | another ledger of its share | its own state was in its memory |
//! | keys move to other servers | another ledger of the servers, and of shares | what is counted in one place is not known in the other |
//! | an instance stands still, or is cut off, for longer than a lease | the slots that it holds | they are given to others, while their requests still run |
//! | scripts are flushed, answers are late, replies or requests are lost, callers give up | nothing | at worst it was charged and not admitted |
//! | requests are charged in one place and rejected in another, which is no fault | nothing | what is given back was left |
//!
//! So a window admits at most the sum of the ledgers that were open in it, each with its algorithm's own bound.
//! That is proven ledger by ledger.

use std::{collections::BTreeMap, fmt};

/// What an algorithm is documented to admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Law {
    /// `burst + t * limit / period` in any stretch of time `t`.
    Bucket { limit: u64, period_us: u64, burst: u64 },
    /// `limit` in each window; windows begin at whole multiples of the period.
    FixedWindow { limit: u64, period_us: u64 },
    /// `2 * limit` in a period, across the boundary of two windows.
    WindowFromFirstHit { limit: u64, period_us: u64 },
    /// `limit` in this window and, by how much of it is within a period of now, in the last one. Never
    /// `2 * limit` in a period.
    SlidingWindow { limit: u64, period_us: u64 },
    /// `limit` in any period.
    SlidingLog { limit: u64, period_us: u64 },
    /// `limit` at any moment.
    Slots { limit: u64 },
}

/// Who counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ledger {
    /// The servers, as those know them whose keys are spread in the same way.
    Servers { layout: u64 },
    /// An instance by itself, from its start to its end.
    Instance { instance: u64, life: u64, layout: u64 },
}

/// What one policy let through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    pub(crate) policy: usize,
    pub(crate) key: u64,
    pub(crate) ledger: Ledger,
    pub(crate) cost: u64,
    /// When, by the decision.
    pub(crate) time_us: u64,
    /// When, by the wall clock of the one who asked.
    pub(crate) asked: Span,
}

/// Slots that somebody held, for certain, from one moment to another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hold {
    pub(crate) policy: usize,
    pub(crate) key: u64,
    pub(crate) instance: u64,
    pub(crate) ledger: Ledger,
    pub(crate) cost: u64,
    pub(crate) held: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Span {
    pub(crate) from_us: u64,
    pub(crate) to_us: u64,
}

/// All that is known of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Evidence {
    /// By the index of the policy.
    pub(crate) laws: Vec<Law>,
    /// How many instances share a quota while the servers are out of reach.
    pub(crate) instances: u64,
    pub(crate) lease_us: u64,
    pub(crate) admissions: Vec<Admission>,
    pub(crate) holds: Vec<Hold>,
    /// When servers lost what they knew.
    pub(crate) losses: Vec<Span>,
    /// When each instance stood still or could not reach the servers, until it knew that it could again.
    pub(crate) cut_off: Vec<Vec<Span>>,
}

/// How near the bound a policy came at most: by the servers' ledger alone, and by all ledgers together in one
/// period, in parts of what one ledger may admit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Fullness {
    pub(crate) of_servers: f64,
    pub(crate) together: f64,
}

/// What must not be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Violation(String);

/// By how much clocks of one machine may differ; rather too much, since a thread may stand still between two.
const CLOCKS_US: u64 = 5_000;

#[derive(Clone, Copy)]
struct Spent {
    time_us: u64,
    cost: u64,
}

impl Span {
    fn meets(self, other: Self) -> bool {
        self.from_us <= other.to_us && self.to_us >= other.from_us
    }
}

// === impl Law ===

impl Law {
    /// That of each of so many instances: the numbers divided, and at least one.
    pub(crate) fn share(self, instances: u64) -> Self {
        self.with_numbers(|number| (number / instances).max(1))
    }

    /// That of several ledgers together.
    fn times(self, ledgers: u64) -> Self {
        self.with_numbers(|number| number * ledgers)
    }

    fn with_numbers(self, change: impl Fn(u64) -> u64) -> Self {
        match self {
            Self::Bucket { limit, period_us, burst } => {
                Self::Bucket { limit: change(limit), period_us, burst: change(burst) }
            }
            Self::FixedWindow { limit, period_us } => {
                Self::FixedWindow { limit: change(limit), period_us }
            }
            Self::WindowFromFirstHit { limit, period_us } => {
                Self::WindowFromFirstHit { limit: change(limit), period_us }
            }
            Self::SlidingWindow { limit, period_us } => {
                Self::SlidingWindow { limit: change(limit), period_us }
            }
            Self::SlidingLog { limit, period_us } => {
                Self::SlidingLog { limit: change(limit), period_us }
            }
            Self::Slots { limit } => Self::Slots { limit: change(limit) },
        }
    }

    /// Goes through what was spent, in order of time. Returns how much of the bound was used at most; above
    /// 1 is too much, with the time at which it was.
    fn fullest(self, spent: &[Spent]) -> (f64, u64) {
        match self {
            Self::Bucket { limit, period_us, burst } => {
                // What was spent in the fullest stretch that ends now, less what came back in it, in parts of a
                // unit, `period` to each.
                let (mut level, mut last_us) = (0, 0);
                fullest(spent.iter().map(|spent| {
                    let back = u128::from(limit) * u128::from(spent.time_us - last_us);
                    last_us = spent.time_us;
                    level = u128::saturating_sub(level, back)
                        + u128::from(spent.cost) * u128::from(period_us);
                    (level, u128::from(burst) * u128::from(period_us), spent.time_us)
                }))
            }
            Self::FixedWindow { limit, period_us } => {
                let (mut window, mut sum) = (0, 0);
                fullest(spent.iter().map(|spent| {
                    if spent.time_us / period_us != window {
                        (window, sum) = (spent.time_us / period_us, 0);
                    }
                    sum += u128::from(spent.cost);
                    (sum, limit.into(), spent.time_us)
                }))
            }
            Self::WindowFromFirstHit { limit, period_us } => {
                fullest_stretch(spent, period_us, 2 * limit)
            }
            Self::SlidingLog { limit, period_us } => fullest_stretch(spent, period_us, limit),
            Self::SlidingWindow { limit, period_us } => {
                let (mut window, mut this, mut last) = (0, 0, 0);
                let weighed = fullest(spent.iter().map(|spent| {
                    let (next, elapsed) = (spent.time_us / period_us, spent.time_us % period_us);
                    if next != window {
                        last = if next == window + 1 { this } else { 0 };
                        (window, this) = (next, 0);
                    }
                    this += u128::from(spent.cost);
                    let used =
                        this * u128::from(period_us) + last * u128::from(period_us - elapsed);
                    (used, u128::from(limit) * u128::from(period_us), spent.time_us)
                }));
                let twice = fullest_stretch(spent, period_us, 2 * limit - 1);
                if twice.0 > 1.0 { twice } else { weighed }
            }
            Self::Slots { .. } => unreachable!("slots are held, not spent"),
        }
    }

    /// How much all ledgers together let through in one period, in parts of what one may.
    fn together(self, spent: &[Spent]) -> f64 {
        match self {
            Self::Bucket { limit, period_us, burst } => {
                fullest_stretch(spent, period_us, limit + burst).0
            }
            Self::FixedWindow { .. }
            | Self::WindowFromFirstHit { .. }
            | Self::SlidingLog { .. } => self.fullest(spent).0,
            Self::SlidingWindow { limit, period_us } => {
                fullest_stretch(spent, period_us, 2 * limit - 1).0
            }
            Self::Slots { .. } => unreachable!("slots are held, not spent"),
        }
    }
}

/// The fullest of moments, each with what was used, what there was, and its time.
fn fullest(moments: impl Iterator<Item = (u128, u128, u64)>) -> (f64, u64) {
    let parts = moments.map(|(used, most, time_us)| {
        // By whole numbers; the fraction is only for people.
        let part = used as f64 / most as f64;
        (if used > most { part.max(1.0 + f64::EPSILON) } else { part.min(1.0) }, time_us)
    });
    parts.fold((0.0, 0), |fullest, part| if part.0 > fullest.0 { part } else { fullest })
}

/// The same of what is spent in any stretch of time that is shorter than a period.
fn fullest_stretch(spent: &[Spent], period_us: u64, most: u64) -> (f64, u64) {
    let (mut first, mut sum) = (0, 0);
    fullest(spent.iter().map(|last| {
        sum += u128::from(last.cost);
        while last.time_us - spent[first].time_us >= period_us {
            sum -= u128::from(spent[first].cost);
            first += 1;
        }
        (sum, most.into(), last.time_us)
    }))
}

// === impl Evidence ===

/// A policy and a key.
type Whom = (usize, u64);

impl Evidence {
    /// Checks all of it, and says how full each policy was.
    pub(crate) fn check(&self) -> Result<Vec<Fullness>, Vec<Violation>> {
        let mut violations = Vec::new();
        let mut fullness = vec![Fullness::default(); self.laws.len()];
        self.check_times(&mut violations);
        self.check_rates(&mut fullness, &mut violations);
        self.check_slots(&mut fullness, &mut violations);
        if violations.is_empty() { Ok(fullness) } else { Err(violations) }
    }

    /// A decision's own time lies between question and answer, so that the rest can go by it.
    fn check_times(&self, violations: &mut Vec<Violation>) {
        let is_wrong = |admission: &&Admission| {
            let Span { from_us, to_us } = admission.asked;
            !(from_us - CLOCKS_US..=to_us + CLOCKS_US).contains(&admission.time_us)
        };
        let wrong = self.admissions.iter().filter(is_wrong);
        violations.extend(wrong.map(|admission| {
            Violation(format!(
                "decided at another time than between question and answer: {admission:?}"
            ))
        }));
    }

    fn check_rates(&self, fullness: &mut [Fullness], violations: &mut Vec<Violation>) {
        let eras = Eras::between(&self.losses);
        let mut by_ledger = BTreeMap::<(Whom, Ledger, usize), Vec<Spent>>::new();
        let mut by_whom = BTreeMap::<Whom, Vec<Spent>>::new();
        for admission in &self.admissions {
            let Admission { policy, key, ledger, time_us, cost, .. } = *admission;
            let era = match ledger {
                Ledger::Servers { .. } => eras.index_of(time_us),
                Ledger::Instance { .. } => 0,
            };
            let spent = Spent { time_us, cost };
            by_ledger.entry(((policy, key), ledger, era)).or_default().push(spent);
            by_whom.entry((policy, key)).or_default().push(spent);
        }
        for (((policy, key), ledger, era), mut spent) in by_ledger {
            spent.sort_by_key(|spent| spent.time_us);
            let law = match ledger {
                Ledger::Servers { .. } => self.laws[policy].times(eras.ledgers_in(era)),
                Ledger::Instance { .. } => self.laws[policy].share(self.instances),
            };
            let (full, time_us) = law.fullest(&spent);
            if full > 1.0 {
                violations.push(Violation(format!(
                    "policy {policy}, key {key}: {full:.6} of {law:?} by {ledger:?} at {time_us}"
                )));
            }
            if let Ledger::Servers { .. } = ledger {
                fullness[policy].of_servers = fullness[policy].of_servers.max(full);
            }
        }
        for ((policy, _), mut spent) in by_whom {
            spent.sort_by_key(|spent| spent.time_us);
            let together = self.laws[policy].together(&spent);
            fullness[policy].together = fullness[policy].together.max(together);
        }
    }

    fn check_slots(&self, fullness: &mut [Fullness], violations: &mut Vec<Violation>) {
        let mut by_ledger = BTreeMap::<(Whom, Ledger), Vec<Hold>>::new();
        let mut by_whom = BTreeMap::<Whom, Vec<Hold>>::new();
        for hold in &self.holds {
            by_whom.entry((hold.policy, hold.key)).or_default().push(*hold);
            let mut hold = *hold;
            if let Ledger::Servers { .. } = hold.ledger {
                hold.held.to_us = hold.held.to_us.min(self.may_be_lost_at(&hold));
            }
            by_ledger.entry(((hold.policy, hold.key), hold.ledger)).or_default().push(hold);
        }
        for (((policy, key), ledger), holds) in by_ledger {
            let law = match ledger {
                Ledger::Servers { .. } => self.laws[policy],
                Ledger::Instance { .. } => self.laws[policy].share(self.instances),
            };
            let (full, time_us) = fullest_moment(law, &holds);
            if full > 1.0 {
                violations.push(Violation(format!(
                    "policy {policy}, key {key}: {full:.3} of {law:?} by {ledger:?} at {time_us}"
                )));
            }
            if let Ledger::Servers { .. } = ledger {
                fullness[policy].of_servers = fullness[policy].of_servers.max(full);
            }
        }
        for ((policy, _), holds) in by_whom {
            let together = fullest_moment(self.laws[policy], &holds).0;
            fullness[policy].together = fullness[policy].together.max(together);
        }
    }

    /// When the servers may first have forgotten of slots: when they lost state, or when their lease could
    /// not be renewed. It was, a third of a lease before the instance was cut off, or almost so.
    fn may_be_lost_at(&self, hold: &Hold) -> u64 {
        let meets = |span: &&Span| span.meets(hold.held);
        let losses = self.losses.iter().filter(meets).map(|loss| loss.from_us);
        let cut_off = self.cut_off[hold.instance as usize].iter().filter(meets);
        let run_out = cut_off.filter_map(|span| {
            let runs_out = span.from_us + self.lease_us / 2;
            (span.to_us >= runs_out).then_some(runs_out)
        });
        losses.chain(run_out).min().unwrap_or(u64::MAX)
    }
}

/// The times between losses, which have even numbers, and those of losses.
struct Eras {
    /// Disjoint and in order, each with how many losses it was.
    losses: Vec<(Span, u64)>,
}

impl Eras {
    fn between(losses: &[Span]) -> Self {
        let mut losses = losses.to_vec();
        losses.sort_unstable();
        let mut merged: Vec<(Span, u64)> = Vec::new();
        for loss in losses {
            match merged.last_mut() {
                Some((last, count)) if loss.from_us <= last.to_us => {
                    last.to_us = last.to_us.max(loss.to_us);
                    *count += 1;
                }
                _ => merged.push((loss, 1)),
            }
        }
        Self { losses: merged }
    }

    fn index_of(&self, time_us: u64) -> usize {
        let borders = self.losses.iter().flat_map(|(loss, _)| [loss.from_us, loss.to_us]);
        borders.filter(|border| *border <= time_us).count()
    }

    /// While state is being lost, what was and what will be may both count.
    fn ledgers_in(&self, era: usize) -> u64 {
        if era % 2 == 1 { self.losses[era / 2].1 + 1 } else { 1 }
    }
}

/// Spans that overlap, or are no further apart than that, as one.
pub(crate) fn merged(mut spans: Vec<Span>, gap_us: u64) -> Vec<Span> {
    spans.sort_unstable();
    let mut merged: Vec<Span> = Vec::new();
    for span in spans {
        match merged.last_mut() {
            Some(last) if span.from_us <= last.to_us + gap_us => {
                last.to_us = last.to_us.max(span.to_us);
            }
            _ => merged.push(span),
        }
    }
    merged
}

/// How many slots were held at most, in parts of the limit, and when.
fn fullest_moment(law: Law, holds: &[Hold]) -> (f64, u64) {
    let Law::Slots { limit } = law else { unreachable!("only slots are held") };
    let held = holds.iter().filter(|hold| hold.held.from_us < hold.held.to_us);
    let mut changes: Vec<(u64, i128)> = held
        .flat_map(|hold| {
            let cost = i128::from(hold.cost);
            [(hold.held.from_us, cost), (hold.held.to_us, -cost)]
        })
        .collect();
    // At the same moment, what is released comes first.
    changes.sort_unstable();
    let mut sum = 0;
    fullest(changes.into_iter().map(|(time_us, change)| {
        sum += change;
        (sum as u128, limit.into(), time_us)
    }))
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The checker is checked itself: what is allowed passes, and one too many does not.
mod tests {
    use super::*;

    const PERIOD_US: u64 = 1_000_000;
    const T0: u64 = 1_000_000 * PERIOD_US;
    const SERVERS: Ledger = Ledger::Servers { layout: 0 };

    fn alone(instance: u64) -> Ledger {
        Ledger::Instance { instance, life: 0, layout: 0 }
    }

    fn span(from_us: u64, to_us: u64) -> Span {
        Span { from_us: T0 + from_us, to_us: T0 + to_us }
    }

    fn evidence(law: Law) -> Evidence {
        let cut_off = vec![Vec::new(); 4];
        Evidence {
            laws: vec![law],
            instances: 4,
            lease_us: PERIOD_US,
            cut_off,
            ..Evidence::default()
        }
    }

    fn admission(ledger: Ledger, time_us: u64) -> Admission {
        let time_us = T0 + time_us;
        let asked = Span { from_us: time_us - 500, to_us: time_us + 500 };
        Admission { policy: 0, key: 7, ledger, cost: 1, time_us, asked }
    }

    fn holds(
        mut evidence: Evidence,
        times_us: impl IntoIterator<Item = u64>,
        ledger: Ledger,
    ) -> bool {
        let admissions = times_us.into_iter().map(|time_us| admission(ledger, time_us));
        evidence.admissions.extend(admissions);
        evidence.check().is_ok()
    }

    fn held(ledger: Ledger, from_us: u64, to_us: u64) -> Hold {
        let held = span(from_us, to_us);
        Hold { policy: 0, key: 7, instance: 1, ledger, cost: 1, held }
    }

    const LIMITS: [Law; 5] = [
        Law::Bucket { limit: 8, period_us: PERIOD_US, burst: 8 },
        Law::FixedWindow { limit: 8, period_us: PERIOD_US },
        Law::WindowFromFirstHit { limit: 4, period_us: PERIOD_US },
        Law::SlidingWindow { limit: 8, period_us: PERIOD_US },
        Law::SlidingLog { limit: 8, period_us: PERIOD_US },
    ];

    #[test]
    fn eight_at_once_are_allowed_and_nine_are_not() {
        for law in LIMITS {
            assert!(holds(evidence(law), [0; 8], SERVERS), "{law:?}");
            assert!(!holds(evidence(law), [0; 9], SERVERS), "{law:?}");
        }
    }

    #[test]
    fn what_comes_back_can_be_spent_and_no_sooner() {
        let next = PERIOD_US / 8;
        let bucket = || evidence(LIMITS[0]);
        assert!(holds(bucket(), [&[0; 8][..], &[next]].concat(), SERVERS));
        assert!(!holds(bucket(), [&[0; 8][..], &[next - 1]].concat(), SERVERS));
        let log = || evidence(LIMITS[4]);
        assert!(holds(log(), [&[5; 8][..], &[PERIOD_US + 5]].concat(), SERVERS));
        assert!(!holds(log(), [&[5; 8][..], &[PERIOD_US + 4]].concat(), SERVERS));
        // Half of the last window still counts.
        let sliding = || evidence(LIMITS[3]);
        let half = PERIOD_US * 3 / 2;
        assert!(holds(sliding(), [&[0; 8][..], &[half; 4]].concat(), SERVERS));
        assert!(!holds(sliding(), [&[0; 8][..], &[half; 5]].concat(), SERVERS));
    }

    #[test]
    fn windows_begin_at_fixed_times() {
        let fixed = || evidence(LIMITS[1]);
        let around = |time: u64| [[time - 1; 8], [time; 8]].concat();
        assert!(holds(fixed(), around(PERIOD_US), SERVERS));
        assert!(!holds(fixed(), around(PERIOD_US / 2), SERVERS));
    }

    #[test]
    fn costs_count_by_their_size() {
        for (cost, is_well) in [(8, true), (9, false)] {
            let mut evidence = evidence(LIMITS[0]);
            evidence.admissions.push(Admission { cost, ..admission(SERVERS, 0) });
            assert_eq!(evidence.check().is_ok(), is_well, "{cost}");
        }
    }

    #[test]
    fn an_instance_alone_has_its_share_beside_the_servers() {
        for law in LIMITS {
            let share = if let Law::WindowFromFirstHit { .. } = law { 2 } else { 8 / 4 };
            let with_servers = || {
                let mut evidence = evidence(law);
                evidence.admissions.extend([admission(SERVERS, 0); 8]);
                evidence.admissions.extend([admission(alone(0), 0)].repeat(share));
                evidence
            };
            assert!(holds(with_servers(), vec![0; share], alone(1)), "{law:?}");
            assert!(!holds(with_servers(), vec![0; share + 1], alone(1)), "{law:?}");
        }
    }

    #[test]
    fn a_loss_gives_one_more_budget() {
        for law in LIMITS {
            let lossy = || {
                let losses = vec![span(100, 200)];
                Evidence { losses, ..evidence(law) }
            };
            assert!(holds(lossy(), [[0; 8], [300; 8]].concat(), SERVERS), "{law:?}");
            assert!(!holds(lossy(), [&[0; 8][..], &[300; 9]].concat(), SERVERS), "{law:?}");
            // Whether it was before or after, nobody can say.
            assert!(holds(lossy(), [150; 16], SERVERS), "{law:?}");
            assert!(!holds(lossy(), [150; 17], SERVERS), "{law:?}");
        }
    }

    #[test]
    fn a_decision_of_another_time_is_found() {
        let mut evidence = evidence(LIMITS[0]);
        let admission = admission(SERVERS, 0);
        evidence
            .admissions
            .push(Admission { time_us: admission.time_us + 2 * CLOCKS_US, ..admission });
        assert!(evidence.check().is_err());
    }

    #[test]
    fn more_in_flight_than_slots_are_found() {
        let slots = || evidence(Law::Slots { limit: 4 });
        let with = |holds: &[Hold]| Evidence { holds: holds.to_vec(), ..slots() }.check().is_ok();
        let four = [held(SERVERS, 0, 100); 4];
        assert!(with(&four));
        // A slot that is released is free at once.
        assert!(with(&[&four[..], &[held(SERVERS, 100, 200)]].concat()));
        assert!(!with(&[&four[..], &[held(SERVERS, 99, 200)]].concat()));
        assert!(with(&[&four[..], &[held(alone(0), 0, 100), held(alone(1), 0, 100)]].concat()));
        assert!(!with(&[&four[..], &[held(alone(0), 0, 100); 2]].concat()));
    }

    #[test]
    fn slots_of_who_is_cut_off_count_for_half_a_lease_for_certain() {
        let with = |cut_off: Span, next: u64| {
            let holds = [
                &[held(SERVERS, 0, 9 * PERIOD_US); 4][..],
                &[Hold { instance: 2, ..held(SERVERS, next, next + 1) }],
            ];
            let slots = evidence(Law::Slots { limit: 4 });
            let cut_off = vec![Vec::new(), vec![cut_off], Vec::new(), Vec::new()];
            Evidence { holds: holds.concat(), cut_off, ..slots }.check().is_ok()
        };
        let long = span(PERIOD_US, 3 * PERIOD_US);
        assert!(!with(long, PERIOD_US));
        assert!(with(long, PERIOD_US * 3 / 2));
        assert!(with(long, 4 * PERIOD_US));
        assert!(!with(span(PERIOD_US, PERIOD_US + 1_000), PERIOD_US * 3 / 2));
    }
}
