//! Names the library as programs ask for it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // What cuGetProcAddress finds is this library's own, whatever is preloaded.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
}
