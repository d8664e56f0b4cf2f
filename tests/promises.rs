//! The promises of the crate docs, each by its name.

mod support;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, request::Parts};
use proptest::{collection::vec, option, prelude::*, test_runner::Config};
use std::{
    collections::HashSet,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use support::{
    App, Fields, T0, YEAR, get, inputs, ms, now, secs, send,
    stacks::{
        ALGORITHMS, Algorithm, Call, Limit, Model, Opinion, everybody, stack, traffic,
        with_policies,
    },
    us, with,
};
use tollgate::{
    CallError, Clock, Decision, Limiter, LocalStore, ManualClock, Outcome, Policy, Quota,
    RateLimit, RateLimitLayer, RateLimitLayerBuilder, Rejection,
    key::{BearerToken, Global, Header, Key, KeyExtractor, Path},
    reply::{Headers, LegacyReset},
};
use tower::{Layer, Service, service_fn};

fn app(stack: &[Limit]) -> App {
    App::new(|builder| with_policies(builder, stack))
}

fn outcomes(answer: &Result<Decision, Rejection>) -> &[Outcome] {
    match answer {
        Ok(decision) => decision.outcomes(),
        Err(rejection) => rejection.outcomes(),
    }
}

/// What all policies say to everybody, without charging anything.
fn peek_all(app: &App) -> Vec<Result<Decision, Rejection>> {
    everybody().map(|call| app.layer.limiter().peek(&call.parts())).collect()
}

proptest! {
    #![proptest_config(inputs(250))]

    #[test]
    fn promise_1_all_or_nothing(stack in stack(), traffic in traffic(25)) {
        let app = app(&stack);
        let backwards = self::app(&stack.iter().rev().cloned().collect::<Vec<_>>());
        for (gap_us, call) in traffic {
            app.clock.advance(us(gap_us));
            backwards.clock.advance(us(gap_us));
            let before = peek_all(&app);
            let answer = app.layer.limiter().check(&call.parts());
            if answer.is_err() {
                prop_assert_eq!(peek_all(&app), before, "something was consumed");
            } else {
                for outcome in outcomes(&answer) {
                    prop_assert!(outcome.is_admitted());
                }
            }

            // In any order of the policies.
            let mut other = outcomes(&backwards.layer.limiter().check(&call.parts())).to_vec();
            other.reverse();
            prop_assert_eq!(outcomes(&answer), other);
        }
    }

    /// Nor does it give anything: whoever asks under a tighter quota as well gets no more for it
    /// under its own.
    #[test]
    fn promise_1_all_or_nothing_between_quotas(
        algorithm in proptest::sample::select(&ALGORITHMS),
        own in (1_u64..9, 1_u64..9),
        tighter in (1_u64..9, 1_u64..9),
        requests in vec((0_u64..30_000_000, 0..3), 1..40),
    ) {
        let quota = |limit, burst| {
            let quota = Quota::per_minute(limit);
            if algorithm.is_bucket() { quota.burst(burst) } else { quota }
        };
        let tighter = quota(tighter.0.min(own.0), tighter.1.min(own.1));
        let own = quota(own.0, own.1);
        let app = || {
            App::new(|builder| {
                builder.key(Global).policy(algorithm.policy("p", own).quota_for(
                    move |parts: &Parts| parts.headers.contains_key("x-tight").then_some(tighter),
                ))
            })
        };
        let (asking, not_asking) = (app(), app());
        let tight = with("x-tight", "").into_parts().0;
        let (mut admitted, mut admitted_otherwise) = (0, 0);
        for (gap_us, kind) in requests {
            asking.clock.advance(us(gap_us));
            not_asking.clock.advance(us(gap_us));
            let limiter = asking.layer.limiter();
            match kind {
                0 => drop(limiter.peek(&tight)),
                1 if limiter.peek(&tight).is_err() => prop_assert!(limiter.check(&tight).is_err()),
                _ => {
                    admitted += u32::from(asking.status(get()) == 200);
                    admitted_otherwise += u32::from(not_asking.status(get()) == 200);
                }
            }
            prop_assert!(admitted <= admitted_otherwise);
            // Only buckets are counted at another pace while another quota is asked for.
            prop_assert!(algorithm.is_bucket() || admitted == admitted_otherwise);
        }
    }

    #[test]
    fn promise_2_exact(stack in stack(), traffic in traffic(60)) {
        let app = app(&stack);
        let mut model = Model::new(&stack);
        for (gap_us, call) in traffic {
            app.clock.advance(us(gap_us));
            let answer = app.layer.limiter().check(&call.parts());
            let expected = model.decide(&call, app.clock.now().as_micros() as u64);
            let said: Vec<_> = outcomes(&answer)
                .iter()
                .map(|outcome| Opinion {
                    policy: outcome.policy(),
                    admits: outcome.is_admitted(),
                    remaining: outcome.remaining(),
                })
                .collect();
            prop_assert_eq!(said, &expected[..]);
            prop_assert_eq!(answer.is_ok(), expected.iter().all(|opinion| opinion.admits));
        }
    }

    #[test]
    fn promise_2_exact_whatever_is_refunded_and_when(
        algorithm in proptest::sample::select(&ALGORITHMS),
        limit in 1_u64..6,
        requests in vec(
            (prop_oneof![Just(0), 0_u64..700_000], option::of(0_usize..9)),
            1..60,
        ),
    ) {
        let app = App::new(|builder| {
            builder.key(Global).policy(algorithm.policy("p", Quota::per_second(limit)))
        });
        let limiter = app.layer.limiter();
        let request = get().into_parts().0;
        // Those that are not known to be free, as far as anybody knows yet.
        let mut counted = Vec::new();
        for (gap_us, refunded) in requests {
            app.clock.advance(us(gap_us));
            match refunded {
                Some(index) if !counted.is_empty() => {
                    let decision = counted.remove(index % counted.len());
                    limiter.refund(&request, &decision).unwrap();
                }
                _ => counted.extend(limiter.check(&request)),
            }
        }
        for (first, decision) in counted.iter().enumerate() {
            for (later, other) in counted[first..].iter().enumerate() {
                let time = other.time() - decision.time();
                prop_assert!(within_bound(algorithm, limit, later as u64 + 1, time), "{:?}", time);
            }
        }
    }

    #[test]
    fn promise_3_one_clock_a_reset_that_did_not_change_is_told_the_same_twice(
        stack in stack(),
        traffic in traffic(25),
        later_us in vec(0_u64..3_000_000, 1..6),
    ) {
        let app = app(&stack);
        for (gap_us, call) in traffic {
            app.clock.advance(us(gap_us));
            let _ = app.layer.limiter().check(&call.parts());
        }
        // Nobody spends anything any more, so it is settled when more than now can be spent.
        let start = app.clock.now();
        let resets = |later_us: u64| {
            app.clock.set(start + us(later_us));
            let answers = peek_all(&app);
            let told: Vec<_> = answers.iter().flat_map(outcomes).copied().collect();
            told.into_iter().map(move |outcome| (outcome, us(later_us) + outcome.reset_after()))
        };
        for later_us in later_us {
            for ((before, reset), (after, reset_again)) in resets(0).zip(resets(later_us)) {
                if before.remaining() == after.remaining() && reset > us(later_us) {
                    prop_assert_eq!(reset_again, reset, "{:?}", after);
                }
            }
        }
    }

    #[test]
    fn promise_4_honest_waits_to_the_microsecond(stack in stack(), traffic in traffic(40)) {
        let app = app(&stack);
        for (gap_us, call) in traffic {
            app.clock.advance(us(gap_us));
            let Err(rejection) = app.layer.limiter().check(&call.parts()) else { continue };
            let longest = rejection.outcomes().iter().filter_map(Outcome::retry_after).max();
            match rejection.retry_after() {
                Some(wait) => {
                    prop_assert!(wait > Duration::ZERO);
                    prop_assert_eq!(longest, Some(wait));
                    let start = app.clock.now();
                    app.clock.set(start + wait - us(1));
                    prop_assert!(app.layer.limiter().check(&call.parts()).is_err(), "too early");
                    app.clock.set(start + wait);
                    prop_assert!(app.layer.limiter().check(&call.parts()).is_ok(), "too late");
                }
                None => {
                    let never = stack.iter().any(|limit| {
                        limit.applies_to(&call) && limit.cost_of(&call) > limit.capacity()
                    });
                    prop_assert!(never);
                }
            }
        }
    }

    #[test]
    fn promise_4_honest_waits_in_whole_seconds(
        stack in stack(),
        traffic in traffic(40),
        is_grpc: bool,
    ) {
        let app = app(&stack);
        let request = |call: &Call| {
            let mut request = call.request();
            if is_grpc {
                let grpc = HeaderValue::from_static("application/grpc");
                request.headers_mut().insert("content-type", grpc);
            }
            request
        };
        let admitted = |response: &Response<Bytes>| {
            response.status() == 200 && response.number("grpc-status").is_none()
        };
        for (gap_us, call) in traffic {
            app.clock.advance(us(gap_us));
            let response = app.send(request(&call));
            if admitted(&response) {
                prop_assert_eq!(response.retry_after(), None);
                continue;
            }
            let exact = response.extensions().get::<Rejection>().unwrap().retry_after();
            let Some(told) = response.retry_after() else {
                prop_assert_eq!(exact, None);
                continue;
            };
            prop_assert!(told >= 1);
            prop_assert!(secs(told) >= exact.unwrap() && secs(told - 1) < exact.unwrap());
            if is_grpc {
                let pushback = ms(response.number("grpc-retry-pushback-ms").unwrap());
                prop_assert!(pushback >= exact.unwrap());
                prop_assert!(pushback < exact.unwrap() + ms(1));
            }
            app.clock.advance(secs(told));
            prop_assert!(admitted(&app.send(request(&call))));
        }
    }
}

/// Whether so many requests may be admitted in a stretch of so much time, at `limit` a second, where
/// others are refunded.
fn within_bound(algorithm: Algorithm, limit: u64, admitted: u64, time: Duration) -> bool {
    let us = time.as_micros() as u64;
    match algorithm {
        Algorithm::TokenBucket | Algorithm::LeakyBucket => {
            admitted * 1_000_000 <= limit * (1_000_000 + us)
        }
        Algorithm::SlidingLog => admitted <= limit * (us / 1_000_000 + 1),
        _ => admitted <= 2 * limit * (us / 1_000_000 + 1),
    }
}

// === 1. all or nothing ===

/// Nor does it give back what was used under another quota, and a peek does neither.
#[test]
fn promise_1_all_or_nothing_of_a_caller_who_moves_between_quotas() {
    for algorithm in ALGORITHMS {
        let mut tighter = vec![Quota::per_minute(2)];
        if algorithm.is_bucket() {
            tighter.extend([
                Quota::per_minute(10).burst(2),
                Quota::per_minute(2).burst(10),
                Quota::new(1, 10 * YEAR),
            ]);
        }
        for tighter in tighter {
            let app = App::new(|builder| {
                let policy =
                    algorithm.policy("p", Quota::per_minute(10)).quota_for(move |parts: &Parts| {
                        parts.headers.contains_key("x-tight").then_some(tighter)
                    });
                builder.key(Global).policy(policy)
            });
            assert_eq!(app.statuses(10, get), [200; 10]);
            let before = app.layer.limiter().check(&get().into_parts().0).unwrap_err();
            let tight = with("x-tight", "").into_parts().0;
            assert!(app.layer.limiter().peek(&tight).is_err());
            let rejection = app.layer.limiter().check(&tight).unwrap_err();
            let after = app.layer.limiter().check(&get().into_parts().0).unwrap_err();
            assert_eq!(after, before, "{algorithm:?} after {tighter}");
            // And the wait that the tighter quota promises is honest.
            app.clock.advance(rejection.retry_after().unwrap());
            assert_eq!(app.status(with("x-tight", "")), 200, "{algorithm:?} after {tighter}");
        }
    }
}

// === 2. exact ===

/// What came back by itself is not given back a second time.
#[test]
fn promise_2_exact_also_after_a_refund() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder.key(Global).policy(algorithm.policy("p", Quota::per_second(3)))
        });
        let limiter = app.layer.limiter();
        let request = get().into_parts().0;
        let free: Vec<_> = (0..3).map(|_| limiter.check(&request).unwrap()).collect();
        // Two periods later nothing of that counts any more.
        app.at(secs(2));
        assert_eq!(app.statuses(4, get), [200, 200, 200, 429]);
        for decision in &free {
            limiter.refund(&request, decision).unwrap();
        }
        assert_eq!(app.status(get()), 429, "{algorithm:?}");
    }
}

/// What is given back lay beneath something else, which therefore drains sooner.
#[test]
fn promise_2_exact_where_the_older_is_given_back_first() {
    for algorithm in [Algorithm::TokenBucket, Algorithm::LeakyBucket] {
        let app = App::new(|builder| {
            builder.key(Global).policy(algorithm.policy("p", Quota::per_second(10)))
        });
        let limiter = app.layer.limiter();
        let request = get().into_parts().0;
        let check = || limiter.check(&request).unwrap();
        let refund = |decision: &Decision| limiter.refund(&request, decision).unwrap();
        let older: Vec<_> = (0..5).map(|_| check()).collect();
        let newer: Vec<_> = (0..5).map(|_| check()).collect();
        older.iter().for_each(refund);
        app.at(ms(90));
        assert_eq!(app.statuses(5, get), [200; 5]);
        newer.iter().for_each(refund);
        assert_eq!(app.statuses(6, get), [200, 200, 200, 200, 200, 429], "{algorithm:?}");
        app.at(ms(100));
        assert_eq!(app.status(get()), 429, "eleven in a tenth of a second");
    }
}

/// Also if the bucket was empty in between, so that nothing else was known of it.
#[test]
fn promise_2_exact_where_the_older_is_given_back_first_and_nothing_is_left() {
    for algorithm in [Algorithm::TokenBucket, Algorithm::LeakyBucket] {
        let app = App::new(|builder| {
            builder.key(Global).policy(algorithm.policy("p", Quota::per_second(10)))
        });
        let limiter = app.layer.limiter();
        let request = get().into_parts().0;
        let older: Vec<_> = (0..9).map(|_| limiter.check(&request).unwrap()).collect();
        let newer = limiter.check(&request).unwrap();
        for decision in &older {
            limiter.refund(&request, decision).unwrap();
        }
        app.at(ms(150));
        assert_eq!(app.statuses(5, get), [200; 5]);
        limiter.refund(&request, &newer).unwrap();
        assert_eq!(app.statuses(6, get), [200, 200, 200, 200, 200, 429], "{algorithm:?}");
    }
}

/// Where there is no room to remember that something was given back, nothing is given back from beneath
/// others.
#[test]
fn promise_2_exact_where_there_is_no_room_for_what_refunds_leave() {
    let app = App::new(|builder| {
        let policy = |name| Policy::token_bucket(name, Quota::per_minute(10));
        let store = LocalStore::new().max_keys(1);
        builder.key(Global).store(store).policy(policy("a")).policy(policy("b"))
    });
    let limiter = app.layer.limiter();
    let request = get().into_parts().0;
    let left = || {
        let decision = limiter.peek(&request).unwrap();
        decision.outcomes().iter().map(Outcome::remaining).collect::<Vec<_>>()
    };
    let [older, newer] = [(); 2].map(|()| limiter.check(&request).unwrap());
    assert_eq!(left(), [8, 8]);
    limiter.refund(&request, &older).unwrap();
    assert_eq!(left(), [9, 8]);
    limiter.refund(&request, &newer).unwrap();
    assert_eq!(left(), [10, 9], "nothing lay above it");
}

#[test]
fn promise_2_exact_is_what_a_refund_gives_back_at_once() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder.key(Global).policy(algorithm.policy("p", Quota::per_minute(3)))
        });
        let limiter = app.layer.limiter();
        let request = get().into_parts().0;
        for _ in 0..10 {
            let decision = limiter.check(&request).unwrap();
            limiter.refund(&request, &decision).unwrap();
        }
        let kept = limiter.check(&request).unwrap();
        assert_eq!(app.statuses(3, get), [200, 200, 429], "{algorithm:?}");
        limiter.refund(&request, &kept).unwrap();
        assert_eq!(app.statuses(2, get), [200, 429], "{algorithm:?}");
    }
}

// === 3. one clock ===

/// A clock that counts how often it is read.
fn counted(reads: &Arc<AtomicU64>) -> Clock {
    let reads = reads.clone();
    Clock::from_fn(move || {
        // No two reads tell the same time.
        T0 + us(reads.fetch_add(1, Relaxed))
    })
}

fn deep(builder: RateLimitLayerBuilder) -> RateLimitLayerBuilder {
    ALGORITHMS.iter().zip(["a", "b", "c", "d", "e", "f"]).fold(
        builder,
        |builder, (algorithm, name)| {
            let policy = algorithm.policy(name, Quota::per_minute(2));
            builder.policy(if name < "d" {
                policy.key(Global)
            } else {
                policy.key(Header::from_static("x-user"))
            })
        },
    )
}

#[test]
fn promise_3_one_clock_that_is_read_once_per_decision() {
    let reads = Arc::new(AtomicU64::new(0));
    let layer = deep(RateLimitLayer::builder().clock(counted(&reads))).build().unwrap();
    let reads = || reads.swap(0, Relaxed);
    let limiter = layer.limiter();
    let alice = with("x-user", "alice").into_parts().0;
    assert_eq!(reads(), 0, "nothing is to be decided yet");

    assert_eq!(limiter.check(&alice).unwrap().time(), T0);
    assert_eq!(reads(), 1, "admitted");
    assert!(limiter.peek(&alice).is_ok());
    assert_eq!(reads(), 1, "peeked at");
    for status in [200, 429, 429] {
        let response = send(layer.layer(service_fn(support::ok)), with("x-user", "alice"));
        assert_eq!(response.status(), status);
        assert_eq!(reads(), 1, "through the layer: {status}");
    }
    assert!(limiter.check(&get().into_parts().0).is_err());
    assert!(reads() <= 1, "no key");
}

/// Also where the policy could hold it back.
#[test]
fn promise_3_one_clock_that_is_read_once_for_a_request_that_need_not_wait() {
    let reads = Arc::new(AtomicU64::new(0));
    let layer = RateLimitLayer::builder()
        .clock(counted(&reads))
        .key(Global)
        .policy(Policy::leaky_bucket("shaping", Quota::per_second(1)).max_delay(secs(9)))
        .build()
        .unwrap();
    assert_eq!(send(layer.layer(service_fn(support::ok)), get()).status(), 200);
    assert_eq!(reads.load(Relaxed), 1);
}

#[test]
fn promise_3_one_clock_prints_a_reset_the_same_however_often_it_is_asked() {
    let policies = || {
        let minute = Quota::per_minute(2);
        [
            (Policy::fixed_window("p", minute), "1728000060"),
            (Policy::fixed_window("p", minute).from_first_hit(), "1728000070"),
            (Policy::sliding_window("p", minute), "1728000090"),
            (Policy::sliding_log("p", minute), "1728000070"),
            (Policy::token_bucket("p", minute), "1728000040"),
            (Policy::leaky_bucket("p", minute), "1728000040"),
        ]
    };
    for (policy, reset) in policies() {
        let app = App::new(|builder| {
            let headers = Headers::default().legacy(LegacyReset::EpochSeconds);
            builder.key(Global).policy(policy).headers(headers)
        });
        app.at(secs(10)).statuses(2, get);
        for millis in [10_000, 10_001, 10_999, 13_500, 25_999, 39_999] {
            let response = app.at(ms(millis)).send(get());
            assert_eq!(response.status(), 429);
            assert_eq!(response.text("x-ratelimit-reset"), Some(reset), "at {millis} ms");
        }
    }
}

// === 4. honest waits ===

/// Also where the caller is looked at under a slower quota meanwhile, and turned away under it.
#[test]
fn promise_4_honest_waits_of_a_caller_with_two_quotas() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            let slower = Quota::per_minute(1);
            builder.key(Global).policy(algorithm.policy("p", Quota::per_minute(10)).quota_for(
                move |parts: &Parts| parts.headers.contains_key("x-slow").then_some(slower),
            ))
        });
        app.statuses(10, get);
        let told = app.send(get()).retry_after().unwrap();
        let slow = with("x-slow", "").into_parts().0;
        assert!(app.layer.limiter().peek(&slow).is_err());
        assert!(app.layer.limiter().check(&slow).is_err());
        assert_eq!(app.at(secs(told)).status(get()), 200, "{algorithm:?} after {told} s");
    }
}

// === 5. bounded memory ===

#[test]
fn promise_5_bounded_memory() {
    for cap in [1, 2, 7, 100, 1_023, 1_024, 2_047, 2_049, 3_000, 5_555] {
        let clock = ManualClock::at(T0);
        let minute = Quota::per_minute(1);
        let limiter = Limiter::<u64>::builder()
            .clock(&clock)
            .store(LocalStore::new().max_keys(cap))
            .policy(Policy::token_bucket("one", minute).key(|n: &u64| *n))
            .policy(Policy::sliding_log("other", minute).key(|n: &u64| n * 3))
            .build()
            .unwrap();
        for caller in 0..3 * cap as u64 + 100 {
            limiter.check(&caller).unwrap();
            clock.advance(us(1));
            if caller % 64 == 0 || caller < 64 {
                let tracked = limiter.tracked_keys();
                assert!(tracked <= 2 * cap, "{tracked} keys of two spaces of {cap}");
            }
        }
        let tracked = limiter.tracked_keys();
        assert!(tracked <= 2 * cap, "{tracked} keys of two spaces of {cap}");
        // A few percent may be lost to the unevenness of shards.
        assert!(tracked >= 2 * cap * 9 / 10, "{tracked} keys of two spaces of {cap}");
    }
}

#[test]
fn promise_5_bounded_memory_forgets_first_what_equals_a_key_never_seen() {
    // Some have used nothing but a short quota that is back already, others a long one.
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<(u64, bool)>::builder()
        .clock(&clock)
        .key(|(caller, _): &(u64, bool)| *caller)
        .store(LocalStore::new().max_keys(1_000))
        .policy(Policy::token_bucket("short", Quota::per_second(1)))
        .policy(Policy::fixed_window("long", Quota::per_day(1)).when(|(_, long)| *long))
        .build()
        .unwrap();
    for caller in 0..1_000 {
        limiter.check(&(caller, caller % 2 == 0)).unwrap();
    }
    clock.advance(secs(1));
    for caller in 10_000..10_500 {
        limiter.check(&(caller, false)).unwrap();
    }
    for caller in (0..1_000).step_by(2) {
        let rejection = limiter.check(&(caller, true)).unwrap_err();
        assert_eq!(rejection.policies().collect::<Vec<_>>(), ["long"], "caller {caller}");
    }
}

/// What a clock that was far ahead left behind does not push out those who come now.
#[test]
fn promise_5_bounded_memory_has_room_for_the_living_after_the_clock_was_set_right() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder
                .key(Header::from_static("x-user"))
                .policy(algorithm.policy("p", Quota::per_minute(1)))
                .store(LocalStore::new().max_keys(10))
        });
        let status = |user: usize| app.status(with("x-user", &user.to_string()));
        app.at(YEAR);
        assert_eq!((100..110).map(status).collect::<Vec<_>>(), [200; 10]);
        app.at(secs(0));
        let two_rounds: Vec<_> = (0..5).chain(0..5).map(status).collect();
        let expected = [[200; 5], [429; 5]].concat();
        assert_eq!(two_rounds, expected, "{algorithm:?}");
    }
}

#[test]
fn promise_5_bounded_memory_is_given_back_to_the_last_key() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder.policy(
                algorithm
                    .policy("p", Quota::per_second(3))
                    .key(Header::from_static("x-user"))
                    .cost(|_| 3),
            )
        });
        for user in 0..5_000 {
            assert_eq!(app.status(with("x-user", &user.to_string())), 200);
        }
        assert_eq!(app.tracked_keys(), 5_000);
        // The longest that any of them remembers is two windows.
        app.at(secs(3)).send(with("x-user", "last"));
        assert_eq!(app.tracked_keys(), 1, "{algorithm:?}");
    }
}

// === 6. keys don't collide and don't leak ===

/// A header value of any bytes that one can hold, mostly those that could be taken for separators.
fn value() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![
        proptest::sample::select(b":|/%\\,;=\"\t 0a".to_vec()),
        any::<u8>().prop_filter("not in a value", |byte| *byte >= 32 && *byte != 127),
    ];
    vec(byte, 0..6).prop_filter("a key", |bytes| !bytes.trim_ascii().is_empty())
}

proptest! {
    #![proptest_config(Config { max_global_rejects: 100_000, ..inputs(60) })]

    #[test]
    fn promise_6_keys_dont_collide(callers in vec((value(), value(), 0_usize..4), 1..60)) {
        const PATHS: [&str; 4] = ["/", "/a", "/a:b", "/a/b%3A"];
        let app = App::new(|builder| {
            builder
                .policy(Policy::fixed_window("whole", Quota::per_hour(1)).key((
                    Path,
                    Header::from_static("x-tenant"),
                    Header::from_static("x-user"),
                )))
        });
        let request = |(tenant, user, path): &(Vec<u8>, Vec<u8>, usize)| {
            Request::get(PATHS[*path])
                .header("x-tenant", HeaderValue::from_bytes(tenant).unwrap())
                .header("x-user", HeaderValue::from_bytes(user).unwrap())
                .body(())
                .unwrap()
        };
        let mut seen = HashSet::new();
        for caller in &callers {
            // White space around a value is no part of it.
            let new = seen.insert((caller.0.trim_ascii(), caller.1.trim_ascii(), caller.2));
            prop_assert_eq!(app.status(request(caller)), if new { 200 } else { 429 });
        }
        prop_assert_eq!(app.tracked_keys(), seen.len());
    }
}

proptest! {
    #![proptest_config(inputs(200))]

    /// Whatever bytes they are made of, as those that a service decoded.
    #[test]
    fn promise_6_keys_dont_collide_in_any_service(
        callers in vec(("[\u{0}-\u{9}ab]{0,3}", "[\u{0}-\u{9}ab]{0,3}", 0_u64..3), 1..40),
    ) {
        let limiter = Limiter::<(String, String, u64)>::builder()
            .key(|(a, b, n): &(String, String, u64)| (a.clone(), b.clone(), *n))
            .policy(Policy::fixed_window("p", Quota::per_calendar_month(1)))
            .build()
            .unwrap();
        let mut seen = HashSet::new();
        for caller in &callers {
            prop_assert_eq!(limiter.check(caller).is_ok(), seen.insert(caller));
        }
        prop_assert_eq!(limiter.tracked_keys(), seen.len());
    }
}

#[test]
fn promise_6_keys_dont_leak() {
    const SECRET: &str = "sk_live_SECRET";
    let clock = ManualClock::at(T0);
    let layer = || {
        RateLimitLayer::builder()
            .clock(&clock)
            .policy(
                Policy::token_bucket("key", Quota::per_hour(1))
                    .key(Header::from_static("x-api-key"))
                    .exempt([Key::from("sk_live_SECRET2")]),
            )
            .policy(Policy::leaky_bucket("token", Quota::per_hour(1)).key(BearerToken))
            .policy(
                Policy::leaky_bucket("wait", Quota::per_second(1).burst(1))
                    .max_delay(secs(5))
                    .key(|parts: &Parts| Key::from(parts.headers["x-api-key"].as_bytes())),
            )
    };
    let mut shown = Vec::new();
    shown.push(format!("{:?}", layer()));
    let layer = layer().build().unwrap();
    let request = || {
        Request::builder()
            .header("x-api-key", SECRET)
            .header("authorization", format!("Bearer {SECRET}"))
            .body(())
            .unwrap()
    };
    let parts = request().into_parts().0;
    for header in ["x-api-key", "authorization"] {
        let extractor = Header::from_static(header);
        shown.push(format!("{extractor:?} {:?}", extractor.extract(&parts)));
    }
    shown.push(format!("{:?}", BearerToken.extract(&parts)));

    // A layer, a service, a future that runs.
    let mut service = layer.layer(service_fn(support::ok));
    let future = service.call(request());
    shown.push(format!("{layer:?} {:?} {service:?} {future:?}", layer.limiter()));
    let response = now(future).unwrap();
    shown.push(format!("{response:?}"));

    // A rejection, as a value and as an answer.
    let rejection = layer.limiter().check(&parts).unwrap_err();
    shown.push(format!("{rejection:?} {rejection}"));
    shown.push(format!("{:?}", CallError::<Infallible>::Rejected(Box::new(rejection))));
    for grpc in [false, true] {
        let mut request = request();
        if grpc {
            request.headers_mut().insert("content-type", "application/grpc".parse().unwrap());
        }
        let response = send(service.clone(), request);
        assert!(response.extensions().get::<Rejection>().is_some());
        shown.push(format!("{response:?}"));
    }

    // Keys that cannot be used.
    for (name, value) in [("authorization", "Basic sk_live_SECRET"), ("x-api-key", "")] {
        let mut parts = request().into_parts().0;
        parts.headers.insert(name, value.parse().unwrap());
        parts.headers.append("x-api-key", SECRET.parse().unwrap());
        let rejection = layer.limiter().check(&parts).unwrap_err();
        shown.push(format!("{rejection:?} {rejection}"));
    }

    // A key function that panics with the secret.
    let faulty = Limiter::<str>::builder()
        .policy(
            Policy::token_bucket("p", Quota::per_second(1))
                .key(|key: &str| -> Key { std::panic::panic_any(key.to_owned()) }),
        )
        .build()
        .unwrap();
    shown.push(format!("{:?}", faulty.check(SECRET).unwrap_err()));

    // One that waits.
    let waiting = RateLimitLayer::builder()
        .clock(&clock)
        .key(Header::from_static("x-api-key"))
        .policy(Policy::leaky_bucket("p", Quota::per_second(1).burst(1)).max_delay(secs(5)))
        .build()
        .unwrap();
    let mut service = waiting.layer(service_fn(support::ok));
    let _first = service.call(request());
    shown.push(format!("{:?} {:?}", service.call(request()), waiting.limiter()));

    for shown in shown {
        assert!(!shown.contains("SECRET"), "{shown}");
    }
}

// === 7. a rejection is a response ===

#[test]
fn promise_7_a_rejection_is_a_response() {
    fn infallible<S>(service: S) -> S
    where
        S: Service<Request<()>, Error = Infallible>,
    {
        service
    }
    let app = App::new(|builder| {
        builder.policy(
            Policy::fixed_window("p", Quota::per_minute(2))
                .key(Header::from_static("x-user"))
                .cost(|parts: &Parts| parts.headers.get("x-heavy").map_or(1, |_| 9)),
        )
    });
    let service = infallible(app.layer.layer(service_fn(support::ok)));
    let statuses = [
        with("x-user", "a"),
        with("x-user", "a"),
        with("x-user", "a"),
        get(),
        Request::builder().header("x-user", "b").header("x-heavy", "").body(()).unwrap(),
    ]
    .map(|request| send(service.clone(), request).status().as_u16());
    assert_eq!(statuses, [200, 200, 429, 400, 429]);
    // Around a layer that has its own error, that error stays.
    let failing = service_fn(|_: Request<()>| async { Err::<Response<String>, _>("its own") });
    let error: &str = now(app.layer.layer(failing).call(with("x-user", "c"))).unwrap_err();
    assert_eq!(error, "its own");
}

// === 8. shared by clone ===

#[test]
fn promise_8_shared_by_clone() {
    let layer = || {
        RateLimitLayer::builder()
            .key(Global)
            .policy(Policy::fixed_window("p", Quota::per_calendar_month(6)))
            .build()
            .unwrap()
    };
    let one = layer();
    let same = one.clone();
    let limiter = same.limiter().clone();
    let service = one.layer(service_fn(support::ok));
    let other = RateLimit::new(service_fn(support::ok), &same);
    for _ in 0..2 {
        assert_eq!(send(service.clone(), get()).status(), 200);
        assert_eq!(send(other.clone(), get()).status(), 200);
        assert!(limiter.check(&get().into_parts().0).is_ok());
    }
    assert_eq!(send(service, get()).status(), 429);
    assert_eq!(send(other, get()).status(), 429);
    assert_eq!(send(same.layer(service_fn(support::ok)), get()).status(), 429);
    assert!(one.limiter().check(&get().into_parts().0).is_err());

    // Two layers are two budgets, also by the same names.
    assert_eq!(send(layer().layer(service_fn(support::ok)), get()).status(), 200);
}

#[test]
fn promise_8_shared_by_clone_also_where_it_is_not_http() {
    let limiter = Limiter::<u64>::builder()
        .key(|job: &u64| *job)
        .policy(Policy::sliding_log("p", Quota::per_hour(2)))
        .build()
        .unwrap();
    let layer = RateLimitLayer::calls(limiter.clone());
    let worker = || service_fn(|job: u64| async move { Ok::<_, Infallible>(job) });
    assert_eq!(now(layer.layer(worker()).call(7)), Ok(7));
    assert_eq!(now(RateLimit::new(worker(), &layer).call(7)), Ok(7));
    assert!(matches!(now(layer.layer(worker()).call(7)), Err(CallError::Rejected(_))));
    assert!(limiter.check(&7).is_err());
    assert_eq!(now(layer.layer(worker()).call(8)), Ok(8));
}
