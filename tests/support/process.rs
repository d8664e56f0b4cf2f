//! Processes that run this test binary once more, and are told what to do line by line.
//!
//! A test that is a role for such processes begins with [`serve`], which returns at once in any other
//! process.

use super::{secs, server::signal};
use std::{
    env,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
};

/// Says to a process which test is its role.
const ROLE: &str = "TOLLGATE_TEST_ROLE";

/// What answers begin with, to tell them from what the test harness prints.
const ANSWER: &str = "> ";

/// A process, which does not outlive this: it is killed when this is dropped, and ends by itself when
/// its standard input does.
pub(crate) struct Process {
    child: Child,
    stdin: ChildStdin,
    answers: Receiver<String>,
}

impl Process {
    /// Starts a process in the role of a test, named as in `cargo test -- --exact`, with these variables
    /// in its environment.
    pub(crate) fn start(role: &str, variables: &[(&str, &str)]) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([role, "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = mpsc::channel();
        // Reading in a thread of its own is what allows to give up on an answer.
        thread::spawn(move || {
            let lines = stdout.lines().map_while(Result::ok);
            for answer in lines.filter_map(|line| Some(line.strip_prefix(ANSWER)?.to_owned())) {
                if sender.send(answer).is_err() {
                    return;
                }
            }
        });
        Self { child, stdin, answers }
    }

    /// Tells it something. It answers every line with one line.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    /// Its next answer.
    pub(crate) fn answer(&mut self) -> String {
        self.answers.recv_timeout(secs(60)).expect("the process answers")
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.answer()
    }

    /// Stops it as it stands.
    pub(crate) fn pause(&self) {
        signal(self.child.id(), "STOP");
    }

    pub(crate) fn resume(&self) {
        signal(self.child.id(), "CONT");
    }

    /// Ends it on the spot, as a crash would.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        // This works on a paused process, too, and does nothing to one that has ended.
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// In a process that was started in this role, answers every line until there are no more, and then ends
/// the process. In any other process, does nothing.
pub(crate) fn serve<A>(role: &str, start: impl FnOnce() -> A)
where
    A: FnMut(&str) -> String,
{
    if env::var(ROLE).is_ok_and(|own| own == role) {
        let mut answer = start();
        // The harness has begun a line.
        println!();
        for line in std::io::stdin().lines() {
            println!("{ANSWER}{}", answer(&line.unwrap()));
        }
        std::process::exit(0);
    }
}

/// A variable from the environment of a process that was started with it.
pub(crate) fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}
