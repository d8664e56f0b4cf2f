//! One round of limitador's storage in Redis, for the bench `redis`.
//!
//! `tollgate-bench-limitador URL CALLERS KEYS POLICIES MILLISECONDS` prints decisions a second.

use limitador::{
    AsyncRateLimiter,
    limit::{Context, Limit, Namespace},
    storage::redis::AsyncRedisStorage,
};
use std::{
    collections::HashMap,
    env,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<_> = env::args().collect();
    let [_, url, numbers @ ..] = arguments.as_slice() else { panic!("arguments are missing") };
    let numbers: Vec<usize> = numbers.iter().map(|number| number.parse().unwrap()).collect();
    let &[callers, keys, policies, millis] = numbers.as_slice() else {
        panic!("four numbers are needed")
    };
    let time = Duration::from_millis(millis as u64);

    let storage = AsyncRedisStorage::new(url).await.unwrap();
    let limiter = Arc::new(AsyncRateLimiter::new_with_storage(Box::new(storage)));
    for policy in 1..=policies as u64 {
        // Everything is admitted.
        let user = "user".try_into().unwrap();
        limiter.add_limit(Limit::new("bench", 1_000_000_000, 3_600 * policy, [], [user]));
    }
    let namespace: Arc<Namespace> = Arc::new("bench".into());

    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for caller in 0..callers {
        let (limiter, namespace) = (limiter.clone(), namespace.clone());
        let mut index = caller * 7 * 104_729;
        tasks.spawn(async move {
            let mut decided = 0_u64;
            while start.elapsed() < time {
                let key = index.wrapping_mul(0x9E37_79B9) % keys;
                let user = format!("customer:{key:011}");
                let context = Context::from(HashMap::from([("user".to_owned(), user)]));
                let decision = limiter.check_rate_limited_and_update(&namespace, &context, 1);
                assert!(!decision.await.unwrap().limited, "everything is admitted");
                (index, decided) = (index + 1, decided + 1);
            }
            decided
        });
    }
    let decided: u64 = tasks.join_all().await.into_iter().sum();
    println!("{}", decided as f64 / start.elapsed().as_secs_f64());
}
