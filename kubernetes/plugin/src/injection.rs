//! The answer for a container with slots. The answer consists of names of CDI devices, or of
//! mounts, environment and device files. kubelet decides the container's slots, and `nvsharectl`
//! writes the CDI file.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use nvshare::config::paths::{LIBRARY_IN_CONTAINERS, PRELOAD_IN_CONTAINERS, SOCKETS_IN_CONTAINERS};
use tonic::Status;

use crate::config::{Config, Inject, Mounts};
use crate::devices::{Devices, Gpu};
use crate::names::quoted;
use crate::protocol::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};

/// The variable from which NVIDIA's container runtime takes the GPUs of a container.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The driver's device files that do not belong to a single GPU.
const COMMON_NODES: [&str; 3] = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"];

/// The answer for a container with these slots.
pub fn answer(config: &Config, devices: &Devices, ids: &[String]) -> Result<ContainerAllocateResponse, Status> {
    let gpus = gpus(devices, ids)?;
    match config.inject {
        Inject::Cdi => {
            let name = |gpu: &&Gpu| CdiDevice { name: format!("{}={}", config.cdi_kind, gpu.uuid) };
            Ok(ContainerAllocateResponse { cdi_devices: gpus.iter().map(name).collect(), ..Default::default() })
        }
        Inject::Mounts => mounted(&config.mounts, &gpus),
    }
}

/// Returns the GPUs of these slots, each GPU once.
fn gpus<'a>(devices: &'a Devices, ids: &[String]) -> Result<Vec<&'a Gpu>, Status> {
    if ids.is_empty() {
        return Err(Status::invalid_argument("a container requests no device. Request at least one"));
    }
    let (mut seen, mut positions) = (BTreeSet::new(), BTreeSet::new());
    for id in ids {
        if !seen.insert(id) {
            return Err(Status::invalid_argument(format!("a container requests the device {} twice", quoted(id))));
        }
        let (at, _) = devices.find(id).ok_or_else(|| {
            Status::not_found(format!("unknown device {}. ListAndWatch lists the devices", quoted(id)))
        })?;
        positions.insert(at);
    }
    let gpus: Vec<&Gpu> = positions.into_iter().filter_map(|at| devices.gpu(at)).collect();
    match gpus.iter().find_map(|gpu| Some((gpu, gpu.problem.as_ref()?))) {
        Some((gpu, problem)) => Err(Status::failed_precondition(format!("{} is unhealthy: {problem}", gpu.uuid))),
        None => Ok(gpus),
    }
}

fn mounted(mounts: &Mounts, gpus: &[&Gpu]) -> Result<ContainerAllocateResponse, Status> {
    let mount = |host: &Path, container: &str| Mount {
        container_path: container.to_owned(),
        host_path: host.display().to_string(),
        read_only: true,
    };
    let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    Ok(ContainerAllocateResponse {
        envs: HashMap::from([(VISIBLE_DEVICES.to_owned(), uuids.join(","))]),
        mounts: vec![
            mount(&mounts.library, LIBRARY_IN_CONTAINERS),
            mount(&mounts.sockets, SOCKETS_IN_CONTAINERS),
            mount(&mounts.preload, PRELOAD_IN_CONTAINERS),
        ],
        devices: if mounts.device_nodes { nodes(gpus)? } else { Vec::new() },
        ..Default::default()
    })
}

fn nodes(gpus: &[&Gpu]) -> Result<Vec<DeviceSpec>, Status> {
    let mut paths: Vec<String> = COMMON_NODES.map(str::to_owned).to_vec();
    for gpu in gpus {
        // A slice also needs the device files of its instances. Only the driver's own tools know
        // the numbers of these files.
        let minor = gpu.minor.filter(|_| gpu.uuid.starts_with("GPU-")).ok_or_else(|| {
            Status::failed_precondition(format!(
                "the device files of {} are unknown: device-nodes supports only whole GPUs that NVML lists. Set inject \
                 = \"cdi\"",
                gpu.uuid
            ))
        })?;
        paths.push(format!("/dev/nvidia{minor}"));
    }
    let node = |path: String| DeviceSpec { container_path: path.clone(), host_path: path, permissions: "rw".into() };
    Ok(paths.into_iter().map(node).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    fn devices() -> Devices {
        let gpu = |uuid: &str, minor| Gpu {
            uuid: uuid.into(),
            index: Some(0),
            minor,
            slots: 3,
            problem: (uuid == "GPU-c").then(|| "XID 79".into()),
            ..Gpu::default()
        };
        Devices {
            gpus: vec![gpu("GPU-a", Some(4)), gpu("GPU-b", Some(5)), gpu("GPU-c", Some(6)), gpu("MIG-d", Some(7))],
        }
    }

    fn give(settings: &str, ids: &[&str]) -> Result<ContainerAllocateResponse, Status> {
        let config = Config::parse(settings, "x".as_ref()).expect("it is right");
        answer(&config, &devices(), &ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn each_allocated_gpu_is_one_cdi_device() {
        let answer =
            give("cdi-kind = \"example.com/gpu\"", &["GPU-b::1", "GPU-a::0", "GPU-b::0"]).expect("they are right");
        let names: Vec<&str> = answer.cdi_devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["example.com/gpu=GPU-a", "example.com/gpu=GPU-b"]);
        assert!(answer.envs.is_empty() && answer.mounts.is_empty() && answer.devices.is_empty());
    }

    #[test]
    fn mount_injection_sets_mounts_and_the_visible_devices() {
        let settings = "inject = \"mounts\"\n[mounts]\nlibrary = \"/opt/libnvshare.so\"\npreload = \"/opt/preload\"";
        let answer = give(settings, &["GPU-b::1", "GPU-a::0"]).expect("they are right");
        assert_eq!(answer.envs, HashMap::from([("NVIDIA_VISIBLE_DEVICES".into(), "GPU-a,GPU-b".into())]));
        let mounts: Vec<_> =
            answer.mounts.iter().map(|m| (m.host_path.as_str(), m.container_path.as_str(), m.read_only)).collect();
        let expected = [
            ("/opt/libnvshare.so", "/usr/lib/nvshare/libnvshare.so", true),
            ("/run/nvshare", "/run/nvshare", true),
            ("/opt/preload", "/etc/ld.so.preload", true),
        ];
        assert_eq!(mounts, expected);
        assert!(answer.cdi_devices.is_empty() && answer.devices.is_empty());
    }

    #[test]
    fn device_nodes_adds_the_gpus_device_files() {
        let settings = "inject = \"mounts\"\n[mounts]\ndevice-nodes = true";
        let answer = give(settings, &["GPU-b::1", "GPU-b::0"]).expect("they are right");
        let nodes: Vec<&str> = answer.devices.iter().map(|node| node.host_path.as_str()).collect();
        assert_eq!(nodes, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia5"]);
        let slice = give(settings, &["MIG-d::0"]).expect_err("a slice has others");
        assert!(slice.message().contains("the device files of MIG-d are unknown"), "{slice}");
    }

    #[test]
    fn impossible_allocations_are_rejected_with_a_reason() {
        for (ids, code, said) in [
            (&[][..], Code::InvalidArgument, "requests no device"),
            (&["GPU-a::0", "GPU-a::0"], Code::InvalidArgument, "requests the device \"GPU-a::0\" twice"),
            (&["GPU-a::3"], Code::NotFound, "unknown device \"GPU-a::3\""),
            (&["GPU-a::0", "\u{0}"], Code::NotFound, "unknown device \"\\0\""),
            (&["GPU-a::0", "GPU-c::0"], Code::FailedPrecondition, "GPU-c is unhealthy: XID 79"),
        ] {
            let status = give("", ids).expect_err("it cannot be given");
            assert_eq!(status.code(), code, "{ids:?}");
            assert!(status.message().contains(said), "{ids:?}: {status}");
        }
    }
}
