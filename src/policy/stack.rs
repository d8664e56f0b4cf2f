//! A stack: checked policies in their order, grouped by whom they count.

#[cfg(feature = "redis")]
use super::FailureMode;
use super::{Condition, Cost, Counts, InFlight, LimitFor, Policy, QuotaFor};
use crate::{
    concurrency::{Limit, SlotPlan},
    decision::{Allotment, Outcome, Outcomes, Reason},
    key::{FindKey, Fingerprint, Key, KeyError, MissingKey, Secret},
    name::{intern, is_name},
    quota::{Quota, QuotaError},
    shed::Shedder,
    store::{Bill, Charge, Kind, Rule, Slot, local::Plan},
};
use std::{
    collections::{BTreeSet, HashSet},
    error, fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

pub(crate) struct Stack<R: ?Sized> {
    entries: Vec<Entry<R>>,
    /// The distinct key extractors, each with the indices of the policies that count by it.
    spaces: Vec<Space<R>>,
    /// The names of the policies that limit concurrency.
    slot_names: Vec<&'static str>,
    /// Whether outcomes may come in another order than that of the stack.
    is_shuffled: bool,
    secret: Secret,
}

/// A policy that was found to be in order.
struct Entry<R: ?Sized> {
    name: &'static str,
    limit: EntryLimit,
    missing_key: MissingKey,
    /// How it is not for all requests alike; `None` where everybody is charged one.
    terms: Option<Box<Terms<R>>>,
    /// What it gives out.
    allotment: Allotment,
    #[cfg(feature = "redis")]
    failure_mode: FailureMode,
    /// How many instances share the quota, if the state is elsewhere.
    #[cfg(feature = "redis")]
    instances: Option<u32>,
}

enum EntryLimit {
    /// Of requests over time.
    Rate {
        kind: Kind,
        quota: Quota,
        rule: Rule,
        /// What a request is charged but for the terms, and with nobody's fingerprint.
        charge: Charge,
    },
    /// Of requests in flight.
    InFlight {
        limit: Limit,
        queue: Option<(usize, Duration)>,
        /// What a request takes, likewise.
        slot: Slot,
    },
}

/// What a policy makes of a request, beyond whom it counts.
struct Terms<R: ?Sized> {
    conditions: Vec<Condition<R>>,
    /// The fingerprints of the keys that the policy does not count.
    exempt: HashSet<Fingerprint>,
    cost: Cost<R>,
    quota_for: Option<QuotaFor<R>>,
    limit_for: Option<LimitFor<R>>,
}

/// The keys of one extractor, or those of one policy that counts them in parts.
struct Space<R: ?Sized> {
    extractor: Arc<dyn FindKey<R>>,
    parts: u32,
    next_part: AtomicU32,
    policies: Vec<usize>,
    /// The bill of every request that has a key, but for its fingerprint, where the policies count all
    /// requests alike; empty where they don't.
    flat_bill: Vec<(Charge, Outcome)>,
}

impl<R: ?Sized> Space<R> {
    /// One of the parts of a key that this is counted in, in turns.
    fn part_of(&self, found: Fingerprint) -> Fingerprint {
        if self.parts == 1 {
            return found;
        }
        let part = self.next_part.fetch_add(1, Relaxed) % self.parts;
        // Fingerprints are random: that of a part is no other key's, as that of a key is not.
        Fingerprint { lower: found.lower ^ u64::from(part), ..found }
    }
}

/// Why a stack cannot be built.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BuildError {
    /// There is no policy in the stack, and no load shedder.
    NoPolicy,
    /// There is a load shedder, and nothing says how important a request is.
    NoPriority {
        /// The load shedder.
        shedder: String,
    },
    /// A policy's name is not of the form `[A-Za-z][A-Za-z0-9_.-]{0,63}`, which every header can
    /// carry.
    InvalidName {
        /// The name.
        name: String,
    },
    /// Two policies or load shedders have the same name, or names that differ only by case.
    DuplicateName {
        /// The name.
        name: String,
    },
    /// A policy has no key, and the stack has none either.
    NoKey {
        /// The policy.
        policy: String,
    },
    /// A policy's quota cannot be.
    Quota {
        /// The policy.
        policy: String,
        /// Why.
        error: QuotaError,
    },
    /// A policy is spread over no parts, or over more than its limit has units, or has a limit that cannot
    /// be spread because it is looked up, or found, by each instance.
    TooSpread {
        /// The policy.
        policy: String,
        /// How many parts.
        parts: u32,
    },
    /// A policy lets nothing be in flight.
    NoSlots {
        /// The policy.
        policy: String,
    },
    /// A policy was given an option that its algorithm does not have.
    Misplaced {
        /// The policy.
        policy: String,
        /// The option.
        option: &'static str,
    },
    /// A policy holds requests back, where nothing can wait.
    CannotWait {
        /// The policy.
        policy: String,
    },
    /// A policy or load shedder counts requests in flight, where nothing tells when they are over.
    CannotHold {
        /// The policy or load shedder.
        policy: String,
    },
    /// The state is elsewhere, where nothing can wait for it.
    CannotAsk,
    /// A policy needs the store before it decides, where the store is told of decisions later.
    CannotDefer {
        /// The policy.
        policy: String,
    },
    /// Two policies would have the same records in a store that is elsewhere.
    SameRecords {
        /// The policies.
        policies: [String; 2],
    },
}

impl<R: ?Sized + 'static> Stack<R> {
    pub(crate) fn new(
        policies: Vec<Policy<R>>,
        default_key: Option<&Arc<dyn FindKey<R>>>,
        secret: Secret,
        shedders: &[Shedder],
    ) -> Result<Self, BuildError> {
        if policies.is_empty() && shedders.is_empty() {
            return Err(BuildError::NoPolicy);
        }
        let mut names = BTreeSet::new();
        for name in shedders.iter().map(Shedder::name) {
            if !names.insert(name.to_ascii_lowercase()) {
                return Err(BuildError::DuplicateName { name: name.to_owned() });
            }
        }
        let mut spaces: Vec<Space<R>> = Vec::new();
        let mut entries = Vec::with_capacity(policies.len());
        let (mut rates, mut slot_names) = (0, Vec::new());
        for (index, policy) in policies.into_iter().enumerate() {
            let name = policy.name.clone().into_owned();
            if !is_name(&name) {
                return Err(BuildError::InvalidName { name });
            }
            if !names.insert(name.to_ascii_lowercase()) {
                return Err(BuildError::DuplicateName { name });
            }
            if let Some(option) = policy.misplaced {
                return Err(BuildError::Misplaced { policy: name, option });
            }
            let Some(extractor) = policy.key.or_else(|| default_key.cloned()) else {
                return Err(BuildError::NoKey { policy: name });
            };
            let counts = match policy.parts {
                1 => policy.counts,
                parts => {
                    let looked_up = policy.quota_for.is_some() || policy.limit_for.is_some();
                    let part = policy.counts.part(parts).filter(|_| !looked_up);
                    part.ok_or_else(|| BuildError::TooSpread { policy: name.clone(), parts })?
                }
            };
            let same = |space: &Space<R>| {
                (space.parts, policy.parts) == (1, 1)
                    && finds_the_same_keys(&space.extractor, &extractor)
            };
            let space = spaces.iter().position(same).unwrap_or_else(|| {
                let (parts, next_part) = (policy.parts, AtomicU32::new(0));
                let (policies, flat_bill) = (Vec::new(), Vec::new());
                spaces.push(Space { extractor, parts, next_part, policies, flat_bill });
                spaces.len() - 1
            });
            spaces[space].policies.push(index);
            let interned = intern(policy.name);
            let varies = policy.quota_for.is_some();
            let limit = match counts {
                Counts::Rate(kind, quota) => {
                    let rule = match Rule::new(kind, &quota) {
                        Ok(rule) if varies => rule.varying(),
                        Ok(rule) => rule,
                        Err(error) => return Err(BuildError::Quota { policy: name, error }),
                    };
                    let (fingerprint, space) = (Fingerprint::NOBODY, space as u32);
                    let charge = Charge { fingerprint, policy: rates, space, rule: 0 };
                    rates += 1;
                    EntryLimit::Rate { kind, quota, rule, charge }
                }
                Counts::InFlight(InFlight { limit, queue, per_instance }) => {
                    if limit.now() == 0 {
                        return Err(BuildError::NoSlots { policy: name });
                    }
                    let (fingerprint, policy) = (Fingerprint::NOBODY, slot_names.len() as u32);
                    let slot = Slot { fingerprint, policy, limit: 0, cost: 1, per_instance };
                    slot_names.push(interned);
                    EntryLimit::InFlight { limit, queue, slot }
                }
            };
            let terms = Terms {
                conditions: policy.conditions,
                exempt: policy.exempt.iter().map(|key| secret.fingerprint(key)).collect(),
                cost: policy.cost,
                quota_for: policy.quota_for,
                limit_for: policy.limit_for,
            };
            entries.push(Entry {
                name: interned,
                allotment: limit.allotment(),
                limit,
                missing_key: policy.missing_key,
                terms: (!terms.are_plain()).then(|| Box::new(terms)),
                #[cfg(feature = "redis")]
                failure_mode: policy.failure_mode,
                #[cfg(feature = "redis")]
                instances: None,
            });
        }
        for space in spaces.iter_mut().filter(|space| space.parts == 1) {
            let charge = |&policy: &usize| entries[policy].flat_charge();
            space.flat_bill =
                space.policies.iter().map(charge).collect::<Option<_>>().unwrap_or_default();
        }
        let is_shuffled = spaces.len() > 1 || !slot_names.is_empty();
        Ok(Self { entries, spaces, slot_names, is_shuffled, secret })
    }

    /// What a store in this process has to know of each policy.
    pub(crate) fn plans(&self) -> Vec<Plan> {
        self.entries.iter().filter_map(|entry| entry.plan(|_, rule| rule)).collect()
    }

    /// What has to be known of each policy that limits concurrency.
    pub(crate) fn slot_plans(&self) -> impl Iterator<Item = SlotPlan> {
        self.entries.iter().filter_map(|entry| match &entry.limit {
            EntryLimit::InFlight { limit, queue, .. } => {
                Some(SlotPlan { name: entry.name, limit: limit.clone(), queue: *queue })
            }
            EntryLimit::Rate { .. } => None,
        })
    }

    /// The same for a store in this process that stands in for one that is shared by `instances`.
    #[cfg(feature = "redis")]
    pub(crate) fn shared_by(&mut self, instances: u32) -> Vec<Plan> {
        self.entries.iter_mut().for_each(|entry| entry.instances = Some(instances));
        let share_of = |entry: &Entry<R>| {
            let kind = entry.kind()?;
            entry.plan(|quota, rule| entry.share_of(kind, quota, rule))
        };
        self.entries.iter().filter_map(share_of).collect()
    }

    /// What a store that is elsewhere has to know of each policy that limits rates.
    #[cfg(feature = "redis")]
    pub(crate) fn remote_plans(&self) -> impl Iterator<Item = (&'static str, Rule, FailureMode)> {
        self.entries.iter().filter_map(|entry| match &entry.limit {
            EntryLimit::Rate { rule, .. } => Some((entry.name, *rule, entry.failure_mode)),
            EntryLimit::InFlight { .. } => None,
        })
    }

    /// The same of each that limits concurrency.
    #[cfg(feature = "redis")]
    pub(crate) fn remote_slots(&self) -> impl Iterator<Item = (&'static str, FailureMode)> {
        self.entries.iter().filter_map(|entry| match &entry.limit {
            EntryLimit::InFlight { .. } => Some((entry.name, entry.failure_mode)),
            EntryLimit::Rate { .. } => None,
        })
    }

    /// The first policy that cannot be decided before the store elsewhere is told: an exact log, or slots
    /// that are held there.
    #[cfg(feature = "redis")]
    pub(crate) fn cannot_defer(&self) -> Option<&'static str> {
        let cannot = |entry: &&Entry<R>| match &entry.limit {
            EntryLimit::Rate { kind, .. } => *kind == Kind::SlidingLog,
            EntryLimit::InFlight { slot, .. } => !slot.per_instance,
        };
        self.entries.iter().find(cannot).map(|entry| entry.name)
    }

    /// The names of the policies, with what each gives out, in order.
    pub(crate) fn allotments(&self) -> impl Iterator<Item = (&'static str, Allotment)> {
        self.entries.iter().map(|entry| (entry.name, entry.allotment))
    }

    pub(crate) fn name(&self, policy: usize) -> &'static str {
        self.entries[policy].name
    }

    /// Where a policy stands in the stack.
    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }

    /// The first policy that may hold requests back.
    pub(crate) fn shaper(&self) -> Option<&'static str> {
        let shapes = |entry: &&Entry<R>| matches!(entry.kind(), Some(Kind::LeakyBucket(delay)) if delay > Duration::ZERO);
        self.entries.iter().find(shapes).map(|entry| entry.name)
    }

    /// Writes what `request` is to be charged, with an outcome for each charge. This is where the user's functions run; a panic in one
    /// of them goes no further.
    #[inline]
    pub(crate) fn bill(
        &self,
        request: &R,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
    ) -> Result<(), Box<Reason>> {
        // Which policy is being asked, to name it if its function panics.
        let mut asking = 0;
        let write = AssertUnwindSafe(|| self.write_bill(request, bill, outcomes, &mut asking));
        catch_unwind(write).unwrap_or_else(|_| Err(self.panicked(asking)))
    }

    #[inline]
    fn write_bill(
        &self,
        request: &R,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
        asking: &mut usize,
    ) -> Result<(), Box<Reason>> {
        for space in &self.spaces {
            let mut found = None;
            if !space.flat_bill.is_empty() {
                *asking = space.policies[0];
                let key = space.extractor.find_key(request, &self.secret);
                if let Ok(fingerprint) = key {
                    for (charge, outcome) in &space.flat_bill {
                        bill.charges.push(Charge { fingerprint, ..*charge });
                        outcomes.push(*outcome);
                    }
                    continue;
                }
                found = Some(key);
            }
            self.bill_space(space, found, request, bill, outcomes, asking)?;
        }
        if !bill.slots.is_empty() {
            self.slot_outcomes(bill, outcomes);
        }
        Ok(())
    }

    /// Writes what the policies of a space charge, each by its own terms. The key is found when the first
    /// policy asks for it, unless that was tried already.
    #[inline(never)]
    fn bill_space(
        &self,
        space: &Space<R>,
        mut found: Option<Result<Fingerprint, KeyError>>,
        request: &R,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
        asking: &mut usize,
    ) -> Result<(), Box<Reason>> {
        for &policy in &space.policies {
            *asking = policy;
            let entry = &self.entries[policy];
            let terms = entry.terms.as_deref();
            if terms.is_some_and(|terms| !terms.apply_to(request)) {
                continue;
            }
            let found =
                found.get_or_insert_with(|| space.extractor.find_key(request, &self.secret));
            let counted = match found {
                Ok(fingerprint) => Some(*fingerprint),
                Err(error) => self.without_key(entry, error)?,
            };
            let Some(fingerprint) = counted else {
                continue;
            };
            match (&entry.limit, terms) {
                (EntryLimit::Rate { charge, .. }, None) => {
                    let fingerprint = space.part_of(fingerprint);
                    bill.charges.push(Charge { fingerprint, ..*charge });
                    outcomes.push(Outcome::open(entry.name, entry.allotment, 1));
                }
                (EntryLimit::InFlight { limit, slot, .. }, None) => {
                    let fingerprint = space.part_of(fingerprint);
                    bill.slots.push(Slot { fingerprint, limit: limit.now(), ..*slot });
                }
                (_, Some(terms)) => {
                    if !terms.exempt.contains(&fingerprint) {
                        let fingerprint = space.part_of(fingerprint);
                        entry.charge_on(terms, request, fingerprint, bill, outcomes)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The outcomes of slots come behind those of charges. Slots of this process come first.
    fn slot_outcomes(&self, bill: &mut Bill, outcomes: &mut Outcomes) {
        bill.slots.sort_by_key(|slot| !slot.per_instance);
        for slot in &bill.slots {
            let quota = Allotment::of_slots(slot.limit);
            outcomes.push(Outcome::open(self.slot_name(slot), quota, slot.cost));
        }
    }

    fn slot_name(&self, slot: &Slot) -> &'static str {
        self.slot_names[slot.policy as usize]
    }

    /// Who is counted by a policy for a request without a key, if anybody.
    #[cold]
    fn without_key(
        &self,
        entry: &Entry<R>,
        error: &KeyError,
    ) -> Result<Option<Fingerprint>, Box<Reason>> {
        match entry.missing_key {
            MissingKey::Skip => Ok(None),
            MissingKey::Share => Ok(Some(self.secret.fingerprint(&Key::missing()))),
            MissingKey::Reject => {
                let (policy, error) = (entry.name, error.clone());
                Err(Box::new(Reason::NoKey { policy, error }))
            }
        }
    }

    #[cold]
    fn panicked(&self, policy: usize) -> Box<Reason> {
        Box::new(Reason::Faulty {
            policy: self.name(policy),
            message: "a function that this policy was built with panicked".to_owned(),
        })
    }

    /// Puts the outcomes of a bill, which is in the order of the spaces, in that of the stack.
    #[inline]
    pub(crate) fn sort(&self, outcomes: &mut [Outcome]) {
        if self.is_shuffled {
            outcomes.sort_by_key(|outcome| self.position(outcome.policy));
        }
    }
}

impl<R: ?Sized> Entry<R> {
    /// What every request that has a key is charged, but for its fingerprint, if that is one and the same.
    fn flat_charge(&self) -> Option<(Charge, Outcome)> {
        match &self.limit {
            EntryLimit::Rate { charge, .. } if self.terms.is_none() => {
                Some((*charge, Outcome::open(self.name, self.allotment, 1)))
            }
            _ => None,
        }
    }

    /// Whether its quota may be another one from request to request.
    fn varies(&self) -> bool {
        self.terms.as_ref().is_some_and(|terms| terms.quota_for.is_some())
    }

    /// Charges a request on terms.
    #[inline(never)]
    fn charge_on(
        &self,
        terms: &Terms<R>,
        request: &R,
        fingerprint: Fingerprint,
        bill: &mut Bill,
        outcomes: &mut Outcomes,
    ) -> Result<(), Box<Reason>> {
        let cost = terms.cost(request);
        match &self.limit {
            EntryLimit::InFlight { limit, slot, .. } => {
                let own = terms.limit_for.as_ref().and_then(|limit_for| limit_for(request));
                let limit = own.map_or_else(|| limit.now(), u64::from);
                bill.slots.push(Slot { fingerprint, limit, cost, ..*slot });
            }
            EntryLimit::Rate { kind, quota: usual, charge, .. } => {
                let mut charge = Charge { fingerprint, ..*charge };
                let mut allotment = self.allotment;
                let quota_for = terms.quota_for.as_ref();
                if let Some(quota) = quota_for.and_then(|quota_for| quota_for(request)) {
                    let rule = self.rule_for(*kind, usual, &quota)?;
                    allotment = rule.allotment();
                    bill.rules.push(rule);
                    charge.rule = bill.rules.len() as u32;
                    #[cfg(feature = "redis")]
                    if self.instances.is_some() {
                        bill.rules.push(self.share_of(*kind, &quota, rule));
                    }
                }
                bill.charges.push(charge);
                outcomes.push(Outcome::open(self.name, allotment, cost));
            }
        }
        Ok(())
    }

    /// The rule of a quota that was looked up for a request.
    fn rule_for(&self, kind: Kind, usual: &Quota, quota: &Quota) -> Result<Rule, Box<Reason>> {
        let error = match Rule::new(kind, quota) {
            Ok(_) if counts_periods(kind) && quota.period() != usual.period() => {
                format!("its period has to be the policy's own, `{}`", usual.period())
            }
            Ok(rule) => return Ok(rule.varying()),
            Err(error) => error.to_string(),
        };
        Err(Box::new(Reason::Faulty {
            policy: self.name,
            message: format!("the quota `{quota}` for this request cannot be: {error}"),
        }))
    }

    /// The rule of this instance's share of a quota, or that of the quota where its part is too slow to be
    /// counted.
    #[cfg(feature = "redis")]
    fn share_of(&self, kind: Kind, quota: &Quota, rule: Rule) -> Rule {
        match Rule::new(kind, &quota.share(self.instances.unwrap_or(1))) {
            Ok(share) if self.varies() => share.varying(),
            Ok(share) => share,
            Err(_) => rule,
        }
    }

    fn kind(&self) -> Option<Kind> {
        match self.limit {
            EntryLimit::Rate { kind, .. } => Some(kind),
            EntryLimit::InFlight { .. } => None,
        }
    }

    /// What a store that counts in this process has to know, with the rule that it is to go by.
    fn plan(&self, rule_of: impl FnOnce(&Quota, Rule) -> Rule) -> Option<Plan> {
        let EntryLimit::Rate { kind, quota, rule, charge } = &self.limit else {
            return None;
        };
        Some(Plan {
            space: charge.space(),
            kind: *kind,
            rule: rule_of(quota, *rule),
            varies: self.varies(),
            log_limit: match kind {
                Kind::SlidingLog => self.log_limit(),
                _ => 0,
            },
        })
    }

    /// The largest limit that the policy's log can have.
    fn log_limit(&self) -> usize {
        let limit =
            if self.varies() { crate::algorithm::MAX_LOG_LIMIT } else { self.allotment.limit };
        limit as usize
    }
}

impl EntryLimit {
    fn allotment(&self) -> Allotment {
        match self {
            Self::Rate { rule, .. } => rule.allotment(),
            Self::InFlight { limit, .. } => Allotment::of_slots(limit.now()),
        }
    }
}

impl<R: ?Sized> Terms<R> {
    /// Whether they come to a cost of one for everybody.
    fn are_plain(&self) -> bool {
        self.conditions.is_empty()
            && self.exempt.is_empty()
            && matches!(self.cost, Cost::One)
            && self.quota_for.is_none()
            && self.limit_for.is_none()
    }

    fn apply_to(&self, request: &R) -> bool {
        self.conditions.iter().all(|condition| condition(request))
    }

    fn cost(&self, request: &R) -> u64 {
        match &self.cost {
            Cost::One => 1,
            Cost::Of(cost) => cost(request),
        }
    }
}

/// Whether what was counted over one period says nothing about another.
const fn counts_periods(kind: Kind) -> bool {
    match kind {
        Kind::TokenBucket | Kind::LeakyBucket(_) => false,
        Kind::FixedWindow(_) | Kind::SlidingWindow | Kind::SlidingLog => true,
    }
}

/// Whether two extractors are one, or say that they find the same keys.
fn finds_the_same_keys<R: ?Sized + 'static>(
    a: &Arc<dyn FindKey<R>>,
    b: &Arc<dyn FindKey<R>>,
) -> bool {
    Arc::ptr_eq(a, b) || a.name().is_some_and(|name| Some(name) == b.name())
}

// === impl BuildError ===

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPolicy => f.write_str("the stack has no policy; add one with `policy`"),
            Self::NoPriority { shedder } => write!(
                f,
                "load shedder `{shedder}` has to know how important a request is; call `priority`, for \
                 HTTP with `ByMethod::new()`"
            ),
            Self::InvalidName { name } => write!(
                f,
                "`{}` is no name for a policy; begin with a letter and go on with up to 63 letters, \
                 digits, `_`, `.` or `-`",
                name.escape_debug()
            ),
            Self::DuplicateName { name } => write!(
                f,
                "two policies or load shedders are named `{name}` (upper and lower case count as the same)"
            ),
            Self::NoKey { policy } => write!(
                f,
                "policy `{policy}` has no key; call `key` on it or on the stack to say whom it \
                 counts, with `Global` for everybody together"
            ),
            Self::Quota { policy, error } => write!(f, "the quota of policy `{policy}`: {error}"),
            Self::Misplaced { policy, option } => write!(
                f,
                "policy `{policy}`: `{option}` is not for its algorithm; `from_first_hit` is for \
                 fixed windows, `max_delay` for leaky buckets, `quota_for` for rates, and `queue`, \
                 `limit_for` and `per_instance` are for concurrency limits"
            ),
            Self::TooSpread { policy, parts } => write!(
                f,
                "policy `{policy}` cannot be spread over {parts} parts; each has to have one unit at least, \
                 and the limit has to be a number"
            ),
            Self::NoSlots { policy } => write!(
                f,
                "policy `{policy}` has a limit of 0 and would let nothing pass; give it 1 or more"
            ),
            Self::CannotHold { policy } => write!(
                f,
                "`{policy}` counts calls in flight, and an interceptor does not see when a call is over; \
                 use the layer"
            ),
            Self::CannotAsk => f.write_str(
                "the state is in Redis, and an interceptor cannot wait for the answer; use the layer, or \
                 `RedisStore::deferred`",
            ),
            Self::CannotDefer { policy } => write!(
                f,
                "policy `{policy}` cannot be deferred: a sliding log is exact, and slots are held in the \
                 store; use another algorithm, `per_instance`, or the store without `deferred`"
            ),
            Self::SameRecords { policies: [a, b] } => write!(
                f,
                "policies `{a}` and `{b}` happen to have the same records in Redis; rename one of them"
            ),
            Self::CannotWait { policy } => write!(
                f,
                "policy `{policy}` holds requests back, and an interceptor cannot wait; use the \
                 layer, or leave out `max_delay`"
            ),
        }
    }
}

impl error::Error for BuildError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Quota { error, .. } => Some(error),
            _ => None,
        }
    }
}
