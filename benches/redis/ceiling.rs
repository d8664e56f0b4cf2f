//! What the server could do if the client cost nothing: redis-benchmark calls the same script with
//! full batches.
//!
//! redis-benchmark takes no arguments with zeros in them. So a batch is recorded on its way from a
//! store to the server, and its arguments are put into the script, before its text.

use crate::{
    KEYS, contenders,
    server::{Reply, Server},
};
use std::{
    fmt::Write,
    process::Command,
    sync::{Arc, Mutex},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy},
    net::{TcpListener, TcpStream},
};

const BATCH: usize = 64;

/// How many calls redis-benchmark makes.
const CALLS: usize = 500;

pub(crate) struct Load {
    script: String,
    keys: Vec<String>,
}

impl Load {
    /// Takes down how a store asks for a batch.
    pub(crate) async fn new(server: &Server, policies: usize, keys: usize) -> Self {
        let wire = Wire::default();
        let url = wire.tap(server.port()).await;
        server.command(&["SCRIPT", "FLUSH"]);
        let store = contenders::store(&url).batch(BATCH).in_flight(1).build().unwrap();
        store.check().await.unwrap();
        let decide = contenders::tollgate(store, &contenders::ample(policies));
        // The first one goes alone, the others together.
        let callers = (0..=BATCH).map(|caller| tokio::spawn(decide(caller.min(keys - 1))));
        for caller in callers.collect::<Vec<_>>() {
            caller.await.unwrap();
        }
        let commands = wire.commands();
        // Another script is sent, too, and is short.
        let text =
            commands.iter().filter(|command| command[0] == b"EVAL").map(|command| &command[1]);
        let text = text.max_by_key(|text| text.len()).expect("the script was sent");
        let calls = commands.iter().filter(|command| command[0] == b"EVALSHA");
        let batch = calls.max_by_key(|call| call.last().map(Vec::len)).expect("a batch was sent");
        let [.., rules, requests] = batch.as_slice() else { panic!("a batch has arguments") };

        let keys = match keys {
            1 => vec![String::from_utf8(batch[3].clone()).unwrap()],
            // Each of these becomes another number in each call.
            _ => vec!["tg:{AAAAAAAAAA__rand_int__}".to_owned(); BATCH],
        };
        assert_eq!(batch[2], keys.len().to_string().as_bytes());
        let mut script = format!("local ARGV = {{ {}, {} }}\n", quote(rules), quote(requests));
        script.push_str(str::from_utf8(text).unwrap());
        Self { script, keys }
    }

    /// Decisions a second in one run.
    pub(crate) fn per_second(&self, server: &Server) -> f64 {
        let hash = server.command(&["SCRIPT", "LOAD", &self.script]);
        let output = Command::new("redis-benchmark")
            .args(["-p", &server.port().to_string(), "-n", &CALLS.to_string()])
            .args(["-c", "4", "-P", "4", "--csv", "-r", &KEYS.to_string()])
            .args(["EVALSHA", hash.text(), &self.keys.len().to_string()])
            .args(&self.keys)
            .output()
            .expect("redis-benchmark comes with redis-server");
        let output = String::from_utf8(output.stdout).unwrap();
        // The last line is `"EVALSHA …","calls a second",…`.
        let calls = output.lines().last().and_then(|line| line.split("\",\"").nth(1));
        let calls: Option<f64> = calls.and_then(|calls| calls.parse().ok());
        calls.unwrap_or_else(|| panic!("what does redis-benchmark say: {output}")) * BATCH as f64
    }
}

/// Bytes as a string in Lua.
fn quote(bytes: &[u8]) -> String {
    let mut text = String::from("\"");
    for byte in bytes {
        write!(text, "\\{byte:03}").unwrap();
    }
    text + "\""
}

/// A way to a server on which all that is sent there is taken down, by connection.
#[derive(Clone, Default)]
struct Wire(Arc<Mutex<Vec<Sent>>>);

type Sent = Arc<Mutex<Vec<u8>>>;

impl Wire {
    async fn tap(&self, port: u16) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let connections = self.0.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let sent = Sent::default();
                connections.lock().unwrap().push(sent.clone());
                let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let (mut from_client, mut to_client) = client.into_split();
                let (mut from_server, mut to_server) = server.into_split();
                tokio::spawn(async move { copy(&mut from_server, &mut to_client).await });
                tokio::spawn(async move {
                    let mut buffer = vec![0; 1 << 16];
                    while let Ok(length @ 1..) = from_client.read(&mut buffer).await {
                        sent.lock().unwrap().extend(&buffer[..length]);
                        if to_server.write_all(&buffer[..length]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        url
    }

    /// The commands that were sent.
    fn commands(&self) -> Vec<Vec<Vec<u8>>> {
        let mut commands = Vec::new();
        for sent in &*self.0.lock().unwrap() {
            let sent = sent.lock().unwrap();
            let mut rest = &sent[..];
            while let Ok(Reply::Array(words)) = Reply::read(&mut rest) {
                let bytes = |word| match word {
                    Reply::Bulk(Some(bytes)) => bytes,
                    other => panic!("not a word of a command: {other:?}"),
                };
                commands.push(words.into_iter().map(bytes).collect());
            }
        }
        commands
    }
}
