//! Tests that modules form layers: each module uses only modules of lower layers. Imports therefore
//! form no cycles, and each module can be read without the modules that use it.

use std::fs;
use std::path::{Path, PathBuf};

/// Modules of the crate, from the lowest to the highest.
const CRATE: [&str; 10] =
    ["sys", "gpu_faults", "identity", "config", "bus", "recorder", "timeline", "simulate", "daemon", "ctl"];

/// Modules of the daemon, from the lowest to the highest.
const DAEMON: [&str; 18] = [
    "logging",
    "node",
    "state_file",
    "systemd",
    "tenants",
    "transport",
    "checkpoint",
    "gpu",
    "swap_files",
    "usage",
    "core",
    "hibernate",
    "connections",
    "control",
    "metrics",
    "bus",
    "tasks",
    "run",
];

/// Modules of the daemon's core, from the lowest to the highest: the model, what observes it, the other
/// components, the routing, and the readers of all of them.
const CORE: [&str; 44] = [
    "pods",
    "claims",
    "lock_files",
    "shared_memory",
    "paused",
    "settings",
    "gangs",
    "hours",
    "groups",
    "model",
    "rules",
    "measure",
    "clients",
    "gpus",
    "io",
    "log",
    "refusals",
    "event_log",
    "counts",
    "pressure",
    "usage",
    "unproven",
    "recording",
    "observe",
    "units",
    "containers",
    "host_use",
    "swap_files",
    "sharing",
    "placement",
    "moves",
    "other_hosts",
    "sleep",
    "foreign",
    "hibernation",
    "rooms",
    "host",
    "routing",
    "view",
    "views",
    "explain",
    "describe",
    "bundle",
    "timeline",
];

/// Modules of the scheduler, from the lowest to the highest. First are components that do not
/// depend on each other's decisions. Then follow the decisions that need several components, and the
/// files that make changes.
const SCHEDULER: [&str; 21] = [
    "encoding",
    "api",
    "entity",
    "timers",
    "effects",
    "client",
    "rules",
    "policy",
    "queue",
    "quota",
    "sleep",
    "gpu",
    "fairness",
    "placement",
    "model",
    "requests",
    "sharing",
    "presence",
    "view",
    "explain",
    "machine",
];

/// The scheduler's components. Only `machine/` and `sharing/` change several of them.
const COMPONENTS: [&str; 8] = ["Gpus", "Clients", "Queues", "Fairness", "Rules", "Quota", "Placements", "Sleep"];

pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry of a folder").path());
    entries
        .flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] })
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .collect()
}

/// Returns a source without its comments and unit tests.
fn code(source: &str) -> String {
    let source = source.split("#[cfg(test)]").next().unwrap_or_default();
    source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Returns the names directly after each `prefix`, including names in braces.
fn used(code: &str, prefix: &str) -> Vec<String> {
    let name = |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let mut used = Vec::new();
    for rest in code.split(prefix).skip(1) {
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

/// Returns the uses of layers above a file's own layer. `prefix` is the path of the module that
/// contains the layers, with `::`.
fn upward(folder: &Path, prefix: &str, layers: &[&str]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut checked = 0;
    for file in files(folder) {
        let path = file.strip_prefix(folder).expect("below the folder");
        let first = path.components().next().expect("a name").as_os_str().to_str().expect("UTF-8");
        let layer = first.trim_end_matches(".rs");
        if [
            "lib",
            "mod",
            "layers",
            "calls",
            "bin",
            "scheduler",
            "idle_gap",
            "pools",
            "simulated_client",
            "checkpoint",
            "hibernate",
        ]
        .contains(&layer)
        {
            continue;
        }
        let rank = |name: &str| layers.iter().position(|layer| *layer == name);
        let own = rank(layer).unwrap_or_else(|| panic!("{layer} is no layer: add it to the list"));
        let code = code(&fs::read_to_string(&file).expect("a source"));
        // Other layers must be named by their full path, so that this test finds every use.
        let is_root =
            prefix != "super::" && (path.components().count() == 1 || path == Path::new(layer).join("mod.rs"));
        if code.contains("super::super::") || (is_root && code.contains("super::")) {
            wrong.push(format!("{} names another module by super::", path.display()));
        }
        let uses = used(&code, prefix);
        checked += uses.len();
        let above = uses.into_iter().filter(|name| rank(name).is_some_and(|rank| rank > own));
        wrong.extend(above.map(|name| format!("{} uses {name}", path.display())));
    }
    assert!(checked > 50, "only {checked} uses were found");
    wrong
}

#[test]
fn paths_with_a_prefix_are_extracted() {
    let code = code("use crate::{a::{self, b}, c, // crate::d\n e::f}; crate::g::h();\n#[cfg(test)] crate::i;");
    assert_eq!(used(&code, "crate::"), ["a", "c", "e", "g"]);
}

#[test]
fn no_module_uses_a_higher_layer() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    assert_eq!(upward(&source, "crate::", &CRATE), [""; 0]);
    assert_eq!(upward(&source.join("scheduler"), "crate::", &SCHEDULER), [""; 0]);
    assert_eq!(upward(&source.join("daemon"), "crate::daemon::", &DAEMON), [""; 0]);
    assert_eq!(upward(&source.join("daemon/core"), "super::", &CORE), [""; 0]);
}

/// The borrow checker then finds every decision that changes another component.
#[test]
fn only_two_files_of_the_scheduler_change_several_components() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/scheduler");
    for file in files(&folder) {
        let name = file.strip_prefix(&folder).expect("below the folder").display().to_string();
        let code = code(&fs::read_to_string(&file).expect("a source"));
        let is_machine = name.starts_with("machine/");
        assert!(is_machine || !code.contains("impl Machine"), "{name} has a method of the machine");
        assert!(is_machine || !code.contains("mut Machine"), "{name} changes the machine");
        let changes =
            |component: &&&str| ["&mut ", "&'a mut "].iter().any(|by| used(&code, by).contains(&component.to_string()));
        let changed: Vec<_> = COMPONENTS.iter().filter(changes).collect();
        assert!(changed.len() < 2 || is_machine || name == "sharing/mod.rs", "{name} changes {changed:?}");
    }
}
