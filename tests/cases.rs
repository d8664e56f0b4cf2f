//! Faults that somebody's rate limiter really had, each reduced to a small input with its right
//! answer. What needs sockets is in `wire`, what waits for its turn in `shaping`.

mod support;

use axum::{Router, body::Body, routing::get as on_get};
use http::{Method, Request, request::Parts};
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use support::{
    App, Fields, T0, YEAR, from_peer, get, ms, now, secs, send, stacks::ALGORITHMS, with,
};
use tollgate::{
    Limiter, LocalStore, ManualClock, Policy, Quota, QuotaError, RateLimitLayer, Reason, Rejection,
    key::{ClientIp, Global, Header, Key, MissingKey, Networks, Path, PeerIp},
    reply::{Headers, LegacyReset},
};
use tower::{Layer, ServiceExt, service_fn};

/// An app with one policy for everybody together.
fn app_with(policy: Policy) -> App {
    App::new(|builder| {
        builder
            .key(Global)
            .policy(policy)
            .headers(Headers::default().legacy(LegacyReset::DeltaSeconds))
    })
}

fn rejection(response: &http::Response<bytes::Bytes>) -> &Rejection {
    response.extensions().get().expect("it was rejected")
}

// === keys ===

/// BR-01
#[test]
fn a_host_gets_no_new_budget_by_walking_its_ipv6_network() {
    let app = App::new(|builder| {
        builder.key(PeerIp::new()).policy(Policy::fixed_window("p", Quota::per_minute(3)))
    });
    let status = |peer| app.status(from_peer(peer));
    let walk = ["2001:db8:1:2::1", "2001:db8:1:2::2", "2001:db8:1:2::3", "2001:db8:1:2::4"];
    assert_eq!(walk.map(status), [200, 200, 200, 429]);
    assert_eq!(status("2001:db8:1:3::1"), 200);
    assert_eq!(["192.0.2.1", "192.0.2.2"].map(status), [200, 200]);
    assert_eq!(app.tracked_keys(), 4);
}

fn forwarded(peer: &str, header: &str) -> Request<()> {
    let mut request = from_peer(peer);
    request.headers_mut().insert("x-forwarded-for", header.parse().unwrap());
    request
}

/// An app that counts clients behind the proxies in a network.
fn behind(proxies: &str) -> App {
    App::new(|builder| {
        builder
            .key(ClientIp::x_forwarded_for(Networks::new([proxies]).unwrap()))
            .policy(Policy::fixed_window("p", Quota::per_minute(2)))
    })
}

/// BR-03
#[test]
fn a_client_cannot_choose_its_address_in_x_forwarded_for() {
    let app = behind("10.0.0.0/8");
    let behind_proxy =
        |n| app.status(forwarded("10.0.0.1", &format!("{n}.{n}.{n}.{n}, 203.0.113.9")));
    assert_eq!([1, 2, 3].map(behind_proxy), [200, 200, 429]);
    let direct = |n| app.status(forwarded("198.51.100.5", &format!("9.9.9.{n}")));
    assert_eq!([1, 2, 3].map(direct), [200, 200, 429]);
    assert_eq!(app.tracked_keys(), 2);

    // Who was counted: the two above are over their limits by whatever way they come.
    assert_eq!(app.status(forwarded("10.0.0.7", "203.0.113.9")), 429);
    assert_eq!(app.status(forwarded("10.0.0.7", "198.51.100.5")), 429);
    assert_eq!(app.status(forwarded("10.0.0.7", "9.9.9.1")), 200);
}

/// BR-05
#[test]
fn the_client_is_found_behind_several_proxies() {
    let app = behind("172.16.0.0/12");
    let status = |header| app.status(forwarded("172.18.0.2", header));
    let (a, b) = ("198.51.100.4, 172.17.0.1", "198.51.100.5, 172.17.0.1");
    assert_eq!([a, a, b, a].map(status), [200, 200, 200, 429]);
    assert_eq!(status("6.6.6.6, 198.51.100.4, 172.17.0.1"), 429);

    // What is no address ends the walk at the proxy that wrote it.
    let garbage = ["1.1.1.1, garbage, 172.17.0.1", "garbage, 172.17.0.1", ", 172.17.0.1"];
    assert_eq!(garbage.map(status), [200, 200, 429]);
}

/// BR-06 (a)
#[tokio::test]
async fn callers_without_a_key_never_share_a_budget_by_accident() {
    for (missing_key, expected) in
        [(MissingKey::Reject, [500, 500]), (MissingKey::Skip, [200, 200])]
    {
        let policy = Policy::fixed_window("p", Quota::per_minute(1)).missing_key(missing_key);
        let layer = RateLimitLayer::builder().key(PeerIp::new()).policy(policy).build().unwrap();
        // Served without its peers' addresses.
        let app = Router::new().route("/", on_get(|| async {})).layer(layer.clone());
        let status = async |host| {
            let request = Request::get("/").header("host", host).body(Body::empty()).unwrap();
            app.clone().oneshot(request).await.unwrap().status().as_u16()
        };
        assert_eq!([status("a.example").await, status("b.example").await], expected);
        assert_eq!(layer.limiter().tracked_keys(), 0);
    }
}

/// BR-08
#[test]
fn the_parts_of_a_key_do_not_run_into_each_other() {
    let by_extractors = || {
        App::new(|builder| {
            builder
                .key((Path, Header::from_static("x-user")))
                .policy(Policy::fixed_window("p", Quota::per_minute(1)))
        })
    };
    let by_closure = || {
        App::new(|builder| {
            builder
                .key(|parts: &Parts| {
                    (parts.uri.path().to_owned(), Key::from(parts.headers["x-user"].as_bytes()))
                })
                .policy(Policy::fixed_window("p", Quota::per_minute(1)))
        })
    };
    let status = |app: &App, path: &str, user: &str| {
        app.status(Request::get(path).header("x-user", user).body(()).unwrap())
    };
    let long = "x".repeat(4_096);
    for separator in [":", "|", "/", "%3A", long.as_str()] {
        for app in [by_extractors(), by_closure()] {
            let left = (&format!("/a{separator}b"), "c");
            let right = ("/a", &format!("b{separator}c"));
            assert_eq!(status(&app, left.0, left.1), 200, "{separator}");
            assert_eq!(status(&app, right.0, right.1), 200, "{separator}");
            assert_eq!(status(&app, left.0, left.1), 429, "{separator}");
        }
    }
    let app = by_closure();
    assert_eq!(status(&app, "/a", ""), 200);
    assert_eq!(status(&app, "/", "a"), 200);
    assert_eq!(status(&app, "/a", ""), 429);
    // An empty header is no key that many could share.
    assert_eq!(status(&by_extractors(), "/a", ""), 400);
}

// === waits and headers ===

/// BR-10
#[test]
fn a_wait_below_a_second_is_not_told_as_zero() {
    let app = app_with(Policy::token_bucket("p", Quota::per_second(5).burst(1)));
    assert_eq!(app.status(get()), 200);
    let response = app.at(ms(1)).send(get());
    assert_eq!(response.status(), 429);
    assert_eq!(response.retry_after(), Some(1));
    assert_eq!(rejection(&response).retry_after(), Some(ms(199)));
}

/// RETRY-AFTER
#[test]
fn the_wait_in_a_fixed_window_is_what_is_left_of_it() {
    let app = app_with(Policy::fixed_window("p", Quota::per_minute(1)));
    app.at(secs(20)).send(get());
    assert_eq!(app.send(get()).retry_after(), Some(40));
}

/// RETRY-AFTER
#[test]
fn the_wait_for_a_token_counts_what_has_grown_of_it() {
    let app = app_with(Policy::token_bucket("p", Quota::per_second(1)));
    assert_eq!(app.status(get()), 200);
    let response = app.at(ms(200)).send(get());
    assert_eq!(rejection(&response).retry_after(), Some(ms(800)));
}

/// BR-12
#[test]
fn an_outer_layer_does_not_write_over_what_the_inner_one_says() {
    let clock = ManualClock::at(T0);
    let layer = |limit| {
        RateLimitLayer::builder()
            .clock(&clock)
            .key(Global)
            .policy(Policy::fixed_window("p", Quota::per_minute(limit)))
            .headers(Headers::default().legacy(LegacyReset::DeltaSeconds))
            .build()
            .unwrap()
    };
    let service = layer(100).layer(layer(1).layer(service_fn(support::ok)));
    for (status, retry_after) in [(200, None), (429, Some(60))] {
        let response = send(service.clone(), get());
        assert_eq!(response.status(), status);
        assert_eq!(response.text("x-ratelimit-limit"), Some("1"));
        assert_eq!(response.text("x-ratelimit-remaining"), Some("0"));
        assert_eq!(response.text("ratelimit-policy"), Some(r#""p";q=1;w=60"#));
        assert_eq!(response.text("ratelimit"), Some(r#""p";r=0;t=60"#));
        assert_eq!(response.retry_after(), retry_after);
        assert_eq!(response.headers().keys_len(), response.headers().len());
    }
}

/// HEADERS
#[test]
fn the_reset_is_told_when_nothing_remains() {
    let app = app_with(Policy::fixed_window("p", Quota::per_minute(2)));
    app.statuses(2, get);
    let response = app.at(secs(2)).send(get());
    assert_eq!(response.text("x-ratelimit-remaining"), Some("0"));
    assert_eq!(response.text("x-ratelimit-reset"), Some("58"));
    assert_eq!(response.text("ratelimit"), Some(r#""p";r=0;t=58"#));
    assert_eq!(response.retry_after(), Some(58));
}

/// HEADERS
#[test]
fn a_reset_of_zero_is_told_too() {
    let app = app_with(Policy::token_bucket("p", Quota::per_minute(2)).cost(|_| 0));
    let response = app.send(get());
    assert_eq!(response.text("x-ratelimit-reset"), Some("0"));
    assert_eq!(response.text("ratelimit"), Some(r#""p";r=2;t=0"#));
}

// === stacks ===

/// BR-14
#[test]
fn two_limits_with_one_key_do_not_count_in_one_counter() {
    let app = App::new(|builder| {
        builder
            .key(PeerIp::new())
            .policy(Policy::fixed_window("minute", Quota::per_minute(5)))
            .policy(Policy::fixed_window("day", Quota::per_day(50)))
    });
    let status = |second| app.at(secs(second)).status(from_peer("192.0.2.1"));
    assert_eq!([0, 1, 2, 3, 4].map(status), [200; 5]);
    let response = app.at(secs(5)).send(from_peer("192.0.2.1"));
    assert_eq!(response.status(), 429);
    assert_eq!(rejection(&response).policies().collect::<Vec<_>>(), ["minute"]);
    assert_eq!(rejection(&response).outcomes()[1].remaining(), 45);
}

/// BR-16
#[test]
fn what_can_never_fit_is_told_so_and_costs_nothing() {
    let app = app_with(
        Policy::token_bucket("p", Quota::new(3, secs(2)))
            .cost(|parts: &Parts| parts.headers["cost"].to_str().unwrap().parse().unwrap()),
    );
    let too_costly = |response: http::Response<bytes::Bytes>| {
        assert_eq!(response.status(), 429);
        assert_eq!(rejection(&response).reason(), &Reason::TooCostly);
        assert_eq!(rejection(&response).retry_after(), None);
        assert_eq!(response.retry_after(), None);
    };
    too_costly(app.send(with("cost", "4")));
    assert_eq!(app.status(with("cost", "3")), 200);
    too_costly(app.at(secs(60)).send(with("cost", "4")));
}

/// BR-18, and MULTI-POLICY
#[test]
fn a_rejection_by_one_policy_spends_nothing_of_another_in_either_order() {
    let a = || Policy::token_bucket("a", Quota::per_hour(1).burst(10));
    let b = || Policy::token_bucket("b", Quota::per_second(1));
    for policies in [[a(), b()], [b(), a()]] {
        let app = App::new(|builder| {
            policies.into_iter().fold(builder.key(Global), |builder, policy| builder.policy(policy))
        });
        assert_eq!(app.status(get()), 200);
        for _ in 2..=5 {
            let response = app.send(get());
            assert_eq!(response.status(), 429);
            assert_eq!(rejection(&response).policies().collect::<Vec<_>>(), ["b"]);
        }
        assert_eq!(app.at(secs(1)).status(get()), 200);
        let peeked = app.layer.limiter().peek(&get().into_parts().0).unwrap_err();
        let a = peeked.outcomes().iter().find(|outcome| outcome.policy() == "a").unwrap();
        assert_eq!(a.remaining(), 8);
    }
}

// === arithmetic ===

/// BR-20
#[test]
fn a_large_bucket_survives_a_long_idle_time() {
    let app = app_with(Policy::token_bucket("p", Quota::per_second(1_000_000_000)));
    for idle in [Duration::ZERO, secs(12 * 3_600), secs(30 * 86_400), 10 * YEAR] {
        let response = app.at(idle).send(get());
        assert_eq!(response.status(), 200);
        assert_eq!(response.text("x-ratelimit-remaining"), Some("999999999"));
    }
}

/// BR-22
#[test]
fn a_limit_larger_than_its_period_in_milliseconds_is_counted() {
    let app = app_with(Policy::leaky_bucket("p", Quota::new(2_000, ms(1_000))));
    assert_eq!(app.statuses(2_000, get), [200; 2_000]);
    assert_eq!(app.status(get()), 429);
    assert_eq!(app.at(ms(1)).status(get()), 200);
}

/// BR-22
#[test]
fn nonsense_is_refused_when_the_stack_is_built() {
    let build = |quota| {
        let policy = Policy::leaky_bucket("p", quota);
        Limiter::<str>::builder().key(Global).policy(policy).build().map(drop)
    };
    let refused = |error| Err(tollgate::BuildError::Quota { policy: "p".to_owned(), error });
    assert_eq!(build(Quota::per_second(0)), refused(QuotaError::ZeroLimit));
    assert_eq!(build(Quota::new(5, Duration::ZERO)), refused(QuotaError::ZeroPeriod));
    assert_eq!(build(Quota::per_second(u32::MAX.into())), Ok(()));
    assert_eq!(build(Quota::per_second(u64::MAX)), refused(QuotaError::TooLarge));
}

/// BR-23
#[test]
fn a_fraction_of_a_token_is_a_rejection_with_the_exact_wait() {
    let app = app_with(Policy::token_bucket("p", Quota::per_second(2).burst(1)));
    assert_eq!(app.status(get()), 200);
    for (millis, wait) in [(100, 400), (300, 200)] {
        let response = app.at(ms(millis)).send(get());
        assert_eq!(response.status(), 429);
        assert_eq!(rejection(&response).retry_after(), Some(ms(wait)));
    }
    assert_eq!(app.at(ms(510)).status(get()), 200);
}

// === clocks and windows ===

/// BR-25
#[test]
fn a_clock_that_steps_back_refills_nothing_twice() {
    let app = app_with(Policy::token_bucket("p", Quota::per_second(150)));
    assert_eq!(app.at(secs(10)).statuses(150, get), [200; 150]);
    assert_eq!(app.at(secs(9)).statuses(10, get), [429; 10]);
    assert_eq!(app.at(secs(10)).statuses(150, get), [429; 150]);
    assert_eq!(app.at(secs(11)).statuses(150, get), [200; 150]);
}

/// CLOCK
#[test]
fn a_step_back_inside_a_window_lengthens_the_wait_by_no_more_than_the_step() {
    let minute = Quota::per_minute(1);
    for (policy, wait) in [
        (Policy::fixed_window("p", minute), 50),
        (Policy::fixed_window("p", minute).from_first_hit(), 100),
        (Policy::sliding_log("p", minute), 100),
        (Policy::token_bucket("p", minute), 100),
    ] {
        let app = app_with(policy);
        assert_eq!(app.at(secs(50)).status(get()), 200);
        assert_eq!(app.at(secs(10)).send(get()).retry_after(), Some(wait));
        assert_eq!(app.at(secs(10 + wait)).status(get()), 200);
    }
}

/// CLOCK
#[test]
fn after_a_large_step_back_nobody_waits_for_the_clock_to_catch_up() {
    let minute = Quota::per_minute(1);
    for (policy, wait) in [
        (Policy::fixed_window("p", minute), 50),
        (Policy::fixed_window("p", minute).from_first_hit(), 60),
        (Policy::sliding_window("p", minute), 110),
        (Policy::sliding_log("p", minute), 60),
        (Policy::token_bucket("p", minute), 60),
        (Policy::leaky_bucket("p", minute), 60),
    ] {
        let app = app_with(policy);
        assert_eq!(app.at(YEAR).status(get()), 200);
        assert_eq!(app.at(secs(10)).send(get()).retry_after(), Some(wait));
        assert_eq!(app.at(secs(10 + wait)).status(get()), 200);
    }
}

/// BR-27
#[test]
fn a_sliding_window_weights_the_last_window() {
    let app = app_with(Policy::sliding_window("p", Quota::per_minute(100)));
    assert_eq!(app.statuses(50, get), [200; 50]);
    app.at(secs(66));
    assert_eq!(app.statuses(9, get), [200; 9]);
    let tenth = app.send(get());
    assert_eq!(tenth.status(), 200);
    assert_eq!(tenth.text("x-ratelimit-remaining"), Some("45"));
    let passed = app.statuses(90, get).into_iter().filter(|&status| status == 200).count();
    assert_eq!(passed, 45);
}

/// WINDOW
#[test]
fn the_reset_of_a_sliding_log_is_when_its_oldest_hit_leaves() {
    let app = app_with(Policy::sliding_log("p", Quota::per_minute(2)));
    assert_eq!([0, 10].map(|second| app.at(secs(second)).status(get())), [200; 2]);
    let response = app.at(secs(20)).send(get());
    assert_eq!(response.status(), 429);
    assert_eq!(response.text("x-ratelimit-reset"), Some("40"));
    assert_eq!(response.retry_after(), Some(40));
}

/// BR-29
#[test]
fn a_month_is_a_month() {
    // The last second of a month in UTC, by `date -d 2027-02-28T23:59:59Z +%s` and so on.
    for (what, last_second) in [
        ("2027-02-28", 1_803_859_199),
        ("2028-02-29, a leap year", 1_835_481_599),
        ("2027-12-31", 1_830_297_599),
    ] {
        let app = app_with(Policy::fixed_window("p", Quota::per_calendar_month(2)));
        let at = |second| {
            app.clock.set(secs(second));
            app.send(get())
        };
        assert_eq!(at(last_second - 1).status(), 200, "{what}");
        assert_eq!(at(last_second - 1).status(), 200, "{what}");
        let response = at(last_second);
        assert_eq!(response.status(), 429, "{what}");
        assert_eq!(response.text("x-ratelimit-reset"), Some("1"), "{what}");
        assert_eq!(response.retry_after(), Some(1), "{what}");
        assert_eq!(at(last_second + 1).status(), 200, "{what}");
    }

    // Where a month of 30 days counted from 1970 would begin anew, nothing does; nor on the last
    // day of February in a leap year.
    let app = app_with(Policy::fixed_window("p", Quota::per_calendar_month(1)));
    let at = |second| {
        app.clock.set(secs(second));
        app.status(get())
    };
    let first_of_february_2028 = 1_832_976_000;
    assert_eq!(at(first_of_february_2028), 200);
    let each_day = (0..29).map(|day| at(first_of_february_2028 + day * 86_400 + 43_200));
    assert_eq!(each_day.collect::<Vec<_>>(), [429; 29]);
    assert_eq!(at(first_of_february_2028 + 29 * 86_400), 200);
}

// === memory ===

/// BR-44
#[test]
fn a_million_callers_leave_no_more_than_the_cap_and_then_next_to_nothing() {
    const CAP: usize = 100_000;
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .key(|caller: &u64| *caller)
        .policy(Policy::fixed_window("p", Quota::per_second(1)))
        .store(LocalStore::new().max_keys(CAP))
        .build()
        .unwrap();
    for caller in 0..1_000_000_u64 {
        assert!(limiter.check(&caller).is_ok());
        if caller % 10_000 == 0 {
            let tracked = limiter.tracked_keys();
            assert!(tracked <= CAP, "{tracked} keys after {caller}");
        }
        // First more at one time than there is room for, then as fast as they are swept.
        if caller > 200_000 && caller % 1_000 == 0 {
            clock.advance(ms(20));
        }
    }
    let tracked = limiter.tracked_keys();
    assert!(tracked <= CAP, "{tracked} keys");
    clock.advance(secs(3));
    assert!(limiter.check(&0).is_ok());
    assert_eq!(limiter.tracked_keys(), 1);
}

/// BR-44
#[test]
fn a_caller_over_its_limit_is_not_forgotten_while_there_is_room() {
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .key(|caller: &u64| *caller)
        .policy(Policy::fixed_window("p", Quota::per_minute(1)))
        .store(LocalStore::new().max_keys(20_000))
        .build()
        .unwrap();
    assert!(limiter.check(&u64::MAX).is_ok());
    for caller in 0..15_000 {
        assert!(limiter.check(&caller).is_ok());
        // All shards are swept many times meanwhile.
        clock.advance(ms(3));
        assert!(limiter.check(&u64::MAX).is_err());
    }
    assert_eq!(limiter.tracked_keys(), 15_001);
    clock.advance(secs(15));
    assert!(limiter.check(&u64::MAX).is_ok());
}

// === layers, protocols, configuration ===

/// LAYER
#[test]
fn the_error_type_of_a_service_stays_what_it_was() {
    fn is_infallible<S: tower::Service<Request<()>, Error = std::convert::Infallible>>(_: &S) {}
    let app = app_with(Policy::token_bucket("p", Quota::per_second(1)));
    is_infallible(&app.layer.layer(service_fn(support::ok)));
    let fails = service_fn(|_: Request<()>| async {
        Err::<http::Response<http_body_util::Empty<bytes::Bytes>>, _>("as it was")
    });
    assert_eq!(now(app.layer.layer(fails).oneshot(get())).unwrap_err(), "as it was");
}

/// PROTOCOL
#[test]
fn a_preflight_is_not_counted_where_that_is_asked_for() {
    let preflight = || {
        Request::builder()
            .method(Method::OPTIONS)
            .header("origin", "https://app.example")
            .header("access-control-request-method", "PUT")
            .body(())
            .unwrap()
    };
    let plain_options = || Request::builder().method(Method::OPTIONS).body(()).unwrap();
    for (skip, expected) in [(true, [200, 200, 200, 429]), (false, [200, 429, 429, 429])] {
        let app = App::new(|builder| {
            builder
                .key(Global)
                .policy(Policy::fixed_window("p", Quota::per_minute(1)))
                .skip_preflight(skip)
        });
        let requests = [preflight(), preflight(), plain_options(), plain_options()];
        assert_eq!(requests.map(|request| app.status(request)), expected);
    }
}

/// BR-58
#[test]
fn a_looser_quota_turns_nobody_away() {
    let per_20_s = Arc::new(AtomicU64::new(10));
    let current = per_20_s.clone();
    let app = app_with(
        Policy::token_bucket("p", Quota::new(10, secs(20)).burst(16))
            .quota_for(move |_| Some(Quota::new(current.load(Relaxed), secs(20)).burst(16))),
    );
    assert_eq!(app.statuses(3, get), [200; 3]);
    per_20_s.store(1_000, Relaxed);
    assert_eq!(app.at(ms(100)).status(get()), 200);
}

/// BR-58, whatever the algorithm.
#[test]
fn a_larger_limit_turns_nobody_away() {
    for algorithm in ALGORITHMS {
        let limit = Arc::new(AtomicU64::new(5));
        let current = limit.clone();
        let app = app_with(
            algorithm
                .policy("p", Quota::per_minute(5))
                .quota_for(move |_| Some(Quota::per_minute(current.load(Relaxed)))),
        );
        assert_eq!(app.statuses(6, get), [200, 200, 200, 200, 200, 429], "{algorithm:?}");
        limit.store(50, Relaxed);
        assert_eq!(app.at(ms(100)).statuses(45, get), [200; 45], "{algorithm:?}");
    }
}
