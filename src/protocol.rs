//! What kinds of service can be limited, and what all services of a layer share.

use crate::{
    concurrency::{HeldPermits, Permit},
    decision::{Decision, Rejection},
    limiter::Limiter,
    reply::{Annotation, GrpcCodes, Headers, Responder},
};
use bytes::Bytes;
use http::{Extensions, HeaderMap, Method, Response, header, request::Parts};
use std::{
    error, fmt,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// What kind of service a [`RateLimitLayer`](crate::RateLimitLayer) is for: [`Http`] or [`Calls`].
pub trait Protocol: sealed::Protocol {}

/// HTTP and gRPC services: requests are [`http::Request`]s, rejections are responses.
#[derive(Clone, Copy, Debug)]
pub struct Http;

/// Any other service whose requests are `Req`: rejections are [`CallError`](crate::CallError)s.
pub struct Calls<Req>(PhantomData<fn(Req)>);

mod sealed {
    #[expect(unnameable_types, reason = "nobody else may implement or call it")]
    pub trait Protocol {
        /// What all services of a layer share.
        type Shared;
    }
}

impl Protocol for Http {}
impl sealed::Protocol for Http {
    type Shared = HttpLimits;
}

impl<Req> Protocol for Calls<Req> {}
impl<Req> sealed::Protocol for Calls<Req> {
    type Shared = Limiter<Req>;
}

/// A limiter, and how it answers HTTP requests.
#[expect(unnameable_types, reason = "an associated type of a sealed trait")]
pub struct HttpLimits {
    pub(crate) limiter: Limiter<Parts>,
    pub(crate) options: Options,
    pub(crate) responder: Responder,
}

/// What to do with HTTP requests besides limiting them.
pub(crate) struct Options {
    pub(crate) headers: Headers,
    pub(crate) grpc_codes: GrpcCodes,
    pub(crate) on_rejection: Option<OnRejection>,
    pub(crate) skip_preflight: bool,
    pub(crate) expose_decision: bool,
}

pub(crate) type OnRejection = Box<dyn Fn(&Rejection, &Parts) -> Response<Bytes> + Send + Sync>;

impl<Req> fmt::Debug for Calls<Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Calls")
    }
}

// === impl HttpLimits ===

impl HttpLimits {
    /// Whether a request is let through without being counted.
    pub(crate) fn skips(&self, parts: &Parts) -> bool {
        self.options.skip_preflight && is_preflight(&parts.method, &parts.headers)
    }

    /// Takes note of a decision to let a request go on: for handlers, in its extensions, and for the
    /// response, where it is to tell of it.
    pub(crate) fn admit(
        &self,
        decision: Decision,
        permit: Option<&Permit>,
        extensions: &mut Extensions,
    ) -> Option<Annotation> {
        let annotation = self.responder.annotation(&decision);
        if self.options.expose_decision {
            extensions.insert(decision);
            if let Some(permit) = permit {
                extensions.get_or_insert_default::<HeldPermits>().add(permit);
            }
        }
        annotation
    }

    /// The answer to a request that is turned away. The rejection goes along in its extensions, for
    /// layers outside this one.
    pub(crate) fn reject(&self, rejection: Rejection, parts: &Parts) -> Response<Bytes> {
        let own = self.options.on_rejection.as_ref().and_then(|on_rejection| {
            // Without an answer of its own the request still gets one.
            catch_unwind(AssertUnwindSafe(|| on_rejection(&rejection, parts))).ok()
        });
        let mut response = match own {
            Some(mut response) => {
                self.responder.complete(&rejection, response.headers_mut());
                response
            }
            None => self.responder.reject(&rejection, &parts.headers),
        };
        response.extensions_mut().insert(rejection);
        response
    }
}

/// Whether a request is a CORS preflight: an OPTIONS request with the two headers that make it one
/// (Fetch standard, section 3.3.2).
fn is_preflight(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::OPTIONS
        && headers.contains_key(header::ORIGIN)
        && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

impl fmt::Debug for HttpLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpLimits").field("limiter", &self.limiter).finish_non_exhaustive()
    }
}

// === CallError ===

/// Why a call to a limited service that is not HTTP failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallError<E> {
    /// The call was turned away; the inner service was not called. The request is gone: whoever
    /// wants to send it again later keeps a copy, or asks [`Limiter::acquire`](crate::Limiter::acquire)
    /// before the call.
    Rejected(Box<Rejection>),
    /// The inner service failed.
    Inner(E),
}

impl<E: fmt::Display> fmt::Display for CallError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rejected(rejection) => rejection.fmt(f),
            Self::Inner(error) => error.fmt(f),
        }
    }
}

impl<E: error::Error + 'static> error::Error for CallError<E> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Rejected(rejection) => Some(&**rejection),
            Self::Inner(error) => Some(error),
        }
    }
}
