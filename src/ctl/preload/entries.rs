//! The text of `/etc/ld.so.preload`. This module parses the entries as the loader does, and adds
//! and removes nvshare's entry. The module works on bytes and does no I/O.
//!
//! All other bytes are kept. nvshare's entry is added as a separate line at the end, so that
//! removing the entry restores the original bytes.

use std::ops::Range;

/// The file name that identifies nvshare's entry, in any directory.
pub const LIBRARY: &[u8] = b"libnvshare.so";

/// The reason why no entry can be added to a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The text contains a NUL, where the loader stops reading.
    Nul,
    /// The text contains comments that the loader would parse differently in a longer text.
    Comments,
}

/// Returns the byte ranges of the entries, in order.
pub fn entries(text: &[u8]) -> Vec<Range<usize>> {
    let seen = without_comments(text);
    // The loader stops at a NUL. This function also returns entries after a NUL, so that they are
    // removed too.
    let separates = |byte: u8| matches!(byte, b' ' | b'\t' | b'\n' | b':' | 0);
    let mut found = Vec::new();
    let mut start = None;
    for at in 0..=seen.len() {
        match (start, seen.get(at).is_none_or(|byte| separates(*byte))) {
            (None, false) => start = Some(at),
            (Some(from), true) => {
                found.push(from..at);
                start = None;
            }
            _ => {}
        }
    }
    found
}

/// Returns the names in a text.
pub fn names(text: &[u8]) -> Vec<&[u8]> {
    entries(text).into_iter().map(|entry| &text[entry]).collect()
}

/// Returns true if this is the name of a `libnvshare.so`. If a line ends in CR LF, the CR counts as
/// part of the last name, as in the loader.
pub fn is_ours(name: &[u8]) -> bool {
    let name = name.strip_suffix(b"\r").unwrap_or(name);
    name.rsplit(|byte| *byte == b'/').next() == Some(LIBRARY)
}

/// Returns the text with one entry for the library. The entry replaces an earlier entry of nvshare,
/// or is added at the end.
pub fn with(text: &[u8], library: &[u8]) -> Result<Vec<u8>, Refusal> {
    if text.contains(&0) {
        return Err(Refusal::Nul);
    }
    let ours = ours(text);
    let mut new = text.to_vec();
    match ours.split_first() {
        Some((first, [])) if text[first.clone()] == *library => return Ok(new),
        Some((first, rest)) => {
            for entry in rest.iter().rev() {
                new.drain(with_its_separator(&new, entry));
            }
            new.splice(first.clone(), library.iter().copied());
        }
        None if text.is_empty() || text.ends_with(b"\n") => new.extend([library, b"\n"].concat()),
        None => new.extend([b"\n", library].concat()),
    }
    let mut expected: Vec<&[u8]> = Vec::new();
    let mut placed = false;
    for name in names(text) {
        if !is_ours(name) {
            expected.push(name);
        } else if !std::mem::replace(&mut placed, true) {
            expected.push(library);
        }
    }
    if !placed {
        expected.push(library);
    }
    if names(&new) == expected { Ok(new) } else { Err(Refusal::Comments) }
}

/// Returns the text without nvshare's entries.
pub fn without(text: &[u8]) -> Vec<u8> {
    let mut text = text.to_vec();
    // One entry is removed at a time, because the text's length determines which comments the
    // loader recognizes.
    while let Some(entry) = ours(&text).first() {
        text.drain(with_its_separator(&text, entry));
    }
    text
}

fn ours(text: &[u8]) -> Vec<Range<usize>> {
    entries(text).into_iter().filter(|entry| is_ours(&text[entry.clone()])).collect()
}

/// Returns the range to remove with an entry. If the entry is alone in its line, the range is the
/// whole line. Otherwise the range includes one separator. Does not remove a NUL, because the NUL
/// hides the rest of the text from the loader.
fn with_its_separator(text: &[u8], entry: &Range<usize>) -> Range<usize> {
    let Range { start, end } = *entry;
    let before = start.checked_sub(1).map(|at| text[at]);
    match (before, text.get(end)) {
        (None | Some(b'\n'), Some(1..)) => start..end + 1,
        (Some(1..), _) => start - 1..end,
        _ => start..end,
    }
}

/// Returns the text as glibc's loader parses it, with comments replaced by blanks. The loader
/// searches for each comment from the start of the file. However, it searches only as many bytes as
/// follow the previous comment, so it may miss a second comment.
fn without_comments(text: &[u8]) -> Vec<u8> {
    let mut text = text.to_vec();
    let mut rest = text.len();
    while let Some(mut at) = text[..rest].iter().position(|byte| *byte == b'#') {
        rest -= at;
        loop {
            text[at] = b' ';
            at += 1;
            rest -= 1;
            if rest == 0 || text.get(at).is_none_or(|byte| *byte == b'\n') {
                break;
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PATH: &[u8] = b"/usr/lib/libnvshare.so";

    fn with(text: &str) -> Result<String, Refusal> {
        super::with(text.as_bytes(), PATH).map(|new| String::from_utf8(new).expect("text"))
    }

    fn without(text: &str) -> String {
        String::from_utf8(super::without(text.as_bytes())).expect("text")
    }

    #[test]
    fn our_entry_is_appended_as_a_line() {
        for (before, after) in [
            ("", "/usr/lib/libnvshare.so\n"),
            ("a.so\n", "a.so\n/usr/lib/libnvshare.so\n"),
            ("a.so", "a.so\n/usr/lib/libnvshare.so"),
            ("a.so:b.so c.so", "a.so:b.so c.so\n/usr/lib/libnvshare.so"),
            ("a.so\r\n", "a.so\r\n/usr/lib/libnvshare.so\n"),
            ("a.so # why", "a.so # why\n/usr/lib/libnvshare.so"),
            ("# /usr/lib/libnvshare.so\n", "# /usr/lib/libnvshare.so\n/usr/lib/libnvshare.so\n"),
        ] {
            assert_eq!(with(before).as_deref(), Ok(after), "{before:?}");
            assert_eq!(without(after), before);
        }
    }

    #[test]
    fn an_older_entry_of_ours_is_replaced_in_place() {
        for (before, after) in [
            ("/opt/libnvshare.so\n", "/usr/lib/libnvshare.so\n"),
            ("libnvshare.so", "/usr/lib/libnvshare.so"),
            ("/usr/lib/libnvshare.so\r\n", "/usr/lib/libnvshare.so\n"),
            ("a.so:/opt/$LIB/libnvshare.so b.so", "a.so:/usr/lib/libnvshare.so b.so"),
            ("/opt/libnvshare.so\na.so\n/usr/lib/libnvshare.so\n", "/usr/lib/libnvshare.so\na.so\n"),
        ] {
            assert_eq!(with(before).as_deref(), Ok(after), "{before:?}");
        }
    }

    #[test]
    fn removal_keeps_all_other_bytes() {
        for (before, after) in [
            ("/usr/lib/libnvshare.so", ""),
            ("libnvshare.so\n", ""),
            ("\nlibnvshare.so\n\n", "\n\n"),
            ("a.so libnvshare.so b.so\n", "a.so b.so\n"),
            ("libnvshare.so:b.so\n", "b.so\n"),
            ("a.so:libnvshare.so\n", "a.so\n"),
            ("a.so\r\n/x/libnvshare.so\r\nb.so\r\n", "a.so\r\nb.so\r\n"),
            ("/x/libnvshare.so a.so /y/libnvshare.so", "a.so"),
            ("a.so\0libnvshare.so\0b.so", "a.so\0\0b.so"),
            ("# libnvshare.so\n", "# libnvshare.so\n"),
            ("mylibnvshare.so libnvshare.so.1", "mylibnvshare.so libnvshare.so.1"),
        ] {
            assert_eq!(without(before), after, "{before:?}");
        }
    }

    #[test]
    fn a_text_that_the_loader_would_parse_differently_is_refused() {
        assert_eq!(with("a.so\0b.so"), Err(Refusal::Nul));
        // The loader finds the second comment only if the text after the first comment is at least
        // as long as the text before the second comment.
        assert_eq!(with("# one\n# two\n"), Err(Refusal::Comments));
    }

    fn texts() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            4 => "[a-c/.]{1,4}".prop_map(String::into_bytes),
            4 => prop::sample::select(vec![&b" "[..], b"\t", b"\n", b"\r\n", b":", b"\n\n"]).prop_map(<[u8]>::to_vec),
            1 => Just(b"#".to_vec()),
            1 => Just(b"/x/libnvshare.so".to_vec()),
            1 => Just(PATH.to_vec()),
            1 => any::<u8>().prop_map(|byte| vec![byte]),
        ];
        prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn adding_and_removing_restores_the_bytes(text in texts()) {
            let clean = super::without(&text);
            if let Ok(on) = super::with(&clean, PATH) {
                prop_assert_eq!(super::without(&on), clean);
            }
        }

        #[test]
        fn adding_is_idempotent(text in texts()) {
            if let Ok(on) = super::with(&text, PATH) {
                prop_assert_eq!(names(&on).into_iter().filter(|name| is_ours(name)).collect::<Vec<_>>(), vec![PATH]);
                prop_assert_eq!(super::with(&on, PATH), Ok(on.clone()));
            }
        }

        #[test]
        fn removing_leaves_no_entry_of_ours(text in texts()) {
            let off = super::without(&text);
            prop_assert!(!names(&off).into_iter().any(is_ours));
            prop_assert_eq!(super::without(&off), off);
        }

        #[test]
        fn other_entries_keep_their_order(text in texts()) {
            let others = |text: &[u8]| -> Vec<Vec<u8>> {
                names(text).into_iter().filter(|name| !is_ours(name)).map(<[u8]>::to_vec).collect()
            };
            if let Ok(on) = super::with(&text, PATH) {
                prop_assert_eq!(others(&on), others(&text));
            }
            if !text.contains(&b'#') {
                prop_assert_eq!(others(&super::without(&text)), others(&text));
            }
        }
    }
}
