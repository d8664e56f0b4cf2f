//! What limitador's code names of RocksDB, and nothing behind it: no database can be opened.

use std::{error, fmt, marker::PhantomData, path::Path};

pub type DB = DBWithThreadMode<MultiThreaded>;

/// There is none.
pub struct DBWithThreadMode<T>(Never, PhantomData<T>);

pub struct MultiThreaded;

enum Never {}

type Bytes = Box<[u8]>;

impl<T> DBWithThreadMode<T> {
    pub fn open<P: AsRef<Path>>(_: &Options, _: P) -> Result<Self, Error> {
        Err(Error)
    }

    pub fn get<K: AsRef<[u8]>>(&self, _: K) -> Result<Option<Vec<u8>>, Error> {
        match self.0 {}
    }

    pub fn merge<K: AsRef<[u8]>, V: AsRef<[u8]>>(&self, _: K, _: V) -> Result<(), Error> {
        match self.0 {}
    }

    pub fn delete<K: AsRef<[u8]>>(&self, _: K) -> Result<(), Error> {
        match self.0 {}
    }

    pub fn iterator(&self, _: IteratorMode<'_>) -> std::vec::IntoIter<Result<(Bytes, Bytes), Error>> {
        match self.0 {}
    }

    pub fn prefix_iterator<P: AsRef<[u8]>>(
        &self,
        _: P,
    ) -> std::vec::IntoIter<Result<(Bytes, Bytes), Error>> {
        match self.0 {}
    }
}

pub enum IteratorMode<'a> {
    Start,
    End,
    From(&'a [u8], ()),
}

pub enum DBCompressionType {
    None,
    Bz2,
}

pub enum CompactionDecision {
    Keep,
    Remove,
}

#[derive(Default)]
pub struct Options;

impl Options {
    pub fn create_if_missing(&mut self, _: bool) {}

    pub fn set_compression_type(&mut self, _: DBCompressionType) {}

    pub fn set_compaction_filter(
        &mut self,
        _: &str,
        _: impl FnMut(u32, &[u8], &[u8]) -> CompactionDecision + Send + 'static,
    ) {
    }

    pub fn set_merge_operator_associative(
        &mut self,
        _: &str,
        _: impl Fn(&[u8], Option<&[u8]>, &MergeOperands) -> Option<Vec<u8>> + Send + Sync + Clone + 'static,
    ) {
    }
}

pub struct MergeOperands(Never);

impl<'a> IntoIterator for &'a MergeOperands {
    type Item = &'a [u8];
    type IntoIter = std::vec::IntoIter<&'a [u8]>;

    fn into_iter(self) -> Self::IntoIter {
        match self.0 {}
    }
}

#[derive(Clone, Debug)]
pub struct Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    TimedOut,
    TryAgain,
    NotSupported,
}

impl Error {
    pub fn kind(&self) -> ErrorKind {
        ErrorKind::NotSupported
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RocksDB is not here")
    }
}

impl error::Error for Error {}
