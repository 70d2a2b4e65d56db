//! `cuGetProcAddress`: maps a name, a version and flags to one exported symbol.

use crate::{
    error::{Done, Error},
    exports::EXPORTS,
    out,
    stream::Flavour,
};
use cuda_sim_gpus::Config;
use std::ffi::{CStr, c_char};

const LEGACY: u64 = 1;
const PER_THREAD: u64 = 2;

const FOUND: u32 = 0;
const NOT_FOUND: u32 = 1;
const VERSION_NOT_SUFFICIENT: u32 = 2;

/// One exported symbol.
#[derive(Clone, Copy)]
pub struct Export {
    /// The name for `cuGetProcAddress`.
    pub name: &'static str,
    /// The CUDA version that introduced this form of the function.
    pub version: i32,
    pub flavour: Option<Flavour>,
    pub address: fn() -> usize,
}

/// Returns the newest form of `name` for a program of this version, or the reason why none exists.
fn find(name: &str, version: i32, flags: u64) -> Result<usize, u32> {
    let flavour = if flags & PER_THREAD != 0 { Flavour::PerThread } else { Flavour::Legacy };
    let named = || EXPORTS.iter().filter(|e| e.name == name && e.version <= Config::get().driver);
    if named().next().is_none() {
        return Err(NOT_FOUND);
    }
    // Chooses the stream flavour first and the version second, because `_ptsz` symbols are newer than the
    // plain symbols.
    let best = |flavoured: bool| {
        let suits = |e: &&Export| {
            e.version <= version && if flavoured { e.flavour == Some(flavour) } else { e.flavour.is_none() }
        };
        named().filter(suits).max_by_key(|e| e.version)
    };
    let export = best(true).or_else(|| best(false)).ok_or(VERSION_NOT_SUFFICIENT)?;
    Ok((export.address)())
}

fn query(name: *const c_char, to: *mut usize, version: i32, flags: u64) -> Result<u32, Error> {
    if name.is_null() || to.is_null() || flags > (LEGACY | PER_THREAD) || version > Config::get().driver {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passes a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Error::INVALID_VALUE)?;
    let found = find(name, version, flags);
    out(to, found.unwrap_or(0))?;
    Ok(found.err().unwrap_or(FOUND))
}

/// `cuGetProcAddress`, as of CUDA 11.3
pub fn get(name: *const c_char, to: *mut usize, version: i32, flags: u64) -> Done {
    if query(name, to, version, flags)? == FOUND { Ok(()) } else { Err(Error::NOT_FOUND) }
}

/// `cuGetProcAddress_v2`: succeeds even if the symbol is not found. The pointer is then null, and the
/// status contains the reason.
pub fn get_v2(name: *const c_char, to: *mut usize, version: i32, flags: u64, status: *mut u32) -> Done {
    let found = query(name, to, version, flags)?;
    crate::out_if(status, found);
    Ok(())
}

/// `cuGetExportTable`: every table exists and is empty.
pub fn export_table(table: *mut usize, id: *const [u8; 16]) -> Done {
    static EMPTY: usize = size_of::<usize>();
    crate::arg(id)?;
    out(table, &raw const EMPTY as usize)
}
