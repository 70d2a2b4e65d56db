//! Aliases: addresses at which the program itself has mapped a range, each with the access rights that the program set. Chunks
//! on the GPU are *shown* at every alias; before a chunk leaves, it is hidden at all of them.

use crate::driver::{self, check, context::is_dead, types::*};
use alloc::vec::Vec;

/// The aliases of one range.
#[derive(Debug, Default)]
pub struct Aliases {
    list: Vec<Alias>,
    /// The chunks that are mapped now.
    shown: Vec<Shown>,
}

#[derive(Debug)]
struct Alias {
    at: u64,
    /// One entry for each location that has access.
    access: Vec<AccessDesc>,
}

/// A chunk that is mapped at one alias.
#[derive(Debug)]
struct Shown {
    alias: u64,
    offset: u64,
    len: u64,
}

impl Aliases {
    /// Adds an alias, which has no chunks until they are [shown](Self::show).
    pub fn add(&mut self, at: u64) {
        self.list.push(Alias { at, access: Vec::new() });
    }

    /// Removes an alias and unmaps its chunks.
    pub fn remove(&mut self, at: u64) {
        self.hide_those(|shown| shown.alias == at);
        self.list.retain(|alias| alias.at != at);
    }

    /// Maps the chunk at this offset at every alias where it is not mapped yet.
    pub fn show(&mut self, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        for alias in &self.list {
            if !self.shown.iter().any(|s| s.alias == alias.at && s.offset == offset) {
                alias.map(offset, len, handle)?;
                self.shown.push(Shown { alias: alias.at, offset, len });
            }
        }
        Ok(())
    }

    /// Unmaps the chunk at this offset. No work that touches it may be running.
    pub fn hide(&mut self, offset: u64) {
        self.hide_those(|shown| shown.offset == offset);
    }

    fn hide_those(&mut self, which: impl Fn(&Shown) -> bool) {
        self.shown.retain(|shown| {
            let goes = which(shown);
            if goes {
                // SAFETY: mapped by `show`; the caller knows that nothing that touches it runs, as with the driver.
                unsafe { driver::cuMemUnmap(shown.alias + shown.offset, shown.len as usize) };
            }
            !goes
        });
    }

    /// Sets access rights at one alias, for the chunks that are shown now and later.
    pub fn set_access(&mut self, at: u64, wanted: &[AccessDesc]) -> Result<(), CUresult> {
        for shown in self.shown.iter().filter(|s| s.alias == at) {
            let (piece, len) = (at + shown.offset, shown.len as usize);
            // SAFETY: mapped by `show`; as many entries as said.
            check(unsafe { driver::cuMemSetAccess(piece, len, wanted.as_ptr(), wanted.len()) })?;
        }
        if let Some(alias) = self.list.iter_mut().find(|alias| alias.at == at) {
            for desc in wanted {
                alias.access.retain(|known| known.location != desc.location);
                if desc.flags != 0 {
                    alias.access.push(*desc);
                }
            }
        }
        Ok(())
    }

    /// The access rights of one location at one alias.
    pub fn access(&self, at: u64, location: Location) -> i32 {
        let alias = self.list.iter().find(|alias| alias.at == at);
        alias.and_then(|a| a.access.iter().find(|desc| desc.location == location)).map_or(0, |desc| desc.flags)
    }
}

impl Alias {
    fn map(&self, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        let (at, len) = (self.at + offset, len as usize);
        // SAFETY: a chunk of ours, mapped whole where the program wants it; the driver says whether it can be.
        unsafe {
            check(driver::cuMemMap(at, len, 0, handle, 0))?;
            if self.access.is_empty() {
                return Ok(());
            }
            match driver::cuMemSetAccess(at, len, self.access.as_ptr(), self.access.len()) {
                SUCCESS => {}
                error if error == ERROR_OUT_OF_MEMORY || is_dead(error) => {
                    driver::cuMemUnmap(at, len);
                    return Err(error);
                }
                // The chunk must come back even if the driver no longer grants one of the rights.
                _ => {
                    for desc in &self.access {
                        let _ = driver::cuMemSetAccess(at, len, desc, 1);
                    }
                }
            }
            Ok(())
        }
    }
}
