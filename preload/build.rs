//! How `libnvshare.so` is linked, and the driver's functions that it knows to pass.

use std::{env, fs, path::Path};

/// Functions that tell what the driver knows without the GPU. They return at any time, also in a process that another has locked.
const NEVER_BLOCK: [&str; 3] = ["cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];

/// Writes what `coverage/entry-points.tsv` lets pass: the names, each with a NUL behind it, and a call of the macro that makes an
/// entry for each. Those that never block have none, and come last.
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
