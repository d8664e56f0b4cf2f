//! What happens to servers, networks and instances, and when: a function of a seed.

use crate::{
    dice::Dice,
    support::{ms, proxy, secs},
    topology::Kind,
};
use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) at: Duration,
    /// How long it lasts, if it does not end by itself.
    pub(crate) lasts: Duration,
    pub(crate) fault: Fault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A server is killed, and starts again with nothing in it.
    Kill {
        server: u64,
    },
    /// A server is shut down, and starts again with all that was in it.
    Restart {
        server: u64,
    },
    Pause {
        server: u64,
    },
    FlushScripts {
        server: u64,
    },
    FlushData {
        server: u64,
    },
    FillMemory {
        server: u64,
    },
    /// The network between an instance and one server, or all.
    Network {
        instance: u64,
        server: Option<u64>,
        fault: proxy::Fault,
    },
    KillInstance {
        instance: u64,
    },
    PauseInstance {
        instance: u64,
    },
    /// Keys are spread over so many of the servers, as instances learn one after the other.
    Reshard {
        servers: u64,
    },
    /// A replica takes over, in good order.
    FailOver,
    /// A primary is killed, and a replica takes over.
    KillPrimary {
        server: u64,
    },
    /// A slot of a cluster moves to another node, with all that is in it.
    MoveSlot {
        server: u64,
    },
}

impl Fault {
    /// What figures are listed under.
    pub(crate) fn name(self) -> String {
        let name = format!("{self:?}");
        match self {
            Self::Network { fault: proxy::Fault::Delay(_), .. } => "Network Delay".to_owned(),
            Self::Network { fault, .. } => format!("Network {fault:?}"),
            _ => name.split(' ').next().unwrap_or_default().to_owned(),
        }
    }
}

/// Quiet at first and at the end, so that all get to know the servers.
const FIRST: Duration = ms(600);
const LAST: Duration = ms(1_500);

/// Between two faults of the same server or instance.
const BREATH: Duration = ms(100);

/// Faults one after the other or some at a time, but no two of the same server or instance, in a round of that
/// length.
pub(crate) fn schedule(dice: &mut Dice, kind: Kind, instances: u64, length: Duration) -> Vec<Step> {
    let mut choice = Choice {
        kind,
        instances,
        in_use: kind.servers(),
        covered: vec![true; kind.servers() as usize],
        moves: dice.once_in(2),
    };
    let mut servers_busy = vec![FIRST; kind.servers() as usize];
    let mut instances_busy = vec![FIRST; instances as usize];
    let (mut steps, mut at) = (Vec::new(), FIRST);
    loop {
        at += dice.ms_within(50..700);
        let fault = choice.any_fault(dice);
        let lasts = choice.any_length(dice, fault);
        let (busy, waits): (Vec<&mut Duration>, _) = match fault.touches() {
            Touches::Server(server) => (vec![&mut servers_busy[server as usize]], false),
            Touches::AllServers => (servers_busy.iter_mut().collect(), true),
            Touches::Instance(instance) => (vec![&mut instances_busy[instance as usize]], false),
            Touches::AllInstances => (instances_busy.iter_mut().collect(), true),
        };
        let free_at = busy.iter().map(|until| **until).max().unwrap_or_default();
        if !waits && free_at > at {
            continue;
        }
        at = at.max(free_at);
        if at + lasts + LAST > length {
            return steps;
        }
        busy.into_iter().for_each(|until| *until = at + lasts + BREATH);
        match fault {
            Fault::Reshard { servers } => choice.in_use = servers,
            Fault::KillPrimary { server } if kind == Kind::Cluster => {
                choice.covered[server as usize] = false;
            }
            _ => {}
        }
        steps.push(Step { at, lasts, fault });
    }
}

/// Whom nothing else happens to meanwhile.
enum Touches {
    Server(u64),
    AllServers,
    Instance(u64),
    AllInstances,
}

impl Fault {
    fn touches(self) -> Touches {
        match self {
            Self::Kill { server }
            | Self::Restart { server }
            | Self::Pause { server }
            | Self::FlushScripts { server }
            | Self::FlushData { server }
            | Self::FillMemory { server } => Touches::Server(server),
            Self::FailOver | Self::KillPrimary { .. } | Self::MoveSlot { .. } => {
                Touches::AllServers
            }
            Self::Network { instance, .. }
            | Self::KillInstance { instance }
            | Self::PauseInstance { instance } => Touches::Instance(instance),
            Self::Reshard { .. } => Touches::AllInstances,
        }
    }
}

/// What there is to choose from.
struct Choice {
    kind: Kind,
    instances: u64,
    /// How many of the shards keys are spread over.
    in_use: u64,
    /// Which primaries of a cluster still have a replica.
    covered: Vec<bool>,
    /// Slots of a cluster move in some rounds, and primaries die in others: nobody moves what all have to
    /// know of while one is dead.
    moves: bool,
}

impl Choice {
    fn any_fault(&self, dice: &mut Dice) -> Fault {
        let server = dice.within(0..self.kind.servers());
        let instance = dice.within(0..self.instances);
        if dice.once_in(5) {
            return dice
                .one_of(&[Fault::KillInstance { instance }, Fault::PauseInstance { instance }]);
        }

        let flush_scripts = Fault::FlushScripts { server };
        let flush_data = Fault::FlushData { server };
        let fill_memory = Fault::FillMemory { server };
        let pause = Fault::Pause { server };
        let (kill, restart) = (Fault::Kill { server }, Fault::Restart { server });
        let network = self.any_network(dice, server, instance);
        match self.kind {
            Kind::Standalone => dice.one_of(&[
                kill,
                restart,
                pause,
                pause,
                flush_scripts,
                flush_data,
                fill_memory,
                network,
                network,
                network,
                network,
            ]),
            Kind::Shards => {
                let servers = if self.in_use == 3 { 2 } else { 3 };
                let reshard = Fault::Reshard { servers };
                dice.one_of(&[
                    kill,
                    restart,
                    pause,
                    pause,
                    flush_scripts,
                    flush_data,
                    fill_memory,
                    network,
                    network,
                    network,
                    reshard,
                    reshard,
                ])
            }
            // A primary that says nothing for a while is gone, which is a fault of its own.
            Kind::Sentinel => dice.one_of(&[
                Fault::FailOver,
                Fault::KillPrimary { server },
                flush_scripts,
                flush_data,
                fill_memory,
            ]),
            Kind::Cluster => {
                let own = match self.moves {
                    true => Fault::MoveSlot { server },
                    false if self.covered[server as usize] => Fault::KillPrimary { server },
                    false => pause,
                };
                dice.one_of(&[own, own, pause, pause, flush_scripts, flush_data, fill_memory])
            }
        }
    }

    fn any_network(&self, dice: &mut Dice, server: u64, instance: u64) -> Fault {
        let server = (self.kind == Kind::Shards && !dice.once_in(3)).then_some(server);
        let delay = proxy::Fault::Delay(dice.ms_within(5..120));
        let faults = [
            proxy::Fault::Stall,
            proxy::Fault::Cut,
            proxy::Fault::HalfOpen,
            proxy::Fault::CutReplies,
            delay,
        ];
        Fault::Network { instance, server, fault: dice.one_of(&faults) }
    }

    fn any_length(&self, dice: &mut Dice, fault: Fault) -> Duration {
        let short = dice.ms_within(100..700);
        let long = dice.ms_within(900..2_500);
        match fault {
            // For as long as those take who have to agree on another one.
            Fault::FailOver | Fault::KillPrimary { .. } => secs(3),
            // Those who say nothing for longer lose their slots to their replicas.
            Fault::Pause { .. } if self.kind == Kind::Cluster => short,
            _ if dice.once_in(5) => long,
            _ => short,
        }
    }
}
