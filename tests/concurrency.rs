//! Many threads on one limiter: totals are exact, nothing locks up, and bounds hold.

mod support;

use http::request::Parts;
use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
};
use support::{
    T0, inputs, ms, secs,
    stacks::{ALGORITHMS, Algorithm, Call, limiter_with_policies, stack},
    us,
};
use tollgate::{Limiter, LocalStore, ManualClock, Outcome, Policy, Quota, key::Global};

const THREADS: u64 = 8;

/// Runs it on many threads at once, each with its number, and adds up what they return. It takes
/// seconds at most, or something is locked up.
fn on_threads(work: impl Fn(u64) -> u64 + Send + Sync + 'static) -> u64 {
    let (send, receive) = mpsc::channel();
    let (work, barrier) = (Arc::new(work), Arc::new(Barrier::new(THREADS as usize)));
    for number in 0..THREADS {
        let (send, work, barrier) = (send.clone(), work.clone(), barrier.clone());
        thread::spawn(move || {
            barrier.wait();
            let _ = send.send(work(number));
        });
    }
    drop(send);
    let result = || receive.recv_timeout(secs(60)).expect("a thread panicked or hangs");
    (0..THREADS).map(|_| result()).sum()
}

fn limiter_of(
    clock: &ManualClock,
    policies: impl IntoIterator<Item = Policy<u64>>,
) -> Limiter<u64> {
    let builder = Limiter::builder().clock(clock).key(Global);
    policies.into_iter().fold(builder, |builder, policy| builder.policy(policy)).build().unwrap()
}

/// What each policy has left.
fn remaining(limiter: &Limiter<u64>) -> Vec<u64> {
    let left = |outcomes: &[Outcome]| outcomes.iter().map(Outcome::remaining).collect();
    match limiter.peek(&0) {
        Ok(decision) => left(decision.outcomes()),
        Err(rejection) => left(rejection.outcomes()),
    }
}

#[test]
fn each_algorithm_admits_exactly_its_limit() {
    for algorithm in ALGORITHMS {
        let limiter = limiter_of(
            &ManualClock::at(T0),
            [algorithm.policy("p", Quota::per_hour(10_007)).cost(|cost: &u64| *cost)],
        );
        let checked = limiter.clone();
        let spent = on_threads(move |number| {
            let costs = (0..3_000).map(|n| 1 + (n + number) % 3);
            costs.filter(|cost| checked.check(cost).is_ok()).sum()
        });
        assert_eq!(remaining(&limiter), [0], "{algorithm:?}");
        assert_eq!(spent, 10_007, "{algorithm:?}");
    }
}

#[test]
fn a_bucket_is_exact_while_the_clock_moves_on() {
    for algorithm in [Algorithm::TokenBucket, Algorithm::LeakyBucket] {
        // Never full: it is emptied first, and 3 s bring 3,000 of 10,000.
        let clock = ManualClock::at(T0);
        let policy = algorithm.policy("p", Quota::per_second(1_000).burst(10_000));
        let limiter = limiter_of(&clock, [policy]);
        while limiter.check(&1).is_ok() {}
        let (checked, moved) = (limiter.clone(), clock.clone());
        let admitted = on_threads(move |number| {
            (0..3_000)
                .filter(|_| {
                    if number == 0 {
                        moved.advance(ms(1));
                    }
                    checked.check(&1).is_ok()
                })
                .count() as u64
        });
        assert_eq!(admitted + remaining(&limiter)[0], 3_000, "{algorithm:?}");
    }
}

#[test]
fn stacks_with_several_key_spaces_are_exact() {
    for algorithm in ALGORITHMS {
        let user = |call: &Call| u64::from(call.user);
        let tenant = |call: &Call| u64::from(call.tenant);
        let limiter = Limiter::<Call>::builder()
            .clock(&ManualClock::at(T0))
            .policy(algorithm.policy("user", Quota::per_hour(60)).key(user))
            .policy(algorithm.policy("tenant", Quota::per_hour(150)).key(tenant))
            .policy(algorithm.policy("all", Quota::per_hour(401)).key(Global))
            .build()
            .unwrap();
        let call = |user, tenant| Call { user, tenant, weight: 1, post: false };
        let checked = limiter.clone();
        let admitted = on_threads(move |number| {
            let calls = (0..1_500).map(|n| call(((n + number) % 10) as u16, (n % 4) as u16));
            calls.filter(|call| checked.check(call).is_ok()).count() as u64
        });
        let left = |user, tenant, policy: usize| {
            let peeked = limiter.peek(&call(user, tenant));
            peeked.unwrap_err().outcomes()[policy].remaining()
        };
        assert_eq!(admitted, 401, "{algorithm:?}");
        assert_eq!(left(0, 0, 2), 0);
        // What was rejected by one policy was charged to no other.
        assert_eq!((0..10).map(|user| 60 - left(user, 0, 0)).sum::<u64>(), 401, "{algorithm:?}");
        assert_eq!((0..4).map(|tenant| 150 - left(0, tenant, 1)).sum::<u64>(), 401);
    }
}

proptest::proptest! {
    #![proptest_config(inputs(12))]

    /// Whatever the stack, a run on many threads ends where a run on one does.
    #[test]
    fn threads_spend_what_one_thread_would(stack in stack()) {
        let limiter = || {
            let builder = Limiter::<Parts>::builder().clock(&ManualClock::at(T0));
            limiter_with_policies(builder, &stack).build().unwrap()
        };
        let (alone, shared) = (limiter(), limiter());
        let call = Call { user: 0, tenant: 0, weight: 1, post: true };
        let one = (0..200).filter(|_| alone.check(&call.parts()).is_ok()).count() as u64;
        let checked = shared.clone();
        let many = on_threads(move |_| {
            let parts = call.parts();
            (0..200 / THREADS).filter(|_| checked.check(&parts).is_ok()).count() as u64
        });
        proptest::prop_assert_eq!(many, one);
        proptest::prop_assert_eq!(shared.peek(&call.parts()), alone.peek(&call.parts()));
    }
}

/// Requests that need the same keys in opposite orders, all of them in single shards.
#[test]
fn no_order_of_keys_locks_up() {
    let odd = |call: &Call| call.post;
    let limiter = Limiter::<Call>::builder()
        .clock(&ManualClock::at(T0))
        .store(LocalStore::new().max_keys(3))
        .policy(
            Policy::token_bucket("a", Quota::per_second(9)).key(|call: &Call| u64::from(call.user)),
        )
        .policy(
            Policy::sliding_log("b", Quota::per_second(9))
                .key(|call: &Call| u64::from(call.tenant)),
        )
        .policy(Policy::fixed_window("c", Quota::per_second(9)).key(Global).when(odd))
        .policy(
            Policy::sliding_window("d", Quota::per_second(9))
                .key(|call: &Call| (u64::from(call.tenant), u64::from(call.user))),
        )
        .build()
        .unwrap();
    on_threads(move |number| {
        for n in 0..3_000_u64 {
            let (user, tenant) = ((n % 5) as u16, ((n + number) % 5) as u16);
            let (user, tenant) = if number % 2 == 0 { (user, tenant) } else { (tenant, user) };
            let call = Call { user, tenant, weight: 1, post: n % 3 == 0 };
            match limiter.check(&call) {
                Ok(decision) if n % 2 == 0 => limiter.refund(&call, &decision).unwrap(),
                _ if n % 17 == 0 => limiter.reset(&call).unwrap(),
                _ => drop(limiter.peek(&call)),
            }
            assert!(limiter.tracked_keys() <= 4 * 3);
        }
        0
    });
}

#[test]
fn refunds_that_race_with_charges_lose_and_mint_nothing() {
    for algorithm in ALGORITHMS {
        let limiter =
            limiter_of(&ManualClock::at(T0), [algorithm.policy("p", Quota::per_hour(50))]);
        let most = Arc::new(AtomicU64::new(0));
        let held = Arc::new(AtomicU64::new(0));
        let shared = limiter.clone();
        let (most_held, held_now) = (most.clone(), held);
        let kept = on_threads(move |number| {
            let mut kept = 0;
            for n in 0..2_000 {
                let Ok(decision) = shared.check(&1) else { continue };
                most_held.fetch_max(held_now.fetch_add(1, Relaxed) + 1, Relaxed);
                if n % 200 == number {
                    kept += 1;
                    continue;
                }
                // No longer held before somebody else can have it.
                held_now.fetch_sub(1, Relaxed);
                shared.refund(&1, &decision).unwrap();
            }
            kept
        });
        assert!(most.load(Relaxed) <= 50, "{algorithm:?}");
        assert_eq!(remaining(&limiter), [50 - kept], "{algorithm:?}");
    }
}

#[test]
fn the_cap_holds_while_keys_come_and_are_swept() {
    for cap in [1, 50, 3_000] {
        let clock = ManualClock::at(T0);
        let limiter = Limiter::<u64>::builder()
            .clock(&clock)
            .store(LocalStore::new().max_keys(cap).max_log_entries(500))
            .key(|caller: &u64| *caller)
            .policy(Policy::token_bucket("tb", Quota::per_second(1)))
            .policy(Policy::sliding_log("sl", Quota::per_second(7)))
            .build()
            .unwrap();
        let (shared, moved) = (limiter.clone(), clock.clone());
        on_threads(move |number| {
            for n in 0..4_000_u64 {
                // Half of the callers come again and again.
                let caller = if n % 2 == 0 { n % 64 } else { n * THREADS + number };
                let _ = shared.check(&caller);
                if n % 16 == 0 {
                    moved.advance(us(700));
                    assert!(shared.tracked_keys() <= cap);
                }
            }
            0
        });
        assert!(limiter.tracked_keys() <= cap);
        clock.advance(secs(5));
        assert!(limiter.check(&0).is_ok());
        clock.advance(ms(1));
        assert!(limiter.check(&1).is_ok());
        assert!(limiter.tracked_keys() <= 2.min(cap));
    }
}

#[test]
fn a_clock_that_jumps_about_locks_nothing_up_and_keeps_the_cap() {
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .store(LocalStore::new().max_keys(100))
        .key(|caller: &u64| *caller % 500)
        .policy(Policy::token_bucket("tb", Quota::per_second(5)))
        .policy(Policy::fixed_window("fw", Quota::per_calendar_month(1_000)))
        .policy(Policy::sliding_window("sw", Quota::per_minute(50)))
        .policy(Policy::sliding_log("sl", Quota::per_minute(50)))
        .build()
        .unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let (moved, stop) = (clock, done.clone());
    let mover = thread::spawn(move || {
        for jump in (0_u64..).take_while(|_| !stop.load(Relaxed)) {
            moved.set(T0 + secs(jump * 7_919_777 % 1_000_000_000));
        }
    });
    let shared = limiter.clone();
    on_threads(move |number| {
        for n in 0..3_000_u64 {
            let caller = n * 31 + number;
            if let Ok(decision) = shared.check(&caller) {
                let _ = shared.refund(&caller, &decision);
            }
            assert!(shared.tracked_keys() <= 100);
        }
        0
    });
    done.store(true, Relaxed);
    mover.join().unwrap();
    assert!(limiter.tracked_keys() <= 100);
}
