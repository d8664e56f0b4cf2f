//! Connections: a pool that is not asked for more than it has to be, and what an error says.
//!
//! A connection is not pinged when it is taken out: that would be a second round trip. It is known to
//! be broken when the server closed it, when an error said so, or when two calls in a row had no reply
//! and the first of them is longer ago than a call may take.

#[cfg(feature = "sentinel")]
use super::sentinel::Primary;
use super::{error::StoreError, lane::Limits};
use crate::clock::Clock;
use bb8::{ErrorSink, ManageConnection, Pool, RunError};
use bb8_redis::RedisConnectionManager;
#[cfg(feature = "cluster")]
use futures_util::future::join_all;
use parking_lot::Mutex;
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionInfo, ErrorKind, ProtocolVersion, PushInfo,
    PushKind, RedisError, Value,
    aio::{ConnectionLike, MultiplexedConnection, SendError},
    io::tcp::TcpSettings,
};
use std::{
    any::Any,
    fmt,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};
use tokio::runtime::{self, Handle};

/// Where connections come from.
pub(super) enum Source {
    /// A pool of our own, made when it is first needed, since that takes a runtime.
    Own(Box<OwnPool>),
    /// A pool that the application has.
    Given(Pool<RedisConnectionManager>),
}

pub(super) struct OwnPool {
    manager: Manager,
    size: u32,
    /// With the runtime that it was made on.
    pool: Mutex<Option<(runtime::Id, Pool<Manager>)>>,
}

impl Source {
    pub(super) fn own(info: &ConnectionInfo, limits: &Limits) -> Result<Self, RedisError> {
        let (patience, size) = (limits.patience, limits.connections);
        let way = Way::Straight(Arc::new(Client::open(with_settings(info))?));
        Ok(Self::pool(way, patience, size))
    }

    /// The primary that sentinels name.
    #[cfg(feature = "sentinel")]
    pub(super) fn primary(primary: Primary, patience: Duration, size: u32) -> Self {
        Self::pool(Way::Sentinels(Arc::new(primary)), patience, size)
    }

    fn pool(way: Way, patience: Duration, size: u32) -> Self {
        let manager = Manager { way, patience, last_error: LastError::default() };
        Self::Own(Box::new(OwnPool { manager, size, pool: Mutex::default() }))
    }

    /// Sends a command and waits for the reply.
    pub(super) async fn query(&self, command: &Cmd) -> Result<Value, StoreError> {
        match self {
            Self::Own(own) => own.query(command).await,
            Self::Given(pool) => {
                let mut connection = pool.get().await.map_err(|error| match error {
                    RunError::User(error) => StoreError::from(&error),
                    RunError::TimedOut => {
                        StoreError::no_connection("the pool gave no connection in time")
                    }
                })?;
                send(&mut connection, command).await
            }
        }
    }
}

#[cfg(feature = "cluster")]
impl Source {
    /// Sends commands, one right after the other on one connection, and waits for all replies.
    pub(super) async fn query_all(&self, commands: Vec<Cmd>) -> Vec<Result<Value, StoreError>> {
        let Self::Own(own) = self else {
            unreachable!("the nodes of a cluster have pools of our own");
        };
        own.query_all(&commands).await
    }
}

impl OwnPool {
    async fn query(&self, command: &Cmd) -> Result<Value, StoreError> {
        let pool = self.pool();
        self.manager.way.look_again();
        let mut may_retry = self.manager.way.may_lead_elsewhere();
        loop {
            let mut connection = pool.get().await.map_err(|error| match error {
                RunError::User(error) => error,
                RunError::TimedOut => self.no_connection(&pool),
            })?;
            // One that was closed while it lay idle goes back to be thrown away.
            if connection.is_broken() {
                continue;
            }
            match connection.query(command).await {
                // Nothing ran, and the next connection leads to another server.
                Err(error) if error.is_from_replica() && may_retry => may_retry = false,
                result => return result,
            }
        }
    }

    #[cfg(feature = "cluster")]
    async fn query_all(&self, commands: &[Cmd]) -> Vec<Result<Value, StoreError>> {
        let pool = self.pool();
        loop {
            let mut connection = match pool.get().await {
                Ok(connection) => connection,
                Err(error) => {
                    let error = match error {
                        RunError::User(error) => error,
                        RunError::TimedOut => self.no_connection(&pool),
                    };
                    return commands.iter().map(|_| Err(error.clone())).collect();
                }
            };
            if !connection.is_broken() {
                return connection.query_all(commands).await;
            }
        }
    }

    fn pool(&self) -> Pool<Manager> {
        let make = || {
            Pool::builder()
                .max_size(self.size)
                // A little less than the deadline, so that there is time to say what is wrong.
                .connection_timeout(self.manager.patience * 9 / 10)
                .test_on_check_out(false)
                .max_lifetime(None)
                .idle_timeout(None)
                .error_sink(Box::new(self.manager.last_error.clone()))
                .build_unchecked(self.manager.clone())
        };
        let mut pool = self.pool.lock();
        let (_, pool) = pool.get_or_insert_with(|| (Handle::current().id(), make()));
        pool.clone()
    }

    /// Why the pool gave no connection in time.
    fn no_connection(&self, pool: &Pool<Manager>) -> StoreError {
        self.manager.last_error.take().unwrap_or_else(|| {
            // It may wait for connections that another runtime was making when it was shut down.
            let here = Handle::current().id();
            let elsewhere = |made: &mut (runtime::Id, Pool<Manager>)| made.0 != here;
            if pool.state().connections == 0 {
                drop(self.pool.lock().take_if(elsewhere));
            }
            self.manager.way.hold_up()
        })
    }
}

impl fmt::Debug for Source {
    /// Addresses may hold passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own(_) => "Own",
            Self::Given(_) => "Given",
        })
    }
}

/// Making a connection takes several round trips, with TLS some more. It goes on in the background when
/// those who wait for it have gone.
const LEAST_CONNECTION_TIME: Duration = Duration::from_secs(1);

/// Makes connections, and tells which are of no use any more.
#[derive(Clone)]
pub(super) struct Manager {
    way: Way,
    /// How long those who decide wait for a connection, and for a reply.
    patience: Duration,
    last_error: LastError,
}

/// How a server is found.
#[derive(Clone)]
enum Way {
    Straight(Arc<Client>),
    #[cfg(feature = "sentinel")]
    Sentinels(Arc<Primary>),
}

impl Way {
    /// Sees now and then, in the background, whether it leads to another server.
    fn look_again(&self) {
        match self {
            Self::Straight(_) => {}
            #[cfg(feature = "sentinel")]
            Self::Sentinels(primary) => primary.look_again(),
        }
    }

    /// What it waits for who has waited for a connection in vain, as far as that is known.
    fn hold_up(&self) -> StoreError {
        #[cfg(feature = "sentinel")]
        if let Self::Sentinels(primary) = self
            && let Some(error) = primary.hold_up()
        {
            return error;
        }
        StoreError::no_connection("no connection in time")
    }

    /// Whether the next connection may be to another server than the last.
    fn may_lead_elsewhere(&self) -> bool {
        !matches!(self, Self::Straight(_))
    }
}

pub(super) struct Connection {
    inner: MultiplexedConnection,
    /// How many calls there were since the last reply, and when the first of them was made.
    unanswered: u32,
    unanswered_since_us: u64,
    patience: Duration,
    broken: Arc<AtomicBool>,
    /// Whether the server is not the primary any more. All connections to it share this.
    pub(super) is_deposed: Arc<AtomicBool>,
}

impl Connection {
    /// Makes one.
    pub(super) async fn open(client: &Client, patience: Duration) -> Result<Self, StoreError> {
        let broken = Arc::new(AtomicBool::new(false));
        let closed = broken.clone();
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(patience.max(LEAST_CONNECTION_TIME)))
            .set_response_timeout(Some(patience))
            .set_push_sender(move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    closed.store(true, Relaxed);
                }
                Ok::<_, SendError>(())
            });
        let connecting = client.get_multiplexed_async_connection_with_config(&config);
        let inner = without_panic(connecting).await?;
        let is_deposed = Arc::default();
        Ok(Self { inner, unanswered: 0, unanswered_since_us: 0, patience, broken, is_deposed })
    }

    fn is_broken(&self) -> bool {
        // A call that was given up says nothing, but if the next one stays without a reply as well,
        // the connection may lead nowhere.
        let is_silent = || {
            let silent_us = Clock::system().now_us().saturating_sub(self.unanswered_since_us);
            Duration::from_micros(silent_us) > self.patience * 3 / 2
        };
        self.unanswered > 1 && is_silent()
            || self.broken.load(Relaxed)
            || self.is_deposed.load(Relaxed)
    }

    pub(super) async fn query(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        self.begin();
        // A future that is dropped here leaves a reply behind, which the connection throws away.
        let result = self.ask(command).await;
        self.note(&result);
        result
    }

    /// Sends commands in this order, and waits for all replies.
    #[cfg(feature = "cluster")]
    async fn query_all(&mut self, commands: &[Cmd]) -> Vec<Result<Value, StoreError>> {
        self.begin();
        let query = |command| {
            let mut inner = self.inner.clone();
            async move { send(&mut inner, command).await }
        };
        let results = join_all(commands.iter().map(query)).await;
        results.iter().for_each(|result| self.note(result));
        results
    }

    fn begin(&mut self) {
        if self.unanswered == 0 {
            self.unanswered_since_us = Clock::system().now_us();
        }
        self.unanswered += 1;
    }

    /// What a reply says of the connection.
    fn note(&mut self, result: &Result<Value, StoreError>) {
        match result {
            Err(StoreError::Late) => {}
            Err(error) if error.breaks_connection() => {
                self.broken.store(true, Relaxed);
                if error.is_from_replica() {
                    self.is_deposed.store(true, Relaxed);
                }
            }
            _ => self.unanswered = 0,
        }
    }

    /// Sends a command whose answer says nothing of the connection.
    pub(super) async fn ask(&mut self, command: &Cmd) -> Result<Value, StoreError> {
        send(&mut self.inner, command).await
    }
}

/// What is said to a server, and how, whatever its address says of that.
pub(super) fn with_settings(info: &ConnectionInfo) -> ConnectionInfo {
    let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP3);
    let tcp = TcpSettings::default().set_nodelay(true);
    info.clone().set_redis_settings(settings).set_tcp_settings(tcp)
}

/// An error reply is an error, too.
async fn send(connection: &mut MultiplexedConnection, command: &Cmd) -> Result<Value, StoreError> {
    let reply = connection.req_packed_command(command).await;
    reply.and_then(Value::extract_error).map_err(StoreError::from)
}

impl ManageConnection for Manager {
    type Connection = Connection;
    type Error = StoreError;

    async fn connect(&self) -> Result<Connection, StoreError> {
        match &self.way {
            Way::Straight(client) => Connection::open(client, self.patience).await,
            #[cfg(feature = "sentinel")]
            Way::Sentinels(primary) => primary.connect(&self.last_error).await,
        }
    }

    async fn is_valid(&self, _: &mut Connection) -> Result<(), StoreError> {
        Ok(())
    }

    fn has_broken(&self, connection: &mut Connection) -> bool {
        connection.is_broken()
    }
}

/// TLS panics where the application has installed no crypto provider, and the pool would wait for ever
/// for what a task did that panicked.
async fn without_panic<T>(
    connecting: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, RedisError> {
    let mut connecting = pin!(connecting);
    let failed = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or_default();
        let error = (ErrorKind::InvalidClientConfig, "it cannot be made", text.trim().to_owned());
        Poll::Ready(Err(error.into()))
    };
    poll_fn(|cx| {
        let poll = catch_unwind(AssertUnwindSafe(|| connecting.as_mut().poll(cx)));
        poll.unwrap_or_else(failed)
    })
    .await
}

/// Why no connection could be made of late. The pool only says that there was none in time.
#[derive(Clone, Debug, Default)]
pub(super) struct LastError(Arc<Mutex<Option<StoreError>>>);

impl LastError {
    fn take(&self) -> Option<StoreError> {
        self.0.lock().take()
    }
}

impl ErrorSink<StoreError> for LastError {
    fn sink(&self, error: StoreError) {
        *self.0.lock() = Some(error);
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<StoreError>> {
        Box::new(self.clone())
    }
}
