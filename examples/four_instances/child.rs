//! Processes that end with this one.

use crate::BoxError;
use std::{
    env, io,
    process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::Duration,
};
use tokio::io::AsyncReadExt;

/// This program once more, in another role.
///
/// It is ended by closing its standard input, which the system does when this process ends in any
/// other way: after Ctrl-C, a panic or a kill as well. So no process is left behind.
pub(crate) struct Child {
    process: Process,
    stdin: Option<ChildStdin>,
}

/// How long a child may take to end when it should.
const PATIENCE: Duration = Duration::from_secs(2);

impl Child {
    pub(crate) fn start(arguments: &[&str]) -> Result<Self, BoxError> {
        let mut process = Command::new(env::current_exe()?)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdin = process.stdin.take();
        Ok(Self { process, stdin })
    }

    /// What it prints.
    pub(crate) fn stdout(&mut self) -> Option<ChildStdout> {
        self.process.stdout.take()
    }

    pub(crate) fn has_ended(&mut self) -> io::Result<bool> {
        Ok(self.process.try_wait()?.is_some())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let pause = Duration::from_millis(5);
        for _ in 0..PATIENCE.as_millis() / pause.as_millis() {
            if !matches!(self.has_ended(), Ok(false)) {
                return;
            }
            thread::sleep(pause);
        }
        // Nothing more can be done about one that cannot even be killed.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Waits, in a child, until the process that started it has ended or wants it to end.
pub(crate) async fn parent_is_done() {
    let mut stdin = tokio::io::stdin();
    // Nothing is ever written to it.
    while let Ok(1..) = stdin.read(&mut [0; 16]).await {}
}
