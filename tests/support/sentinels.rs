//! Sentinels, and the servers that they watch over. All of these methods block.

use super::server::{Flavour, Reply, Server, wait_until};

/// The name that all primaries have here.
pub(crate) const NAME: &str = "mymaster";

/// Two of three sentinels find out in a second that a primary is gone, and make one of its replicas the
/// primary.
pub(crate) struct Group {
    /// The first is the primary at first.
    pub(crate) servers: Vec<Server>,
    pub(crate) sentinels: Vec<Server>,
}

impl Group {
    pub(crate) fn start(flavour: Flavour, replicas: usize) -> Self {
        let primary = Server::start(flavour);
        let port = primary.port();
        Self::around(flavour, primary, port, replicas)
    }

    /// The primary is known by another port, which leads to it.
    pub(crate) fn around(flavour: Flavour, primary: Server, port: u16, replicas: usize) -> Self {
        primary.command(&["CONFIG", "SET", "repl-diskless-sync-delay", "0"]);
        let mut servers = vec![primary];
        let of = port.to_string();
        let arguments = ["--replicaof", "127.0.0.1", &of, "--repl-diskless-sync-delay", "0"];
        servers.extend((0..replicas).map(|_| Server::with(flavour, &arguments)));
        let config = format!(
            "sentinel monitor {NAME} 127.0.0.1 {port} 2\n\
             sentinel down-after-milliseconds {NAME} 500\n\
             sentinel failover-timeout {NAME} 3000\n"
        );
        let sentinels = (0..3).map(|_| Server::sentinel_with(Flavour::Redis7, &config)).collect();
        let group = Self { servers, sentinels };
        // They get to know each other and the replicas by asking the primary.
        group.hurry("100", "100");
        wait_until("the sentinels know everybody", || {
            group.sentinels.iter().all(|sentinel| {
                field(sentinel, "num-other-sentinels") == "2"
                    && field(sentinel, "num-slaves") == replicas.to_string()
                    && field(sentinel, "flags") == "master"
            })
        });
        // A replica that was sent everything may still wait for what came afterwards.
        let [primary, replicas @ ..] = &group.servers[..] else { unreachable!() };
        primary.command(&["SET", "first", "1"]);
        let has_it = |server: &Server| server.command(&["EXISTS", "first"]).number() == 1;
        wait_until("replicas follow", || replicas.iter().all(has_it));
        primary.command(&["DEL", "first"]);
        // As they would be.
        group.hurry("10000", "2000");
        group
    }

    fn hurry(&self, info_ms: &str, publish_ms: &str) {
        for sentinel in &self.sentinels {
            for (what, period) in [("INFO-PERIOD", info_ms), ("PUBLISH-PERIOD", publish_ms)] {
                sentinel.command(&["SENTINEL", "DEBUG", what, period]);
            }
        }
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::url).collect()
    }

    /// The port of the primary, as a sentinel says.
    pub(crate) fn named_port(&self) -> u16 {
        named_port(&self.sentinels[0])
    }

    /// A server by its port.
    pub(crate) fn server(&self, port: u16) -> &Server {
        self.servers.iter().find(|server| server.port() == port).expect("one of this group")
    }

    /// Has a replica take over, while all is well.
    pub(crate) fn fail_over(&self) {
        // The sentinel has to have heard of the replica of late.
        let failing_over = || self.sentinels[0].command(&["SENTINEL", "FAILOVER", NAME]);
        wait_until("a replica is good enough", || failing_over() == Reply::Status("OK".to_owned()));
    }

    /// Waits until all sentinels that answer name another primary than that at a port, and returns its
    /// port.
    pub(crate) fn successor_of(&self, port: u16) -> u16 {
        wait_until("there is another primary", || {
            self.sentinels.iter().all(|sentinel| named_port(sentinel) != port)
        });
        self.named_port()
    }
}

/// A sentinel that says who the primary is and asks nothing of it.
pub(crate) fn quiet_sentinel_of(server: &Server) -> Server {
    let sentinel = Server::sentinel_with(Flavour::Redis7, "");
    for what in ["INFO-PERIOD", "PING-PERIOD", "PUBLISH-PERIOD"] {
        sentinel.command(&["SENTINEL", "DEBUG", what, "1000000000"]);
    }
    let port = server.port().to_string();
    sentinel.command(&["SENTINEL", "MONITOR", NAME, "127.0.0.1", &port, "1"]);
    // It does once.
    wait_until("it has looked at the server", || {
        let stats = server.command(&["INFO", "commandstats"]);
        ["info", "subscribe"].iter().all(|name| stats.text().contains(&format!("cmdstat_{name}:")))
    });
    server.command(&["CONFIG", "RESETSTAT"]);
    sentinel
}

/// What a sentinel tells of the primary.
pub(crate) fn field(sentinel: &Server, name: &str) -> String {
    let fields = sentinel.command(&["SENTINEL", "MASTER", NAME]).texts();
    let mut pairs = fields.chunks_exact(2);
    pairs.find(|pair| pair[0] == name).map(|pair| pair[1].clone()).unwrap_or_default()
}

fn named_port(sentinel: &Server) -> u16 {
    let address = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]).texts();
    address[1].parse().unwrap()
}
