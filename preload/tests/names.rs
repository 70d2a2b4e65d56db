//! Functions and files are named by nouns and verbs. Some words have one meaning in the library, and
//! appear only in the names of that meaning.

use std::{collections::BTreeSet, fs, path::Path};

/// Participles without a regular ending, and adverbs.
const WORDS: [&str; 62] = [
    "again",
    "ahead",
    "already",
    "always",
    "anew",
    "anyway",
    "apart",
    "away",
    "begun",
    "bought",
    "broken",
    "caught",
    "chosen",
    "driven",
    "drawn",
    "dying",
    "fallen",
    "felt",
    "found",
    "given",
    "gone",
    "heard",
    "held",
    "here",
    "hidden",
    "kept",
    "known",
    "laid",
    "later",
    "led",
    "left",
    "lost",
    "made",
    "meant",
    "met",
    "never",
    "not",
    "now",
    "once",
    "paid",
    "said",
    "seen",
    "sent",
    "shown",
    "sold",
    "soon",
    "sought",
    "spent",
    "spoken",
    "stuck",
    "taken",
    "taught",
    "then",
    "there",
    "thought",
    "together",
    "told",
    "torn",
    "understood",
    "woken",
    "worn",
    "written",
];

/// Names that look like participles or adverbs.
const EXCEPTIONS: [(&str, &str); 10] = [
    ("apply", "a verb"),
    ("bound_run_ahead", "a verb"),
    ("elapsed", "as in `std::time::Instant`"),
    ("managed", "managed memory is CUDA's term"),
    ("mapping", "a noun"),
    ("not_found", "CUDA's term"),
    ("now", "as in `std::time::Instant`"),
    ("once", "as in `std::sync::Once`"),
    ("spacing", "a noun"),
    ("staging", "a noun"),
];

/// Words with one meaning, and the only files whose names and declarations may contain them.
const MEANINGS: [(&str, &str, &[&str]); 6] = [
    ("turn", "the time in which a client has the GPU", &["client/", "submit/slow.rs"]),
    ("slot", "a GPU's number in the protocol", &["client/thread/dispatch.rs"]),
    ("entry", "the word through which callers enter a driver function", &["driver/"]),
    ("account", "the sizes and limits of a GPU's memory", &["memory/", "gpu/", "client/"]),
    ("adopt", "to count another process's memory as this process's", &["registry/shared/"]),
    ("settle", "the scheduler's word", &[]),
];

/// The sources without their unit tests, by their paths below `src`.
fn sources() -> Vec<(String, String)> {
    fn collect(folder: &Path, root: &Path, found: &mut Vec<(String, String)>) {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry of a folder").path();
            if path.is_dir() {
                collect(&path, root, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("fake.rs") {
                let text = fs::read_to_string(&path).expect("a source");
                let code = text.split("mod tests {").next().unwrap_or("").to_owned();
                let path = path.strip_prefix(root).expect("below src");
                found.push((path.to_str().expect("a name").to_owned(), code));
            }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    collect(&root, &root, &mut found);
    assert!(found.len() > 100, "only {} sources were found", found.len());
    found
}

/// The names that follow one of these keywords.
fn declared<'a>(code: &'a str, keywords: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or(""));
    lines.flat_map(move |line| keywords.iter().flat_map(move |keyword| line.split(keyword).skip(1))).filter_map(
        |rest| {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            rest.get(..end).filter(|name| !name.is_empty())
        },
    )
}

/// The words of a name in snake case or camel case, in lower case.
fn words(name: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut before = '_';
    for c in name.chars() {
        if c == '_' || (c.is_uppercase() && before.is_lowercase()) {
            words.push(String::new());
        }
        if c != '_' {
            words.last_mut().expect("a word").extend(c.to_lowercase());
        }
        before = c;
    }
    words
}

fn is_participle_or_adverb(word: &str) -> bool {
    const NOUNS_AND_VERBS: [&str; 8] = ["bring", "embed", "feed", "need", "seed", "speed", "string", "thing"];
    WORDS.contains(&word)
        || (["ed", "ing", "ly"].iter().any(|end| word.len() > end.len() + 1 && word.ends_with(end))
            && !NOUNS_AND_VERBS.contains(&word))
}

fn stem(path: &str) -> &str {
    Path::new(path).file_stem().and_then(|stem| stem.to_str()).expect("a name")
}

#[test]
fn no_function_or_file_is_named_by_a_participle_or_an_adverb() {
    let mut wrong = BTreeSet::new();
    let mut excepted = BTreeSet::new();
    let sources = sources();
    for (path, code) in &sources {
        for name in declared(code, &["fn "]).chain([stem(path)]) {
            let first = words(name).swap_remove(0);
            if EXCEPTIONS.iter().any(|(exception, _)| *exception == name) {
                excepted.insert(name);
            } else if is_participle_or_adverb(&first) {
                wrong.insert(format!("{path}: {name}"));
            }
        }
    }
    assert!(wrong.is_empty(), "name functions by verbs, queries by nouns or `is_…`, handlers by `on_…`: {wrong:#?}");
    let unused: Vec<_> = EXCEPTIONS.iter().filter(|(name, _)| !excepted.contains(name)).collect();
    assert!(unused.is_empty(), "no longer needed: {unused:?}");
}

#[test]
fn some_words_have_one_meaning() {
    const KEYWORDS: [&str; 8] = ["fn ", "struct ", "enum ", "const ", "static ", "type ", "trait ", "mod "];
    let mut wrong = BTreeSet::new();
    for (path, code) in sources() {
        for name in declared(&code, &KEYWORDS).chain([stem(&path)]) {
            for (word, meaning, places) in MEANINGS {
                let is_in =
                    |other: &String| other.strip_prefix(word).is_some_and(|end| ["", "s", "d", "ed"].contains(&end));
                let plural = word.replace('y', "ies");
                let has_word = words(name).iter().any(|other| is_in(other) || *other == plural);
                if has_word && !places.iter().any(|place| path.starts_with(place)) {
                    wrong.insert(format!("{path}: {name}, but `{word}` is {meaning}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn names_are_split_into_words() {
    assert_eq!(words("TurnPhase"), ["turn", "phase"]);
    assert_eq!(words("on_load"), ["on", "load"]);
    assert_eq!(words("MAX_ENTRIES"), ["max", "entries"]);
    let code = "pub fn taken(a: u8) {} // fn held()\nstruct Slot;";
    assert_eq!(declared(code, &["fn ", "struct "]).collect::<Vec<_>>(), ["taken", "Slot"]);
}
