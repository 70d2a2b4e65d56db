//! `rust-version` in `Cargo.toml` is the oldest cargo that builds everything. Other files must name
//! the same version.

const OLDEST: &str = env!("CARGO_PKG_RUST_VERSION");

/// Returns the versions that a file names between these two texts.
fn versions<'a>(text: &'a str, before: &str, after: &str) -> Vec<&'a str> {
    let is_version = |text: &&str| !text.is_empty() && text.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split(before).skip(1).filter_map(|rest| Some(rest.split_once(after)?.0)).filter(is_version).collect()
}

#[test]
fn every_file_names_the_same_minimum_cargo_version() {
    let preload = include_str!("../../preload/Cargo.toml");
    assert_eq!(versions(preload, "\nrust-version = \"", "\""), [OLDEST]);
    assert_eq!(versions(include_str!("../../CONTRIBUTING.md"), "cargo ", " or newer"), [OLDEST]);
    assert_eq!(versions(include_str!("../../docs/install.md"), "cargo ", " or newer"), [OLDEST]);
    assert_eq!(versions(include_str!("../../debian/control"), "cargo (>= ", ")"), [OLDEST]);
    assert_eq!(versions(include_str!("../../debian/control"), "cargo-web (>= ", ")"), [OLDEST]);
}
