//! A task that is there as long as it is needed and a runtime runs it.

use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
};
use tokio::{runtime::Handle, task::AbortHandle};

#[derive(Debug, Default)]
pub(crate) struct Background {
    is_running: Arc<AtomicBool>,
    /// The task, or the last one.
    task: Mutex<Option<AbortHandle>>,
}

impl Background {
    /// Starts a task unless it runs. Where there is no runtime it waits for a call from one; after its
    /// runtime was shut down, for a call from another.
    #[inline]
    pub(crate) fn keep<F>(&self, make: impl FnOnce() -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        if !self.is_running.load(Relaxed) {
            self.start(make);
        }
    }

    #[cold]
    fn start<F>(&self, make: impl FnOnce() -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut task = self.task.lock();
        if self.is_running.load(Relaxed) {
            return;
        }
        self.is_running.store(true, Relaxed);
        let running = Running(self.is_running.clone());
        let future = make();
        let spawned = runtime.spawn(async move {
            let _running = running;
            future.await;
        });
        *task = Some(spawned.abort_handle());
    }

    /// Ends the task.
    pub(crate) fn abort(&self) {
        if let Some(task) = self.task.lock().take() {
            task.abort();
        }
    }
}

/// Says so when the task is gone.
struct Running(Arc<AtomicBool>);

impl Drop for Running {
    fn drop(&mut self) {
        // A task that panicked, as in a runtime without a timer, would do so again for every request.
        if !thread::panicking() {
            self.0.store(false, Relaxed);
        }
    }
}
