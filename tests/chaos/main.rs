//! Chaos: several processes share limits while servers are killed, paused, flushed, filled and restarted, the
//! network fails, keys move, replicas take over, and the processes themselves are killed and paused. An
//! independent [`checker`] goes through all that they were told.
//!
//! All of it follows from a seed, which is printed; `TOLLGATE_CHAOS_SEED` sets it. `TOLLGATE_CHAOS_SECONDS` is how
//! long rounds take together, and `TOLLGATE_CHAOS_ROUND` leaves out all but one.

#[path = "../support/mod.rs"]
mod support;

mod checker;
mod client;
mod dice;
mod log;
mod report;
mod round;
mod schedule;
mod stack;
mod topology;

use dice::Dice;
use report::Figures;
use round::{Plan, carry_out};
use schedule::{Fault, Step};
use std::{
    env,
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use support::{ms, secs};
use topology::Kind;

/// Each round has servers, a stack and traffic of its own.
const ROUND: Duration = secs(6);

#[test]
fn limits_hold_and_nobody_waits_while_everything_fails() {
    let seed = number("TOLLGATE_CHAOS_SEED").unwrap_or_else(|| RandomState::new().hash_one("seed"));
    let length = secs(number("TOLLGATE_CHAOS_SECONDS").unwrap_or(24));
    println!("TOLLGATE_CHAOS_SEED={seed} TOLLGATE_CHAOS_SECONDS={}", length.as_secs());
    let (mut figures, mut dice) = (Figures::default(), Dice::of(seed, &[]));
    let only = number("TOLLGATE_CHAOS_ROUND");
    let rounds = length.as_millis().div_ceil(ROUND.as_millis());
    for (index, kind) in (0..rounds).zip(Kind::ALL.into_iter().cycle()) {
        let seed = dice.next();
        if only.is_some_and(|only| u128::from(only) != index) {
            continue;
        }
        let plan = Plan::of(seed, kind, ROUND);
        let mut round = carry_out(&plan);
        let complaints = figures.add(&plan, &round);
        round.keeps_logs = !complaints.is_empty();
        println!(
            "round {index}: {kind:?} on {:?}, {} faults, {} decisions so far",
            plan.flavour,
            plan.steps.len(),
            figures.decisions()
        );
        complaints.iter().take(10).for_each(|complaint| println!("{complaint}"));
    }
    println!("{figures}");
    assert_eq!(figures.violations, 0, "bounds did not hold");
    assert_eq!(figures.too_long, 0, "requests waited too long");
    assert!(
        only.is_some() || figures.decisions() > 200 * length.as_secs(),
        "hardly anything was decided"
    );
    // A busy machine is a reason that the schedule does not know.
    assert!(figures.strayed() < 0.1, "instances often answer without a reason");
}

// === the suite itself ===

/// A round of a standalone server in which that is all that happens.
fn plan_of(faults: impl IntoIterator<Item = (u64, u64, Fault)>) -> Plan {
    // Of a stack whose policies all count while there is no server.
    let plan = Plan::of(COUNTED_BY_ALL, Kind::Standalone, ms(3_500));
    let step = |(at, lasts, fault)| Step { at: ms(at), lasts: ms(lasts), fault };
    Plan { steps: faults.into_iter().map(step).collect(), gives_back: false, ..plan }
}

const COUNTED_BY_ALL: u64 = 11;

/// What instances are told is taken for true: here, that each of four is the only one.
#[test]
fn a_fleet_that_gives_out_whole_quotas_is_found_out() {
    let plan = plan_of([(700, 2_000, Fault::Pause { server: 0 })]);
    let found = carry_out(&plan).evidence.check();
    assert!(found.is_ok(), "{found:?}");
    let found = carry_out(&Plan { told_instances: 1, ..plan }).evidence.check().unwrap_err();
    assert!(found.iter().all(|violation| violation.to_string().contains("Instance")), "{found:?}");
}

#[test]
fn a_server_that_forgets_is_found_out() {
    let flushes = (7..30).map(|time| (time * 100, 0, Fault::FlushData { server: 0 }));
    let mut evidence = carry_out(&plan_of(flushes)).evidence.clone();
    let found = evidence.check();
    assert!(found.is_ok(), "{found:?}");
    evidence.losses.clear();
    assert!(evidence.check().is_err());
}

fn number(name: &str) -> Option<u64> {
    Some(env::var(name).ok()?.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}
