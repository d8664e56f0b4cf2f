//! Names that every header can carry, kept once each.

use parking_lot::Mutex;
use std::{borrow::Cow, collections::BTreeSet};

/// Whether it is of the form `[A-Za-z][A-Za-z0-9_.-]{0,63}`.
pub(crate) fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    let first = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic());
    let rest = bytes.all(|byte| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte));
    first && rest && text.len() <= 64
}

/// Names are handed out in every decision, so they live as long as the process. The same name is
/// kept once, however many stacks use it.
pub(crate) fn intern(name: Cow<'static, str>) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let name = match name {
        Cow::Borrowed(name) => return name,
        Cow::Owned(name) => name,
    };
    let mut names = NAMES.lock();
    match names.get(name.as_str()) {
        Some(known) => known,
        None => {
            let name = name.leak();
            names.insert(name);
            name
        }
    }
}
