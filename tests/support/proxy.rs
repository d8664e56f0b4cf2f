//! A TCP proxy between a client and a server that does what networks do to both.

use super::server::next_port;
use parking_lot::Mutex;
use std::{
    io::{self, ErrorKind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
    try_join,
};

/// What is wrong with the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    Pass,
    /// What the server says arrives so much later, still in order. A later fault does not hurry up
    /// what is under way.
    Delay(Duration),
    /// Connections are accepted and stay open, but nothing comes through, until another fault lets
    /// it through.
    Stall,
    /// All connections are reset, and so are new ones at once.
    Cut,
    /// What the client says comes through, the answers do not, until another fault lets them
    /// through.
    HalfOpen,
    /// What the client says comes through, but instead of the answer comes a reset.
    CutReplies,
}

/// Passes on what it gets on a loopback port of its own until it is dropped, and then resets its
/// connections.
pub(crate) struct Proxy {
    port: u16,
    fault: watch::Sender<Fault>,
    connections: Connections,
    counts: Arc<Counts>,
    _acceptor: JoinSet<()>,
}

type Connections = Arc<Mutex<JoinSet<io::Result<()>>>>;

#[derive(Default)]
struct Counts {
    accepted: AtomicUsize,
    requested: AtomicUsize,
    replied: AtomicUsize,
}

impl Proxy {
    /// In front of a server on a loopback port.
    pub(crate) async fn start(upstream_port: u16) -> Self {
        let (listener, port) = loop {
            let port = next_port();
            if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)).await {
                break (listener, port);
            }
        };
        let fault = watch::Sender::new(Fault::Pass);
        let (connections, counts) = (Connections::default(), Arc::<Counts>::default());
        let mut acceptor = JoinSet::new();
        acceptor.spawn(accept(
            listener,
            upstream_port,
            fault.subscribe(),
            connections.clone(),
            counts.clone(),
        ));
        Self { port, fault, connections, counts, _acceptor: acceptor }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// From now on, on connections that there are and on new ones.
    pub(crate) fn set(&self, fault: Fault) {
        self.fault.send_replace(fault);
        if fault == Fault::Cut {
            self.connections.lock().abort_all();
        }
    }

    /// The number of connections so far.
    pub(crate) fn accepted(&self) -> usize {
        self.counts.accepted.load(SeqCst)
    }

    /// The number of connections that neither side, nor a fault, has ended.
    pub(crate) fn open(&self) -> usize {
        let mut connections = self.connections.lock();
        while connections.try_join_next().is_some() {}
        connections.len()
    }

    /// The bytes that came through to the server so far.
    pub(crate) fn requested(&self) -> usize {
        self.counts.requested.load(SeqCst)
    }

    /// The bytes that came through to clients so far.
    pub(crate) fn replied(&self) -> usize {
        self.counts.replied.load(SeqCst)
    }
}

async fn accept(
    listener: TcpListener,
    upstream_port: u16,
    fault: watch::Receiver<Fault>,
    connections: Connections,
    counts: Arc<Counts>,
) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        // Whatever ends a connection before both sides have said goodbye is a reset.
        client.set_zero_linger().unwrap();
        counts.accepted.fetch_add(1, SeqCst);
        // The lock comes first, so that a cut finds all connections that were made before it.
        let mut connections = connections.lock();
        if *fault.borrow() != Fault::Cut {
            connections.spawn(relay(client, upstream_port, fault.clone(), counts.clone()));
        }
    }
}

/// Serves a connection until both sides have said goodbye, or until an error, which is a reset for
/// the client.
async fn relay(
    mut client: TcpStream,
    upstream_port: u16,
    fault: watch::Receiver<Fault>,
    counts: Arc<Counts>,
) -> io::Result<()> {
    let mut server = TcpStream::connect(("127.0.0.1", upstream_port)).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    try_join!(
        pump(from_client, to_server, Way::Requests, fault.clone(), &counts.requested),
        pump(from_server, to_client, Way::Replies, fault, &counts.replied),
    )?;
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Requests,
    Replies,
}

impl Way {
    fn delay(self, fault: Fault) -> Duration {
        match fault {
            Fault::Delay(delay) if self == Self::Replies => delay,
            _ => Duration::ZERO,
        }
    }

    fn is_blocked(self, fault: Fault) -> bool {
        fault == Fault::Stall || fault == Fault::HalfOpen && self == Self::Replies
    }

    fn is_cut(self, fault: Fault) -> bool {
        fault == Fault::CutReplies && self == Self::Replies
    }
}

/// Passes on what comes one way. The end and errors have their turn like all else.
async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    way: Way,
    mut fault: watch::Receiver<Fault>,
    count: &AtomicUsize,
) -> io::Result<()> {
    let (queue, mut queued) = mpsc::unbounded_channel();
    let now = fault.clone();
    let read = async {
        loop {
            let mut bytes = Vec::with_capacity(4096);
            let read = from.read_buf(&mut bytes).await;
            let is_last = !matches!(read, Ok(1..));
            let due = Instant::now() + way.delay(*now.borrow());
            queue.send((due, read.map(|_| bytes))).map_err(io::Error::other)?;
            if is_last {
                return Ok(());
            }
        }
    };
    let write = async {
        loop {
            let (due, read) = queued.recv().await.expect("the end is the last to come");
            sleep_until(due).await;
            let open = fault.wait_for(|fault| !way.is_blocked(*fault)).await;
            let fault = *open.map_err(io::Error::other)?;
            let bytes = read?;
            if way.is_cut(fault) {
                return Err(ErrorKind::ConnectionReset.into());
            }
            if bytes.is_empty() {
                return to.shutdown().await;
            }
            to.write_all(&bytes).await?;
            count.fetch_add(bytes.len(), SeqCst);
        }
    };
    try_join!(read, write)?;
    Ok(())
}
