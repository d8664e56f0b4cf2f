//! Several independent primaries, each with its part of the keys.

use super::{ConfigError, node::Node};
use crate::key::Fingerprint;
use std::{fmt, sync::Arc};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Keys are given out by rendezvous hashing: each is on the shard that has the highest score for it. A
/// shard that is added takes what it has the highest score for, and nothing else moves.
pub(super) struct Shards {
    names: Box<[Name]>,
    nodes: Box<[Arc<Node>]>,
}

struct Name {
    text: String,
    hash: u64,
}

impl Shards {
    pub(super) fn new(shards: Vec<(String, Arc<Node>)>) -> Result<Self, ConfigError> {
        let (mut names, mut nodes) = (Vec::<Name>::new(), Vec::new());
        for (text, node) in shards {
            let name = Name { hash: xxh3_64(text.as_bytes()), text };
            if names.iter().any(|other| other.hash == name.hash) {
                let message = format!("two of them are named `{}`", name.text.escape_debug());
                return Err(ConfigError::Shards { message });
            }
            names.push(name);
            nodes.push(node);
        }
        Ok(Self { names: names.into(), nodes: nodes.into() })
    }

    pub(super) fn index_of(&self, fingerprint: Fingerprint) -> usize {
        let Fingerprint { upper, lower } = fingerprint;
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&upper.to_le_bytes());
        bytes[8..].copy_from_slice(&lower.to_le_bytes());
        let scores = self.names.iter().map(|name| xxh3_64_with_seed(&bytes, name.hash));
        let best = scores.enumerate().max_by_key(|(_, score)| *score);
        best.map_or(0, |(index, _)| index)
    }

    pub(super) fn node(&self, index: usize) -> &Arc<Node> {
        &self.nodes[index]
    }

    pub(super) fn nodes(&self) -> Vec<(String, Arc<Node>)> {
        let named = self.names.iter().zip(&self.nodes);
        named.map(|(name, node)| (name.text.clone(), node.clone())).collect()
    }
}

impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = self.names.iter().map(|name| &name.text).zip(&self.nodes);
        f.debug_map().entries(named).finish()
    }
}
