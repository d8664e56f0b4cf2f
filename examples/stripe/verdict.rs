//! Whether shedding went as it should.

use crate::{
    classes::CLASSES,
    service::LIMITERS,
    tally::{Tallies, Tally},
};
use std::time::Duration;
use tollgate::Priority;

/// In which order the workers' shedder let go of the classes, and let them back in, by what their clients
/// got.
#[derive(Default)]
pub(crate) struct Verdict {
    gone: Vec<Move>,
    back: Vec<Move>,
}

struct Move {
    priority: Priority,
    time: Duration,
}

impl Verdict {
    /// A class is gone from when it loses more than half of its requests.
    pub(crate) fn see_going(&mut self, time: Duration, tallies: &Tallies) {
        // Two that go in the same tick are in no order, so here they are in the wrong one.
        for (class, tally) in CLASSES.iter().zip(tallies) {
            let is_known = has(&self.gone, class.priority);
            if !is_known && tally.admitted_by_workers() < 0.5 {
                self.gone.push(Move { priority: class.priority, time });
            }
        }
    }

    /// It is back from when it no longer does.
    pub(crate) fn see_coming_back(&mut self, time: Duration, tallies: &Tallies) {
        for (class, tally) in CLASSES.iter().zip(tallies).rev() {
            let is_away = has(&self.gone, class.priority) && !has(&self.back, class.priority);
            if is_away && tally.admitted_by_workers() >= 0.5 {
                self.back.push(Move { priority: class.priority, time });
            }
        }
    }

    /// Whether no critical request was shed, the others went and came back in order, and each limiter
    /// had something to do.
    pub(crate) fn check(&self, all: &Tallies) -> Result<String, String> {
        let critical = CLASSES.iter().zip(all);
        let critical = critical.filter(|(class, _)| class.priority == Priority::Critical);
        let (mut sent, mut shed) = (0, 0);
        for (_, tally) in critical {
            sent += tally.sent;
            shed += tally.shed;
        }
        if shed > 0 {
            return Err(format!("{shed} of {sent} critical requests were shed"));
        }
        if sent == 0 {
            return Err("no critical request was sent".to_owned());
        }

        let order = [Priority::BestEffort, Priority::Read, Priority::Write];
        let (gone, back) = (describe(&self.gone), describe(&self.back));
        if !self.gone.iter().map(|class| class.priority).eq(order) {
            return Err(format!("classes went in the wrong order: {gone}"));
        }
        if !self.back.iter().map(|class| class.priority).eq(order.into_iter().rev()) {
            return Err(format!("classes came back in the wrong order: {back}"));
        }

        for limiter in LIMITERS {
            let turned_away = |tally: &Tally| tally.turned_away_by(limiter);
            if all.iter().map(turned_away).sum::<u64>() == 0 {
                return Err(format!(
                    "`{limiter}` turned nothing away, so nothing is known of it: this machine is too \
                     busy to send that many requests"
                ));
            }
        }
        Ok(format!(
            "None of {sent} critical requests was shed.\nWent:      {gone}\nCame back: {back}"
        ))
    }
}

fn has(moves: &[Move], priority: Priority) -> bool {
    moves.iter().any(|class| class.priority == priority)
}

fn describe(moves: &[Move]) -> String {
    let each = moves.iter().map(|Move { priority, time }| format!("{priority} at {time:.0?}"));
    let list = each.collect::<Vec<_>>().join(", ");
    if list.is_empty() { "none".to_owned() } else { list }
}
