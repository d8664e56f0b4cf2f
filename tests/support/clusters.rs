//! Clusters of real servers. All of these methods block.

use super::server::{Flavour, Reply, Server, wait_until};
use std::collections::HashMap;

/// How many slots there are.
pub(crate) const SLOTS: u16 = 16_384;

/// Three primaries with a third of the slots each, and maybe a replica for each.
pub(crate) struct Cluster {
    /// The primaries at first, and then their replicas in the same order.
    pub(crate) nodes: Vec<Server>,
}

impl Cluster {
    pub(crate) fn start(flavour: Flavour, with_replicas: bool) -> Self {
        let count = if with_replicas { 6 } else { 3 };
        let arguments = [
            "--cluster-enabled",
            "yes",
            // Soon enough for tests, and late enough for busy machines.
            "--cluster-node-timeout",
            "2000",
            // Those who have lost a primary go on with their own slots.
            "--cluster-require-full-coverage",
            "no",
            "--cluster-replica-validity-factor",
            "0",
            "--repl-diskless-sync-delay",
            "0",
        ];
        let nodes: Vec<_> = (0..count).map(|_| Server::with(flavour, &arguments)).collect();
        let cluster = Self { nodes };
        for (number, node) in cluster.nodes.iter().enumerate() {
            cluster.tell(number, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
            cluster.tell(number, &["CLUSTER", "SET-CONFIG-EPOCH", &(number + 1).to_string()]);
            let first = &cluster.nodes[0];
            if number > 0 {
                let port = first.port().to_string();
                node.command(&["CLUSTER", "MEET", "127.0.0.1", &port]);
            }
        }
        let third = SLOTS / 3;
        for (number, (first, last)) in
            [(0, third), (third + 1, 2 * third), (2 * third + 1, SLOTS - 1)].into_iter().enumerate()
        {
            let range = [first.to_string(), last.to_string()];
            cluster.tell(number, &["CLUSTER", "ADDSLOTSRANGE", &range[0], &range[1]]);
        }
        wait_until("all know all", || cluster.each(|node| known(node) == count));
        for replica in 3..count {
            let primary = cluster.id(replica - 3);
            cluster.tell(replica, &["CLUSTER", "REPLICATE", &primary]);
        }
        wait_until("the cluster is well", || {
            cluster.each(|node| {
                let info = node.command(&["CLUSTER", "INFO"]);
                info.text().contains("cluster_state:ok") && slots_of(node).len() == 3
            })
        });
        wait_until("all replicas are linked", || {
            let is_linked =
                |server: &Server| server.info("master_link_status").as_deref() == Some("up");
            cluster.nodes[3..].iter().all(is_linked)
        });
        cluster
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// Which of the nodes has a slot, as another one says.
    fn owner_of(&self, slot: u16, witness: usize) -> Option<usize> {
        let slots = slots_of(&self.nodes[witness]);
        let mut slots = slots.into_iter();
        let (_, port) = slots.find(|((first, last), _)| (*first..=*last).contains(&slot))?;
        self.nodes.iter().position(|node| node.port() == port)
    }

    /// Moves a slot with all its keys to another node, as resharding tools do, a few keys at a time.
    pub(crate) fn move_slot(&self, slot: u16, from: usize, to: usize) {
        let text = slot.to_string();
        let ids = [self.id(from), self.id(to)];
        self.tell(to, &["CLUSTER", "SETSLOT", &text, "IMPORTING", &ids[0]]);
        self.tell(from, &["CLUSTER", "SETSLOT", &text, "MIGRATING", &ids[1]]);
        let port = self.nodes[to].port().to_string();
        loop {
            let keys = self.nodes[from].command(&["CLUSTER", "GETKEYSINSLOT", &text, "10"]).texts();
            if keys.is_empty() {
                break;
            }
            let mut migrate = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"];
            migrate.extend(keys.iter().map(String::as_str));
            // A key may have expired meanwhile.
            let reply = self.nodes[from].command(&migrate);
            assert!(matches!(reply, Reply::Status(_)), "{reply:?}");
        }
        self.tell(to, &["CLUSTER", "SETSLOT", &text, "NODE", &ids[1]]);
        self.tell(from, &["CLUSTER", "SETSLOT", &text, "NODE", &ids[1]]);
        // Before they know, another move could be undone by news that are old.
        let knows = |witness| self.owner_of(slot, witness) == Some(to);
        wait_until("all know who has it", || (0..self.nodes.len()).all(knows));
    }

    fn id(&self, node: usize) -> String {
        self.nodes[node].command(&["CLUSTER", "MYID"]).text().to_owned()
    }

    fn tell(&self, node: usize, command: &[&str]) {
        let reply = self.nodes[node].command(command);
        assert_eq!(reply, Reply::Status("OK".to_owned()), "{command:?}");
    }

    fn each(&self, is_well: impl Fn(&Server) -> bool) -> bool {
        self.nodes.iter().all(is_well)
    }
}

fn known(node: &Server) -> usize {
    node.command(&["CLUSTER", "NODES"])
        .text()
        .lines()
        .filter(|line| !line.contains("handshake"))
        .count()
}

/// Which port has which slots.
fn slots_of(node: &Server) -> HashMap<(u16, u16), u16> {
    let nodes = node.command(&["CLUSTER", "NODES"]);
    let mut slots = HashMap::new();
    for line in nodes.text().lines() {
        let fields: Vec<_> = line.split(' ').collect();
        if fields[2].contains("fail") {
            continue;
        }
        let address = fields[1].split('@').next().unwrap();
        let port = address.rsplit(':').next().unwrap().parse().unwrap();
        for range in fields[8..].iter().filter(|range| !range.starts_with('[')) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            slots.insert((first.parse().unwrap(), last.parse().unwrap()), port);
        }
    }
    slots
}
