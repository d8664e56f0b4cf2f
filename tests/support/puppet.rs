//! A server that says what it is told to say.

use parking_lot::Mutex;
use std::sync::Arc;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

/// Takes connections as Redis does, and has one answer to all that is asked on them.
pub(crate) struct Puppet {
    port: u16,
    answer: Answer,
    _acceptor: JoinSet<()>,
}

type Answer = Arc<Mutex<Vec<u8>>>;

impl Puppet {
    pub(crate) async fn start(answer: &[u8]) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let answer: Answer = Arc::new(Mutex::new(answer.to_owned()));
        let mut acceptor = JoinSet::new();
        acceptor.spawn({
            let answer = answer.clone();
            async move {
                let mut connections = JoinSet::new();
                loop {
                    let (stream, _) = listener.accept().await.unwrap();
                    connections.spawn(serve(stream, answer.clone()));
                }
            }
        });
        Self { port, answer, _acceptor: acceptor }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// From now on it says this.
    pub(crate) fn say(&self, answer: &[u8]) {
        *self.answer.lock() = answer.to_owned();
    }

    /// What a script replies that admits a request to one bucket, which was empty.
    pub(crate) fn admission(time_us: u64) -> Vec<u8> {
        let mut answer = b"$21\r\n".to_vec();
        for number in [time_us, 0, 1] {
            answer.extend_from_slice(&number.to_le_bytes()[..7]);
        }
        answer.extend_from_slice(b"\r\n");
        answer
    }
}

async fn serve(stream: TcpStream, answer: Answer) {
    let mut stream = BufReader::new(stream);
    // Until the other side is gone.
    while let Some(name) = next_command(&mut stream).await {
        let reply = match &name.to_ascii_uppercase()[..] {
            b"HELLO" => b"%0\r\n".to_vec(),
            b"CLIENT" => b"+OK\r\n".to_vec(),
            _ => answer.lock().clone(),
        };
        if stream.write_all(&reply).await.is_err() {
            return;
        }
    }
}

/// Reads a command, and returns its name.
async fn next_command(stream: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut line = String::new();
    let mut number = async |stream: &mut BufReader<TcpStream>| {
        line.clear();
        stream.read_line(&mut line).await.ok()?;
        line.get(1..)?.trim_end().parse::<usize>().ok()
    };
    let mut name = None;
    for _ in 0..number(stream).await? {
        let mut argument = vec![0; number(stream).await? + 2];
        stream.read_exact(&mut argument).await.ok()?;
        argument.truncate(argument.len() - 2);
        name.get_or_insert(argument);
    }
    name
}
