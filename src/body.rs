//! The response body: the inner service's own, with what its request holds until it has ended, or a
//! short answer to a request that was turned away.

use crate::concurrency::Permit;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use std::{
    pin::Pin,
    task::{Context, Poll},
};

pin_project! {
    /// The response body of a limited service.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[derive(Debug)]
    #[project = KindProj]
    enum Kind<B> {
        // What the request holds goes after the body does.
        Inner { #[pin] body: B, permit: Option<Permit> },
        Reply { bytes: Option<Bytes> },
    }
}

impl<B: Body> ResponseBody<B> {
    pub(crate) fn inner(body: B, permit: Option<Permit>) -> Self {
        // A body that is empty from the beginning is often not polled at all.
        let permit = permit.filter(|_| !body.is_end_stream());
        Self { kind: Kind::Inner { body, permit } }
    }
}

impl<B> ResponseBody<B> {
    pub(crate) fn reply(bytes: Bytes) -> Self {
        Self { kind: Kind::Reply { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()) } }
    }
}

impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self { kind: Kind::Inner { body: B::default(), permit: None } }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
{
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProj::Inner { mut body, permit } => {
                let polled = body.as_mut().poll_frame(cx);
                let is_over = match &polled {
                    Poll::Pending => false,
                    Poll::Ready(Some(Ok(frame))) => frame.is_trailers() || body.is_end_stream(),
                    Poll::Ready(None | Some(Err(_))) => true,
                };
                if is_over {
                    permit.take();
                }
                polled
            }
            KindProj::Reply { bytes } => {
                Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    // Both have to be told as they are: an empty body that does not say so costs gRPC its
    // trailers-only form, and one without a size its Content-Length.

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body, .. } => body.is_end_stream(),
            Kind::Reply { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body, .. } => body.size_hint(),
            Kind::Reply { bytes } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
        }
    }
}
