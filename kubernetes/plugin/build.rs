//! Generates Rust from the protocols' descriptions, without `protoc`. Also keeps the compiled
//! descriptions of kubelet's protocols, which tests compare with the published protocols.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

/// kubelet's protocols for device plugins and for DRA drivers.
const KUBELET: [&str; 4] = ["deviceplugin", "dra", "dra-health", "registration"];
/// The plugin's own service, used by its probe.
const STATUS: &str = "status";

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    for protocol in KUBELET.into_iter().chain([STATUS]) {
        let source = format!("proto/{protocol}.proto");
        println!("cargo:rerun-if-changed={source}");
        let files = protox::compile([source], ["proto"])?;
        std::fs::write(out.join(format!("{protocol}.bin")), files.encode_to_vec())?;
        // The probe and tests use the client side.
        tonic_prost_build::configure().build_client(true).build_server(true).compile_fds(files)?;
    }
    Ok(())
}
