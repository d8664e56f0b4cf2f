//! Load shedders: what matters least goes first, what is critical stays, and a fleet is a whole.

mod support;

use parking_lot::Mutex;
use std::{
    future::ready,
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, UNIX_EPOCH},
};
use support::{
    fleet::{lifetimes, names, patient, until},
    ms,
    process::{Process, serve, variable},
    secs,
    server::{Flavour, Server},
};
use tokio::{runtime, task::yield_now, time::sleep};
use tollgate::{
    ManualClock, Priority,
    shed::{Aboard, FleetShedder, FleetShedderBuilder, Shedder, Utilization, WorkerShedder},
};

const ALL: [Priority; 4] =
    [Priority::BestEffort, Priority::Read, Priority::Write, Priority::Critical];

// === worker utilization ===

/// A shedder that is as busy as it is told to be, in percent.
struct Worker {
    clock: ManualClock,
    percent: Arc<AtomicU64>,
    shedder: WorkerShedder,
}

impl Worker {
    fn new() -> Self {
        let (clock, percent) = (ManualClock::new(), Arc::<AtomicU64>::default());
        let told = percent.clone();
        let shedder = WorkerShedder::builder("workers")
            .utilization(Utilization::from_fn(move || told.load(Relaxed) as f64 / 100.0))
            .clock(&clock)
            .build()
            .unwrap();
        Self { clock, percent, shedder }
    }

    /// So busy for so long.
    fn busy(&self, percent: u64, secs: u64) -> &WorkerShedder {
        self.percent.store(percent, Relaxed);
        for _ in 0..secs {
            self.clock.advance(Duration::from_secs(1));
            self.shedder.sample();
        }
        &self.shedder
    }

    fn shares(&self) -> [f64; 4] {
        ALL.map(|priority| self.shedder.admitted_share(priority))
    }
}

/// How many of so many requests are let in, one after the other.
fn admitted(shedder: &WorkerShedder, priority: Priority, count: u32) -> usize {
    (0..count).filter(|_| shedder.admit(priority).is_ok()).count()
}

#[test]
fn at_full_load_classes_go_one_after_the_other_and_critical_requests_never() {
    let worker = Worker::new();
    assert_eq!(worker.shares(), [1.0; 4]);
    assert_eq!(worker.busy(100, 28).level(), 0.0);
    assert_eq!(worker.shares(), [1.0; 4]);
    worker.busy(100, 60);
    assert_eq!(worker.shares(), [0.0, 0.5, 1.0, 1.0]);
    assert_eq!(worker.busy(100, 60).level(), 1.0);
    assert_eq!(worker.shares(), [0.0, 0.0, 0.0, 1.0]);
    worker.busy(100, 10_000);
    for priority in [Priority::new(0), Priority::BestEffort, Priority::Read, Priority::Write] {
        assert_eq!(admitted(&worker.shedder, priority, 1_000), 0);
    }
    assert_eq!(admitted(&worker.shedder, Priority::Critical, 1_000), 1_000);
}

#[test]
fn requests_come_back_in_the_other_order() {
    let worker = Worker::new();
    worker.busy(100, 148);
    worker.busy(35, 120);
    assert_eq!(worker.shares(), [0.0, 0.5, 1.0, 1.0]);
    assert_eq!(worker.busy(35, 120).level(), 0.0);
    assert_eq!(worker.shares(), [1.0; 4]);
    // In between, nothing moves.
    assert_eq!(worker.busy(75, 1_000).level(), 0.0);
    assert_eq!(worker.busy(35, 1_000).level(), -28.0 / 120.0);
}

#[test]
fn a_class_that_is_partly_shed_is_shed_at_random() {
    let worker = Worker::new();
    worker.busy(100, 28 + 60);
    let count = 10_000;
    let half = admitted(&worker.shedder, Priority::Read, count) as f64;
    // Six standard deviations.
    assert!((half - 5_000.0).abs() < 300.0, "{half}");
    assert_eq!(admitted(&worker.shedder, Priority::Write, count), 10_000);
}

#[test]
fn a_request_belongs_to_the_first_class_that_is_as_important() {
    let worker = Worker::new();
    worker.busy(100, 28 + 80);
    // Reads and less are gone.
    let share = |level| worker.shedder.admitted_share(Priority::new(level));
    assert_eq!([0, 64, 65, 128].map(share), [0.0; 4]);
    assert_eq!([129, 192, 193, 254, 255].map(share), [1.0; 5]);
    worker.busy(100, 40);
    assert_eq!([129, 192].map(share), [0.0; 2]);
    assert_eq!([193, 254, 255].map(share), [1.0; 3]);
}

#[test]
fn classes_of_ones_own_are_sorted() {
    let clock = ManualClock::new();
    let batch = Priority::new(10);
    let shedder = WorkerShedder::builder("workers")
        .utilization(Utilization::from_fn(|| 1.0))
        .classes([Priority::BestEffort, batch, Priority::BestEffort])
        .longest_step(secs(100))
        .clock(&clock)
        .build()
        .unwrap();
    clock.advance(secs(28 + 60));
    shedder.sample();
    let shares = [batch, Priority::BestEffort, Priority::Read].map(|p| shedder.admitted_share(p));
    assert_eq!(shares, [0.0, 1.0, 1.0]);
}

#[test]
fn requests_in_flight_are_a_measure_of_utilization() {
    let clock = ManualClock::new();
    let shedder = WorkerShedder::builder("workers")
        .utilization(Utilization::in_flight(10))
        .clock(&clock)
        .build()
        .unwrap();
    let seats: Vec<_> = (0..9).map(|_| shedder.admit(Priority::Write).unwrap()).collect();
    for _ in 0..56 {
        clock.advance(secs(1));
        shedder.sample();
    }
    assert_eq!((shedder.in_flight(), shedder.utilization(), shedder.level()), (9, Some(0.9), 0.0));
    drop(seats);
    clock.advance(secs(28));
    shedder.sample();
    assert_eq!((shedder.in_flight(), shedder.utilization()), (0, Some(0.0)));
    assert_eq!(shedder.level(), -28.0 / 120.0);
}

#[test]
fn when_nobody_knows_how_busy_it_is_shedding_stays_as_it_is() {
    let (clock, next) = (ManualClock::new(), Arc::new(Mutex::new(Some(1.0))));
    let told = next.clone();
    let shedder = WorkerShedder::builder("workers")
        .utilization(Utilization::from_fn(move || (*told.lock()).expect("on purpose")))
        .longest_step(secs(1_000))
        .clock(&clock)
        .build()
        .unwrap();
    assert_eq!(shedder.utilization(), None);
    clock.advance(secs(88));
    shedder.sample();
    for nothing in [None, Some(f64::NAN)] {
        *next.lock() = nothing;
        clock.advance(secs(50));
        shedder.sample();
        assert_eq!((shedder.level(), shedder.utilization()), (0.5, Some(1.0)));
    }
    // The time in which nobody knew does not count.
    *next.lock() = Some(0.0);
    clock.advance(secs(6));
    shedder.sample();
    assert_eq!((shedder.level(), shedder.utilization()), (0.45, Some(0.0)));
}

#[tokio::test(start_paused = true)]
async fn samples_are_taken_by_tokios_time() {
    let shedder = always_busy();
    assert!(shedder.admit(Priority::BestEffort).is_ok());
    sleep(ms(28_500)).await;
    assert_eq!(shedder.level(), 0.0);
    sleep(secs(60)).await;
    assert_eq!(shedder.level(), 0.5);
    assert!(shedder.admit(Priority::BestEffort).is_err());
}

fn always_busy() -> WorkerShedder {
    WorkerShedder::builder("workers").utilization(Utilization::from_fn(|| 1.0)).build().unwrap()
}

#[tokio::test]
async fn samples_are_taken_when_a_manual_clock_is_moved() {
    let worker = Worker::new();
    worker.percent.store(100, Relaxed);
    assert!(worker.shedder.admit(Priority::Read).is_ok());
    until("all is shed", async || {
        worker.clock.advance(secs(1));
        worker.shedder.level() == 1.0
    })
    .await;
    assert!(worker.shedder.admit(Priority::Write).is_err());
}

#[test]
fn sampling_goes_on_in_another_runtime_and_ends_with_the_last_handle() {
    let paused = || {
        let mut builder = runtime::Builder::new_current_thread();
        builder.enable_time().start_paused(true).build().unwrap()
    };
    let shedder = always_busy();
    // Without a runtime, there is nobody to take samples.
    assert!(shedder.admit(Priority::Read).is_ok());
    for level in [-18.0 / 120.0, -8.0 / 120.0] {
        paused().block_on(async {
            assert!(shedder.admit(Priority::Read).is_ok());
            sleep(ms(10_500)).await;
        });
        assert_eq!(shedder.level(), level);
    }
    let runtime = paused();
    runtime.block_on(async {
        assert!(shedder.admit(Priority::Read).is_ok());
        yield_now().await;
        let clone = shedder.clone();
        drop(shedder);
        yield_now().await;
        assert_eq!(runtime.metrics().num_alive_tasks(), 1);
        drop(clone);
        yield_now().await;
        assert_eq!(runtime.metrics().num_alive_tasks(), 0);
    });
}

#[test]
fn a_runtime_without_a_timer_takes_no_samples_and_no_harm() {
    let runtime = runtime::Builder::new_current_thread().build().unwrap();
    let shedder = always_busy();
    runtime.block_on(async {
        for _ in 0..3 {
            assert!(shedder.admit(Priority::Read).is_ok());
            yield_now().await;
        }
    });
    assert_eq!(shedder.utilization(), None);
}

#[test]
fn settings_that_cannot_be_are_named() {
    let worker = || WorkerShedder::builder("workers");
    let mut messages = vec![
        WorkerShedder::builder("no name").build().unwrap_err().to_string(),
        worker().recover_below(0.9).build().unwrap_err().to_string(),
        worker().shed_above(1.0).build().unwrap_err().to_string(),
        worker().grace(secs(100_000)).build().unwrap_err().to_string(),
        worker().full_after(secs(0)).build().unwrap_err().to_string(),
        worker().longest_step(secs(0)).build().unwrap_err().to_string(),
        worker().sample_every(secs(0)).build().unwrap_err().to_string(),
        worker().classes([]).build().unwrap_err().to_string(),
        worker().classes([Priority::Read, Priority::Critical]).build().unwrap_err().to_string(),
        worker().retry_after(secs(0)..=secs(1)).build().unwrap_err().to_string(),
        worker().retry_after(secs(2)..=secs(1)).build().unwrap_err().to_string(),
        worker().utilization(Utilization::in_flight(0)).build().unwrap_err().to_string(),
    ];
    let fleet = || FleetShedder::builder("fleet", 10);
    messages.extend([
        FleetShedder::builder("", 10).build().unwrap_err().to_string(),
        FleetShedder::builder("fleet", 0).build().unwrap_err().to_string(),
        fleet().reserve(1.0).build().unwrap_err().to_string(),
        fleet().reserve(f64::NAN).build().unwrap_err().to_string(),
        fleet().retry_after(secs(0)..=secs(0)).build().unwrap_err().to_string(),
        fleet().tick(ms(1)).build().unwrap_err().to_string(),
        fleet().lease(ms(300)).build().unwrap_err().to_string(),
        fleet().instances(0).build().unwrap_err().to_string(),
    ]);
    let expected = [
        "`no name`",
        "`recover_below`",
        "`shed_above`",
        "`grace`",
        "`full_after`",
        "`longest_step`",
        "`sample_every`",
        "class",
        "class",
        "`retry_after`",
        "`retry_after`",
        "`capacity`",
        "``",
        "`capacity`",
        "`reserve`",
        "`reserve`",
        "`retry_after`",
        "`tick`",
        "`lease`",
        "`instances`",
    ];
    assert_eq!(messages.len(), expected.len());
    for (message, expected) in messages.iter().zip(expected) {
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn shedders_are_threaded_through_services() {
    fn is_shared<T: Clone + Send + Sync + 'static>() {}
    fn travels<T: Send + Sync + 'static>() {}
    is_shared::<WorkerShedder>();
    is_shared::<FleetShedder>();
    is_shared::<Shedder>();
    travels::<Aboard>();
}

// === fleet usage, in one process ===

fn of_ten() -> FleetShedder {
    FleetShedder::builder("fleet", 10).reserve(0.3).cap_critical(true).build().unwrap()
}

fn fill(shedder: &FleetShedder, priority: Priority, count: usize) -> Vec<Aboard> {
    (0..count).map_while(|_| shedder.admit(priority).ok()).collect()
}

#[test]
fn a_part_is_kept_for_critical_requests() {
    let shedder = of_ten();
    let reads = fill(&shedder, Priority::Read, 100);
    assert_eq!(reads.len(), 7);
    let shed = shedder.admit(Priority::Write).unwrap_err();
    assert_eq!(shed.shedder(), "fleet");
    assert!((secs(1)..=secs(3)).contains(&shed.retry_after()));
    let critical = fill(&shedder, Priority::Critical, 100);
    assert_eq!(critical.len(), 3);
    drop(reads);
    assert_eq!(shedder.in_flight(), 3);
    drop(critical);
    assert_eq!(shedder.in_flight(), 0);
    assert_eq!((shedder.instances(), shedder.is_alone()), (1, false));
}

#[test]
fn critical_requests_are_always_let_in_unless_they_are_capped() {
    let shedder = FleetShedder::builder("fleet", 10).build().unwrap();
    let critical = fill(&shedder, Priority::Critical, 50);
    assert_eq!(critical.len(), 50);
    assert!(shedder.admit(Priority::Write).is_err());
}

#[test]
fn what_is_critical_can_be_said() {
    let shedder = FleetShedder::builder("fleet", 2).critical_from(Priority::Write).build().unwrap();
    let seats = fill(&shedder, Priority::Read, 10);
    assert_eq!(seats.len(), 1);
    assert_eq!(fill(&shedder, Priority::Write, 10).len(), 10);
}

/// BR-50: callers of several classes at the same moment don't get past the cap together.
#[test]
fn parallel_callers_of_several_classes_stay_within_the_cap() {
    for _ in 0..200 {
        let shedder = of_ten();
        let _others = fill(&shedder, Priority::Read, 6);
        let _critical = fill(&shedder, Priority::Critical, 3);
        assert_eq!(shedder.in_flight(), 9);
        let barrier = Barrier::new(3);
        let seats: Vec<_> = thread::scope(|scope| {
            let call = |priority| {
                let (shedder, barrier) = (&shedder, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    shedder.admit(priority).ok()
                })
            };
            let calls = [Priority::Critical, Priority::Write, Priority::BestEffort].map(call);
            calls.into_iter().filter_map(|call| call.join().unwrap()).collect()
        });
        assert_eq!((seats.len(), shedder.in_flight()), (1, 10));
        assert_eq!(shedder.turned_away(), 2);
    }
}

/// BR-50, with 10k calls for each of the 64 threads where the case has 100k: that takes seconds without
/// optimization. `TOLLGATE_STRESS=10` makes it ten times as many.
#[test]
fn under_stress_the_cap_holds_and_nothing_is_left() {
    let times = std::env::var("TOLLGATE_STRESS").map_or(1, |times| times.parse().unwrap());
    let shedder = of_ten();
    let (in_flight, most) = (AtomicU64::new(0), AtomicU64::new(0));
    let admitted = AtomicU64::new(0);
    thread::scope(|scope| {
        for number in 0..64 {
            let (shedder, in_flight, most, admitted) = (&shedder, &in_flight, &most, &admitted);
            scope.spawn(move || {
                let mut held = Vec::new();
                for call in 0..10_000 * times {
                    if let Ok(seat) = shedder.admit(ALL[(number + call) % 4]) {
                        most.fetch_max(in_flight.fetch_add(1, Relaxed) + 1, Relaxed);
                        admitted.fetch_add(1, Relaxed);
                        held.push(seat);
                    }
                    // Whoever holds something holds it for a while, so that the cap is reached.
                    if call % 8 == 0 {
                        in_flight.fetch_sub(held.len() as u64, Relaxed);
                        held.clear();
                    }
                }
                in_flight.fetch_sub(held.len() as u64, Relaxed);
            });
        }
    });
    assert_eq!(most.into_inner(), 10);
    assert_eq!((in_flight.into_inner(), shedder.in_flight()), (0, 0));
    assert!(admitted.into_inner() > 10);
    // All of it is free again.
    assert_eq!(fill(&shedder, Priority::Read, 100).len(), 7);
}

// === fleet usage, in Redis ===

const TICK: Duration = ms(100);
/// So long that it does not run out while a test waits for a busy machine.
const LONG_LEASE: Duration = secs(600);

struct Redis {
    clock: ManualClock,
    server: Server,
}

impl Redis {
    fn start(flavour: Flavour) -> Self {
        Self { clock: ManualClock::at(support::T0), server: Server::start(flavour) }
    }

    /// An instance of a fleet of 100, of which 80 can be in flight that are not critical.
    fn instance(&self) -> FleetShedderBuilder {
        let store = patient(&self.server).namespace("shed").clock(&self.clock).build().unwrap();
        let builder = FleetShedder::builder("fleet", 100).cap_critical(true).clock(&self.clock);
        builder.store(store).tick(TICK).lease(LONG_LEASE)
    }

    /// Lets time pass until something is true.
    async fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        until(what, || {
            self.clock.advance(TICK);
            ready(condition())
        })
        .await;
    }
}

#[tokio::test]
async fn instances_hear_of_each_other() {
    for flavour in Flavour::ALL {
        let redis = Redis::start(flavour);
        let [a, b, c] = [(); 3].map(|()| redis.instance().build().unwrap());
        let of_a = fill(&a, Priority::Read, 30);
        let of_b = fill(&b, Priority::Critical, 10);
        redis
            .until("c knows", || {
                let _ = c.admit(Priority::Read);
                (c.in_flight(), c.instances()) == (40, 3)
            })
            .await;
        // It knows of its own without any news.
        let of_c = fill(&c, Priority::Read, 100);
        assert_eq!(of_c.len(), 50, "{flavour:?}");
        redis.until("a and b know", || [&a, &b].map(FleetShedder::in_flight) == [90, 90]).await;
        assert!(a.admit(Priority::Read).is_err() && b.admit(Priority::Write).is_err());
        assert_eq!(fill(&b, Priority::Critical, 100).len(), 10);
        drop((of_a, of_c));
        redis.until("b knows", || b.in_flight() == 10).await;
        assert_eq!(fill(&b, Priority::Read, 100).len(), 80);
        drop(of_b);
        assert_eq!(names(&redis.server), ["tg:shed:{fleet:fleet}"]);
        let lifetime = lifetimes(&redis.server)["tg:shed:{fleet:fleet}"];
        assert!(lifetime > 0, "{lifetime}");
    }
}

#[tokio::test]
async fn who_goes_takes_itself_out() {
    let redis = Redis::start(Flavour::Redis7);
    let [a, b] = [(); 2].map(|()| redis.instance().build().unwrap());
    let seats = fill(&a, Priority::Read, 80);
    let b_seat = b.admit(Priority::Critical).unwrap();
    redis.until("b knows", || (b.in_flight(), b.instances()) == (81, 2)).await;
    drop(a);
    // Requests in flight are what is left of it.
    assert!(b.admit(Priority::Read).is_err());
    drop(seats);
    redis.until("b knows", || (b.in_flight(), b.instances()) == (1, 1)).await;
    drop((b_seat, b));
    redis.until("nobody is there", || names(&redis.server).is_empty()).await;
}

#[test]
fn who_dies_is_out_after_a_lease() {
    let redis = Redis::start(Flavour::Redis7);
    let (a, b) = (redis.instance().build().unwrap(), redis.instance().build().unwrap());
    let runtime = || runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (runtime_of_a, runtime_of_b) = (runtime(), runtime());
    let start = redis.clock.now();
    // Nothing moves the clock, so this is told at the start, and not again.
    let _seats = runtime_of_a.block_on(async {
        let seats = fill(&a, Priority::Read, 10);
        until("a has told", async || a.instances() == 1 && !a.is_alone()).await;
        seats
    });
    drop(runtime_of_a);
    runtime_of_b.block_on(async {
        let _seat = b.admit(Priority::Read).unwrap();
        until("b knows", async || b.in_flight() == 11).await;
        redis.clock.set(start + LONG_LEASE - ms(1));
        // Somebody new hears of both.
        let c = redis.instance().build().unwrap();
        assert!(c.admit(Priority::Read).is_ok());
        until("c knows", async || (c.in_flight(), c.instances()) == (11, 3)).await;
        redis.clock.advance(ms(1));
        redis.until("a is gone", || (c.in_flight(), c.instances()) == (1, 2)).await;
    });
}

#[tokio::test]
async fn without_redis_each_has_its_share() {
    let mut redis = Redis::start(Flavour::Redis7);
    let [a, b] = [(); 2].map(|()| redis.instance().build().unwrap());
    let seats = fill(&a, Priority::Read, 60);
    let _ = b.admit(Priority::Read);
    redis
        .until("they know", || {
            (b.in_flight(), a.instances(), b.instances()) == (60, 2, 2) && !a.is_alone()
        })
        .await;
    redis.server.kill();
    // What they knew counts for a lease.
    assert_eq!(fill(&b, Priority::Read, 100).len(), 20);
    redis.clock.advance(LONG_LEASE);
    assert!(a.is_alone() && b.is_alone());
    assert_eq!((a.in_flight(), b.in_flight()), (60, 0));
    assert!(a.admit(Priority::Read).is_err());
    assert_eq!(fill(&b, Priority::Read, 100).len(), 40);
    assert_eq!(fill(&b, Priority::Critical, 100).len(), 50);
    redis.server.restart();
    redis
        .until("they know again", || {
            (a.in_flight(), b.in_flight()) == (60, 60) && !a.is_alone() && !b.is_alone()
        })
        .await;
    assert_eq!(fill(&b, Priority::Read, 100).len(), 20);
    drop(seats);
}

#[tokio::test]
async fn as_long_as_nobody_was_heard_of_the_share_is_as_told() {
    let redis = Redis::start(Flavour::Redis7);
    redis.server.pause();
    let shedder = redis.instance().instances(4).build().unwrap();
    assert!(shedder.is_alone());
    // Of 25, 5 are kept.
    let seats = fill(&shedder, Priority::Read, 100);
    assert_eq!((seats.len(), shedder.instances()), (20, 4));
    let tiny = FleetShedder::builder("tiny", 3).instances(4);
    let store = patient(&redis.server).build().unwrap();
    let tiny = tiny.store(store).build().unwrap();
    assert_eq!(fill(&tiny, Priority::Read, 100).len(), 1);
    redis.server.resume();
    redis.until("it is heard", || !shedder.is_alone() && shedder.instances() == 1).await;
    assert_eq!(fill(&shedder, Priority::Read, 100).len(), 60);
}

#[tokio::test]
async fn a_user_with_no_more_rights_than_documented_will_do() {
    let redis = Redis::start(Flavour::Redis7);
    let rights = [
        "ACL",
        "SETUSER",
        "api",
        "on",
        ">secret",
        "~tg:shed:*",
        "-@all",
        "+evalsha",
        "+eval",
        "+time",
        "+pexpire",
        "+hset",
        "+hdel",
        "+hgetall",
    ];
    redis.server.command(&rights);
    let url = format!("redis://api:secret@127.0.0.1:{}", redis.server.port());
    // By the server's clock, which takes a right.
    let store = tollgate::redis::RedisStore::builder(url).namespace("shed").deadline(secs(20));
    let shedder =
        FleetShedder::builder("fleet", 100).store(store.build().unwrap()).build().unwrap();
    let seat = shedder.admit(Priority::Read).unwrap();
    until("it is heard", async || !shedder.is_alone()).await;
    let lifetime = lifetimes(&redis.server)["tg:shed:{fleet:fleet}"];
    assert!((0..=3_000).contains(&lifetime), "{lifetime}");
    drop((seat, shedder));
    until("it takes itself out", async || names(&redis.server).is_empty()).await;
}

// === fleet usage, in many processes ===

const CAPACITY: usize = 1_500;
/// Four fifths.
const FOR_OTHERS: usize = 1_200;
const DEADLINE: Duration = secs(1);
const LEASE: Duration = secs(4);

/// What a process does that is an instance of a fleet.
#[test]
fn instance() {
    serve("instance", || {
        let mut runtime = runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let url = variable("TOLLGATE_TEST_URL");
        let store = tollgate::redis::RedisStore::builder(url).deadline(DEADLINE).build().unwrap();
        let shedder = FleetShedder::builder("fleet", CAPACITY as u32);
        let shedder = shedder.store(store).tick(TICK).lease(LEASE).build().unwrap();
        let mut seats = Vec::new();
        move |line| {
            let _runtime = runtime.enter();
            match line {
                // One every now and then, until there is no room for a long time. When they came, in
                // microseconds.
                "fill" => {
                    let (mut times, mut refusals) = (Vec::new(), 0);
                    while refusals < 200 {
                        match shedder.admit(Priority::Read) {
                            Ok(seat) => {
                                let time = UNIX_EPOCH.elapsed().unwrap().as_micros();
                                times.push(time.to_string());
                                seats.push(seat);
                                refusals = 0;
                            }
                            Err(_) => refusals += 1,
                        }
                        thread::sleep(ms(10));
                    }
                    times.join(" ")
                }
                "top up" => {
                    let before = seats.len();
                    seats.extend(fill(&shedder, Priority::Read, 10_000));
                    (seats.len() - before).to_string()
                }
                "own" => shedder.own_in_flight().to_string(),
                "look" => format!("{} of {}", shedder.in_flight(), shedder.instances()),
                other => panic!("what is {other}?"),
            }
        }
    });
}

/// Asks until this is what a process sees.
fn until_seen(process: &mut Process, expected: &str) {
    let mut seen = String::new();
    for _ in 0..2_000 {
        seen = process.ask("look");
        if seen == expected {
            return;
        }
        thread::sleep(ms(10));
    }
    panic!("{seen} is not {expected}");
}

#[test]
fn processes_stay_within_the_stated_bound_and_take_over_from_the_dead() {
    let server = Server::start(Flavour::Redis7);
    let url = server.url();
    let start = || Process::start("instance", &[("TOLLGATE_TEST_URL", &url)]);
    let mut processes = [(); 4].map(|()| start());

    // All begin at the same time, and know nothing of each other.
    processes.iter_mut().for_each(|process| process.tell("fill"));
    let mut arrivals = Vec::new();
    for (number, process) in processes.iter_mut().enumerate() {
        let answer = process.answer();
        arrivals.extend(answer.split(' ').map(|time| (time.parse::<u64>().unwrap(), number)));
    }
    arrivals.sort_unstable();
    // Nobody is turned away for no reason.
    assert!(arrivals.len() >= FOR_OTHERS, "{}", arrivals.len());
    // Two ticks and the time of two calls, and half a second for a busy machine.
    let stale_us = (2 * (TICK + DEADLINE) + ms(500)).as_micros() as u64;
    for (index, &(time, own)) in arrivals.iter().enumerate() {
        let unknown = arrivals[..index].iter().rev();
        let unknown = unknown.take_while(|(earlier, _)| time - earlier <= stale_us);
        let unknown = unknown.filter(|(_, number)| *number != own).count();
        let in_flight = index + 1;
        assert!(in_flight <= FOR_OTHERS + unknown, "{in_flight} at {time} with {unknown} unknown");
    }
    let total = arrivals.len();
    println!("{total} in flight for a bound of {FOR_OTHERS}");
    for process in &mut processes {
        until_seen(process, &format!("{total} of 4"));
    }

    // A dead process is gone after a lease; another one has its room.
    let [dead, mut stopped, mut a, mut b] = processes;
    let mut dead = dead;
    let of_dead: usize = dead.ask("own").parse().unwrap();
    dead.kill();
    let left = total - of_dead;
    until_seen(&mut a, &format!("{left} of 3"));
    let taken: usize = a.ask("top up").parse().unwrap();
    assert_eq!(taken, FOR_OTHERS.saturating_sub(left));
    let total = left + taken;
    until_seen(&mut b, &format!("{total} of 3"));
    assert_eq!(b.ask("top up"), "0");

    // So is one that stands still; but when it goes on, it is back with all that it has.
    let of_stopped: usize = stopped.ask("own").parse().unwrap();
    stopped.pause();
    let left = total - of_stopped;
    until_seen(&mut a, &format!("{left} of 2"));
    stopped.resume();
    for process in [&mut a, &mut b, &mut stopped] {
        until_seen(process, &format!("{total} of 3"));
    }
    assert_eq!(stopped.ask("top up"), "0");
}
