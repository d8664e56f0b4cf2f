//! A line for every second, and below it what each class gets now.

use crate::{
    BoxError,
    classes::CLASSES,
    database::Speed,
    service::LIMITERS,
    tally::{Tallies, Tally},
};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::time::Duration;
use tollgate::shed::WorkerShedder;

/// Lines for every second are printed. What is below them is drawn anew each time, and only where
/// standard error is a terminal.
pub(crate) struct Table {
    live: MultiProgress,
    /// A heading, and one for each class.
    lines: Vec<ProgressBar>,
}

impl Table {
    pub(crate) fn new() -> Result<Self, BoxError> {
        let live = MultiProgress::new();
        let style = ProgressStyle::with_template("  {msg}")?;
        let lines = (0..=CLASSES.len())
            .map(|_| live.add(ProgressBar::no_length()).with_style(style.clone()))
            .collect();
        Ok(Self { live, lines })
    }

    pub(crate) fn say(&self, text: &str) {
        self.live.suspend(|| println!("{text}"));
    }

    /// Says how fast the database is from now on, and what the columns are. The level is that of the
    /// workers' shedder: from 0, when nothing is shed, to 1, when all is that may be.
    pub(crate) fn begin(&self, speed: Speed) {
        let mut heading = format!("{:>5}{:>8}{:>8}   ", "", "busy", "level");
        for class in &CLASSES {
            heading += &format!("{:>12}", class.priority);
        }
        self.say(&format!("\nA query takes {:?}. Admitted of what is sent:", speed.query()));
        self.say(&heading);
    }

    /// What each class got in the last tick, and how the shedder saw that.
    pub(crate) fn show(&self, time: Duration, tallies: &Tallies, workers: &WorkerShedder) {
        let utilization = workers.utilization().unwrap_or(0.0);
        let (time, level) = (format!("{time:.0?}"), workers.level());
        let mut line = format!("{time:>5}{:>8}{level:>8.2}   ", percent(utilization));
        for tally in tallies {
            line += &format!("{:>12}", percent(tally.admitted()));
        }
        self.say(&line);

        let columns = ["sent/s", "200", "429", "503", "admitted"].map(str::to_owned);
        self.lines[0].set_message(row("in the last second", &columns));
        for ((class, tally), line) in CLASSES.iter().zip(tallies).zip(&self.lines[1..]) {
            let Tally { sent, served, limited, shed, .. } = *tally;
            let [sent, served, limited, shed] =
                [sent, served, limited, shed].map(|count| count.to_string());
            let columns = [sent, served, limited, shed, percent(tally.admitted())];
            line.set_message(row(&class.priority.to_string(), &columns));
        }
    }

    /// All that was sent, and who turned it away.
    pub(crate) fn end(&self, all: &Tallies) {
        self.lines.iter().for_each(ProgressBar::finish_and_clear);
        println!("\n{:36}turned away by (a request may be by several)", "");
        let columns = ["sent", "200"].into_iter().chain(LIMITERS).map(str::to_owned);
        println!("{}", row("in all", &columns.collect::<Vec<_>>()));
        for (class, tally) in CLASSES.iter().zip(all) {
            let limiters = LIMITERS.map(|limiter| tally.turned_away_by(limiter));
            let columns = [tally.sent, tally.served].into_iter().chain(limiters);
            let columns: Vec<_> = columns.map(|count| count.to_string()).collect();
            println!("{}", row(&class.priority.to_string(), &columns));
        }
        println!();
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.lines.iter().for_each(ProgressBar::finish_and_clear);
    }
}

fn row(name: &str, columns: &[String]) -> String {
    let columns: String = columns.iter().map(|column| format!("{column:>10}")).collect();
    format!("{name:18}{columns}")
}

fn percent(share: f64) -> String {
    if share.is_nan() { "-".to_owned() } else { format!("{:.0}%", share * 100.0) }
}
