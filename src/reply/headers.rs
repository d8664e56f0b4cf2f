//! Which rate-limit fields are sent, and what they say.

use super::{inner::Left, text::Text};
use crate::decision::{Allotment, Outcome};
use http::{HeaderName, HeaderValue, header::RETRY_AFTER};

/// Which rate-limit fields responses carry.
///
/// The default is `RateLimit-Policy`, `RateLimit` and, on rejections, `Retry-After`:
///
/// ```text
/// RateLimit-Policy: "burst";q=100;w=60, "daily";q=1000;w=86400
/// RateLimit: "burst";r=0;t=12
/// Retry-After: 12
/// ```
///
/// `RateLimit-Policy` lists the policies of the stack, with the quotas that they have for this
/// request. The other fields speak about the tightest policy alone: the one that will reject first,
/// or that rejects for the longest. All times are whole seconds, rounded up. The older
/// `X-RateLimit-*` fields can be sent as well, or alone:
///
/// ```
/// use tollgate::reply::{Headers, LegacyReset};
///
/// let both = Headers::default().legacy(LegacyReset::DeltaSeconds);
/// let like_github = Headers::none()
///     .legacy(LegacyReset::EpochSeconds)
///     .retry_after(true);
/// # let _ = (both, like_github);
/// ```
///
/// # Nested layers
///
/// A response that carries such fields already keeps them unless this layer's answer is tighter;
/// then they are replaced all together. A rejection from inside is never touched.
///
/// # Browsers
///
/// Scripts of another origin can read these fields only if the response names them in
/// `Access-Control-Expose-Headers`, which is for your CORS layer to say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Headers {
    standard: Option<Dialect>,
    legacy: Option<LegacyReset>,
    retry_after: bool,
    on_admitted: bool,
}

/// A version of the IETF draft [RateLimit header fields for HTTP][draft]. It is not a standard yet,
/// and its next revision may well spell things differently.
///
/// [draft]: https://datatracker.ietf.org/doc/draft-ietf-httpapi-ratelimit-headers/
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dialect {
    /// Revision 11, of May 2026; revisions 8 to 10 are written the same.
    Draft11,
}

/// What `X-RateLimit-Reset` counts. Services never agreed on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LegacyReset {
    /// Seconds from now.
    DeltaSeconds,
    /// Seconds since the Unix epoch, by the clock of the store: what GitHub sends.
    EpochSeconds,
}

/// What the fields of one response say: copied numbers, to be carried until the response is there.
#[derive(Debug)]
pub(crate) struct Annotation {
    pub(super) policy: &'static str,
    pub(super) limit: u64,
    pub(super) remaining: u64,
    /// `None` where nobody knows: slots come back when they are released.
    pub(super) reset_us: Option<u64>,
    pub(super) time_us: u64,
    pub(super) retry_after_us: Option<u64>,
    /// The value of `RateLimit-Policy`, where it is not the one that the stack always sends.
    pub(super) policies: Option<HeaderValue>,
}

const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
const X_RATELIMIT_LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const X_RATELIMIT_REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const X_RATELIMIT_RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");

/// The fields that speak about limits. They belong together: all of one response's come from one
/// decision.
pub(super) const FIELDS: [HeaderName; 5] =
    [RATELIMIT_POLICY, RATELIMIT, X_RATELIMIT_LIMIT, X_RATELIMIT_REMAINING, X_RATELIMIT_RESET];

/// Integers of structured fields have at most 15 digits.
const MAX_INTEGER: u64 = 999_999_999_999_999;

// === impl Headers ===

impl Headers {
    /// No fields at all, to start from.
    #[must_use]
    pub const fn none() -> Self {
        Self { standard: None, legacy: None, retry_after: false, on_admitted: true }
    }

    /// Sends `RateLimit-Policy` and `RateLimit` as the given draft says, or with `None` not at all.
    /// The default is [`Dialect::Draft11`].
    #[must_use]
    pub fn standard(self, dialect: impl Into<Option<Dialect>>) -> Self {
        Self { standard: dialect.into(), ..self }
    }

    /// Sends `X-RateLimit-Limit`, `X-RateLimit-Remaining` and `X-RateLimit-Reset`, the latter in
    /// the given form, or with `None` not at all. The default is not to.
    #[must_use]
    pub fn legacy(self, reset: impl Into<Option<LegacyReset>>) -> Self {
        Self { legacy: reset.into(), ..self }
    }

    /// Whether rejections carry `Retry-After`. The default is `true`.
    #[must_use]
    pub const fn retry_after(self, retry_after: bool) -> Self {
        Self { retry_after, ..self }
    }

    /// Whether the responses to admitted requests carry any of these fields, or only rejections do.
    /// The default is `true`.
    #[must_use]
    pub const fn on_admitted(self, on_admitted: bool) -> Self {
        Self { on_admitted, ..self }
    }

    /// Whether an admitted request's response has anything to tell.
    pub(super) const fn annotates_admitted(&self) -> bool {
        self.on_admitted && (self.standard.is_some() || self.legacy.is_some())
    }

    /// Whether responses list the policies of the stack.
    pub(super) const fn lists_policies(&self) -> bool {
        self.standard.is_some()
    }

    /// Gives each field to `put`. `policies` is the list that the stack always sends; another one is
    /// taken out of the annotation, for a clone of it would be one allocation more.
    pub(super) fn write(
        &self,
        annotation: &mut Annotation,
        policies: &HeaderValue,
        mut put: impl FnMut(HeaderName, HeaderValue),
    ) {
        match self.standard {
            Some(Dialect::Draft11) => {
                let own_policies = annotation.policies.take();
                put(RATELIMIT_POLICY, own_policies.unwrap_or_else(|| policies.clone()));
                put(RATELIMIT, annotation.draft_11());
            }
            None => {}
        }
        if let Some(reset) = self.legacy {
            put(X_RATELIMIT_LIMIT, Text::number(annotation.limit));
            put(X_RATELIMIT_REMAINING, Text::number(annotation.remaining));
            put(X_RATELIMIT_RESET, annotation.legacy_reset(reset));
        }
        if let Some((name, value)) = self.retry_field(annotation.retry_after_us) {
            put(name, value);
        }
    }

    /// `Retry-After`, where it is sent and there is a wait to tell.
    pub(super) fn retry_field(&self, wait_us: Option<u64>) -> Option<(HeaderName, HeaderValue)> {
        let wait_us = wait_us.filter(|_| self.retry_after)?;
        Some((RETRY_AFTER, Text::number(retry_seconds(wait_us))))
    }
}

impl Default for Headers {
    fn default() -> Self {
        Self::none().standard(Dialect::Draft11).retry_after(true)
    }
}

// === impl Annotation ===

impl Annotation {
    pub(super) fn new(tightest: &Outcome, time_us: u64) -> Self {
        let limit = tightest.quota.limit;
        Self {
            policy: tightest.policy,
            limit,
            remaining: tightest.remaining.min(limit),
            reset_us: (!tightest.is_concurrency()).then_some(tightest.reset_us),
            time_us,
            retry_after_us: None,
            policies: None,
        }
    }

    /// The numbers as `RateLimit` spells them, to compare with those of another response.
    pub(super) fn left(&self) -> Left {
        let remaining = self.remaining.min(MAX_INTEGER);
        let left = |reset_us| Left::new(remaining, ceil_seconds(reset_us));
        self.reset_us.map_or(Left::without_reset(remaining), left)
    }

    fn draft_11(&self) -> HeaderValue {
        let mut text = Text::new();
        push_name(&mut text, self.policy);
        text.push_str(";r=");
        text.push_number(self.remaining.min(MAX_INTEGER));
        if let Some(reset_us) = self.reset_us {
            text.push_str(";t=");
            text.push_number(ceil_seconds(reset_us));
        }
        text.value()
    }

    fn legacy_reset(&self, form: LegacyReset) -> HeaderValue {
        // This field cannot be left out; then it says what `Retry-After` does.
        let reset_us = self.reset_us.or(self.retry_after_us).unwrap_or(0);
        Text::number(ceil_seconds(match form {
            LegacyReset::DeltaSeconds => reset_us,
            // Rounding the instant, not the way to it, gives the same second whenever it is asked.
            LegacyReset::EpochSeconds => self.time_us.saturating_add(reset_us),
        }))
    }
}

/// The value of `RateLimit-Policy` for these policies.
pub(super) fn policies(policies: impl Iterator<Item = (&'static str, Allotment)>) -> HeaderValue {
    let mut text = Text::new();
    for (index, (name, quota)) in policies.enumerate() {
        if index > 0 {
            text.push_str(", ");
        }
        push_name(&mut text, name);
        text.push_str(";q=");
        text.push_number(quota.limit.min(MAX_INTEGER));
        if quota.is_of_slots() {
            text.push_str(";qu=\"concurrent-requests\"");
        // The field has no words for less than a second, and a whole one would not be true.
        } else if quota.window_us >= 1_000_000 {
            text.push_str(";w=");
            text.push_number(ceil_seconds(quota.window_us));
        }
    }
    text.value()
}

/// Names of policies hold nothing that would have to be escaped.
fn push_name(text: &mut Text, name: &str) {
    text.push_str("\"");
    text.push_str(name);
    text.push_str("\"");
}

const fn ceil_seconds(us: u64) -> u64 {
    us.div_ceil(1_000_000)
}

/// A wait for `Retry-After`, which at zero would ask for the next attempt at once.
pub(super) fn retry_seconds(wait_us: u64) -> u64 {
    ceil_seconds(wait_us).max(1)
}
