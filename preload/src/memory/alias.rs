//! Aliases: addresses at which the program itself has mapped a range. Each alias has its own access
//! rights, set by the program. While a chunk is on the GPU, it is mapped (*shown*) at every alias.
//! Before the chunk is evicted, it is unmapped (*hidden*) at all of them.

use crate::driver::{self, check, context::is_dead, types::*};
use alloc::{collections::BTreeMap, vec::Vec};

/// The aliases of one range, by address. A program may have tens of thousands of aliases: kvcached maps
/// one chunk at every address that has no page.
#[derive(Debug, Default)]
pub struct Aliases(BTreeMap<u64, Alias>);

#[derive(Debug, Default)]
struct Alias {
    /// The access rights, one entry per location.
    access: Vec<AccessDesc>,
    /// Lengths of the chunks that are mapped now, by offset.
    shown: BTreeMap<u64, u64>,
}

impl Aliases {
    /// Adds an alias. Its chunks are mapped by [`show`](Self::show).
    pub fn add(&mut self, at: u64) {
        self.0.insert(at, Alias::default());
    }

    /// Removes an alias and unmaps its chunks.
    pub fn remove(&mut self, at: u64) {
        for (offset, len) in self.0.remove(&at).into_iter().flat_map(|alias| alias.shown) {
            unmap(at + offset, len);
        }
    }

    /// Maps the chunk at this offset at every alias where it is not mapped yet.
    pub fn show(&mut self, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        self.0.iter_mut().try_for_each(|(at, alias)| alias.show(*at, offset, len, handle))
    }

    /// Maps the chunk at this offset at one alias.
    pub fn show_at(&mut self, at: u64, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        self.0.get_mut(&at).map_or(Ok(()), |alias| alias.show(at, offset, len, handle))
    }

    /// Unmaps the chunk at this offset from all aliases. No running work may access the chunk.
    pub fn hide(&mut self, offset: u64) {
        for (at, alias) in &mut self.0 {
            if let Some(len) = alias.shown.remove(&offset) {
                unmap(at + offset, len);
            }
        }
    }

    /// Sets access rights at one alias, for its mapped chunks and for chunks mapped later.
    pub fn set_access(&mut self, at: u64, wanted: &[AccessDesc]) -> Result<(), CUresult> {
        let Some(alias) = self.0.get_mut(&at) else { return Ok(()) };
        for (offset, len) in &alias.shown {
            // SAFETY: the range was mapped by `show`; `wanted` has `wanted.len()` entries.
            check(unsafe { driver::cuMemSetAccess(at + offset, *len as usize, wanted.as_ptr(), wanted.len()) })?;
        }
        for desc in wanted {
            alias.access.retain(|known| known.location != desc.location);
            if desc.flags != 0 {
                alias.access.push(*desc);
            }
        }
        Ok(())
    }

    /// Returns the access rights of one location at one alias.
    pub fn access(&self, at: u64, location: Location) -> i32 {
        let access = self.0.get(&at).map_or(&[][..], |alias| &alias.access);
        access.iter().find(|desc| desc.location == location).map_or(0, |desc| desc.flags)
    }
}

fn unmap(at: u64, len: u64) {
    // SAFETY: the range was mapped by `Alias::map`. As the driver requires, no running work accesses the
    // range: the caller's contract.
    unsafe { driver::cuMemUnmap(at, len as usize) };
}

impl Alias {
    fn show(&mut self, at: u64, offset: u64, len: u64, handle: Handle) -> Result<(), CUresult> {
        if !self.shown.contains_key(&offset) {
            self.map(at + offset, len as usize, handle)?;
            self.shown.insert(offset, len);
        }
        Ok(())
    }

    fn map(&self, at: u64, len: usize, handle: Handle) -> Result<(), CUresult> {
        // SAFETY: `handle` is a chunk of this library, which is mapped in full. The driver checks whether it
        // can be mapped at the address, which the program chose.
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
                // Sets each right separately: the chunk must be restored even if the driver now refuses one of them.
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
