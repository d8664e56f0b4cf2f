//! The limits of a layer as a tonic interceptor.

use crate::{policy::stack::BuildError, protocol::HttpLimits};
use http::{HeaderMap, HeaderValue, Method, Request, header::CONTENT_TYPE};
use std::{fmt, sync::Arc};
use tonic::{Status, metadata::MetadataMap, service::Interceptor};

/// The limits of a [`RateLimitLayer`](crate::RateLimitLayer) for a single gRPC service, see
/// [`RateLimitLayer::interceptor`](crate::RateLimitLayer::interceptor).
///
/// An interceptor sees the metadata and the extensions of a call but not its path, so path keys and
/// conditions see `/`.
#[derive(Clone)]
pub struct RateLimitInterceptor {
    limits: Arc<HttpLimits>,
}

impl RateLimitInterceptor {
    pub(crate) fn new(limits: Arc<HttpLimits>) -> Result<Self, BuildError> {
        if limits.limiter.asks_elsewhere() {
            return Err(BuildError::CannotAsk);
        }
        if let Some(policy) = limits.limiter.holder() {
            return Err(BuildError::CannotHold { policy: policy.to_owned() });
        }
        match limits.limiter.stack().shaper() {
            Some(policy) => Err(BuildError::CannotWait { policy: policy.to_owned() }),
            None => Ok(Self { limits }),
        }
    }
}

impl Interceptor for RateLimitInterceptor {
    fn call(&mut self, request: tonic::Request<()>) -> Result<tonic::Request<()>, Status> {
        let (metadata, extensions, ()) = request.into_parts();
        let mut head = Request::new(());
        *head.method_mut() = Method::POST;
        *head.headers_mut() = metadata.into_headers();
        *head.extensions_mut() = extensions;
        let (mut parts, ()) = head.into_parts();
        match self.limits.limiter.check(&parts) {
            Ok(decision) => {
                if self.limits.options.expose_decision {
                    parts.extensions.insert(decision);
                }
                let metadata = MetadataMap::from_headers(parts.headers);
                Ok(tonic::Request::from_parts(metadata, parts.extensions, ()))
            }
            Err(rejection) => {
                // Whatever the call said of itself, a status is what tonic wants.
                let grpc = HeaderValue::from_static("application/grpc");
                parts.headers = HeaderMap::from_iter([(CONTENT_TYPE, grpc)]);
                let response = self.limits.responder.reject(&rejection, &parts.headers);
                Err(Status::from_header_map(response.headers())
                    .unwrap_or_else(|| Status::resource_exhausted("limited")))
            }
        }
    }
}

impl fmt::Debug for RateLimitInterceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitInterceptor").finish_non_exhaustive()
    }
}
