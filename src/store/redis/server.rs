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

impl Server {
    /// Runs a script with the arguments that `push_args` adds. It is sent as a whole only to a server
    /// that does not know it.
    pub(super) async fn run(
        &self,
        script: &KnownScript,
        push_args: impl Fn(&mut Cmd),
    ) -> Result<Value, StoreError> {
        let command = |name, script: &str| {
            let mut command = cmd(name);
            command.arg(script);
            push_args(&mut command);
            if let Some(clock) = &self.clock {
                command.arg(clock.now_us());
            }
            command
        };
        let result = match self.source.query(&command("EVALSHA", &script.hash)).await {
            // It surely did not run.
            Err(error) if error.is_no_script() => {
                self.source.query(&command("EVAL", script.text)).await
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
}
