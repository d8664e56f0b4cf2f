//! Requests and rules as the scripts read them, and what the scripts tell as it is read here.

use crate::{algorithm::Terms, key::Fingerprint, store::Rule};
use redis::{Cmd, Value};
use sha2::{Digest, Sha256};
use smallvec::SmallVec;
use std::{array, collections::HashMap, io::Write, sync::Arc};

/// A rule in the form that the scripts read. Clones are cheap, and equal ones go into a batch once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CodedRule {
    bytes: Arc<[u8]>,
    policy: PolicyId,
    /// How many numbers are told of its states.
    told: usize,
    keeps_ring: bool,
    /// Whether it is a bucket with terms in short, as `decide_buckets.lua` has them.
    is_short: bool,
}

/// What stands for the name of a policy in its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PolicyId([u8; 2]);

/// One request, as a lane carries it.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    /// What the names of all its keys begin with.
    pub(crate) prefix: Arc<str>,
    pub(crate) charges: SmallVec<[AskedCharge; 3]>,
    pub(crate) purpose: Purpose,
    /// Who is to hold the slots that it asks for.
    pub(super) lease: Option<LeaseId>,
    /// Leases of the same slots that are to end before, each with the index of the charge.
    pub(super) ended: Vec<(usize, LeaseId, u64)>,
}

/// What a request is sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To be charged if there is room for all of it.
    Charge,
    /// To be told what would come of that.
    Peek,
    /// To have counted what was admitted already. That is for buckets and windows only.
    Count,
}

/// 128 random bits.
pub(super) type LeaseId = [u8; 16];

/// The slots of one key by one policy, as a set on the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SlotSet {
    fingerprint: Fingerprint,
    policy: PolicyId,
}

impl SlotSet {
    /// The slot of a cluster that it is in.
    pub(super) fn place(&self) -> u16 {
        slot_of(self.fingerprint)
    }
}

/// How many slots of a set are held on a lease.
pub(super) type HeldSlots = (SlotSet, u64);

#[derive(Clone, Debug)]
pub(crate) struct AskedCharge {
    pub(crate) fingerprint: Fingerprint,
    pub(crate) rule: CodedRule,
    pub(crate) cost: u64,
}

/// What a script told about one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) time_us: u64,
    pub(crate) admitted: bool,
    /// The numbers of each charge's state before it, in the order of the charges. Behind the only one of a
    /// bucket that was charged is its mark, if it counts: how many drops were given back, and how long a
    /// full bucket takes to drain.
    pub(crate) states: SmallVec<[[u64; 3]; 3]>,
}

/// Whole numbers in the scripts' arguments and replies: seven bytes, little-endian.
const NUMBER: usize = 7;

/// The largest cost that is sent: more than any capacity.
const MOST: u64 = 1 << 53;

/// Larger costs do not fit into the byte that most have.
const LARGE_COST: u8 = 255;

/// With more requests than these for each identity, the short way is the longer one: it reads and writes an
/// identity's string for each of them.
const CROWD: usize = 6;

/// What marks a request that only asks.
const PEEKS: u16 = 0x8000;

/// The most slots that a request can hold on a lease: each is a member of the set.
pub(crate) const MOST_LEASED: u64 = 10_000;

/// What marks a request that asks for slots.
const LEASES: u16 = 0x4000;

/// What marks a request that was admitted already.
const COUNTS: u16 = 0x2000;

impl Ask {
    pub(crate) fn new(
        prefix: Arc<str>,
        charges: SmallVec<[AskedCharge; 3]>,
        purpose: Purpose,
    ) -> Self {
        Self { prefix, charges, purpose, lease: None, ended: Vec::new() }
    }

    /// How much it gives the server to do, as charges and members of sets.
    pub(super) fn weight(&self) -> usize {
        let slots = self.slots().map(|(_, (_, slots))| slots as usize).sum::<usize>();
        self.charges.len() + slots
    }

    /// The slot of a cluster that all of it is in.
    pub(super) fn slot(&self) -> u16 {
        self.charges.first().map_or(0, |charge| slot_of(charge.fingerprint))
    }

    /// The slots that it asks for, each with the index of the charge.
    pub(super) fn slots(&self) -> impl Iterator<Item = (usize, HeldSlots)> {
        let charges = self.charges.iter().enumerate();
        let is_leased = |charge: &AskedCharge| {
            charge.rule.bytes[0] == SLOTS && (1..=MOST_LEASED).contains(&charge.cost)
        };
        charges.filter(move |(_, charge)| is_leased(charge)).map(|(index, charge)| {
            let AskedCharge { fingerprint, rule, cost } = charge;
            let set = SlotSet { fingerprint: *fingerprint, policy: rule.policy };
            (index, (set, *cost))
        })
    }
}

impl PolicyId {
    /// Policies of one name but different algorithms have different states.
    pub(crate) fn new(name: &str, rule: &Rule) -> Self {
        Self::hash(name, kind(rule))
    }

    pub(crate) fn of_slots(name: &str) -> Self {
        Self::hash(name, SLOTS)
    }

    fn hash(name: &str, kind: u8) -> Self {
        let digest = Sha256::new().chain_update([kind]).chain_update(name).finalize();
        Self([digest[0], digest[1]])
    }
}

impl CodedRule {
    pub(crate) fn new(policy: PolicyId, rule: &Rule) -> Self {
        let Record { code, terms, format, length } = Record::of(rule);
        let mut bytes = vec![kind(rule)];
        bytes.extend(policy.0);
        bytes.push(code);
        rule.numbers().iter().for_each(|&number| push_number(&mut bytes, number));
        for text in [&terms[..], format.as_bytes()] {
            bytes.push(text.len() as u8);
            bytes.extend(text);
        }
        bytes.push(length as u8);
        let told = match rule {
            Rule::Meter(_) => 1,
            Rule::FixedWindow(_) => 2,
            Rule::SlidingWindow(_) | Rule::SlidingLog(_) => 3,
        };
        let keeps_ring = matches!(rule, Rule::SlidingLog(_));
        Self { bytes: bytes.into(), policy, told, keeps_ring, is_short: code < 4 }
    }

    /// The rule of a limit of so many slots, each on a lease of that length.
    pub(crate) fn of_slots(policy: PolicyId, limit: u64, lease_us: u64) -> Self {
        let mut bytes = vec![SLOTS];
        bytes.extend(policy.0);
        bytes.push(0);
        [limit, lease_us, 0, 0, 0, 0].iter().for_each(|&number| push_number(&mut bytes, number));
        // It has no records.
        bytes.extend([0, 0, 0]);
        Self { bytes: bytes.into(), policy, told: 1, keeps_ring: true, is_short: false }
    }
}

/// The index of the algorithm's table in `identity.lua`.
const fn kind(rule: &Rule) -> u8 {
    match rule {
        Rule::Meter(_) => 1,
        Rule::FixedWindow(_) => 2,
        Rule::SlidingWindow(_) => 3,
        Rule::SlidingLog(_) => 4,
    }
}

/// The same for slots.
const SLOTS: u8 = 5;

/// What the records of a rule look like (`lua/shared/identity.lua`).
struct Record {
    code: u8,
    /// The terms that its numbers are in.
    terms: Vec<u8>,
    /// How a bucket is packed.
    format: String,
    length: usize,
}

/// The length of what all records begin with.
const HEAD: usize = 9;

/// What the terms of a bucket may be told in, in milliseconds: `lua/shared/meter.lua` has the same.
const PERIODS_MS: [u64; 28] = [
    1,
    10,
    100,
    1_000,
    2_000,
    5_000,
    10_000,
    15_000,
    20_000,
    30_000,
    60_000,
    120_000,
    300_000,
    600_000,
    900_000,
    1_200_000,
    1_800_000,
    3_600_000,
    7_200_000,
    10_800_000,
    14_400_000,
    21_600_000,
    28_800_000,
    43_200_000,
    86_400_000,
    604_800_000,
    2_592_000_000,
    31_536_000_000,
];

impl Record {
    fn of(rule: &Rule) -> Self {
        let plain = |code, length| Self { code, terms: Vec::new(), format: String::new(), length };
        match rule {
            Rule::Meter(meter) => {
                let terms = meter.terms();
                Self::in_short(&terms).unwrap_or_else(|| Self::in_full(&terms))
            }
            Rule::FixedWindow(_) => plain(5, HEAD + 7),
            Rule::SlidingWindow(_) => plain(6, HEAD + 21),
            Rule::SlidingLog(_) => plain(7, HEAD + 16),
        }
    }

    /// Nearly all quotas are some few units in a common period, and then that takes two or three
    /// bytes.
    fn in_short(&Terms { pace, units }: &Terms) -> Option<Self> {
        let drains_more = pace.drops_per_tick > 1;
        if pace.tick_us != 1 || pace.drops_per_tick >= 1 << 24 {
            return None;
        }
        let terms = PERIODS_MS.iter().enumerate().filter_map(|(period, period_ms)| {
            let drops = (period_ms * 1_000).checked_mul(pace.drops_per_tick)?;
            let rate = drops / pace.drops_per_unit;
            let tells_units = units != rate;
            let width = width(if tells_units { rate.max(units) } else { rate });
            if drops % pace.drops_per_unit > 0 || width > 7 {
                return None;
            }
            let mut terms = vec![(width << 5 | period) as u8];
            terms.extend(&rate.to_le_bytes()[..width]);
            if tells_units {
                terms.extend(&units.to_le_bytes()[..width]);
            }
            Some((terms, tells_units))
        });
        let (terms, tells_units) = terms.min_by_key(|(terms, _)| terms.len())?;
        let code = u8::from(tells_units) | u8::from(drains_more) << 1;
        Some(Self::bucket(code, terms, if drains_more { 3 } else { 0 }))
    }

    fn in_full(&Terms { pace, units }: &Terms) -> Self {
        // A bucket that drains a drop a tick never has drops to spare.
        let drops_width = if pace.drops_per_tick == 1 { 0 } else { width(pace.drops_per_tick) };
        let (unit_width, units_width) = (width(pace.drops_per_unit), width(units));
        let tick = match pace.tick_us {
            1 => 0,
            1_000 => 1,
            _ => 2,
        };
        let shape = tick << 9 | drops_width << 6 | unit_width << 3 | units_width;
        let length = HEAD + 3 + 2 * drops_width + unit_width + units_width;
        let mut terms = vec![length as u8];
        terms.extend((shape as u16).to_le_bytes());
        terms.extend(&pace.drops_per_tick.to_le_bytes()[..drops_width]);
        terms.extend(&pace.drops_per_unit.to_le_bytes()[..unit_width]);
        terms.extend(&units.to_le_bytes()[..units_width]);
        Self::bucket(4, terms, drops_width)
    }

    /// `spare` is how many bytes the drops take that the last tick has to spare.
    fn bucket(code: u8, terms: Vec<u8>, spare: usize) -> Self {
        let mut format = format!("<I2I6Bc{}", terms.len());
        if spare > 0 {
            format += &format!("I{spare}");
        }
        let length = HEAD + terms.len() + spare;
        Self { code, terms, format, length }
    }
}

/// How many bytes a number takes.
const fn width(number: u64) -> usize {
    let bits = u64::BITS - number.leading_zeros();
    if bits == 0 { 1 } else { bits.div_ceil(8) as usize }
}

fn push_number(bytes: &mut Vec<u8>, number: u64) {
    bytes.extend(&number.min(MOST).to_le_bytes()[..NUMBER]);
}

// === The arguments of a call ===

/// The keys and rules of a call, each once.
struct Tables<'a> {
    keys: Vec<(Fingerprint, &'a str)>,
    rings: Vec<(u16, PolicyId)>,
    rules: Vec<&'a CodedRule>,
}

impl<'a> Tables<'a> {
    fn new(asks: &[&'a Ask]) -> Self {
        let mut tables = Self { keys: Vec::new(), rings: Vec::new(), rules: Vec::new() };
        for ask in asks {
            for charge in &ask.charges {
                let key = (charge.fingerprint, &*ask.prefix);
                let key = index_of(&mut tables.keys, key);
                index_of(&mut tables.rules, &charge.rule);
                if charge.rule.keeps_ring {
                    index_of(&mut tables.rings, (key, charge.rule.policy));
                }
            }
        }
        tables
    }

    /// The index of an identity.
    fn key_index(&mut self, ask: &'a Ask, fingerprint: Fingerprint) -> u16 {
        index_of(&mut self.keys, (fingerprint, &*ask.prefix))
    }

    /// The indices of a charge's identity, rule, and ring or set, as `KEYS` and the rules are counted.
    fn push_indices(&mut self, bytes: &mut Vec<u8>, ask: &'a Ask, charge: &'a AskedCharge) {
        let key = self.key_index(ask, charge.fingerprint);
        let rule = index_of(&mut self.rules, &charge.rule);
        let ring = if charge.rule.keeps_ring {
            self.keys.len() as u16 + index_of(&mut self.rings, (key, charge.rule.policy))
        } else {
            0
        };
        [key, rule, ring].iter().for_each(|index| bytes.extend(index.to_le_bytes()));
    }

    /// Appends the keys, how many there are before them, and the rules.
    fn push_args(&self, command: &mut Cmd) {
        command.arg(self.keys.len() + self.rings.len());
        let mut bytes = Vec::with_capacity(64);
        for &(fingerprint, prefix) in &self.keys {
            bytes.clear();
            push_key_name(&mut bytes, prefix, fingerprint);
            command.arg(&bytes);
        }
        for &(key, policy) in &self.rings {
            let (fingerprint, prefix) = self.keys[usize::from(key) - 1];
            command.arg(ring_name(prefix, fingerprint, policy));
        }
        bytes.clear();
        self.rules.iter().for_each(|rule| bytes.extend_from_slice(&rule.bytes));
        command.arg(&bytes);
    }
}

/// The index of an item, counted from 1; it is appended if it is not there.
fn index_of<T: PartialEq>(items: &mut Vec<T>, item: T) -> u16 {
    let index = items.iter().position(|other| *other == item).unwrap_or_else(|| {
        items.push(item);
        items.len() - 1
    });
    index as u16 + 1
}

/// Appends the arguments of `decide.lua` to a command.
pub(super) fn push_batch(command: &mut Cmd, asks: &[&Ask], has_msetex: bool) {
    let mut tables = Tables::new(asks);
    let mut requests = Vec::with_capacity(16 * (asks.len() + 1));
    requests.extend((tables.keys.len() as u16).to_le_bytes());
    requests.push(has_msetex.into());
    let is_crowded = asks.len() > CROWD * tables.keys.len();
    requests.push((!is_crowded && asks.iter().all(|ask| ask.is_short())).into());
    let mut run: Option<Run<'_>> = None;
    for &ask in asks {
        let key = ask.only_identity().map(|identity| tables.key_index(ask, identity));
        if let Some(run) = &mut run
            && key == Some(run.next_key)
            && run.ask.is_like(ask)
        {
            run.extend(&mut requests);
            continue;
        }
        run = key.map(|key| Run { ask, at: requests.len(), length: 1, next_key: key + 1 });
        requests.extend(1_u16.to_le_bytes());
        let mut count = ask.charges.len() as u16;
        count |= match ask.purpose {
            Purpose::Charge => 0,
            Purpose::Peek => PEEKS,
            Purpose::Count => COUNTS,
        };
        count |= if ask.lease.is_some() { LEASES } else { 0 };
        requests.extend(count.to_le_bytes());
        if let Some(lease) = &ask.lease {
            requests.extend(lease);
            requests.push(ask.ended.len() as u8);
            for (charge, id, slots) in &ask.ended {
                tables.push_indices(&mut requests, ask, &ask.charges[*charge]);
                requests.extend((*slots as u32).to_le_bytes());
                requests.extend(id);
            }
        }
        for charge in &ask.charges {
            tables.push_indices(&mut requests, ask, charge);
            if charge.cost < LARGE_COST.into() {
                requests.push(charge.cost as u8);
            } else {
                requests.push(LARGE_COST);
                push_number(&mut requests, charge.cost);
            }
        }
    }
    tables.push_args(command);
    command.arg(requests);
}

/// Requests that ask the same for one identity after the other are written once.
struct Run<'a> {
    ask: &'a Ask,
    /// Where it says how many they are.
    at: usize,
    length: u16,
    next_key: u16,
}

impl Run<'_> {
    fn extend(&mut self, requests: &mut [u8]) {
        self.length += 1;
        self.next_key += 1;
        requests[self.at..self.at + 2].copy_from_slice(&self.length.to_le_bytes());
    }
}

impl Ask {
    /// The identity that all charges are for, if they need nothing else.
    fn only_identity(&self) -> Option<Fingerprint> {
        let first = self.charges.first()?.fingerprint;
        let mut charges = self.charges.iter();
        charges
            .all(|charge| charge.fingerprint == first && !charge.rule.keeps_ring)
            .then_some(first)
    }

    /// Whether it may be decided in `decide_buckets.lua`. Policies whose names happen to have the same
    /// hash are not told apart there.
    fn is_short(&self) -> bool {
        let rules = || self.charges.iter().map(|charge| &charge.rule);
        let is_twin = |(index, rule): (usize, &CodedRule)| {
            rules().take(index).any(|other| other.policy == rule.policy)
        };
        self.only_identity().is_some()
            && rules().all(|rule| rule.is_short)
            && !rules().enumerate().any(is_twin)
    }

    /// Whether it is the same but for whom it is about.
    fn is_like(&self, other: &Self) -> bool {
        let mut pairs = self.charges.iter().zip(&other.charges);
        self.purpose == other.purpose
            && (&self.lease, &other.lease) == (&None, &None)
            && self.charges.len() == other.charges.len()
            && pairs.all(|(one, two)| one.rule == two.rule && one.cost == two.cost)
    }
}

/// Appends the arguments of `refund.lua`. Each charge comes with what its algorithm has to know of the
/// moment at which it was made.
pub(super) fn push_refund(command: &mut Cmd, ask: &Ask, spent_us: u64, memories: &[u64]) {
    let mut tables = Tables::new(&[ask]);
    let mut charges = (tables.keys.len() as u16).to_le_bytes().to_vec();
    push_number(&mut charges, spent_us);
    for (charge, &memory) in ask.charges.iter().zip(memories) {
        tables.push_indices(&mut charges, ask, charge);
        push_number(&mut charges, charge.cost);
        push_number(&mut charges, memory);
    }
    tables.push_args(command);
    command.arg(charges);
}

/// Appends the arguments of `reset.lua`.
pub(super) fn push_reset(command: &mut Cmd, ask: &Ask) {
    let mut tables = Tables::new(&[ask]);
    let mut charges = (tables.keys.len() as u16).to_le_bytes().to_vec();
    for charge in &ask.charges {
        tables.push_indices(&mut charges, ask, charge);
    }
    tables.push_args(command);
    command.arg(charges);
}

/// Appends the arguments of `leases.lua`.
pub(super) fn push_leases(
    command: &mut Cmd,
    prefix: &str,
    lease_us: u64,
    lasting: &[(LeaseId, HeldSlots)],
    ending: &[(LeaseId, HeldSlots)],
) {
    let mut sets = Vec::new();
    let mut indices = HashMap::new();
    let mut list = |bytes: &mut Vec<u8>, leases: &[(LeaseId, HeldSlots)]| {
        for (id, (set, slots)) in leases {
            let index = *indices.entry(*set).or_insert_with(|| {
                sets.push(ring_name(prefix, set.fingerprint, set.policy));
                sets.len() as u16
            });
            bytes.extend(index.to_le_bytes());
            bytes.extend((*slots as u32).to_le_bytes());
            bytes.extend(id);
        }
    };
    let (mut lasting_bytes, mut ending_bytes) = (Vec::new(), Vec::new());
    push_number(&mut lasting_bytes, lease_us);
    list(&mut lasting_bytes, lasting);
    list(&mut ending_bytes, ending);
    command.arg(sets.len()).arg(sets).arg(lasting_bytes).arg(ending_bytes);
}

/// Reads which leases had run out. `None` if that is not what `leases.lua` tells.
pub(super) fn read_lost(reply: &[u8]) -> Option<Vec<usize>> {
    let (indices, rest) = reply.as_chunks();
    let read = |index: &[u8; 4]| u32::from_le_bytes(*index) as usize;
    rest.is_empty().then(|| indices.iter().map(read).collect())
}

/// The slot of a cluster that an identity is in, with all that belongs to it.
pub(super) fn slot_of(fingerprint: Fingerprint) -> u16 {
    slot_of_tag(&base64(fingerprint))
}

/// The slot of a key whose hash tag is in braces.
pub(super) fn slot_of_name(key: &str) -> u16 {
    let tag = key.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
    slot_of_tag(tag.map_or(key, |(tag, _)| tag).as_bytes())
}

/// CRC16 (XMODEM), modulo the number of slots, as the Redis Cluster specification says.
pub(super) fn slot_of_tag(tag: &[u8]) -> u16 {
    let crc = tag.iter().fold(0_u16, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    });
    crc % SLOTS_OF_CLUSTER
}

pub(super) const SLOTS_OF_CLUSTER: u16 = 16_384;

/// The braces keep an identity and its rings in one slot of a cluster.
fn push_key_name(name: &mut Vec<u8>, prefix: &str, fingerprint: Fingerprint) {
    name.extend_from_slice(prefix.as_bytes());
    name.extend_from_slice(b":{");
    name.extend_from_slice(&base64(fingerprint));
    name.push(b'}');
}

fn ring_name(prefix: &str, fingerprint: Fingerprint, PolicyId([a, b]): PolicyId) -> Vec<u8> {
    let mut name = Vec::with_capacity(prefix.len() + 30);
    push_key_name(&mut name, prefix, fingerprint);
    write!(name, ":{a:02x}{b:02x}").expect("a vector takes everything");
    name
}

/// 128 bits in 22 letters, digits, `-` and `_` (RFC 4648, section 5, without padding).
fn base64(fingerprint: Fingerprint) -> [u8; 22] {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let number = u128::from(fingerprint.upper) << 64 | u128::from(fingerprint.lower);
    array::from_fn(|place| {
        let sextet = if place < 21 { number >> (122 - 6 * place) } else { number << 4 };
        ALPHABET[(sextet & 63) as usize]
    })
}

// === The reply ===

/// The same for a whole reply.
pub(super) fn read_reply(reply: &Value, asks: &[&Ask]) -> Option<Vec<Told>> {
    match reply {
        Value::BulkString(reply) => read_told(reply, asks),
        _ => None,
    }
}

/// Reads what `decide.lua` told about a batch. `None` if that is not what it tells.
pub(super) fn read_told(mut reply: &[u8], asks: &[&Ask]) -> Option<Vec<Told>> {
    let mut number = || read_number(&mut reply);
    let time_us = number()?;
    let mut told = Vec::with_capacity(asks.len());
    for asks in asks.chunks(32) {
        let first = told.len();
        for ask in asks {
            let state = |charge: &AskedCharge| {
                let mut state = [0; 3];
                for told in &mut state[..charge.rule.told] {
                    *told = number()?;
                }
                Some(state)
            };
            let states = ask.charges.iter().map(state).collect::<Option<_>>()?;
            told.push(Told { time_us, admitted: false, states });
        }
        let bits = number()?;
        for (index, told) in told[first..].iter_mut().enumerate() {
            told.admitted = bits >> index & 1 == 1;
        }
    }
    if !reply.is_empty() {
        read_marks(reply, asks, &mut told)?;
    }
    Some(told)
}

/// Reads the marks of buckets, which are told last, of the few that have one.
fn read_marks(mut reply: &[u8], asks: &[&Ask], told: &mut [Told]) -> Option<()> {
    let tables = Tables::new(asks);
    while !reply.is_empty() {
        let mut number = || read_number(&mut reply);
        let (key, policy, given_back, span_us) = (number()?, number()?, number()?, number()?);
        let key = tables.keys.get((key as usize).checked_sub(1)?)?;
        let policy = PolicyId((policy as u16).to_le_bytes());
        for (ask, told) in asks.iter().zip(&mut *told) {
            for (charge, state) in ask.charges.iter().zip(&mut told.states) {
                if (charge.fingerprint, &*ask.prefix) == *key && charge.rule.policy == policy {
                    (state[1], state[2]) = (given_back, span_us);
                }
            }
        }
    }
    Some(())
}

fn read_number(reply: &mut &[u8]) -> Option<u64> {
    let (number, rest) = reply.split_at_checked(NUMBER)?;
    *reply = rest;
    Some(number.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_name(prefix: &str, fingerprint: Fingerprint) -> String {
        let mut name = Vec::new();
        push_key_name(&mut name, prefix, fingerprint);
        String::from_utf8(name).unwrap()
    }

    #[test]
    fn key_names_are_injective_and_say_nothing() {
        let names: Vec<_> = (0..128)
            .map(|bit| key_name("tg", Fingerprint::from(1_u128 << bit)))
            .chain([0, u128::MAX].map(|number| key_name("tg", Fingerprint::from(number))))
            .collect();
        let distinct: std::collections::HashSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        assert_eq!(names[128], "tg:{AAAAAAAAAAAAAAAAAAAAAA}");
        assert_eq!(names[129], "tg:{_____________________w}");
        assert!(names.iter().all(|name| name.len() == 27));
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        // Appendix A: the check value of the polynomial, and keys whose slots are well known.
        assert_eq!(slot_of_tag(b"123456789"), 0x31C3);
        assert_eq!(slot_of_name("foo"), 12_182);
        assert_eq!(slot_of_name("tg:{foo}:0a0b"), 12_182);
        let fingerprint = Fingerprint::from(77);
        assert_eq!(slot_of(fingerprint), slot_of_name(&key_name("tg:api", fingerprint)));
    }

    #[test]
    fn what_is_no_reply_of_ours_is_none() {
        assert_eq!(read_told(&[0; 6], &[]), None);
        assert_eq!(read_told(&[0; 8], &[]), None);
        assert_eq!(read_told(&[0; 7], &[]), Some(Vec::new()));
        // The mark of a bucket that nobody asked for, and half of one.
        assert_eq!(read_told(&[1; 5 * 7], &[]), None);
        assert_eq!(read_told(&[0; 3 * 7], &[]), None);
    }
}
