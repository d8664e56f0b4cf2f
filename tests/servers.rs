//! The servers and the proxy that other tests stand on: both do what they promise.

mod support;

use std::{fs, io, time::Duration};
use support::{
    ms,
    proxy::{Fault, Proxy},
    secs,
    server::{Flavour, Reply, Server},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, sleep, timeout},
};

/// How long nothing has to happen.
const SILENCE: Duration = ms(100);

fn redis() -> Server {
    Server::start(Flavour::Redis7)
}

fn set(server: &Server) {
    assert_eq!(server.command(&["SET", "k", "v"]), Reply::Status("OK".to_owned()));
}

fn get(server: &Server) -> Reply {
    server.command(&["GET", "k"])
}

/// A connection on which commands are lines.
struct Client(TcpStream);

impl Client {
    async fn to(port: u16) -> Self {
        Self(TcpStream::connect(("127.0.0.1", port)).await.unwrap())
    }

    async fn send(&mut self, line: &str) {
        self.0.write_all(format!("{line}\r\n").as_bytes()).await.unwrap();
    }

    async fn ping(&mut self) {
        self.send("PING").await;
        self.expect("+PONG\r\n").await;
    }

    /// Exactly this is what comes next.
    async fn expect(&mut self, reply: &str) {
        let mut read = vec![0; reply.len()];
        timeout(secs(10), self.0.read_exact(&mut read)).await.expect("it comes").unwrap();
        assert_eq!(String::from_utf8_lossy(&read), reply);
    }

    async fn expect_silence(&mut self) {
        let read = timeout(SILENCE, self.0.read(&mut [0; 64])).await;
        assert!(read.is_err(), "something came: {read:?}");
    }

    /// The connection ends like this, before anything else comes.
    async fn expect_end(&mut self, expected: Result<usize, io::ErrorKind>) {
        let read = timeout(secs(10), self.0.read(&mut [0; 64])).await.expect("it ends");
        assert_eq!(read.map_err(|error| error.kind()), expected);
    }
}

const FIN: Result<usize, io::ErrorKind> = Ok(0);
const RESET: Result<usize, io::ErrorKind> = Err(io::ErrorKind::ConnectionReset);

async fn until(mut condition: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        sleep(ms(10)).await;
    }
    panic!("it does not come true");
}

// === servers ===

#[tokio::test]
async fn each_flavour_runs_and_tells_its_version() {
    let versions = Flavour::ALL.map(|flavour| {
        let server = Server::start(flavour);
        let version = server.info("valkey_version").or_else(|| server.info("redis_version"));
        (flavour, version.unwrap())
    });
    let [redis_7, redis_62, valkey_9] = versions;
    assert!(redis_7.1.starts_with("7.0."), "{redis_7:?}");
    assert!(redis_62.1.starts_with("6.2."), "{redis_62:?}");
    assert!(valkey_9.1.starts_with("9.1."), "{valkey_9:?}");
}

#[tokio::test]
async fn a_server_listens_on_its_port() {
    let server = redis();
    assert_eq!(server.url(), format!("redis://127.0.0.1:{}", server.port()));
    let mut client = Client::to(server.port()).await;
    client.ping().await;
}

#[test]
fn a_server_takes_more_arguments() {
    let server = Server::with(Flavour::Redis7, &["--maxmemory", "3mb"]);
    assert_eq!(server.info("maxmemory").unwrap(), (3 << 20).to_string());
}

#[test]
fn replies_are_told_apart() {
    let server = redis();
    let say = |reply: &str| server.command(&["EVAL", &format!("return {reply}"), "0"]);
    assert_eq!(say("redis.status_reply('S')"), Reply::Status("S".to_owned()));
    assert_eq!(say("redis.error_reply('ERR e')"), Reply::Error("ERR e".to_owned()));
    assert_eq!(say("-7"), Reply::Int(-7));
    assert_eq!(say("'a\\r\\nb'"), Reply::bulk("a\r\nb"));
    assert_eq!(say("''"), Reply::bulk(""));
    assert_eq!(say("false"), Reply::Bulk(None));
    assert_eq!(
        say("{{}, {1, '2'}}"),
        Reply::Array(vec![
            Reply::Array(vec![]),
            Reply::Array(vec![Reply::Int(1), Reply::bulk("2")])
        ])
    );
}

#[test]
fn restarting_forgets_or_keeps_data() {
    for flavour in Flavour::ALL {
        let mut server = Server::start(flavour);
        let port = server.port();
        set(&server);
        server.restart_keeping_data();
        assert_eq!(get(&server), Reply::bulk("v"), "{flavour:?}");
        server.restart();
        assert_eq!(get(&server), Reply::Bulk(None), "{flavour:?}");
        set(&server);
        server.kill();
        server.restart();
        assert_eq!(get(&server), Reply::Bulk(None), "{flavour:?}");
        assert_eq!(server.port(), port);
    }
}

#[tokio::test]
async fn a_killed_server_takes_no_connections() {
    let mut server = redis();
    let mut client = Client::to(server.port()).await;
    client.ping().await;
    server.kill();
    client.expect_end(FIN).await;
    let error = TcpStream::connect(("127.0.0.1", server.port())).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}

#[tokio::test]
async fn a_paused_server_says_nothing_until_it_is_resumed() {
    let server = redis();
    let mut before = Client::to(server.port()).await;
    server.pause();
    let mut after = Client::to(server.port()).await;
    for client in [&mut before, &mut after] {
        client.send("PING").await;
        client.expect_silence().await;
    }
    let error = server.try_command(&["PING"], SILENCE).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    server.resume();
    for client in [&mut before, &mut after] {
        client.expect("+PONG\r\n").await;
    }
}

#[tokio::test]
async fn nothing_is_left_of_a_dropped_server() {
    for is_paused in [false, true] {
        let server = redis();
        let (port, dir) = (server.port(), server.unix_path().parent().unwrap().to_owned());
        assert!(fs::exists(&dir).unwrap());
        if is_paused {
            server.pause();
        }
        drop(server);
        assert!(TcpStream::connect(("127.0.0.1", port)).await.is_err());
        assert!(!fs::exists(&dir).unwrap());
    }
}

// === faults ===

#[tokio::test]
async fn pass() {
    let mut server = redis();
    let proxy = Proxy::start(server.port()).await;
    assert_eq!(proxy.url(), format!("redis://127.0.0.1:{}", proxy.port()));
    let mut clients = [Client::to(proxy.port()).await, Client::to(proxy.port()).await];
    for client in &mut clients {
        client.ping().await;
    }
    assert_eq!([proxy.accepted(), proxy.open()], [2, 2]);
    assert_eq!([proxy.requested(), proxy.replied()], [12, 14]);

    // Either side ends a connection.
    let [gone, mut stays] = clients;
    drop(gone);
    until(|| proxy.open() == 1).await;
    server.kill();
    stays.expect_end(FIN).await;
    assert_eq!([proxy.accepted(), proxy.open()], [2, 1]);
    drop(stays);
    until(|| proxy.open() == 0).await;

    // Nobody is there to pass a new one on to.
    Client::to(proxy.port()).await.expect_end(RESET).await;
}

#[tokio::test]
async fn pass_more_than_fits_at_once() {
    let server = redis();
    let proxy = Proxy::start(server.port()).await;
    let mut client = Client::to(proxy.port()).await;
    let value = "v".repeat(1 << 20);
    client.send(&format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{value}", value.len())).await;
    client.expect("+OK\r\n").await;
    client.send("GET k").await;
    client.expect(&format!("${}\r\n{value}\r\n", value.len())).await;
}

#[tokio::test]
async fn delay() {
    const DELAY: Duration = ms(500);
    let server = redis();
    let proxy = Proxy::start(server.port()).await;
    proxy.set(Fault::Delay(DELAY));
    let mut client = Client::to(proxy.port()).await;
    let start = Instant::now();
    for length in 1..=2 {
        client.send("RPUSH k v").await;
        until(|| server.command(&["LLEN", "k"]) == Reply::Int(length)).await;
    }
    client.expect(":1\r\n").await;
    assert!(start.elapsed() >= DELAY);
    // The second waits for itself, not for the first, too.
    client.expect(":2\r\n").await;
    assert!(start.elapsed() < 2 * DELAY);
    proxy.set(Fault::Pass);
    let start = Instant::now();
    client.ping().await;
    assert!(start.elapsed() < DELAY);
}

#[tokio::test]
async fn stall() {
    let mut server = redis();
    let proxy = Proxy::start(server.port()).await;
    let mut before = Client::to(proxy.port()).await;
    before.ping().await;
    proxy.set(Fault::Stall);
    let mut after = Client::to(proxy.port()).await;
    for client in [&mut before, &mut after] {
        client.send("INCR k").await;
        client.expect_silence().await;
    }
    assert_eq!(get(&server), Reply::Bulk(None));
    assert_eq!([proxy.requested(), proxy.replied()], [6, 7]);
    proxy.set(Fault::Pass);
    until(|| get(&server) == Reply::bulk("2")).await;
    before.expect(":").await;
    after.expect(":").await;

    // Not even the end comes through.
    let mut client = Client::to(proxy.port()).await;
    client.ping().await;
    proxy.set(Fault::Stall);
    server.kill();
    client.expect_silence().await;
    proxy.set(Fault::Pass);
    client.expect_end(FIN).await;
}

#[tokio::test]
async fn cut() {
    let server = redis();
    let proxy = Proxy::start(server.port()).await;
    let mut before = Client::to(proxy.port()).await;
    before.ping().await;
    proxy.set(Fault::Cut);
    Client::to(proxy.port()).await.expect_end(RESET).await;
    // It stays cut, however short the fault.
    proxy.set(Fault::Pass);
    before.expect_end(RESET).await;
    until(|| proxy.open() == 0).await;
    let mut after = Client::to(proxy.port()).await;
    after.ping().await;
    assert_eq!([proxy.accepted(), proxy.open()], [3, 1]);
}

#[tokio::test]
async fn half_open() {
    let server = redis();
    let proxy = Proxy::start(server.port()).await;
    let mut client = Client::to(proxy.port()).await;
    proxy.set(Fault::HalfOpen);
    client.send("SET k v").await;
    until(|| get(&server) == Reply::bulk("v")).await;
    client.expect_silence().await;
    assert_eq!([proxy.requested(), proxy.replied()], [9, 0]);
    proxy.set(Fault::Pass);
    client.expect("+OK\r\n").await;
}

#[tokio::test]
async fn cut_replies() {
    let server = redis();
    let proxy = Proxy::start(server.port()).await;
    let mut client = Client::to(proxy.port()).await;
    let mut idle = Client::to(proxy.port()).await;
    proxy.set(Fault::CutReplies);
    client.send("SET k v").await;
    client.expect_end(RESET).await;
    assert_eq!(get(&server), Reply::bulk("v"));
    // Who asks for nothing loses nothing.
    proxy.set(Fault::Pass);
    idle.send("GET k").await;
    idle.expect("$1\r\nv\r\n").await;
}

#[tokio::test]
async fn a_dropped_proxy_takes_no_connections() {
    let server = redis();
    let proxy = Proxy::start(server.port()).await;
    let port = proxy.port();
    let mut client = Client::to(port).await;
    client.ping().await;
    drop(proxy);
    client.expect_end(RESET).await;
    // Its listener goes when the runtime comes to it, which may be after the connections.
    let refused = async {
        while TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(10), refused).await.expect("it still takes connections");
}
