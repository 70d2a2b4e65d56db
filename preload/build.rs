//! Sets the linker options of `libnvshare.so`, and lists the driver functions that the library
//! passes to the driver unchanged.

use std::{env, fs, path::Path};

/// Queries that the driver answers without the GPU. They return even if the driver has locked the
/// process for a checkpoint.
const NEVER_BLOCK: [&str; 3] = ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];

/// Writes two files from the functions that `coverage/entry-points.tsv` marks as passed. `passed-names`
/// contains their names, each followed by a NUL. `passed-entries.rs` calls the macro that creates an
/// entry for each function. Functions that never block need no entry, and their names are last.
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
        // A Rust cdylib has no soname by default. `ldconfig` needs one, and so does `dlopen` of a library that
        // is already preloaded.
        "-soname,libnvshare.so",
        // The library's thread and fork handler keep running, so the library must stay loaded even if the
        // program closes it.
        "-znodelete",
        // The table of hooks refers to the hooks of this library, so the loader need not look them up.
        "-Bsymbolic",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
    // Start files call constructors and destructors. This library has none in the sections that they
    // handle.
    println!("cargo:rustc-cdylib-link-arg=-nostartfiles");
}
