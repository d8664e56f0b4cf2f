//! What should not be: every outcome is an error of its own type or a clear response, never a panic
//! out of the layer and never a pass without a limit.

mod support;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, request::Parts};
use proptest::{collection::vec, prelude::*};
use std::{
    convert::Infallible,
    future::Ready,
    panic::{AssertUnwindSafe, catch_unwind, panic_any},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};
use support::{
    App, Fields, T0, YEAR, from_peer, get, grpc, inputs, ms, secs, send,
    stacks::{ALGORITHMS, Algorithm},
    us, with,
};
use tollgate::{
    BuildError, Clock, Limiter, ManualClock, Policy, Quota, QuotaError, RateLimitLayer, Reason,
    Rejection,
    key::{BearerToken, ClientIp, Global, Header, Key, KeyErrorKind, Networks, PeerIp},
};
use tower::{Layer, service_fn};

fn build(policy: Policy) -> Result<(), BuildError> {
    RateLimitLayer::builder().key(Global).policy(policy).build().map(drop)
}

fn refused(error: QuotaError) -> Result<(), BuildError> {
    Err(BuildError::Quota { policy: "p".to_owned(), error })
}

const QUOTA: Quota = Quota::per_minute(5);

// === quotas ===

#[test]
fn quotas_that_no_algorithm_can_count_are_refused_by_all() {
    for (quota, error) in [
        (Quota::per_second(0), QuotaError::ZeroLimit),
        (Quota::new(0, Duration::ZERO), QuotaError::ZeroLimit),
        (Quota::per_calendar_month(0), QuotaError::ZeroLimit),
        (Quota::per_second(1).burst(0), QuotaError::ZeroBurst),
        (Quota::new(1, Duration::ZERO), QuotaError::ZeroPeriod),
        (Quota::new(1, Duration::from_nanos(999)), QuotaError::ZeroPeriod),
        (Quota::new(u64::MAX, Duration::from_nanos(1)), QuotaError::ZeroPeriod),
        (Quota::new(1, Duration::MAX), QuotaError::TooLong),
        (Quota::new(u64::MAX, Duration::MAX), QuotaError::TooLong),
        (Quota::new(1, 20 * YEAR + us(1)), QuotaError::TooLong),
    ] {
        for algorithm in ALGORITHMS {
            assert_eq!(
                build(algorithm.policy("p", quota)),
                refused(error.clone()),
                "{algorithm:?}"
            );
        }
    }
}

#[test]
fn quotas_at_the_bounds_are_refused_or_counted() {
    use Algorithm::*;
    for (algorithm, quota, expected) in [
        (TokenBucket, Quota::per_second(u64::MAX), Err(QuotaError::TooLarge)),
        (TokenBucket, Quota::per_second(1).burst(u64::MAX), Err(QuotaError::TooLarge)),
        (TokenBucket, Quota::per_second(1).burst(1 << 40), Err(QuotaError::TooLong)),
        (TokenBucket, Quota::new(1, YEAR).burst(21), Err(QuotaError::TooLong)),
        (TokenBucket, Quota::new(1, YEAR).burst(20), Ok(())),
        (LeakyBucket, Quota::per_day(u64::MAX), Err(QuotaError::TooLarge)),
        (FixedWindow, Quota::per_second(u64::MAX), Err(QuotaError::TooLarge)),
        (FixedWindow, Quota::per_second((1 << 51) + 1), Err(QuotaError::TooLarge)),
        (FixedWindow, Quota::per_second(1 << 51), Ok(())),
        (FixedWindow, Quota::new(1, 20 * YEAR), Ok(())),
        (FixedWindow, Quota::per_second(1).burst(1), Err(QuotaError::BurstUnsupported)),
        (SlidingWindow, Quota::per_second(u64::MAX), Err(QuotaError::TooLarge)),
        (SlidingWindow, Quota::per_second(1).burst(1), Err(QuotaError::BurstUnsupported)),
        (SlidingWindow, Quota::per_calendar_day(1), Err(QuotaError::CalendarUnsupported)),
        (SlidingLog, Quota::per_second(u64::MAX), Err(QuotaError::LogTooLong { max: 100_000 })),
        (SlidingLog, Quota::per_second(100_001), Err(QuotaError::LogTooLong { max: 100_000 })),
        (SlidingLog, Quota::per_second(100_000), Ok(())),
        (FromFirstHit, Quota::per_calendar_week(1), Err(QuotaError::CalendarUnsupported)),
        (TokenBucket, Quota::per_calendar_month(1), Err(QuotaError::CalendarUnsupported)),
    ] {
        let built = build(algorithm.policy("p", quota));
        assert_eq!(built, expected.or_else(refused), "{algorithm:?} {quota}");
    }
    let delayed = |delay| build(Policy::leaky_bucket("p", QUOTA).max_delay(delay));
    assert_eq!(delayed(Duration::MAX), refused(QuotaError::TooLong));
    assert_eq!(delayed(20 * YEAR), refused(QuotaError::TooLong));
    assert_eq!(delayed(YEAR), Ok(()));
}

/// A number at a bound of its type, of a product or of sense.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0_u32..64, 0_u64..3)
            .prop_map(|(bits, off)| (1_u64 << bits).wrapping_add(off).wrapping_sub(1)),
        0_u64..5,
        any::<u64>(),
    ]
}

proptest! {
    #![proptest_config(inputs(600))]

    /// Whatever is accepted admits its capacity at once and not a unit more.
    #[test]
    fn any_quota_is_refused_or_enforced(
        algorithm in proptest::sample::select(&ALGORITHMS),
        limit in number(),
        period_us in number(),
        burst in proptest::option::of(number()),
        max_delay_us in proptest::option::of(number()),
        start_us in number(),
    ) {
        let mut quota = Quota::new(limit, us(period_us));
        if let Some(burst) = burst {
            quota = quota.burst(burst);
        }
        let mut policy = algorithm.policy("p", quota).cost(|parts: &Parts| {
            parts.headers["x-cost"].to_str().unwrap().parse().unwrap()
        });
        if let Some(max_delay_us) = max_delay_us {
            policy = policy.max_delay(us(max_delay_us));
        }
        let clock = ManualClock::at(us(start_us));
        let built = RateLimitLayer::builder().clock(&clock).key(Global).policy(policy).build();
        let Ok(layer) = built else { return Ok(()) };
        let request = |cost: u64| with("x-cost", &cost.to_string()).into_parts().0;
        let check = |cost| layer.limiter().check(&request(cost));
        let left = layer.limiter().peek(&request(0)).unwrap().outcomes()[0].remaining();
        prop_assert!(left >= 1);
        // A log has an entry per unit.
        prop_assume!(left <= 100_000 || algorithm != Algorithm::SlidingLog);
        for more in [left + 1, u64::MAX] {
            let rejection = check(more).unwrap_err();
            prop_assert_eq!(rejection.reason(), &Reason::TooCostly);
        }
        prop_assert_eq!(check(left).unwrap().outcomes()[0].remaining(), 0);
        let rejection = check(1).unwrap_err();
        prop_assert_eq!(rejection.reason(), &Reason::Limited);
        let wait = rejection.retry_after().unwrap();
        // Near the end of time the clock stands still.
        if us(start_us) < 100 * YEAR {
            clock.advance(wait);
            prop_assert!(check(1).is_ok());
        }
    }
}

proptest! {
    #![proptest_config(inputs(400))]

    /// No instant admits more than the larger of the two, however often a caller moves between them
    /// and whatever the clock does.
    #[test]
    fn any_two_quotas_are_refused_or_enforced_together(
        algorithm in proptest::sample::select(&ALGORITHMS),
        limits in (number(), number()),
        periods_us in (number(), number()),
        one_period: bool,
        bursts in (proptest::option::of(number()), proptest::option::of(number())),
        start_us in number(),
        steps in vec((any::<bool>(), 0_u64..4, proptest::option::weighted(0.2, number())), 1..20),
    ) {
        let quota = |limit, period_us, burst: Option<u64>| {
            let quota = Quota::new(limit, us(period_us));
            burst.filter(|_| algorithm.is_bucket()).map_or(quota, |burst| quota.burst(burst))
        };
        let first = quota(limits.0, periods_us.0, bursts.0);
        let second = quota(limits.1, if one_period { periods_us.0 } else { periods_us.1 }, bursts.1);
        let policy = algorithm
            .policy("p", first)
            .quota_for(move |&(is_second, _): &(bool, u64)| is_second.then_some(second))
            .cost(|&(_, cost)| cost);
        let clock = ManualClock::at(us(start_us));
        let built = Limiter::builder().clock(&clock).key(Global).policy(policy).build();
        let Ok(limiter) = built else { return Ok(()) };
        // A log has an entry per unit.
        let most = if algorithm == Algorithm::SlidingLog { 100_000 } else { u64::MAX };
        let largest = u128::from(first.capacity().max(second.capacity()));
        let mut at_this_instant = 0_u128;
        for (is_second, share, time) in steps {
            if let Some(time) = time {
                clock.set(us(time));
                at_this_instant = 0;
            }
            let left = match limiter.peek(&(is_second, 0)) {
                Ok(decision) => decision.outcomes()[0].remaining(),
                Err(rejection) => {
                    let faulty = matches!(rejection.reason(), Reason::Faulty { .. });
                    prop_assert!(faulty);
                    continue;
                }
            };
            let cost = [1, left, left.saturating_add(1), left / 2][share as usize];
            if cost <= most && limiter.check(&(is_second, cost)).is_ok() {
                prop_assert!(cost <= left);
                at_this_instant += u128::from(cost);
            }
            prop_assert!(at_this_instant <= largest, "{} of {}", at_this_instant, largest);
        }
    }
}

#[test]
fn nothing_overflows_between_the_largest_quota_and_the_smallest() {
    use Algorithm::*;
    for algorithm in ALGORITHMS {
        let (large, small) = match algorithm {
            TokenBucket | LeakyBucket => (Quota::new(1 << 50, us(1)), Quota::new(1, 20 * YEAR)),
            FixedWindow | FromFirstHit => (Quota::per_day(1 << 51), Quota::per_day(1)),
            SlidingWindow => (Quota::per_day(20_000_000_000), Quota::per_day(1)),
            SlidingLog => (Quota::per_day(100_000), Quota::per_day(1)),
        };
        for back in [Duration::ZERO, us(1), secs(86_400), 10 * YEAR, 15 * YEAR] {
            let clock = ManualClock::at(T0 + 30 * YEAR);
            let policy = algorithm
                .policy("p", large)
                .quota_for(move |&(is_small, _): &(bool, u64)| is_small.then_some(small))
                .cost(|&(_, cost)| cost);
            let limiter = Limiter::builder().clock(&clock).key(Global).policy(policy).build();
            let limiter = limiter.unwrap();
            assert!(limiter.check(&(false, large.limit())).is_ok());
            for back in [back, back + us(1)] {
                clock.set(T0 + 30 * YEAR - back);
                assert!(limiter.peek(&(true, 1)).is_err(), "{algorithm:?} {back:?}");
                assert!(limiter.check(&(true, 1)).is_err(), "{algorithm:?} {back:?}");
            }
        }
    }
}

#[test]
fn a_quota_for_a_request_that_cannot_be_is_the_servers_fault() {
    for quota in [
        Quota::per_second(0),
        Quota::per_second(u64::MAX),
        Quota::new(1, Duration::MAX),
        Quota::new(1, Duration::ZERO),
        Quota::per_second(5).burst(0),
        Quota::per_second(5).burst(u64::MAX),
        Quota::per_calendar_week(u64::MAX),
    ] {
        for algorithm in ALGORITHMS {
            let app = App::new(|builder| {
                builder
                    .key(Global)
                    .policy(Policy::fixed_window("other", Quota::per_minute(1)))
                    .policy(algorithm.policy("p", QUOTA).quota_for(move |parts: &Parts| {
                        parts.headers.contains_key("x-bad").then_some(quota)
                    }))
            });
            let response = app.send(with("x-bad", ""));
            assert_eq!(response.status(), 500, "{algorithm:?} {quota}");
            let rejection = response.extensions().get::<Rejection>().unwrap();
            let Reason::Faulty { policy: "p", message } = rejection.reason() else {
                panic!("{rejection:?}");
            };
            assert!(message.contains(&quota.to_string()), "{message}");
            // Nothing was charged to the other policy, and all works on.
            assert_eq!(app.tracked_keys(), 0);
            assert_eq!(app.statuses(2, get), [200, 429]);
        }
    }
}

/// A caller's quota is the request's own affair: it lifts no limit.
#[test]
fn a_cost_above_the_capacity_is_never_admitted_whatever_the_quota() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder.key(Global).policy(
                algorithm
                    .policy("p", QUOTA)
                    .quota_for(|parts: &Parts| {
                        let limit =
                            parts.headers.get("x-limit")?.to_str().unwrap().parse().unwrap();
                        Some(Quota::per_minute(limit))
                    })
                    .cost(|parts: &Parts| {
                        parts.headers["x-cost"].to_str().unwrap().parse().unwrap()
                    }),
            )
        });
        for (limit, cost) in
            [("7", 8), ("7", u64::MAX), ("7", u64::MAX - 6), ("1", 1 << 63), ("100000", 1 << 53)]
        {
            let request = || {
                let mut request = with("x-cost", &cost.to_string());
                request.headers_mut().insert("x-limit", limit.parse().unwrap());
                request
            };
            for request in [request(), with("x-cost", &cost.to_string())] {
                let response = app.send(request);
                assert_eq!(response.status(), 429, "{algorithm:?} {limit} {cost}");
                assert_eq!(response.retry_after(), None);
                let rejection = response.extensions().get::<Rejection>().unwrap();
                assert_eq!(rejection.reason(), &Reason::TooCostly);
            }
        }
        assert_eq!(app.statuses(2, || with("x-cost", "5")), [200, 429]);
    }
}

#[test]
fn a_free_request_is_let_through_and_costs_nothing() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder.key(Global).policy(
                algorithm
                    .policy("p", Quota::per_minute(1))
                    .cost(|parts: &Parts| u64::from(!parts.headers.contains_key("x-free"))),
            )
        });
        assert_eq!(app.statuses(3, || with("x-free", "")), [200; 3]);
        assert_eq!(app.tracked_keys(), 0);
        assert_eq!(app.statuses(2, get), [200, 429]);
        assert_eq!(app.statuses(3, || with("x-free", "")), [200; 3]);
    }
}

// === names, keys and options ===

#[test]
fn names_that_a_header_could_not_carry_are_refused() {
    let named = |name: &str| build(Policy::token_bucket(name.to_owned(), QUOTA));
    let longest = "x".repeat(64);
    for name in ["a", "A-z.0_9", longest.as_str()] {
        assert_eq!(named(name), Ok(()), "{name}");
    }
    let too_long = "x".repeat(65);
    for name in [
        "",
        "1a",
        "-a",
        "_a",
        ".a",
        "a b",
        " a",
        "a\n",
        "a\0",
        "a\"",
        "a,b",
        "a;b",
        "tür",
        "日",
        "a\u{301}",
        too_long.as_str(),
    ] {
        assert_eq!(named(name), Err(BuildError::InvalidName { name: name.to_owned() }));
    }
    let shown = named("a\n\"").unwrap_err().to_string();
    assert!(shown.contains(r#"a\n\""#), "{shown}");
}

#[test]
fn two_policies_of_one_name_are_refused() {
    for (first, second) in [("p", "p"), ("Burst", "bURST")] {
        let policy = |name| Policy::token_bucket(name, QUOTA).key(Global);
        let built = RateLimitLayer::builder().policy(policy(first)).policy(policy(second)).build();
        let name = second.to_owned();
        assert_eq!(built.map(drop), Err(BuildError::DuplicateName { name }));
    }
}

#[test]
fn a_stack_that_counts_nobody_is_refused() {
    assert_eq!(RateLimitLayer::builder().build().map(drop), Err(BuildError::NoPolicy));
    let built = RateLimitLayer::builder()
        .policy(Policy::token_bucket("a", QUOTA).key(Global))
        .policy(Policy::token_bucket("b", QUOTA))
        .build();
    assert_eq!(built.map(drop), Err(BuildError::NoKey { policy: "b".to_owned() }));
}

#[test]
fn options_of_another_algorithm_are_refused() {
    let misplaced = |option| Err(BuildError::Misplaced { policy: "p".to_owned(), option });
    assert_eq!(build(Policy::token_bucket("p", QUOTA).max_delay(secs(1))), misplaced("max_delay"));
    assert_eq!(build(Policy::fixed_window("p", QUOTA).max_delay(secs(1))), misplaced("max_delay"));
    assert_eq!(
        build(Policy::sliding_log("p", QUOTA).from_first_hit()),
        misplaced("from_first_hit")
    );
    assert_eq!(
        build(Policy::leaky_bucket("p", QUOTA).from_first_hit()),
        misplaced("from_first_hit")
    );
}

#[test]
fn every_error_says_which_policy_and_what_to_do() {
    for (error, words) in [
        (build(Policy::token_bucket("tb", Quota::per_second(0))), ["`tb`", "at least 1"]),
        (build(Policy::sliding_log("sl", Quota::per_day(200_000))), ["`sl`", "100000"]),
        (build(Policy::token_bucket("m", Quota::per_calendar_month(1))), ["`m`", "fixed window"]),
        (build(Policy::token_bucket("d", QUOTA).max_delay(secs(1))), ["`d`", "leaky buckets"]),
        (build(Policy::token_bucket("no name", QUOTA)), ["`no name`", "letter"]),
    ] {
        let error = error.unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

#[test]
fn networks_that_are_none_are_refused_and_named() {
    for text in [
        "",
        " ",
        "10.0.0.0/33",
        "10.0.0/8",
        "10.0.0.0/-1",
        "10.0.0.0/8/8",
        "10.0.0.0 /8",
        "010.0.0.0/8",
        "::/129",
        "fe80::1%eth0",
        "[::1]/128",
        "localhost",
        "*",
        "10.0.0.0/8,192.168.0.0/16",
        "１０.0.0.0/8",
    ] {
        let error = Networks::new(["192.0.2.0/24", text]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{:?} is not a network", text.trim())), "{error}");
    }
    // No network trusts nobody.
    let none = Networks::new::<[&str; 0]>([]).unwrap();
    let app = App::new(|builder| {
        builder
            .key(ClientIp::x_forwarded_for(none))
            .policy(Policy::fixed_window("p", Quota::per_minute(1)))
    });
    let request = |forged: &str| {
        let mut request = from_peer("192.0.2.1");
        request.headers_mut().insert("x-forwarded-for", forged.parse().unwrap());
        request
    };
    assert_eq!(["6.6.6.6", "7.7.7.7"].map(|forged| app.status(request(forged))), [200, 429]);
}

// === functions that panic ===

/// An app in which a function of the policy in the middle panics at requests with `x-panic`.
fn app_that_panics_in(function: &str) -> App {
    fn may_panic(parts: &Parts) {
        if parts.headers.contains_key("x-panic") {
            // Not a text, as a panic need not be one.
            panic_any(42_u64);
        }
    }
    let faulty = Policy::sliding_log("faulty", Quota::per_hour(2));
    let faulty = match function {
        "key" => faulty.key(|parts: &Parts| {
            may_panic(parts);
            Key::from("everybody")
        }),
        "when" => faulty.when(|parts| {
            may_panic(parts);
            true
        }),
        "cost" => faulty.cost(|parts| {
            may_panic(parts);
            1
        }),
        "quota_for" => faulty.quota_for(|parts| {
            may_panic(parts);
            None
        }),
        _ => unreachable!(),
    };
    App::new(|builder| {
        builder
            .key(Global)
            .policy(Policy::token_bucket("before", Quota::per_hour(2)))
            .policy(faulty)
            .policy(Policy::leaky_bucket("after", Quota::per_hour(2)).max_delay(ms(1)))
    })
}

#[test]
fn a_panic_in_a_function_of_a_policy_turns_one_request_away_and_no_other() {
    for function in ["key", "when", "cost", "quota_for"] {
        let app = app_that_panics_in(function);
        assert_eq!(app.status(get()), 200);
        for _ in 0..5 {
            let response = app.send(with("x-panic", ""));
            assert_eq!(response.status(), 500, "{function}");
            assert_eq!(response.text("content-type"), Some("application/problem+json"));
            assert_eq!(response.retry_after(), None);
            let problem: serde_json::Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(problem["status"], 500);
            assert_eq!(problem["detail"], "The server could not apply `faulty` to the request.");
            let rejection = response.extensions().get::<Rejection>().unwrap();
            assert!(
                matches!(rejection.reason(), Reason::Faulty { policy: "faulty", .. }),
                "{rejection:?}"
            );
        }
        let mut call = grpc();
        call.headers_mut().insert("x-panic", HeaderValue::from_static(""));
        let response = app.send(call);
        assert_eq!(response.status(), 200);
        assert_eq!(response.text("grpc-status"), Some("13"));
        assert_eq!(response.text("grpc-retry-pushback-ms"), Some("-1"));

        // Nothing was charged, nothing is locked.
        assert_eq!(app.status(get()), 200, "{function}");
        assert_eq!(app.status(get()), 429, "{function}");
    }
}

#[test]
fn a_panic_is_an_error_of_the_limiter_too() {
    for function in ["key", "when", "cost", "quota_for"] {
        let app = app_that_panics_in(function);
        let limiter = app.layer.limiter();
        let good = get().into_parts().0;
        let bad = with("x-panic", "").into_parts().0;
        let decision = limiter.check(&good).unwrap();
        let is_faulty = |rejection: Rejection| {
            matches!(rejection.reason(), Reason::Faulty { policy: "faulty", .. })
        };
        assert!(is_faulty(limiter.check(&bad).unwrap_err()), "{function}");
        assert!(is_faulty(limiter.peek(&bad).unwrap_err()), "{function}");
        assert!(is_faulty(limiter.refund(&bad, &decision).unwrap_err()), "{function}");
        assert!(is_faulty(limiter.reset(&bad).unwrap_err()), "{function}");
        assert_eq!(limiter.peek(&good).unwrap().outcomes()[0].remaining(), 1, "{function}");
    }
}

#[test]
fn a_panic_in_the_answer_to_a_rejection_gives_the_standard_answer() {
    let panics = Arc::new(AtomicBool::new(true));
    let panics_now = panics.clone();
    let app = App::new(|builder| {
        builder.key(Global).policy(Policy::fixed_window("p", Quota::per_minute(1))).on_rejection(
            move |_, _| {
                assert!(!panics_now.load(Relaxed), "no answer");
                Response::builder().status(StatusCode::CONFLICT).body(Bytes::new()).unwrap()
            },
        )
    });
    assert_eq!(app.status(get()), 200);
    let response = app.send(get());
    assert_eq!(response.status(), 429);
    assert_eq!(response.retry_after(), Some(60));
    assert_eq!(response.text("content-type"), Some("application/problem+json"));
    let call = app.send(grpc());
    assert_eq!((call.status().as_u16(), call.text("grpc-status")), (200, Some("8")));
    panics.store(false, Relaxed);
    assert_eq!(app.status(get()), 409);
}

/// Nor does one behind the layer; the request was let through, so it was charged.
#[test]
fn a_panic_of_the_service_leaves_nothing_locked() {
    let app = App::new(|builder| {
        builder
            .key(Global)
            .policy(Policy::fixed_window("p", Quota::per_minute(2)))
            .policy(Policy::leaky_bucket("shaping", Quota::per_minute(2)).max_delay(secs(9)))
    });
    let panics = service_fn(|_: Request<()>| -> Ready<Result<Response<String>, Infallible>> {
        panic!("on purpose")
    });
    let panicked = catch_unwind(AssertUnwindSafe(|| send(app.layer.layer(panics), get())));
    assert!(panicked.is_err());
    assert_eq!(app.statuses(2, get), [200, 429]);
}

// === hostile requests ===

#[test]
fn keys_of_64_kib_are_told_apart_by_their_last_byte() {
    let app = App::new(|builder| {
        builder.policy(
            Policy::fixed_window("p", Quota::per_minute(1)).key(Header::from_static("x-key")),
        )
    });
    let long = "k".repeat(64 * 1024);
    for last in ["a", "b", ""] {
        assert_eq!(app.statuses(2, || with("x-key", &format!("{long}{last}"))), [200, 429]);
    }
    assert_eq!(app.tracked_keys(), 3);
}

#[test]
fn ten_thousand_forwarded_entries_and_lines_choose_no_key() {
    let trusted = || Networks::new(["10.0.0.0/8"]).unwrap();
    let extractors = [
        ClientIp::x_forwarded_for(trusted()),
        ClientIp::forwarded(trusted()),
        ClientIp::x_forwarded_for_hops(2),
        ClientIp::header(HeaderName::from_static("x-real-ip"), trusted()),
        ClientIp::cloudfront(trusted()),
    ];
    for extractor in extractors {
        let app = App::new(|builder| {
            builder.key(extractor.clone()).policy(Policy::fixed_window("p", Quota::per_minute(1)))
        });
        let flood = |n: u64, in_lines: bool| {
            let mut request = from_peer("10.0.0.1");
            let headers = request.headers_mut();
            let mut put = |name: &'static str, entry: String, last: &str| {
                let name = HeaderName::from_static(name);
                if in_lines {
                    for _ in 0..10_000 {
                        headers.append(&name, entry.parse().unwrap());
                    }
                    headers.append(&name, last.parse().unwrap());
                } else {
                    let list = format!("{}{last}", format!("{entry}, ").repeat(10_000));
                    headers.append(&name, list.parse().unwrap());
                }
            };
            put("x-forwarded-for", format!("6.6.6.{n}"), "203.0.113.9, 10.0.0.2");
            put("forwarded", format!("for=6.6.6.{n}"), "for=203.0.113.9, for=10.0.0.2");
            put("x-real-ip", format!("6.6.6.{n}"), "203.0.113.9");
            put("cloudfront-viewer-address", format!("6.6.6.{n}:1"), "203.0.113.9:1");
            request
        };
        let statuses: Vec<_> = (0..4).map(|n| app.status(flood(n, n % 2 == 1))).collect();
        assert_eq!(statuses, [200, 429, 429, 429], "{extractor:?}");
    }
}

#[test]
fn ten_thousand_headers_are_no_matter() {
    let app = App::new(|builder| {
        builder.policy(
            Policy::fixed_window("p", Quota::per_minute(1)).key(Header::from_static("x-key")),
        )
    });
    let request = || {
        let mut request = with("x-key", "a");
        for n in 0..10_000 {
            let name: HeaderName = format!("x-{n}").parse().unwrap();
            request.headers_mut().insert(name, HeaderValue::from_static("v"));
        }
        request
    };
    assert_eq!(app.statuses(2, request), [200, 429]);
}

#[test]
fn empty_values_weird_bytes_and_several_lines_are_keys_or_clear_errors() {
    let app = App::new(|builder| {
        builder.policy(
            Policy::fixed_window("header", Quota::per_minute(1)).key(Header::from_static("x-key")),
        )
    });
    let values: [&[u8]; 5] = [b"\xff\xfe", b"\x80", b"\xc3\x28", b"a\tb", b"\"quoted\""];
    for value in values {
        let request = || {
            let mut request = get();
            let value = HeaderValue::from_bytes(value).unwrap();
            request.headers_mut().insert("x-key", value);
            request
        };
        assert_eq!(app.statuses(2, request), [200, 429], "{value:?}");
    }
    let lines = |lines: &[&str]| {
        let mut request = get();
        for line in lines {
            request.headers_mut().append("x-key", line.parse().unwrap());
        }
        request
    };
    for unusable in [&[][..], &[""], &["  "], &["a", "b"], &["a", "a"], &["", ""]] {
        let response = app.send(lines(unusable));
        assert_eq!(response.status(), 400, "{unusable:?}");
        let Reason::NoKey { policy: "header", error } =
            response.extensions().get::<Rejection>().unwrap().reason()
        else {
            panic!("{unusable:?}");
        };
        assert_eq!(error.kind(), KeyErrorKind::Missing);
    }
}

#[test]
fn a_key_that_the_server_does_not_provide_is_the_servers_fault() {
    for call in [get(), grpc()] {
        let is_grpc = call.headers().contains_key("content-type");
        let app =
            App::new(|builder| builder.key(PeerIp::new()).policy(Policy::fixed_window("p", QUOTA)));
        let response = app.send(call);
        if is_grpc {
            assert_eq!(response.text("grpc-status"), Some("13"));
        } else {
            assert_eq!(response.status(), 500);
        }
        let shown = String::from_utf8(response.body().to_vec()).unwrap();
        assert!(!shown.contains("connect_info"), "for the operator alone: {shown}");
        let rejection = response.extensions().get::<Rejection>().unwrap();
        assert!(rejection.to_string().contains("into_make_service_with_connect_info"));
    }
}

proptest! {
    #![proptest_config(inputs(300))]

    #[test]
    fn no_header_of_any_bytes_panics_or_passes_unlimited(
        value in vec(any::<u8>().prop_filter("not in a value", |byte| {
            *byte == b'\t' || (*byte >= 32 && *byte != 127)
        }), 0..80),
        peer in prop_oneof![Just("10.0.0.1"), Just("192.0.2.1"), Just("::ffff:10.0.0.1"), Just("fe80::1")],
        name in proptest::sample::select(vec![
            "x-forwarded-for", "forwarded", "authorization", "x-key", "content-type", "origin",
        ]),
    ) {
        let trusted = Networks::private();
        let app = App::new(|builder| {
            builder
                .policy(Policy::fixed_window("xff", Quota::per_hour(1))
                    .key(ClientIp::x_forwarded_for(trusted.clone())))
                .policy(Policy::fixed_window("forwarded", Quota::per_hour(1))
                    .key(ClientIp::forwarded(trusted.clone())))
                .policy(Policy::fixed_window("token", Quota::per_hour(1)).key(BearerToken)
                    .when(|parts: &Parts| parts.headers.contains_key("authorization")))
                .policy(Policy::fixed_window("key", Quota::per_hour(1))
                    .key(Header::from_static("x-key"))
                    .when(|parts: &Parts| parts.headers.contains_key("x-key")))
        });
        let request = || {
            let mut request = from_peer(peer);
            request.headers_mut().insert(name, HeaderValue::from_bytes(&value).unwrap());
            request
        };
        let passed = |response: &Response<Bytes>| {
            response.status() == 200 && !response.headers().contains_key("grpc-status")
        };
        let first = app.send(request());
        let second = app.send(request());
        prop_assert!(!passed(&second));
        if passed(&first) {
            let rejection = second.extensions().get::<Rejection>().unwrap();
            prop_assert_eq!(rejection.reason(), &Reason::Limited);
        } else {
            let rejection = first.extensions().get::<Rejection>().unwrap();
            let has_no_key = matches!(rejection.reason(), Reason::NoKey { .. });
            prop_assert!(has_no_key);
            prop_assert_eq!(app.tracked_keys(), 0);
        }
    }
}

// === clocks ===

#[test]
fn any_time_at_all_is_counted_by() {
    for algorithm in ALGORITHMS {
        for time in [Duration::ZERO, us(1), T0, 100 * YEAR, 1_000_000 * YEAR, Duration::MAX] {
            let clock = ManualClock::at(time);
            let limiter = Limiter::<str>::builder()
                .clock(&clock)
                .key(Global)
                .policy(algorithm.policy("p", Quota::per_second(2)))
                .build()
                .unwrap();
            assert!(limiter.check("").is_ok(), "{algorithm:?} {time:?}");
            assert!(limiter.check("").is_ok(), "{algorithm:?} {time:?}");
            assert!(limiter.check("").is_err(), "{algorithm:?} {time:?}");
            // To any other time, and back.
            for other in [Duration::MAX, Duration::ZERO, time, 50 * YEAR, secs(2), time] {
                clock.set(other);
                let _ = limiter.check("");
                let _ = limiter.peek("");
                assert!(limiter.check("").is_ok() as u8 + limiter.check("").is_ok() as u8 <= 2);
            }
        }
    }
}

proptest! {
    #![proptest_config(inputs(200))]

    /// In real time nobody gets more than the bound of the algorithm, however often and far the clock
    /// is set back.
    #[test]
    fn a_clock_that_jumps_back_by_years_grants_nothing(
        algorithm in proptest::sample::select(&ALGORITHMS),
        steps in vec((0_u64..700_000, proptest::option::weighted(0.1, back())), 1..80),
    ) {
        let clock = ManualClock::at(T0 + 100 * YEAR);
        let limiter = Limiter::<str>::builder()
            .clock(&clock)
            .key(Global)
            .policy(algorithm.policy("p", Quota::per_second(3)))
            .build()
            .unwrap();
        let mut real_us = 0;
        let (mut admitted, mut jumps) = (Vec::new(), Vec::new());
        for (gap_us, back_us) in steps {
            real_us += gap_us;
            clock.advance(us(gap_us));
            if let Some(back_us) = back_us {
                clock.set(clock.now().saturating_sub(us(back_us)));
                jumps.push(real_us);
            }
            if limiter.check("").is_ok() {
                admitted.push(real_us);
            }
        }
        for &start_us in &admitted {
            let in_a_second = |times: &[u64]| {
                times.iter().filter(|&&time| (start_us..start_us + 1_000_000).contains(&time)).count()
            };
            // Where windows begin at fixed times, one may begin right behind each jump.
            let windows = match algorithm {
                Algorithm::FixedWindow => 2 + in_a_second(&jumps),
                _ => 2,
            };
            prop_assert!(in_a_second(&admitted) <= 3 * windows, "{:?} {:?}", jumps, admitted);
        }
    }
}

/// How far a clock is set back: less than a refill, more, or years.
fn back() -> impl Strategy<Value = u64> {
    prop_oneof![
        1_u64..2_000_000,
        any::<u32>().prop_map(u64::from),
        (1_u64..20).prop_map(|years| years * 31_536_000_000_000),
    ]
}

#[test]
fn a_clock_before_1970_or_beyond_reason_is_no_panic() {
    for time in [Duration::ZERO, Duration::MAX, Duration::from_nanos(1)] {
        let limiter = Limiter::<str>::builder()
            .clock(Clock::from_fn(move || time))
            .key(Global)
            .policy(Policy::token_bucket("p", Quota::per_second(1)))
            .build()
            .unwrap();
        assert!(limiter.check("").is_ok());
        let rejection = limiter.check("").unwrap_err();
        assert_eq!(rejection.retry_after(), Some(secs(1)));
        assert!(limiter.reset("").is_ok());
        assert!(limiter.check("").is_ok());
    }
}

/// Requests without any of what could be looked at.
#[test]
fn the_emptiest_request_is_decided() {
    let app = App::new(|builder| builder.key(Global).policy(Policy::fixed_window("p", QUOTA)));
    let mut request: Request<()> = get();
    *request.headers_mut() = HeaderMap::new();
    assert_eq!(app.status(request), 200);
}

/// What remained under another quota says nothing about this one.
#[test]
fn a_refund_under_another_quota_neither_panics_nor_mints() {
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<bool>::builder()
        .clock(&clock)
        .key(Global)
        .policy(
            Policy::token_bucket("p", Quota::per_second(10))
                .quota_for(|large: &bool| large.then(|| Quota::per_second(1_000))),
        )
        .build()
        .unwrap();
    let small = limiter.check(&false).unwrap();
    let large = limiter.check(&true).unwrap();
    limiter.refund(&true, &small).unwrap();
    limiter.refund(&false, &large).unwrap();
    assert_eq!(limiter.peek(&false).unwrap().outcomes()[0].remaining(), 10);
    // What has come back by itself is not given back once more.
    clock.advance(secs(1));
    for _ in 0..10 {
        limiter.check(&false).unwrap();
    }
    limiter.refund(&true, &small).unwrap();
    assert!(limiter.check(&false).is_err());
}

#[test]
fn a_limit_is_spread_over_no_more_parts_than_it_has_units() {
    let build = |policy: Policy| RateLimitLayer::builder().key(Global).policy(policy).build();
    let bucket = |parts| Policy::token_bucket("p", Quota::per_second(10).burst(5)).spread(parts);
    let slots = |parts| Policy::concurrency("p", 4).spread(parts);
    for fine in [bucket(1), bucket(5), slots(4)] {
        assert!(build(fine).is_ok());
    }
    for (policy, parts) in [
        (bucket(0), 0),
        (bucket(6), 6),
        (slots(5), 5),
        (slots(0), 0),
        (slots(2).per_instance(), 2),
        (slots(2).limit_for(|_| None), 2),
        (bucket(2).quota_for(|_| None), 2),
    ] {
        let error = build(policy).unwrap_err();
        assert_eq!(error, BuildError::TooSpread { policy: "p".to_owned(), parts });
        assert!(error.to_string().contains("one unit at least"));
    }
}

#[test]
fn whoever_is_exempt_from_a_limit_is_exempt_from_all_its_parts() {
    let policy =
        Policy::token_bucket("p", Quota::per_hour(4)).spread(4).exempt([Key::from("root")]);
    let limiter =
        Limiter::<str>::builder().key(|user: &str| Key::from(user)).policy(policy).build().unwrap();
    for _ in 0..20 {
        assert!(limiter.check("root").unwrap().outcomes().is_empty());
    }
    let admitted = (0..20).filter(|_| limiter.check("user").is_ok()).count();
    assert_eq!(admitted, 4);
}
