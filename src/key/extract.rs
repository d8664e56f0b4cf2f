//! The trait that finds keys, and what happens where there is none.

use super::{IntoKey, Key};
use http::request::Parts;
use std::{borrow::Cow, error, fmt};

/// Finds the key of a request. `R` is what a request is: the [`Parts`] of an HTTP request, or the
/// request type of any other service.
///
/// Closures `Fn(&R) -> K` with `K:` [`IntoKey`] are extractors, and so are tuples of extractors.
pub trait KeyExtractor<R: ?Sized = Parts>: Send + Sync + 'static {
    /// The key of `request`.
    ///
    /// # Errors
    ///
    /// [`KeyError`] where the request has no such key; the policy's
    /// [`MissingKey`] says what becomes of it then.
    fn extract(&self, request: &R) -> Result<Key, KeyError>;

    /// A name for the keys that this extractor finds, if it has one.
    ///
    /// Extractors of one stack with the same name are taken to find the same keys: the key is
    /// extracted once, and the states of all their policies live together. So a name must tell
    /// everything that the key depends on. The default is no name.
    fn name(&self) -> Option<Cow<'static, str>> {
        None
    }
}

/// An extractor that is chosen at run time.
impl<R: ?Sized + 'static> KeyExtractor<R> for Box<dyn KeyExtractor<R>> {
    fn extract(&self, request: &R) -> Result<Key, KeyError> {
        (**self).extract(request)
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        (**self).name()
    }
}

impl<R, F, K> KeyExtractor<R> for F
where
    R: ?Sized,
    F: Fn(&R) -> K + Send + Sync + 'static,
    K: IntoKey,
{
    #[inline]
    fn extract(&self, request: &R) -> Result<Key, KeyError> {
        self(request).into_key()
    }
}

/// Why a request has no key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyError {
    kind: KeyErrorKind,
    message: Cow<'static, str>,
}

/// Whose business a [`KeyError`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KeyErrorKind {
    /// The client did not send what the key is made from, or not in a form that can be used.
    Missing,
    /// The server was not set up to provide it: no request will ever have a key.
    Misconfigured,
}

impl KeyError {
    /// The client did not send what the key is made from. The message is shown to the client.
    #[must_use]
    pub fn missing(message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: KeyErrorKind::Missing, message: message.into() }
    }

    /// The server was not set up to provide the key. The message should say how to set it up; it
    /// is not shown to clients.
    #[must_use]
    pub fn misconfigured(message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: KeyErrorKind::Misconfigured, message: message.into() }
    }

    /// Whose business this is.
    #[must_use]
    pub const fn kind(&self) -> KeyErrorKind {
        self.kind
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl error::Error for KeyError {}

/// What a policy does with a request that has no key for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingKey {
    /// The request is turned away: with 400 where the client left the key out, with 500 where the
    /// server was not set up to provide it.
    #[default]
    Reject,
    /// The policy does not apply to the request.
    Skip,
    /// All requests without a key are counted together, apart from those with one.
    Share,
}
