//! Handles. The simulator looks up each handle of the program, and never dereferences it.

use crate::error::Error;
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock, RwLock},
};

/// Existing objects of one type, by their handles. A handle is the object's address.
#[derive(Debug)]
pub struct Registry<T>(LazyLock<RwLock<HashMap<usize, Arc<T>>>>);

impl<T> Registry<T> {
    pub const fn new() -> Self {
        Self(LazyLock::new(|| RwLock::new(HashMap::new())))
    }

    /// Registers `object`, and returns its handle.
    pub fn add(&self, object: Arc<T>) -> usize {
        let handle = handle_of(&object);
        self.0.write().unwrap_or_else(|e| e.into_inner()).insert(handle, object);
        handle
    }

    pub fn get(&self, handle: usize) -> Result<Arc<T>, Error> {
        self.find(handle).ok_or(Error::INVALID_HANDLE)
    }

    pub fn find(&self, handle: usize) -> Option<Arc<T>> {
        self.0.read().unwrap_or_else(|e| e.into_inner()).get(&handle).cloned()
    }

    /// Removes a handle. The object lives until running work no longer needs the object.
    pub fn remove(&self, handle: usize) -> Result<Arc<T>, Error> {
        self.0.write().unwrap_or_else(|e| e.into_inner()).remove(&handle).ok_or(Error::INVALID_HANDLE)
    }

    pub fn all(&self) -> Vec<Arc<T>> {
        self.0.read().unwrap_or_else(|e| e.into_inner()).values().cloned().collect()
    }
}

/// Returns the handle of an object that is or will be in a [`Registry`].
pub fn handle_of<T>(object: &Arc<T>) -> usize {
    Arc::as_ptr(object) as usize
}
