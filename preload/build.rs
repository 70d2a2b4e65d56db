//! Links `libnvshare.so`, and lists the driver's functions that the library passes.

use std::{env, fs, path::Path};

/// Queries that the driver answers without the GPU. They return at any time, even in a process that another has locked.
const NEVER_BLOCK: [&str; 3] = ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];

/// Writes the list of functions that `coverage/entry-points.tsv` lets pass: the names, each followed by a NUL, and a
/// call of the macro that creates an entry for each. Functions that never block have no entry, and come last.
fn write_passed() {
    const TABLE: &str = "coverage/entry-points.tsv";
    println!("cargo:rerun-if-changed={TABLE}");
    let table = fs::read_to_string(TABLE).expect("the table of entry points");
    let mut passed = Vec::new();
    for line in table.lines().filter(|line| !line.starts_with('#')) {
        let [name, flavour, "passed", ..] = line.split('\t').collect::<Vec<_>>()[..] else { continue };
        passed.push(name.to_owned());
        if flavour != "-" {
            passed.push(format!("{name}{flavour}"));
        }
    }
    passed.retain(|name| !NEVER_BLOCK.contains(&name.as_str()));
    let numbered = passed.iter().enumerate().map(|(index, name)| format!("{name} {index}\n"));
    let entries = format!("entries! {{\n{}}}\n", numbered.collect::<String>());
    let names = passed.iter().map(String::as_str).chain(NEVER_BLOCK).flat_map(|name| [name, "\0"]);
    let folder = env::var_os("OUT_DIR").expect("cargo's folder");
    let write = |name: &str, text: String| fs::write(Path::new(&folder).join(name), text).expect("a file of the build");
    write("passed-names", names.collect());
    write("passed-entries.rs", entries);
}

fn main() {
    write_passed();
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        // By default a Rust cdylib has none, and `ldconfig` and `dlopen` of a preloaded library need one.
        "-soname,libnvshare.so",
        // Its thread and its fork handler keep running, so it must stay loaded, even if the program closes it.
        "-znodelete",
        // The table of hooks refers to these very hooks, and the loader need not look them up.
        "-Bsymbolic",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    // Start files call constructors and destructors, and this library has none.
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
}
