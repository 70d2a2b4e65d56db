//! Locks based on futexes. They have no poisoning, and make a system call only under contention.
//!
//! Each lock has a [`Rank`]. Debug builds check that threads take locks in rank order; release
//! builds do not.

use super::rank::Ranked;
pub use super::rank::{Held, Rank};
use core::ops::{Deref, DerefMut};
use rustix_futex_sync as futex;

#[derive(Debug)]
pub struct Mutex<T> {
    rank: Ranked,
    inner: futex::Mutex<T>,
}

#[derive(Debug)]
pub struct RwLock<T> {
    rank: Ranked,
    inner: futex::RwLock<T>,
}

/// A held lock.
#[derive(Debug)]
pub struct Guard<G> {
    inner: G,
    _held: Held,
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    #[inline]
    fn deref(&self) -> &Self::Target {
        &self.inner
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.inner
    }
}

/// Marks the calling thread as waiting for the client's thread until the result is dropped. The calling
/// thread must hold no lock that the client's thread takes.
#[inline]
pub fn await_client_thread() -> Held {
    const RANK: Ranked = Ranked::new(Rank::ClientThread);
    RANK.take_anew()
}

/// Marks the calling thread as the client's thread until the result is dropped.
pub fn on_client_thread() -> Held {
    await_client_thread()
}

impl<T> Mutex<T> {
    pub const fn new(rank: Rank, value: T) -> Self {
        Self { rank: Ranked::new(rank), inner: futex::Mutex::new(value) }
    }

    #[inline]
    pub fn lock(&self) -> Guard<futex::MutexGuard<'_, T>> {
        let held = self.rank.take();
        Guard { inner: self.inner.lock(), _held: held }
    }
}

impl<T> RwLock<T> {
    pub const fn new(rank: Rank, value: T) -> Self {
        Self { rank: Ranked::new(rank), inner: futex::RwLock::new(value) }
    }

    /// Must not be called by a thread that already holds the lock for reading. If another thread waited to
    /// write in between, both threads would wait for ever.
    #[inline]
    pub fn read(&self) -> Guard<futex::RwLockReadGuard<'_, T>> {
        let held = self.rank.take();
        Guard { inner: self.inner.read(), _held: held }
    }

    #[inline]
    pub fn write(&self) -> Guard<futex::RwLockWriteGuard<'_, T>> {
        let held = self.rank.take();
        Guard { inner: self.inner.write(), _held: held }
    }
}
