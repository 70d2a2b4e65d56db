//! A stand-in for kubelet, to try the plugin with real GPUs on hosts without kubelet. Accepts one registration, then prints
//! the list of devices and the answer for a container with one slot of the first GPU.
//!
//!   cargo run -p nvshare-device-plugin --example kubelet -- DIRECTORY
//!
//! DIRECTORY is the argument of `nvshare-device-plugin --kubelet`.

#[path = "../tests/support/kubelet.rs"]
#[allow(dead_code)]
mod kubelet;

/// The stand-in's timeout.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);

use std::path::PathBuf;

use kubelet::Kubelet;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let Some(directory) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: kubelet DIRECTORY");
        std::process::exit(2);
    };
    let mut kubelet = Kubelet::start(&directory);
    let mut plugin = kubelet.plugin().await;
    let devices = plugin.next().await.expect("a list").to_vec();
    println!("{} devices", devices.len());
    for device in &devices {
        println!("{} {} {:?}", device.id, device.health, device.topology);
    }
    let first = devices.first().expect("a device").id.clone();
    let answer = plugin.allocate(&[&[&first]]).await.expect("an answer");
    println!("{:#?}", answer.container_responses);
}
