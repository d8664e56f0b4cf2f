//! What the service depends on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use tokio::sync::Semaphore;

/// How many queries it can do at a time.
pub(crate) const CONNECTIONS: u32 = 60;

/// How fast it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speed {
    Normal,
    Slow,
}

impl Speed {
    /// How long a query takes, once it has a connection.
    pub(crate) const fn query(self) -> Duration {
        match self {
            Self::Normal => Duration::from_millis(20),
            Self::Slow => Duration::from_millis(650),
        }
    }
}

/// A database whose speed can be set. Clones are the same one.
#[derive(Clone)]
pub(crate) struct Database(Arc<Shared>);

struct Shared {
    connections: Semaphore,
    is_slow: AtomicBool,
}

impl Default for Database {
    fn default() -> Self {
        let connections = Semaphore::new(CONNECTIONS as usize);
        Self(Arc::new(Shared { connections, is_slow: AtomicBool::new(false) }))
    }
}

impl Database {
    pub(crate) fn set(&self, speed: Speed) {
        self.0.is_slow.store(speed == Speed::Slow, Relaxed);
    }

    pub(crate) async fn query(&self) {
        // It is never closed.
        let _connection = self.0.connections.acquire().await;
        let is_slow = self.0.is_slow.load(Relaxed);
        let speed = if is_slow { Speed::Slow } else { Speed::Normal };
        tokio::time::sleep(speed.query()).await;
    }
}
