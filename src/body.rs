//! The response body: the inner service's own, or a short answer to a request that was turned away.

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
        Inner { #[pin] body: B },
        Reply { bytes: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(crate) const fn inner(body: B) -> Self {
        Self { kind: Kind::Inner { body } }
    }

    pub(crate) fn reply(bytes: Bytes) -> Self {
        Self { kind: Kind::Reply { bytes: Some(bytes).filter(|bytes| !bytes.is_empty()) } }
    }
}

impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self::inner(B::default())
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
            KindProj::Inner { body } => body.poll_frame(cx),
            KindProj::Reply { bytes } => {
                Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes))))
            }
        }
    }

    // Both have to be told as they are: an empty body that does not say so costs gRPC its
    // trailers-only form, and one without a size its Content-Length.

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Inner { body } => body.is_end_stream(),
            Kind::Reply { bytes } => bytes.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Inner { body } => body.size_hint(),
            Kind::Reply { bytes } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
        }
    }
}
