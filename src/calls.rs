//! Tests of the sizes of files, functions and circles of calls. In a circle, each file calls functions
//! of every other file, directly or through other files, so none of them can be understood alone.
//! Imports do not show such circles, because a type's methods need no import.
//!
//! The test reads text, as rustfmt leaves it, and knows no types. It guesses the type of a receiver from
//! the names of variables, fields and functions. If a guess is wrong, a call is missed or invented. A
//! call by a trait counts as a call of each implementation that has the method.

use crate::layers::files;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The most files in a circle of calls.
const CIRCLE: usize = 3;
/// The most lines of a file, and the most lines of code of a function.
const FILE_LINES: usize = 700;
const FUNCTION_LINES: usize = 80;
/// Longer functions, with their lines of code. The list and its numbers may only shrink.
const LONG: [(&str, &str, usize); 2] =
    [("ctl/status.rs", "gpu_text", 108), ("daemon/transport/session.rs", "receive", 138)];

/// Methods that types of the standard library have too. Such a call counts only if its receiver is known.
const COMMON: &str = "add all and any as_str clear clone close cmp collect contains contains_key count default \
    enter entry eq extend filter first fmt fold from get get_mut insert into is_empty iter iter_mut join keep keys \
    last len map max min name new next of open pop push read remove replace retain rev set sub sum take take_if \
    take_while then turn values wait wait_for wake write zip";

/// A function with its file, the type whose method it is, the trait, and its text.
struct Function<'a> {
    file: &'a str,
    owner: Option<&'a str>,
    of_trait: Option<&'a str>,
    name: &'a str,
    text: String,
}

/// The files of a folder, by their path below it, without comments and tests.
type Sources = BTreeMap<String, String>;

fn sources(folder: &Path) -> Sources {
    let source = |file: &Path| {
        let name = file.strip_prefix(folder).expect("below the folder").display().to_string();
        (name, code(&fs::read_to_string(file).expect("a source")))
    };
    let is_test = |file: &&std::path::PathBuf| file.components().any(|part| part.as_os_str() == "tests");
    let is_test = |file: &&std::path::PathBuf| is_test(file) || file.file_name().is_some_and(|name| name == "tests.rs");
    files(folder).iter().filter(|file| !is_test(file)).map(|file| source(file)).collect()
}

fn indentation(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Returns a source without comments, blank lines, and items for tests.
fn code(source: &str) -> String {
    let mut code = String::new();
    let mut skipped: Option<usize> = None; // the indentation of an item for tests
    for line in source.lines() {
        // A comment follows a space. `//` in a string, as in an address, does not.
        let line = if line.trim_start().starts_with("//") { "" } else { line.split(" // ").next().unwrap_or_default() };
        if line.trim().is_empty() {
            continue;
        }
        match skipped {
            Some(indent) => {
                let ends = indentation(line) == indent && line.ends_with([';', '}', ',']);
                skipped = skipped.filter(|_| !ends);
            }
            None if line.trim() == "#[cfg(test)]" => skipped = Some(indentation(line)),
            None => code.extend([line.trim_end(), "\n"]),
        }
    }
    code
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the names in a text, with their positions.
fn names(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let starts = |at: usize| !text.get(..at).and_then(|text| text.chars().next_back()).is_some_and(is_name);
    let begin = text.char_indices().filter(move |(at, c)| is_name(*c) && !c.is_numeric() && starts(*at));
    begin.map(|(at, _)| {
        let rest = &text[at..];
        (at, &rest[..rest.find(|c| !is_name(c)).unwrap_or(rest.len())])
    })
}

/// Returns the rest of a line after its visibility and qualifiers.
fn item(line: &str) -> &str {
    let mut line = line.trim_start();
    for prefix in ["pub(crate) ", "pub(super) ", "pub ", "default ", "const ", "async ", "unsafe "] {
        line = line.strip_prefix(prefix).unwrap_or(line);
    }
    line
}

/// Returns the type at the start of a text, without its path and its parameters.
fn type_at(text: &str) -> Option<&str> {
    let path = text.trim_start_matches([' ', '&']).split(['<', ' ', '{']).next()?;
    path.rsplit("::").next().filter(|name| name.starts_with(char::is_uppercase))
}

/// Returns the type and the trait whose methods follow this line.
fn owner(line: &str) -> (Option<&str>, Option<&str>) {
    if let Some(name) = item(line).strip_prefix("trait ") {
        return (type_at(name.split(':').next().unwrap_or_default()), None);
    }
    let Some(header) = item(line).strip_prefix("impl") else { return (None, None) };
    let header = if header.starts_with('<') { header.split_once("> ").map_or("", |(_, rest)| rest) } else { header };
    match header.split_once(" for ") {
        Some((of_trait, own)) => (type_at(own), type_at(of_trait)),
        None => (type_at(header), None),
    }
}

/// Returns the name at the end of a text.
fn last_name(text: &str) -> &str {
    &text[text.trim_end_matches(is_name).len()..]
}

fn functions(sources: &Sources) -> Vec<Function<'_>> {
    let mut functions = Vec::new();
    for (file, code) in sources {
        let mut own = (None, None);
        let mut lines = code.lines();
        while let Some(line) = lines.next() {
            if indentation(line) == 0 {
                own = owner(line);
            }
            let Some(rest) = item(line).strip_prefix("fn ") else { continue };
            let name = rest.split(|c| !is_name(c)).next().unwrap_or_default();
            let indent = indentation(line);
            let mut text = line.to_owned();
            let ends = |line: &str| indentation(line) == indent && line.ends_with(['}', ';']);
            let mut last = line;
            while !ends(last) {
                let Some(line) = lines.next() else { break };
                text.extend(["\n", line]);
                last = line;
            }
            let (owner, of_trait) = if indent > 0 { own } else { (None, None) };
            functions.push(Function { file, owner, of_trait, name, text });
        }
    }
    functions
}

/// The types that the names of a folder's variables, fields and functions suggest.
struct Types<'a> {
    /// All types and traits.
    known: BTreeSet<&'a str>,
    /// By file and name. Names without a file are those of all files.
    of_variables: BTreeMap<(Option<&'a str>, &'a str), BTreeSet<&'a str>>,
    of_fields: BTreeMap<(&'a str, &'a str), BTreeSet<&'a str>>,
    of_functions: BTreeMap<&'a str, BTreeSet<&'a str>>,
    /// All names in each file, and the names before its first function.
    names: BTreeMap<&'a str, (BTreeSet<&'a str>, BTreeSet<&'a str>)>,
}

impl<'a> Types<'a> {
    fn new(sources: &'a Sources, functions: &'a [Function]) -> Self {
        let declared = |line: &'a str| {
            let item = item(line);
            let rest = ["struct ", "enum ", "trait "].iter().find_map(|kind| item.strip_prefix(kind))?;
            rest.split(|c| !is_name(c)).next()
        };
        let lines = || sources.values().flat_map(|code| code.lines());
        let known: BTreeSet<&str> = lines().filter(|line| indentation(line) == 0).filter_map(declared).collect();
        let mut types = Self {
            known,
            of_variables: BTreeMap::new(),
            of_fields: BTreeMap::new(),
            of_functions: BTreeMap::new(),
            names: BTreeMap::new(),
        };
        for (file, code) in sources {
            let of = |code: &'a str| names(code).map(|(_, name)| name).collect();
            let imports = code.split("\nfn ").next().and_then(|code| code.split("\nimpl").next());
            types.names.insert(file, (of(code), of(imports.unwrap_or_default())));
            let mut own = None; // the type whose fields follow
            for line in code.lines() {
                if indentation(line) == 0 {
                    own = declared(line);
                }
                for (at, name) in names(line) {
                    let Some(kind) = line[at + name.len()..].strip_prefix(": ").and_then(|kind| types.last(kind))
                    else {
                        continue;
                    };
                    types.of_variables.entry((Some(file), name)).or_default().insert(kind);
                    types.of_variables.entry((None, name)).or_default().insert(kind);
                    if let Some(own) = own.filter(|_| indentation(line) == 4) {
                        types.of_fields.entry((own, name)).or_default().insert(kind);
                    }
                }
            }
        }
        for function in functions {
            let header = function.text.split('{').next().unwrap_or_default();
            let Some((_, result)) = header.rsplit_once("-> ") else { continue };
            let own = function.owner.filter(|_| result.contains("Self"));
            let kind = own.or_else(|| types.last(result));
            types.of_functions.entry(function.name).or_default().extend(kind);
        }
        types
    }

    /// Returns the last known type in the text of a type, as `Gpu` in `BTreeMap<GpuId, Gpu>`.
    fn last(&self, text: &'a str) -> Option<&'a str> {
        let mut depth = 0i32;
        let end = text.char_indices().find(|(_, c)| {
            depth += match c {
                '<' | '(' => 1,
                '>' | ')' => -1,
                _ => 0,
            };
            depth < 0 || (depth == 0 && matches!(c, ',' | ';' | '=' | '{' | '|'))
        });
        let text = &text[..end.map_or(text.len(), |(at, _)| at)];
        names(text).map(|(_, name)| name).filter(|name| self.known.contains(name)).last()
    }

    /// Returns the types that the receiver at the end of `text` may have. Empty: unknown.
    fn of_receiver(&self, file: &str, own: Option<&'a str>, text: &str) -> BTreeSet<&'a str> {
        let text = text.trim_end().trim_end_matches('?');
        if let Some(rest) = text.strip_suffix(')') {
            let mut depth = 1;
            let opens = rest.char_indices().rev().find(|(_, c)| {
                depth += i32::from(*c == ')') - i32::from(*c == '(');
                depth == 0
            });
            let function = last_name(opens.map_or("", |(at, _)| &rest[..at]));
            return self.of_functions.get(function).cloned().unwrap_or_default();
        }
        let name = last_name(text);
        if name == "self" {
            return own.into_iter().collect();
        }
        let is_field = text[..text.len() - name.len()].trim_end().ends_with("self.");
        if let Some(own) = own.filter(|_| is_field) {
            return self.of_fields.get(&(own, name)).cloned().unwrap_or_default();
        }
        let in_file = self.of_variables.get(&(Some(file), name)).cloned();
        let mentioned = |kind: &&str| self.names[file].0.contains(kind);
        in_file.unwrap_or_else(|| {
            self.of_variables.get(&(None, name)).into_iter().flatten().copied().filter(mentioned).collect()
        })
    }
}

/// Returns the calls between the files of a folder.
fn calls(sources: &Sources) -> BTreeSet<(&str, &str)> {
    let functions = functions(sources);
    let types = Types::new(sources, &functions);
    let mut by_name: BTreeMap<&str, Vec<&Function>> = BTreeMap::new();
    functions.iter().for_each(|function| by_name.entry(function.name).or_default().push(function));
    let common: BTreeSet<&str> = COMMON.split_whitespace().collect();
    let mut calls = BTreeSet::new();
    for function in &functions {
        let (file, text) = (function.file, function.text.as_str());
        let body = text.find('(').unwrap_or_default();
        for (at, name) in names(text).filter(|(at, _)| *at > body) {
            let Some(all) = by_name.get(name) else { continue };
            let (before, after) = (&text[..at], &text[at + name.len()..]);
            let is_call = after.starts_with('(') || after.starts_with("::<");
            let is_method = |f: &&&Function| f.owner.is_some();
            let is_of = |kinds: &BTreeSet<&str>, f: &Function| {
                f.owner.into_iter().chain(f.of_trait).any(|kind| kinds.contains(kind))
            };
            let mut called: Vec<&Function> = if let Some(before) = before.strip_suffix("::") {
                let path = last_name(before);
                let kind = if path == "Self" { function.owner.unwrap_or_default() } else { path };
                let is_in = |file: &str| file.trim_end_matches(".rs").trim_end_matches("/mod").ends_with(path);
                let is_called = |f: &&&Function| match kind.starts_with(char::is_uppercase) {
                    true => is_of(&BTreeSet::from([kind]), f),
                    false => f.owner.is_none() && is_in(f.file),
                };
                all.iter().filter(is_called).copied().collect()
            } else if let Some(before) = before.strip_suffix('.').filter(|_| is_call) {
                let kinds = types.of_receiver(file, function.owner, before);
                let files: BTreeSet<&str> = all.iter().filter(is_method).map(|f| f.file).collect();
                let is_only = kinds.is_empty() && files.len() == 1 && !common.contains(name);
                all.iter().filter(is_method).filter(|f| is_only || is_of(&kinds, f)).copied().collect()
            } else if is_call {
                let is_imported = types.names[file].1.contains(name);
                all.iter().filter(|f| f.owner.is_none() && (f.file == file || is_imported)).copied().collect()
            } else {
                Vec::new()
            };
            // Of types with the same name, a file means its own.
            let own: Vec<_> = called.iter().filter(|f| f.file == file).map(|f| f.owner).collect();
            called.retain(|f| f.file != file && !own.contains(&f.owner));
            calls.extend(called.into_iter().map(|called| (file, called.file)));
        }
    }
    calls
}

/// Returns the circles of more than one file.
fn circles<'a>(calls: &BTreeSet<(&'a str, &'a str)>) -> BTreeSet<Vec<&'a str>> {
    let reached = |from: &'a str| {
        let (mut reached, mut todo) = (BTreeSet::new(), vec![from]);
        while let Some(at) = todo.pop() {
            for (_, to) in calls.range((at, "")..).take_while(|(from, _)| *from == at) {
                if reached.insert(*to) {
                    todo.push(to);
                }
            }
        }
        reached
    };
    let files: BTreeSet<&str> = calls.iter().map(|(from, _)| *from).collect();
    let reached: BTreeMap<&str, BTreeSet<&str>> = files.iter().map(|file| (*file, reached(file))).collect();
    let is_mutual = |one: &str, other: &str| reached.get(other).is_some_and(|reached| reached.contains(one));
    let circle = |(file, reached): (&&'a str, &BTreeSet<&'a str>)| -> Vec<&'a str> {
        reached.iter().copied().filter(|other| is_mutual(file, other)).collect()
    };
    reached.iter().map(circle).filter(|circle| circle.len() > 1).collect()
}

#[test]
fn calls_by_methods_traits_and_functions_are_found() {
    let sources = Sources::from(
        [
            ("a.rs", "use crate::d::help;\nstruct A {\n    b: B,\n}\nimpl A {\n    fn run(&self) {\n        self.b.step();\n        help();\n    }\n}\n"),
            ("b.rs", "struct B;\nimpl B {\n    fn step(&self, seen: &dyn Seen) {\n        seen.look();\n    }\n}\ntrait Seen {\n    fn look(&self);\n}\n"),
            ("c.rs", "struct C;\nimpl Seen for C {\n    fn look(&self) {\n        let a = A::new();\n        // a.run() in a comment\n        a.iter().map(A::run);\n    }\n}\n"),
            ("d.rs", "fn help() {}\n#[cfg(test)]\nmod tests {\n    fn test() {\n        A::run();\n    }\n}\n"),
        ]
        .map(|(file, source)| (file.to_owned(), code(source))),
    );
    let calls = calls(&sources);
    assert_eq!(
        calls.iter().collect::<Vec<_>>(),
        [&("a.rs", "b.rs"), &("a.rs", "d.rs"), &("b.rs", "c.rs"), &("c.rs", "a.rs")]
    );
    assert_eq!(circles(&calls), BTreeSet::from([vec!["a.rs", "b.rs", "c.rs"]]));
}

#[test]
fn no_circle_of_calls_has_many_files() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for folder in ["scheduler", "daemon/core"] {
        let sources = sources(&source.join(folder));
        let calls = calls(&sources);
        assert!(calls.len() > 80, "only {} calls were found in {folder}", calls.len());
        let large: Vec<_> = circles(&calls).into_iter().filter(|circle| circle.len() > CIRCLE).collect();
        assert!(large.is_empty(), "more than {CIRCLE} files of {folder} call each other: {large:?}");
    }
}

/// The files that pass events to the components.
#[test]
fn the_outer_objects_have_methods_in_one_place() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for (folder, outer, own) in [("scheduler", "Machine", "machine/"), ("daemon/core", "Core", "routing.rs")] {
        let sources = sources(&source.join(folder));
        let functions = functions(&sources);
        let with: BTreeSet<&str> = functions.iter().filter(|f| f.owner == Some(outer)).map(|f| f.file).collect();
        assert!(!with.is_empty() && with.iter().all(|file| file.starts_with(own)), "{outer} has methods in {with:?}");
    }
}

#[test]
fn files_and_functions_are_short() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for file in files(&source) {
        let lines = fs::read_to_string(&file).expect("a source").lines().count();
        assert!(lines <= FILE_LINES, "{} has {lines} lines", file.display());
    }
    let sources = sources(&source);
    let lengths = functions(&sources).into_iter().map(|f| (f.file, f.name, f.text.lines().count()));
    let long: Vec<_> = lengths.filter(|(.., lines)| *lines > FUNCTION_LINES).collect();
    assert_eq!(long, LONG, "functions of more than {FUNCTION_LINES} lines of code");
}
