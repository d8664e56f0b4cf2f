//! Real Redis and Valkey servers, each a process of its own that ends with the test.

use super::{ms, secs, sentinels::quiet_sentinel_of};
use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    io::{self, BufRead, BufReader, ErrorKind, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{self, Child, Command, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};
use tokio::time::Instant;

/// Which server. `tests/run.sh` installs them all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Debian's.
    Redis7,
    Redis62,
    Valkey9,
}

impl Flavour {
    pub(crate) const ALL: [Self; 3] = [Self::Redis7, Self::Redis62, Self::Valkey9];

    fn path(self) -> PathBuf {
        let name = match self {
            Self::Redis7 => return "redis-server".into(),
            Self::Redis62 => "bin/redis-server-6.2",
            Self::Valkey9 => "bin/valkey-server-9",
        };
        let servers = env::var_os("TOLLGATE_TEST_SERVERS");
        let servers = servers.unwrap_or_else(|| OsString::from("target/servers"));
        Path::new(env!("CARGO_MANIFEST_DIR")).join(servers).join(name)
    }
}

/// A server on a loopback port and a Unix socket. It saves nothing unless it is told to. All of its
/// methods block.
pub(crate) struct Server {
    flavour: Flavour,
    arguments: Vec<String>,
    /// What it is told by a file that it may write to.
    config: Option<String>,
    /// For its socket, its log and what it saves.
    dir: PathBuf,
    port: u16,
    process: Option<Child>,
    /// One that names it, from when it is asked for.
    sentinel: OnceLock<Box<Self>>,
}

impl Server {
    pub(crate) fn start(flavour: Flavour) -> Self {
        Self::with(flavour, &[])
    }

    /// With more arguments, e.g. `["--maxmemory", "3mb"]`.
    pub(crate) fn with(flavour: Flavour, arguments: &[&str]) -> Self {
        Self::launched(flavour, None, arguments)
    }

    /// A sentinel that names it and does not disturb it.
    pub(crate) fn sentinel(&self) -> &Self {
        self.sentinel.get_or_init(|| Box::new(quiet_sentinel_of(self)))
    }

    /// A sentinel, with lines of configuration.
    pub(crate) fn sentinel_with(flavour: Flavour, config: &str) -> Self {
        Self::launched(flavour, Some(config.to_owned()), &["--sentinel"])
    }

    fn launched(flavour: Flavour, config: Option<String>, arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let dir = env::temp_dir().join(format!("tollgate-{}-{}", process::id(), next()));
        let (port, process, sentinel) = (next_port(), None, OnceLock::new());
        let mut server = Self { flavour, arguments, config, dir, port, process, sentinel };
        server.clear();
        while !server.launch() {
            server.port = next_port();
        }
        server
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn unix_path(&self) -> PathBuf {
        self.dir.join("socket")
    }

    /// Ends it on the spot, as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            // This works on a paused process, too.
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Kills it if it runs, and starts it again on the same port, with nothing in it.
    pub(crate) fn restart(&mut self) {
        self.kill();
        self.clear();
        assert!(self.launch(), "port {} is taken", self.port);
    }

    /// The same with a server of another kind.
    pub(crate) fn replace(&mut self, flavour: Flavour) {
        self.flavour = flavour;
        self.restart();
    }

    /// Shuts it down and starts it again on the same port, with all that was in it.
    pub(crate) fn restart_keeping_data(&mut self) {
        match self.try_command(&["SHUTDOWN", "SAVE"], secs(10)) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => self.kill(),
            other => panic!("it does not shut down: {other:?}"),
        }
        assert!(self.launch(), "port {} is taken", self.port);
    }

    /// Stops it as it stands: it keeps its connections and takes new ones, but says nothing.
    pub(crate) fn pause(&self) {
        self.signal("STOP");
    }

    pub(crate) fn resume(&self) {
        self.signal("CONT");
    }

    /// What it says to a command.
    pub(crate) fn command<A: AsRef<[u8]>>(&self, command: &[A]) -> Reply {
        self.try_command(command, secs(10)).expect("the server answers")
    }

    /// The same, unless it says nothing for so long. Every command has a connection of its own, to
    /// the Unix socket: no other process can have taken that.
    pub(crate) fn try_command<A: AsRef<[u8]>>(
        &self,
        command: &[A],
        timeout: Duration,
    ) -> io::Result<Reply> {
        let mut request = format!("*{}\r\n", command.len()).into_bytes();
        for argument in command.iter().map(A::as_ref) {
            write!(request, "${}\r\n", argument.len())?;
            request.extend_from_slice(argument);
            request.extend_from_slice(b"\r\n");
        }
        let mut stream = UnixStream::connect(self.unix_path())?;
        stream.set_read_timeout(Some(timeout))?;
        stream.write_all(&request)?;
        Reply::read(&mut BufReader::new(stream))
    }

    /// A field of what it tells about itself, e.g. `used_memory`.
    pub(crate) fn info(&self, field: &str) -> Option<String> {
        let info = self.report("default");
        let mut fields = info.lines().filter_map(|line| line.split_once(':'));
        fields.find(|(name, _)| *name == field).map(|(_, value)| value.to_owned())
    }

    /// What it tells about itself in a section. Sentinels have a server drop all who are connected to it
    /// when its role changes; then it is asked again.
    pub(crate) fn report(&self, section: &str) -> String {
        let ask = || self.try_command(&["INFO", section], secs(10));
        let report = ask().or_else(|_| ask()).expect("the server answers");
        report.text().to_owned()
    }

    fn clear(&self) {
        let _ = fs::remove_dir_all(&self.dir);
        fs::create_dir(&self.dir).unwrap();
        if let Some(config) = &self.config {
            fs::write(self.config_path(), config).unwrap();
        }
    }

    fn config_path(&self) -> PathBuf {
        self.dir.join("config")
    }

    /// Starts the process and waits until it answers. False if its port is taken.
    fn launch(&mut self) -> bool {
        let path = self.flavour.path();
        let log = self.dir.join("log");
        let output = File::create(&log).unwrap();
        let process = Command::new(&path)
            .args(self.config.as_ref().map(|_| self.config_path()))
            .args(["--bind", "127.0.0.1", "--port", &self.port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(&self.dir)
            .arg("--unixsocket")
            .arg(self.unix_path())
            .args(if is_cluster() { &["--cluster-enabled", "yes"][..] } else { &[] })
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap_or_else(|error| {
                panic!("cannot start {}: {error}\ntests/run.sh installs it", path.display())
            });
        self.process = Some(process);
        for _ in 0..2000 {
            if self.answers() {
                self.found_cluster();
                return true;
            }
            if self.ended() {
                break;
            }
            thread::sleep(ms(5));
        }
        let log = fs::read_to_string(log).unwrap();
        assert!(
            log.contains("Address already in use"),
            "{} does not start:\n{log}",
            path.display()
        );
        false
    }

    /// Makes it a cluster of one, where that is asked for.
    fn found_cluster(&self) {
        if !is_cluster() || self.config.is_some() {
            return;
        }
        let mut command = vec!["CLUSTER".to_owned(), "ADDSLOTS".to_owned()];
        command.extend((0..16_384).map(|slot: u16| slot.to_string()));
        // With its data it has kept its slots, too.
        self.command(&command);
        wait_until("the cluster is well", || {
            self.command(&["CLUSTER", "INFO"]).text().contains("cluster_state:ok")
        });
    }

    fn ended(&mut self) -> bool {
        self.process.as_mut().is_none_or(|process| process.try_wait().unwrap().is_some())
    }

    fn answers(&self) -> bool {
        match self.try_command(&["PING"], ms(100)) {
            Ok(Reply::Error(error)) => !error.starts_with("LOADING"),
            reply => reply.is_ok(),
        }
    }

    fn signal(&self, name: &str) {
        let process = self.process.as_ref().expect("it was killed");
        signal(process.id(), name);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Waits until something is true of servers.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < secs(40), "it does not come true: {what}");
        thread::sleep(ms(10));
    }
}

/// Whether servers are clusters of one, in a test crate that has the tests of another one.
pub(crate) const fn is_cluster() -> bool {
    matches!(env!("CARGO_CRATE_NAME").as_bytes(), b"redis_by_cluster")
}

/// Sends a process a signal, e.g. `STOP`.
pub(crate) fn signal(process: u32, name: &str) {
    let kill = format!("kill -{name} {process}");
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
}

/// Another number every time.
fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Relaxed)
}

/// A port that is free most likely. The system gives none of these to anybody who asks for any, so
/// it stays free while nobody listens on it: for its server to come back, and from a client that
/// would connect to itself.
pub(crate) fn next_port() -> u16 {
    let number = process::id().wrapping_mul(61).wrapping_add(next());
    20_000 + (number % 10_000) as u16
}

/// What a server says (RESP2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    Status(String),
    Error(String),
    Int(i64),
    /// A null array is `Bulk(None)`, too.
    Bulk(Option<Vec<u8>>),
    Array(Vec<Self>),
}

impl Reply {
    pub(crate) fn bulk(text: &str) -> Self {
        Self::Bulk(Some(text.into()))
    }

    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Status(text) => text,
            Self::Bulk(Some(text)) => str::from_utf8(text).unwrap(),
            other => panic!("not a text: {other:?}"),
        }
    }

    /// The texts that it is a list of.
    pub(crate) fn texts(&self) -> Vec<String> {
        match self {
            Self::Array(items) => items.iter().map(|item| item.text().to_owned()).collect(),
            other => panic!("not a list: {other:?}"),
        }
    }

    pub(crate) fn number(&self) -> i64 {
        match self {
            Self::Int(number) => *number,
            other => panic!("not a number: {other:?}"),
        }
    }

    pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Self> {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let line = line.strip_suffix("\r\n").ok_or(ErrorKind::UnexpectedEof)?;
        let (kind, rest) = line.split_at_checked(1).ok_or(ErrorKind::InvalidData)?;
        let number = || rest.parse().map_err(io::Error::other);
        Ok(match kind {
            "+" => Self::Status(rest.to_owned()),
            "-" => Self::Error(rest.to_owned()),
            ":" => Self::Int(number()?),
            "$" | "*" if rest == "-1" => Self::Bulk(None),
            "$" => {
                let length = number()? as usize;
                let mut bytes = vec![0; length + 2];
                from.read_exact(&mut bytes)?;
                bytes.truncate(length);
                Self::Bulk(Some(bytes))
            }
            "*" => Self::Array((0..number()?).map(|_| Self::read(from)).collect::<Result<_, _>>()?),
            _ => return Err(ErrorKind::InvalidData.into()),
        })
    }
}
