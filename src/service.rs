//! The service: reads the head of a request, decides, and calls the inner service or turns away.

use crate::{
    body::ResponseBody,
    future::{CallFuture, Note, ResponseFuture},
    limiter::Extras,
    protocol::{CallError, Calls, Http, Protocol},
    store::Mode,
};
use http::{Request, Response};
use http_body::Body;
use std::{
    fmt, mem,
    sync::Arc,
    task::{Context, Poll},
};
use tower_service::Service;

/// A service whose requests are limited, see [`RateLimitLayer`](crate::RateLimitLayer).
///
/// It is ready whenever the inner service is: whether a request may go on depends on its key, so it
/// is decided when the request is there. The request's body is not touched.
pub struct RateLimit<S, P: Protocol = Http> {
    pub(crate) inner: S,
    pub(crate) shared: Arc<P::Shared>,
}

impl<S, P: Protocol> RateLimit<S, P> {
    /// The inner service.
    #[must_use]
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service.
    #[must_use]
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: Clone, P: Protocol> RateLimit<S, P> {
    /// Takes the service that is ready and leaves a clone behind, which is not: see the tower docs
    /// on cloning inner services.
    fn take_ready(&mut self) -> S {
        let clone = self.inner.clone();
        mem::replace(&mut self.inner, clone)
    }
}

impl<S, B, C> Service<Request<B>> for RateLimit<S>
where
    S: Service<Request<B>, Response = Response<C>> + Clone,
    C: Body<Data = bytes::Bytes>,
{
    type Response = Response<ResponseBody<C>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, B>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> ResponseFuture<S, B> {
        let (mut parts, body) = request.into_parts();
        let limits = &self.shared;
        if limits.skips(&parts) {
            let call = self.inner.call(Request::from_parts(parts, body));
            return ResponseFuture::running(call, None, Note::Nothing);
        }
        if let Some(deciding) = limits.limiter.ask(&parts, Mode::Charge, true) {
            let (limits, request) = (limits.clone(), Request::from_parts(parts, body));
            return ResponseFuture::deciding(deciding, self.take_ready(), request, limits);
        }
        let mut extras = Extras::default();
        let note = match limits.limiter.admit(&parts, &mut extras) {
            Ok(decision) => {
                Note::of(limits, decision, extras.permit.as_ref(), &mut parts.extensions)
            }
            Err(rejection) => {
                if let Some(deciding) = extras.deciding {
                    let (limits, request) = (limits.clone(), Request::from_parts(parts, body));
                    return ResponseFuture::deciding(deciding, self.take_ready(), request, limits);
                }
                let response = limits.reject(rejection, &parts);
                // What readiness reserved is for others now.
                drop(self.take_ready());
                return ResponseFuture::rejected(response);
            }
        };
        let Extras { turn, permit, .. } = extras;
        let Some(turn) = turn else {
            let call = self.inner.call(Request::from_parts(parts, body));
            return ResponseFuture::running(call, permit, note);
        };
        let request = Request::from_parts(parts, body);
        ResponseFuture::waiting(turn, self.take_ready(), request, permit, note)
    }
}

impl<S, Req> Service<Req> for RateLimit<S, Calls<Req>>
where
    S: Service<Req> + Clone,
    Req: 'static,
{
    type Response = S::Response;
    type Error = CallError<S::Error>;
    type Future = CallFuture<S, Req>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(CallError::Inner)
    }

    fn call(&mut self, request: Req) -> CallFuture<S, Req> {
        if let Some(deciding) = self.shared.ask(&request, Mode::Charge, true) {
            return CallFuture::deciding(deciding, self.take_ready(), request);
        }
        let mut extras = Extras::default();
        if let Err(rejection) = self.shared.admit(&request, &mut extras) {
            let ready = self.take_ready();
            return match extras.deciding {
                Some(deciding) => CallFuture::deciding(deciding, ready, request),
                None => CallFuture::rejected(rejection),
            };
        }
        let Extras { turn, permit, .. } = extras;
        match turn {
            None => CallFuture::running(self.inner.call(request), permit),
            Some(turn) => CallFuture::waiting(turn, self.take_ready(), request, permit),
        }
    }
}

impl<S: Clone, P: Protocol> Clone for RateLimit<S, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<S: fmt::Debug, P: Protocol> fmt::Debug for RateLimit<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimit").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[cfg(feature = "tonic")]
#[cfg_attr(docsrs, doc(cfg(feature = "tonic")))]
impl<S: tonic::server::NamedService> tonic::server::NamedService for RateLimit<S> {
    const NAME: &'static str = S::NAME;
}
