//! The loader's own tables: the loaded objects, their symbols and their relocations.
//!
//! `dlsym` would find a symbol too, but it takes the loader's lock, and a thread that waits at a gate
//! may hold that lock. `dlsym` also resets `dlerror`, which the program may still want to read.

use core::{
    ffi::{CStr, c_char, c_int, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};
use rustix::mm::{MprotectFlags, mprotect};

/// The beginning of glibc's `struct link_map`. A `dlopen` handle points to it.
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

/// `Elf64_Rela`
#[repr(C)]
struct Relocation {
    offset: usize,
    kind: u32,
    symbol: u32,
    addend: i64,
}

const DT_NULL: i64 = 0;
const DT_PLTRELSZ: i64 = 2;
const DT_HASH: i64 = 4;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_RELA: i64 = 7;
const DT_RELASZ: i64 = 8;
const DT_JMPREL: i64 = 23;
const DT_GNU_HASH: i64 = 0x6fff_fef5;

/// The relocations that store a symbol's address: `R_X86_64_64`, `_GLOB_DAT` and `_JUMP_SLOT`.
#[cfg(target_arch = "x86_64")]
const STORES_ADDRESS: [u32; 3] = [1, 6, 7];
/// `R_AARCH64_ABS64`, `_GLOB_DAT` and `_JUMP_SLOT`.
#[cfg(target_arch = "aarch64")]
const STORES_ADDRESS: [u32; 3] = [257, 1025, 1026];

/// The tables of a library.
#[derive(Debug, Default)]
struct Tables {
    base: usize,
    symbols: usize,
    strings: usize,
    gnu_hash: usize,
    hash: usize,
    /// The address and the size of `DT_RELA` and `DT_JMPREL`.
    relocations: [(usize, usize); 2],
}

/// Returns the address of a symbol that the library behind this handle defines.
///
/// # Safety
/// `library` is a handle from `dlopen`, and the library is never unloaded.
pub unsafe fn symbol(library: *mut c_void, name: &CStr) -> Option<usize> {
    // SAFETY: the caller's contract. The loader has filled in the link map and the tables.
    unsafe {
        let map = library.cast::<LinkMap>().as_ref()?;
        Tables::of(map.base, map.dynamic).look_up(name)
    }
}

/// Returns an address inside the library behind this handle, or 0 if the handle is NULL.
///
/// # Safety
/// `library` is a handle from `dlopen`, and the library is never unloaded.
pub unsafe fn inside(library: *mut c_void) -> usize {
    // SAFETY: the caller's contract.
    unsafe { library.cast::<LinkMap>().as_ref() }.map_or(0, |map| map.dynamic as usize)
}

/// A loaded object: the program, a library, or the loader itself.
#[derive(Debug)]
pub struct Object<'a> {
    base: usize,
    headers: &'a [libc::Elf64_Phdr],
}

/// Visits every object, in the order in which they were loaded, until `visit` returns false.
///
/// The loader holds the lock of its list of objects during the visit. No thread holds that lock
/// while it runs a constructor or waits. `visit` must neither allocate nor look up symbols, because
/// other threads hold the locks for these actions when they take the lock of the list.
pub fn each_object(mut visit: impl FnMut(&Object) -> bool) {
    unsafe extern "C" fn call<F: FnMut(&Object) -> bool>(
        info: *mut libc::dl_phdr_info,
        _size: usize,
        visit: *mut c_void,
    ) -> c_int {
        // SAFETY: `info` is the loader's own description, which is valid during this call. `visit` is the
        // pointer that `with` passes.
        unsafe {
            let (info, visit) = (&*info, &mut *visit.cast::<F>());
            if info.dlpi_phdr.is_null() {
                return 0;
            }
            let headers = core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into());
            c_int::from(!visit(&Object { base: info.dlpi_addr as usize, headers }))
        }
    }
    fn with<F: FnMut(&Object) -> bool>(visit: &mut F) {
        // SAFETY: `call::<F>` gets a pointer to the `F` that it expects.
        unsafe { libc::dl_iterate_phdr(Some(call::<F>), (&raw mut *visit).cast()) };
    }
    with(&mut visit);
}

/// Returns the number of objects loaded so far, including unloaded ones, or `None` if the loader does
/// not report it.
pub fn load_count() -> Option<u64> {
    unsafe extern "C" fn read(info: *mut libc::dl_phdr_info, size: usize, place: *mut c_void) -> c_int {
        const END: usize = core::mem::offset_of!(libc::dl_phdr_info, dlpi_adds) + size_of::<u64>();
        if size >= END {
            // SAFETY: the size shows that the loader's description has the field. `place` is a pointer to
            // `number`.
            unsafe { *place.cast() = Some((*info).dlpi_adds) };
        }
        1
    }
    let mut number: Option<u64> = None;
    // SAFETY: `read` gets a pointer to `number`, to which it writes.
    unsafe { libc::dl_iterate_phdr(Some(read), (&raw mut number).cast()) };
    number
}

/// Finds the address of a C library function that `dlsym` cannot find. This happens in a program that
/// started without libdl and loaded it later, because libdl is then outside the search scope of the
/// earlier objects. Returns `None` while libdl is not loaded.
pub fn of_c_library(name: &CStr) -> Option<usize> {
    let mut found = None;
    each_object(|object| {
        let tables = object.tables();
        // SAFETY: the object stays loaded during the visit. Only the C library defines all four functions: an
        // interposer of one of them does not define the others.
        let is_it =
            [c"dlopen", c"dlsym", c"dlvsym", c"dlerror"].iter().all(|name| unsafe { tables.look_up(name).is_some() });
        if is_it {
            // SAFETY: the object stays loaded during the visit.
            found = unsafe { tables.look_up(name) };
        }
        !is_it
    });
    found
}

impl Object<'_> {
    fn segments(&self) -> impl Iterator<Item = (usize, usize, &libc::Elf64_Phdr)> {
        self.headers.iter().map(|header| {
            let at = self.base.wrapping_add(header.p_vaddr as usize);
            (at, at.wrapping_add(header.p_memsz as usize), header)
        })
    }

    pub fn contains(&self, address: usize) -> bool {
        self.segments().any(|(at, end, header)| header.p_type == libc::PT_LOAD && (at..end).contains(&address))
    }

    /// Returns the lowest address of the loaded segments, and the end of the last segment.
    pub fn bounds(&self) -> (usize, usize) {
        let loaded = self.segments().filter(|(_, _, header)| header.p_type == libc::PT_LOAD);
        loaded.fold((usize::MAX, 0), |(first, last), (at, end, _)| (first.min(at), last.max(end)))
    }

    /// Returns the address of a symbol that the object defines.
    pub fn symbol(&self, name: &CStr) -> Option<usize> {
        // SAFETY: the object stays loaded during the visit.
        unsafe { self.tables().look_up(name) }
    }

    fn tables(&self) -> Tables {
        let dynamic = self.segments().find(|(_, _, header)| header.p_type == libc::PT_DYNAMIC);
        // SAFETY: the loader has read this table to load the object.
        dynamic.map_or_else(Tables::default, |(at, ..)| unsafe { Tables::of(self.base, at as *const Dynamic) })
    }

    /// Returns the protection that the loader has given these bytes, or `None` if they are not inside one
    /// segment.
    fn protection(&self, page: usize, from: usize, to: usize) -> Option<MprotectFlags> {
        let within = |(at, end, _): &(usize, usize, &libc::Elf64_Phdr)| *at <= from && to <= *end;
        let of = |kind| self.segments().filter(move |(_, _, header)| header.p_type == kind);
        let relocated = |(at, end, header)| (at, end & !(page - 1), header); // rounded down to a whole page
        if of(libc::PT_GNU_RELRO).map(relocated).any(|segment| within(&segment)) {
            return Some(MprotectFlags::READ);
        }
        let (_, _, header) = of(libc::PT_LOAD).find(within)?;
        let flags =
            [(libc::PF_R, MprotectFlags::READ), (libc::PF_W, MprotectFlags::WRITE), (libc::PF_X, MprotectFlags::EXEC)];
        Some(flags.iter().filter(|(flag, _)| header.p_flags & flag != 0).map(|(_, protection)| *protection).collect())
    }

    /// Writes a word of this object, whose pages may be read-only. Returns `false` if that fails.
    fn write(&self, page: usize, word: &AtomicUsize, value: usize) -> bool {
        let at = word.as_ptr() as usize;
        let (start, end) = (at & !(page - 1), at + size_of::<usize>());
        let Some(protection) = self.protection(page, at, end) else { return false };
        let set = |protection| {
            // SAFETY: the pages belong to the object. They stay readable, and executable if they were before.
            unsafe { mprotect(start as *mut c_void, end.next_multiple_of(page) - start, protection) }
        };
        if set(protection | MprotectFlags::WRITE).is_err() {
            return false;
        }
        word.store(value, Ordering::Relaxed);
        if !protection.contains(MprotectFlags::WRITE) {
            let _ = set(protection); // fails only for lack of memory; the pages then stay writable
        }
        true
    }

    /// Redirects symbols that this object defines: `substitute` maps the address of a symbol to its
    /// replacement. Later bindings use the replacement. Returns `false` if the symbol table cannot be
    /// written.
    pub fn redirect_symbols(&self, page: usize, substitute: impl Fn(usize) -> Option<usize>) -> bool {
        let tables = self.tables();
        let mut all = true;
        // SAFETY: the object stays loaded during the visit. Other threads read the value atomically.
        unsafe {
            tables.each_defined(|symbol| {
                let value = AtomicUsize::from_ptr(&raw mut (*symbol).value);
                let address = tables.base.wrapping_add(value.load(Ordering::Relaxed));
                // If another library has already redirected the symbol, the address is outside.
                if let Some(target) = substitute(address).filter(|_| self.contains(address)) {
                    all &= self.write(page, value, target.wrapping_sub(tables.base));
                }
            });
        }
        all
    }

    /// Redirects existing bindings of this object to the addresses that `substitute` returns.
    /// `own`: including bindings to symbols that the object defines itself. Returns `false` if some
    /// bindings cannot be written.
    ///
    /// # Safety
    /// If `substitute` replaces a binding of this object, the loader is not processing the object:
    /// this function changes the protection of the object's pages.
    pub unsafe fn redirect_bindings(
        &self,
        page: usize,
        own: bool,
        substitute: impl Fn(usize) -> Option<usize>,
    ) -> bool {
        let tables = self.tables();
        let mut all = true;
        for (at, size) in tables.relocations {
            for i in 0..size / size_of::<Relocation>() {
                // SAFETY: the relocation is in the object's own table, and refers to the object's own symbols.
                let (relocation, symbols) =
                    unsafe { (&*(at as *const Relocation).add(i), tables.symbols as *const Symbol) };
                if !STORES_ADDRESS.contains(&relocation.kind) || relocation.addend != 0 || relocation.symbol == 0 {
                    continue;
                }
                let place = tables.base.wrapping_add(relocation.offset);
                // SAFETY: the index is from the object's own relocation, so it is in the object's table.
                let is_own = unsafe { (*symbols.add(relocation.symbol as usize)).section != 0 };
                if (is_own && !own) || place % align_of::<usize>() != 0 || !self.contains(place) {
                    continue;
                }
                // SAFETY: the place is aligned and inside the object. The loader writes an address there, and other
                // threads read it atomically.
                let word = unsafe { AtomicUsize::from_ptr(place as *mut usize) };
                if let Some(target) = substitute(word.load(Ordering::Relaxed)) {
                    all &= self.write(page, word, target);
                }
            }
        }
        all
    }
}

impl Tables {
    /// # Safety
    /// `dynamic` is the `PT_DYNAMIC` of an object loaded at `base`.
    unsafe fn of(base: usize, dynamic: *const Dynamic) -> Self {
        let mut tables = Self { base, ..Self::default() };
        let mut entry = dynamic;
        // SAFETY: the caller's contract. The loader has filled in the table.
        while let Some(Dynamic { tag, value }) = unsafe { entry.as_ref() }.filter(|e| e.tag != DT_NULL) {
            // glibc has already added the base to these addresses, except in a read-only table.
            let address = if *value < base { base.wrapping_add(*value) } else { *value };
            match *tag {
                DT_SYMTAB => tables.symbols = address,
                DT_STRTAB => tables.strings = address,
                DT_GNU_HASH => tables.gnu_hash = address,
                DT_HASH => tables.hash = address,
                DT_RELA => tables.relocations[0].0 = address,
                DT_RELASZ => tables.relocations[0].1 = *value,
                DT_JMPREL => tables.relocations[1].0 = address,
                DT_PLTRELSZ => tables.relocations[1].1 = *value,
                _ => {}
            }
            // SAFETY: the table ends with `DT_NULL`, and this entry is not `DT_NULL`.
            entry = unsafe { entry.add(1) };
        }
        if tables.symbols == 0 || tables.strings == 0 {
            return Self::default();
        }
        tables.relocations = tables.relocations.map(|(at, size)| if at == 0 { (0, 0) } else { (at, size) });
        tables
    }

    /// Returns the address of a symbol that the object defines.
    unsafe fn look_up(&self, name: &CStr) -> Option<usize> {
        // SAFETY: the tables belong to an object that stays loaded: the caller's contract.
        unsafe {
            match (self.gnu_hash, self.hash) {
                (0, 0) => None,
                (0, _) => self.look_up_by_hash(name),
                _ => self.look_up_by_gnu_hash(name),
            }
        }
    }

    /// Visits the symbols that the object exports.
    unsafe fn each_defined(&self, mut visit: impl FnMut(*mut Symbol)) {
        // SAFETY: all indices come from the table itself.
        unsafe {
            let mut look = |number: u32| {
                let symbol = (self.symbols as *mut Symbol).add(number as usize);
                if (*symbol).section != 0 && (*symbol).value != 0 {
                    visit(symbol);
                }
            };
            if self.gnu_hash != 0 {
                let (buckets, first, chains) = self.gnu_hash_table();
                for bucket in buckets.iter().filter(|bucket| **bucket >= first) {
                    let mut number = *bucket;
                    look(number);
                    while *chains.add((number - first) as usize) & 1 == 0 {
                        number += 1;
                        look(number);
                    }
                }
            } else if self.hash != 0 {
                (1..*(self.hash as *const u32).add(1)).for_each(look);
            }
        }
    }

    /// Returns the address of the symbol with this index, if it is defined and has this name.
    unsafe fn symbol_with_name(&self, number: u32, name: &CStr) -> Option<usize> {
        // SAFETY: `number` comes from the library's own hash table.
        unsafe {
            let symbol = &*(self.symbols as *const Symbol).add(number as usize);
            let its_name = CStr::from_ptr((self.strings as *const c_char).add(symbol.name as usize));
            (symbol.section != 0 && symbol.value != 0 && its_name == name).then(|| self.base.wrapping_add(symbol.value))
        }
    }

    /// Reads `DT_GNU_HASH`, which consists of a header, a Bloom filter, the buckets, and chains
    /// that end with an odd hash. Returns the buckets, the index of the first hashed symbol
    /// (`symoffset`), and the chains.
    unsafe fn gnu_hash_table(&self) -> (&[u32], u32, *const u32) {
        // SAFETY: all indices come from the table itself.
        unsafe {
            let header = self.gnu_hash as *const u32;
            let (buckets, first, filter) = (*header as usize, *header.add(1), *header.add(2));
            let buckets_at = header.add(4).cast::<u64>().add(filter as usize).cast::<u32>();
            (core::slice::from_raw_parts(buckets_at, buckets), first, buckets_at.add(buckets))
        }
    }

    unsafe fn look_up_by_gnu_hash(&self, name: &CStr) -> Option<usize> {
        let hash = name.to_bytes().iter().fold(5381u32, |h, b| h.wrapping_mul(33).wrapping_add(u32::from(*b)));
        // SAFETY: all indices come from the table itself.
        unsafe {
            let (buckets, first, chains) = self.gnu_hash_table();
            let mut number = *buckets.get(hash.checked_rem(buckets.len() as u32)? as usize)?;
            if number < first {
                return None;
            }
            loop {
                let its_hash = *chains.add((number - first) as usize);
                if its_hash | 1 == hash | 1
                    && let Some(address) = self.symbol_with_name(number, name)
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

    /// Looks up the name in `DT_HASH`. The table consists of the number of buckets, the number of
    /// symbols, the buckets, and one chain link for each symbol.
    unsafe fn look_up_by_hash(&self, name: &CStr) -> Option<usize> {
        let hash = name.to_bytes().iter().fold(0u32, |h, b| {
            let h = (h << 4).wrapping_add(u32::from(*b));
            let high = h & 0xf000_0000;
            (h ^ (high >> 24)) & !high
        });
        // SAFETY: all indices come from the table itself.
        unsafe {
            let header = self.hash as *const u32;
            let buckets = *header;
            if buckets == 0 {
                return None;
            }
            let mut number = *header.add(2 + (hash % buckets) as usize);
            while number != 0 {
                if let Some(address) = self.symbol_with_name(number, name) {
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
    fn symbol_lookup_agrees_with_dlsym() {
        // SAFETY: the names are NUL-terminated, and the C library stays loaded.
        unsafe {
            let library = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY);
            for name in [c"getpid", c"qsort", c"environ", c"no_such_symbol"] {
                let expected = libc::dlsym(library, name.as_ptr()) as usize;
                assert_eq!(symbol(library, name).unwrap_or(0), expected, "{name:?}");
            }
        }
    }
}
