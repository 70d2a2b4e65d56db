//! The folders of `src/` are layers: a module uses its own layer and those below it, never one above. So there is no circle of
//! imports between folders, and each layer can be read without those above it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// From the lowest to the highest.
const LAYERS: [&str; 11] =
    ["sys", "env", "driver", "connection", "gate", "work", "memory", "gpu", "registry", "client", "hooks"];

fn rank(layer: &str) -> Option<usize> {
    LAYERS.iter().position(|known| *known == layer)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry of a folder").path());
    entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// A source without its comments.
fn code(source: &str) -> String {
    source.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// The names right behind each `crate::`, also of a list in braces.
fn used(code: &str) -> Vec<String> {
    let name = |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let mut used = Vec::new();
    for rest in code.split("crate::").skip(1) {
        let Some(list) = rest.strip_prefix('{') else {
            used.push(name(rest));
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if c.is_whitespace() => {}
                _ if begins && depth == 0 => {
                    used.push(name(&list[at..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    used
}

#[test]
fn names_behind_crate_are_found() {
    let code = code("use crate::{a::{self, b}, c, // crate::d\n e::f}; crate::g::h();");
    assert_eq!(used(&code), ["a", "c", "e", "g"]);
}

#[test]
fn no_layer_uses_one_above_it() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut checked = 0;
    for file in files(&source) {
        let path = file.strip_prefix(&source).expect("below src");
        let mut parts = path.components().map(|part| part.as_os_str().to_str().expect("a name"));
        let (first, is_in_folder) = (parts.next().expect("a name"), parts.next().is_some());
        if !is_in_folder {
            continue; // lib.rs, and what belongs to no layer
        }
        let own = rank(first).unwrap_or_else(|| panic!("{first} is no layer: add it to LAYERS"));
        let uses = used(&code(&fs::read_to_string(&file).expect("a source")));
        checked += uses.len();
        let above = uses.into_iter().filter(|name| rank(name).is_some_and(|rank| rank > own));
        wrong.extend(above.map(|name| format!("{} uses {name}", path.display())));
    }
    assert!(checked > 100, "only {checked} uses were found");
    assert!(wrong.is_empty(), "{wrong:#?}");
}
