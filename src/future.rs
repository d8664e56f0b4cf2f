//! The futures of limited services: deciding, waiting for their turn, running, or rejected.

use crate::{
    body::ResponseBody,
    concurrency::Permit,
    decision::{Decision, Rejection},
    limiter::{Admitted, Deciding},
    protocol::{CallError, HttpLimits},
    reply::Annotation,
    turn::Turn,
};
use bytes::Bytes;
use http::{Extensions, Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};
use tower_service::Service;

/// What the response to an admitted request has to tell, and who knows how.
#[derive(Default)]
pub(crate) enum Note {
    #[default]
    Nothing,
    Decided(Annotation, Arc<HttpLimits>),
    Undecided(Arc<HttpLimits>),
}

pin_project! {
    /// The response future of a limited HTTP service.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, Request<B>, Response<Bytes>>,
        note: Note,
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
        // Few requests ever wait, so the many that don't should not carry the room for it. Those whose
        // state is elsewhere wait for their decision, too.
        Waiting { waiting: Option<Box<Waiting<S, Req>>> },
        // What the request holds goes after the future does.
        Running { #[pin] future: S::Future, permit: Option<Permit> },
        Rejected { answer: Option<Answer> },
    }
}

/// A request that waits for its decision or its turn, with the service that is ready for it.
struct Waiting<S, Req> {
    deciding: Option<Deciding>,
    turn: Option<Box<Turn>>,
    permit: Option<Permit>,
    service: S,
    request: Req,
}

/// A decision that was waited for, and its request.
type Decided<'a, Req> = Result<(Decision, Option<&'a Permit>, &'a mut Req), (Rejection, Req)>;

/// What a state comes to.
enum Outcome<T, Answer> {
    /// With what the request still holds.
    Ran(T, Option<Permit>),
    Rejected(Answer),
}

impl Note {
    /// What to tell of a decision to let a request go on, whose extensions take it.
    pub(crate) fn of(
        limits: &Arc<HttpLimits>,
        decision: Decision,
        permit: Option<&Permit>,
        extensions: &mut Extensions,
    ) -> Self {
        match limits.admit(decision, permit, extensions) {
            Some(annotation) => Self::Decided(annotation, limits.clone()),
            None => Self::Nothing,
        }
    }
}

impl<S, Req, Answer> State<S, Req, Answer>
where
    S: Service<Req>,
{
    fn waiting(turn: Box<Turn>, service: S, request: Req, permit: Option<Permit>) -> Self {
        let waiting = Waiting { deciding: None, turn: Some(turn), permit, service, request };
        Self::Waiting { waiting: Some(Box::new(waiting)) }
    }

    fn deciding(deciding: Deciding, service: S, request: Req) -> Self {
        let deciding = Some(deciding);
        let waiting = Waiting { deciding, turn: None, permit: None, service, request };
        Self::Waiting { waiting: Some(Box::new(waiting)) }
    }

    /// Waits for the decision, if there is one to wait for. The request goes along, for those who have
    /// to tell it.
    fn poll_decision(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Decided<'_, Req>>> {
        let StateProj::Waiting { waiting } = self.project() else {
            return Poll::Ready(None);
        };
        let Some(deciding) = waiting.as_mut().and_then(|held| held.deciding.as_mut()) else {
            return Poll::Ready(None);
        };
        let admitted = ready!(deciding.as_mut().poll(cx));
        Poll::Ready(match admitted {
            Ok(Admitted { decision, turn, permit }) => waiting.as_mut().map(|held| {
                (held.deciding, held.turn, held.permit) = (None, turn, permit);
                Ok((decision, held.permit.as_ref(), &mut held.request))
            }),
            // The service goes at once: what readiness reserved is for others now.
            Err(rejection) => waiting.take().map(|held| Err((rejection, held.request))),
        })
    }

    fn poll(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Outcome<<S::Future as Future>::Output, Answer>> {
        loop {
            let (future, permit) = match self.as_mut().project() {
                StateProj::Waiting { waiting } => {
                    let held = waiting.as_mut().expect(POLLED_AGAIN);
                    if let Some(turn) = &mut held.turn {
                        ready!(Pin::new(turn).poll(cx));
                    }
                    let waiting = *waiting.take().expect(POLLED_AGAIN);
                    let Waiting { mut service, request, permit, .. } = waiting;
                    permit.iter().for_each(Permit::goes_on);
                    (service.call(request), permit)
                }
                StateProj::Running { future, permit } => {
                    let result = ready!(future.poll(cx));
                    return Poll::Ready(Outcome::Ran(result, permit.take()));
                }
                StateProj::Rejected { answer } => {
                    let answer = answer.take().expect(POLLED_AGAIN);
                    return Poll::Ready(Outcome::Rejected(answer));
                }
            };
            self.set(Self::Running { future, permit });
        }
    }
}

/// Polling a future that is done is the caller's mistake, which futures may panic at.
const POLLED_AGAIN: &str = "a future is not polled after it is done";

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    pub(crate) const fn running(future: S::Future, permit: Option<Permit>, note: Note) -> Self {
        Self { state: State::Running { future, permit }, note }
    }

    pub(crate) const fn rejected(response: Response<Bytes>) -> Self {
        let state = State::Rejected { answer: Some(response) };
        Self { state, note: Note::Nothing }
    }

    pub(crate) fn waiting(
        turn: Box<Turn>,
        service: S,
        request: Request<B>,
        permit: Option<Permit>,
        note: Note,
    ) -> Self {
        Self { state: State::waiting(turn, service, request, permit), note }
    }

    pub(crate) fn deciding(
        deciding: Deciding,
        service: S,
        request: Request<B>,
        limits: Arc<HttpLimits>,
    ) -> Self {
        let state = State::deciding(deciding, service, request);
        Self { state, note: Note::Undecided(limits) }
    }
}

impl<S, B, C> Future for ResponseFuture<S, B>
where
    S: Service<Request<B>, Response = Response<C>>,
    C: Body<Data = Bytes>,
{
    type Output = Result<Response<ResponseBody<C>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        match ready!(this.state.as_mut().poll_decision(cx)) {
            None => {}
            Some(decided) => {
                let Note::Undecided(limits) = mem::take(this.note) else {
                    unreachable!("undecided")
                };
                match decided {
                    Ok((decision, permit, request)) => {
                        *this.note = Note::of(&limits, decision, permit, request.extensions_mut());
                    }
                    Err((rejection, request)) => {
                        let (parts, _) = request.into_parts();
                        let response = limits.reject(rejection, &parts);
                        return Poll::Ready(Ok(response.map(ResponseBody::reply)));
                    }
                }
            }
        }
        let mut response = match ready!(this.state.poll(cx)) {
            Outcome::Ran(response, permit) => {
                let response = response?;
                permit.iter().for_each(Permit::answered);
                response.map(|body| ResponseBody::inner(body, permit))
            }
            Outcome::Rejected(response) => response.map(ResponseBody::reply),
        };
        if let Note::Decided(annotation, limits) = mem::take(this.note) {
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
    pub(crate) const fn running(future: S::Future, permit: Option<Permit>) -> Self {
        Self { state: State::Running { future, permit } }
    }

    pub(crate) const fn rejected(rejection: Rejection) -> Self {
        Self { state: State::Rejected { answer: Some(rejection) } }
    }

    pub(crate) fn waiting(
        turn: Box<Turn>,
        service: S,
        request: Req,
        permit: Option<Permit>,
    ) -> Self {
        Self { state: State::waiting(turn, service, request, permit) }
    }

    pub(crate) fn deciding(deciding: Deciding, service: S, request: Req) -> Self {
        Self { state: State::deciding(deciding, service, request) }
    }
}

impl<S, Req> Future for CallFuture<S, Req>
where
    S: Service<Req>,
{
    type Output = Result<S::Response, CallError<S::Error>>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.project().state;
        if let Some(Err((rejection, _))) = ready!(state.as_mut().poll_decision(cx)) {
            return Poll::Ready(Err(CallError::Rejected(Box::new(rejection))));
        }
        Poll::Ready(match ready!(state.poll(cx)) {
            Outcome::Ran(result, permit) => {
                if result.is_ok() {
                    permit.iter().for_each(Permit::answered);
                }
                result.map_err(CallError::Inner)
            }
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
