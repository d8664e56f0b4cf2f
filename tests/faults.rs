//! What happens when the server is not well.

mod support;
