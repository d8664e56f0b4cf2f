//! How much a caller may do: a limit, a period and a burst, from code or from text.

use std::{error, fmt, str::FromStr, time::Duration};

/// The longest period and the longest time to refill that a quota may have: 20 years of 365 days.
/// It keeps every instant of the next 180 years, with a quota's span on top, below 2^53
/// microseconds, where doubles are still exact.
pub(crate) const MAX_SPAN_US: u64 = 20 * 365 * 86_400 * 1_000_000;

/// How much a caller may do: so many units per period, and how many of them at once.
///
/// A bigger number always allows more: `Quota::per_second(20)` is twenty in each second, never one
/// in twenty seconds. Units are requests unless the policy gives a
/// [cost](crate::Policy::cost), and the burst is the limit unless it is set.
///
/// ```
/// use std::time::Duration;
/// use tollgate::Quota;
///
/// let api = Quota::per_second(100).burst(200);
/// let search = Quota::new(1_000, Duration::from_secs(300));
///
/// // The same from text, printed back as it was written.
/// assert_eq!("100/s burst 200".parse(), Ok(api));
/// assert_eq!("1000/5m".parse(), Ok(search));
/// assert_eq!(api.to_string(), "100/s burst 200");
/// ```
///
/// # Text
///
/// `LIMIT/PERIOD` or `LIMIT/PERIOD burst BURST`. A period is an optional count and a unit of fixed
/// length, `us`, `ms`, `s`, `m`, `h` or `d` (24 hours); or one of the calendar's own, `day`, `week`
/// (from Monday) or `month`, which begin and end in UTC and which only
/// [`Policy::fixed_window`](crate::Policy::fixed_window) can count.
///
/// # Validity
///
/// A quota is checked where it is put to use: reading it from text, and
/// [`build`](crate::LimiterBuilder::build) for the quota of a policy, refuse one that cannot be
/// (see [`QuotaError`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quota {
    limit: u64,
    period: Period,
    burst: Option<u64>,
}

/// The stretch of time that a quota's limit is counted over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Period {
    /// A fixed length, counted in whole microseconds.
    Fixed(Duration),
    /// The calendar day, in UTC.
    Day,
    /// The calendar week from Monday, in UTC.
    Week,
    /// The calendar month, in UTC.
    Month,
}

/// Why a quota cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaError {
    /// The limit is 0, which would allow nothing, ever.
    ZeroLimit,
    /// The burst is 0, which would allow nothing, ever.
    ZeroBurst,
    /// The period is shorter than a microsecond.
    ZeroPeriod,
    /// The period, or the time to refill the whole burst, is longer than 20 years.
    TooLong,
    /// The products of limit, burst and period leave the whole numbers below 2^53 that every store
    /// can count in.
    TooLarge,
    /// The algorithm does not know a burst; only token bucket and leaky bucket do.
    BurstUnsupported,
    /// The algorithm needs a period of fixed length; only the fixed window counts calendar periods.
    CalendarUnsupported,
    /// A sliding log keeps a timestamp per unit and so refuses limits above this one.
    LogTooLong {
        /// The largest limit of a sliding log.
        max: u64,
    },
    /// The text is not of the form `LIMIT/PERIOD [burst BURST]`.
    Syntax {
        /// The text as it was given.
        text: String,
    },
}

impl Quota {
    /// `limit` units in each `period`.
    #[must_use]
    pub const fn new(limit: u64, period: Duration) -> Self {
        Self::over(limit, Period::Fixed(period))
    }

    /// `limit` units in each second.
    #[must_use]
    pub const fn per_second(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// `limit` units in each minute.
    #[must_use]
    pub const fn per_minute(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// `limit` units in each hour.
    #[must_use]
    pub const fn per_hour(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// `limit` units in each 24 hours.
    #[must_use]
    pub const fn per_day(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }

    /// `limit` units in each calendar day, in UTC. For fixed windows only.
    #[must_use]
    pub const fn per_calendar_day(limit: u64) -> Self {
        Self::over(limit, Period::Day)
    }

    /// `limit` units in each calendar week from Monday, in UTC. For fixed windows only.
    #[must_use]
    pub const fn per_calendar_week(limit: u64) -> Self {
        Self::over(limit, Period::Week)
    }

    /// `limit` units in each calendar month, in UTC. For fixed windows only.
    #[must_use]
    pub const fn per_calendar_month(limit: u64) -> Self {
        Self::over(limit, Period::Month)
    }

    /// How many units may be spent at once by a caller who saved them up. Default: the limit.
    ///
    /// For token bucket and leaky bucket only.
    #[must_use]
    pub const fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// The units per period.
    #[must_use]
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// The period.
    #[must_use]
    pub const fn period(&self) -> Period {
        self.period
    }

    /// The units that may be spent at once: the burst, or the limit where none was set.
    #[must_use]
    pub const fn capacity(&self) -> u64 {
        match self.burst {
            Some(burst) => burst,
            None => self.limit,
        }
    }

    /// Whether a burst was set.
    pub(crate) const fn has_burst(&self) -> bool {
        self.burst.is_some()
    }

    /// What each of so many instances may allow if each counts alone: as good a part of it as whole
    /// numbers allow, and at least one.
    pub(crate) fn share(&self, instances: u32) -> Self {
        let part = |number: u64| (number / u64::from(instances)).max(1);
        Self { limit: part(self.limit), burst: self.burst.map(part), period: self.period }
    }

    const fn over(limit: u64, period: Period) -> Self {
        Self { limit, period, burst: None }
    }

    /// Refuses what no algorithm could count.
    pub(crate) fn validate(&self) -> Result<(), QuotaError> {
        if self.limit == 0 {
            return Err(QuotaError::ZeroLimit);
        }
        if self.burst == Some(0) {
            return Err(QuotaError::ZeroBurst);
        }
        if let Period::Fixed(period) = self.period {
            let micros = period.as_micros();
            if micros == 0 {
                return Err(QuotaError::ZeroPeriod);
            }
            if micros > u128::from(MAX_SPAN_US) {
                return Err(QuotaError::TooLong);
            }
        }
        Ok(())
    }
}

// === impl Period ===

impl Period {
    /// Its length, if that is fixed.
    #[must_use]
    pub const fn fixed(self) -> Option<Duration> {
        match self {
            Self::Fixed(period) => Some(period),
            Self::Day | Self::Week | Self::Month => None,
        }
    }

    /// The fixed length in microseconds, for the algorithms that need one.
    pub(crate) fn fixed_us(self) -> Result<u64, QuotaError> {
        let period = self.fixed().ok_or(QuotaError::CalendarUnsupported)?;
        u64::try_from(period.as_micros()).map_err(|_| QuotaError::TooLong)
    }
}

/// The units of text, largest first, so that a period prints in the largest one that divides it.
const UNITS: [(&str, u128); 6] = [
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
];

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let period = match self {
            Self::Fixed(period) => period.as_micros(),
            Self::Day => return f.write_str("day"),
            Self::Week => return f.write_str("week"),
            Self::Month => return f.write_str("month"),
        };
        let fits = |&(_, micros): &(&str, u128)| period != 0 && period % micros == 0;
        let (unit, micros) = UNITS.into_iter().find(fits).unwrap_or(("us", 1));
        match period / micros {
            1 => f.write_str(unit),
            count => write!(f, "{count}{unit}"),
        }
    }
}

fn parse_period(text: &str) -> Option<Period> {
    match text {
        "day" => return Some(Period::Day),
        "week" => return Some(Period::Week),
        "month" => return Some(Period::Month),
        _ => {}
    }
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (count, unit) = text.split_at(digits);
    let count = if count.is_empty() { 1 } else { number(count)? };
    let &(_, micros) = UNITS.iter().find(|(name, _)| *name == unit)?;
    // A product too large for a `Duration` is far too long; `validate` says so.
    let micros = u64::try_from(u128::from(count) * micros).unwrap_or(u64::MAX);
    Some(Period::Fixed(Duration::from_micros(micros)))
}

/// Digits only: `u64::from_str` would take a plus sign too.
fn number(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

// === impl Quota: text ===

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.limit, self.period)?;
        match self.burst {
            Some(burst) => write!(f, " burst {burst}"),
            None => Ok(()),
        }
    }
}

impl FromStr for Quota {
    type Err = QuotaError;

    fn from_str(text: &str) -> Result<Self, QuotaError> {
        let syntax = || QuotaError::Syntax { text: text.to_owned() };
        let mut words = text.split_ascii_whitespace();
        let (limit, period) =
            words.next().and_then(|rate| rate.split_once('/')).ok_or_else(syntax)?;
        let limit = number(limit).ok_or_else(syntax)?;
        let period = parse_period(period).ok_or_else(syntax)?;
        let burst = match (words.next(), words.next(), words.next()) {
            (None, ..) => None,
            (Some("burst"), Some(burst), None) => Some(number(burst).ok_or_else(syntax)?),
            _ => return Err(syntax()),
        };
        let quota = Self { limit, period, burst };
        quota.validate()?;
        Ok(quota)
    }
}

// === impl QuotaError ===

impl fmt::Display for QuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroLimit => f.write_str("the limit must be at least 1"),
            Self::ZeroBurst => f.write_str("the burst must be at least 1"),
            Self::ZeroPeriod => f.write_str("the period must be at least one microsecond"),
            Self::TooLong => {
                f.write_str("the period and the time to refill must be at most 20 years")
            }
            Self::TooLarge => f.write_str(
                "limit, burst and period are too large to be counted exactly; \
                 use a coarser unit of cost or a smaller burst",
            ),
            Self::BurstUnsupported => {
                f.write_str("only token bucket and leaky bucket know a burst; leave it out")
            }
            Self::CalendarUnsupported => f.write_str(
                "only a fixed window can count calendar days, weeks and months; \
                 use a fixed window or a period of fixed length such as `d`",
            ),
            Self::LogTooLong { max } => write!(
                f,
                "a sliding log keeps a timestamp per unit and allows at most {max}; \
                 use a sliding window or a token bucket"
            ),
            Self::Syntax { text } => write!(
                f,
                "`{text}` is not a quota; write it like `100/s`, `1000/5m`, `100/s burst 200` or `50/day`"
            ),
        }
    }
}

impl error::Error for QuotaError {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_prints_back_the_same() {
        for text in [
            "100/s",
            "100/s burst 200",
            "1000/5m",
            "1/us",
            "7/1500ms",
            "10/20s",
            "50/d",
            "50/day",
            "10/week",
            "2/month",
            "3/36h",
        ] {
            let quota: Quota = text.parse().unwrap();
            assert_eq!(quota.to_string(), text);
        }
    }

    #[test]
    fn text_that_is_no_quota_says_how_to_write_one() {
        for text in [
            "",
            "/",
            "100",
            "100/",
            "/s",
            "100/x",
            "-1/s",
            "+1/s",
            "1.5/s",
            "100/s 200",
            "100/s burst",
            "100/s burst -2",
            "100/s burst 2 3",
            "100 /s",
            "99999999999999999999/s",
            "1/s burst 2 ",
            "1/１s",
        ] {
            if text == "1/s burst 2 " {
                assert!(text.parse::<Quota>().is_ok(), "outer blanks do no harm");
                continue;
            }
            let error = text.parse::<Quota>().unwrap_err();
            assert!(matches!(error, QuotaError::Syntax { .. }), "{text}: {error}");
            assert!(error.to_string().contains("1000/5m"), "{error}");
        }
    }

    #[test]
    fn quotas_that_cannot_be_are_refused_by_name() {
        assert_eq!("0/s".parse::<Quota>(), Err(QuotaError::ZeroLimit));
        assert_eq!("1/s burst 0".parse::<Quota>(), Err(QuotaError::ZeroBurst));
        assert_eq!("1/0s".parse::<Quota>(), Err(QuotaError::ZeroPeriod));
        assert_eq!("1/40000d".parse::<Quota>(), Err(QuotaError::TooLong));
        assert_eq!("1/18446744073709551615d".parse::<Quota>(), Err(QuotaError::TooLong));
        assert_eq!(Quota::new(1, Duration::MAX).validate(), Err(QuotaError::TooLong));
        assert_eq!(
            Quota::new(1, Duration::from_nanos(999)).validate(),
            Err(QuotaError::ZeroPeriod)
        );
    }

    proptest! {
        #[test]
        fn every_quota_reads_back_from_its_own_text(
            limit in 1_u64..,
            micros in 1_u64..=MAX_SPAN_US,
            burst in proptest::option::of(1_u64..),
        ) {
            let mut quota = Quota::new(limit, Duration::from_micros(micros));
            quota.burst = burst;
            prop_assert_eq!(quota.to_string().parse(), Ok(quota));
        }

        #[test]
        fn no_text_panics(text in "[0-9/a-z µ-]{0,24}") {
            let _ = text.parse::<Quota>();
        }
    }
}
