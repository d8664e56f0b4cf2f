//! Keys that are header values.

use super::{Key, KeyError, KeyExtractor};
use http::{HeaderMap, HeaderName, header::AUTHORIZATION, request::Parts};
use std::borrow::Cow;

/// Counts by the value of a header: an API key, a tenant.
///
/// The value counts byte for byte, without the white space around it. There is no key if the
/// header is not there or empty, nor if it comes in more than one line: the service may read one
/// line, and a client who varied another would never be counted twice under one key.
///
/// A client who is not known chooses the value. Where a wrong one is only found out behind the
/// rate limit, limit by address as well, or each guess is a fresh key.
///
/// ```
/// use http::Request;
/// use tollgate::key::{Header, Key, KeyExtractor};
///
/// let request = Request::builder().header("x-api-key", "k1").body(()).unwrap();
/// let (parts, ()) = request.into_parts();
/// let key = Header::from_static("x-api-key").extract(&parts).unwrap();
/// assert_eq!(key, Key::from(b"k1".as_slice()));
/// ```
#[derive(Clone, Debug)]
pub struct Header {
    name: HeaderName,
}

impl Header {
    /// Counts by the header of this name.
    #[must_use]
    pub const fn new(name: HeaderName) -> Self {
        Self { name }
    }

    /// Counts by the header of this name, in lower case.
    ///
    /// # Panics
    ///
    /// If it is not a header name in lower case. Names that are not known before the program runs
    /// go through [`HeaderName`]'s `parse` and [`Header::new`].
    #[must_use]
    pub const fn from_static(name: &'static str) -> Self {
        Self::new(HeaderName::from_static(name))
    }
}

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        only_line(&parts.headers, &self.name).map(Key::from)
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        Some(format!("header {}", self.name).into())
    }
}

/// Counts by the token in `Authorization: Bearer <token>`.
///
/// The scheme may be written in any case. There is no key if the header is not there, is of
/// another scheme or comes in more than one line, nor if what follows the scheme is not one word.
///
/// As with [`Header`], a token is counted before anyone has checked it.
///
/// ```
/// use http::Request;
/// use tollgate::key::{BearerToken, Key, KeyExtractor};
///
/// let request = Request::builder().header("authorization", "Bearer t1").body(()).unwrap();
/// let (parts, ()) = request.into_parts();
/// let key = BearerToken.extract(&parts).unwrap();
/// assert_eq!(key, Key::from(b"t1".as_slice()));
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct BearerToken;

impl KeyExtractor for BearerToken {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        match bearer(only_line(&parts.headers, &AUTHORIZATION)?) {
            Some(token) => Ok(Key::from(token)),
            None => Err(KeyError::missing("the authorization header has no bearer token")),
        }
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        Some("bearer token".into())
    }
}

/// The value of a header that comes in one line and is not empty.
fn only_line<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<&'a [u8], KeyError> {
    let mut lines = headers.get_all(name).iter();
    let line = lines.next().map_or(&[][..], |line| line.as_bytes().trim_ascii());
    if lines.next().is_some() {
        return Err(KeyError::missing(format!("there is more than one {name} header")));
    }
    if line.is_empty() {
        return Err(KeyError::missing(format!("the {name} header is missing or empty")));
    }
    Ok(line)
}

fn bearer(credentials: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = credentials.split_at(credentials.iter().position(|&byte| byte == b' ')?);
    let token = token.trim_ascii();
    let one_word = !token.iter().any(u8::is_ascii_whitespace);
    (scheme.eq_ignore_ascii_case(b"bearer") && one_word).then_some(token)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::KeyErrorKind;
    use http::{HeaderValue, Request};

    fn parts(name: &'static str, lines: &[impl AsRef<[u8]>]) -> Parts {
        let (mut parts, ()) = Request::new(()).into_parts();
        for line in lines {
            let line = HeaderValue::from_bytes(line.as_ref()).unwrap();
            parts.headers.append(name, line);
        }
        parts
    }

    fn header(lines: &[impl AsRef<[u8]>]) -> Result<Key, KeyError> {
        Header::from_static("x-api-key").extract(&parts("x-api-key", lines))
    }

    fn token(line: &str) -> Result<Key, KeyError> {
        BearerToken.extract(&parts("authorization", &[line]))
    }

    #[test]
    fn a_value_counts_byte_for_byte() {
        assert_eq!(header(&["a"]), Ok(Key::from(b"a".as_slice())));
        assert_ne!(header(&["a"]), header(&["A"]));
        assert_ne!(header(&["a b"]), header(&["a  b"]));
        let bytes = b"\xff\xfe\x80".as_slice();
        assert_eq!(header(&[bytes]), Ok(Key::from(bytes)));
    }

    #[test]
    fn space_around_a_value_gives_no_fresh_key() {
        for line in [" a", "a\t", " a "] {
            assert_eq!(header(&[line]), header(&["a"]), "{line:?}");
        }
    }

    #[test]
    fn a_missing_or_empty_header_is_no_key_that_all_share() {
        for lines in [&[][..], &[""], &[" "]] {
            let error = header(lines).unwrap_err();
            assert_eq!(error.kind(), KeyErrorKind::Missing);
            assert_eq!(error.to_string(), "the x-api-key header is missing or empty");
        }
    }

    #[test]
    fn a_client_cannot_vary_which_line_is_counted() {
        for lines in [&["a", "b"][..], &["b", "a"], &["a", "a"], &["", "a"], &["a", ""]] {
            let error = header(lines).unwrap_err();
            assert_eq!(error.kind(), KeyErrorKind::Missing);
            assert_eq!(error.to_string(), "there is more than one x-api-key header");
            assert!(BearerToken.extract(&parts("authorization", lines)).is_err());
        }
    }

    #[test]
    fn a_bearer_token_is_the_word_after_the_scheme() {
        let expected = Ok(Key::from(b"tok=".as_slice()));
        for line in ["Bearer tok=", "bearer tok=", "BEARER   tok= ", " Bearer tok="] {
            assert_eq!(token(line), expected, "{line}");
        }
    }

    #[test]
    fn what_is_no_bearer_token_is_no_key() {
        for line in [
            "",
            "Bearer",
            "Bearer ",
            "Bearertok",
            "Bearer\ttok",
            "Bearer tok tok",
            "Bearer tok\ttok",
            "Basic dXNlcjpwYXNz",
            "tok",
        ] {
            assert_eq!(token(line).unwrap_err().kind(), KeyErrorKind::Missing, "{line}");
        }
    }

    #[test]
    fn no_error_tells_a_secret() {
        let errors = [
            header(&["SECRET", "SECRET"]).unwrap_err(),
            token("Bearer SECRET SECRET").unwrap_err(),
            token("SECRET").unwrap_err(),
        ];
        for error in errors {
            assert!(!format!("{error} {error:?}").contains("SECRET"), "{error}");
        }
    }

    #[test]
    fn a_name_tells_the_header() {
        let name = |name| KeyExtractor::name(&Header::from_static(name));
        assert_eq!(name("x-api-key").unwrap(), "header x-api-key");
        assert_ne!(name("x-api-key"), name("x-tenant"));
        assert_eq!(KeyExtractor::name(&BearerToken).unwrap(), "bearer token");
    }
}
