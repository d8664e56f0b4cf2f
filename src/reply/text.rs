//! Header values in the making.

use http::HeaderValue;

/// The text of a header value. It stays on the stack unless it is unusually long, so that the
/// finished value is the only allocation.
pub(super) struct Text {
    stack: [u8; STACK],
    /// All of it once it is longer than the stack has room for, and empty before.
    heap: Vec<u8>,
    len: usize,
}

/// The longest policy name with two numbers fits, and so do most lists of policies.
const STACK: usize = 128;

impl Text {
    #[inline]
    pub(super) const fn new() -> Self {
        Self { stack: [0; STACK], heap: Vec::new(), len: 0 }
    }

    /// A whole value that is one number.
    pub(super) fn number(number: u64) -> HeaderValue {
        let mut text = Self::new();
        text.push_number(number);
        text.value()
    }

    #[inline]
    pub(super) fn push_str(&mut self, text: &str) {
        self.push_bytes(text.as_bytes());
    }

    #[inline]
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        self.space(bytes.len()).copy_from_slice(bytes);
    }

    #[inline]
    pub(super) fn push_number(&mut self, number: u64) {
        self.push_str(itoa::Buffer::new().format(number));
    }

    #[inline]
    pub(super) fn value(&self) -> HeaderValue {
        let bytes = self.stack.get(..self.len).unwrap_or(&self.heap);
        HeaderValue::from_bytes(bytes).expect("only printable ASCII is ever written")
    }

    /// The next `len` bytes, to be written.
    #[inline]
    fn space(&mut self, len: usize) -> &mut [u8] {
        let start = self.len;
        self.len += len;
        if self.len > STACK {
            return self.space_on_heap(start);
        }
        &mut self.stack[start..self.len]
    }

    #[cold]
    fn space_on_heap(&mut self, start: usize) -> &mut [u8] {
        if self.heap.is_empty() {
            self.heap.extend_from_slice(&self.stack[..start]);
        }
        self.heap.resize(self.len, 0);
        &mut self.heap[start..]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    proptest! {
        #[test]
        fn numbers_are_written_as_the_standard_library_does(number: u64, bits in 0..64) {
            let number = number >> bits;
            prop_assert_eq!(Text::number(number), number.to_string());
        }

        #[test]
        fn text_of_any_length_is_kept(parts in vec("[ -~]{0,60}", 0..12)) {
            let mut text = Text::new();
            for part in &parts {
                text.push_str(part);
            }
            prop_assert_eq!(text.value(), parts.concat());
        }
    }
}
