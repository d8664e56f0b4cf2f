//! A round: servers, instances and traffic while a schedule is carried out, and what came of it.

use crate::{
    checker::{Admission, Evidence, Hold, Ledger, Span, merged},
    client::{self, LEASE, Layout, Setup, now_us},
    dice::Dice,
    log::{self, Answer, Decided, Line},
    schedule::{Fault, Step, schedule},
    support::{
        ms,
        process::Process,
        proxy,
        server::{Flavour, Reply},
    },
    topology::{Kind, Topology},
};
use std::{
    collections::{HashMap, HashSet},
    env, fs,
    path::PathBuf,
    process,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    thread,
    time::Duration,
};
use tokio::{runtime::Runtime, time::Instant};

/// What a round is a function of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    pub(crate) flavour: Flavour,
    pub(crate) length: Duration,
    /// How many instances there are.
    pub(crate) instances: u64,
    /// How many the stores are told that there are.
    pub(crate) told_instances: u32,
    pub(crate) steps: Vec<Step>,
    /// Whether callers have some of what they were charged given back.
    pub(crate) gives_back: bool,
}

/// What happened in a round.
pub(crate) struct Round {
    pub(crate) evidence: Evidence,
    /// Of each life of each instance.
    pub(crate) lives: Vec<Life>,
    pub(crate) faults: Vec<Happened>,
    /// Where the logs are, until this is dropped.
    dir: PathBuf,
    pub(crate) keeps_logs: bool,
}

/// A process, from its start to its end.
pub(crate) struct Life {
    pub(crate) instance: u64,
    pub(crate) decided: Vec<Decided>,
    pub(crate) stalls: Vec<Span>,
    /// How many decisions were given back.
    pub(crate) given_back: u64,
}

/// A fault that was.
#[derive(Clone, Debug)]
pub(crate) struct Happened {
    pub(crate) fault: Fault,
    pub(crate) span: Span,
    /// The instances that could not reach servers meanwhile.
    pub(crate) cut_off: Vec<u64>,
}

/// For how long instances may not know yet that all is well again: the longest time out of use, varied by a
/// fifth, and time to make a connection.
pub(crate) const HEALING: Duration = ms(1_500);

impl Plan {
    pub(crate) fn of(seed: u64, kind: Kind, length: Duration) -> Self {
        let mut dice = Dice::of(seed, &[0x91a4]);
        let flavour = dice.one_of(&Flavour::ALL);
        let instances = 4;
        let mut steps = schedule(&mut dice, kind, instances, length);
        let gives_back = dice.once_in(3);
        if gives_back {
            // What was charged before state was lost is given back to those who did not charge it.
            steps.retain(|step| !loses(step.fault));
        }
        let told_instances = instances as u32;
        Self { seed, kind, flavour, length, instances, told_instances, steps, gives_back }
    }
}

/// A round while it is carried out.
struct Stage<'a> {
    plan: &'a Plan,
    dir: PathBuf,
    topology: Topology,
    layout: Layout,
    instances: Vec<Instance>,
    ended: Vec<Ended>,
    losses: Vec<Span>,
    faults: Vec<Happened>,
}

struct Instance {
    number: u64,
    life: u64,
    /// None while it is dead.
    process: Option<Process>,
}

/// A life that is over.
struct Ended {
    instance: u64,
    life: u64,
    end_us: u64,
}

/// Carries a plan out.
pub(crate) fn carry_out(plan: &Plan) -> Round {
    let runtime = Runtime::new().unwrap();
    let dir = new_dir();
    let topology = Topology::start(plan.kind, plan.flavour, plan.instances, &runtime);
    let layout = Layout { number: 0, servers: plan.kind.servers() };
    let instances = (0..plan.instances).map(|number| Instance { number, life: 0, process: None });
    let mut stage = Stage {
        plan,
        dir,
        topology,
        layout,
        instances: instances.collect(),
        ended: Vec::new(),
        losses: Vec::new(),
        faults: Vec::new(),
    };
    stage.run();
    let Stage { dir, ended, losses, faults, .. } = stage;
    gather(plan, dir, &ended, losses, faults)
}

/// For logs.
fn new_dir() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("tollgate-chaos-{}-{}", process::id(), NEXT.fetch_add(1, Relaxed));
    let dir = env::temp_dir().join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir(&dir).unwrap();
    dir
}

impl Stage<'_> {
    fn run(&mut self) {
        (0..self.plan.instances).for_each(|number| self.start(number));
        let start = Instant::now();
        let steps = &self.plan.steps;
        let begin = steps.iter().enumerate().map(|(index, step)| (step.at, index, false));
        let end = steps.iter().enumerate().map(|(index, step)| (step.at + step.lasts, index, true));
        let mut actions: Vec<_> = begin.chain(end).collect();
        actions.sort_unstable();
        let mut begun = HashMap::new();
        for (at, index, ends) in actions {
            thread::sleep((start + at).saturating_duration_since(Instant::now()));
            let fault = steps[index].fault;
            if ends {
                let cut_off = self.cut_off_by(fault);
                self.end(fault);
                let span = Span { from_us: begun[&index], to_us: now_us() };
                if loses(fault) {
                    self.losses.push(span);
                }
                self.faults.push(Happened { fault, span, cut_off });
            } else {
                begun.insert(index, now_us());
                self.begin(fault);
            }
        }
        thread::sleep((start + self.plan.length).saturating_duration_since(Instant::now()));
        for number in 0..self.plan.instances {
            self.note_end(number);
            let process = self.instances[number as usize].process.take();
            let mut process = process.expect("it was started again");
            assert_eq!(process.ask("stop"), "done");
        }
    }

    fn begin(&mut self, fault: Fault) {
        match fault {
            Fault::Kill { server } => self.topology.server(server).kill(),
            Fault::Restart { server } => self.topology.server(server).restart_keeping_data(),
            Fault::Pause { server } => self.topology.server(server).pause(),
            Fault::FlushScripts { server } => self.tell(server, &["SCRIPT", "FLUSH"]),
            Fault::FlushData { server } => self.tell(server, &["FLUSHALL"]),
            Fault::FillMemory { server } => self.tell(server, &["CONFIG", "SET", "maxmemory", "1"]),
            Fault::Network { instance, server, fault } => {
                self.topology.set(instance, server, fault);
            }
            Fault::KillInstance { instance } => {
                self.note_end(instance);
                self.process(instance).take().expect("it lives").kill();
            }
            Fault::PauseInstance { instance } => {
                self.process(instance).as_ref().expect("it lives").pause();
            }
            Fault::Reshard { servers } => {
                self.layout = Layout { number: self.layout.number + 1, servers };
                let order = format!("layout {} {servers}", self.layout.number);
                for instance in 0..self.plan.instances {
                    let process = self.process(instance).as_mut().expect("it lives");
                    assert_eq!(process.ask(&order), "done");
                }
            }
            Fault::FailOver => self.topology.fail_over(),
            Fault::KillPrimary { server } => self.topology.kill_primary(server),
            Fault::MoveSlot { server } => self.topology.move_slot(server),
        }
    }

    fn end(&mut self, fault: Fault) {
        match fault {
            Fault::Kill { server } => self.topology.server(server).restart(),
            Fault::Pause { server } => self.topology.server(server).resume(),
            Fault::FillMemory { server } => self.tell(server, &["CONFIG", "SET", "maxmemory", "0"]),
            Fault::Network { instance, server, .. } => {
                self.topology.set(instance, server, proxy::Fault::Pass);
            }
            Fault::KillInstance { instance } => self.start(instance),
            Fault::PauseInstance { instance } => {
                self.process(instance).as_ref().expect("it lives").resume();
            }
            Fault::Restart { .. }
            | Fault::FlushScripts { .. }
            | Fault::FlushData { .. }
            | Fault::Reshard { .. }
            | Fault::FailOver
            | Fault::KillPrimary { .. }
            | Fault::MoveSlot { .. } => {}
        }
    }

    /// The instances that may not reach a server because of a fault.
    fn cut_off_by(&self, fault: Fault) -> Vec<u64> {
        match fault {
            Fault::FlushScripts { .. } | Fault::FlushData { .. } => Vec::new(),
            Fault::Network { instance, .. }
            | Fault::KillInstance { instance }
            | Fault::PauseInstance { instance } => vec![instance],
            _ => (0..self.plan.instances).collect(),
        }
    }

    fn tell(&mut self, server: u64, command: &[&str]) {
        let reply = self.topology.server(server).command(command);
        assert_eq!(reply, Reply::Status("OK".to_owned()), "{command:?}");
    }

    fn process(&mut self, instance: u64) -> &mut Option<Process> {
        &mut self.instances[instance as usize].process
    }

    fn start(&mut self, number: u64) {
        let Self { plan, dir, topology, layout, .. } = &*self;
        let life = self.instances[number as usize].life;
        let log = dir.join(log_name(number, life));
        log::create(&log);
        let setup = Setup {
            seed: plan.seed,
            kind: plan.kind,
            instance: number,
            life,
            instances: plan.told_instances,
            urls: topology.urls(number),
            layout: *layout,
            gives_back: plan.gives_back,
            log: log.to_str().unwrap().to_owned(),
        };
        let variables = setup.variables();
        let variables = variables.each_ref().map(|(name, value)| (*name, value.as_str()));
        let process = Process::start("client::an_instance", &variables);
        let instance = &mut self.instances[number as usize];
        instance.process = Some(process);
        instance.life += 1;
    }

    /// A life is about to end.
    fn note_end(&mut self, number: u64) {
        let Instance { number, life, .. } = self.instances[number as usize];
        self.ended.push(Ended { instance: number, life: life - 1, end_us: now_us() });
    }
}

/// Whether what servers knew is lost, or a part of it.
fn loses(fault: Fault) -> bool {
    match fault {
        Fault::Kill { .. }
        | Fault::FlushData { .. }
        // Replicas may not have heard of the last writes.
        | Fault::FailOver
        | Fault::KillPrimary { .. } => true,
        _ => false,
    }
}

fn log_name(instance: u64, life: u64) -> String {
    format!("{instance}-{life}.log")
}

/// Makes evidence of what instances wrote down.
fn gather(
    plan: &Plan,
    dir: PathBuf,
    ended: &[Ended],
    losses: Vec<Span>,
    faults: Vec<Happened>,
) -> Round {
    let stack = client::stack_of(plan.seed);
    let mut cut_off = vec![Vec::new(); plan.instances as usize];
    for Happened { span, cut_off: instances, .. } in &faults {
        instances.iter().for_each(|instance| cut_off[*instance as usize].push(*span));
    }
    let mut evidence = Evidence {
        laws: stack.iter().map(|limit| limit.law()).collect(),
        instances: plan.instances,
        lease_us: LEASE.as_micros() as u64,
        losses,
        ..Evidence::default()
    };
    let mut lives = Vec::new();
    for Ended { instance, life, end_us } in ended {
        let (instance, life) = (*instance, *life);
        let (mut decided, mut stalls) = (Vec::new(), Vec::new());
        let (mut released, mut given_back) = (HashMap::new(), HashSet::new());
        for line in log::read(&dir.join(log_name(instance, life))) {
            match line {
                Line::Decided(line) => decided.push(line),
                Line::Released { number, time_us } => {
                    released.insert(number, time_us);
                }
                Line::GivenBack { number } => {
                    given_back.insert(number);
                }
                Line::Stalled { from_us, to_us } => stalls.push(Span { from_us, to_us }),
            }
        }
        // Long ones are as good as a pause.
        let is_long = |stall: &&Span| stall.to_us - stall.from_us > 100_000;
        cut_off[instance as usize].extend(stalls.iter().filter(is_long));
        for line in decided.iter().filter(|line| line.answer == Answer::Admitted) {
            for charge in &line.charges {
                let ledger = match charge.stood_in {
                    true => Ledger::Instance { instance, life, layout: line.layout },
                    false => Ledger::Servers { layout: line.layout },
                };
                let (policy, cost) = (charge.policy, charge.cost);
                let key = stack[policy].key_of(&line.call);
                if stack[policy].is_of_slots() {
                    let released = released.get(&line.number).copied().unwrap_or(*end_us);
                    let held = Span { from_us: line.asked.to_us, to_us: released };
                    evidence.holds.push(Hold { policy, key, instance, ledger, cost, held });
                } else if !given_back.contains(&line.number) {
                    let (time_us, asked) = (charge.time_us, line.asked);
                    let admission = Admission { policy, key, ledger, cost, time_us, asked };
                    evidence.admissions.push(admission);
                }
            }
        }
        lives.push(Life { instance, decided, stalls, given_back: given_back.len() as u64 });
    }
    let healing_us = HEALING.as_micros() as u64;
    let until_healed = |span: Span| Span { to_us: span.to_us + healing_us, ..span };
    let healed = |spans: Vec<Span>| merged(spans.into_iter().map(until_healed).collect(), 0);
    evidence.cut_off = cut_off.into_iter().map(healed).collect();
    Round { evidence, lives, faults, dir, keeps_logs: false }
}

impl Drop for Round {
    fn drop(&mut self) {
        if self.keeps_logs {
            let faults = format!("{:#?}", self.faults);
            let _ = fs::write(self.dir.join("faults"), faults);
            println!("logs are in {}", self.dir.display());
        } else {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}
