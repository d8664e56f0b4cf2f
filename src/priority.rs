//! How important a request is, and how that is found out.

use http::{HeaderName, Method, request::Parts};
use std::fmt;

/// How important a request is. What is more important is greater.
///
/// Load shedders turn the least important requests away first. The four that have names are those of
/// Stripe's shedders: critical methods, other writes, reads, and test-mode traffic. There is room for
/// others in between and on both sides.
///
/// ```
/// use tollgate::Priority;
///
/// let batch_write = Priority::new(150);
/// assert!(Priority::Read < batch_write && batch_write < Priority::Write);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(u8);

#[expect(non_upper_case_globals, reason = "to those who use them, these are variants")]
impl Priority {
    /// What the service exists for: 255. The worker shedder never turns it away.
    pub const Critical: Self = Self(255);
    /// Requests that change something: 192.
    pub const Write: Self = Self(192);
    /// Requests that only ask: 128.
    pub const Read: Self = Self(128);
    /// What nobody will miss, such as test-mode traffic: 64.
    pub const BestEffort: Self = Self(64);

    /// A priority of one's own.
    #[must_use]
    pub const fn new(level: u8) -> Self {
        Self(level)
    }

    /// Its place among all priorities, from 0, the least important.
    #[must_use]
    pub const fn level(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Critical => f.pad("critical"),
            Self::Write => f.pad("write"),
            Self::Read => f.pad("read"),
            Self::BestEffort => f.pad("best-effort"),
            Self(level) => f.pad(&format!("priority {level}")),
        }
    }
}

impl fmt::Debug for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Critical => f.write_str("Critical"),
            Self::Write => f.write_str("Write"),
            Self::Read => f.write_str("Read"),
            Self::BestEffort => f.write_str("BestEffort"),
            Self(level) => write!(f, "Priority({level})"),
        }
    }
}

/// Finds out how important a request is. `R` is what a request is: the [`Parts`] of an HTTP request, or
/// the request type of any other service.
///
/// Closures `Fn(&R) -> Priority` are classifiers, and [`ByMethod`] is one for HTTP.
pub trait Classify<R: ?Sized = Parts>: Send + Sync + 'static {
    /// The priority of `request`.
    fn classify(&self, request: &R) -> Priority;
}

/// A classifier that is chosen at run time.
impl<R: ?Sized + 'static> Classify<R> for Box<dyn Classify<R>> {
    fn classify(&self, request: &R) -> Priority {
        (**self).classify(request)
    }
}

impl<R, F> Classify<R> for F
where
    R: ?Sized,
    F: Fn(&R) -> Priority + Send + Sync + 'static,
{
    #[inline]
    fn classify(&self, request: &R) -> Priority {
        self(request)
    }
}

/// Classifies HTTP requests by their method: those that only ask (GET, HEAD, OPTIONS, TRACE) are
/// [reads](Priority::Read), all others [writes](Priority::Write).
///
/// It can be told what else there is. Test-mode traffic is [best effort](Priority::BestEffort)
/// whatever it asks for: a test of a critical call is a test. Then come critical requests, then the
/// method.
///
/// A gRPC call is always a POST, so a gRPC service needs a classifier that looks at the path.
///
/// ```
/// use http::{Request, header::AUTHORIZATION, request::Parts};
/// use tollgate::{ByMethod, Classify, Priority};
///
/// let by_method = ByMethod::new()
///     .critical(|parts: &Parts| parts.uri.path() == "/v1/charges")
///     .test_key_prefix(AUTHORIZATION, "sk_test_");
///
/// let charge = Request::post("/v1/charges").header("authorization", "Bearer sk_live_1");
/// let (charge, ()) = charge.body(()).unwrap().into_parts();
/// assert_eq!(by_method.classify(&charge), Priority::Critical);
///
/// let test = Request::post("/v1/charges").header("authorization", "Bearer sk_test_1");
/// let (test, ()) = test.body(()).unwrap().into_parts();
/// assert_eq!(by_method.classify(&test), Priority::BestEffort);
/// ```
#[derive(Default)]
pub struct ByMethod {
    test_headers: Vec<HeaderName>,
    test_prefixes: Vec<(HeaderName, Vec<u8>)>,
    critical: Vec<Condition>,
}

type Condition = Box<dyn Fn(&Parts) -> bool + Send + Sync>;

impl ByMethod {
    /// By the method alone.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Requests with this header are test-mode traffic, whatever its value. May be given several times.
    #[must_use]
    pub fn test_header(mut self, name: HeaderName) -> Self {
        self.test_headers.push(name);
        self
    }

    /// Requests in which the value of this header begins with `prefix` are test-mode traffic. In front
    /// of it there may be the scheme `Bearer`, in any case. May be given several times.
    #[must_use]
    pub fn test_key_prefix(mut self, header: HeaderName, prefix: impl Into<Vec<u8>>) -> Self {
        self.test_prefixes.push((header, prefix.into()));
        self
    }

    /// Requests for which the closure returns true are critical, unless they are test-mode traffic. May
    /// be given several times.
    #[must_use]
    pub fn critical(
        mut self,
        is_critical: impl Fn(&Parts) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.critical.push(Box::new(is_critical));
        self
    }

    fn is_test(&self, parts: &Parts) -> bool {
        let headers = &parts.headers;
        self.test_headers.iter().any(|name| headers.contains_key(name))
            || self.test_prefixes.iter().any(|(name, prefix)| {
                headers.get_all(name).iter().any(|value| has_prefix(value.as_bytes(), prefix))
            })
    }
}

/// Whether a key begins with `prefix`, after the scheme if there is one.
fn has_prefix(value: &[u8], prefix: &[u8]) -> bool {
    const SCHEME: &[u8] = b"bearer ";
    let value = value.trim_ascii();
    let key = match value.split_at_checked(SCHEME.len()) {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case(SCHEME) => key.trim_ascii_start(),
        _ => value,
    };
    key.starts_with(prefix)
}

impl Classify for ByMethod {
    fn classify(&self, parts: &Parts) -> Priority {
        if self.is_test(parts) {
            Priority::BestEffort
        } else if self.critical.iter().any(|is_critical| is_critical(parts)) {
            Priority::Critical
        } else if [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE]
            .contains(&parts.method)
        {
            Priority::Read
        } else {
            Priority::Write
        }
    }
}

impl fmt::Debug for ByMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByMethod")
            .field("test_headers", &self.test_headers)
            .field("critical", &self.critical.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{Request, header::AUTHORIZATION};

    fn parts(method: &str, path: &str, headers: &[(&str, &str)]) -> Parts {
        let request = Request::builder().method(method).uri(path);
        let request =
            headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        request.body(()).unwrap().into_parts().0
    }

    #[test]
    fn what_is_more_important_is_greater_and_there_is_room_in_between() {
        let all = [
            Priority::new(0),
            Priority::BestEffort,
            Priority::Read,
            Priority::new(129),
            Priority::Write,
            Priority::Critical,
        ];
        assert!(all.is_sorted());
        assert_eq!(Priority::new(128), Priority::Read);
        assert_eq!(Priority::new(u8::MAX), Priority::Critical);
    }

    #[test]
    fn priorities_are_shown_by_their_names() {
        assert_eq!(
            format!("{:?} {}", Priority::BestEffort, Priority::BestEffort),
            "BestEffort best-effort"
        );
        assert_eq!(
            format!("{:?} {}", Priority::new(7), Priority::new(7)),
            "Priority(7) priority 7"
        );
        assert_eq!(format!("[{:<8}]", Priority::Read), "[read    ]");
    }

    #[test]
    fn methods_that_only_ask_are_reads() {
        for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
            assert_eq!(ByMethod::new().classify(&parts(method, "/", &[])), Priority::Read);
        }
        for method in ["POST", "PUT", "PATCH", "DELETE", "CONNECT", "PURGE", "get"] {
            assert_eq!(ByMethod::new().classify(&parts(method, "/", &[])), Priority::Write);
        }
    }

    #[test]
    fn test_mode_is_known_by_a_header_or_by_the_beginning_of_a_key() {
        let by_method = ByMethod::new()
            .test_header(HeaderName::from_static("x-test"))
            .test_key_prefix(AUTHORIZATION, "sk_test_");
        let classify = |name, value| by_method.classify(&parts("GET", "/", &[(name, value)]));
        for (name, value) in [
            ("x-test", ""),
            ("x-test", "1"),
            ("authorization", "sk_test_1"),
            ("authorization", "Bearer sk_test_1"),
            ("authorization", "bEARER   sk_test_1"),
        ] {
            assert_eq!(classify(name, value), Priority::BestEffort, "{name}: {value}");
        }
        for (name, value) in [
            ("x-key", "sk_test_1"),
            ("authorization", ""),
            ("authorization", "Bearer"),
            ("authorization", "Bearer sk_live_1"),
            ("authorization", "Bearersk_test_1"),
            ("authorization", "Basic sk_test_1"),
            ("authorization", "sk_tes"),
        ] {
            assert_eq!(classify(name, value), Priority::Read, "{name}: {value}");
        }
    }

    #[test]
    fn a_test_of_a_critical_call_is_a_test() {
        let by_method = ByMethod::new()
            .critical(|parts: &Parts| parts.uri.path() == "/charge")
            .critical(|parts: &Parts| parts.method == "PUT")
            .test_header(HeaderName::from_static("x-test"));
        let classify =
            |method, path, headers: &[_]| by_method.classify(&parts(method, path, headers));
        assert_eq!(classify("GET", "/charge", &[]), Priority::Critical);
        assert_eq!(classify("PUT", "/", &[]), Priority::Critical);
        assert_eq!(classify("PUT", "/charge", &[("x-test", "1")]), Priority::BestEffort);
        assert_eq!(classify("POST", "/", &[]), Priority::Write);
    }

    #[test]
    fn closures_are_classifiers() {
        fn classify(by: &impl Classify<str>, request: &str) -> Priority {
            by.classify(request)
        }
        let by = |job: &str| if job == "pay" { Priority::Critical } else { Priority::BestEffort };
        assert_eq!(classify(&by, "pay"), Priority::Critical);
        let boxed: Box<dyn Classify<str>> = Box::new(by);
        assert_eq!(classify(&boxed, "clean"), Priority::BestEffort);
    }
}
