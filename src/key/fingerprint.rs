//! Fingerprints: keyed hashes in place of keys.

use super::{Key, KeyError, KeyExtractor};
#[cfg(feature = "redis")]
use hmac::{Hmac, Mac};
#[cfg(feature = "redis")]
use sha2::Sha256;
use std::{
    borrow::Cow,
    hash::{BuildHasher, RandomState},
};
use xxhash_rust::xxh3::xxh3_128_with_secret;

/// All of a key that a store may know: 128 bits of a keyed hash. They are ordered like one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Fingerprint {
    pub(crate) upper: u64,
    pub(crate) lower: u64,
}

/// What makes the fingerprints of a stack its own: 128 bits, so that no two callers ever share a
/// budget by chance, under a secret, so that none can do so on purpose.
///
/// State that processes share needs fingerprints that they agree on; there the hash is SHA-256, under
/// a secret if they were given one.
pub(crate) enum Secret {
    Own(Box<[u8; 192]>),
    #[cfg(feature = "redis")]
    Shared(Box<Hmac<Sha256>>),
}

/// An extractor as a stack uses it. The key never leaves the function that makes and hashes it, so
/// that a request's key is not moved from place to place.
pub(crate) trait FindKey<R: ?Sized>: Send + Sync {
    fn find_key(&self, request: &R, secret: &Secret) -> Result<Fingerprint, KeyError>;

    fn name(&self) -> Option<Cow<'static, str>>;
}

impl<R: ?Sized, E: KeyExtractor<R>> FindKey<R> for E {
    fn find_key(&self, request: &R, secret: &Secret) -> Result<Fingerprint, KeyError> {
        match self.extract(request) {
            Ok(ref key) => Ok(secret.fingerprint(key)),
            Err(error) => Err(error),
        }
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        KeyExtractor::name(self)
    }
}

impl Secret {
    /// A secret that nobody can guess: the standard library seeds its hash tables from the system's
    /// random numbers, and SipHash spreads such a seed over as many bytes as are needed.
    pub(crate) fn random() -> Self {
        let random = RandomState::new();
        let mut secret = [0; 192];
        for (index, bytes) in secret.chunks_exact_mut(8).enumerate() {
            bytes.copy_from_slice(&random.hash_one(index).to_ne_bytes());
        }
        Self::Own(Box::new(secret))
    }

    /// The one that all processes with the same `key` have.
    #[cfg(feature = "redis")]
    pub(crate) fn shared(key: &[u8]) -> Self {
        let hmac = Hmac::new_from_slice(key).expect("HMAC takes keys of any length");
        Self::Shared(Box::new(hmac))
    }

    #[inline]
    pub(crate) fn fingerprint(&self, key: &Key) -> Fingerprint {
        let hash = match self {
            Self::Own(secret) => xxh3_128_with_secret(key.bytes(), &**secret),
            #[cfg(feature = "redis")]
            Self::Shared(hmac) => shared_hash(hmac, key.bytes()),
        };
        let mut fingerprint = Fingerprint::from(hash);
        if fingerprint == Fingerprint::NOBODY {
            fingerprint.lower = 1;
        }
        fingerprint
    }
}

#[cfg(feature = "redis")]
#[inline(never)]
fn shared_hash(hmac: &Hmac<Sha256>, bytes: &[u8]) -> u128 {
    let digest = hmac.clone().chain_update(bytes).finalize().into_bytes();
    digest.iter().take(16).fold(0, |hash, &byte| hash << 8 | u128::from(byte))
}

impl Fingerprint {
    /// No key has it.
    pub(crate) const NOBODY: Self = Self { upper: 0, lower: 0 };
}

impl From<u128> for Fingerprint {
    #[inline]
    fn from(hash: u128) -> Self {
        Self { upper: (hash >> 64) as u64, lower: hash as u64 }
    }
}
