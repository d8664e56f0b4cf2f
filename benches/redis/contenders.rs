//! Who decides.

use crate::secs;
use std::{future::Future, pin::Pin, process::Command, sync::Arc, time::Duration};
use tollgate::{
    FailureMode, Limiter, Policy, Quota,
    key::Key,
    redis::{
        RedisStore, RedisStoreBuilder,
        bb8_redis::{RedisConnectionManager, bb8::Pool},
        client::{
            AsyncConnectionConfig, Client, RedisError, Script, aio::MultiplexedConnection, cmd,
        },
    },
};

/// Decides a request of the caller with a number.
pub(crate) type Decide = Arc<dyn Fn(usize) -> Deciding + Send + Sync>;
type Deciding = Pin<Box<dyn Future<Output = ()> + Send>>;

/// So large that everything is admitted, and so slow to come back that nothing expires meanwhile.
const BURST: u64 = 10_000_000;

/// How many requests an hour each policy of a stack gives back.
pub(crate) const AN_HOUR: [u64; 3] = [100, 200, 300];

/// The quotas of a stack.
pub(crate) fn ample(policies: usize) -> Vec<Quota> {
    AN_HOUR[..policies].iter().map(|&limit| Quota::per_hour(limit).burst(BURST)).collect()
}

/// The key of a caller.
pub(crate) fn key(caller: usize) -> String {
    format!("customer:{caller:011}")
}

/// How long to wait for an answer. On a busy machine one that comes late is just late.
const PATIENCE: Duration = secs(10);

/// A store as the defaults have it, but for its deadline.
pub(crate) fn store(url: &str) -> RedisStoreBuilder {
    RedisStore::builder(url).deadline(PATIENCE)
}

/// Token buckets in a store.
pub(crate) fn tollgate(store: RedisStore, quotas: &[Quota]) -> Decide {
    let policies = quotas.iter().enumerate();
    let policies =
        policies.map(|(index, &quota)| Policy::token_bucket(format!("policy-{index}"), quota));
    limiter(store, policies)
}

pub(crate) fn limiter(store: RedisStore, policies: impl Iterator<Item = Policy<String>>) -> Decide {
    let mut limiter =
        Limiter::<String>::builder().store(store).key(|key: &String| Key::from(key.as_str()));
    for policy in policies {
        // What Redis does not decide is no decision here.
        limiter = limiter.policy(policy.on_store_failure(FailureMode::Closed));
    }
    let limiter = limiter.build().unwrap();
    Arc::new(move |caller| {
        let limiter = limiter.clone();
        Box::pin(async move {
            limiter.check_async(&key(caller)).await.expect("everything is admitted");
        })
    })
}

/// One call of one script for each policy, on one multiplexed connection: what there is without a
/// library for limits.
pub(crate) async fn plain(url: &str, quotas: &[Quota]) -> Decide {
    let connection = connect(url).await;
    let plain = Plain::new(quotas);
    Arc::new(move |caller| {
        let (plain, mut connection) = (plain.clone(), connection.clone());
        Box::pin(async move { plain.decide(caller, &mut connection).await.unwrap() })
    })
}

/// The same script on connections of a pool as its defaults make it.
pub(crate) async fn pool(url: &str, quotas: &[Quota]) -> Decide {
    let manager = RedisConnectionManager::new(url).unwrap();
    let pool = Pool::builder().build(manager).await.unwrap();
    let plain = Plain::new(quotas);
    Arc::new(move |caller| {
        let (plain, pool) = (plain.clone(), pool.clone());
        Box::pin(async move {
            // By the defaults an answer is waited for for half a second. On a busy machine some are late.
            loop {
                if let Ok(mut connection) = pool.get().await
                    && plain.decide(caller, &mut connection).await.is_ok()
                {
                    return;
                }
            }
        })
    })
}

#[derive(Clone)]
struct Plain {
    script: Arc<Script>,
    /// The interval and the burst of each policy.
    buckets: Arc<[(u64, u64)]>,
}

impl Plain {
    fn new(quotas: &[Quota]) -> Self {
        let bucket = |quota: &Quota| {
            let tollgate::Period::Fixed(period) = quota.period() else {
                unreachable!("no quota here is by the calendar")
            };
            (period.as_micros() as u64 / quota.limit(), quota.capacity())
        };
        let script = Arc::new(Script::new(include_str!("plain.lua")));
        Self { script, buckets: quotas.iter().map(bucket).collect() }
    }

    async fn decide(
        &self,
        caller: usize,
        connection: &mut MultiplexedConnection,
    ) -> Result<(), RedisError> {
        for (index, (interval, burst)) in self.buckets.iter().enumerate() {
            let mut call = self.script.key(format!("gcra:{index}:{}", key(caller)));
            call.arg(interval).arg(burst);
            let (admitted, _, _): (u8, u64, u64) = call.invoke_async(connection).await?;
            assert_eq!(admitted, 1, "everything is admitted");
        }
        Ok(())
    }
}

/// A command that does nothing.
pub(crate) async fn ping(url: &str) -> Decide {
    let connection = connect(url).await;
    Arc::new(move |_| {
        let mut connection = connection.clone();
        Box::pin(async move { cmd("PING").exec_async(&mut connection).await.unwrap() })
    })
}

pub(crate) async fn connect(url: &str) -> MultiplexedConnection {
    let config = AsyncConnectionConfig::new().set_response_timeout(Some(PATIENCE));
    let client = Client::open(url).unwrap();
    client.get_multiplexed_async_connection_with_config(&config).await.unwrap()
}

/// limitador's storage in Redis, in a program of its own; see benches/limitador. Decisions a second of
/// one round, or `None` if it was not built.
pub(crate) async fn limitador(
    url: &str,
    callers: usize,
    keys: usize,
    policies: usize,
    millis: u64,
) -> Option<f64> {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/benches/limitador/target/release/tollgate-bench-limitador"
    );
    let numbers = [callers, keys, policies, millis as usize].map(|number| number.to_string());
    let output = Command::new(path).arg(url).args(numbers).output().ok()?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap().trim().parse().unwrap())
}
