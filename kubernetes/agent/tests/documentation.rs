//! Compares the man page with the program's options and configuration keys.

use std::path::Path;

use clap::CommandFactory;
use nvshare_agent::arguments::Arguments;
use nvshare_agent::config::Config;
use nvshare_agent::permissions::{KEYS, Permissions};

/// Returns the items of the page's lists as plain words. For example, `.It Fl -probe` becomes
/// `--probe`.
fn items() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../man/nvshare-agent.8");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let items = text.lines().filter_map(|line| line.strip_prefix(".It "));
    items.map(|item| item.replace("Fl ", "-").replace("Ic ", "").replace("Li ", "")).collect()
}

#[test]
fn the_page_has_every_flag() {
    let (command, items) = (Arguments::command(), items());
    for flag in command.get_arguments().filter_map(|argument| argument.get_long()) {
        let is_described = items.iter().any(|item| item.split([' ', ',']).any(|word| word == format!("--{flag}")));
        assert!(is_described, "--{flag} is not in the page: {items:?}");
    }
}

#[test]
fn the_page_has_every_setting() {
    // The error about an unknown key lists the valid keys.
    let error = Config::parse("[[namespaces]]\nno-such-key = 1", "x".as_ref()).expect_err("there is no such key");
    let text = error.to_string();
    let names: Vec<&str> = text.split_once("expected").expect("it says what there is").1.split('`').collect();
    let items = items();
    let all: Vec<&str> = names.into_iter().skip(1).step_by(2).collect();
    assert!(all.len() > 5, "{all:?}");
    for key in all {
        assert!(items.iter().any(|item| item == key), "{key} is not in the page: {items:?}");
    }
}

#[test]
fn the_page_lists_each_keys_default_permission() {
    let (items, default) = (items(), Permissions::default());
    for key in KEYS {
        let said = items.iter().find_map(|item| {
            let (keys, values) = item.split_once(" Ta ")?;
            keys.split(" , ").any(|word| word == key).then_some(values)
        });
        let said = said.unwrap_or_else(|| panic!("{key} is not in the table: {items:?}"));
        assert_eq!(said != "no", default.may_set.contains(key), "{key}: {said}");
    }
}
