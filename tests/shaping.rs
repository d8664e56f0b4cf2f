//! Leaky buckets that hold requests back: when each has its turn, and what becomes of those who give
//! up waiting.

mod support;

use bytes::Bytes;
use http::{Request, Response, request::Parts};
use http_body_util::Empty;
use proptest::{collection::vec, prelude::*};
use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};
use support::{Fields, T0, YEAR, crowd::Crowd, get, inputs, ms, now, secs, us, with};
use tollgate::{
    BuildError, CallError, Calls, Clock, Decision, Limiter, ManualClock, Policy, Quota, RateLimit,
    RateLimitLayer, Reason, Rejection,
    key::{Global, Header},
};
use tower::{Layer, Service, service_fn};

/// Five in a second, evenly spaced, and a queue of a hundred.
fn five_per_second<R: ?Sized>() -> Policy<R> {
    Policy::leaky_bucket("p", Quota::per_second(5).burst(1)).max_delay(secs(20))
}

/// A limiter of requests that are numbers.
fn limiter(clock: &ManualClock, policies: impl IntoIterator<Item = Policy<u64>>) -> Limiter<u64> {
    let builder = Limiter::builder().clock(clock).key(Global);
    policies.into_iter().fold(builder, |builder, policy| builder.policy(policy)).build().unwrap()
}

/// Requests cost what they are.
fn costly(policy: Policy<u64>) -> Policy<u64> {
    policy.cost(|cost| *cost)
}

type Answers<'a> = Crowd<'a, Result<Decision, Rejection>>;

/// As many requests at once, each of cost 1.
fn queue<'a>(clock: &ManualClock, limiter: &'a Limiter<u64>, length: usize) -> Answers<'a> {
    let mut crowd = Crowd::new(clock);
    for _ in 0..length {
        crowd.enter(limiter.ready(&1));
    }
    crowd.run();
    crowd
}

// === turns ===

/// BR-56
#[test]
fn a_hundred_at_once_have_their_turns_one_after_the_other() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = Crowd::new(&clock);
    for _ in 0..100 {
        crowd.enter(limiter.ready(&1));
    }
    let expected: Vec<_> = (0..100).map(|i| (i, i as u32 * ms(200))).collect();
    assert_eq!(crowd.run_until(ms(19_800), ms(200)), expected);
    assert_eq!(crowd.len(), 0);
}

#[test]
fn the_delay_of_a_decision_is_how_long_it_waited() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = Crowd::new(&clock);
    for i in 0..10 {
        clock.set(T0 + i * ms(7));
        crowd.enter(limiter.ready(&1));
        crowd.run();
    }
    for _ in 0..9 {
        // Nothing is decided anew when the turn has come.
        clock.advance(secs(9));
        for (number, answer) in crowd.run() {
            let decision = answer.unwrap();
            let entered = T0 + number as u32 * ms(7);
            assert_eq!(decision.time(), entered);
            assert_eq!(entered + decision.delay(), T0 + number as u32 * ms(200));
        }
    }
    assert_eq!(crowd.len(), 0);
}

#[test]
fn nobody_waits_longer_than_the_maximum_delay() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    // The first goes at once; a hundred wait, the last of them 20 s.
    let mut crowd = queue(&clock, &limiter, 101);
    assert_eq!(crowd.len(), 100);
    let rejection = now(limiter.ready(&1)).unwrap_err();
    assert_eq!(rejection.reason(), &Reason::Limited);
    assert_eq!(rejection.retry_after(), Some(ms(200)));
    clock.set(T0 + ms(200) - us(1));
    assert!(now(limiter.ready(&1)).is_err());
    clock.set(T0 + ms(200));
    assert!(limiter.check(&1).is_ok_and(|decision| decision.delay() == secs(20)));
    assert_eq!(crowd.run().len(), 1);
}

#[test]
fn a_burst_goes_at_once_and_the_rest_at_the_steady_rate() {
    let clock = ManualClock::at(T0);
    let policy = Policy::leaky_bucket("p", Quota::per_second(10).burst(3)).max_delay(secs(1));
    let limiter = limiter(&clock, [policy]);
    let mut crowd = Crowd::new(&clock);
    for _ in 0..6 {
        crowd.enter(limiter.ready(&1));
    }
    let expected = [0, 0, 0, 100, 200, 300].map(ms);
    let turns = crowd.run_until(ms(300), ms(100));
    assert_eq!(turns, (0..6).zip(expected).collect::<Vec<_>>());
}

#[test]
fn a_costly_request_takes_its_time() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [costly(five_per_second())]);
    let mut crowd = Crowd::new(&clock);
    for cost in &[1, 3, 1, 10, 2] {
        crowd.enter(limiter.ready(cost));
    }
    // Each has its turn when all before it, and itself but for the burst, have drained.
    let turns = [0, 600, 800, 2_800, 3_200].map(ms);
    assert_eq!(crowd.run_until(ms(3_200), ms(200)), (0..5).zip(turns).collect::<Vec<_>>());
}

#[test]
fn keys_have_lines_of_their_own() {
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .policy(five_per_second().key(|n: &u64| *n % 2))
        .build()
        .unwrap();
    let mut crowd = Crowd::new(&clock);
    for n in &[0, 0, 0, 1, 1] {
        crowd.enter(limiter.ready(n));
    }
    let turns = [(0, 0), (3, 0), (1, 200), (4, 200), (2, 400)].map(|(n, turn)| (n, ms(turn)));
    assert_eq!(crowd.run_until(ms(400), ms(200)), turns);
}

/// What `check` would answer, with the delay.
#[test]
fn a_peek_tells_how_long_a_request_would_have_to_wait() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    for waits in [0, 200, 400] {
        assert_eq!(limiter.peek(&1).unwrap().delay(), ms(waits));
        assert_eq!(limiter.check(&1).unwrap().delay(), ms(waits));
    }
}

// === giving up ===

/// Cancels some of those who wait, and expects the others to have their turns one after the other
/// without gaps.
fn assert_the_others_move_up(cancelled: &[usize]) {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = queue(&clock, &limiter, 10);
    for &number in cancelled {
        crowd.cancel(number);
    }
    // Whoever comes now stands behind them, not behind the gaps.
    let last = crowd.enter(limiter.ready(&1));
    let others: Vec<_> = (1..10).chain([last]).filter(|n| !cancelled.contains(n)).collect();
    let expected: Vec<_> =
        others.iter().enumerate().map(|(i, &n)| (n, (i as u32 + 1) * ms(200))).collect();
    assert_eq!(crowd.run_until(ms(2_200), ms(200)), expected, "without {cancelled:?}");
}

#[test]
fn whoever_is_behind_one_who_gives_up_moves_up() {
    for cancelled in [
        &[1][..],
        &[5],
        &[9],
        &[1, 2],
        &[4, 5, 6],
        &[6, 5, 4],
        &[9, 1],
        &[2, 4, 6, 8],
        &[8, 6, 4, 2],
        &[1, 2, 3, 4, 5, 6, 7, 8, 9],
        &[9, 8, 7, 6, 5, 4, 3, 2, 1],
    ] {
        assert_the_others_move_up(cancelled);
    }
}

#[test]
fn those_behind_move_up_in_time_also_between_turns() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = queue(&clock, &limiter, 6);
    clock.advance(ms(250));
    assert_eq!(crowd.run().len(), 1, "number 1 had its turn after 200 ms");
    crowd.cancel(2);
    assert!(crowd.run().is_empty());
    // Number 3 has the turn that number 2 would have had.
    clock.set(T0 + ms(399));
    assert!(crowd.run().is_empty());
    let rest = [(3, ms(400)), (4, ms(600)), (5, ms(800))];
    assert_eq!(crowd.run_until(ms(1_200), ms(200)), rest);
}

/// Moving up may be to a turn that has come already.
#[test]
fn one_who_moves_up_to_the_present_goes_at_once() {
    let clock = ManualClock::at(T0);
    let policy = Policy::leaky_bucket("p", Quota::per_second(1).burst(5)).max_delay(secs(60));
    let limiter = limiter(&clock, [costly(policy)]);
    let mut crowd = Crowd::new(&clock);
    for cost in &[5, 5, 1] {
        crowd.enter(limiter.ready(cost));
    }
    assert_eq!(crowd.run().len(), 1);
    clock.advance(ms(4_900));
    assert!(crowd.run().is_empty());
    crowd.cancel(1);
    let done = crowd.run();
    assert_eq!(done.len(), 1, "its turn would have been after 1 s");
    assert_eq!(done[0].0, 2);
}

#[test]
fn one_who_gives_up_gets_all_back_from_all_policies() {
    let clock = ManualClock::at(T0);
    let policies = || {
        [
            Policy::token_bucket("tb", Quota::per_hour(10)),
            Policy::fixed_window("fw", Quota::per_hour(10)),
            Policy::fixed_window("fh", Quota::per_hour(10)).from_first_hit(),
            Policy::sliding_window("sw", Quota::per_hour(10)),
            Policy::sliding_log("sl", Quota::per_hour(10)),
            five_per_second(),
        ]
    };
    let limiter = limiter(&clock, policies().map(costly));
    let mut crowd = Crowd::new(&clock);
    for _ in 0..3 {
        crowd.enter(limiter.ready(&3));
    }
    crowd.run();
    let left = || -> Vec<_> {
        let peeked = limiter.peek(&0).unwrap();
        peeked.outcomes().iter().map(|outcome| outcome.remaining()).collect()
    };
    assert_eq!(left(), [1, 1, 1, 1, 1, 92]);
    clock.advance(ms(100));
    assert!(now(limiter.ready(&3)).is_err());
    crowd.cancel(1);
    assert_eq!(left(), [4, 4, 4, 4, 4, 95]);
    crowd.enter(limiter.ready(&3));
    crowd.run();
    assert_eq!(left(), [1, 1, 1, 1, 1, 92]);
    crowd.cancel(3);
    crowd.cancel(2);
    crowd.cancel(0);
    assert_eq!(left(), [10, 10, 10, 10, 10, 101]);
}

#[test]
fn one_who_gives_up_after_its_turn_gets_nothing_back() {
    let clock = ManualClock::at(T0);
    let daily = Policy::fixed_window("daily", Quota::per_day(100));
    let limiter = limiter(&clock, [daily, five_per_second()]);
    let mut crowd = queue(&clock, &limiter, 4);
    // Its turn has come, and it was told so, but it was not polled.
    clock.set(T0 + ms(200));
    crowd.cancel(1);
    let daily = || limiter.peek(&1).unwrap().outcomes()[0].remaining();
    assert_eq!(daily(), 96);
    // Those behind keep their turns: the one before them had its own.
    assert_eq!(crowd.run_until(ms(600), ms(200)), [(2, ms(400)), (3, ms(600))]);
    assert_eq!(daily(), 96);
    drop(crowd);
    assert_eq!(daily(), 96);
}

#[test]
fn a_place_given_up_is_free_for_one_who_was_turned_away() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = queue(&clock, &limiter, 101);
    assert!(now(limiter.ready(&1)).is_err());
    crowd.cancel(50);
    crowd.enter(limiter.ready(&1));
    assert!(crowd.run().is_empty(), "it waits");
    assert!(now(limiter.ready(&1)).is_err());
}

#[test]
fn a_place_in_one_line_does_not_hold_up_those_in_another() {
    // Everybody waits in the line of all, and some in one of their own.
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .policy(five_per_second().key(Global))
        .policy(
            Policy::leaky_bucket("own", Quota::per_second(1))
                .max_delay(secs(9))
                .key(|caller: &u64| *caller),
        )
        .build()
        .unwrap();
    let mut crowd = Crowd::new(&clock);
    for caller in &[1, 1, 1, 2, 3] {
        crowd.enter(limiter.ready(caller));
    }
    let turns = [(0, 0), (3, 600), (4, 800), (1, 1_000), (2, 2_000)];
    assert_eq!(crowd.run_until(secs(2), ms(200)), turns.map(|(n, turn)| (n, ms(turn))));

    // Who gives up does so in both.
    clock.advance(secs(60));
    let mut crowd = Crowd::new(&clock);
    for caller in &[1, 1, 1, 2, 3] {
        crowd.enter(limiter.ready(caller));
    }
    assert_eq!(crowd.run().len(), 1);
    crowd.cancel(1);
    let turns = [(3, 400), (4, 600), (2, 1_000)];
    assert_eq!(crowd.run_until(secs(2), ms(200)), turns.map(|(n, turn)| (n, ms(turn))));
}

/// A slot that passed while it waited in another line is nobody's any more.
#[test]
fn one_who_gives_up_gives_back_no_slot_that_has_passed() {
    let clock = ManualClock::at(T0);
    let limiter = Limiter::<u64>::builder()
        .clock(&clock)
        .policy(five_per_second().key(Global))
        .policy(
            Policy::leaky_bucket("own", Quota::per_second(1))
                .max_delay(secs(9))
                .key(|caller: &u64| *caller),
        )
        .build()
        .unwrap();
    let mut crowd = Crowd::new(&clock);
    // The second waits a second for itself, but only 200 ms for the others.
    crowd.enter(limiter.ready(&1));
    crowd.enter(limiter.ready(&1));
    assert_eq!(crowd.run().len(), 1);
    clock.set(T0 + ms(900));
    crowd.enter(limiter.ready(&2));
    crowd.enter(limiter.ready(&3));
    assert_eq!(crowd.run().len(), 1);
    clock.set(T0 + ms(950));
    crowd.cancel(1);
    // 200 ms after the one before it.
    assert_eq!(crowd.run_until(ms(1_100), ms(50)), [(3, ms(1_100))]);
    // Its own line is free.
    assert_eq!(limiter.check(&1).unwrap().delay(), ms(200));
}

/// Nor do tokens that have come back by themselves come back again.
#[test]
fn giving_up_in_bulk_mints_no_tokens() {
    let clock = ManualClock::at(T0);
    let tokens = Policy::token_bucket("tokens", Quota::per_second(10));
    let shaping = Policy::leaky_bucket("shaping", Quota::per_second(1)).max_delay(secs(900));
    let limiter = limiter(&clock, [tokens, shaping]);
    let mut crowd = Crowd::new(&clock);
    for second in 0..10 {
        clock.set(T0 + secs(second));
        for _ in 0..10 {
            crowd.enter(limiter.ready(&1));
        }
        crowd.run();
    }
    clock.set(T0 + secs(10));
    crowd.run();
    // Ten are there, and all that were given up before are there again or full.
    let mut admitted = 0;
    while let Some(first) = crowd.first() {
        while limiter.check(&1).is_ok() {
            admitted += 1;
        }
        crowd.cancel(first);
    }
    assert_eq!(admitted, 10, "at one instant from a bucket of 10");
}

/// Or the next to come would have the same turn as the last who waits.
#[test]
fn whoever_waits_moves_up_when_one_before_it_turns_out_to_be_free() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = Crowd::new(&clock);
    for _ in 0..3 {
        crowd.enter(limiter.ready(&1));
    }
    let (_, decision) = crowd.run().remove(0);
    limiter.refund(&1, &decision.unwrap()).unwrap();
    let last = crowd.enter(limiter.ready(&1));
    let turns = [(1, 0), (2, 200), (last, 400)].map(|(n, turn)| (n, ms(turn)));
    assert_eq!(crowd.run_until(ms(400), ms(200)), turns);
}

proptest! {
    #![proptest_config(inputs(250))]

    /// Against a line on paper: a list of those who wait, each a slot behind the one before.
    #[test]
    fn turns_are_kept_whoever_comes_and_gives_up(
        events in vec((0_u32..4, 0_usize..8, 1_u32..4), 1..60),
    ) {
        let clock = ManualClock::at(T0);
        let limiter = limiter(&clock, [five_per_second()]);
        let mut crowd = Crowd::new(&clock);
        // Who waits, in order; and when the next slot is.
        let mut line: Vec<usize> = Vec::new();
        let mut next_slot = Duration::ZERO;
        let mut time = Duration::ZERO;
        for (event, index, slots) in events {
            match event {
                0 | 1 => {
                    let number = crowd.enter(limiter.ready(&1));
                    let done: Vec<_> = crowd.run().into_iter().map(|(number, _)| number).collect();
                    if line.is_empty() && next_slot <= time {
                        prop_assert_eq!(done, [number]);
                        next_slot = time + ms(200);
                    } else {
                        prop_assert!(done.is_empty());
                        line.push(number);
                    }
                }
                2 if !line.is_empty() => {
                    crowd.cancel(line.remove(index % line.len()));
                    prop_assert!(crowd.run().is_empty());
                }
                _ => {
                    // Halves of slots, so that some come between two turns.
                    for _ in 0..slots {
                        time += ms(100);
                        clock.set(T0 + time - us(1));
                        prop_assert!(crowd.run().is_empty());
                        clock.set(T0 + time);
                        let done: Vec<_> =
                            crowd.run().into_iter().map(|(number, _)| number).collect();
                        if !line.is_empty() && next_slot <= time {
                            prop_assert_eq!(done, [line.remove(0)]);
                            next_slot += ms(200);
                        } else {
                            prop_assert!(done.is_empty());
                        }
                    }
                }
            }
        }
    }
}

// === through the layer ===

/// Who called a service, and when.
type Notes = Arc<Mutex<Vec<(String, Duration)>>>;

/// A service that notes who calls it.
fn noting(
    clock: &ManualClock,
    notes: &Notes,
) -> impl Service<Request<()>, Response = Response<Empty<Bytes>>, Error = Infallible> + Clone {
    let (clock, notes) = (clock.clone(), notes.clone());
    service_fn(move |request: Request<()>| {
        let caller = request.headers()["x-caller"].to_str().unwrap().to_owned();
        notes.lock().unwrap().push((caller, clock.now() - T0));
        std::future::ready(Ok(Response::new(Empty::new())))
    })
}

#[test]
fn the_inner_service_is_called_when_it_is_the_requests_turn() {
    let clock = ManualClock::at(T0);
    let layer =
        RateLimitLayer::builder().clock(&clock).key(Global).policy(five_per_second()).build();
    let notes = Notes::default();
    let mut service = layer.unwrap().layer(noting(&clock, &notes));
    let mut crowd = Crowd::new(&clock);
    for caller in ["a", "b", "c", "d"] {
        crowd.enter(service.call(with("x-caller", caller)));
    }
    assert_eq!(crowd.run().len(), 1);
    crowd.cancel(1);
    crowd.run_until(secs(1), ms(200));
    let expected = [("a", 0), ("c", 200), ("d", 400)].map(|(n, time)| (n.to_owned(), ms(time)));
    assert_eq!(*notes.lock().unwrap(), expected);
}

#[test]
fn a_request_that_cannot_wait_that_long_is_answered_at_once() {
    let clock = ManualClock::at(T0);
    let policy = Policy::leaky_bucket("p", Quota::per_second(1)).max_delay(secs(2));
    let layer = RateLimitLayer::builder().clock(&clock).key(Global).policy(policy).build().unwrap();
    let notes = Notes::default();
    let mut service = layer.layer(noting(&clock, &notes));
    let mut crowd = Crowd::new(&clock);
    for caller in ["a", "b", "c"] {
        crowd.enter(service.call(with("x-caller", caller)));
    }
    assert_eq!(crowd.run().len(), 1);
    let response = now(service.call(with("x-caller", "d"))).unwrap();
    assert_eq!(response.status(), 429);
    assert_eq!(response.retry_after(), Some(1));
    assert_eq!(response.text("ratelimit"), Some(r#""p";r=0;t=1"#));
    assert_eq!(response.text("ratelimit-policy"), Some(r#""p";q=3;w=3"#));
    crowd.run_until(secs(2), secs(1));
    assert_eq!(notes.lock().unwrap().len(), 3);
}

#[test]
fn a_response_after_a_wait_carries_the_fields_of_its_one_decision() {
    let clock = ManualClock::at(T0);
    let layer =
        RateLimitLayer::builder().clock(&clock).key(Global).policy(five_per_second()).build();
    let mut service = layer.unwrap().layer(service_fn(support::ok::<()>));
    let mut crowd = Crowd::new(&clock);
    for _ in 0..3 {
        crowd.enter(service.call(get()));
    }
    crowd.run();
    clock.advance(secs(1));
    for (number, response) in crowd.run() {
        let response = response.unwrap();
        let support::Seen(decision) = response.extensions().get().unwrap();
        let decision = decision.as_ref().unwrap();
        assert_eq!(decision.time(), T0);
        assert_eq!(decision.delay(), number as u32 * ms(200));
        let field = format!("\"p\";r={};t=1", 100 - number);
        assert_eq!(response.text("ratelimit"), Some(field.as_str()));
    }
}

#[test]
fn other_services_wait_in_the_same_way() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let worker = service_fn(|job: u64| std::future::ready(Ok::<_, Infallible>(job)));
    let mut service: RateLimit<_, Calls<u64>> = RateLimitLayer::calls(limiter).layer(worker);
    let mut crowd = Crowd::new(&clock);
    for job in 0..5 {
        crowd.enter(service.call(job));
    }
    assert!(matches!(crowd.run()[..], [(0, Ok(0))]));
    crowd.cancel(2);
    let turns = crowd.run_until(secs(1), ms(200));
    assert_eq!(turns, [(1, ms(200)), (3, ms(400)), (4, ms(600))]);
    for job in 0..101 {
        crowd.enter(service.call(job));
    }
    assert_eq!(crowd.run().len(), 1);
    assert!(matches!(now(service.call(7)), Err(CallError::Rejected(_))));
}

#[test]
fn an_interceptor_refuses_to_hold_anybody_back() {
    let build = |policy: Policy| RateLimitLayer::builder().key(Global).policy(policy).build();
    let error = build(five_per_second()).unwrap().interceptor().unwrap_err();
    assert_eq!(error, BuildError::CannotWait { policy: "p".to_owned() });
    let police = Policy::leaky_bucket("p", Quota::per_second(5)).max_delay(Duration::ZERO);
    assert!(build(police).unwrap().interceptor().is_ok());
}

// === clocks ===

/// On tokio's own timer, and a clock that is set back while requests wait.
#[tokio::test(start_paused = true)]
async fn nobody_waits_for_years_when_the_clock_is_set_back() {
    let start = tokio::time::Instant::now();
    let ahead_us = Arc::new(AtomicU64::new(YEAR.as_micros() as u64));
    let ahead = ahead_us.clone();
    let limiter = Limiter::<u64>::builder()
        .clock(Clock::from_fn(move || T0 + start.elapsed() + us(ahead.load(SeqCst))))
        .key(Global)
        .policy(five_per_second())
        .build()
        .unwrap();
    assert!(limiter.ready(&1).await.is_ok());
    let waiting = {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.ready(&1).await.map(drop) })
    };
    tokio::task::yield_now().await;
    ahead_us.store(0, SeqCst);
    // Twice the maximum delay.
    tokio::time::sleep(secs(40)).await;
    assert!(waiting.is_finished(), "it still waits");
}

#[test]
fn a_small_step_back_of_the_clock_moves_nobodys_turn() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = queue(&clock, &limiter, 4);
    clock.set(T0 + ms(300));
    assert_eq!(crowd.run().len(), 1);
    clock.set(T0 + ms(100));
    let late = crowd.enter(limiter.ready(&1));
    let turns = crowd.run_until(ms(800), ms(200));
    assert_eq!(turns, [(2, ms(400)), (3, ms(600)), (late, ms(800))]);
}

#[test]
fn a_leap_of_the_clock_lets_everybody_go_whose_turn_has_come() {
    let clock = ManualClock::at(T0);
    let limiter = limiter(&clock, [five_per_second()]);
    let mut crowd = queue(&clock, &limiter, 50);
    clock.advance(secs(5));
    assert_eq!(crowd.run().len(), 25);
    clock.advance(YEAR);
    assert_eq!(crowd.run().len(), 24);
    assert!(limiter.check(&1).is_ok_and(|decision| decision.delay() == Duration::ZERO));
}

// === a runtime of many threads ===

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn no_wake_up_is_lost_and_nothing_leaks_under_stress() {
    const REQUESTS: u64 = 2_000;

    let limiter = Limiter::<u64>::builder()
        .policy(
            Policy::leaky_bucket("everybody", Quota::per_second(20_000).burst(1))
                .max_delay(secs(5))
                .key(Global),
        )
        .policy(
            Policy::leaky_bucket("each", Quota::per_second(2_000).burst(1))
                .max_delay(secs(5))
                .key(|n: &u64| *n % 16),
        )
        .policy(Policy::fixed_window("month", Quota::per_calendar_month(1_000_000)).key(Global))
        .build()
        .unwrap();
    let requests: Vec<_> = (0..REQUESTS)
        .map(|n| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                let ready = limiter.ready(&n);
                if n % 3 == 0 {
                    // Some give up, at any moment.
                    let patience = us(n * 7_919 % 60_000);
                    tokio::time::timeout(patience, ready).await.is_ok_and(|ready| ready.is_ok())
                } else {
                    ready.await.unwrap();
                    true
                }
            })
        })
        .collect();
    let mut admitted = 0;
    let all = async {
        for request in requests {
            admitted += u64::from(request.await.unwrap());
        }
    };
    tokio::time::timeout(secs(30), all).await.expect("somebody waits for ever");
    assert!(admitted >= REQUESTS - REQUESTS.div_ceil(3));

    // All who gave up got everything back, unless it was their turn already.
    let used = || {
        let peeked = limiter.peek(&0).unwrap();
        1_000_000 - peeked.outcomes()[2].remaining()
    };
    assert!(used() >= admitted, "{} used, {admitted} admitted", used());
    assert!(used() <= REQUESTS);
    let decision = tokio::time::timeout(secs(30), limiter.ready(&0)).await.unwrap().unwrap();
    assert!(decision.delay() <= secs(1));
}

/// Of two layers each has its own lines; of two clones both have the same.
#[test]
fn clones_wait_in_one_line() {
    let clock = ManualClock::at(T0);
    let one = limiter(&clock, [five_per_second()]);
    let (same, other) = (one.clone(), limiter(&clock, [five_per_second()]));
    let mut crowd = Crowd::new(&clock);
    for limiter in [&one, &same, &one, &other] {
        crowd.enter(limiter.ready(&1));
    }
    let turns = crowd.run_until(ms(400), ms(200));
    assert_eq!(turns, [(0, 0), (3, 0), (1, 200), (2, 400)].map(|(n, turn)| (n, ms(turn))));
}

/// Conditions and missing keys leave a request out of the line.
#[test]
fn a_request_that_the_policy_does_not_apply_to_does_not_wait() {
    let clock = ManualClock::at(T0);
    let layer = RateLimitLayer::builder()
        .clock(&clock)
        .policy(
            five_per_second()
                .key(Header::from_static("x-user"))
                .missing_key(tollgate::key::MissingKey::Skip)
                .when(|parts: &Parts| !parts.headers.contains_key("x-free")),
        )
        .build()
        .unwrap();
    let ready = |request: Request<()>| {
        let parts = request.into_parts().0;
        now(layer.limiter().ready(&parts)).unwrap().outcomes().len()
    };
    assert_eq!(ready(with("x-user", "a")), 1);
    assert_eq!(ready(get()), 0);
    assert_eq!(ready(get()), 0);
    let mut free = with("x-user", "a");
    free.headers_mut().insert("x-free", "".parse().unwrap());
    assert_eq!(ready(free), 0);
}
