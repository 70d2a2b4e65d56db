//! How `libnvshare.so` is linked, and the names of the driver's functions that it knows to pass.

use std::{env, fs, path::Path};

/// Writes the names that `coverage/entry-points.tsv` lets pass, each with a NUL behind it.
fn write_passed_names() {
    const TABLE: &str = "coverage/entry-points.tsv";
    println!("cargo:rerun-if-changed={TABLE}");
    let table = fs::read_to_string(TABLE).expect("the table of entry points");
    let mut names = String::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let [name, flavour, "passed", ..] = line.split('\t').collect::<Vec<_>>()[..] else { continue };
        names.extend([name, "\0"]);
        if flavour != "-" {
            names.extend([name, flavour, "\0"]);
        }
    }
    let folder = env::var_os("OUT_DIR").expect("cargo's folder");
    fs::write(Path::new(&folder).join("passed-names"), names).expect("the list of names");
}

fn main() {
    write_passed_names();
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        // A default Rust cdylib has none, and `ldconfig` and `dlopen` of a preloaded library want one.
        "-soname,libnvshare.so",
        // Its thread and its fork handler run on, so it stays, whoever closes it.
        "-znodelete",
        // The table of hooks means these very hooks, and the loader need not look for them.
        "-Bsymbolic",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    // Start files call constructors and destructors, of which there are none.
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
}
