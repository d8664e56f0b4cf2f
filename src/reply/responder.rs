//! From a decision to the head of a response, or to a whole one.

use super::{
    grpc::{self, GrpcCodes},
    headers::{self, Annotation, Headers},
    inner::{self, Said},
    problem,
    refusal::Refusal,
};
use crate::decision::{Allotment, Decision, Outcome, Rejection};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode};

/// How a stack answers, made once when the stack is built.
#[derive(Debug)]
pub(crate) struct Responder {
    headers: Headers,
    codes: GrpcCodes,
    policies: Box<[(&'static str, Allotment)]>,
    /// The value of `RateLimit-Policy` for `policies`; its clones share one buffer.
    policies_value: HeaderValue,
}

impl Responder {
    /// Answers for the policies of a stack, in its order, as `headers` say, and to gRPC by `codes`.
    pub(crate) fn new(
        headers: Headers,
        codes: GrpcCodes,
        policies: impl IntoIterator<Item = (&'static str, Allotment)>,
    ) -> Self {
        let policies: Box<[_]> = policies.into_iter().collect();
        Self {
            headers,
            codes,
            policies_value: headers::policies(policies.iter().copied()),
            policies,
        }
    }

    /// What the response to an admitted request has to tell, if anything.
    pub(crate) fn annotation(&self, decision: &Decision) -> Option<Annotation> {
        if !self.headers.annotates_admitted() {
            return None;
        }
        let tightest = decision.tightest()?;
        Some(Annotation {
            policies: self.own_policies(&decision.outcomes),
            ..Annotation::new(tightest, decision.time_us)
        })
    }

    /// Tells it in the head of the response, unless that says something tighter already.
    pub(crate) fn annotate(
        &self,
        mut annotation: Annotation,
        status: StatusCode,
        headers: &mut HeaderMap,
    ) {
        match inner::said(status, headers) {
            Said::Nothing => {}
            Said::Left(inner) if annotation.left() < inner => {
                // All of them go, also those that this stack does not send: they tell of the
                // other decision.
                for field in headers::FIELDS {
                    headers.remove(field);
                }
            }
            Said::Left(_) | Said::Final => return,
        }
        self.headers.write(&mut annotation, &self.policies_value, |name, value| {
            headers.insert(name, value);
        });
    }

    /// The answer to a request with these headers that is turned away.
    pub(crate) fn reject(&self, rejection: &Rejection, request: &HeaderMap) -> Response<Bytes> {
        let refusal = Refusal::new(rejection, self.codes);
        let mut response = match grpc::content_type(request) {
            Some(content_type) => grpc::response(&refusal, content_type),
            None => problem::response(&refusal),
        };
        self.complete(rejection, response.headers_mut());
        response
    }

    /// Adds the fields of a rejection that its response does not have yet.
    pub(crate) fn complete(&self, rejection: &Rejection, headers: &mut HeaderMap) {
        let Some(tightest) = rejection.tightest() else {
            // No limit was reached, but when to come back may be known all the same.
            if let Some((name, value)) = self.headers.retry_field(rejection.retry_after_us()) {
                headers.entry(name).or_insert(value);
            }
            return;
        };
        let mut annotation = Annotation {
            retry_after_us: rejection.retry_after_us(),
            policies: self.own_policies(&rejection.outcomes),
            ..Annotation::new(tightest, rejection.time_us)
        };
        self.headers.write(&mut annotation, &self.policies_value, |name, value| {
            headers.entry(name).or_insert(value);
        });
    }

    /// The value of `RateLimit-Policy` for a request that did not meet all policies with their own
    /// quotas. The field has to be true for the response that carries it.
    fn own_policies(&self, outcomes: &[Outcome]) -> Option<HeaderValue> {
        let own = self.policies.iter().map(|(_, own)| *own);
        // As many outcomes as there are policies are those of all, in the order of the stack.
        let all_met = outcomes.iter().map(|outcome| outcome.quota).eq(own.clone());
        if !self.headers.lists_policies() || all_met || self.met(outcomes).eq(own) {
            return None;
        }
        let names = self.policies.iter().map(|(name, _)| *name);
        Some(headers::policies(names.zip(self.met(outcomes))))
    }

    /// The quotas that a request met: of each policy in the stack, its own or that of its outcome.
    fn met(&self, outcomes: &[Outcome]) -> impl Iterator<Item = Allotment> {
        // Outcomes are in the order of the stack.
        let mut outcomes = outcomes.iter().peekable();
        self.policies.iter().map(move |(name, own)| {
            outcomes
                .next_if(|outcome| outcome.policy == *name)
                .map_or(*own, |outcome| outcome.quota)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        decision::{Reason, Verdict},
        key::KeyError,
        reply::{GrpcCode, LegacyReset},
    };
    use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
    use proptest::{collection::vec, prelude::*};
    use serde_json::{Value, json};

    const SECOND: u64 = 1_000_000;
    const YEARS: u64 = 100 * 365 * 86_400 * SECOND;

    fn allotment(limit: u64, window_s: u64) -> Allotment {
        Allotment { limit, window_us: window_s * SECOND }
    }

    fn admitted(policy: &'static str, quota: Allotment, remaining: u64, reset_us: u64) -> Outcome {
        Outcome {
            remaining,
            reset_us,
            verdict: Verdict::Admitted,
            ..Outcome::open(policy, quota, 1)
        }
    }

    fn waiting(policy: &'static str, quota: Allotment, wait_us: u64) -> Outcome {
        Outcome { verdict: Verdict::Wait(wait_us), ..admitted(policy, quota, 0, wait_us) }
    }

    fn decision(outcomes: impl IntoIterator<Item = Outcome>) -> Decision {
        Decision::new(outcomes.into_iter().collect(), 0, 0)
    }

    fn rejection(reason: Reason, outcomes: impl IntoIterator<Item = Outcome>) -> Rejection {
        Rejection { reason, time_us: 0, outcomes: outcomes.into_iter().collect() }
    }

    fn both() -> Headers {
        Headers::default().legacy(LegacyReset::DeltaSeconds)
    }

    /// A responder for exactly the policies that `outcomes` come from.
    fn responder(headers: Headers, outcomes: &[Outcome]) -> Responder {
        let policies = outcomes.iter().map(|outcome| (outcome.policy, outcome.quota));
        Responder::new(headers, GrpcCodes::default(), policies)
    }

    /// What becomes of the response to an admitted request.
    fn annotate(
        responder: &Responder,
        decision: &Decision,
        status: StatusCode,
        headers: &mut HeaderMap,
    ) {
        if let Some(annotation) = responder.annotation(decision) {
            responder.annotate(annotation, status, headers);
        }
    }

    /// The fields of the response to an admitted request.
    fn fields_of(headers: Headers, decision: &Decision) -> HeaderMap {
        let responder = responder(headers, &decision.outcomes);
        let mut fields = HeaderMap::new();
        annotate(&responder, decision, StatusCode::OK, &mut fields);
        fields
    }

    fn reject(headers: Headers, rejection: &Rejection) -> Response<Bytes> {
        responder(headers, &rejection.outcomes).reject(rejection, &HeaderMap::new())
    }

    fn call(content_type: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(content_type))])
    }

    fn problem(response: &Response<Bytes>) -> Value {
        serde_json::from_slice(response.body()).unwrap()
    }

    /// All fields as lines, sorted by name.
    fn lines(headers: &HeaderMap) -> Vec<String> {
        let mut lines: Vec<_> = headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        lines.sort();
        lines
    }

    // === fields ===

    #[test]
    fn the_draft_is_spoken_by_default_and_nothing_else() {
        let burst = admitted("burst", allotment(100, 60), 50, 30 * SECOND);
        let daily = admitted("daily", allotment(1_000, 86_400), 900, SECOND);
        assert_eq!(
            lines(&fields_of(Headers::default(), &decision([daily, burst]))),
            [
                r#"ratelimit-policy: "daily";q=1000;w=86400, "burst";q=100;w=60"#,
                r#"ratelimit: "burst";r=50;t=30"#,
            ]
        );
    }

    #[test]
    fn each_kind_of_field_can_be_switched() {
        let admitted = decision([admitted("a", allotment(9, 60), 8, SECOND)]);
        let rejected = rejection(Reason::Limited, [waiting("a", allotment(9, 60), SECOND)]);
        let names = |headers: Headers| {
            let on_admitted = fields_of(headers.clone(), &admitted).len();
            let mut fields = reject(headers, &rejected).into_parts().0.headers;
            fields.remove(CONTENT_TYPE);
            fields.remove(CACHE_CONTROL);
            (on_admitted, fields.len())
        };
        assert_eq!(names(Headers::default()), (2, 3));
        assert_eq!(names(Headers::default().on_admitted(false)), (0, 3));
        assert_eq!(names(Headers::default().retry_after(false)), (2, 2));
        assert_eq!(names(Headers::default().standard(None)), (0, 1));
        assert_eq!(names(both()), (5, 6));
        assert_eq!(names(Headers::none()), (0, 0));
        assert_eq!(names(Headers::none().retry_after(true)), (0, 1));
        assert_eq!(names(both().legacy(None)), (2, 3));
    }

    #[test]
    fn nothing_is_told_where_no_policy_applied() {
        assert!(fields_of(both(), &decision([])).is_empty());
    }

    #[test]
    fn headers_reset_is_kept_when_nothing_remains() {
        // FW 2/60s, the third request two seconds in.
        let response = reject(
            both(),
            &rejection(Reason::Limited, [waiting("a", allotment(2, 60), 58 * SECOND)]),
        );
        let headers = response.headers();
        assert_eq!(headers["ratelimit"], r#""a";r=0;t=58"#);
        assert_eq!(headers["x-ratelimit-remaining"], "0");
        assert_eq!(headers["x-ratelimit-reset"], "58");
        assert_eq!(headers[RETRY_AFTER], "58");
    }

    #[test]
    fn headers_reset_is_sent_when_it_is_zero() {
        let fields = fields_of(both(), &decision([admitted("a", allotment(5, 60), 5, 0)]));
        assert_eq!(fields["ratelimit"], r#""a";r=5;t=0"#);
        assert_eq!(fields["x-ratelimit-reset"], "0");
    }

    #[test]
    fn br_10_a_wait_below_a_second_is_one_second() {
        // TB cap 1, 5 tokens/s, the second request after 1 ms; and the waits around it.
        for (wait_us, told) in
            [(199_000, "1"), (0, "1"), (1, "1"), (SECOND, "1"), (SECOND + 1, "2")]
        {
            let outcome = waiting("a", allotment(1, 0), wait_us);
            let response = reject(both(), &rejection(Reason::Limited, [outcome]));
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()[RETRY_AFTER], told, "{wait_us}");
        }
    }

    #[test]
    fn a_window_below_a_second_is_left_out() {
        for (window_us, listed) in [
            (200_000, r#""a";q=1"#),
            (SECOND - 1, r#""a";q=1"#),
            (SECOND, r#""a";q=1;w=1"#),
            (SECOND + 1, r#""a";q=1;w=2"#),
        ] {
            let quota = Allotment { limit: 1, window_us };
            let fields = fields_of(both(), &decision([admitted("a", quota, 0, window_us)]));
            assert_eq!(fields["ratelimit-policy"], listed);
        }
    }

    #[test]
    fn br_29_a_reset_that_did_not_change_is_printed_the_same() {
        // 2027-02-28T23:59:59Z, one second before the month ends.
        let (before_us, end_s) = (1_803_859_199 * SECOND, "1803859200");
        let headers = Headers::none().legacy(LegacyReset::EpochSeconds).retry_after(true);
        for into_the_second in [0, 1, 400_000, 999_999] {
            let left_us = SECOND - into_the_second;
            let rejection = Rejection {
                time_us: before_us + into_the_second,
                ..rejection(Reason::Limited, [waiting("m", allotment(2, 60), left_us)])
            };
            let response = reject(headers.clone(), &rejection);
            assert_eq!(response.headers()["x-ratelimit-reset"], end_s);
            assert_eq!(response.headers()[RETRY_AFTER], "1");
        }
    }

    #[test]
    fn the_list_of_policies_tells_the_quotas_that_the_request_met() {
        let own = [("a", allotment(10, 60)), ("b", allotment(20, 60)), ("c", allotment(30, 60))];
        let responder = Responder::new(Headers::default(), GrpcCodes::default(), own);
        let listed = |outcomes: &[Outcome]| {
            let decision = decision(outcomes.iter().copied());
            let mut fields = HeaderMap::new();
            annotate(&responder, &decision, StatusCode::OK, &mut fields);
            fields["ratelimit-policy"].clone()
        };
        let [a, _, c] = own.map(|(name, quota)| admitted(name, quota, 5, SECOND));
        let always = r#""a";q=10;w=60, "b";q=20;w=60, "c";q=30;w=60"#;
        assert_eq!(listed(&[a, c]), always);
        // Not a copy: the stack's own value.
        assert_eq!(
            listed(&[a, c]).as_bytes().as_ptr(),
            responder.policies_value.as_bytes().as_ptr()
        );
        let c = Outcome { quota: allotment(300, 3_600), ..c };
        let this_time = r#""a";q=10;w=60, "b";q=20;w=60, "c";q=300;w=3600"#;
        assert_eq!(listed(&[a, c]), this_time);
    }

    #[test]
    fn each_value_takes_one_allocation() {
        let a = admitted("a", allotment(10, 60), 5, SECOND);
        let other = Outcome { quota: allotment(20, 60), ..a };
        for (configured, outcome, values) in [
            (Headers::default(), a, 1),
            (Headers::default(), other, 2),
            (both(), a, 4),
            (both().standard(None), other, 3),
        ] {
            let responder = responder(configured, &[a]);
            // A buffer takes its count of sharers when it is first shared.
            drop(responder.policies_value.clone());
            let decision = decision([outcome]);
            let mut fields = HeaderMap::with_capacity(8);
            let allocations = allocation_counter::measure(|| {
                annotate(&responder, &decision, StatusCode::OK, &mut fields);
            });
            assert_eq!(allocations.count_total, values);
        }
    }

    // === nested layers ===

    #[test]
    fn br_12_the_inner_answer_is_kept_when_it_is_tighter() {
        let outer = decision([admitted("outer", allotment(100, 60), 99, 60 * SECOND)]);
        let inner_policy = allotment(1, 60);
        let around = responder(both(), &outer.outcomes);

        let first = decision([admitted("inner", inner_policy, 0, 60 * SECOND)]);
        let mut headers = fields_of(both(), &first);
        let inside = lines(&headers);
        annotate(&around, &outer, StatusCode::OK, &mut headers);
        assert_eq!(headers["x-ratelimit-limit"], "1");
        assert_eq!(headers["x-ratelimit-remaining"], "0");
        assert_eq!(lines(&headers), inside);

        let second = rejection(Reason::Limited, [waiting("inner", inner_policy, 60 * SECOND)]);
        let (mut head, _) = reject(both(), &second).into_parts();
        let inside = lines(&head.headers);
        annotate(&around, &outer, head.status, &mut head.headers);
        assert_eq!(head.headers["x-ratelimit-limit"], "1");
        assert_eq!(head.headers["x-ratelimit-remaining"], "0");
        assert_eq!(head.headers[RETRY_AFTER], "60");
        assert_eq!(lines(&head.headers), inside);
    }

    #[test]
    fn br_12_the_inner_answer_is_replaced_as_a_whole_when_the_outer_is_tighter() {
        let inner = decision([admitted("inner", allotment(100, 60), 2, 60 * SECOND)]);
        let outer = decision([admitted("outer", allotment(5, 10), 1, SECOND)]);
        for inner_headers in [both(), Headers::none().legacy(LegacyReset::EpochSeconds)] {
            let mut headers = fields_of(inner_headers, &inner);
            headers.insert("x-other", HeaderValue::from_static("kept"));
            let around = responder(Headers::default(), &outer.outcomes);
            annotate(&around, &outer, StatusCode::OK, &mut headers);
            assert_eq!(
                lines(&headers),
                [
                    r#"ratelimit-policy: "outer";q=5;w=10"#,
                    r#"ratelimit: "outer";r=1;t=1"#,
                    "x-other: kept",
                ]
            );
        }
    }

    #[test]
    fn an_inner_rejection_stands_even_where_less_is_left_outside() {
        let outer = decision([admitted("outer", allotment(5, 100), 0, 100 * SECOND)]);
        let around = responder(both(), &outer.outcomes);
        let costly = Outcome {
            verdict: Verdict::Never,
            cost: 9,
            ..admitted("inner", allotment(3, 2), 3, 0)
        };
        for rejection in [
            rejection(Reason::Limited, [waiting("inner", allotment(1, 60), SECOND)]),
            rejection(Reason::TooCostly, [costly]),
        ] {
            for (headers, request) in [
                (both(), HeaderMap::new()),
                (both(), call("application/grpc")),
                (Headers::none(), call("application/grpc")),
            ] {
                let inside = responder(headers, &rejection.outcomes);
                let (mut head, _) = inside.reject(&rejection, &request).into_parts();
                let before = lines(&head.headers);
                annotate(&around, &outer, head.status, &mut head.headers);
                assert_eq!(lines(&head.headers), before);
            }
        }
    }

    #[test]
    fn somebody_elses_answer_is_left_alone_unless_it_is_understood_and_looser() {
        let outer = decision([admitted("outer", allotment(5, 10), 1, SECOND)]);
        let around = responder(Headers::default(), &outer.outcomes);
        for (name, value, kept) in [
            ("ratelimit", "limit=10, remaining=9", true),
            ("ratelimit", r#""theirs";r=1;t=1"#, true),
            ("ratelimit", r#""theirs";r=1"#, true),
            ("ratelimit", r#""theirs";r=1;t=0"#, false),
            ("x-ratelimit-remaining", "lots", true),
            ("x-ratelimit-remaining", "1", true),
            ("x-ratelimit-remaining", "2", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            annotate(&around, &outer, StatusCode::OK, &mut headers);
            let theirs = lines(&headers) == [format!("{name}: {value}")];
            assert_eq!(theirs, kept, "{name}: {value}");
        }
    }

    #[test]
    fn a_rejection_of_ones_own_making_gets_the_fields_that_it_lacks() {
        let rejection = rejection(Reason::Limited, [waiting("a", allotment(2, 60), 58 * SECOND)]);
        let mut headers = HeaderMap::new();
        headers.insert(RETRY_AFTER, HeaderValue::from_static("90"));
        responder(Headers::default(), &rejection.outcomes).complete(&rejection, &mut headers);
        assert_eq!(
            lines(&headers),
            [r#"ratelimit-policy: "a";q=2;w=60"#, r#"ratelimit: "a";r=0;t=58"#, "retry-after: 90",]
        );
    }

    // === rejections ===

    #[test]
    fn a_limited_request_is_told_which_policies_and_how_long() {
        let response = reject(
            Headers::default(),
            &rejection(
                Reason::Limited,
                [
                    waiting("burst", allotment(10, 1), 300_000),
                    admitted("hourly", allotment(500, 3_600), 400, SECOND),
                    waiting("daily", allotment(1_000, 86_400), 7_200 * SECOND),
                ],
            ),
        );
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[CONTENT_TYPE], "application/problem+json");
        assert_eq!(response.headers()[CACHE_CONTROL], "no-store");
        assert_eq!(response.headers()[RETRY_AFTER], "7200");
        assert_eq!(
            problem(&response),
            json!({
                "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "title": "Quota Exceeded",
                "status": 429,
                "detail": "Limited by `burst`, `daily`. Try again in 7200 s.",
                "violated-policies": ["burst", "daily"],
            })
        );
    }

    #[test]
    fn br_16_no_wait_is_promised_to_a_request_that_can_never_fit() {
        let costly =
            Outcome { verdict: Verdict::Never, cost: 4, ..admitted("bulk", allotment(3, 2), 3, 0) };
        let rejection = rejection(Reason::TooCostly, [costly]);
        let response = reject(Headers::default(), &rejection);
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(!response.headers().contains_key(RETRY_AFTER));
        assert_eq!(
            problem(&response)["detail"],
            "The request costs more than `bulk` can ever admit at once. Ask for less."
        );

        let response = responder(Headers::default(), &rejection.outcomes)
            .reject(&rejection, &call("application/grpc"));
        assert_eq!(response.headers()["grpc-status"], "8");
        assert_eq!(response.headers()["grpc-retry-pushback-ms"], "-1");
        assert!(!response.headers().contains_key("grpc-status-details-bin"));
    }

    #[test]
    fn br_06_a_missing_key_is_the_clients_business_and_a_missing_setup_is_not() {
        let no_key = |error| {
            let reason = Reason::NoKey { policy: "per-key", error };
            rejection(reason, [])
        };
        let missing = no_key(KeyError::missing("send an \"X-Api-Key\" header"));
        let secret = no_key(KeyError::misconfigured("connect info is off on db-7"));
        let faulty = Reason::Faulty {
            policy: "per-key",
            message: "index out of bounds in tariff.rs".to_owned(),
        };
        let hidden = "The server could not apply `per-key` to the request.";
        for (rejection, status, title, code, detail) in [
            (missing, 400, "Bad Request", "3", "send an \"X-Api-Key\" header"),
            (secret, 500, "Internal Server Error", "13", hidden),
            (rejection(faulty, []), 500, "Internal Server Error", "13", hidden),
        ] {
            let response = reject(both(), &rejection);
            assert_eq!(response.status(), status);
            assert_eq!(
                problem(&response),
                json!({
                    "type": "about:blank",
                    "title": title,
                    "status": status,
                    "detail": detail,
                })
            );
            assert_eq!(
                lines(response.headers()),
                ["cache-control: no-store", "content-type: application/problem+json",]
            );

            let response = responder(both(), &[]).reject(&rejection, &call("application/grpc"));
            assert_eq!(response.status(), StatusCode::OK);
            assert_eq!(response.headers()["grpc-status"], code);
            assert_eq!(response.headers()["grpc-message"], detail);
        }
    }

    #[test]
    fn br_54_a_limited_call_ends_with_a_status_and_a_hint_when_to_retry() {
        let outcome = waiting("calls", allotment(1, 60), 59_000_001);
        let rejection = rejection(Reason::Limited, [outcome]);
        let policies = [(outcome.policy, outcome.quota)];
        for (limited, code) in [(GrpcCode::ResourceExhausted, "8"), (GrpcCode::Unavailable, "14")] {
            let codes = GrpcCodes { limited, ..GrpcCodes::default() };
            let responder = Responder::new(Headers::default(), codes, policies);
            let response = responder.reject(&rejection, &call("application/grpc+proto"));
            assert_eq!(response.status(), StatusCode::OK);
            assert!(response.body().is_empty());
            let mut headers = response.into_parts().0.headers;
            let details = headers.remove("grpc-status-details-bin").unwrap();
            assert!(!details.is_empty());
            assert_eq!(
                lines(&headers),
                [
                    "content-type: application/grpc",
                    "grpc-message: Limited by `calls`. Try again in 60 s.",
                    "grpc-retry-pushback-ms: 59001",
                    &format!("grpc-status: {code}"),
                    r#"ratelimit-policy: "calls";q=1;w=60"#,
                    r#"ratelimit: "calls";r=0;t=60"#,
                    "retry-after: 60",
                ]
            );
        }
    }

    // === all of it ===

    /// The name and the integer parameters of each item, by an independent parser.
    fn items(value: &HeaderValue) -> Vec<(String, Vec<(String, u64)>)> {
        let list: sfv::List = sfv::Parser::new(value.as_bytes()).parse().unwrap();
        list.into_iter()
            .map(|entry| {
                let sfv::ListEntry::Item(item) = entry else {
                    panic!("an inner list");
                };
                let name = item.bare_item.as_string().unwrap().as_str().to_owned();
                let parameters = item.params.into_iter().map(|(key, value)| {
                    let number = i64::from(value.as_integer().unwrap());
                    (key.as_str().to_owned(), number.try_into().unwrap())
                });
                (name, parameters.collect())
            })
            .collect()
    }

    fn number(headers: &HeaderMap, name: &str) -> u64 {
        headers[name].to_str().unwrap().parse().unwrap()
    }

    /// Times at and around whole seconds, and any others.
    fn span() -> impl Strategy<Value = u64> {
        prop_oneof![
            (0_u64..100, 0_u64..3).prop_map(|(s, off)| (s * SECOND + off).saturating_sub(1)),
            0..3 * SECOND,
            0..=YEARS,
        ]
    }

    fn amount() -> impl Strategy<Value = u64> {
        prop_oneof![0_u64..20, any::<u64>()]
    }

    prop_compose! {
        /// What algorithms may say: it takes at least as long until a rejected request fits as
        /// until anything more than what remains can be spent.
        fn outcome()(
            policy in proptest::sample::select(vec!["a", "Burst.v2", "per-client_1"]),
            limit in amount(),
            window_us in span(),
            remaining in amount(),
            cost in 0_u64..5,
            reset_us in span(),
            beyond_us in span(),
            admitted: bool,
        ) -> Outcome {
            Outcome {
                remaining,
                reset_us,
                verdict: if admitted {
                    Verdict::Admitted
                } else {
                    Verdict::Wait(reset_us + beyond_us)
                },
                ..Outcome::open(policy, Allotment { limit, window_us }, cost)
            }
        }
    }

    proptest! {
        #[test]
        fn every_field_is_read_back_with_its_numbers(
            outcomes in vec(outcome(), 1..4),
            time_us in 0..=2 * YEARS,
            epoch: bool,
        ) {
            let rejected = outcomes.iter().any(|outcome| !outcome.is_admitted());
            let reset = if epoch { LegacyReset::EpochSeconds } else { LegacyReset::DeltaSeconds };
            let configured = Headers::default().legacy(reset);
            let (tightest, headers) = if rejected {
                let outcomes = outcomes.iter().copied();
                let rejection = Rejection { time_us, ..rejection(Reason::Limited, outcomes) };
                let tightest = *rejection.tightest().unwrap();
                (tightest, reject(configured, &rejection).into_parts().0.headers)
            } else {
                let decision = Decision { time_us, ..decision(outcomes.iter().copied()) };
                (*decision.tightest().unwrap(), fields_of(configured, &decision))
            };
            prop_assert_eq!(headers.keys_len(), headers.len());

            // RateLimit-Policy
            let seconds = |us: u64| us / SECOND + u64::from(!us.is_multiple_of(SECOND));
            let most = 999_999_999_999_999;
            let listed: Vec<_> = outcomes
                .iter()
                .map(|Outcome { policy, quota, .. }| {
                    let mut parameters = vec![("q".to_owned(), quota.limit.min(most))];
                    if quota.window_us >= SECOND {
                        parameters.push(("w".to_owned(), seconds(quota.window_us)));
                    }
                    ((*policy).to_owned(), parameters)
                })
                .collect();
            prop_assert_eq!(items(&headers["ratelimit-policy"]), listed);

            // RateLimit
            let remaining = tightest.remaining.min(tightest.quota.limit);
            let t = seconds(tightest.reset_us);
            let parameters = vec![("r".to_owned(), remaining.min(most)), ("t".to_owned(), t)];
            let told = vec![(tightest.policy.to_owned(), parameters)];
            prop_assert_eq!(items(&headers["ratelimit"]), told);

            // X-RateLimit-*
            let from = if epoch { time_us } else { 0 };
            prop_assert_eq!(number(&headers, "x-ratelimit-limit"), tightest.quota.limit);
            prop_assert_eq!(number(&headers, "x-ratelimit-remaining"), remaining);
            prop_assert_eq!(
                number(&headers, "x-ratelimit-reset"),
                seconds(from + tightest.reset_us)
            );

            // Retry-After
            let longest = outcomes.iter().filter_map(Outcome::retry_after).max();
            prop_assert_eq!(rejected, headers.contains_key(RETRY_AFTER));
            if let Some(longest) = longest {
                let told = number(&headers, "retry-after");
                prop_assert!(told >= 1 && told >= t);
                prop_assert!(told as u128 * 1_000_000 >= longest.as_micros());
                prop_assert!(told == 1 || (told - 1) as u128 * 1_000_000 < longest.as_micros());
            }
        }

        #[test]
        fn one_consistent_set_comes_out_of_nested_layers(
            inner in outcome(),
            outer in outcome(),
            inner_legacy: bool,
            outer_legacy: bool,
        ) {
            let configured = |legacy| if legacy { both() } else { Headers::default() };
            let [inner, outer] = [inner, outer].map(|outcome| {
                decision([Outcome { verdict: Verdict::Admitted, ..outcome }])
            });
            let mut headers = fields_of(configured(inner_legacy), &inner);
            let inside = lines(&headers);
            let around = responder(configured(outer_legacy), &outer.outcomes);
            annotate(&around, &outer, StatusCode::OK, &mut headers);

            let outside = lines(&fields_of(configured(outer_legacy), &outer));
            let told = |lines: &[String]| {
                let rest = lines.iter().find_map(|line| line.split_once(";r=")).unwrap().1;
                let (r, t) = rest.split_once(";t=").unwrap();
                (r.parse::<u64>().unwrap(), std::cmp::Reverse(t.parse::<u64>().unwrap()))
            };
            let outer_is_tighter = told(&outside) < told(&inside);
            prop_assert_eq!(lines(&headers), if outer_is_tighter { outside } else { inside });
        }
    }
}
