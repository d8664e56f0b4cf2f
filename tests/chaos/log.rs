//! What an instance writes down, line by line, so that a kill loses nothing of what it let through.

use crate::{checker::Span, stack::Call};
use std::{
    fmt::Write as _,
    fs::{self, File},
    path::Path,
};

#[derive(Clone, Debug)]
pub(crate) enum Line {
    Decided(Decided),
    /// Somebody is about to release what it held since it was admitted by the decision of that number.
    Released {
        number: u64,
        time_us: u64,
    },
    /// What was charged by the decision of that number is about to be given back.
    GivenBack {
        number: u64,
    },
    /// The machine did nothing for this process.
    Stalled {
        from_us: u64,
        to_us: u64,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Decided {
    pub(crate) number: u64,
    pub(crate) asked: Span,
    /// By a clock that nobody sets.
    pub(crate) wait_us: u64,
    /// How much of the wait the thread was ready to run and did not, or wrote its log.
    pub(crate) noise_us: u64,
    pub(crate) answer: Answer,
    pub(crate) layout: u64,
    pub(crate) call: Call,
    /// Of those who were admitted.
    pub(crate) charges: Vec<Charged>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Admitted,
    Limited,
    /// A policy lets nothing pass without the servers.
    Unavailable,
    /// The caller did not wait for it.
    GivenUp,
}

/// What one policy let through.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charged {
    /// Its index in the stack.
    pub(crate) policy: usize,
    pub(crate) cost: u64,
    pub(crate) stood_in: bool,
    pub(crate) time_us: u64,
}

const ANSWERS: [(Answer, &str); 4] = [
    (Answer::Admitted, "a"),
    (Answer::Limited, "l"),
    (Answer::Unavailable, "u"),
    (Answer::GivenUp, "g"),
];

impl Line {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Released { number, time_us } => format!("r {number} {time_us}\n"),
            Self::GivenBack { number } => format!("b {number}\n"),
            Self::Stalled { from_us, to_us } => format!("s {from_us} {to_us}\n"),
            Self::Decided(decided) => {
                let Decided { number, asked, wait_us, noise_us, answer, layout, call, charges } =
                    decided;
                let Span { from_us, to_us } = asked;
                let (_, answer) = ANSWERS.iter().find(|(known, _)| known == answer).unwrap();
                let Call { user, tenant, weight } = call;
                let mut line = format!(
                    "d {number} {from_us} {to_us} {wait_us} {noise_us} {answer} {layout} {user} {tenant} {weight}"
                );
                for Charged { policy, cost, stood_in, time_us } in charges {
                    let stood_in = u64::from(*stood_in);
                    write!(line, " {policy} {cost} {stood_in} {time_us}").unwrap();
                }
                line.push('\n');
                line
            }
        }
    }

    fn read(line: &str) -> Option<Self> {
        let mut words = line.split(' ');
        let kind = words.next()?;
        let mut number = || words.next()?.parse::<u64>().ok();
        Some(match kind {
            "r" => Self::Released { number: number()?, time_us: number()? },
            "b" => Self::GivenBack { number: number()? },
            "s" => Self::Stalled { from_us: number()?, to_us: number()? },
            "d" => {
                let (own_number, asked) =
                    (number()?, Span { from_us: number()?, to_us: number()? });
                let (wait_us, noise_us) = (number()?, number()?);
                let answer = words.next()?;
                let (answer, _) = *ANSWERS.iter().find(|(_, text)| *text == answer)?;
                let numbers: Vec<u64> =
                    words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
                let (&[layout, user, tenant, weight], charges) = numbers.split_first_chunk()?;
                let charges = charges.chunks_exact(4).map(|charge| Charged {
                    policy: charge[0] as usize,
                    cost: charge[1],
                    stood_in: charge[2] == 1,
                    time_us: charge[3],
                });
                Self::Decided(Decided {
                    number: own_number,
                    asked,
                    wait_us,
                    noise_us,
                    answer,
                    layout,
                    call: Call { user, tenant, weight },
                    charges: charges.collect(),
                })
            }
            _ => return None,
        })
    }
}

/// Begins a log.
pub(crate) fn create(path: &Path) {
    File::create_new(path).unwrap();
}

/// All lines of a log. A kill may have come in the middle of the last one.
pub(crate) fn read(path: &Path) -> Vec<Line> {
    let text = fs::read_to_string(path).unwrap();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| Line::read(line).unwrap_or_else(|| panic!("what is `{line}`?")))
        .collect()
}
