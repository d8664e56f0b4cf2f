//! The layer: a limiter and how it answers, shared by every service made from it.

use crate::{
    Clock, Store,
    decision::Rejection,
    key::KeyExtractor,
    limiter::{Limiter, LimiterBuilder},
    policy::{Policy, stack::BuildError},
    priority::{ByMethod, Classify},
    protocol::{Calls, Http, HttpLimits, Options, Protocol},
    reply::{GrpcCode, GrpcCodes, Headers, Responder},
    service::RateLimit,
    shed::Shedder,
};
use bytes::Bytes;
use http::{Response, request::Parts};
use std::{fmt, sync::Arc};
use tower_layer::Layer;

/// Applies a stack of policies to a service.
///
/// For HTTP and gRPC services the type has no parameters: it can be a field of a struct and the
/// return type of a function. A request that is turned away is answered with a response, so the
/// service's error type stays what it was.
///
/// ```
/// use tollgate::{BuildError, Policy, Quota, RateLimitLayer, key::PeerIp};
///
/// fn limits() -> Result<RateLimitLayer, BuildError> {
///     RateLimitLayer::builder()
///         .key(PeerIp::new())
///         .policy(Policy::token_bucket("burst", Quota::per_second(10).burst(50)))
///         .policy(Policy::fixed_window("daily", Quota::per_calendar_day(10_000)))
///         .build()
/// }
/// # limits().unwrap();
/// ```
///
/// Any other service is wrapped by [`RateLimitLayer::calls`], with a limiter of its request type;
/// there a rejection is an error. So is an outbound HTTP client: around one, a layer from `builder`
/// would make up responses that no server sent.
///
/// Handlers find the [`Decision`](crate::Decision) in the extensions of the request, and layers
/// outside of this one the [`Rejection`] in those of the response to a request that was turned away.
///
/// Several limits on one request belong into one layer, with [`Policy::when`] for those that apply
/// only to some: a stack charges all or nothing, but a layer knows nothing of what one inside of it,
/// such as a `route_layer`, will reject.
///
/// Every clone of a layer, and every service made from it, shares one budget. Two layers are two
/// budgets.
///
/// # Optional layers
///
/// A limited service has a response body type of its own, and with
/// [`option_layer`](https://docs.rs/tower/latest/tower/util/fn.option_layer.html) both ways have to
/// end in the same one. In axum, map the response back:
///
/// ```
/// use axum::{Router, response::IntoResponse};
/// use tower::{ServiceBuilder, util::option_layer};
/// # use tollgate::RateLimitLayer;
///
/// # fn app(limits: Option<RateLimitLayer>) -> Router {
/// let same_body =
///     |limits| ServiceBuilder::new().map_response(IntoResponse::into_response).layer(limits);
/// let app = Router::new().layer(option_layer(limits.map(same_body)));
/// # app
/// # }
/// ```
pub struct RateLimitLayer<P: Protocol = Http> {
    pub(crate) shared: Arc<P::Shared>,
}

// === impl RateLimitLayer ===

impl RateLimitLayer {
    /// Starts a new layer for HTTP and gRPC services.
    #[must_use]
    pub fn builder() -> RateLimitLayerBuilder {
        RateLimitLayerBuilder {
            limiter: Limiter::builder().priority(ByMethod::new()),
            options: Options {
                headers: Headers::default(),
                grpc_codes: GrpcCodes::default(),
                on_rejection: None,
                skip_preflight: false,
                expose_decision: true,
            },
        }
    }

    /// The limiter at work, to peek, refund and reset.
    #[must_use]
    pub fn limiter(&self) -> &Limiter<Parts> {
        &self.shared.limiter
    }

    /// The same limits as a tonic interceptor, for a single gRPC service. It shares the layer's
    /// budget. Interceptors cannot add headers to the responses of admitted requests.
    ///
    /// # Errors
    ///
    /// [`BuildError::CannotWait`] if a policy holds requests back, [`BuildError::CannotAsk`] if the state is
    /// in Redis, for interceptors cannot wait; and [`BuildError::CannotHold`] if a policy or load shedder
    /// counts calls in flight, for they do not see when a call is over.
    #[cfg(feature = "tonic")]
    #[cfg_attr(docsrs, doc(cfg(feature = "tonic")))]
    pub fn interceptor(&self) -> Result<crate::RateLimitInterceptor, BuildError> {
        crate::RateLimitInterceptor::new(self.shared.clone())
    }
}

impl<Req> RateLimitLayer<Calls<Req>> {
    /// A layer for services that are not HTTP: a job queue, a client, a protocol of one's own. A
    /// request that is turned away is a [`CallError::Rejected`](crate::CallError::Rejected).
    ///
    /// ```
    /// use tollgate::{Limiter, Policy, Quota, RateLimitLayer, key::Key};
    ///
    /// struct Job {
    ///     tenant: String,
    /// }
    ///
    /// let limiter = Limiter::<Job>::builder()
    ///     .key(|job: &Job| Key::from(&job.tenant))
    ///     .policy(Policy::token_bucket("jobs", Quota::per_second(5)))
    ///     .build()?;
    /// let layer = RateLimitLayer::calls(limiter);
    /// # let _ = layer;
    /// # Ok::<(), tollgate::BuildError>(())
    /// ```
    #[must_use]
    pub fn calls(limiter: Limiter<Req>) -> Self {
        Self { shared: Arc::new(limiter) }
    }
}

impl<P: Protocol> Clone for RateLimitLayer<P> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone() }
    }
}

impl<S, P: Protocol> Layer<S> for RateLimitLayer<P> {
    type Service = RateLimit<S, P>;

    fn layer(&self, inner: S) -> RateLimit<S, P> {
        RateLimit::new(inner, self)
    }
}

impl<S, P: Protocol> RateLimit<S, P> {
    /// Limits the requests to `inner` by the limits of `layer`.
    #[must_use]
    pub fn new(inner: S, layer: &RateLimitLayer<P>) -> Self {
        Self { inner, shared: layer.shared.clone() }
    }
}

impl<P: Protocol> fmt::Debug for RateLimitLayer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").finish_non_exhaustive()
    }
}

/// Puts a [`RateLimitLayer`] for HTTP and gRPC services together.
pub struct RateLimitLayerBuilder {
    limiter: LimiterBuilder<Parts>,
    options: Options,
}

impl RateLimitLayerBuilder {
    /// Adds a policy below those that are there already. All of them are asked, and a request is
    /// charged to all that apply or to none.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.limiter = self.limiter.policy(policy);
        self
    }

    /// Whom to count, for policies that do not say so themselves. Default: none.
    #[must_use]
    pub fn key(mut self, key: impl KeyExtractor) -> Self {
        self.limiter = self.limiter.key(key);
        self
    }

    /// Where state is kept. Default: [`LocalStore::new`](crate::LocalStore::new).
    ///
    /// A layer whose state is in Redis keeps some in this process too, while Redis is out of reach; to
    /// bound that, give it a [`LocalStore`](crate::LocalStore) as well.
    #[must_use]
    pub fn store(mut self, store: impl Into<Store>) -> Self {
        self.limiter = self.limiter.store(store);
        self
    }

    /// Where the time comes from. Default: [`Clock::system`].
    #[must_use]
    pub fn clock(mut self, clock: impl Into<Clock>) -> Self {
        self.limiter = self.limiter.clock(clock);
        self
    }

    /// Adds a load shedder behind those that are there already. They are asked before all policies, so a
    /// request that is shed costs nothing. It is answered with 503. See [`shed`](crate::shed).
    #[must_use]
    pub fn shedder(mut self, shedder: impl Into<Shedder>) -> Self {
        self.limiter = self.limiter.shedder(shedder);
        self
    }

    /// How important a request is, for load shedders. Default: [`ByMethod::new`], by the method alone.
    #[must_use]
    pub fn priority(mut self, classify: impl Classify) -> Self {
        self.limiter = self.limiter.priority(classify);
        self
    }

    /// What responses say about limits. Default: [`Headers::default`].
    #[must_use]
    pub fn headers(mut self, headers: Headers) -> Self {
        self.options.headers = headers;
        self
    }

    /// The gRPC status of calls that are over a limit. Default: 8, `RESOURCE_EXHAUSTED`.
    #[must_use]
    pub fn grpc_code(mut self, code: GrpcCode) -> Self {
        self.options.grpc_codes.limited = code;
        self
    }

    /// The gRPC status of calls that are turned away to shed load. Default: 14, `UNAVAILABLE`.
    #[must_use]
    pub fn grpc_shed_code(mut self, code: GrpcCode) -> Self {
        self.options.grpc_codes.shed = code;
        self
    }

    /// Makes one's own answers to requests that are turned away. The fields that
    /// [`headers`](Self::headers) asks for are added where the answer does not have them. If the
    /// function panics, the standard answer is given. Default: problem details, or for gRPC a
    /// status.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http::{Response, StatusCode};
    /// # use tollgate::{Policy, Quota, RateLimitLayer, key::Global};
    ///
    /// let layer = RateLimitLayer::builder()
    ///     .on_rejection(|rejection, parts| {
    ///         let text = format!("{}: {rejection}\n", parts.uri.path());
    ///         let mut response = Response::new(Bytes::from(text));
    ///         *response.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    ///         response
    ///     })
    /// #   .key(Global)
    /// #   .policy(Policy::token_bucket("all", Quota::per_second(1)))
    /// #   .build()?;
    /// # Ok::<(), tollgate::BuildError>(())
    /// ```
    #[must_use]
    pub fn on_rejection(
        mut self,
        answer: impl Fn(&Rejection, &Parts) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        self.options.on_rejection = Some(Box::new(answer));
        self
    }

    /// Lets CORS preflights through without counting them: OPTIONS requests with `Origin` and
    /// `Access-Control-Request-Method`. Anybody can send such requests, so what answers them should
    /// be cheap. Default: they are counted like all others.
    #[must_use]
    pub fn skip_preflight(mut self, skip: bool) -> Self {
        self.options.skip_preflight = skip;
        self
    }

    /// Puts the [`Decision`](crate::Decision) into the extensions of admitted requests, for
    /// handlers, and the [`HeldPermits`](crate::concurrency::HeldPermits) if they hold any. With several
    /// layers around each other, the decision is the innermost one's. It costs an allocation or two.
    /// Default: yes.
    #[must_use]
    pub fn expose_decision(mut self, expose: bool) -> Self {
        self.options.expose_decision = expose;
        self
    }

    /// Checks the stack and puts it to work.
    ///
    /// # Errors
    ///
    /// [`BuildError`] says which policy cannot be, and why.
    pub fn build(self) -> Result<RateLimitLayer, BuildError> {
        let limiter = self.limiter.build()?;
        let Options { headers, grpc_codes, .. } = &self.options;
        let responder = Responder::new(headers.clone(), *grpc_codes, limiter.stack().allotments());
        let shared = HttpLimits { limiter, options: self.options, responder };
        Ok(RateLimitLayer { shared: Arc::new(shared) })
    }
}

impl fmt::Debug for RateLimitLayerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayerBuilder")
            .field("limiter", &self.limiter)
            .field("headers", &self.options.headers)
            .finish_non_exhaustive()
    }
}
