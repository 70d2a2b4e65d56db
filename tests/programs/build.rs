//! Links the programs to `libcuda.so.1` on machines without a driver. The linker gets a stub with
//! the driver's symbols.

use std::{env, fs, path::PathBuf, process::Command};

fn main() {
    println!("cargo:rerun-if-changed=src/cuda/api.rs");
    println!("cargo:rerun-if-changed=build.rs");
    let dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let api = fs::read_to_string("src/cuda/api.rs").expect("src/cuda/api.rs");

    let symbols =
        api.lines().filter_map(|line| line.trim().strip_prefix('"')?.split_whitespace().nth(2)?.split('(').next());
    let stub: String = symbols.map(|symbol| format!("int {symbol}(void) {{ return 34; }}\n")).collect();
    let source = dir.join("stub.c");
    fs::write(&source, stub).expect("write stub.c");
    let cc = env::var("CC").unwrap_or_else(|_| "cc".into());
    let built = Command::new(cc)
        .args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"])
        .arg(dir.join("libcuda.so"))
        .arg(&source)
        .status();
    assert!(built.is_ok_and(|status| status.success()), "cannot build the stub of libcuda.so.1 with cc");

    println!("cargo:rustc-link-search=native={}", dir.display());
    println!("cargo:rustc-link-lib=dylib=cuda");
}
