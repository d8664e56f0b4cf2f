//! Keys that are parts of the request line.

use super::{Key, KeyError, KeyExtractor};
#[cfg(feature = "axum")]
use axum::extract::MatchedPath;
use http::request::Parts;
use std::borrow::Cow;

/// Counts by the method.
///
/// Each standard method is a key. All others together are one, or a client would get a fresh key
/// for each method that it makes up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Method;

/// The methods of RFC 9110, `PATCH` and `QUERY`.
const STANDARD: [&str; 10] =
    ["GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH", "QUERY"];

impl KeyExtractor for Method {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        let method = parts.method.as_str();
        let standard = STANDARD.contains(&method);
        Ok(Key::from(if standard { method } else { "<other>" }))
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        Some("method".into())
    }
}

/// Counts by the path as the client wrote it, without the query. Inside a nested axum router that
/// is the path without the prefix.
///
/// Every path is a key, also those that lead nowhere, and paths that lead to the same place are
/// different keys. So a client who is counted by the path has as many budgets as it likes: use
/// this for services with a few known paths behind a check, and `RoutePath` with axum.
#[derive(Clone, Copy, Debug, Default)]
pub struct Path;

impl KeyExtractor for Path {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        Ok(Key::from(parts.uri.path()))
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        Some("path".into())
    }
}

/// Counts by the route that axum matched, such as `/users/{id}`.
///
/// Requests that match no route are counted together. To see the route, the rate limit must be
/// added by `Router::layer` or `Router::route_layer`: around the whole router it runs before
/// there is one, and all requests are counted together.
///
/// ```
/// use http::Request;
/// use tollgate::key::{Key, KeyExtractor, RoutePath};
///
/// let (parts, ()) = Request::get("/no/such/route").body(()).unwrap().into_parts();
/// assert_eq!(RoutePath.extract(&parts), Ok(Key::from("<unmatched>")));
/// ```
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
#[derive(Clone, Copy, Debug, Default)]
pub struct RoutePath;

#[cfg(feature = "axum")]
impl KeyExtractor for RoutePath {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        let route = parts.extensions.get().map(MatchedPath::as_str);
        Ok(Key::from(route.unwrap_or("<unmatched>")))
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        Some("route".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    fn parts(method: &str, uri: &str) -> Parts {
        let request = Request::builder().method(method).uri(uri).body(());
        request.unwrap().into_parts().0
    }

    #[test]
    fn a_made_up_method_gives_no_fresh_key() {
        let key = |method| Method.extract(&parts(method, "/")).unwrap();
        assert_eq!(key("GET"), Key::from("GET"));
        assert_ne!(key("GET"), key("POST"));
        assert_ne!(key("GET"), key("get"));
        assert_eq!(key("MADEUP1"), key("MADEUP2"));
    }

    #[test]
    fn the_query_is_no_part_of_the_path() {
        let key = |uri| Path.extract(&parts("GET", uri)).unwrap();
        assert_eq!(key("/a?b=1"), key("http://host/a?b=2"));
        assert_ne!(key("/a"), key("/a/"));
        assert_ne!(key("/a"), key("/%61"));
    }

    #[cfg(feature = "axum")]
    #[test]
    fn paths_without_a_route_give_no_fresh_keys() {
        let key = |uri| RoutePath.extract(&parts("GET", uri)).unwrap();
        assert_eq!(key("/made/up/1"), key("/made/up/2"));
    }

    #[cfg(feature = "axum")]
    #[tokio::test]
    async fn a_route_is_one_key_whatever_its_parameters_are() {
        use axum::{Router, extract, http::StatusCode, routing::get};
        use tower::ServiceExt;

        let handler = async |request: extract::Request| {
            let key = RoutePath.extract(&request.into_parts().0).unwrap();
            assert_eq!(key, Key::from("/users/{id}"));
        };
        let app = Router::new().route("/users/{id}", get(handler));
        for uri in ["/users/1", "/users/2"] {
            let request = Request::get(uri).body(axum::body::Body::empty()).unwrap();
            assert_eq!(app.clone().oneshot(request).await.unwrap().status(), StatusCode::OK);
        }
    }

    #[test]
    fn names_are_distinct() {
        assert_ne!(KeyExtractor::name(&Method), KeyExtractor::name(&Path));
        #[cfg(feature = "axum")]
        for name in [KeyExtractor::name(&Method), KeyExtractor::name(&Path)] {
            assert_ne!(name, KeyExtractor::name(&RoutePath));
        }
    }
}
