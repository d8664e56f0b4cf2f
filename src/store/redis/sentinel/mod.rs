//! The primary that sentinels name: who it is, and connections to it.
//!
//! A connection is made to whom the sentinels name at the time. It counts when the server itself says
//! that it is the primary. Once a connection to another server counts, or the primary says that it is
//! none any more, all connections to it are over.
//!
//! A primary that was replaced in good order goes on as if nothing had happened, for some ten seconds,
//! until the sentinels turn it into a replica. What it decides then is lost. So the sentinels are also
//! asked every now and then.

mod ask;
mod given;

pub(super) use given::Given;

use super::{
    connection::{Connection, LastError},
    error::StoreError,
};
use crate::{clock::Clock, random::Dice};
use ask::{Answers, Sentinel};
use bb8::ErrorSink;
use redis::{Client, ConnectionAddr, ConnectionInfo, Value, cmd};
use std::{
    fmt,
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};
use tokio::{
    runtime::Handle,
    sync::{Mutex, watch},
    time::sleep,
};

/// A host or an IP address, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    host: String,
    port: u16,
}

pub(super) struct Primary {
    name: Arc<str>,
    sentinels: Vec<Arc<Sentinel>>,
    /// How to speak to the primary. The host and the port are of no account.
    settings: ConnectionInfo,
    patience: Duration,
    /// What the sentinels said last, and when. The lock is held by whoever asks them.
    last: Mutex<Option<(u64, Result<Address, StoreError>)>>,
    reign: watch::Sender<Reign>,
    next_look_us: AtomicU64,
    /// Whether none of the sentinels answered.
    is_blind: AtomicBool,
    dice: Dice,
}

/// The time for which a server is the primary.
#[derive(Debug, Default)]
struct Reign {
    number: u64,
    /// Who it is, once that is known.
    address: Option<Address>,
    is_over: Arc<AtomicBool>,
}

/// While no connection can be made, the next try comes after so long, then twice as long, up to the
/// longest. Each is varied by up to a half.
const FIRST_PAUSE_US: u64 = 10_000;
const LONGEST_PAUSE_US: u64 = 500_000;

/// While all is well, the sentinels are asked so often, varied by up to a fifth.
const LOOK_EVERY_US: u64 = 1_000_000;

impl Primary {
    pub(super) fn new(
        name: Arc<str>,
        sentinels: Vec<Client>,
        settings: ConnectionInfo,
        patience: Duration,
    ) -> Self {
        let sentinels = sentinels.into_iter().map(Sentinel::new).map(Arc::new).collect();
        Self {
            name,
            sentinels,
            settings,
            patience,
            last: Mutex::default(),
            reign: watch::Sender::default(),
            next_look_us: AtomicU64::new(0),
            is_blind: AtomicBool::new(false),
            dice: Dice::new(),
        }
    }

    /// A connection to the primary. Tries again for as long as somebody may wait for it.
    pub(super) async fn connect(&self, last_error: &LastError) -> Result<Connection, StoreError> {
        let time = Clock::system().stopwatch();
        let mut pause_us = FIRST_PAUSE_US;
        loop {
            let error = match self.try_connect().await {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            if Duration::from_micros(time.elapsed_us()) > self.patience * 9 / 10 {
                return Err(error);
            }
            last_error.sink(error);
            let pause = pause_us / 2 + self.dice.throw(pause_us);
            sleep(Duration::from_micros(pause)).await;
            pause_us = (2 * pause_us).min(LONGEST_PAUSE_US);
        }
    }

    /// Looks, in the background, whether there is another primary, if that is due.
    pub(super) fn look_again(self: &Arc<Self>) {
        let now_us = Clock::system().now_us();
        let due_us = self.next_look_us.load(Relaxed);
        // The clock may have gone back.
        if now_us < due_us && due_us - now_us < 2 * LOOK_EVERY_US {
            return;
        }
        let next_us = now_us + LOOK_EVERY_US * 4 / 5 + self.dice.throw(LOOK_EVERY_US * 2 / 5);
        let is_mine = self.next_look_us.compare_exchange(due_us, next_us, Relaxed, Relaxed).is_ok();
        // Who has none yet is about to find one.
        if is_mine && self.reign.borrow().address.is_some() {
            let primary = self.clone();
            Handle::current().spawn(async move { primary.look().await });
        }
    }

    /// Whether it is the sentinels that are waited for.
    pub(super) fn hold_up(&self) -> Option<StoreError> {
        let is_asking = self.last.try_lock().is_err();
        is_asking.then(|| self.none("no sentinel has named one yet".to_owned()))
    }

    async fn look(&self) {
        let Ok(address) = self.find().await else { return };
        if self.reign.borrow().address.as_ref() != Some(&address) {
            // If this succeeds, the old one's reign is over. If not, nothing has changed.
            let _ = self.try_connect().await;
        }
    }

    async fn try_connect(&self) -> Result<Connection, StoreError> {
        let number = self.reign.borrow().number;
        let address = self.find().await?;
        let mut reigns = self.reign.subscribe();
        let mut connecting = pin!(self.connect_to(&address));
        let mut changed = pin!(reigns.wait_for(|reign| reign.number != number));
        // Who does not answer should not be waited for when another one is the primary.
        let mut connection = poll_fn(|cx| match connecting.as_mut().poll(cx) {
            Poll::Pending if changed.as_mut().poll(cx).is_ready() => Poll::Ready(Err(self.moved())),
            poll => poll,
        })
        .await?;
        connection.is_deposed = self.crown(number, &address)?;
        Ok(connection)
    }

    async fn connect_to(&self, address: &Address) -> Result<Connection, StoreError> {
        let client = Client::open(self.settings_for(address))?;
        let mut connection = Connection::open(&client, self.patience).await?;
        let role = match connection.ask(&cmd("ROLE")).await {
            Ok(role) => role,
            // Whoever may not ask finds out by READONLY.
            Err(StoreError::Refused { code, .. }) if code == "NOPERM" => return Ok(connection),
            Err(error) => return Err(error),
        };
        let Value::Array(role) = role else { return Err(StoreError::unreadable()) };
        match role.first() {
            Some(Value::BulkString(role)) if role == b"master" => Ok(connection),
            _ => {
                self.depose(address);
                Err(self.none(format!("they name {address}, which says that it is a replica")))
            }
        }
    }

    fn settings_for(&self, Address { host, port }: &Address) -> ConnectionInfo {
        let (host, port) = (host.clone(), *port);
        let address = match self.settings.addr().clone() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        self.settings.clone().set_addr(address)
    }

    /// Whom the sentinels name. Those who want to know at the same time ask once.
    async fn find(&self) -> Result<Address, StoreError> {
        let clock = Clock::system();
        let since_us = clock.now_us();
        let mut last = self.last.lock().await;
        // Nor does a clock that was put back make an old answer a new one.
        if let Some((told_us, told)) = &*last
            && (since_us..since_us + 2 * LOOK_EVERY_US).contains(told_us)
        {
            return told.clone();
        }
        let answers = Answers::of(&self.sentinels, &self.name, self.patience).await;
        let told = self.judge(answers);
        *last = Some((clock.now_us(), told.clone()));
        told
    }

    fn judge(&self, answers: Answers) -> Result<Address, StoreError> {
        let is_blind = answers.nobody_answered();
        let was_blind = self.is_blind.swap(is_blind, Relaxed);
        let result = answers.named().map_err(|message| self.none(message));
        let Err(error) = result else { return result };
        let reign = self.reign.borrow();
        match &reign.address {
            // More connections to it may be needed, and nobody says that it is none any more.
            Some(address) if is_blind && !reign.is_over.load(Relaxed) => {
                if !was_blind {
                    tracing::warn!(
                        target: "tollgate",
                        %error,
                        %address,
                        "no sentinel answers; the primary that they named last stays in use"
                    );
                }
                Ok(address.clone())
            }
            _ => Err(error),
        }
    }

    /// A server was found to be the primary by one who has looked for it since a reign. Tells what
    /// ends its own.
    fn crown(&self, since: u64, address: &Address) -> Result<Arc<AtomicBool>, StoreError> {
        let (mut is_over, mut before) = (None, None);
        self.reign.send_if_modified(|reign| {
            if reign.address.as_ref() == Some(address) && !reign.is_over.load(Relaxed) {
                is_over = Some(reign.is_over.clone());
                return false;
            }
            // Somebody else has found another one since, and may know better.
            if reign.number != since {
                return false;
            }
            reign.is_over.store(true, Relaxed);
            before = reign.address.take();
            let new = Arc::<AtomicBool>::default();
            is_over = Some(new.clone());
            *reign = Reign { number: since + 1, address: Some(address.clone()), is_over: new };
            true
        });
        if let Some(before) = before.filter(|before| before != address) {
            tracing::info!(target: "tollgate", %before, now = %address, "there is another primary");
        }
        is_over.ok_or_else(|| self.moved())
    }

    /// A server says that it is no primary.
    fn depose(&self, address: &Address) {
        let reign = self.reign.borrow();
        if reign.address.as_ref() == Some(address) {
            reign.is_over.store(true, Relaxed);
        }
    }

    fn moved(&self) -> StoreError {
        self.none("it has changed just now".to_owned())
    }

    fn none(&self, message: String) -> StoreError {
        StoreError::NoPrimary { name: self.name.to_string(), message }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}
