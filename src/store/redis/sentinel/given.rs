//! What a store was told about its sentinels and its primary.

use super::{
    super::{ConfigError, connection::with_settings},
    Primary,
};
use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError};
use std::time::Duration;

#[derive(Default)]
pub(in super::super) struct Given {
    pub(in super::super) name: String,
    pub(in super::super) sentinels: Vec<Result<ConnectionInfo, RedisError>>,
    pub(in super::super) primary: Option<Result<ConnectionInfo, RedisError>>,
}

impl Given {
    pub(in super::super) fn check(self, patience: Duration) -> Result<Primary, ConfigError> {
        let wrong = |message: String| ConfigError::Sentinel { message };
        if self.sentinels.is_empty() {
            let message = if self.name.is_empty() {
                "`primary` is for a store that was begun with `RedisStore::sentinel`"
            } else {
                "there are none; give at least one, like `redis://sentinel-1:26379`"
            };
            return Err(wrong(message.to_owned()));
        }
        if self.name.is_empty() {
            return Err(wrong("the primary has no name; it is often `mymaster`".to_owned()));
        }
        let mut clients = Vec::with_capacity(self.sentinels.len());
        for (index, sentinel) in self.sentinels.into_iter().enumerate() {
            let client = sentinel.and_then(|info| {
                // They have no databases.
                let settings = info.redis_settings().clone().set_db(0);
                Client::open(with_settings(&info.set_redis_settings(settings)))
            });
            clients.push(client.map_err(|error| {
                let number = index + 1;
                wrong(format!(
                    "the address of number {number} is none: {error}; it has to be like \
                     `redis://user:password@sentinel-1:26379`"
                ))
            })?);
        }
        let nowhere = || ConnectionAddr::Tcp(String::new(), 0).into_connection_info();
        let settings = match self.primary.unwrap_or_else(nowhere) {
            Ok(info) if matches!(info.addr(), ConnectionAddr::Unix(_)) => {
                Err("it cannot be a socket".to_owned())
            }
            Ok(info) => Client::open(with_settings(&info))
                .map(|client| client.get_connection_info().clone())
                .map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        let settings = settings.map_err(|error| {
            wrong(format!(
                "how to speak to the primary cannot be told from what `primary` was given: {error}; \
                 it has to be like `redis://user:password@primary/0`, whose host is not used"
            ))
        })?;
        Ok(Primary::new(self.name.into(), clients, settings, patience))
    }
}
