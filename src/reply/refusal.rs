//! What a rejection is called in HTTP and in gRPC.

use super::{
    grpc::{Code, GrpcCodes},
    headers::retry_seconds,
};
use crate::{
    decision::{Reason, Rejection},
    key::KeyErrorKind,
};
use http::StatusCode;
use std::fmt;

/// What a rejection means to the client, in both protocols.
pub(super) struct Refusal<'a> {
    pub(super) status: StatusCode,
    pub(super) code: Code,
    pub(super) detail: String,
    pub(super) wait_us: Option<u64>,
    pub(super) rejection: &'a Rejection,
}

impl<'a> Refusal<'a> {
    /// Everything that is said is chosen here, so that both protocols say the same.
    pub(super) fn new(rejection: &'a Rejection, codes: GrpcCodes) -> Self {
        let names = Names(rejection);
        let wait_us = rejection.retry_after_us();
        let (status, code, detail) = match &rejection.reason {
            Reason::Limited => (
                StatusCode::TOO_MANY_REQUESTS,
                codes.limited.into(),
                match wait_us.map(retry_seconds) {
                    Some(seconds) => format!("Limited by {names}. Try again in {seconds} s."),
                    None => format!("Limited by {names}."),
                },
            ),
            Reason::TooCostly => (
                StatusCode::TOO_MANY_REQUESTS,
                Code::ResourceExhausted,
                format!(
                    "The request costs more than {names} can ever admit at once. Ask for less."
                ),
            ),
            Reason::NoKey { error, .. } if error.kind() == KeyErrorKind::Missing => {
                (StatusCode::BAD_REQUEST, Code::InvalidArgument, error.to_string())
            }
            Reason::Unavailable { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, Code::Unavailable, OVERLOADED.to_owned())
            }
            Reason::Shed { .. } => {
                (StatusCode::SERVICE_UNAVAILABLE, codes.shed.into(), OVERLOADED.to_owned())
            }
            // What is wrong with the server is for its operator to know.
            Reason::NoKey { .. } | Reason::Faulty { .. } => (
                StatusCode::INTERNAL_SERVER_ERROR,
                Code::Internal,
                format!("The server could not apply {names} to the request."),
            ),
        };
        Self { status, code, detail, wait_us, rejection }
    }
}

/// The client has done nothing wrong.
const OVERLOADED: &str = "The server cannot take the request at the moment. Try again.";

/// The policies that reject, as clients are told.
struct Names<'a>(&'a Rejection);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, policy) in self.0.policies().enumerate() {
            write!(f, "{}`{policy}`", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
