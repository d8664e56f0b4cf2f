//! Rejections as problem details, RFC 9457.

use super::refusal::Refusal;
use bytes::Bytes;
use http::{
    HeaderValue, Response, StatusCode,
    header::{CACHE_CONTROL, CONTENT_TYPE},
};

pub(super) fn response(refusal: &Refusal<'_>) -> Response<Bytes> {
    let mut response = Response::new(Bytes::from(body(refusal)));
    *response.status_mut() = refusal.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn body(refusal: &Refusal<'_>) -> String {
    let status = refusal.status;
    let (kind, title) = match status {
        StatusCode::TOO_MANY_REQUESTS => {
            ("https://iana.org/assignments/http-problem-types#quota-exceeded", "Quota Exceeded")
        }
        StatusCode::SERVICE_UNAVAILABLE => (
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
            "Temporary Reduced Capacity",
        ),
        // The status says it all, and so the title has to be its own.
        _ => ("about:blank", status.canonical_reason().unwrap_or_default()),
    };

    let mut json = String::with_capacity(320);
    for part in [
        r#"{"type":""#,
        kind,
        r#"","title":""#,
        title,
        r#"","status":"#,
        status.as_str(),
        r#","detail":"#,
    ] {
        json.push_str(part);
    }
    push_string(&mut json, &refusal.detail);
    if kind != "about:blank" {
        json.push_str(r#","violated-policies":["#);
        for (index, policy) in refusal.rejection.policies().enumerate() {
            if index > 0 {
                json.push(',');
            }
            push_string(&mut json, policy);
        }
        json.push(']');
    }
    json.push('}');
    json
}

fn push_string(json: &mut String, text: &str) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    json.push('"');
    let mut rest = text;
    while let Some(at) = rest.bytes().position(is_escaped) {
        let (plain, escaped) = rest.split_at(at);
        json.push_str(plain);
        let byte = escaped.as_bytes()[0];
        if byte < b' ' {
            json.push_str(r"\u00");
            json.push(char::from(HEX[usize::from(byte >> 4)]));
            json.push(char::from(HEX[usize::from(byte & 0xf)]));
        } else {
            json.push('\\');
            json.push(char::from(byte));
        }
        rest = &escaped[1..];
    }
    json.push_str(rest);
    json.push('"');
}

const fn is_escaped(byte: u8) -> bool {
    matches!(byte, b'"' | b'\\' | ..b' ')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_text_is_read_back_by_an_independent_parser(text in any::<String>()) {
            let mut json = String::new();
            push_string(&mut json, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }

        #[test]
        fn control_characters_are_read_back(text in "[\u{0}-\u{7f}]{0,20}") {
            let mut json = String::new();
            push_string(&mut json, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
    }
}
