//! The server that the instances share.

use crate::{
    BoxError,
    child::{Child, parent_is_done},
};
use std::{
    env,
    io::ErrorKind,
    net::TcpListener,
    process::{self, Command, Stdio},
    time::Duration,
};
use tollgate::redis::client::{Client, RedisError, cmd};

pub(crate) struct Server {
    pub(crate) url: String,
    /// If it is our own.
    _keeper: Option<Child>,
}

/// How long a server may take to start.
const PATIENCE: Duration = Duration::from_secs(5);

impl Server {
    /// Takes the server that `REDIS_URL` names, or starts one.
    pub(crate) async fn find() -> Result<Self, BoxError> {
        if let Ok(url) = env::var("REDIS_URL") {
            let pong = tokio::time::timeout(PATIENCE, ping(&url)).await;
            let reason = match pong {
                Ok(Ok(())) => return Ok(Self { url, _keeper: None }),
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("nothing was heard for {PATIENCE:?}"),
            };
            // The URL may hold a password.
            return Err(format!("the server of REDIS_URL does not answer: {reason}").into());
        }
        Self::start().await
    }

    /// Starts a server.
    pub(crate) async fn start() -> Result<Self, BoxError> {
        is_installed()?;
        // The port may be gone before the server listens at it, but not every time.
        for _ in 0..5 {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let mut keeper = Child::start(&["--server", &port.to_string()])?;
            let url = format!("redis://127.0.0.1:{port}/");
            if answers(&url, &mut keeper).await? {
                return Ok(Self { url, _keeper: Some(keeper) });
            }
        }
        Err("redis-server does not start; try it by hand, or set REDIS_URL".into())
    }
}

fn is_installed() -> Result<(), BoxError> {
    let version = Command::new("redis-server").arg("--version").stdout(Stdio::null()).status();
    match version {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err("redis-server is not installed; run ./tests/run.sh or set REDIS_URL".into())
        }
        Err(error) => Err(format!("cannot run redis-server: {error}").into()),
    }
}

/// Waits for a server that was just started.
async fn answers(url: &str, keeper: &mut Child) -> Result<bool, BoxError> {
    let pause = Duration::from_millis(20);
    for _ in 0..PATIENCE.as_millis() / pause.as_millis() {
        if keeper.has_ended()? {
            return Ok(false);
        }
        if ping(url).await.is_ok() {
            return Ok(true);
        }
        tokio::time::sleep(pause).await;
    }
    Ok(false)
}

async fn ping(url: &str) -> Result<(), RedisError> {
    let mut connection = Client::open(url)?.get_multiplexed_async_connection().await?;
    cmd("PING").query_async(&mut connection).await
}

/// Runs redis-server until the parent is done. redis-server itself would not notice that its parent
/// is gone; so it is started by a process that does.
pub(crate) async fn keep(port: &str) -> Result<(), BoxError> {
    let mut server = tokio::process::Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    tokio::select! {
        // The runtime would wait for the standard input first.
        _ = server.wait() => process::exit(1),
        () = parent_is_done() => Ok(server.kill().await?),
    }
}
