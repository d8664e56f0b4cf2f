//! The futures of limited services: waiting for their turn, running, or rejected.

use crate::{
    body::ResponseBody,
    decision::Rejection,
    protocol::{CallError, HttpLimits},
    reply::Annotation,
    turn::Turn,
};
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tower_service::Service;

/// What the response to an admitted request has to tell, and who knows how.
type Annotate = (Annotation, Arc<HttpLimits>);

pin_project! {
    /// The response future of a limited HTTP service.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, Request<B>, Response<Bytes>>,
        annotate: Option<Annotate>,
    }
}

pin_project! {
    /// The response future of a limited service that is not HTTP.
    pub struct CallFuture<S, Req>
    where
        S: Service<Req>,
    {
        #[pin]
        state: State<S, Req, Rejection>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, Req, Answer>
    where
        S: Service<Req>,
    {
        // Few requests ever wait, so the many that don't should not carry the room for it.
        Waiting { waiting: Option<Box<Waiting<S, Req>>> },
        Running { #[pin] future: S::Future },
        Rejected { answer: Option<Answer> },
    }
}

/// A request that waits for its turn, with the service that is ready for it.
struct Waiting<S, Req> {
    turn: Box<Turn>,
    service: S,
    request: Req,
}

/// What a state comes to.
enum Outcome<T, Answer> {
    Ran(T),
    Rejected(Answer),
}

impl<S, Req, Answer> State<S, Req, Answer>
where
    S: Service<Req>,
{
    fn waiting(turn: Box<Turn>, service: S, request: Req) -> Self {
        Self::Waiting { waiting: Some(Box::new(Waiting { turn, service, request })) }
    }

    fn poll(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Outcome<<S::Future as Future>::Output, Answer>> {
        loop {
            let future = match self.as_mut().project() {
                StateProj::Waiting { waiting } => {
                    let held = waiting.as_mut().expect(POLLED_AGAIN);
                    ready!(Pin::new(&mut held.turn).poll(cx));
                    let Waiting { mut service, request, .. } = *waiting.take().expect(POLLED_AGAIN);
                    service.call(request)
                }
                StateProj::Running { future } => return future.poll(cx).map(Outcome::Ran),
                StateProj::Rejected { answer } => {
                    let answer = answer.take().expect(POLLED_AGAIN);
                    return Poll::Ready(Outcome::Rejected(answer));
                }
            };
            self.set(Self::Running { future });
        }
    }
}

/// Polling a future that is done is the caller's mistake, which futures may panic at.
const POLLED_AGAIN: &str = "a future is not polled after it is done";

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    pub(crate) const fn running(future: S::Future, annotate: Option<Annotate>) -> Self {
        Self { state: State::Running { future }, annotate }
    }

    pub(crate) const fn rejected(response: Response<Bytes>) -> Self {
        Self { state: State::Rejected { answer: Some(response) }, annotate: None }
    }

    pub(crate) fn waiting(
        turn: Box<Turn>,
        service: S,
        request: Request<B>,
        annotate: Option<Annotate>,
    ) -> Self {
        Self { state: State::waiting(turn, service, request), annotate }
    }
}

impl<S, B, C> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<C>>,
    C: Body<Data = Bytes>,
{
    type Output = Result<Response<ResponseBody<C>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut response = match ready!(this.state.poll(cx)) {
            Outcome::Ran(response) => response?.map(ResponseBody::inner),
            Outcome::Rejected(response) => response.map(ResponseBody::reply),
        };
        if let Some((annotation, limits)) = this.annotate.take() {
            let status = response.status();
            limits.responder.annotate(annotation, status, response.headers_mut());
        }
        Poll::Ready(Ok(response))
    }
}

impl<S, Req> CallFuture<S, Req>
where
    S: Service<Req>,
{
    pub(crate) const fn running(future: S::Future) -> Self {
        Self { state: State::Running { future } }
    }

    pub(crate) const fn rejected(rejection: Rejection) -> Self {
        Self { state: State::Rejected { answer: Some(rejection) } }
    }

    pub(crate) fn waiting(turn: Box<Turn>, service: S, request: Req) -> Self {
        Self { state: State::waiting(turn, service, request) }
    }
}

impl<S, Req> Future for CallFuture<S, Req>
where
    S: Service<Req>,
{
    type Output = Result<S::Response, CallError<S::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Poll::Ready(match ready!(self.project().state.poll(cx)) {
            Outcome::Ran(result) => result.map_err(CallError::Inner),
            Outcome::Rejected(rejection) => Err(CallError::Rejected(Box::new(rejection))),
        })
    }
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

impl<S, Req> fmt::Debug for CallFuture<S, Req>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallFuture").finish_non_exhaustive()
    }
}
