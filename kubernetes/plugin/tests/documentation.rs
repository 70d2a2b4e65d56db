//! Compares the man page with the program's options and configuration keys.

use std::path::Path;

use clap::CommandFactory;
use nvshare_device_plugin::arguments::Arguments;
use nvshare_device_plugin::config::Config;

/// Returns the items of the page's lists as plain words. For example, `.It Fl -probe` becomes
/// `--probe`.
fn items() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../man/nvshare-device-plugin.8");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let items = text.lines().filter_map(|line| line.strip_prefix(".It "));
    items.map(|item| item.replace("Fl ", "-").replace("Ic ", "").replace(" Ar ", " ")).collect()
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
    let known = |section: &str| {
        let error =
            Config::parse(&format!("{section}\nno-such-key = 1"), "x".as_ref()).expect_err("there is no such key");
        let text = error.to_string();
        let names = text.split_once("expected").expect("it says what there is").1;
        names.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>()
    };
    let items = items();
    let all = ["", "[[gpu]]", "[mounts]", "[health]"].map(known).concat();
    assert!(all.len() > 14, "{all:?}");
    for key in all {
        let is_described = items.iter().any(|item| [&key, &format!("[{key}]"), &format!("[[{key}]]")].contains(&item));
        assert!(is_described, "{key} is not in the page: {items:?}");
    }
}
