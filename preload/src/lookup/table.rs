//! The table of hooks and entries by the *address* of the real function.

use super::thunks;
use crate::{
    driver::{self, entries, hook, types::*},
    sys::once::OnceBox,
};
use alloc::{boxed::Box, vec::Vec};
use core::ffi::c_void;

/// Returns the address that the program gets for a function that the driver exports.
pub fn answer(real: *mut c_void) -> *mut c_void {
    let hook = hook_of(real);
    // If the driver's own symbol table has been redirected, `real` is already a hook or an entry.
    let is_ours = |address| table().is_some_and(|table| table.iter().any(|(_, hook)| *hook == address));
    let is_known = hook != real || is_ours(real as usize) || entries::entry_exported_at(real as usize).is_some();
    if is_known || entries::is_nonblocking(real as usize) { hook } else { thunks::guard(real) }
}

/// Returns the hook or the entry of a real function, or the function itself if it has neither.
pub fn hook_of(real: *mut c_void) -> *mut c_void {
    let Some(table) = table() else { return real };
    match table.binary_search_by_key(&(real as usize), |(real, _)| *real) {
        Ok(at) => table.get(at).map_or(real, |(_, hook)| *hook as *mut c_void),
        Err(_) => real,
    }
}

/// Returns sorted pairs of a real address and its hook or entry. Returns `None` while the driver is
/// not loaded. The first call after that builds the table.
pub fn table() -> Option<&'static [(usize, usize)]> {
    static TABLE: OnceBox<Vec<(usize, usize)>> = OnceBox::new();
    if TABLE.get().is_none() {
        driver::handle_if_loaded()?;
        let mut table: Vec<_> = hook::all().filter_map(|h| Some((h.real.find()?, h.hook as usize))).collect();
        table.extend(entries::pairs());
        table.sort_by_key(|(real, _)| *real);
        table.dedup_by_key(|(real, _)| *real); // if a function has two names, the pair with a hook stays
        let _ = TABLE.set(Box::new(table));
    }
    TABLE.get().map(Vec::as_slice)
}

/// Replaces the function returned by `cuGetProcAddress` with its hook.
///
/// # Safety
/// `function` is NULL or the pointer that the program passed to `cuGetProcAddress`.
pub unsafe fn replace(result: CUresult, function: *mut *mut c_void) -> CUresult {
    if result == SUCCESS && !function.is_null() {
        // SAFETY: the driver has just written there. The value may be NULL.
        unsafe {
            if !(*function).is_null() {
                *function = answer(*function);
            }
        }
    }
    result
}
