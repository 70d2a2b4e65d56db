//! `coverage/entry-points.tsv` contains a decision for every entry point of the driver. These tests
//! compare this table with the hooks that `src/hooks/` declares, and with the names that PyTorch
//! was seen to look up.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The lines of a list that are neither empty nor a comment.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// One line of the table.
#[derive(Debug, Clone)]
struct Entry {
    name: String,
    flavour: Option<String>,
    decision: String,
    reason: String,
}

impl Entry {
    fn parse(line: &str) -> Option<Self> {
        let [name, flavour, decision, reason] = line.split('\t').collect::<Vec<_>>().try_into().ok()?;
        let flavour = match flavour {
            "-" => None,
            "_ptsz" | "_ptds" => Some(flavour.to_owned()),
            _ => return None,
        };
        let is_name = |n: &str| {
            n.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()))
                && n.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
                && !n.ends_with("_ptsz")
                && !n.ends_with("_ptds")
        };
        let is_decision = matches!(decision, "hooked" | "passed" | "missing");
        let has_reason = !reason.is_empty() && reason == reason.trim();
        (is_name(name) && is_decision && has_reason).then(|| Self {
            name: name.to_owned(),
            flavour,
            decision: decision.to_owned(),
            reason: reason.to_owned(),
        })
    }

    /// The names that the driver exports for this entry point.
    fn exports(&self) -> impl Iterator<Item = String> {
        let flavour = self.flavour.as_ref().map(|flavour| format!("{}{flavour}", self.name));
        std::iter::once(self.name.clone()).chain(flavour)
    }

    /// The name of the hook file: the part of `reason` before `: `. Empty if there is none.
    fn file(&self) -> &str {
        self.reason.split_once(": ").map_or("", |(file, _)| file)
    }
}

fn table() -> Vec<Entry> {
    let text = read(&path("coverage/entry-points.tsv"));
    lines(&text).map(|line| Entry::parse(line).unwrap_or_else(|| panic!("not an entry: {line:?}"))).collect()
}

/// The names that a file of hooks declares: `[name | name] (…) …` inside of `hooks! { … }`.
fn declared(source: &str) -> Vec<String> {
    let Some((_, hooks)) = source.split_once("\nhooks! {") else { return Vec::new() };
    let names = hooks.split("\n    [").skip(1).filter_map(|rest| rest.split_once(']')).map(|(names, _)| names);
    names.flat_map(|names| names.split('|')).map(|name| name.trim().to_owned()).collect()
}

/// All hooks of the driver, each with the file that declares it. Skips folders, because their hooks
/// are for other libraries.
fn hooks() -> BTreeMap<String, String> {
    let mut hooks = BTreeMap::new();
    let entries = fs::read_dir(path("src/hooks")).expect("the folder of hooks");
    for file in entries.map(|entry| entry.expect("an entry of a folder").path()).filter(|path| path.is_file()) {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).expect("a name").to_owned();
        for name in declared(&read(&file)) {
            let twice = hooks.insert(name.clone(), stem.clone());
            assert_eq!(twice, None, "{name} is declared twice");
        }
    }
    assert!(hooks.contains_key("cuLaunchKernel_ptsz"), "the hooks were not found: {hooks:?}");
    hooks
}

#[test]
fn every_table_line_is_valid_and_unique() {
    let mut seen = BTreeSet::new();
    for name in table().iter().flat_map(Entry::exports) {
        assert!(seen.insert(name.clone()), "{name} is there twice");
    }
    assert!(seen.len() > 700, "the CUDA 13 driver has more than {} exports", seen.len());
}

#[test]
fn hooked_table_entries_match_the_declared_hooks() {
    let mut decided = BTreeSet::new();
    for entry in table().iter().filter(|entry| entry.decision == "hooked") {
        decided.extend(entry.exports().map(|name| (name, entry.file().to_owned())));
    }
    let declared: BTreeSet<_> = hooks().into_iter().collect();
    let not_declared: Vec<_> = decided.difference(&declared).collect();
    let not_decided: Vec<_> = declared.difference(&decided).collect();
    assert!(
        not_declared.is_empty(),
        "hooked in the table, but not declared in that file of src/hooks/: {not_declared:?}"
    );
    assert!(not_decided.is_empty(), "declared in src/hooks/, but not hooked from there in the table: {not_decided:?}");
}

#[test]
fn every_entry_point_seen_in_pytorch_is_in_the_table() {
    let known: BTreeSet<_> = table().iter().flat_map(Entry::exports).collect();
    let seen = read(&path("coverage/seen-in-pytorch.txt"));
    let unknown: Vec<_> = lines(&seen).filter(|name| !known.contains(*name)).collect();
    assert!(unknown.is_empty(), "not in the table: {unknown:?}");
}

#[test]
fn no_table_entry_is_marked_missing() {
    let missing: Vec<_> = table().into_iter().filter(|e| e.decision == "missing").map(|e| e.name).collect();
    assert!(missing.is_empty(), "{} are to be hooked: {missing:?}", missing.len());
}

/// `compare-headers.py` runs by hand when a CUDA release comes. Until then, only this test notices that
/// a file or a name has moved.
#[test]
fn the_comparison_with_headers_names_constants_and_structures_that_exist() {
    let script = read(&path("coverage/compare-headers.py"));
    let named: Vec<(&str, &str)> = script
        .lines()
        .filter_map(|line| line.strip_prefix("    (\"")?.split_once("\"):"))
        .map(|(key, _)| key.split_once("\", \"").expect("a file and a name"))
        .collect();
    assert!(named.len() > 30, "{named:?}");
    for (file, name) in named {
        let text = read(&path("src").join(file));
        let is_there = ["const ", "struct "].iter().any(|kind| text.contains(&format!("{kind}{name}")));
        assert!(is_there, "{file} does not define {name}");
    }
}
