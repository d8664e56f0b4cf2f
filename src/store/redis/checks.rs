//! What an operator should know of a server before trusting limits to it.

use super::{error::StoreError, scripts::CHECK, server::Server};
use crate::clock::Clock;
use redis::{Value, cmd, from_redis_value};
use std::{
    fmt,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

/// Something about the server that will make limits wrong or fail.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// It forgets keys when memory runs out, and a forgotten key is a full quota.
    Eviction {
        /// Its `maxmemory-policy`.
        policy: String,
    },
    /// The user may not run commands that the scripts need.
    MissingRights {
        /// The commands.
        commands: Vec<String>,
    },
    /// It is a replica, which cannot be written to.
    Replica,
    /// It is older than what is supported.
    TooOld {
        /// Its version.
        version: String,
    },
    /// Its clock and this machine's are far apart. Limits hold all the same, since only its clock
    /// counts, but the times in logs and headers will not fit together.
    ClockApart {
        /// How far.
        by: Duration,
    },
}

/// Clocks may be this far apart.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(2);

/// The oldest supported version.
const OLDEST: (u32, u32) = (6, 2);

/// What a store is used for that takes more commands than rates do.
#[derive(Debug, Default)]
pub(super) struct Uses {
    pub(super) slots: AtomicBool,
    pub(super) fleet: AtomicBool,
}

/// Looks the server over, and learns what it can do.
pub(super) async fn look_over(
    server: &Server,
    key: &str,
    uses: &Uses,
) -> Result<Vec<Warning>, StoreError> {
    let mut warnings = Vec::new();
    let reply = server.run(&CHECK, |command| {
        command.arg(1).arg(key);
        for is_used in [&uses.slots, &uses.fleet] {
            command.arg(u8::from(is_used.load(Relaxed)));
        }
    });
    let Value::Array(reply) = reply.await? else { return Ok(warnings) };
    let mut texts = reply.into_iter().filter_map(|value| from_redis_value::<String>(value).ok());
    let time_us = texts.next().and_then(|time| time.parse::<u64>().ok()).unwrap_or(0);
    server.has_msetex.store(texts.next().as_deref() == Some("1"), Relaxed);
    let commands: Vec<_> = texts.collect();
    if !commands.is_empty() {
        warnings.push(Warning::MissingRights { commands });
    }
    let by = Duration::from_micros(time_us.abs_diff(Clock::system().now_us()));
    if time_us > 0 && by > CLOCK_TOLERANCE {
        warnings.push(Warning::ClockApart { by });
    }
    // Whoever may not ask for this is told nothing.
    if let Ok(info) = server.source.query(&cmd("INFO")).await {
        warnings.extend(judge(&from_redis_value::<String>(info).unwrap_or_default()));
    }
    Ok(warnings)
}

/// Reads what `INFO` says.
fn judge(info: &str) -> Vec<Warning> {
    let field = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let mut warnings = Vec::new();
    if let Some(policy) = field("maxmemory_policy")
        && policy != "noeviction"
    {
        warnings.push(Warning::Eviction { policy: policy.to_owned() });
    }
    if field("role") == Some("slave") {
        warnings.push(Warning::Replica);
    }
    if let Some(version) = field("redis_version") {
        let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
        let major_minor = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        if major_minor < OLDEST {
            warnings.push(Warning::TooOld { version: version.to_owned() });
        }
    }
    warnings
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eviction { policy } => write!(
                f,
                "the server's maxmemory-policy is `{policy}`: when memory runs out it forgets keys, and \
                 callers get full quotas. Set it to `noeviction`, and keep limits on a server of their own"
            ),
            Self::MissingRights { commands } => {
                let rights: Vec<_> =
                    commands.iter().map(|command| format!("+{}", command.to_lowercase())).collect();
                write!(
                    f,
                    "the user may not run commands that the scripts need, or not on these keys; grant `{}`",
                    rights.join(" ")
                )
            }
            Self::Replica => f.write_str(
                "the server is a replica, which cannot be written to; connect to the primary",
            ),
            Self::TooOld { version } => write!(
                f,
                "the server's version is {version}; {}.{} or later is supported",
                OLDEST.0, OLDEST.1
            ),
            Self::ClockApart { by } => write!(
                f,
                "the clocks of the server and of this machine are {by:?} apart; synchronise them, or \
                 reset times will look wrong"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_info_says_is_judged() {
        let fine = "redis_version:7.0.15\r\nrole:master\r\nmaxmemory_policy:noeviction\r\n";
        assert_eq!(judge(fine), []);
        let bad = "redis_version:6.0.16\r\nrole:slave\r\nmaxmemory_policy:allkeys-lru\r\n";
        assert_eq!(
            judge(bad),
            [
                Warning::Eviction { policy: "allkeys-lru".to_owned() },
                Warning::Replica,
                Warning::TooOld { version: "6.0.16".to_owned() },
            ]
        );
        assert_eq!(judge(""), []);
    }
}
