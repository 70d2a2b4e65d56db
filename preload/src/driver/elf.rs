//! Looking up a symbol in one loaded library, in the library's own tables.
//!
//! `dlsym` would find it, too, but it takes the loader's lock, which a thread that waits at a gate may hold, and it changes
//! what `dlerror` says, which the program may still want to know.

use core::ffi::{CStr, c_char, c_void};

/// The beginning of glibc's `struct link_map`, to which a handle of `dlopen` points.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
    dynamic: *const Dynamic,
}

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: u64,
}

const DT_NULL: i64 = 0;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// The symbol tables of a library.
#[derive(Debug, Default)]
struct Tables {
    base: usize,
    symbols: usize,
    strings: usize,
    gnu_hash: usize,
    hash: usize,
}

/// The address of a symbol that this library defines.
///
/// # Safety
/// `library` is a handle of `dlopen`, and the library is never unloaded.
pub unsafe fn symbol(library: *mut c_void, name: &CStr) -> Option<usize> {
    // SAFETY: the caller's promise; the loader has filled all of this in.
    unsafe {
        let map = library.cast::<LinkMap>().as_ref()?;
        let mut tables = Tables { base: map.base, ..Tables::default() };
        let mut entry = map.dynamic;
        while let Some(Dynamic { tag, value }) = entry.as_ref().filter(|e| e.tag != DT_NULL) {
            // glibc has added the base to these addresses.
            match *tag {
                DT_SYMTAB => tables.symbols = *value,
                DT_STRTAB => tables.strings = *value,
                DT_GNU_HASH => tables.gnu_hash = *value,
                DT_HASH => tables.hash = *value,
                _ => {}
            }
            entry = entry.add(1);
        }
        if tables.symbols == 0 || tables.strings == 0 {
            return None;
        }
        match (tables.gnu_hash, tables.hash) {
            (0, 0) => None,
            (0, _) => tables.look_up(name),
            _ => tables.look_up_gnu(name),
        }
    }
}

impl Tables {
    /// The address of the symbol with this number, if it is defined and has this name.
    unsafe fn matching(&self, number: u32, name: &CStr) -> Option<usize> {
        // SAFETY: a number out of the library's own hash table.
        unsafe {
            let symbol = &*(self.symbols as *const Symbol).add(number as usize);
            let its_name = CStr::from_ptr((self.strings as *const c_char).add(symbol.name as usize));
            (symbol.section != 0 && symbol.value != 0 && its_name == name).then(|| self.base + symbol.value)
        }
    }

    /// Looks the name up in `DT_GNU_HASH`: a header, a Bloom filter, the buckets, and chains that end with an odd hash.
    unsafe fn look_up_gnu(&self, name: &CStr) -> Option<usize> {
        let hash = name.to_bytes().iter().fold(5381u32, |h, b| h.wrapping_mul(33).wrapping_add(u32::from(*b)));
        // SAFETY: the table's own numbers lead through it.
        unsafe {
            let header = self.gnu_hash as *const u32;
            let (buckets, first, filter) = (*header, *header.add(1), *header.add(2));
            if buckets == 0 {
                return None;
            }
            let buckets_at = header.add(4).cast::<u64>().add(filter as usize).cast::<u32>();
            let chains_at = buckets_at.add(buckets as usize);
            let mut number = *buckets_at.add((hash % buckets) as usize);
            if number < first {
                return None;
            }
            loop {
                let its_hash = *chains_at.add((number - first) as usize);
                if its_hash | 1 == hash | 1
                    && let Some(address) = self.matching(number, name)
                {
                    return Some(address);
                }
                if its_hash & 1 == 1 {
                    return None;
                }
                number += 1;
            }
        }
    }

    /// Looks the name up in `DT_HASH`: the number of buckets and of symbols, the buckets, and a chain link for each symbol.
    unsafe fn look_up(&self, name: &CStr) -> Option<usize> {
        let hash = name.to_bytes().iter().fold(0u32, |h, b| {
            let h = (h << 4).wrapping_add(u32::from(*b));
            let high = h & 0xf000_0000;
            (h ^ (high >> 24)) & !high
        });
        // SAFETY: as above.
        unsafe {
            let header = self.hash as *const u32;
            let buckets = *header;
            if buckets == 0 {
                return None;
            }
            let mut number = *header.add(2 + (hash % buckets) as usize);
            while number != 0 {
                if let Some(address) = self.matching(number, name) {
                    return Some(address);
                }
                number = *header.add(2 + (buckets + number) as usize);
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_finds_what_dlsym_finds() {
        // SAFETY: NUL-terminated names; the C library stays.
        unsafe {
            let library = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY);
            for name in [c"getpid", c"qsort", c"environ", c"no_such_symbol"] {
                let expected = libc::dlsym(library, name.as_ptr()) as usize;
                assert_eq!(symbol(library, name).unwrap_or(0), expected, "{name:?}");
            }
        }
    }
}
