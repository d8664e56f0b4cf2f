//! The server, as a store sees it: scripts are run there, each in one round trip.

use super::{connection::Source, error::StoreError, scripts::KnownScript};
use crate::clock::Clock;
use redis::{Cmd, Value, cmd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[derive(Debug)]
pub(super) struct Server {
    pub(super) source: Source,
    /// The time that is sent along in place of the server's, in tests.
    pub(super) clock: Option<Clock>,
    /// Whether it is known to write many keys with one command.
    pub(super) has_msetex: AtomicBool,
}

/// What a call for one request takes, which is the one that somebody waits for.
const ARGS: usize = 8;
const BYTES: usize = 256;

impl Server {
    /// Runs a script with the arguments that `push_args` adds. It is sent as a whole only to a server
    /// that does not know it.
    pub(super) async fn run(
        &self,
        script: &KnownScript,
        push_args: impl Fn(&mut Cmd),
    ) -> Result<Value, StoreError> {
        let by_hash = self.command("EVALSHA", &script.hash, &push_args);
        let result = match self.source.query(&by_hash).await {
            // It surely did not run.
            Err(error) if error.is_no_script() => {
                self.source.query(&self.command("EVAL", script.text, &push_args)).await
            }
            result => result,
        };
        if let Err(error) = &result
            && error.is_about_command("msetex")
        {
            // This is another server than the one that had it.
            self.has_msetex.store(false, Relaxed);
        }
        result
    }

    fn command(&self, name: &str, script: &str, push_args: impl Fn(&mut Cmd)) -> Cmd {
        let mut command = Cmd::with_capacity(ARGS, BYTES);
        command.arg(name).arg(script);
        push_args(&mut command);
        if let Some(clock) = &self.clock {
            command.arg(clock.now_us());
        }
        command
    }
}

#[cfg(feature = "cluster")]
impl Server {
    /// Runs a script once for each of these, at the same time.
    pub(super) async fn run_all<T>(
        &self,
        script: &KnownScript,
        calls: &[T],
        push_args: impl Fn(&mut Cmd, &T),
    ) -> Vec<Result<Value, StoreError>> {
        let command = |name, text: &str, call: &T| {
            self.command(name, text, |command: &mut Cmd| push_args(command, call))
        };
        let by_hash = calls.iter().map(|call| command("EVALSHA", &script.hash, call)).collect();
        let mut results = self.source.query_all(by_hash).await;
        let unknown =
            |result: &Result<_, StoreError>| result.as_ref().is_err_and(StoreError::is_no_script);
        // The first of them makes it known.
        for (result, call) in results.iter_mut().zip(calls).filter(|(result, _)| unknown(result)) {
            *result = self.run(script, |command: &mut Cmd| push_args(command, call)).await;
        }
        results
    }

    /// Runs a script for a slot that is on its way to this node.
    pub(super) async fn run_asking(
        &self,
        script: &KnownScript,
        push_args: impl Fn(&mut Cmd),
    ) -> Result<Value, StoreError> {
        let commands = vec![cmd("ASKING"), self.command("EVAL", script.text, push_args)];
        let last = self.source.query_all(commands).await.pop();
        last.unwrap_or_else(|| Err(StoreError::unreadable()))
    }
}
