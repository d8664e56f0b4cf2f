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
    /// For those that do not end by themselves.
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
    /// The primary is killed, and a replica takes over.
    KillPrimary,
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

/// Faults one after the other or two at a time, but no two at the same server or instance, in a round of that
/// length.
pub(crate) fn schedule(dice: &mut Dice, kind: Kind, instances: u64, length: Duration) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut servers_busy = vec![FIRST; kind.servers() as usize];
    let mut instances_busy = vec![FIRST; instances as usize];
    let mut in_use = kind.servers();
    let mut at = FIRST;
    loop {
        at += dice.ms_within(50..900);
        let (server, instance) = (dice.within(0..kind.servers()), dice.within(0..instances));
        let lasts = match dice.within(0..5) {
            0 => dice.ms_within(900..2_500),
            _ => dice.ms_within(100..700),
        };
        if at + lasts + LAST > length {
            return steps;
        }
        let fault = any_fault(dice, kind, server, instance, &mut in_use);
        let busy: Vec<&mut Duration> = match fault {
            Fault::Reshard { .. } => instances_busy.iter_mut().collect(),
            Fault::Network { .. } | Fault::KillInstance { .. } | Fault::PauseInstance { .. } => {
                vec![&mut instances_busy[instance as usize]]
            }
            _ => vec![&mut servers_busy[server as usize]],
        };
        // Sentinels take their time.
        let lasts = match fault {
            Fault::FailOver | Fault::KillPrimary => secs(4),
            _ => lasts,
        };
        let free_at = busy.iter().map(|until| **until).max().unwrap_or_default();
        at = at.max(free_at);
        busy.into_iter().for_each(|until| *until = at + lasts + ms(100));
        if at + lasts + LAST <= length {
            steps.push(Step { at, lasts, fault });
        }
    }
}

fn any_fault(dice: &mut Dice, kind: Kind, server: u64, instance: u64, in_use: &mut u64) -> Fault {
    let of_server = [
        Fault::Kill { server },
        Fault::Restart { server },
        Fault::Pause { server },
        Fault::Pause { server },
        Fault::FlushScripts { server },
        Fault::FlushData { server },
        Fault::FillMemory { server },
    ];
    let of_instance = [Fault::KillInstance { instance }, Fault::PauseInstance { instance }];
    let own = dice.within(0..10);
    match kind {
        Kind::Standalone if own < 4 => any_network(dice, kind, server, instance),
        Kind::Shards if own < 3 => any_network(dice, kind, server, instance),
        Kind::Shards if own < 5 => {
            *in_use = if *in_use == 3 { 2 } else { 3 };
            Fault::Reshard { servers: *in_use }
        }
        Kind::Sentinel if own < 3 => Fault::FailOver,
        Kind::Sentinel if own < 5 => Fault::KillPrimary,
        _ if own < 8 => {
            // For sentinels, a primary that says nothing for a while is gone; that is a fault of its own.
            let of_server = if kind == Kind::Sentinel { &of_server[4..] } else { &of_server };
            dice.one_of(of_server)
        }
        _ => dice.one_of(&of_instance),
    }
}

fn any_network(dice: &mut Dice, kind: Kind, server: u64, instance: u64) -> Fault {
    let server = (kind == Kind::Shards && !dice.once_in(3)).then_some(server);
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
