//! What responses say about limits, read by an independent parser and held against the decisions
//! that it comes from.

mod support;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, request::Parts};
use proptest::{collection::vec, prelude::*};
use std::time::Duration;
use support::{
    App, Fields, Seen, T0, get, inputs, ms, secs, send,
    stacks::{ALGORITHMS, Limit, stack, traffic, with_policies},
    us, with,
};
use tollgate::{
    Decision, ManualClock, Outcome, Policy, Quota, RateLimitLayer, Reason, Rejection,
    key::{Global, Header},
    reply::{Dialect, GrpcCode, Headers, LegacyReset},
};
use tower::{Layer, service_fn};

/// All fields that speak about limits.
const FIELDS: [&str; 6] = [
    "ratelimit-policy",
    "ratelimit",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
    "retry-after",
];

/// The members of a list of strings with integers as parameters, which is what both fields of the
/// draft are.
fn items(value: &str) -> Vec<(String, Vec<(String, u64)>)> {
    let list: sfv::List = sfv::Parser::new(value).parse().expect(value);
    let item = |entry| {
        let sfv::ListEntry::Item(item) = entry else { panic!("an inner list: {value}") };
        let name = item.bare_item.as_string().expect(value).as_str().to_owned();
        let parameter = |(key, value): (sfv::Key, sfv::BareItem)| {
            let number = i64::from(value.as_integer().unwrap());
            (key.as_str().to_owned(), u64::try_from(number).unwrap())
        };
        (name, item.params.into_iter().map(parameter).collect())
    };
    list.into_iter().map(item).collect()
}

/// Whole seconds, rounded up.
fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// What a response has to say after a decision with these outcomes.
fn expected_fields(
    stack: &[Limit],
    outcomes: &[Outcome],
    tightest: &Outcome,
    time: Duration,
    reset: LegacyReset,
) -> Vec<(&'static str, String)> {
    let policies: Vec<_> = stack
        .iter()
        .map(|limit| {
            // A bucket that is larger than its limit takes longer than a period to fill.
            let (quota, window) = match limit.burst {
                Some(burst) if burst > limit.limit => {
                    (burst, us((burst * limit.period_us).div_ceil(limit.limit)))
                }
                _ => (limit.limit, us(limit.period_us)),
            };
            let window = (window >= secs(1)).then(|| format!(";w={}", seconds(window)));
            format!("\"{}\";q={quota}{}", limit.name, window.unwrap_or_default())
        })
        .collect();
    assert!(outcomes.iter().any(|outcome| outcome == tightest));
    let t = seconds(tightest.reset_after());
    let legacy_reset = match reset {
        LegacyReset::EpochSeconds => seconds(time + tightest.reset_after()),
        _ => t,
    };
    vec![
        ("ratelimit-policy", policies.join(", ")),
        ("ratelimit", format!("\"{}\";r={};t={t}", tightest.policy(), tightest.remaining())),
        ("x-ratelimit-limit", tightest.limit().to_string()),
        ("x-ratelimit-remaining", tightest.remaining().to_string()),
        ("x-ratelimit-reset", legacy_reset.to_string()),
    ]
}

proptest! {
    #![proptest_config(inputs(300))]

    #[test]
    fn every_field_is_well_formed_and_tells_what_the_handler_sees(
        stack in stack(),
        traffic in traffic(25),
        epoch: bool,
    ) {
        let reset = if epoch { LegacyReset::EpochSeconds } else { LegacyReset::DeltaSeconds };
        let app = App::new(|builder| {
            with_policies(builder, &stack).headers(Headers::default().legacy(reset))
        });
        for (gap_us, call) in traffic {
            app.clock.advance(us(gap_us));
            let response = app.send(call.request());
            let said: Vec<_> = FIELDS
                .into_iter()
                .filter_map(|name| Some((name, response.text(name)?.to_owned())))
                .collect();
            let mut expected = if response.status() == 200 {
                let Seen(decision) = response.extensions().get().unwrap();
                let decision = decision.as_ref().unwrap();
                prop_assert_eq!(decision.time(), app.clock.now());
                match decision.tightest() {
                    Some(tightest) => {
                        let (outcomes, time) = (decision.outcomes(), decision.time());
                        expected_fields(&stack, outcomes, tightest, time, reset)
                    }
                    // No policy applied.
                    None => Vec::new(),
                }
            } else {
                prop_assert_eq!(response.status(), 429);
                let rejection = response.extensions().get::<Rejection>().unwrap();
                let (outcomes, time) = (rejection.outcomes(), rejection.time());
                let tightest = rejection.tightest().unwrap();
                expected_fields(&stack, outcomes, tightest, time, reset)
            };
            let rejection = response.extensions().get::<Rejection>();
            if let Some(wait) = rejection.and_then(Rejection::retry_after) {
                expected.push(("retry-after", seconds(wait).max(1).to_string()));
            }
            prop_assert_eq!(&said, &expected);

            for (name, value) in &said[..said.len().min(2)] {
                let parameters = if *name == "ratelimit" { &["r", "t"][..] } else { &["q", "w"] };
                for (_, items) in items(value) {
                    let names: Vec<_> = items.iter().map(|(name, _)| name.as_str()).collect();
                    prop_assert!(parameters.starts_with(&names), "{}", value);
                }
            }
            if let (Some(wait), Some((_, field))) = (response.retry_after(), said.get(1)) {
                let t = items(field)[0].1[1].1;
                prop_assert!(wait >= t, "come back after {} s, nothing new before {} s", wait, t);
            }
        }
    }

    /// One set of fields comes out, all of it from the tightest decision; a rejection from inside
    /// stands.
    #[test]
    fn nested_layers_tell_one_of_their_decisions(
        stacks in vec(stack(), 2..4),
        traffic in traffic(12),
        legacy in vec(any::<bool>(), 4),
    ) {
        let clock = ManualClock::at(T0);
        let layers: Vec<_> = stacks
            .iter()
            .zip(&legacy)
            .map(|(stack, &legacy)| {
                let headers = Headers::default().legacy(legacy.then_some(LegacyReset::DeltaSeconds));
                let builder = RateLimitLayer::builder().clock(&clock).headers(headers);
                with_policies(builder, stack).build().unwrap()
            })
            .collect();
        for (gap_us, call) in traffic {
            clock.advance(us(gap_us));
            // What each layer would answer by itself, from the outermost to the innermost.
            let alone: Vec<_> = layers
                .iter()
                .map(|layer| layer.limiter().peek(&call.parts()))
                .collect();
            let rejecting = alone.iter().position(Result::is_err);
            let response = match layers.as_slice() {
                [outer, inner] => {
                    send(outer.layer(inner.layer(service_fn(support::ok))), call.request())
                }
                [outer, middle, inner] => send(
                    outer.layer(middle.layer(inner.layer(service_fn(support::ok)))),
                    call.request(),
                ),
                _ => unreachable!(),
            };
            prop_assert_eq!(response.status() == 429, rejecting.is_some());
            for name in FIELDS {
                let _occurs_once = response.text(name);
            }
            let Some(field) = response.text("ratelimit") else {
                prop_assert!(rejecting.is_none());
                let nothing = alone.iter().all(|answer| {
                    answer.as_ref().is_ok_and(|decision| decision.outcomes().is_empty())
                });
                prop_assert!(nothing);
                continue;
            };
            let field = items(field).remove(0);
            if let Some(rejecting) = rejecting {
                let rejection = response.extensions().get::<Rejection>().unwrap();
                prop_assert_eq!(alone[rejecting].as_ref().unwrap_err(), rejection);
                let tightest = rejection.tightest().unwrap();
                prop_assert_eq!(&field.0, tightest.policy());
                prop_assert_eq!(field.1[0].1, tightest.remaining());
            }
            // The legacy fields are of the same decision, where they are there.
            if let Some(remaining) = response.number("x-ratelimit-remaining") {
                prop_assert_eq!(remaining, field.1[0].1);
                prop_assert_eq!(response.number("x-ratelimit-reset").unwrap(), field.1[1].1);
            }
            let listed = items(response.text("ratelimit-policy").unwrap());
            let of_one_layer = stacks.iter().any(|stack| {
                stack.iter().map(|limit| limit.name).eq(listed.iter().map(|item| item.0.as_str()))
            });
            prop_assert!(of_one_layer);
        }
    }
}

// === nested layers ===

fn fixed(clock: &ManualClock, name: &'static str, limit: u64) -> RateLimitLayer {
    RateLimitLayer::builder()
        .clock(clock)
        .key(Global)
        .policy(Policy::fixed_window(name, Quota::per_minute(limit)))
        .build()
        .unwrap()
}

#[test]
fn the_tighter_of_two_layers_is_told_whichever_is_outside() {
    for (outer, inner, told) in [
        (9, 5, r#""inner";r=4;t=60"#),
        (5, 9, r#""outer";r=4;t=60"#),
        (5, 5, r#""inner";r=4;t=60"#),
    ] {
        let clock = ManualClock::at(T0);
        let (outer, inner) = (fixed(&clock, "outer", outer), fixed(&clock, "inner", inner));
        let response = send(outer.layer(inner.layer(service_fn(support::ok))), get());
        assert_eq!(response.text("ratelimit"), Some(told));
    }
}

#[test]
fn a_layer_outside_finds_the_rejection_of_the_one_inside() {
    let clock = ManualClock::at(T0);
    let (outer, inner) = (fixed(&clock, "outer", 9), fixed(&clock, "inner", 1));
    let service = outer.layer(inner.layer(service_fn(support::ok)));
    assert!(send(service.clone(), get()).extensions().get::<Rejection>().is_none());
    let response = send(service, get());
    let rejection = response.extensions().get::<Rejection>().unwrap();
    assert_eq!(rejection.policies().collect::<Vec<_>>(), ["inner"]);
    assert_eq!(rejection.reason(), &Reason::Limited);
    assert_eq!(rejection.time(), T0);
}

#[test]
fn the_handler_finds_the_decision_of_the_innermost_layer() {
    let clock = ManualClock::at(T0);
    let (outer, inner) = (fixed(&clock, "outer", 9), fixed(&clock, "inner", 5));
    let response = send(outer.layer(inner.layer(service_fn(support::ok))), get());
    let Seen(decision) = response.extensions().get().unwrap();
    assert_eq!(decision.as_ref().unwrap().tightest().unwrap().policy(), "inner");
}

// === what is asked for ===

fn names(headers: &HeaderMap) -> Vec<&str> {
    FIELDS.into_iter().filter(|name| headers.contains_key(*name)).collect()
}

#[test]
fn only_the_fields_that_are_asked_for_are_sent() {
    let draft = &FIELDS[..2];
    let legacy = &FIELDS[2..5];
    let both = &FIELDS[..5];
    let default = Headers::default;
    for (headers, admitted, retry_after) in [
        (default(), draft, true),
        (Headers::none(), &[][..], false),
        (Headers::none().retry_after(true), &[], true),
        (Headers::none().standard(Dialect::Draft11), draft, false),
        (Headers::none().legacy(LegacyReset::DeltaSeconds), legacy, false),
        (default().legacy(LegacyReset::DeltaSeconds), both, true),
        (default().legacy(LegacyReset::EpochSeconds).standard(None), legacy, true),
        (default().retry_after(false), draft, false),
        (default().legacy(LegacyReset::DeltaSeconds).legacy(None), draft, true),
    ] {
        for on_admitted in [true, false] {
            let app = App::new(|builder| {
                builder
                    .key(Global)
                    .policy(Policy::fixed_window("p", Quota::per_minute(1)))
                    .headers(headers.clone().on_admitted(on_admitted))
            });
            let response = app.send(get());
            assert_eq!(names(response.headers()), if on_admitted { admitted } else { &[] });
            let response = app.send(get());
            let mut rejected = admitted.to_vec();
            rejected.extend(retry_after.then_some("retry-after"));
            assert_eq!(names(response.headers()), rejected);
        }
    }
}

#[test]
fn the_legacy_reset_is_told_in_the_unit_that_is_asked_for() {
    for (reset, told) in
        [(LegacyReset::DeltaSeconds, "50"), (LegacyReset::EpochSeconds, "1728000060")]
    {
        let app = App::new(|builder| {
            builder
                .key(Global)
                .policy(Policy::fixed_window("p", Quota::per_minute(1)))
                .headers(Headers::none().legacy(reset))
        });
        let response = app.at(secs(10)).send(get());
        assert_eq!(response.text("x-ratelimit-reset"), Some(told));
    }
}

#[test]
fn the_list_of_policies_has_all_of_the_stack_also_those_that_do_not_apply() {
    let app = App::new(|builder| {
        builder
            .key(Global)
            .policy(Policy::token_bucket("burst", Quota::per_second(10).burst(50)))
            .policy(Policy::fixed_window("daily", Quota::per_calendar_day(10_000)))
            .policy(Policy::fixed_window("monthly", Quota::per_calendar_month(99_999)))
            .policy(
                Policy::sliding_window("posts", Quota::new(3, ms(500)))
                    .when(|parts: &Parts| parts.method == Method::POST),
            )
    });
    let response = app.send(get());
    assert_eq!(
        response.text("ratelimit-policy"),
        Some(r#""burst";q=50;w=5, "daily";q=10000;w=86400, "monthly";q=99999, "posts";q=3"#)
    );
    assert_eq!(response.text("ratelimit"), Some(r#""burst";r=49;t=1"#));
}

#[test]
fn a_quota_of_the_callers_own_is_the_one_that_is_told() {
    let app = App::new(|builder| {
        builder.policy(
            Policy::fixed_window("p", Quota::per_minute(1))
                .key(Header::from_static("x-user"))
                .quota_for(|parts: &Parts| {
                    (parts.headers["x-user"] == "gold").then(|| Quota::per_minute(500))
                }),
        )
    });
    let response = app.send(with("x-user", "gold"));
    assert_eq!(response.text("ratelimit-policy"), Some(r#""p";q=500;w=60"#));
    assert_eq!(response.text("ratelimit"), Some(r#""p";r=499;t=60"#));
    let response = app.send(with("x-user", "iron"));
    assert_eq!(response.text("ratelimit-policy"), Some(r#""p";q=1;w=60"#));
}

#[test]
fn numbers_too_large_for_the_field_are_told_as_its_largest() {
    // Structured fields have no integers of more than 15 digits.
    let app = App::new(|builder| {
        builder
            .key(Global)
            .policy(Policy::fixed_window("p", Quota::per_day(1 << 51)))
            .headers(Headers::default().legacy(LegacyReset::DeltaSeconds))
    });
    let response = app.send(get());
    let most = 999_999_999_999_999;
    let policy = items(response.text("ratelimit-policy").unwrap());
    assert_eq!(policy[0].1[0], ("q".to_owned(), most));
    assert_eq!(items(response.text("ratelimit").unwrap())[0].1[0], ("r".to_owned(), most));
    assert_eq!(response.number("x-ratelimit-remaining"), Some((1 << 51) - 1));
}

#[test]
fn a_decision_is_exposed_to_handlers_unless_that_is_switched_off() {
    for expose in [true, false] {
        let app = App::new(|builder| {
            builder
                .key(Global)
                .policy(Policy::fixed_window("p", Quota::per_minute(3)))
                .expose_decision(expose)
        });
        let response = app.send(get());
        let Seen(decision) = response.extensions().get().unwrap();
        let remaining = decision.as_ref().map(|decision| decision.outcomes()[0].remaining());
        assert_eq!(remaining, expose.then_some(2));
        assert_eq!(response.text("ratelimit"), Some(r#""p";r=2;t=60"#));
    }
}

#[test]
fn fields_of_the_service_itself_are_kept() {
    let clock = ManualClock::at(T0);
    let inner = service_fn(|_: Request<()>| async {
        let response = Response::builder()
            .status(StatusCode::IM_A_TEAPOT)
            .header("x-own", "1")
            .header("x-own", "2")
            .body(http_body_util::Full::new(Bytes::from_static(b"short and stout")));
        Ok::<_, std::convert::Infallible>(response.unwrap())
    });
    let response = send(fixed(&clock, "p", 1).layer(inner), get());
    assert_eq!(response.status(), 418);
    assert_eq!(response.headers().get_all("x-own").iter().count(), 2);
    assert_eq!(response.text("ratelimit"), Some(r#""p";r=0;t=60"#));
    assert_eq!(response.body(), "short and stout");
}

// === methods ===

#[test]
fn head_requests_are_told_the_same_as_others() {
    for status in [200, 429] {
        let answers = [Method::GET, Method::HEAD].map(|method| {
            let app = App::new(|builder| {
                builder.key(Global).policy(Policy::fixed_window("p", Quota::per_minute(1)))
            });
            let request = || Request::builder().method(method.clone()).body(()).unwrap();
            if status == 429 {
                app.send(request());
            }
            app.send(request())
        });
        assert_eq!(answers[0].status(), status);
        assert_eq!(answers[1].status(), status);
        assert_eq!(answers[0].headers(), answers[1].headers());
    }
}

#[test]
fn a_preflight_that_is_not_counted_is_told_nothing() {
    let app = App::new(|builder| {
        builder
            .key(Global)
            .policy(Policy::fixed_window("p", Quota::per_minute(1)))
            .skip_preflight(true)
    });
    let preflight = || {
        Request::builder()
            .method(Method::OPTIONS)
            .header("origin", "https://app.example")
            .header("access-control-request-method", "PUT")
    };
    for _ in 0..3 {
        let response = app.send(preflight().body(()).unwrap());
        assert_eq!(response.status(), 200);
        assert!(names(response.headers()).is_empty());
        let Seen(decision) = response.extensions().get().unwrap();
        assert!(decision.is_none());
    }
    // What only looks like one is counted.
    let mut request = preflight().body(()).unwrap();
    *request.method_mut() = Method::POST;
    assert_eq!(app.status(request), 200);
    let mut request = preflight().body(()).unwrap();
    request.headers_mut().remove("origin");
    assert_eq!(app.status(request), 429);
    let mut request = preflight().body(()).unwrap();
    request.headers_mut().remove("access-control-request-method");
    assert_eq!(app.status(request), 429);
}

// === rejections ===

#[test]
fn problem_details_name_the_policies_that_rejected() {
    let app = App::new(|builder| {
        builder
            .key(Global)
            .policy(Policy::token_bucket("burst", Quota::per_second(1)))
            .policy(Policy::fixed_window("roomy", Quota::per_minute(50)))
            .policy(Policy::fixed_window("daily", Quota::per_day(1)))
    });
    app.send(get());
    let response = app.send(get());
    assert_eq!(response.text("content-type"), Some("application/problem+json"));
    assert_eq!(response.text("cache-control"), Some("no-store"));
    assert_eq!(
        serde_json::from_slice::<serde_json::Value>(response.body()).unwrap(),
        serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Quota Exceeded",
            "status": 429,
            "detail": "Limited by `burst`, `daily`. Try again in 86400 s.",
            "violated-policies": ["burst", "daily"],
        })
    );
    assert_eq!(response.text("ratelimit"), Some(r#""daily";r=0;t=86400"#));
    assert_eq!(response.retry_after(), Some(86_400));
}

#[test]
fn an_answer_of_ones_own_gets_the_fields_that_it_lacks() {
    let app = App::new(|builder| {
        builder.key(Global).policy(Policy::fixed_window("p", Quota::per_minute(1))).on_rejection(
            |rejection, parts| {
                let text = format!("{} {rejection}", parts.uri.path());
                Response::builder()
                    .status(StatusCode::SERVICE_UNAVAILABLE)
                    .header("retry-after", "77")
                    .body(Bytes::from(text))
                    .unwrap()
            },
        )
    });
    app.send(get());
    let response = app.send(Request::get("/here").body(()).unwrap());
    assert_eq!(response.status(), 503);
    assert_eq!(response.body(), "/here limited by `p`; retry after 60s");
    assert_eq!(response.retry_after(), Some(77));
    assert_eq!(response.text("ratelimit"), Some(r#""p";r=0;t=60"#));
    assert_eq!(response.text("ratelimit-policy"), Some(r#""p";q=1;w=60"#));
    assert_eq!(response.text("content-type"), None);
    assert!(response.extensions().get::<Rejection>().is_some());
}

#[test]
fn a_grpc_call_over_the_limit_gets_the_code_that_is_asked_for() {
    for (code, told) in [(GrpcCode::ResourceExhausted, "8"), (GrpcCode::Unavailable, "14")] {
        let app = App::new(|builder| {
            builder
                .key(Global)
                .policy(Policy::fixed_window("p", Quota::per_minute(1)))
                .grpc_code(code)
        });
        app.send(support::grpc());
        let response = app.send(support::grpc());
        assert_eq!(response.status(), 200);
        assert_eq!(response.text("content-type"), Some("application/grpc"));
        assert_eq!(response.text("grpc-status"), Some(told));
        assert_eq!(response.text("grpc-retry-pushback-ms"), Some("60000"));
        assert_eq!(response.text("ratelimit"), Some(r#""p";r=0;t=60"#));
        assert!(response.body().is_empty());
    }
}

/// The tightest is the one that will reject first if requests like this one go on.
#[test]
fn the_policy_that_is_told_is_the_one_that_rejects_first() {
    for algorithm in ALGORITHMS {
        let app = App::new(|builder| {
            builder
                .key(Global)
                .policy(Policy::fixed_window("roomy", Quota::per_hour(100)))
                .policy(algorithm.policy("heavy", Quota::per_hour(60)).cost(|_| 20))
                .policy(Policy::sliding_log("middling", Quota::per_hour(4)))
        });
        for remaining in [40, 20, 0] {
            let response = app.send(get());
            let field = items(response.text("ratelimit").unwrap()).remove(0);
            assert_eq!((field.0.as_str(), field.1[0].1), ("heavy", remaining), "{algorithm:?}");
        }
        let response = app.send(get());
        let rejection = response.extensions().get::<Rejection>().unwrap();
        assert_eq!(rejection.policies().collect::<Vec<_>>(), ["heavy"], "{algorithm:?}");
    }
}

/// A decision can be told to others, compared and kept.
#[test]
fn a_decision_outlives_its_request() {
    let app = App::new(|builder| {
        builder.key(Global).policy(Policy::fixed_window("p", Quota::per_minute(1)))
    });
    let response = app.send(get());
    let Seen(decision) = response.extensions().get().unwrap();
    let kept: Decision = decision.clone().unwrap();
    drop((response, app));
    let outcome = kept.tightest().unwrap();
    assert_eq!((outcome.policy(), outcome.limit(), outcome.cost()), ("p", 1, 1));
    assert_eq!(kept.time(), T0);
    assert_eq!(kept.delay(), Duration::ZERO);
}
