//! From a decision to HTTP or gRPC: status, headers, problem details.
//!
//! This is the only place that rounds time, and it rounds up: whoever waits for as long as a
//! response says does not come too early.
//!
//! | the request | HTTP | gRPC |
//! |---|---|---|
//! | is over a limit | 429 with `Retry-After` | 8, or as [`GrpcCode`] says, with a retry pushback |
//! | can never fit a limit | 429 | 8, asks for no retry |
//! | finds no slot free | 429 with `Retry-After: 1` | 8, likewise |
//! | is shed, or its policy's store is out of reach and lets nothing pass then | 503 with `Retry-After` | 14, likewise |
//! | lacks what its key is made from | 400 | 3, asks for no retry |
//! | meets a server that is not set up for it | 500 | 13, asks for no retry |
//!
//! HTTP rejections have a body of problem details, RFC 9457; gRPC ones have headers only. What the
//! headers say about limits is for [`Headers`] to choose.

mod grpc;
mod headers;
mod inner;
mod problem;
mod refusal;
mod responder;
mod text;

pub use grpc::GrpcCode;
pub(crate) use grpc::GrpcCodes;
pub(crate) use headers::Annotation;
pub use headers::{Dialect, Headers, LegacyReset};
pub(crate) use responder::Responder;
