//! Sentinels, and what is made of their answers.
//!
//! All are asked at the same time. One that was paused or cut off may not know of the latest
//! fail-over, so more than half of them have to agree; but those that say nothing are not waited for
//! when others have answered.

use super::{
    super::{connection::Connection, error::StoreError},
    Address,
};
use parking_lot::Mutex;
use redis::{Client, Value, cmd, from_redis_value};
use std::{sync::Arc, time::Duration};
use tokio::{task::JoinSet, time::timeout};

pub(super) struct Sentinel {
    client: Client,
    /// The connection that it answered on last.
    kept: Mutex<Option<Connection>>,
}

/// Sentinels are given so long to answer, at least, with the time to connect to them.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);

/// When one has answered, the others are waited for so long at a time. Only new connections take longer
/// for it, while half of the sentinels or more are silent.
const GRACE: Duration = Duration::from_millis(100);

impl Sentinel {
    pub(super) fn new(client: Client) -> Self {
        Self { client, kept: Mutex::default() }
    }

    /// The address of the primary, if it knows one by that name.
    async fn ask(&self, name: &str, patience: Duration) -> Result<Option<Address>, StoreError> {
        let kept = self.kept.lock().take();
        if let Some(connection) = kept
            && let Ok(address) = self.ask_by(connection, name).await
        {
            return Ok(address);
        }
        // It may have been restarted.
        self.ask_by(Connection::open(&self.client, patience).await?, name).await
    }

    async fn ask_by(
        &self,
        mut connection: Connection,
        name: &str,
    ) -> Result<Option<Address>, StoreError> {
        let mut command = cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(name);
        let address = match connection.ask(&command).await? {
            Value::Nil => None,
            reply => {
                let unreadable =
                    |_| StoreError::no_connection("its answer cannot be read; is it a sentinel?");
                let (host, port) = from_redis_value(reply).map_err(unreadable)?;
                Some(Address { host, port })
            }
        };
        *self.kept.lock() = Some(connection);
        Ok(address)
    }
}

/// What sentinels said.
#[derive(Default)]
pub(super) struct Answers {
    asked: usize,
    /// Who was named, and by how many.
    named: Vec<(Address, usize)>,
    /// How many know nobody by that name.
    unaware: usize,
    /// How many did not answer, or said something else.
    failed: usize,
    error: Option<StoreError>,
}

impl Answers {
    pub(super) async fn of(
        sentinels: &[Arc<Sentinel>],
        name: &Arc<str>,
        patience: Duration,
    ) -> Self {
        let patience = patience.max(LEAST_PATIENCE);
        let mut asking = JoinSet::new();
        for sentinel in sentinels {
            let (sentinel, name) = (sentinel.clone(), name.clone());
            asking.spawn(async move {
                let answer = timeout(patience, sentinel.ask(&name, patience)).await;
                answer.unwrap_or(Err(StoreError::Late))
            });
        }
        let mut answers = Self { asked: sentinels.len(), ..Self::default() };
        while !answers.are_enough() {
            let patience = if answers.named.is_empty() { patience * 2 } else { GRACE };
            let Ok(Some(answer)) = timeout(patience, asking.join_next()).await else { break };
            answers.add(answer.unwrap_or(Err(StoreError::Late)));
        }
        answers
    }

    fn add(&mut self, answer: Result<Option<Address>, StoreError>) {
        match answer {
            Ok(Some(address)) => match self.named.iter_mut().find(|(named, _)| *named == address) {
                Some((_, count)) => *count += 1,
                None => self.named.push((address, 1)),
            },
            Ok(None) => self.unaware += 1,
            Err(error) => {
                self.failed += 1;
                self.error = Some(error);
            }
        }
    }

    fn are_enough(&self) -> bool {
        self.named.iter().any(|(_, count)| 2 * count > self.asked)
    }

    pub(super) fn nobody_answered(&self) -> bool {
        self.named.is_empty() && self.unaware == 0
    }

    /// Whom most of them name, or why nobody.
    pub(super) fn named(mut self) -> Result<Address, String> {
        // Of as many, it is who was named first.
        self.named.reverse();
        if let Some((address, _)) = self.named.into_iter().max_by_key(|(_, count)| *count) {
            return Ok(address);
        }
        let mut message = format!("{} of {} sentinels know no such name", self.unaware, self.asked);
        if let Some(error) = self.error {
            message = format!("{message}, {} cannot be asked, one for this: {error}", self.failed);
        }
        Err(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(asked: usize, named: &[u16], unaware: usize, failed: usize) -> Answers {
        let mut answers = Answers { asked, ..Answers::default() };
        for port in named {
            answers.add(Ok(Some(Address { host: "h".to_owned(), port: *port })));
        }
        (0..unaware).for_each(|_| answers.add(Ok(None)));
        (0..failed).for_each(|_| answers.add(Err(StoreError::Late)));
        answers
    }

    fn port(answers: Answers) -> u16 {
        answers.named().unwrap().port
    }

    #[test]
    fn whom_most_name_it_is() {
        assert!(answers(3, &[1, 1], 0, 0).are_enough());
        assert!(answers(1, &[1], 0, 0).are_enough());
        for named in [&[1][..], &[1, 2], &[]] {
            assert!(!answers(3, named, 0, 0).are_enough());
        }
        assert!(!answers(4, &[1, 1], 0, 0).are_enough());
        assert_eq!(port(answers(3, &[1, 2, 2], 0, 0)), 2);
        assert_eq!(port(answers(3, &[2, 1], 0, 0)), 2);
        assert_eq!(port(answers(3, &[1], 1, 1)), 1);
    }

    #[test]
    fn why_there_is_none_is_told() {
        assert_eq!(
            answers(3, &[], 3, 0).named().unwrap_err(),
            "3 of 3 sentinels know no such name"
        );
        let message = answers(3, &[], 1, 2).named().unwrap_err();
        assert!(message.starts_with("1 of 3"), "{message}");
        assert!(message.contains("2 cannot be asked, one for this: no answer"), "{message}");
        assert!(answers(3, &[], 0, 3).nobody_answered());
        assert!(!answers(3, &[], 1, 2).nobody_answered());
    }
}
