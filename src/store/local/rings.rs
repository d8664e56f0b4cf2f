//! The rings of sliding logs, which are too large for the fixed-size entries of a table.

use std::collections::VecDeque;

/// The rings of a shard, and how much memory they take.
pub(super) struct Rings {
    /// The first is the ring of everybody who has none: always empty.
    rings: Vec<VecDeque<u64>>,
    unused: Vec<RingId>,
    /// How many timestamps all rings together have room for.
    capacity: usize,
}

/// Which ring; the default is none yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingId(usize);

impl RingId {
    pub(super) const fn from_word(word: u64) -> Self {
        Self(word as usize)
    }

    pub(super) const fn to_word(self) -> u64 {
        self.0 as u64
    }
}

impl Rings {
    pub(super) fn new() -> Self {
        Self { rings: Vec::new(), unused: Vec::new(), capacity: 0 }
    }

    /// How many timestamps all rings together have room for.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes a ring. One who has none gets one as soon as there is something to remember.
    pub(super) fn update<T>(
        &mut self,
        id: &mut RingId,
        change: impl FnOnce(&mut VecDeque<u64>) -> T,
    ) -> T {
        let mut ring = self.rings.get_mut(id.0).map(std::mem::take).unwrap_or_default();
        self.capacity -= ring.capacity();
        let result = change(&mut ring);
        if ring.is_empty() {
            ring = VecDeque::new();
        } else if *id == RingId::default() {
            *id = self.claim();
        }
        self.capacity += ring.capacity();
        if let Some(place) = self.rings.get_mut(id.0) {
            *place = ring;
        }
        result
    }

    /// Forgets a ring.
    pub(super) fn release(&mut self, id: RingId) {
        if id == RingId::default() {
            return;
        }
        let ring = std::mem::take(&mut self.rings[id.0]);
        self.capacity -= ring.capacity();
        self.unused.push(id);
    }

    fn claim(&mut self) -> RingId {
        self.unused.pop().unwrap_or_else(|| {
            if self.rings.is_empty() {
                self.rings.push(VecDeque::new());
            }
            self.rings.push(VecDeque::new());
            RingId(self.rings.len() - 1)
        })
    }
}
