//! Keys from elsewhere: request extensions, several extractors together, none at all.

use super::{IntoKey, Key, KeyError, KeyExtractor};
use http::request::Parts;
use std::{any, borrow::Cow, fmt, sync::Arc};

/// One key for everybody: the policy limits all requests together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Global;

impl<R: ?Sized> KeyExtractor<R> for Global {
    fn extract(&self, _: &R) -> Result<Key, KeyError> {
        Ok(Key::tuple([]))
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        Some("global".into())
    }
}

/// Counts by a value of type `T` in the request extensions, such as the user that an
/// authentication layer put there.
///
/// That layer must run first, so it has to be outside of the rate limit. Without the value there
/// is no key, and the error says so. Where only some requests have it, use a closure:
/// `|parts: &Parts| parts.extensions.get::<T>().cloned()`.
///
/// ```
/// use http::Request;
/// use tollgate::key::{Extension, IntoKey, Key, KeyError, KeyExtractor};
///
/// #[derive(Clone)]
/// struct UserId(u64);
///
/// impl IntoKey for UserId {
///     fn into_key(self) -> Result<Key, KeyError> {
///         self.0.into_key()
///     }
/// }
///
/// let (parts, ()) = Request::builder().extension(UserId(7)).body(())?.into_parts();
/// let whole = Extension::<UserId>::new();
/// let part = Extension::by(|user: &UserId| user.0);
/// assert_eq!(whole.extract(&parts)?, Key::from(7_u64));
/// assert_eq!(part.extract(&parts)?, Key::from(7_u64));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Extension<T> {
    key: Arc<KeyOf<T>>,
    name: Option<Cow<'static, str>>,
}

type KeyOf<T> = dyn Fn(&T) -> Result<Key, KeyError> + Send + Sync;

impl<T: Clone + IntoKey> Extension<T> {
    /// Counts by the value itself.
    #[must_use]
    pub fn new() -> Self {
        Self {
            key: Arc::new(|value: &T| value.clone().into_key()),
            name: Some(format!("extension {}", any::type_name::<T>()).into()),
        }
    }
}

impl<T: Clone + IntoKey> Default for Extension<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Extension<T> {
    /// Counts by what the function makes of the value.
    #[must_use]
    pub fn by<F, K>(key: F) -> Self
    where
        F: Fn(&T) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        Self { key: Arc::new(move |value: &T| key(value).into_key()), name: None }
    }
}

impl<T: Send + Sync + 'static> KeyExtractor for Extension<T> {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        match parts.extensions.get() {
            Some(value) => (self.key)(value),
            None => Err(KeyError::misconfigured(format!(
                "there is no {} in the request extensions: the layer that inserts it must be \
                 outside of the rate limit, and insert it into every request",
                any::type_name::<T>()
            ))),
        }
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        self.name.clone()
    }
}

// Derived, these would ask the same of `T`.

impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self { key: Arc::clone(&self.key), name: self.name.clone() }
    }
}

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(any::type_name::<Self>()).field("name", &self.name).finish_non_exhaustive()
    }
}

macro_rules! extractor_tuple {
    ($($name:ident)*) => {
        impl<R: ?Sized, $($name: KeyExtractor<R>),*> KeyExtractor<R> for ($($name,)*) {
            #[expect(non_snake_case, reason = "the variables are named after their types")]
            fn extract(&self, request: &R) -> Result<Key, KeyError> {
                let ($($name,)*) = self;
                Ok(Key::tuple([$($name.extract(request)?),*]))
            }

            #[expect(non_snake_case, reason = "the variables are named after their types")]
            fn name(&self) -> Option<Cow<'static, str>> {
                let ($($name,)*) = self;
                // Quoted, so that no other names look the same together.
                Some(format!("{:?}", ($($name.name()?,)*)).into())
            }
        }
    };
}

extractor_tuple!(A B);
extractor_tuple!(A B C);
extractor_tuple!(A B C D);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Header, KeyErrorKind, Method, Path};
    use http::{HeaderValue, Request};

    fn name_of(extractor: &impl KeyExtractor) -> Option<Cow<'static, str>> {
        extractor.name()
    }

    #[test]
    fn everybody_has_the_global_key_whatever_a_request_is() {
        let key = Global.extract("a job").unwrap();
        assert_eq!(key, Global.extract(&7_u32).unwrap());
        assert_ne!(key, Key::from(""));
        assert_ne!(key, Key::missing());
    }

    #[test]
    fn pairs_do_not_run_into_each_other() {
        let key = |path: &str, user: &str| {
            let request = Request::get(path).header("x-user", user).body(()).unwrap();
            (Path, Header::from_static("x-user")).extract(&request.into_parts().0)
        };
        for separator in [":", "|", "/", "%3A", ""] {
            let left = key(&format!("/a{separator}b"), "c").unwrap();
            let right = key("/a", &format!("{separator}b{separator}c")).unwrap();
            assert_ne!(left, right, "{separator:?}");
            assert_eq!(left, key(&format!("/a{separator}b"), "c").unwrap());
        }
        let long = "x".repeat(4_096);
        assert_ne!(key("/a", &format!("{long}a")), key("/a", &format!("{long}b")));
    }

    #[test]
    fn a_tuple_has_no_key_where_one_of_its_parts_has_none() {
        let (mut parts, ()) = Request::new(()).into_parts();
        let extractor = (Method, Path, Global, Header::from_static("x-user"));
        let error = extractor.extract(&parts).unwrap_err();
        assert_eq!(error.to_string(), "the x-user header is missing or empty");
        parts.headers.insert("x-user", HeaderValue::from_static("u"));
        assert!(extractor.extract(&parts).is_ok());
    }

    #[test]
    fn tuples_count_any_kind_of_request() {
        let extractor = (Global, |job: &str| job.len() as u64);
        assert_ne!(extractor.extract("a").unwrap(), extractor.extract("ab").unwrap());
    }

    #[test]
    fn a_tuple_has_a_name_if_all_its_parts_have() {
        let closure = |parts: &Parts| parts.headers.len() as u64;
        assert_eq!(name_of(&(Method, Path)).unwrap(), r#"("method", "path")"#);
        assert_ne!(name_of(&(Method, Path)), name_of(&(Path, Method)));
        assert_ne!(name_of(&((Method, Path), Path)), name_of(&(Method, (Path, Path))));
        assert_eq!(name_of(&(Method, closure)), None);
    }

    #[derive(Clone)]
    struct Claims {
        user: String,
    }

    impl IntoKey for Claims {
        fn into_key(self) -> Result<Key, KeyError> {
            self.user.into_key()
        }
    }

    #[test]
    fn an_extension_counts_by_its_value_or_by_a_part_of_it() {
        let (mut parts, ()) = Request::new(()).into_parts();
        parts.extensions.insert(Claims { user: "alice".into() });
        for extractor in
            [Extension::<Claims>::new(), Extension::<Claims>::by(|claims| claims.user.clone())]
        {
            assert_eq!(extractor.extract(&parts), Ok(Key::from("alice")));
        }
    }

    #[test]
    fn a_missing_extension_is_the_servers_fault_and_named() {
        let (parts, ()) = Request::new(()).into_parts();
        let error = Extension::<Claims>::new().extract(&parts).unwrap_err();
        assert_eq!(error.kind(), KeyErrorKind::Misconfigured);
        let message = error.to_string();
        assert!(message.contains("Claims") && message.contains("outside"), "{message}");
    }

    #[test]
    fn only_a_whole_extension_has_a_name() {
        assert_ne!(name_of(&Extension::<u32>::new()), name_of(&Extension::<u64>::new()),);
        assert_eq!(name_of(&Extension::by(|number: &u32| *number)), None);
    }
}
