//! The folders of `src/` are layers: a module uses only its own layer and lower layers. So folders
//! do not import each other in cycles, and each layer can be read without the layers above it. The
//! files of a folder must not import each other in cycles either. The folder's `mod.rs` is exempt:
//! it uses the files, and the files use it.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// From the lowest to the highest.
const LAYERS: [&str; 14] = [
    "sys",
    "env",
    "connection",
    "driver",
    "submit",
    "memory",
    "gpu",
    "registry",
    "client",
    "copies",
    "calls",
    "nvml",
    "lookup",
    "hooks",
];

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

/// The paths that begin with `root`, `crate::` or `super::`, with lists in braces written out.
fn paths(code: &str, root: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for rest in code.split(root).skip(1) {
        expand(rest, &[], &mut found);
    }
    found
}

/// Adds the paths at the start of `text`, each prefixed with `before`. Returns the rest of the
/// text.
fn expand<'a>(text: &'a str, before: &[String], found: &mut Vec<Vec<String>>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = expand(rest, before, found).trim_start();
            match rest.strip_prefix(',').map(str::trim_start) {
                Some(next) if !next.starts_with('}') => rest = next,
                next => {
                    let end = next.unwrap_or(rest);
                    return end.strip_prefix('}').unwrap_or(end);
                }
            }
        }
    }
    let len = text.find(|c: char| !c.is_alphanumeric() && c != '_' && c != '*').unwrap_or(text.len());
    let (name, rest) = text.split_at(len);
    let path = [before, &[name.to_owned()]].concat();
    match rest.strip_prefix("::") {
        Some(rest) => expand(rest, &path, found),
        None => {
            found.push(path);
            match rest.strip_prefix(" as ") {
                Some(rest) => rest.trim_start_matches(|c: char| c.is_alphanumeric() || c == '_'),
                None => rest,
            }
        }
    }
}

/// The names directly after each `crate::`, including the names in a list in braces.
fn used(code: &str) -> Vec<String> {
    paths(code, "crate::").into_iter().filter_map(|path| path.into_iter().next()).collect()
}

/// The parts of a file's module path, such as `memory`, `space` and `chunks`. A `mod.rs` has the
/// path of its folder.
fn module(source: &Path, file: &Path) -> Vec<String> {
    let path = file.strip_prefix(source).expect("below src").with_extension("");
    let parts = path.components().map(|part| part.as_os_str().to_str().expect("a name").to_owned());
    parts.filter(|part| part != "mod").collect()
}

/// Uses of one file of a folder by another, where neither is the folder's `mod.rs`: from, to.
fn uses_in_folders(source: &Path) -> Vec<(String, String)> {
    let mut uses = Vec::new();
    for file in files(source) {
        let own = module(source, &file);
        // Unit tests, at the end of the file, do not count.
        let text = fs::read_to_string(&file).expect("a source");
        let code = code(text.split("#[cfg(test)]\nmod tests").next().unwrap_or(""));
        let parent = own.split_last().map_or(&[][..], |(_, parent)| parent);
        let beside = paths(&code, "super::").into_iter().map(|path| [parent, &path[..]].concat());
        for path in paths(&code, "crate::").into_iter().chain(beside) {
            let common = own.iter().zip(&path).take_while(|(own, other)| own == other).count();
            // Only other files of the same folder count, not the folder itself.
            if common == 0 || common >= own.len() || common >= path.len() {
                continue;
            }
            let folder = own[..common].iter().fold(source.to_owned(), |folder, part| folder.join(part));
            let target = folder.join(&path[common]);
            if target.is_dir() || target.with_extension("rs").is_file() {
                uses.push((own[..=common].join("::"), path[..=common].join("::")));
            }
        }
    }
    uses.sort();
    uses.dedup();
    uses
}

/// Groups of modules that all use each other, directly or indirectly.
fn circles(uses: &[(String, String)]) -> Vec<Vec<String>> {
    let reached = |from: &String| {
        let mut reached = Vec::new();
        let mut next = vec![from];
        while let Some(module) = next.pop() {
            for (_, to) in uses.iter().filter(|(user, _)| user == module) {
                if !reached.contains(to) {
                    reached.push(to.clone());
                    next.push(to);
                }
            }
        }
        reached
    };
    let mut circles: Vec<Vec<String>> = Vec::new();
    for (module, _) in uses {
        if circles.iter().flatten().any(|known| known == module) {
            continue;
        }
        let mut circle = reached(module);
        circle.retain(|other| reached(other).contains(module));
        circle.sort();
        if circle.len() > 1 {
            circles.push(circle);
        }
    }
    circles
}

#[test]
fn crate_paths_are_extracted() {
    let code = code("use crate::{a::{self, b::*}, c, // crate::d\n e::f,}; crate::g::h();");
    assert_eq!(used(&code), ["a", "a", "c", "e", "g"]);
    let found: Vec<_> = paths(&code, "crate::").iter().map(|path| path.join("::")).collect();
    assert_eq!(found, ["a::self", "a::b::*", "c", "e::f", "g::h"]);
}

#[test]
fn cycles_are_found() {
    let uses = [("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e")];
    let uses: Vec<_> = uses.map(|(from, to)| (from.to_owned(), to.to_owned())).into();
    assert_eq!(circles(&uses), [["a", "b", "c"]]);
}

/// Files of one folder use each other in one direction only.
#[test]
fn no_folder_has_cyclic_dependencies() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let uses = uses_in_folders(&source);
    assert!(uses.len() > 50, "only {} uses were found", uses.len());
    assert!(circles(&uses).is_empty(), "{:#?}", circles(&uses));
}

#[test]
fn no_layer_uses_a_higher_layer() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut wrong = Vec::new();
    let mut checked = 0;
    for file in files(&source) {
        let path = file.strip_prefix(&source).expect("below src");
        let mut parts = path.components().map(|part| part.as_os_str().to_str().expect("a name"));
        let (first, is_in_folder) = (parts.next().expect("a name"), parts.next().is_some());
        if !is_in_folder {
            continue; // lib.rs, and other files that belong to no layer
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
