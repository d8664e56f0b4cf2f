//! What a request passes before anybody counts it.

use crate::{
    decision::Reason,
    priority::Classify,
    shed::{Aboard, Shed, Shedders},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

/// Load shedders, and what tells them how important a request is.
pub(super) struct Gate<R: ?Sized> {
    pub(super) shedders: Shedders,
    pub(super) classify: Box<dyn Classify<R>>,
}

impl<R: ?Sized + 'static> Gate<R> {
    /// Lets a request in, or says why not.
    pub(super) fn admit(&self, request: &R) -> Result<Aboard, Reason> {
        let classify = AssertUnwindSafe(|| self.classify.classify(request));
        let priority = catch_unwind(classify).map_err(|_| Reason::Faulty {
            policy: self.name(),
            message: "the function that tells the priority of requests panicked".to_owned(),
        })?;
        self.shedders.admit(priority).map_err(|Shed { shedder, retry_after_us }| {
            let retry_after = Duration::from_micros(retry_after_us);
            Reason::Shed { shedder, priority, retry_after }
        })
    }

    /// The name of the first shedder.
    pub(super) fn name(&self) -> &'static str {
        self.shedders.names().next().unwrap_or_default()
    }
}
