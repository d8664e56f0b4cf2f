//! An instance whose waits and changes are looked at while its server, or the way there, is not well.

use super::{
    fleet::{until, users},
    ms, secs,
};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio::time::{Instant, timeout};
use tollgate::{
    Limiter, Policy,
    redis::{RedisStore, RedisStoreBuilder, StateChange},
};

/// How long requests wait for the server here.
pub(crate) const DEADLINE: Duration = ms(150);

/// An instance, and what it reports.
pub(crate) struct Instance {
    pub(crate) store: RedisStore,
    pub(crate) limiter: Limiter<str>,
    pub(crate) changes: Arc<Mutex<Vec<StateChange>>>,
    longest: Mutex<Duration>,
}

impl Instance {
    /// What is configured comes after what all instances have here.
    pub(crate) fn start(
        builder: RedisStoreBuilder,
        configure: impl FnOnce(RedisStoreBuilder) -> RedisStoreBuilder,
        policies: impl IntoIterator<Item = Policy<str>>,
    ) -> Self {
        let changes = Arc::<Mutex<Vec<StateChange>>>::default();
        let heard = changes.clone();
        let builder = builder
            .deadline(DEADLINE)
            .retry_every(ms(50), ms(200))
            .on_state_change(move |change| heard.lock().push(change.clone()));
        let store = configure(builder).build().unwrap();
        let limiter = users(&store, policies);
        Self { store, limiter, changes, longest: Mutex::default() }
    }

    /// Whether a request is admitted. It is answered in time: the deadline, and some more for a busy
    /// machine.
    pub(crate) async fn admits(&self, user: &str) -> bool {
        let start = Instant::now();
        let answer = timeout(DEADLINE + secs(2), self.limiter.check_async(user)).await;
        let mut longest = self.longest.lock();
        *longest = start.elapsed().max(*longest);
        answer.expect("an answer in time").is_ok()
    }

    /// Whether a limit of three holds. It is tried with some users, for a busy machine may make a
    /// request late.
    pub(crate) async fn holds(&self) {
        let mut user = 0;
        until("limits hold", || {
            user += 1;
            let user = format!("new {user} of {:?}", Instant::now());
            async move {
                let mut admitted = Vec::new();
                for _ in 0..4 {
                    admitted.push(self.admits(&user).await);
                }
                admitted == [true, true, true, false]
            }
        })
        .await;
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        println!("the longest wait was {:?} of {DEADLINE:?}", self.longest.lock());
    }
}
