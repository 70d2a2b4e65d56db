//! Sets the soname under which programs load the library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // cuGetProcAddress returns this library's own functions, even if a preloaded library defines
    // the same symbols.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
