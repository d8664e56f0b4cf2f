//! Who is counted: keys, and the extractors that find them in a request.
//!
//! | extractor | the key |
//! |---|---|
//! | [`PeerIp`] | the address at the other end of the connection |
//! | [`ClientIp`] | the client's address behind proxies that you name |
//! | [`Header`], [`BearerToken`] | a header's value, a bearer token |
//! | [`Method`], [`Path`] | parts of the request line |
#![cfg_attr(feature = "axum", doc = "| [`RoutePath`] | the route that axum matched |")]
//! | [`Extension`] | a value that an earlier layer put into the request extensions |
//! | [`Global`] | one key for everybody |
//! | a tuple of extractors | all of their keys together |
//! | a closure | whatever you make of the request |
//!
//! A closure takes a reference to the request (the [`Parts`](http::request::Parts) of an HTTP
//! request) and returns anything that is [`IntoKey`]; `None` means that this request has no key.
//! What is borrowed from the request has to become a [`Key`] first:
//!
//! ```
//! use http::request::Parts;
//! use tollgate::{Policy, Quota, key::Key};
//!
//! let policy = Policy::token_bucket("per-tenant", Quota::per_second(10))
//!     .key(|parts: &Parts| parts.uri.host().map(Key::from));
//! # let _: Policy = policy;
//! ```

mod address;
mod combine;
mod extract;
mod fingerprint;
mod forwarded;
mod header;
mod path;

pub use address::{ClientIp, Networks, NetworksError, PeerAddr, PeerIp};
pub use combine::{Extension, Global};
pub use extract::{KeyError, KeyErrorKind, KeyExtractor, MissingKey};
pub(crate) use fingerprint::{FindKey, Fingerprint, Secret};
pub use header::{BearerToken, Header};
#[cfg(feature = "axum")]
pub use path::RoutePath;
pub use path::{Method, Path};

use http::HeaderValue;
use smallvec::SmallVec;
use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// Who is counted. Two keys are equal exactly when they were made from equal values of the same
/// kind, whatever bytes those hold: `("a:b", "c")`, `("a", "b:c")` and `"a:b:c"` are three keys.
///
/// A key may hold a secret, so its [`Debug`] form tells only its length, and stores see only a
/// keyed hash of it.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Encoding);

/// What a key is made from, in a form to be compared and hashed.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Encoding {
    /// A word with the tag and the length, then the bytes, and zeros behind them. They are written
    /// and read as whole words, for a processor waits where it reads across what it just wrote.
    Short(Words),
    /// The tag with a mark, then more bytes than a short key has room for.
    Long(Box<[u8]>),
}

#[repr(align(8))]
#[derive(Clone, PartialEq, Eq, Hash)]
struct Words([[u8; 8]; WORDS]);

/// What marks the tag of a long key, which otherwise could be made to look like a short one.
const LONG: u8 = 0x80;

/// The words of a short key.
const WORDS: usize = 1 + SHORT / 8;

/// Keys of up to this many bytes need no allocation.
const SHORT: usize = 48;

/// What a key is made from; the first byte of its encoding.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Tag {
    Bytes = 1,
    Text = 2,
    Number = 3,
    V4 = 4,
    V6 = 5,
    Tuple = 6,
    Missing = 7,
    Wide = 8,
    Bool = 9,
}

impl Key {
    /// The key that requests without one share, where a policy says so. No value makes it.
    pub(crate) fn missing() -> Self {
        Self::new(Tag::Missing, &[])
    }

    /// A key of several keys, in order.
    #[must_use]
    pub fn tuple<I>(parts: I) -> Self
    where
        I: IntoIterator<Item = Self>,
        I::IntoIter: ExactSizeIterator,
    {
        let parts = parts.into_iter();
        let mut encoded = Bytes::new();
        push_length(&mut encoded, parts.len());
        for part in parts {
            part.encode(&mut encoded);
        }
        Self::new(Tag::Tuple, &encoded)
    }

    #[inline]
    fn new(tag: Tag, bytes: &[u8]) -> Self {
        if bytes.len() > SHORT {
            return Self(Encoding::Long(long(tag, bytes)));
        }
        let head = u64::from(tag as u8) | (bytes.len() as u64) << 8;
        let nth = |index| nth_word(bytes, index);
        // Not in a loop, so that they need not be in memory before they are where the key is to be.
        let [fourth, fifth, sixth] =
            if bytes.len() > 24 { [nth(3), nth(4), nth(5)] } else { [0; 3] };
        let words = [head, nth(0), nth(1), nth(2), fourth, fifth, sixth];
        Self(Encoding::Short(Words(words.map(u64::to_le_bytes))))
    }

    /// The bytes to be hashed; no two keys have the same.
    #[inline]
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.0 {
            Encoding::Short(Words(words)) => words[..1 + self.len().div_ceil(8)].as_flattened(),
            Encoding::Long(bytes) => bytes,
        }
    }

    /// Appends an encoding that tells where it ends, so that none is a prefix of another: the tag,
    /// the length, and the bytes.
    fn encode(&self, out: &mut Bytes) {
        let mut append = |tag, bytes: &[u8]| {
            out.push(tag);
            push_length(out, bytes.len());
            out.extend_from_slice(bytes);
        };
        match &self.0 {
            Encoding::Short(Words(words)) => {
                append(words[0][0], &words[1..].as_flattened()[..self.len()])
            }
            Encoding::Long(bytes) => append(bytes[0], &bytes[1..]),
        }
    }

    /// The number of bytes that it was made from.
    fn len(&self) -> usize {
        match &self.0 {
            Encoding::Short(Words(words)) => words[0][1].into(),
            Encoding::Long(bytes) => bytes.len() - 1,
        }
    }
}

/// The encoding of a long key. Not the key itself, which then would have to be in memory already.
#[cold]
fn long(tag: Tag, bytes: &[u8]) -> Box<[u8]> {
    [&[tag as u8 | LONG], bytes].concat().into()
}

type Bytes = SmallVec<[u8; SHORT]>;

/// Eight bytes as a word, with zeros in place of those beyond the end.
#[inline]
fn nth_word(bytes: &[u8], index: usize) -> u64 {
    let rest = bytes.get(8 * index..).unwrap_or_default();
    if let Some(word) = rest.first_chunk() {
        return u64::from_le_bytes(*word);
    }
    match bytes.last_chunk() {
        // The end of a longer text is read in one piece with what is before it.
        Some(last) if !rest.is_empty() => u64::from_le_bytes(*last) >> (8 * (8 - rest.len())),
        _ => rest.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)),
    }
}

/// Appends a length in seven bits a byte, lowest first; the eighth bit says that more follow.
fn push_length(out: &mut Bytes, mut length: usize) {
    while length >= 0x80 {
        out.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl From<&str> for Key {
    #[inline]
    fn from(text: &str) -> Self {
        Self::new(Tag::Text, text.as_bytes())
    }
}

impl From<&String> for Key {
    #[inline]
    fn from(text: &String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<String> for Key {
    #[inline]
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<&[u8]> for Key {
    #[inline]
    fn from(bytes: &[u8]) -> Self {
        Self::new(Tag::Bytes, bytes)
    }
}

impl From<&HeaderValue> for Key {
    fn from(value: &HeaderValue) -> Self {
        Self::from(value.as_bytes())
    }
}

impl<const N: usize> From<[u8; N]> for Key {
    #[inline]
    fn from(bytes: [u8; N]) -> Self {
        Self::new(Tag::Bytes, &bytes)
    }
}

impl From<u64> for Key {
    #[inline]
    fn from(number: u64) -> Self {
        Self::new(Tag::Number, &number.to_be_bytes())
    }
}

impl From<u32> for Key {
    #[inline]
    fn from(number: u32) -> Self {
        Self::from(u64::from(number))
    }
}

/// For identifiers of 128 bits, such as UUIDs.
impl From<u128> for Key {
    #[inline]
    fn from(number: u128) -> Self {
        Self::new(Tag::Wide, &number.to_be_bytes())
    }
}

impl From<bool> for Key {
    #[inline]
    fn from(value: bool) -> Self {
        Self::new(Tag::Bool, &[u8::from(value)])
    }
}

impl From<Ipv4Addr> for Key {
    #[inline]
    fn from(address: Ipv4Addr) -> Self {
        Self::new(Tag::V4, &address.octets())
    }
}

impl From<Ipv6Addr> for Key {
    #[inline]
    fn from(address: Ipv6Addr) -> Self {
        Self::new(Tag::V6, &address.octets())
    }
}

/// An IPv6 address that maps an IPv4 one is that IPv4 address.
impl From<IpAddr> for Key {
    #[inline]
    fn from(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::from(address),
            IpAddr::V6(address) => Self::from(address),
        }
    }
}

/// What a key closure may return: a [`Key`], anything a key is made from, a tuple of up to four
/// such values, or an `Option` or `Result` of one.
pub trait IntoKey {
    /// The key, or why there is none.
    ///
    /// # Errors
    ///
    /// [`KeyError`] where the value stands for no key.
    fn into_key(self) -> Result<Key, KeyError>;
}

impl IntoKey for Key {
    #[inline]
    fn into_key(self) -> Result<Key, KeyError> {
        Ok(self)
    }
}

impl<T: IntoKey> IntoKey for Option<T> {
    #[inline]
    fn into_key(self) -> Result<Key, KeyError> {
        self.ok_or_else(|| KeyError::missing("the key function found no key in the request"))?
            .into_key()
    }
}

impl<T: IntoKey> IntoKey for Result<T, KeyError> {
    #[inline]
    fn into_key(self) -> Result<Key, KeyError> {
        self?.into_key()
    }
}

macro_rules! into_key_from {
    ($($source:ty),*) => {$(
        impl IntoKey for $source {
            #[inline]
            fn into_key(self) -> Result<Key, KeyError> {
                Ok(Key::from(self))
            }
        }
    )*};
}

into_key_from!(&str, &String, String, &[u8], u32, u64, u128, bool, Ipv4Addr, Ipv6Addr, IpAddr);

macro_rules! into_key_tuple {
    ($($name:ident)*) => {
        impl<$($name: IntoKey),*> IntoKey for ($($name,)*) {
            #[expect(non_snake_case, reason = "the variables are named after their types")]
            #[inline]
            fn into_key(self) -> Result<Key, KeyError> {
                let ($($name,)*) = self;
                Ok(Key::tuple([$($name.into_key()?),*]))
            }
        }
    };
}

into_key_tuple!(A B);
into_key_tuple!(A B C);
into_key_tuple!(A B C D);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The values that keys are made from, to compare with the keys.
    #[derive(Clone, Debug, PartialEq)]
    enum Value {
        Text(String),
        Bytes(Vec<u8>),
        Number(u64),
        Wide(u128),
        Bool(bool),
        V4(Ipv4Addr),
        V6(Ipv6Addr),
        Tuple(Vec<Self>),
    }

    impl Value {
        fn key(&self) -> Key {
            match self {
                Self::Text(text) => Key::from(text),
                Self::Bytes(bytes) => Key::from(bytes.as_slice()),
                Self::Number(number) => Key::from(*number),
                Self::Wide(number) => Key::from(*number),
                Self::Bool(value) => Key::from(*value),
                Self::V4(address) => Key::from(*address),
                Self::V6(address) => Key::from(*address),
                Self::Tuple(parts) => Key::tuple(parts.iter().map(Self::key).collect::<Vec<_>>()),
            }
        }
    }

    fn value() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            "[a-c:/|%\u{0}\u{1}\u{2}]{0,4}".prop_map(Value::Text),
            proptest::collection::vec(0_u8..10, 0..4).prop_map(Value::Bytes),
            (0_u64..4).prop_map(Value::Number),
            (0_u128..4).prop_map(Value::Wide),
            any::<bool>().prop_map(Value::Bool),
            (0_u32..4).prop_map(|bits| Value::V4(bits.into())),
            (0_u128..4).prop_map(|bits| Value::V6(bits.into())),
        ];
        leaf.prop_recursive(3, 12, 4, |inner| {
            proptest::collection::vec(inner, 0..4).prop_map(Value::Tuple)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4_000))]

        #[test]
        fn keys_are_equal_exactly_when_their_values_are(a in value(), b in value()) {
            prop_assert_eq!(a == b, a.key() == b.key(), "{:?} {:?}", a, b);
        }

        #[test]
        fn no_encoding_is_a_prefix_of_another(a in value(), b in value()) {
            let encoding = |value: &Value| {
                let mut encoding = Bytes::new();
                value.key().encode(&mut encoding);
                encoding
            };
            prop_assert!(a == b || !encoding(&a).starts_with(&encoding(&b)));
        }
    }

    #[test]
    fn a_long_key_does_not_pass_for_a_short_one() {
        let short = Key::from("abcde");
        let look_alike = short.bytes()[1..].to_vec();
        let long = Key::from(String::from_utf8(look_alike).unwrap());
        assert_ne!(short, long);
        assert_ne!(short.bytes(), long.bytes());
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        for separator in [":", "|", "/", "%3A", "", "\0"] {
            let left = (format!("/a{separator}b").as_str(), "c").into_key();
            let right = ("/a", format!("b{separator}c").as_str()).into_key();
            assert_ne!(left.unwrap(), right.unwrap(), "{separator:?}");
        }
    }

    #[test]
    fn long_values_are_told_apart_by_their_last_byte() {
        let long = "x".repeat(4_096);
        assert_ne!(Key::from(format!("{long}a")), Key::from(format!("{long}b")));
        assert_ne!(Key::from(long.as_str()), Key::from(long.as_bytes()));
    }

    #[test]
    fn a_mapped_address_is_the_address_it_maps() {
        let mapped: IpAddr = "::ffff:192.0.2.1".parse().unwrap();
        let plain: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(Key::from(mapped), Key::from(plain));
    }

    #[test]
    fn the_debug_form_keeps_the_secret() {
        let debug = format!("{:?}", Key::from("sk_live_SECRET"));
        assert!(!debug.contains("SECRET"), "{debug}");
    }
}
