//! Aliases: further addresses of a range, at which the program has mapped it itself, each with the access rights that the
//! program gave it. What is on the GPU is *shown* at all of them; what leaves is hidden everywhere first.

use crate::driver::{self, check, context::is_dead, types::*};
use alloc::vec::Vec;

/// The aliases of one range.
#[derive(Debug, Default)]
pub struct Aliases {
    list: Vec<Alias>,
    /// The pieces that are mapped now.
    shown: Vec<Shown>,
}

#[derive(Debug)]
struct Alias {
    at: u64,
    /// One for each location that has access.
    access: Vec<AccessDesc>,
}

/// A chunk as it is mapped at one alias.
#[derive(Debug)]
struct Shown {
    alias: u64,
    offset: u64,
    len: u64,
}

impl Aliases {
    /// The range is mapped there, too, as soon as it is [shown](Self::show).
    pub fn add(&mut self, at: u64) {
        self.list.push(Alias { at, access: Vec::new() });
    }

    /// The range is no longer mapped there.
    pub fn remove(&mut self, at: u64) {
        self.hide_those(|shown| shown.alias == at);
        self.list.retain(|alias| alias.at != at);
    }

    /// Maps the chunk at that offset wherever it is not mapped yet.
    pub fn show(&mut self, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        for alias in &self.list {
            if !self.shown.iter().any(|s| s.alias == alias.at && s.offset == offset) {
                alias.map(offset, len, handle)?;
                self.shown.push(Shown { alias: alias.at, offset, len });
            }
        }
        Ok(())
    }

    /// Unmaps the chunk at that offset. Nothing that touches it may be running.
    pub fn hide(&mut self, offset: u64) {
        self.hide_those(|shown| shown.offset == offset);
    }

    fn hide_those(&mut self, which: impl Fn(&Shown) -> bool) {
        self.shown.retain(|shown| {
            let goes = which(shown);
            if goes {
                // SAFETY: mapped by `show`; who asks knows that nothing that touches it runs, as with the driver.
                unsafe { driver::cuMemUnmap(shown.alias + shown.offset, shown.len as usize) };
            }
            !goes
        });
    }

    /// Gives or takes rights at one alias, now and whenever it is shown.
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

    /// The rights of one location at one alias.
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
                // It would never come back for a right that the driver does not give any more.
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
