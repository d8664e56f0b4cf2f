//! Rejections as gRPC statuses, in responses that have headers only.

use super::{refusal::Refusal, text::Text};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Response, header::CONTENT_TYPE};

/// The status that a gRPC call is turned away with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GrpcCode {
    /// `RESOURCE_EXHAUSTED`, 8: the client used up what it may use. The default for limits.
    #[default]
    ResourceExhausted,
    /// `UNAVAILABLE`, 14: what many clients are set up to retry. The default for load shedding.
    Unavailable,
}

/// Which status says what.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GrpcCodes {
    /// A limit is reached.
    pub(crate) limited: GrpcCode,
    /// There is not room for all.
    pub(crate) shed: GrpcCode,
}

impl Default for GrpcCodes {
    fn default() -> Self {
        Self { limited: GrpcCode::ResourceExhausted, shed: GrpcCode::Unavailable }
    }
}

/// Every status that this crate answers with, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Code {
    InvalidArgument = 3,
    ResourceExhausted = 8,
    Internal = 13,
    Unavailable = 14,
}

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
const GRPC_RETRY_PUSHBACK: HeaderName = HeaderName::from_static("grpc-retry-pushback-ms");

impl From<GrpcCode> for Code {
    fn from(code: GrpcCode) -> Self {
        match code {
            GrpcCode::ResourceExhausted => Self::ResourceExhausted,
            GrpcCode::Unavailable => Self::Unavailable,
        }
    }
}

/// The content type of the answer to a request, if it is a gRPC call.
pub(super) fn content_type(request: &HeaderMap) -> Option<HeaderValue> {
    let asked = request.get(CONTENT_TYPE)?;
    let is = |media: &str| {
        asked.as_bytes().split_at_checked(media.len()).is_some_and(|(start, rest)| {
            start.eq_ignore_ascii_case(media.as_bytes())
                && matches!(rest.first(), None | Some(b'+' | b';'))
        })
    };
    if is("application/grpc") {
        Some(HeaderValue::from_static("application/grpc"))
    } else if is("application/grpc-web") || is("application/grpc-web-text") {
        // Its clients expect their own flavour back.
        Some(asked.clone())
    } else {
        None
    }
}

pub(super) fn response(refusal: &Refusal<'_>, content_type: HeaderValue) -> Response<Bytes> {
    let mut response = Response::new(Bytes::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, content_type);
    headers.insert(GRPC_STATUS, Text::number(refusal.code as u64));
    headers.insert(GRPC_MESSAGE, percent_encoded(&refusal.detail));
    headers.insert(GRPC_RETRY_PUSHBACK, pushback(refusal.wait_us));
    if let Some(wait_us) = refusal.wait_us {
        let status = status(refusal.code, &refusal.detail, wait_us);
        headers.insert(GRPC_STATUS_DETAILS, base64(&status));
    }
    response
}

/// Milliseconds to wait before the next attempt; a negative number asks for no other attempt.
fn pushback(wait_us: Option<u64>) -> HeaderValue {
    match wait_us {
        Some(wait_us) => Text::number(wait_us.div_ceil(1_000).clamp(1, i32::MAX as u64)),
        None => HeaderValue::from_static("-1"),
    }
}

fn percent_encoded(message: &str) -> HeaderValue {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut text = Text::new();
    for byte in message.bytes() {
        match byte {
            b' '..=b'$' | b'&'..=b'~' => text.push_bytes(&[byte]),
            _ => {
                text.push_bytes(&[b'%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 0xf)]])
            }
        }
    }
    text.value()
}

/// A `google.rpc.Status` whose only detail is a `google.rpc.RetryInfo`, in protocol buffers.
fn status(code: Code, message: &str, wait_us: u64) -> Vec<u8> {
    let mut delay = Vec::new();
    push_integer(&mut delay, 1, wait_us / 1_000_000);
    push_integer(&mut delay, 2, wait_us % 1_000_000 * 1_000);
    let mut retry_info = Vec::new();
    push_bytes(&mut retry_info, 1, &delay);

    let mut any = Vec::new();
    push_bytes(&mut any, 1, b"type.googleapis.com/google.rpc.RetryInfo");
    push_bytes(&mut any, 2, &retry_info);

    let mut status = Vec::with_capacity(message.len() + any.len() + 8);
    push_integer(&mut status, 1, code as u64);
    push_bytes(&mut status, 2, message.as_bytes());
    push_bytes(&mut status, 3, &any);
    status
}

/// A field of an integer type. Zero is what such a field has when it is left out.
fn push_integer(message: &mut Vec<u8>, field: u8, value: u64) {
    if value != 0 {
        message.push(field << 3);
        push_varint(message, value);
    }
}

/// A field that holds a string, bytes or another message.
fn push_bytes(message: &mut Vec<u8>, field: u8, value: &[u8]) {
    message.push(field << 3 | 2);
    push_varint(message, value.len() as u64);
    message.extend_from_slice(value);
}

/// Seven bits a byte, lowest first; the eighth bit says that more follow.
fn push_varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        message.push(value as u8 | 0x80);
        value >>= 7;
    }
    message.push(value as u8);
}

/// The standard alphabet without padding, as gRPC asks of values in `-bin` headers.
fn base64(bytes: &[u8]) -> HeaderValue {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = Text::new();
    for chunk in bytes.chunks(3) {
        let mut group = [0; 4];
        group[1..=chunk.len()].copy_from_slice(chunk);
        let group = u32::from_be_bytes(group);
        let digits = [18, 12, 6, 0].map(|shift| ALPHABET[(group >> shift) as usize & 0x3f]);
        // One byte takes two digits, two take three, three take four.
        text.push_bytes(&digits[..=chunk.len()]);
    }
    text.value()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;
    use tonic_types::{ErrorDetails, StatusExt};

    fn answered_as(asked: &str) -> Option<String> {
        let mut request = HeaderMap::new();
        request.insert(CONTENT_TYPE, asked.parse().unwrap());
        content_type(&request).map(|value| value.to_str().unwrap().to_owned())
    }

    #[test]
    fn grpc_calls_are_told_by_their_content_type() {
        for asked in [
            "application/grpc",
            "application/grpc+proto",
            "application/grpc;charset=utf-8",
            "Application/GRPC+json",
        ] {
            assert_eq!(answered_as(asked).as_deref(), Some("application/grpc"), "{asked}");
        }
        for asked in [
            "application/grpc-web",
            "application/grpc-web+proto",
            "application/grpc-web-text",
            "application/grpc-web-text+proto",
            "application/grpc-web;x=y",
        ] {
            assert_eq!(answered_as(asked).as_deref(), Some(asked));
        }
        for asked in [
            "application/json",
            "application/grp",
            "application/grpcx",
            "application/grpc-weber",
            "application/grpc-web-texts",
            "text/application/grpc",
            "",
        ] {
            assert_eq!(answered_as(asked), None, "{asked}");
        }
        assert_eq!(content_type(&HeaderMap::new()), None);
    }

    #[test]
    fn the_pushback_is_rounded_up_and_never_zero() {
        for (wait_us, said) in [
            (Some(0), "1"),
            (Some(1), "1"),
            (Some(1_000), "1"),
            (Some(1_001), "2"),
            (Some(199_000), "199"),
            (Some(u64::MAX), "2147483647"),
            (None, "-1"),
        ] {
            assert_eq!(pushback(wait_us), said);
        }
    }

    proptest! {
        #[test]
        fn messages_and_details_are_read_back_by_an_independent_client(
            message in prop_oneof![any::<String>(), "[%0-9A-F ]{0,9}"],
            wait_us in 0..=100 * 365 * 86_400_000_000_u64,
        ) {
            let code = Code::ResourceExhausted;
            let encoded = status(code, &message, wait_us);
            let mut headers = HeaderMap::new();
            headers.insert(GRPC_STATUS, Text::number(code as u64));
            headers.insert(GRPC_MESSAGE, percent_encoded(&message));
            headers.insert(GRPC_STATUS_DETAILS, base64(&encoded));

            let wait = Duration::from_micros(wait_us);
            let read = tonic::Status::from_header_map(&headers).unwrap();
            prop_assert_eq!(read.code(), tonic::Code::ResourceExhausted);
            prop_assert_eq!(read.message(), &message);
            prop_assert_eq!(read.details(), &encoded);
            prop_assert_eq!(read.get_details_retry_info().unwrap().retry_delay, Some(wait));

            if !message.is_empty() {
                let details = ErrorDetails::with_retry_info(Some(wait));
                let theirs = tonic::Status::with_error_details(
                    tonic::Code::ResourceExhausted, &message, details,
                );
                prop_assert_eq!(theirs.details(), &encoded);
            }
            let sent = headers[GRPC_MESSAGE].as_bytes();
            prop_assert!(sent.iter().all(|byte| (b' '..=b'~').contains(byte)));
            prop_assert!(!headers[GRPC_STATUS_DETAILS].as_bytes().ends_with(b"="));
        }
    }
}
