//! The library's version as an ELF note. `nvsharectl preload` reads the note from the file without
//! loading the library. The note has the owner `nvshare`, type 1, and the version as text.

const VERSION: &str = env!("CARGO_PKG_VERSION");
const ROUNDED: usize = VERSION.len().next_multiple_of(4);

#[repr(C, align(4))]
struct Note {
    owner_length: u32,
    length: u32,
    kind: u32,
    owner: [u8; 8],
    version: [u8; ROUNDED],
}

#[used]
#[unsafe(link_section = ".note.nvshare")]
static NOTE: Note = Note {
    owner_length: 8,
    length: VERSION.len() as u32,
    kind: 1,
    owner: *b"nvshare\0",
    version: {
        let mut text = [0; ROUNDED];
        text.split_at_mut(VERSION.len()).0.copy_from_slice(VERSION.as_bytes());
        text
    },
};
