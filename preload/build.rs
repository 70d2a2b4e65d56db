//! How `libnvshare.so` is linked.

fn main() {
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
