//! A process that is an instance: callers that come and go, and write down what they were told.

use crate::{
    checker::Span,
    dice::Dice,
    log::{Answer, Charged, Decided, Line},
    stack::{self, Call, Limit},
    support::{
        ms,
        process::{serve, variable},
        secs,
    },
    topology::Kind,
};
use std::{
    cell::{Cell, RefCell},
    fs::File,
    io::Write,
    os::unix::fs::FileExt,
    rc::Rc,
    sync::{Arc, mpsc},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    runtime::Builder,
    sync::mpsc::{UnboundedReceiver, unbounded_channel},
    task::LocalSet,
    time::{Instant, sleep, timeout},
};
use tollgate::{Decision, Limiter, Reason, Rejection, concurrency::Permit};

/// How long a request may wait for its decision: as long as it does by default.
pub(crate) const DEADLINE: Duration = ms(50);

pub(crate) const LEASE: Duration = secs(1);

/// How many callers each instance has.
const CALLERS: u64 = 8;

/// What a process is told when it starts.
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    pub(crate) instance: u64,
    pub(crate) life: u64,
    /// By how many instances a quota is divided while the servers are out of reach.
    pub(crate) instances: u32,
    pub(crate) urls: String,
    pub(crate) layout: Layout,
    /// Whether callers have some of what they were charged given back.
    pub(crate) gives_back: bool,
    pub(crate) log: String,
}

/// Over how many of the servers keys are spread, and how often that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) number: u64,
    pub(crate) servers: u64,
}

impl Setup {
    pub(crate) fn variables(&self) -> [(&'static str, String); 10] {
        [
            ("SEED", self.seed.to_string()),
            ("KIND", format!("{:?}", self.kind)),
            ("INSTANCE", self.instance.to_string()),
            ("LIFE", self.life.to_string()),
            ("INSTANCES", self.instances.to_string()),
            ("URLS", self.urls.clone()),
            ("LAYOUT", self.layout.number.to_string()),
            ("SERVERS", self.layout.servers.to_string()),
            ("GIVES_BACK", u64::from(self.gives_back).to_string()),
            ("LOG", self.log.clone()),
        ]
    }

    fn from_variables() -> Self {
        let number = |name| variable(name).parse::<u64>().unwrap();
        Self {
            seed: number("SEED"),
            kind: Kind::named(&variable("KIND")),
            instance: number("INSTANCE"),
            life: number("LIFE"),
            instances: number("INSTANCES") as u32,
            urls: variable("URLS"),
            layout: Layout { number: number("LAYOUT"), servers: number("SERVERS") },
            gives_back: number("GIVES_BACK") == 1,
            log: variable("LOG"),
        }
    }
}

/// Told `layout NUMBER SERVERS`, it uses a store on so many servers from then on; told `stop`, it lets
/// nothing through any more.
#[test]
fn an_instance() {
    serve("client::an_instance", || {
        let (orders, receiver) = unbounded_channel();
        let (done, is_done) = mpsc::channel();
        thread::spawn(move || run(&Setup::from_variables(), receiver, &done));
        move |line| {
            let order = match line.split(' ').collect::<Vec<_>>()[..] {
                ["layout", number, servers] => Some(Layout {
                    number: number.parse().unwrap(),
                    servers: servers.parse().unwrap(),
                }),
                ["stop"] => None,
                _ => panic!("what is `{line}`?"),
            };
            orders.send(order).unwrap();
            is_done.recv().expect("it does what it is told");
            "done".to_owned()
        }
    });
}

/// What callers of an instance share.
struct Shared {
    stack: Vec<Limit>,
    limiter: RefCell<(Limiter<Call>, Layout)>,
    last_number: Cell<u64>,
    gives_back: bool,
    log: Log,
    noise: Noise,
}

fn run(setup: &Setup, mut orders: UnboundedReceiver<Option<Layout>>, done: &mpsc::Sender<()>) {
    let stack = stack_of(setup.seed);
    let urls: Vec<&str> = setup.urls.split(',').collect();
    let limiter = |layout: Layout| {
        let store = setup.kind.store(&urls, layout.servers as usize, setup.instances);
        (stack::limiter(store, &stack), layout)
    };
    let log = Log::open(&setup.log);
    watch_for_stalls(log.clone());
    let shared = Rc::new(Shared {
        limiter: RefCell::new(limiter(setup.layout)),
        stack: stack.clone(),
        last_number: Cell::new(0),
        gives_back: setup.gives_back,
        log,
        noise: Noise::of_this_thread(),
    });
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    // One thread, so that what the system has it wait for can be told from what the library does.
    LocalSet::new().block_on(&runtime, async {
        for caller in 0..CALLERS {
            let dice = Dice::of(setup.seed, &[setup.instance, setup.life, caller]);
            tokio::task::spawn_local(shared.clone().call(dice));
        }
        while let Some(Some(layout)) = orders.recv().await {
            shared.limiter.replace(limiter(layout));
            done.send(()).unwrap();
        }
    });
    done.send(()).unwrap();
}

/// The stack of a round.
pub(crate) fn stack_of(seed: u64) -> Vec<Limit> {
    stack::any_stack(&mut Dice::of(seed, &[0x57ac]))
}

impl Shared {
    /// A caller.
    async fn call(self: Rc<Self>, mut dice: Dice) {
        let has_slots = self.stack.iter().any(Limit::is_of_slots);
        loop {
            let pause = if dice.once_in(2) { dice.within(0..3) } else { dice.within(4..20) };
            sleep(ms(pause)).await;
            let call = Call::any(&mut dice);
            // Sometimes it does not wait for the answer.
            let patience_us = if dice.once_in(50) { dice.within(0..4_000) } else { u64::MAX };
            let held = match dice.within(0..60) {
                0 => dice.ms_within(200..1_500),
                _ => dice.ms_within(0..20),
            };
            let patience = Duration::from_micros(patience_us);
            let (number, admitted) = self.decide(&call, patience).await;
            let Some((decision, permit)) = admitted else { continue };
            if self.gives_back && dice.once_in(4) {
                // Later, and in another order than they were charged in.
                let after = dice.ms_within(0..150);
                tokio::task::spawn_local(self.clone().give_back(number, call, decision, after));
            }
            if has_slots {
                sleep(held).await;
                self.log.write(&Line::Released { number, time_us: now_us() });
                drop(permit);
            }
        }
    }

    async fn give_back(
        self: Rc<Self>,
        number: u64,
        call: Call,
        decision: Decision,
        after: Duration,
    ) {
        let (limiter, _) = self.limiter.borrow().clone();
        sleep(after).await;
        self.log.write(&Line::GivenBack { number });
        // If the server does not answer, nobody knows; it counts as if it was.
        let _ = limiter.refund_async(&call, &decision).await;
    }

    async fn decide(&self, call: &Call, patience: Duration) -> (u64, Option<(Decision, Permit)>) {
        let (limiter, layout) = self.limiter.borrow().clone();
        let number = self.last_number.get() + 1;
        self.last_number.set(number);
        let noise_us = self.noise.so_far_us();
        let (from_us, start) = (now_us(), Instant::now());
        let answer = timeout(patience, limiter.acquire(call)).await;
        let wait_us = start.elapsed().as_micros() as u64;
        let asked = Span { from_us, to_us: now_us() };
        let noise_us = self.noise.so_far_us() - noise_us;
        let (answer, charges, admitted) = match answer {
            Ok(Ok(admitted)) => (Answer::Admitted, self.charges(&admitted.0), Some(admitted)),
            Ok(Err(rejection)) => (answer_of(&rejection), Vec::new(), None),
            Err(_) => (Answer::GivenUp, Vec::new(), None),
        };
        let (layout, call) = (layout.number, *call);
        let decided = Decided { number, asked, wait_us, noise_us, answer, layout, call, charges };
        let writing = Instant::now();
        self.log.write(&Line::Decided(decided));
        self.noise.add(writing.elapsed());
        (number, admitted)
    }

    fn charges(&self, decision: &Decision) -> Vec<Charged> {
        let charge = |outcome: &tollgate::Outcome| {
            let name = outcome.policy();
            let policy = self.stack.iter().position(|limit| limit.name == name).unwrap();
            let time_us = decision.time_of(name).as_micros() as u64;
            let stood_in = decision.stood_in_for(name);
            Charged { policy, cost: outcome.cost(), stood_in, time_us }
        };
        decision.outcomes().iter().map(charge).collect()
    }
}

fn answer_of(rejection: &Rejection) -> Answer {
    match rejection.reason() {
        Reason::Limited | Reason::TooCostly => Answer::Limited,
        Reason::Unavailable { .. } => Answer::Unavailable,
        other => panic!("{other:?}"),
    }
}

/// The wall clock, which is one for all processes and servers of a machine.
#[expect(clippy::disallowed_methods, reason = "what the library says is held against it")]
pub(crate) fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// Each line is written at once.
#[derive(Clone)]
struct Log(Arc<File>);

impl Log {
    fn open(path: &str) -> Self {
        Self(Arc::new(File::options().append(true).open(path).unwrap()))
    }

    fn write(&self, line: &Line) {
        (&*self.0).write_all(line.text().as_bytes()).unwrap();
    }
}

/// For how long this thread was kept from running: by the system, or by its own log.
struct Noise {
    schedule: File,
    own_us: Cell<u64>,
}

impl Noise {
    fn of_this_thread() -> Self {
        let schedule = File::open("/proc/thread-self/schedstat").unwrap();
        Self { schedule, own_us: Cell::new(0) }
    }

    fn add(&self, time: Duration) {
        self.own_us.set(self.own_us.get() + time.as_micros() as u64);
    }

    fn so_far_us(&self) -> u64 {
        // The second number is the time that it was ready to run and did not, in nanoseconds.
        let mut text = [0; 80];
        let length = self.schedule.read_at(&mut text, 0).unwrap();
        let text = str::from_utf8(&text[..length]).unwrap();
        let waited_ns: u64 = text.split(' ').nth(1).unwrap().parse().unwrap();
        waited_ns / 1_000 + self.own_us.get()
    }
}

/// What that does not tell, because the whole machine or process stood still, shows in a thread that does
/// nothing but sleep.
fn watch_for_stalls(log: Log) {
    const NAP: Duration = ms(2);
    thread::spawn(move || {
        let mut last_us = now_us();
        loop {
            thread::sleep(NAP);
            let time_us = now_us();
            if time_us - last_us > NAP.as_micros() as u64 + 1_000 {
                let from_us = last_us + NAP.as_micros() as u64;
                log.write(&Line::Stalled { from_us, to_us: time_us });
            }
            last_us = time_us;
        }
    });
}
