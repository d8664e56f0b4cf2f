//! Why a shedder cannot be.

use std::{error, fmt};

/// Why a shedder cannot be built.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShedderError {
    /// A shedder's name is not of the form `[A-Za-z][A-Za-z0-9_.-]{0,63}`.
    InvalidName {
        /// The name.
        name: String,
    },
    /// A setting is no number, or not in its range.
    OutOfRange {
        /// The shedder.
        shedder: String,
        /// The setting.
        option: &'static str,
        /// What it can be.
        range: &'static str,
    },
    /// Utilization that is low would be high as well.
    Thresholds {
        /// The shedder.
        shedder: String,
    },
    /// There is no class to shed, or one of them is critical.
    Classes {
        /// The shedder.
        shedder: String,
    },
}

impl fmt::Display for ShedderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidName { name } => write!(
                f,
                "`{}` is no name for a shedder; begin with a letter and go on with up to 63 letters, \
                 digits, `_`, `.` or `-`",
                name.escape_debug()
            ),
            Self::OutOfRange { shedder, option, range } => {
                write!(f, "shedder `{shedder}`: `{option}` has to be {range}")
            }
            Self::Thresholds { shedder } => {
                write!(f, "shedder `{shedder}`: `recover_below` must not be above `shed_above`")
            }
            Self::Classes { shedder } => write!(
                f,
                "shedder `{shedder}`: name at least one class of requests to shed, and none that is \
                 critical"
            ),
        }
    }
}

impl error::Error for ShedderError {}
