//! Makes Rust of the protocol's description, without a `protoc` on the machine. The description itself, compiled, is kept
//! for a test that holds it against the published one.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

const PROTOCOL: &str = "proto/deviceplugin.proto";
/// The plugin's own service, for its probe.
const STATUS: &str = "proto/status.proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed={PROTOCOL}");
    println!("cargo:rerun-if-changed={STATUS}");
    let files = protox::compile([PROTOCOL], ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("deviceplugin.bin"), files.encode_to_vec())?;
    // The kubelet's side is for the probe and for tests.
    for files in [files, protox::compile([STATUS], ["proto"])?] {
        tonic_prost_build::configure().build_client(true).build_server(true).compile_fds(files)?;
    }
    Ok(())
}
