//! A core for the client and another for the servers. Left to itself, a system now and then has both on
//! one, and then each waits for the other's time slice: milliseconds that say nothing of either.

use crate::server::{Flavour, Server};
use std::{
    process::{Command, Stdio, id},
    sync::{LazyLock, Once},
    thread::available_parallelism,
};

/// A server on the first core, while this process, of which one thread does everything, is on the last.
pub(crate) fn start(flavour: Flavour) -> Server {
    let server = Server::start(flavour);
    keep_apart(&server);
    server
}

pub(crate) fn keep_apart(server: &Server) {
    keep(&id().to_string(), &LAST.to_string());
    keep(&server.info("process_id").expect("a server tells its process"), "0");
}

/// A server anywhere, and this process, too, with all the threads that it has.
pub(crate) fn start_anywhere(flavour: Flavour) -> Server {
    keep(&id().to_string(), &format!("0-{}", *LAST));
    Server::start(flavour)
}

/// The last core, found out before this process is kept on one.
static LAST: LazyLock<usize> =
    LazyLock::new(|| available_parallelism().map_or(0, |cores| cores.get() - 1));

fn keep(process: &str, cores: &str) {
    let mut taskset = Command::new("taskset");
    taskset.args(["-acp", cores, process]).stdout(Stdio::null());
    if !taskset.status().is_ok_and(|status| status.success()) {
        static SAID: Once = Once::new();
        SAID.call_once(|| println!("client and servers may share cores, for `taskset` failed"));
    }
}
