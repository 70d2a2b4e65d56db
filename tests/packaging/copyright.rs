//! The packages' list of the crates that are linked into their programs.

use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn debian_copyright_has_every_crate_that_is_linked() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new("python3");
    command.arg(root.join("debian/crates.py")).arg("--check").stdin(Stdio::null());
    match command.output() {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(e) => eprintln!("not checked: python3: {e}"),
    }
}
