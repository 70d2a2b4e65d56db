//! The library's SONAME: a default Rust cdylib has none, and `ldconfig` and `dlopen` of a preloaded library want one.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnvshare.so");
}
