//! What a response that comes from inside says about limits already.

use http::{HeaderMap, HeaderValue, StatusCode};
use std::cmp::Reverse;

/// What a response says already.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// Nothing about limits.
    Nothing,
    /// So much is left.
    Left(Left),
    /// Something to leave alone: a rejection, or fields that are not understood.
    Final,
}

/// What is left, and for how long no more than that. Less is tighter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Left {
    remaining: u64,
    reset_s: Reverse<u64>,
}

impl Left {
    pub(super) const fn new(remaining: u64, reset_s: u64) -> Self {
        Self { remaining, reset_s: Reverse(reset_s) }
    }

    /// A reset that is not told, or in a unit that is not told, counts as the latest: then only
    /// fewer requests are tighter.
    pub(super) const fn without_reset(remaining: u64) -> Self {
        Self::new(remaining, u64::MAX)
    }
}

/// Reads it in one pass, which for the few headers that a response has costs less than hashing the
/// names to look for.
pub(super) fn said(status: StatusCode, headers: &HeaderMap) -> Said {
    if status == StatusCode::TOO_MANY_REQUESTS {
        return Said::Final;
    }
    let mut standard = None;
    let mut legacy = None;
    for (name, value) in headers {
        let (said, left) = match name.as_str() {
            "ratelimit" => (&mut standard, ratelimit(value)),
            "x-ratelimit-remaining" => (&mut legacy, integer(value).map(Left::without_reset)),
            "retry-after" => return Said::Final,
            // A call that was ended for want of resources; such a response has no other status.
            "grpc-status" if matches!(value.as_bytes(), b"8" | b"14") => return Said::Final,
            _ => continue,
        };
        let Some(left) = left else {
            return Said::Final;
        };
        *said = Some(said.map_or(left, |other: Left| other.min(left)));
    }
    standard.or(legacy).map_or(Said::Nothing, Said::Left)
}

/// The tightest item of a `RateLimit` field; `None` if any of them is not understood.
fn ratelimit(value: &HeaderValue) -> Option<Left> {
    // `None` is less than any answer.
    value.to_str().ok()?.split(',').map(item).min()?
}

/// Names with separators in them fall apart here, which leaves their field alone.
fn item(item: &str) -> Option<Left> {
    let (name, parameters) = item.split_once(';')?;
    name.trim().strip_prefix('"')?.strip_suffix('"')?;
    let mut remaining = None;
    let mut reset_s = None;
    for parameter in parameters.split(';') {
        match parameter.trim().split_once('=') {
            Some(("r", number)) => remaining = Some(number.parse().ok()?),
            Some(("t", number)) => reset_s = Some(number.parse().ok()?),
            _ => {}
        }
    }
    let remaining = remaining?;
    Some(reset_s.map_or(Left::without_reset(remaining), |reset_s| Left::new(remaining, reset_s)))
}

fn integer(value: &HeaderValue) -> Option<u64> {
    value.to_str().ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said_by(status: u16, lines: &[(&'static str, &str)]) -> Said {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        said(StatusCode::from_u16(status).unwrap(), &headers)
    }

    #[test]
    fn a_response_without_limits_says_nothing() {
        let lines = [("content-type", "text/plain"), ("grpc-status", "0")];
        assert_eq!(said_by(200, &lines), Said::Nothing);
        assert_eq!(said_by(503, &[]), Said::Nothing);
    }

    #[test]
    fn the_tightest_item_of_all_lines_counts() {
        for (line, remaining, reset_s) in [
            (r#""a";r=50;t=30"#, 50, 30),
            (r#""a";r=50;t=30, "b";r=2;t=5"#, 2, 5),
            (r#""a";r=2;t=5,"b";r=2;t=9"#, 2, 9),
            (r#""a";t=7;r=3;pk=:YQ==:;acme-note"#, 3, 7),
            (r#""a"; r=3"#, 3, u64::MAX),
        ] {
            let said = said_by(200, &[("ratelimit", line)]);
            assert_eq!(said, Said::Left(Left::new(remaining, reset_s)), "{line}");
        }
        let lines = [("ratelimit", r#""a";r=5;t=1"#), ("ratelimit", r#""b";r=4;t=1"#)];
        assert_eq!(said_by(200, &lines), Said::Left(Left::new(4, 1)));
    }

    #[test]
    fn legacy_fields_count_where_they_are_alone() {
        let legacy = ("x-ratelimit-remaining", "7");
        assert_eq!(said_by(200, &[legacy]), Said::Left(Left::new(7, u64::MAX)));
        let lines = [legacy, ("ratelimit", r#""a";r=7;t=30"#)];
        assert_eq!(said_by(200, &lines), Said::Left(Left::new(7, 30)));
    }

    #[test]
    fn what_is_not_understood_is_final() {
        for line in [
            "",
            "limit=10",
            "a;r=1;t=1",
            r#""a""#,
            r#""a";t=1"#,
            r#""a";r=-1"#,
            r#""a";r=1.5"#,
            r#""a";r=1;t=x"#,
            r#""a,b";r=1"#,
            r#""a";r=1, "b""#,
            r#""a";r=1,"#,
        ] {
            assert_eq!(said_by(200, &[("ratelimit", line)]), Said::Final, "{line}");
        }
        for line in ["", "-1", "many", "10, 10;w=1"] {
            let said = said_by(200, &[("x-ratelimit-remaining", line)]);
            assert_eq!(said, Said::Final, "{line}");
        }
    }

    #[test]
    fn rejections_are_final_in_either_protocol() {
        assert_eq!(said_by(429, &[]), Said::Final);
        assert_eq!(said_by(503, &[("retry-after", "3")]), Said::Final);
        for code in ["8", "14"] {
            assert_eq!(said_by(200, &[("grpc-status", code)]), Said::Final);
        }
    }
}
