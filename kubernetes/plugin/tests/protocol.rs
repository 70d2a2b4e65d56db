//! Compares our copies of kubelet's protocols with the published protocols: each message, field,
//! number and type. The lists for comparison were made from k8s.io/kubelet/pkg/apis:
//! deviceplugin/v1beta1 (kubernetes 0619cbbff1ff), dra/v1 (53eddfd35a50), dra-health/v1alpha1
//! (c4b5de207d1f) and pluginregistration/v1 (56e225f4b8de). Also compares encodings with
//! hand-written bytes.

use std::collections::BTreeSet;

use nvshare_device_plugin::protocol::{
    AllocateResponse, CdiDevice, ContainerAllocateResponse, Device, NumaNode, TopologyInfo,
};
use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FileDescriptorSet};

const DEVICE_PLUGIN: [&str; 34] = [
    "DevicePluginOptions.pre_start_required 1 bool",
    "DevicePluginOptions.get_preferred_allocation_available 2 bool",
    "RegisterRequest.version 1 string",
    "RegisterRequest.endpoint 2 string",
    "RegisterRequest.resource_name 3 string",
    "RegisterRequest.options 4 DevicePluginOptions",
    "ListAndWatchResponse.devices 1 repeated Device",
    "TopologyInfo.nodes 1 repeated NUMANode",
    "NUMANode.ID 1 int64",
    "Device.ID 1 string",
    "Device.health 2 string",
    "Device.topology 3 TopologyInfo",
    "PreStartContainerRequest.devices_ids 1 repeated string",
    "PreferredAllocationRequest.container_requests 1 repeated ContainerPreferredAllocationRequest",
    "ContainerPreferredAllocationRequest.available_deviceIDs 1 repeated string",
    "ContainerPreferredAllocationRequest.must_include_deviceIDs 2 repeated string",
    "ContainerPreferredAllocationRequest.allocation_size 3 int32",
    "PreferredAllocationResponse.container_responses 1 repeated ContainerPreferredAllocationResponse",
    "ContainerPreferredAllocationResponse.deviceIDs 1 repeated string",
    "AllocateRequest.container_requests 1 repeated ContainerAllocateRequest",
    "ContainerAllocateRequest.devices_ids 1 repeated string",
    "CDIDevice.name 1 string",
    "AllocateResponse.container_responses 1 repeated ContainerAllocateResponse",
    "ContainerAllocateResponse.envs 1 map",
    "ContainerAllocateResponse.mounts 2 repeated Mount",
    "ContainerAllocateResponse.devices 3 repeated DeviceSpec",
    "ContainerAllocateResponse.annotations 4 map",
    "ContainerAllocateResponse.cdi_devices 5 repeated CDIDevice",
    "Mount.container_path 1 string",
    "Mount.host_path 2 string",
    "Mount.read_only 3 bool",
    "DeviceSpec.container_path 1 string",
    "DeviceSpec.host_path 2 string",
    "DeviceSpec.permissions 3 string",
];

const DEVICE_PLUGIN_METHODS: [&str; 6] = [
    "Registration.Register RegisterRequest Empty",
    "DevicePlugin.GetDevicePluginOptions Empty DevicePluginOptions",
    "DevicePlugin.ListAndWatch Empty stream ListAndWatchResponse",
    "DevicePlugin.GetPreferredAllocation PreferredAllocationRequest PreferredAllocationResponse",
    "DevicePlugin.Allocate AllocateRequest AllocateResponse",
    "DevicePlugin.PreStartContainer PreStartContainerRequest PreStartContainerResponse",
];

const DRA: [&str; 14] = [
    "NodePrepareResourcesRequest.claims 1 repeated Claim",
    "NodePrepareResourcesResponse.claims 1 map",
    "NodePrepareResourceResponse.devices 1 repeated Device",
    "NodePrepareResourceResponse.error 2 string",
    "Device.request_names 1 repeated string",
    "Device.pool_name 2 string",
    "Device.device_name 3 string",
    "Device.cdi_device_ids 4 repeated string",
    "NodeUnprepareResourcesRequest.claims 1 repeated Claim",
    "NodeUnprepareResourcesResponse.claims 1 map",
    "NodeUnprepareResourceResponse.error 1 string",
    "Claim.namespace 1 string",
    "Claim.uid 2 string",
    "Claim.name 3 string",
];

const DRA_METHODS: [&str; 2] = [
    "DRAPlugin.NodePrepareResources NodePrepareResourcesRequest NodePrepareResourcesResponse",
    "DRAPlugin.NodeUnprepareResources NodeUnprepareResourcesRequest NodeUnprepareResourcesResponse",
];

const DRA_HEALTH: [&str; 7] = [
    "DeviceIdentifier.pool_name 1 string",
    "DeviceIdentifier.device_name 2 string",
    "DeviceHealth.device 1 DeviceIdentifier",
    "DeviceHealth.health 2 enum",
    "DeviceHealth.last_updated_time 3 int64",
    "DeviceHealth.message 5 string",
    "NodeWatchResourcesResponse.devices 1 repeated DeviceHealth",
];

const DRA_HEALTH_METHODS: [&str; 1] =
    ["DRAResourceHealth.NodeWatchResources NodeWatchResourcesRequest stream NodeWatchResourcesResponse"];

const REGISTRATION: [&str; 6] = [
    "PluginInfo.type 1 string",
    "PluginInfo.name 2 string",
    "PluginInfo.endpoint 3 string",
    "PluginInfo.supported_versions 4 repeated string",
    "RegistrationStatus.plugin_registered 1 bool",
    "RegistrationStatus.error 2 string",
];

const REGISTRATION_METHODS: [&str; 2] = [
    "Registration.GetInfo InfoRequest PluginInfo",
    "Registration.NotifyRegistrationStatus RegistrationStatus RegistrationStatusResponse",
];

/// A published protocol: its package, its fields, its messages without fields, and its methods.
type Published = (&'static str, &'static [&'static str], &'static [&'static str], &'static [&'static str]);

/// Returns each of our protocols with the corresponding published protocol.
fn all() -> [(FileDescriptorSet, Published); 4] {
    let read = |compiled: &[u8]| FileDescriptorSet::decode(compiled).expect("a description");
    [
        (
            read(include_bytes!(concat!(env!("OUT_DIR"), "/deviceplugin.bin"))),
            ("v1beta1", &DEVICE_PLUGIN, &["Empty", "PreStartContainerResponse"], &DEVICE_PLUGIN_METHODS),
        ),
        (
            read(include_bytes!(concat!(env!("OUT_DIR"), "/dra.bin"))),
            ("k8s.io.kubelet.pkg.apis.dra.v1", &DRA, &[], &DRA_METHODS),
        ),
        (
            read(include_bytes!(concat!(env!("OUT_DIR"), "/dra-health.bin"))),
            ("v1alpha1", &DRA_HEALTH, &["NodeWatchResourcesRequest"], &DRA_HEALTH_METHODS),
        ),
        (
            read(include_bytes!(concat!(env!("OUT_DIR"), "/registration.bin"))),
            (
                "pluginregistration",
                &REGISTRATION,
                &["InfoRequest", "RegistrationStatusResponse"],
                &REGISTRATION_METHODS,
            ),
        ),
    ]
}

fn short(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

fn fields(message: &DescriptorProto) -> Vec<String> {
    let is_map = |name: &str| {
        let inner = message.nested_type.iter().find(|inner| inner.name() == short(name));
        inner.is_some_and(|inner| inner.options.as_ref().is_some_and(|options| options.map_entry()))
    };
    let text = |field: &prost_types::FieldDescriptorProto| {
        let kind = match field.r#type() {
            Type::Message if is_map(field.type_name()) => "map".to_owned(),
            Type::Message => short(field.type_name()).to_owned(),
            other => other.as_str_name().trim_start_matches("TYPE_").to_lowercase(),
        };
        let many = if field.label() == Label::Repeated && kind != "map" { "repeated " } else { "" };
        format!("{}.{} {} {many}{kind}", message.name(), field.name(), field.number())
    };
    message.field.iter().map(text).collect()
}

#[test]
fn messages_match_the_published_definitions() {
    for (ours, (package, published, without_fields, _)) in all() {
        let [file] = &ours.file[..] else { panic!("one file") };
        assert_eq!((file.package(), file.syntax()), (package, "proto3"));
        let fields: BTreeSet<String> = file.message_type.iter().flat_map(fields).collect();
        assert_eq!(fields, published.iter().map(|field| (*field).to_owned()).collect());
        let empty = file.message_type.iter().filter(|message| message.field.is_empty()).map(|message| message.name());
        assert_eq!(empty.collect::<BTreeSet<_>>(), without_fields.iter().copied().collect());
    }
}

#[test]
fn methods_match_the_published_definitions() {
    for (ours, (.., published)) in all() {
        let [file] = &ours.file[..] else { panic!("one file") };
        let methods = file.service.iter().flat_map(|service| {
            service.method.iter().map(|method| {
                assert!(!method.client_streaming());
                let stream = if method.server_streaming() { "stream " } else { "" };
                let (takes, gives) = (short(method.input_type()), short(method.output_type()));
                format!("{}.{} {takes} {stream}{gives}", service.name(), method.name())
            })
        });
        assert_eq!(methods.collect::<BTreeSet<_>>(), published.iter().map(|method| (*method).to_owned()).collect());
    }
}

#[test]
fn health_states_have_the_published_numbers() {
    let (ours, _) = &all()[2];
    let values =
        ours.file[0].enum_type.iter().flat_map(|all| all.value.iter().map(|value| (value.name(), value.number())));
    assert_eq!(values.collect::<Vec<_>>(), [("UNKNOWN", 0), ("HEALTHY", 1), ("UNHEALTHY", 2)]);
}

#[test]
fn messages_encode_to_known_bytes() {
    let device =
        Device { id: "a".into(), health: "b".into(), topology: Some(TopologyInfo { nodes: vec![NumaNode { id: 1 }] }) };
    assert_eq!(device.encode_to_vec(), b"\x0a\x01a\x12\x01b\x1a\x04\x0a\x02\x08\x01");
    let container = ContainerAllocateResponse {
        envs: [("k".into(), "v".into())].into(),
        cdi_devices: vec![CdiDevice { name: "n".into() }],
        ..Default::default()
    };
    let answer = AllocateResponse { container_responses: vec![container] };
    assert_eq!(answer.encode_to_vec(), b"\x0a\x0d\x0a\x06\x0a\x01k\x12\x01v\x2a\x03\x0a\x01n");
}
