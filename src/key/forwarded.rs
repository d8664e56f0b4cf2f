//! What proxies tell about the addresses in front of them, read from the right.
//!
//! Each proxy adds to the right end of a list, and whatever stands left of what a proxy added may
//! have been forged. So lists are taken apart from the right and only as far as they are asked
//! for: nothing that a client sends changes how the entries to its right are read, and a long
//! header costs no more than a short one.

use http::{
    HeaderMap, HeaderName, HeaderValue,
    header::{self, GetAll},
};
use std::{
    iter,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str,
};

/// What one entry says: the address that a proxy was called from, if it tells one. Entries that
/// are malformed, `unknown` or obfuscated tell none.
pub(super) type Hop = Option<IpAddr>;

/// Entries left of the last so many are never read.
const MAX_ENTRIES: usize = 32;

/// An entry longer than this many bytes tells no address. An `X-Forwarded-For` entry has at most
/// 53; an element of `Forwarded` may carry a host name of 253 and more.
const MAX_ENTRY_BYTES: usize = 1024;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const CLOUDFRONT_VIEWER_ADDRESS: HeaderName = HeaderName::from_static("cloudfront-viewer-address");

/// The hops of `X-Forwarded-For`, nearest first.
pub(super) fn x_forwarded_for(headers: &HeaderMap) -> impl Iterator<Item = Hop> {
    entries(headers.get_all(X_FORWARDED_FOR)).map(address)
}

/// The hops of `Forwarded` (RFC 7239), nearest first.
pub(super) fn forwarded(headers: &HeaderMap) -> impl Iterator<Item = Hop> {
    entries(headers.get_all(header::FORWARDED)).map(element)
}

/// The one hop of a header that holds one address.
pub(super) fn single(headers: &HeaderMap, name: &HeaderName) -> impl Iterator<Item = Hop> {
    only(headers.get_all(name), address)
}

/// The one hop of `CloudFront-Viewer-Address`.
pub(super) fn cloudfront(headers: &HeaderMap) -> impl Iterator<Item = Hop> {
    only(headers.get_all(CLOUDFRONT_VIEWER_ADDRESS), viewer)
}

// === lists ===

/// The entries of a list from the right. Its lines are one list (RFC 9110, section 5.3).
fn entries(lines: GetAll<'_, HeaderValue>) -> impl Iterator<Item = &[u8]> {
    lines.into_iter().rev().flat_map(|line| rsplit(line.as_bytes(), b',')).take(MAX_ENTRIES)
}

/// The hop of a header that must come in one line. Of several, none can be believed: the proxy
/// wrote one, and which one is unknowable.
fn only(lines: GetAll<'_, HeaderValue>, parse: impl Fn(&[u8]) -> Hop) -> impl Iterator<Item = Hop> {
    let mut lines = lines.into_iter();
    let first = lines.next();
    let hop = match lines.next() {
        None => first.map(|line| parse(line.as_bytes())),
        Some(_) => Some(None),
    };
    hop.into_iter()
}

/// The pieces of `text` between the delimiters outside quoted strings, from the right.
fn rsplit(text: &[u8], delimiter: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    iter::from_fn(move || {
        let text = rest.take()?;
        let Some(at) = rfind(text, delimiter) else {
            return Some(text);
        };
        rest = Some(&text[..at]);
        Some(&text[at + 1..])
    })
}

/// Where the last delimiter outside quoted strings is, unless more than [`MAX_ENTRY_BYTES`] follow
/// it.
///
/// Going left, a quote opens what ends there, and the next quote that is not escaped closes it. In
/// a well-formed list that finds the same strings as going right, because an opening quote follows
/// a `=` and so never looks escaped. In any other it still ends at the comma that a proxy put
/// before its own well-formed entry, whereas going right, one stray quote of the client's would
/// swallow that entry.
fn rfind(text: &[u8], delimiter: u8) -> Option<usize> {
    let start = text.len().saturating_sub(MAX_ENTRY_BYTES + 1);
    let near = &text[start..];
    let mut quoted = false;
    for (at, &byte) in near.iter().enumerate().rev() {
        if byte == b'"' {
            quoted = !quoted || is_escaped(&near[..at]);
        } else if byte == delimiter && !quoted {
            return Some(start + at);
        }
    }
    None
}

/// Whether the byte after `before`, inside a quoted string, is escaped.
fn is_escaped(before: &[u8]) -> bool {
    let backslashes = before.iter().rev().take_while(|&&byte| byte == b'\\');
    backslashes.count() % 2 == 1
}

// === entries ===

/// An address by itself or with a port: `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`,
/// `[2001:db8::1]`, `[2001:db8::1]:80`.
fn address(entry: &[u8]) -> Hop {
    let text = text(entry)?;
    match text.parse() {
        Ok(address) => Some(IpAddr::V6(address)),
        Err(_) => host(text, is_port),
    }
}

/// `192.0.2.1:80` or `2001:db8::1:80`: what follows the last colon is the port, always. Read as an
/// address, the whole of the latter would be a wrong one.
fn viewer(entry: &[u8]) -> Hop {
    let (address, port) = text(entry)?.rsplit_once(':')?;
    is_port(port).then(|| address.parse().ok())?
}

/// The address in the `for` of an element of `Forwarded`: `for=192.0.2.1`,
/// `for="192.0.2.1:80"`, `for="[2001:db8::1]:_port"`, with any other parameters around it.
fn element(element: &[u8]) -> Hop {
    if element.len() > MAX_ENTRY_BYTES {
        return None;
    }
    let mut node = None;
    for pair in rsplit(element, b';').map(<[u8]>::trim_ascii) {
        if pair.is_empty() {
            continue;
        }
        let equals = pair.iter().position(|&byte| byte == b'=')?;
        let (name, value) = (&pair[..equals], value(&pair[equals + 1..])?);
        if !is_token(name) {
            return None;
        }
        if name.eq_ignore_ascii_case(b"for") && node.replace(value).is_some() {
            return None;
        }
    }
    host(str::from_utf8(node?).ok()?, |port| is_port(port) || is_obfuscated(port))
}

/// What a token or a quoted string holds, its escapes as they are: no address has any.
fn value(text: &[u8]) -> Option<&[u8]> {
    if is_token(text) {
        return Some(text);
    }
    let inner = text.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    let mut escaped = false;
    for &byte in inner {
        if byte == b'"' && !escaped {
            return None;
        }
        escaped = byte == b'\\' && !escaped;
    }
    (!escaped).then_some(inner)
}

/// `192.0.2.1` or `[2001:db8::1]`, with or without a port.
fn host(text: &str, is_port: impl Fn(&str) -> bool) -> Hop {
    let (address, rest) = match text.strip_prefix('[') {
        Some(text) => {
            let (address, rest) = text.split_once(']')?;
            (address.parse::<Ipv6Addr>().ok()?.into(), rest)
        }
        None => {
            let (address, rest) = text.split_at(text.find(':').unwrap_or(text.len()));
            (address.parse::<Ipv4Addr>().ok()?.into(), rest)
        }
    };
    let valid = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
    valid.then_some(address)
}

/// An entry as text without the white space around it, if it is not too long to be one.
fn text(entry: &[u8]) -> Option<&str> {
    if entry.len() > MAX_ENTRY_BYTES {
        return None;
    }
    str::from_utf8(entry.trim_ascii()).ok()
}

fn is_port(text: &str) -> bool {
    text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok()
}

fn is_obfuscated(text: &str) -> bool {
    text.strip_prefix('_').is_some_and(|text| {
        !text.is_empty()
            && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    })
}

fn is_token(text: &[u8]) -> bool {
    !text.is_empty()
        && text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn headers(name: &HeaderName, lines: &[impl AsRef<[u8]>]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for line in lines {
            let line = HeaderValue::from_bytes(line.as_ref()).unwrap();
            headers.append(name, line);
        }
        headers
    }

    fn xff(lines: &[impl AsRef<[u8]>]) -> Vec<Hop> {
        x_forwarded_for(&headers(&X_FORWARDED_FOR, lines)).collect()
    }

    fn rfc7239(lines: &[impl AsRef<[u8]>]) -> Vec<Hop> {
        forwarded(&headers(&header::FORWARDED, lines)).collect()
    }

    fn ip(text: &str) -> Hop {
        Some(text.parse().unwrap())
    }

    #[test]
    fn all_lines_are_one_list_read_from_the_right() {
        let expected = [ip("192.0.2.4"), ip("192.0.2.3"), ip("192.0.2.2"), ip("192.0.2.1")];
        assert_eq!(xff(&["192.0.2.1, 192.0.2.2", "192.0.2.3,192.0.2.4"]), expected);
        assert_eq!(
            rfc7239(&["for=192.0.2.1, for=192.0.2.2", "for=192.0.2.3,for=192.0.2.4"]),
            expected,
        );
    }

    #[test]
    fn an_address_may_have_a_port() {
        for (entry, expected) in [
            ("192.0.2.1", ip("192.0.2.1")),
            (" \t192.0.2.1 ", ip("192.0.2.1")),
            ("192.0.2.1:0", ip("192.0.2.1")),
            ("192.0.2.1:65535", ip("192.0.2.1")),
            ("2001:db8::1", ip("2001:db8::1")),
            ("[2001:db8::1]", ip("2001:db8::1")),
            ("[2001:db8::1]:443", ip("2001:db8::1")),
            ("::ffff:192.0.2.1", ip("::ffff:192.0.2.1")),
        ] {
            assert_eq!(address(entry.as_bytes()), expected, "{entry}");
        }
    }

    #[test]
    fn what_is_no_address_is_not_guessed_at() {
        for entry in [
            "",
            " ",
            "unknown",
            "_hidden",
            "localhost",
            "unix:",
            "192.0.2",
            "192.0.2.1.1",
            "192.0.2.01",
            "192.0.2.256",
            "192.0.2.1/32",
            "192.0.2.1:",
            "192.0.2.1:65536",
            "192.0.2.1:000000",
            "192.0.2.1:+443",
            "192.0.2.1:-1",
            "192.0.2.1:_port",
            "192.0.2.1 :80",
            "192.0.2.1 192.0.2.2",
            "\"192.0.2.1\"",
            "[192.0.2.1]",
            "[2001:db8::1",
            "2001:db8::1]",
            "[2001:db8::1]443",
            "[2001:db8::1]:",
            "[2001:db8::1]:+443",
            "[[2001:db8::1]]",
            "fe80::1%eth0",
            "[fe80::1%25eth0]",
            "2001:db8::g",
        ] {
            assert_eq!(address(entry.as_bytes()), None, "{entry}");
        }
        assert_eq!(address(b"192.0.2.1\xff"), None);
    }

    #[test]
    fn an_element_tells_the_address_in_its_for() {
        for (text, expected) in [
            ("for=192.0.2.43", ip("192.0.2.43")),
            ("For=192.0.2.43", ip("192.0.2.43")),
            ("for=\"192.0.2.43:47011\"", ip("192.0.2.43")),
            ("for=\"192.0.2.43:_x.y-z\"", ip("192.0.2.43")),
            ("for=\"[2001:db8:cafe::17]\"", ip("2001:db8:cafe::17")),
            ("FOR=\"[2001:db8:cafe::17]:4711\"", ip("2001:db8:cafe::17")),
            ("for=192.0.2.60;proto=http;by=203.0.113.43", ip("192.0.2.60")),
            ("proto=http; by=203.0.113.43 ; for=192.0.2.60;", ip("192.0.2.60")),
            ("host=\"a;for=6.6.6.6,\\\"\";for=192.0.2.60", ip("192.0.2.60")),
            ("for=192.0.2.60;host=\"\\\\\"", ip("192.0.2.60")),
        ] {
            assert_eq!(element(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn a_malformed_unknown_or_obfuscated_element_tells_none() {
        for text in [
            "",
            ";",
            "proto=https",
            "for",
            "for=",
            "=192.0.2.1",
            "for =192.0.2.1",
            "for= 192.0.2.1",
            "for=unknown",
            "for=\"unknown:80\"",
            "for=_hidden",
            "for=\"_hidden:80\"",
            "for=192.0.2.1:80",
            "for=2001:db8::1",
            "for=[2001:db8::1]",
            "for=\"2001:db8::1\"",
            "for=\"192.0.2.1:\"",
            "for=\"192.0.2.1:_\"",
            "for=\" 192.0.2.1\"",
            "for=\"192.0.2.1:+443\"",
            "for=\"192.0.2.1:000000\"",
            "for=\"192.0.2.1",
            "for=192.0.2.1\"",
            "for=\"192.0.2.1\"\"",
            "for=\"192.0.2.1\\\"",
            "for=\"\\192.0.2.1\"",
            "for=192.0.2.1;for=192.0.2.2",
            "for=192.0.2.1;FOR=192.0.2.1",
            "for=192.0.2.1;proto",
            "for=192.0.2.1;pro to=http",
            "for=192.0.2.1;proto=ht tp",
            "for=192.0.2.1;host=\"a\"\"b\"",
            "host=\"a\\\";for=192.0.2.1",
        ] {
            assert_eq!(element(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn commas_and_semicolons_inside_quotes_do_not_split() {
        assert_eq!(
            rfc7239(&[
                r#"for="_a,b;for=6.6.6.6", for=192.0.2.1;host="x, for=6.6.6.6", for=192.0.2.2;host="\", for=6.6.6.6, \\""#
            ]),
            [ip("192.0.2.2"), ip("192.0.2.1"), None],
        );
    }

    #[test]
    fn a_quote_that_the_client_left_open_swallows_nothing() {
        for forged in ["for=\"", "for=\"6.6.6.6", "\"", "\\", "for=\"a\\", "\"\\\""] {
            for told in ["for=192.0.2.1", "for=\"192.0.2.1:80\"", "host=\",\";for=192.0.2.1"] {
                let line = format!("{forged}, {told}");
                assert_eq!(rfc7239(&[&line])[0], ip("192.0.2.1"), "{line}");
            }
        }
    }

    #[test]
    fn an_empty_line_is_an_entry_that_tells_nothing() {
        assert_eq!(xff(&["6.6.6.6", "", "192.0.2.1"]), [ip("192.0.2.1"), None, ip("6.6.6.6")]);
    }

    #[test]
    fn no_more_than_the_last_entries_are_read() {
        let mut entries = vec!["6.6.6.6"; 10_000];
        assert_eq!(xff(&[entries.join(",")]).len(), MAX_ENTRIES);
        entries.truncate(MAX_ENTRIES + 1);
        assert_eq!(xff(&entries).len(), MAX_ENTRIES);
    }

    #[test]
    fn an_entry_of_great_length_tells_nothing() {
        let pad = " ".repeat(MAX_ENTRY_BYTES - "192.0.2.1".len());
        assert_eq!(xff(&[format!("6.6.6.6,{pad}192.0.2.1")])[0], ip("192.0.2.1"));
        assert_eq!(xff(&[format!("6.6.6.6, {pad}192.0.2.1")])[0], None);
        assert_eq!(xff(&[format!("x{pad}192.0.2.1")])[0], None);

        let pad = "x".repeat(MAX_ENTRY_BYTES - "for=192.0.2.1;a=".len());
        assert_eq!(rfc7239(&[format!(",for=192.0.2.1;a={pad}")])[0], ip("192.0.2.1"));
        assert_eq!(rfc7239(&[format!(",for=192.0.2.1;a={pad}x")])[0], None);

        for byte in [" ", "\"", "\\", "x", "[", ";"] {
            let line = byte.repeat(64 * 1024);
            assert_eq!(xff(&[&line])[0], None);
            assert_eq!(rfc7239(&[&line])[0], None);
        }
    }

    #[test]
    fn a_single_value_comes_in_one_line_with_one_address() {
        let name = HeaderName::from_static("x-real-ip");
        let hops = |lines: &[&str]| single(&headers(&name, lines), &name).collect::<Vec<_>>();
        assert_eq!(hops(&[]), []);
        assert_eq!(hops(&["192.0.2.1"]), [ip("192.0.2.1")]);
        assert_eq!(hops(&["[2001:db8::1]:80"]), [ip("2001:db8::1")]);
        assert_eq!(hops(&["192.0.2.1, 192.0.2.2"]), [None]);
        assert_eq!(hops(&["192.0.2.1", "192.0.2.1"]), [None]);
        assert_eq!(hops(&[""]), [None]);
    }

    #[test]
    fn the_port_of_a_cloudfront_viewer_is_no_part_of_its_address() {
        for (value, expected) in [
            ("192.0.2.1:80", ip("192.0.2.1")),
            ("2001:db8::1:80", ip("2001:db8::1")),
            ("2001:0db8:0:0:0:0:0:1:443", ip("2001:db8::1")),
            ("192.0.2.1", None),
            ("2001:db8::1:", None),
            ("2001:db8::1:abcd", None),
            ("2001:db8::1:65536", None),
            ("[2001:db8::1]:80", None),
            ("192.0.2.1:80, 192.0.2.1:80", None),
        ] {
            let headers = headers(&CLOUDFRONT_VIEWER_ADDRESS, &[value]);
            assert_eq!(cloudfront(&headers).collect::<Vec<_>>(), [expected], "{value}");
        }
    }

    // === properties ===

    /// What a proxy may write into `Forwarded`, and what it tells.
    fn well_formed_element() -> impl Strategy<Value = (String, Hop)> {
        let v4 = any::<Ipv4Addr>().prop_map(|ip| (ip.to_string(), Some(IpAddr::V4(ip))));
        let v6 = any::<Ipv6Addr>().prop_map(|ip| (format!("[{ip}]"), Some(IpAddr::V6(ip))));
        let hidden = "unknown|_[a-zA-Z0-9._-]{1,6}".prop_map(|name| (name, None));
        let port = "|:[0-9]{1,4}|:_[a-zA-Z0-9._-]{1,6}";
        let node = (prop_oneof![v4, v6, hidden], port, any::<bool>()).prop_map(
            |((name, hop), port, quoted)| {
                let node = name + &port;
                let pair = if quoted || !is_token(node.as_bytes()) {
                    format!("for=\"{node}\"")
                } else {
                    format!("For={node}")
                };
                (pair, hop)
            },
        );
        // Names that are not `for`, and values with all that could confuse a splitter.
        let quoted = proptest::collection::vec("[a-z,;= ]|\\\\\\\\|\\\\\"|for=6\\.6\\.6\\.6", 0..6)
            .prop_map(|parts| format!("\"{}\"", parts.concat()));
        let other = ("host|by|[a-e]{1,3}", prop_oneof!["[a-z0-9.]{1,6}".boxed(), quoted.boxed()])
            .prop_map(|(name, value)| format!("{name}={value}"));
        let others = || proptest::collection::vec(other.clone(), 0..3);
        (others(), node, others()).prop_map(|(mut pairs, (node, hop), after)| {
            pairs.push(node);
            pairs.extend(after);
            (pairs.join(";"), hop)
        })
    }

    fn well_formed_entry() -> impl Strategy<Value = (String, Hop)> {
        prop_oneof![
            (any::<Ipv4Addr>(), "|:[0-9]{1,4}")
                .prop_map(|(ip, port)| (format!("{ip}{port}"), Some(IpAddr::V4(ip)))),
            (any::<Ipv6Addr>(), "|:[0-9]{1,4}")
                .prop_map(|(ip, port)| (format!("[{ip}]{port}"), Some(IpAddr::V6(ip)))),
            any::<Ipv6Addr>().prop_map(|ip| (ip.to_string(), Some(IpAddr::V6(ip)))),
            "unknown|_[a-z]{1,4}".prop_map(|name| (name, None)),
        ]
    }

    /// Well-formed entries in one or more lines, and their hops from the right.
    fn list(
        entry: impl Strategy<Value = (String, Hop)> + 'static,
    ) -> impl Strategy<Value = (Vec<String>, Vec<Hop>)> {
        let separator = prop_oneof![Just(","), Just(", "), Just(" ,\t"), Just("\n")];
        let entry = entry.boxed();
        let more = proptest::collection::vec((separator, entry.clone()), 0..8);
        (entry, more).prop_map(|((mut text, first), more)| {
            let mut hops = vec![first];
            for (separator, (entry, hop)) in more {
                text = text + separator + &entry;
                hops.insert(0, hop);
            }
            (text.split('\n').map(String::from).collect(), hops)
        })
    }

    /// Anything that a field value can hold, mostly what the parsers care about.
    fn noise() -> impl Strategy<Value = Vec<u8>> {
        let byte = prop_oneof![
            proptest::sample::select(b"\"\\,;=[]:._ for192".to_vec()),
            any::<u8>().prop_filter("not in a field value", |byte| *byte >= 32 && *byte != 127),
        ];
        proptest::collection::vec(byte, 0..40)
    }

    /// The obvious way to split, from the left.
    fn split(text: &str, delimiter: char) -> Vec<String> {
        let mut pieces = vec![String::new()];
        let (mut quoted, mut escaped) = (false, false);
        for letter in text.chars() {
            if letter == delimiter && !quoted {
                pieces.push(String::new());
                continue;
            }
            if letter == '"' && !escaped {
                quoted = !quoted;
            }
            escaped = letter == '\\' && !escaped;
            pieces.last_mut().unwrap().push(letter);
        }
        pieces
    }

    proptest! {
        #[test]
        fn a_printed_list_of_addresses_is_read_back((lines, hops) in list(well_formed_entry())) {
            prop_assert_eq!(xff(&lines), hops);
        }

        #[test]
        fn a_printed_list_of_elements_is_read_back((lines, hops) in list(well_formed_element())) {
            prop_assert_eq!(rfc7239(&lines), hops);
        }

        #[test]
        fn right_to_left_finds_what_left_to_right_does((lines, _) in list(well_formed_element())) {
            for line in lines {
                for delimiter in [',', ';'] {
                    let mut pieces = rsplit(line.as_bytes(), delimiter as u8)
                        .map(|piece| String::from_utf8(piece.to_vec()).unwrap())
                        .collect::<Vec<_>>();
                    pieces.reverse();
                    prop_assert_eq!(pieces, split(&line, delimiter));
                }
            }
        }

        #[test]
        fn what_a_proxy_adds_is_read_whatever_stands_left_of_it(
            forged in noise(),
            (entry, entry_hop) in well_formed_entry(),
            (element, element_hop) in well_formed_element(),
        ) {
            let after = |entry: String| [&forged, b", ".as_slice(), entry.as_bytes()].concat();
            prop_assert_eq!(xff(&[after(entry)])[0], entry_hop);
            prop_assert_eq!(rfc7239(&[after(element)])[0], element_hop);
        }

        #[test]
        fn nothing_panics(value in proptest::collection::vec(any::<u8>(), 0..100), noise in noise()) {
            for value in [&value, &noise] {
                address(value);
                viewer(value);
                element(value);
                rsplit(value, b',').for_each(|entry| { element(entry); });
            }
        }
    }
}
