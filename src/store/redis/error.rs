//! What can go wrong with a store, in the terms in which it matters: whether to keep the connection,
//! and whether the store is to blame.

use redis::{ErrorKind, RedisError, ServerErrorKind};
use std::{error, fmt};

/// Why a store did not decide.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// No answer before the deadline.
    Late,
    /// There is no connection, or it broke.
    Disconnected {
        /// What was told.
        message: String,
    },
    /// No server is known to be the primary.
    NoPrimary {
        /// The name by which the sentinels were asked for it.
        name: String,
        /// What they said.
        message: String,
    },
    /// The server refused the call.
    Refused {
        /// The first word of its answer, such as `READONLY`, `OOM` or `NOPERM`.
        code: String,
        /// The rest.
        message: String,
    },
}

/// Where to go instead.
#[cfg(feature = "cluster")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Redirect<'a> {
    /// The slot is there now.
    Moved(&'a str),
    /// The slot is on its way there, and these keys are there already, or new.
    Ask(&'a str),
    /// Some of the keys are on their way.
    TryAgain,
}

impl StoreError {
    pub(super) fn no_connection(message: &str) -> Self {
        Self::Disconnected { message: message.to_owned() }
    }

    /// Whatever this is, it is no store.
    pub(super) fn unreadable() -> Self {
        Self::Refused {
            code: "UNREADABLE".to_owned(),
            message: "the script's reply cannot be read; is this a Redis or Valkey server?"
                .to_owned(),
        }
    }

    /// Whether the server does not know the script, so that nothing of it ran.
    pub(super) fn is_no_script(&self) -> bool {
        matches!(self, Self::Refused { code, .. } if code == "NOSCRIPT")
    }

    /// Where a node of a cluster sends the call, which it did not run.
    #[cfg(feature = "cluster")]
    pub(super) fn redirect(&self) -> Option<Redirect<'_>> {
        let Self::Refused { code, message } = self else { return None };
        // The slot, then the address.
        let address = || message.split_whitespace().nth(1);
        match &code[..] {
            "MOVED" => address().map(Redirect::Moved),
            "ASK" => address().map(Redirect::Ask),
            "TRYAGAIN" => Some(Redirect::TryAgain),
            _ => None,
        }
    }

    #[cfg(feature = "cluster")]
    pub(super) fn redirects(&self) -> bool {
        self.redirect().is_some()
    }

    /// Whether the server does not have a command, or the user may not run it.
    pub(super) fn is_about_command(&self, name: &str) -> bool {
        let Self::Refused { message, .. } = self else { return false };
        let message = message.to_ascii_lowercase();
        // From within a script, an unknown one is not told by its name.
        message.contains(name) || message.contains("unknown redis command")
    }

    /// Whether the connection is of no use any more: another one may lead to another server, or to
    /// the same one in a better state.
    pub(super) fn breaks_connection(&self) -> bool {
        match self {
            Self::Late => false,
            Self::Disconnected { .. } | Self::NoPrimary { .. } => true,
            Self::Refused { code, .. } => {
                matches!(&code[..], "NOAUTH" | "NOPERM" | "WRONGPASS") || self.is_from_replica()
            }
        }
    }

    /// Whether the server is a replica, on which nothing ran.
    pub(super) fn is_from_replica(&self) -> bool {
        let Self::Refused { code, message } = self else { return false };
        // Up to Redis 6.2, what goes wrong in a script is told in words only.
        matches!(&code[..], "READONLY" | "MASTERDOWN") || message.contains("READONLY")
    }

    /// Whether this says that the store is out of order, rather than something about one request.
    pub(crate) fn is_outage(&self) -> bool {
        match self {
            Self::Late | Self::Disconnected { .. } | Self::NoPrimary { .. } => true,
            Self::Refused { code, message } => match &code[..] {
                "ERR" => OUTAGES.iter().any(|outage| message.contains(outage)),
                "WRONGTYPE" | "NOSCRIPT" | "CROSSSLOT" | "MOVED" | "ASK" | "TRYAGAIN" => false,
                _ => true,
            },
        }
    }
}

/// Outages that some servers tell in words only.
const OUTAGES: [&str; 6] = [
    "OOM",
    "READONLY",
    "user executing the script",
    "ACL failure",
    "unknown command",
    "nknown Redis command",
];

impl From<&RedisError> for StoreError {
    fn from(error: &RedisError) -> Self {
        if error.is_timeout() {
            return Self::Late;
        }
        let message = error.detail().map_or_else(|| error.to_string(), str::to_owned);
        match error.kind() {
            ErrorKind::Server(ServerErrorKind::ResponseError) => {
                Self::Refused { code: "ERR".to_owned(), message }
            }
            ErrorKind::Server(_) | ErrorKind::Extension => {
                let code = error.code().unwrap_or("ERR").to_owned();
                Self::Refused { code, message }
            }
            ErrorKind::AuthenticationFailed => {
                Self::Refused { code: "WRONGPASS".to_owned(), message: error.to_string() }
            }
            _ => Self::Disconnected { message: error.to_string() },
        }
    }
}

impl From<RedisError> for StoreError {
    fn from(error: RedisError) -> Self {
        Self::from(&error)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late => f.write_str("no answer before the deadline"),
            Self::Disconnected { message } => write!(f, "no connection: {message}"),
            Self::NoPrimary { name, message } => {
                write!(f, "the sentinels lead to no primary `{}`: {message}", name.escape_debug())
            }
            Self::Refused { code, message } => write!(f, "the server refused: {code} {message}"),
        }
    }
}

impl error::Error for StoreError {}
