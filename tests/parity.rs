//! The engine in this process and the scripts on a server give the same decisions, with the same
//! numbers, for the same stacks, costs and times.

mod support;

use proptest::{collection::vec, option, prelude::*, sample::select, test_runner::TestRunner};
use std::{cell::Cell, future::Future, sync::Arc, time::Duration};
use support::{
    T0, inputs,
    server::{Flavour, Server},
    stacks::{ALGORITHMS, Algorithm},
    us,
};
use tokio::runtime::Runtime;
use tollgate::{
    Decision, Limiter, LimiterBuilder, ManualClock, Policy, Quota, Rejection, key::Key,
    redis::RedisStore,
};

/// A request: whom its policies count, what it costs them, and their quotas for it.
#[derive(Clone, Debug)]
struct Ask {
    /// The stack's key, and that of policies with a key of their own.
    who: [u8; 2],
    costs: Vec<u64>,
    quotas: Vec<Option<Quota>>,
}

/// What happens next.
#[derive(Clone, Debug)]
enum Event {
    Check(Ask),
    Peek(Ask),
    /// Gives back the last decision, or one before it.
    Refund(usize),
    Reset(Ask),
    /// The clock goes on, or back.
    Pass(i64),
}

#[derive(Clone, Debug)]
struct Limit {
    algorithm: Algorithm,
    quota: Quota,
    max_delay: Option<Duration>,
    own_key: bool,
    varies: bool,
}

impl Limit {
    fn policy(&self, index: usize) -> Policy<Ask> {
        let mut policy = self.algorithm.policy(["a", "b", "c", "d"][index], self.quota);
        if let Some(max_delay) = self.max_delay {
            policy = policy.max_delay(max_delay);
        }
        if self.own_key {
            policy = policy.key(|ask: &Ask| Key::from(u64::from(ask.who[1])));
        }
        if self.varies {
            policy = policy.quota_for(move |ask: &Ask| ask.quotas[index]);
        }
        policy.cost(move |ask: &Ask| ask.costs[index])
    }
}

fn limiter(stack: &[Limit], clock: &ManualClock, store: Option<RedisStore>) -> Limiter<Ask> {
    let builder = Limiter::builder().clock(clock).key(|ask: &Ask| Key::from(u64::from(ask.who[0])));
    let builder = stack
        .iter()
        .enumerate()
        .fold(builder, |builder, (index, limit)| builder.policy(limit.policy(index)));
    let with_store = |builder: LimiterBuilder<Ask>| match store {
        Some(store) => builder.store(store),
        None => builder,
    };
    with_store(builder).build().unwrap()
}

fn store(server: &Server, namespace: &str, clock: &ManualClock) -> RedisStore {
    RedisStore::builder(server.url())
        .namespace(namespace)
        .clock(clock)
        .deadline(Duration::from_secs(20))
        // Then those who wait are decided in the order in which they came.
        .in_flight(1)
        .build()
        .unwrap()
}

// === strategies ===

fn quota() -> impl Strategy<Value = Quota> {
    let period = prop_oneof![
        Just(us(1_000_000)),
        Just(us(60_000_000)),
        (1_000_u64..20_000_000).prop_map(us),
        (1_u64..100_000).prop_map(Duration::from_secs),
        // A year and more, in which microseconds do not always fit.
        (1_u64..400).prop_map(|days| Duration::from_secs(days * 86_400)),
    ];
    let limit = prop_oneof![6 => 1_u64..9, 2 => 1_u64..200, 1 => 1_u64..20_000];
    (limit, period).prop_map(|(limit, period)| Quota::new(limit, period))
}

fn limit() -> impl Strategy<Value = Limit> {
    limit_by(&ALGORITHMS)
}

/// For buckets the script has a short way.
fn bucket() -> impl Strategy<Value = Limit> {
    let limit = limit_by(&[Algorithm::TokenBucket, Algorithm::LeakyBucket]);
    (limit, proptest::bool::weighted(0.1)).prop_map(|(limit, other)| Limit {
        own_key: limit.own_key && other,
        varies: limit.varies && other,
        ..limit
    })
}

fn limit_by(algorithms: &'static [Algorithm]) -> impl Strategy<Value = Limit> {
    let bursts = (option::of(1_u64..12), option::weighted(0.3, 0_u64..5_000_000));
    (select(algorithms), quota(), bursts, any::<bool>(), proptest::bool::weighted(0.3)).prop_map(
        |(algorithm, quota, (burst, delay_us), own_key, varies)| {
            let quota = match burst {
                Some(burst) if algorithm.is_bucket() => quota.burst(burst),
                _ => quota,
            };
            let max_delay =
                delay_us.map(us).filter(|_| matches!(algorithm, Algorithm::LeakyBucket));
            // Of a quota in coarser ticks, a delay would have to be whole ticks.
            let max_delay = max_delay.map(|delay| Duration::from_secs(delay.as_secs()));
            Limit { algorithm, quota, max_delay, own_key, varies }
        },
    )
}

/// Costs are mostly one, so that a day's quota is not used up at once.
fn ask(stack: &[Limit]) -> impl Strategy<Value = Ask> + use<> {
    let quotas: Vec<_> = stack
        .iter()
        .map(|limit| {
            let (own, bucket) = (limit.quota, limit.algorithm.is_bucket());
            option::of((quota(), 1_u64..30)).prop_map(move |other| {
                other.map(|(other, limit)| match (bucket, own.period()) {
                    (true, _) => other,
                    (false, tollgate::Period::Fixed(period)) => Quota::new(limit, period),
                    (false, _) => own,
                })
            })
        })
        .collect();
    let cost =
        prop_oneof![8 => Just(1_u64), 2 => 0_u64..4, 1 => 0_u64..30_000, 1 => Just(u64::MAX)];
    (vec(cost, stack.len()), [0_u8..2, 0_u8..3], quotas).prop_map(|(costs, who, quotas)| Ask {
        who,
        costs,
        quotas,
    })
}

/// A clock that only goes on.
fn event(stack: &[Limit]) -> impl Strategy<Value = Event> + use<> {
    let forward = prop_oneof![
        4 => 0_i64..1_000_000,
        3 => 0_i64..100_000_000,
        1 => 0_i64..200_000_000_000,
        1 => 0_i64..40_000_000_000_000,
    ];
    prop_oneof![
        12 => ask(stack).prop_map(Event::Check),
        2 => ask(stack).prop_map(Event::Peek),
        4 => prop_oneof![0_usize..2, 0_usize..8].prop_map(Event::Refund),
        1 => ask(stack).prop_map(Event::Reset),
        6 => forward.prop_map(Event::Pass),
    ]
}

fn history(limit: impl Strategy<Value = Limit>) -> impl Strategy<Value = (Vec<Limit>, Vec<Event>)> {
    vec(limit, 1..4).prop_flat_map(|stack| {
        let events = vec(event(&stack), 1..40);
        (Just(stack), events)
    })
}

/// A clock that is put back, too. All that is used stays used meanwhile: what is fresh again may be
/// forgotten by one engine and not by the other.
fn history_with_steps() -> impl Strategy<Value = (Vec<Limit>, Vec<Event>)> {
    let slow = (1_u64..9, 4_u64..4_000)
        .prop_map(|(limit, hours)| Quota::new(limit, Duration::from_secs(hours * 3_600)));
    let limits = (limit(), slow).prop_map(|(limit, quota)| Limit { quota, varies: false, ..limit });
    vec(limits, 1..4).prop_flat_map(|stack| {
        let back = prop_oneof![
            3 => 1_i64..3_000_000,
            2 => 1_i64..400_000_000_000,
            2 => 1_i64..40_000_000_000_000,
        ];
        let event = prop_oneof![
            12 => ask(&stack).prop_map(Event::Check),
            2 => ask(&stack).prop_map(Event::Peek),
            2 => (0_i64..1_000_000).prop_map(Event::Pass),
            3 => back.prop_map(|back| Event::Pass(-back)),
        ];
        (Just(stack), vec(event, 1..40))
    })
}

// === the promise ===

type Answer = Result<Decision, Rejection>;

/// Lives through a history twice, in this process and on the server.
async fn live(server: &Server, namespace: &str, stack: &[Limit], events: &[Event]) {
    let clock = ManualClock::at(T0);
    let store = store(server, namespace, &clock);
    let here = limiter(stack, &clock, None);
    let there = limiter(stack, &clock, Some(store.clone()));
    let mut decided: Vec<(Ask, Decision)> = Vec::new();
    for (step, event) in events.iter().enumerate() {
        let compare = |here: Answer, there: Answer| {
            assert_eq!(here, there, "at step {step} of {events:#?}");
            here
        };
        match event {
            Event::Check(ask) => {
                let answer = compare(here.check(ask), there.check_async(ask).await);
                decided.extend(answer.ok().map(|decision| (ask.clone(), decision)));
            }
            Event::Peek(ask) => {
                let _ = compare(here.peek(ask), there.peek_async(ask).await);
            }
            Event::Refund(back) => {
                let Some(index) = decided.len().checked_sub(1 + back) else { continue };
                let (ask, decision) = decided.remove(index);
                here.refund(&ask, &decision).unwrap();
                there.refund_async(&ask, &decision).await.unwrap();
            }
            Event::Reset(ask) => {
                here.reset(ask).unwrap();
                there.reset_async(ask).await.unwrap();
            }
            Event::Pass(by_us) => {
                let now = clock.now();
                let by = us(by_us.unsigned_abs());
                clock.set(if *by_us >= 0 { now + by } else { now.saturating_sub(by) });
            }
        }
    }
    assert_eq!(store.health().failed, 0, "{:?}", store.health());
}

fn on_every_server(test: impl Fn(&Runtime, &Server, &mut TestRunner)) {
    let runtime = Runtime::new().unwrap();
    for flavour in Flavour::ALL {
        let server = Server::start(flavour);
        let mut runner = TestRunner::new(inputs(120));
        test(&runtime, &server, &mut runner);
    }
}

fn compare_lives(histories: impl Strategy<Value = (Vec<Limit>, Vec<Event>)>) {
    on_every_server(|runtime, server, runner| {
        let lives = Cell::new(0);
        let result = runner.run(&histories, |(stack, events)| {
            lives.set(lives.get() + 1);
            runtime.block_on(live(server, &format!("life-{}", lives.get()), &stack, &events));
            Ok(())
        });
        if let Err(error) = result {
            panic!("{error}");
        }
    });
}

#[test]
fn the_same_history_gets_the_same_answers() {
    compare_lives(history(limit()));
}

#[test]
fn the_same_history_of_buckets_gets_the_same_answers() {
    compare_lives(history(bucket()));
}

#[test]
fn the_same_answers_are_given_when_the_clock_is_put_back() {
    compare_lives(history_with_steps());
}

/// Requests that wait together are decided as if they had come one after the other.
#[test]
fn a_batch_gets_the_answers_that_each_would_get_alone() {
    let crowds = vec(limit(), 1..4).prop_flat_map(|stack| {
        let asks = vec(ask(&stack), 2..60);
        (Just(stack), asks)
    });
    compare_crowds(crowds);
}

#[test]
fn a_batch_for_buckets_gets_the_answers_that_each_would_get_alone() {
    let crowds = vec(bucket(), 1..4).prop_flat_map(|stack| {
        let ones = Just(vec![1; stack.len()]);
        let ask = (ask(&stack), 0_u8..40, option::weighted(0.8, ones));
        let ask = ask.prop_map(|(ask, who, ones)| Ask {
            who: [who, ask.who[1]],
            costs: ones.unwrap_or(ask.costs),
            quotas: ask.quotas,
        });
        let asks = vec(ask, 2..120);
        (Just(stack), asks)
    });
    compare_crowds(crowds);
}

fn compare_crowds(crowds: impl Strategy<Value = (Vec<Limit>, Vec<Ask>)>) {
    on_every_server(|runtime, server, runner| {
        let crowd_number = Cell::new(0);
        let result = runner.run(&crowds, |(stack, asks)| {
            crowd_number.set(crowd_number.get() + 1);
            let namespace = format!("crowd-{}", crowd_number.get());
            let clock = ManualClock::at(T0);
            let store = store(server, &namespace, &clock);
            let here = limiter(&stack, &clock, None);
            let there = limiter(&stack, &clock, Some(store.clone()));
            // Some come one after the other, and go in that order.
            let first = &asks[..asks.len() / 8];
            let before: Vec<_> = first.iter().map(|ask| here.check(ask)).collect();
            let also_before = runtime.block_on(one_by_one(&there, first));
            prop_assert_eq!(&before, &also_before);
            for (ask, answer) in first.iter().zip(before) {
                if let Ok(decision) = answer {
                    here.refund(ask, &decision).unwrap();
                    runtime.block_on(there.refund_async(ask, &decision)).unwrap();
                }
            }
            let expected: Vec<_> = asks.iter().map(|ask| here.check(ask)).collect();
            let answers = runtime.block_on(together(&there, &asks));
            prop_assert_eq!(expected, answers);
            prop_assert_eq!(store.calls().1, (first.len() + asks.len()) as u64);
            Ok(())
        });
        if let Err(error) = result {
            panic!("{error}");
        }
    });
}

async fn one_by_one(limiter: &Limiter<Ask>, asks: &[Ask]) -> Vec<Answer> {
    let mut answers = Vec::new();
    for ask in asks {
        answers.push(limiter.check_async(ask).await);
    }
    answers
}

/// Asks all at the same time.
fn together(limiter: &Limiter<Ask>, asks: &[Ask]) -> impl Future<Output = Vec<Answer>> {
    let limiter = Arc::new(limiter.clone());
    let asks = asks.to_vec();
    async move {
        let mut futures: Vec<_> =
            asks.iter().map(|ask| Some(Box::pin(limiter.check_async(ask)))).collect();
        let mut answers: Vec<Option<Answer>> = vec![None; asks.len()];
        std::future::poll_fn(|cx| {
            for (future, answer) in futures.iter_mut().zip(&mut answers) {
                if let Some(pending) = future
                    && let std::task::Poll::Ready(ready) = pending.as_mut().poll(cx)
                {
                    *answer = Some(ready);
                    *future = None;
                }
            }
            if answers.iter().all(Option::is_some) {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        })
        .await;
        answers.into_iter().flatten().collect()
    }
}
