//! What clients sent and got, in numbers.

use crate::service::{BUSY, LIMITERS};

/// What happened to a request.
pub(crate) enum Event {
    Sent,
    Served,
    /// 429: too much by this API key.
    Limited(Vec<String>),
    /// 503: too much by all.
    Shed(Vec<String>),
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) sent: u64,
    pub(crate) served: u64,
    pub(crate) limited: u64,
    pub(crate) shed: u64,
    /// How many requests each limiter turned away. One request may be turned away by several.
    turned_away: [u64; LIMITERS.len()],
}

/// By class.
pub(crate) type Tallies = [Tally; 4];

impl Tally {
    pub(crate) fn count(&mut self, event: &Event) {
        let (count, limiters) = match event {
            Event::Sent => (&mut self.sent, &[][..]),
            Event::Served => (&mut self.served, &[][..]),
            Event::Limited(policies) => (&mut self.limited, policies.as_slice()),
            Event::Shed(shedders) => (&mut self.shed, shedders.as_slice()),
        };
        *count += 1;
        for (limiter, count) in LIMITERS.iter().zip(&mut self.turned_away) {
            *count += u64::from(limiters.iter().any(|name| name == limiter));
        }
    }

    pub(crate) fn turned_away_by(&self, limiter: &str) -> u64 {
        let counts = LIMITERS.iter().zip(self.turned_away);
        counts.filter(|(name, _)| **name == limiter).map(|(_, count)| count).sum()
    }

    /// The share of the requests that all limiters let in. Answers to those take their time, and
    /// rejections do not: so these are all that were sent and not turned away.
    pub(crate) fn admitted(&self) -> f64 {
        self.share(self.limited + self.shed)
    }

    /// The share of the requests that the workers' shedder let in.
    pub(crate) fn admitted_by_workers(&self) -> f64 {
        self.share(self.turned_away_by(BUSY))
    }

    /// What is left without those that were turned away. Nothing is known of none.
    fn share(&self, turned_away: u64) -> f64 {
        self.sent.saturating_sub(turned_away) as f64 / self.sent as f64
    }
}
