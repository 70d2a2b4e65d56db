//! The pages for developers name only files that exist.

use std::path::Path;
use std::process::Command;

/// Names in backticks that are paths of Rust files.
fn named(page: &str) -> Vec<&str> {
    page.split('`').skip(1).step_by(2).filter(|name| name.ends_with(".rs") && !name.contains(['*', ' '])).collect()
}

#[test]
fn developers_pages_name_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    if !root.join(".git").exists() {
        return; // a source package
    }
    let listed = Command::new("git").arg("ls-files").current_dir(root).output().expect("git");
    let files = String::from_utf8(listed.stdout).expect("UTF-8");
    for (page, text) in [
        ("ARCHITECTURE.md", include_str!("../../ARCHITECTURE.md")),
        ("CONTRIBUTING.md", include_str!("../../CONTRIBUTING.md")),
    ] {
        let names = named(text);
        assert!(names.len() > 5, "{page}: {names:?}");
        // A page may name a file by any suffix of its path.
        let is_there = |name: &str| files.lines().any(|file| file == name || file.ends_with(&format!("/{name}")));
        let missing: Vec<&str> = names.into_iter().filter(|name| !is_there(name)).collect();
        assert_eq!(missing, [""; 0], "{page}");
    }
}
