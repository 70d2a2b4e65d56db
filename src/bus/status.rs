//! The status of the scheduler as one value, and its conversion to JSON for `nvsharectl status
//! --json` and debug bundles.

use serde_json::Value;

use super::{Client, Gpu, GpuUse, Room, Unproven};

/// The properties of the scheduler, its GPUs and its clients at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Status {
    pub version: String,
    pub time_quantum: u32,
    pub max_wait: u32,
    pub anti_thrash: String,
    pub policy: String,
    pub problems: Vec<String>,
    pub gpus: Vec<Gpu>,
    pub clients: Vec<Client>,
}

/// A JSON object of some of a value's fields. The keys are the fields' names, with `-` for `_`.
macro_rules! json_fields {
    ($value:expr; $($field:ident),* $(,)?) => {
        serde_json::Value::Object(
            [$((stringify!($field).replace('_', "-"), serde_json::json!($value.$field))),*].into_iter().collect(),
        )
    };
}
pub(crate) use json_fields;

impl Status {
    /// The status as JSON, with the keys of the D-Bus interface.
    pub fn json(&self) -> Value {
        let mut json = json_fields!(self; version, time_quantum, max_wait, anti_thrash, policy, problems);
        json["gpus"] = self.gpus.iter().map(gpu_json).collect();
        json["clients"] = self.clients.iter().map(client_json).collect();
        json
    }
}

/// A GPU as JSON, with the keys of `ListGpus`.
pub fn gpu_json(gpu: &Gpu) -> Value {
    let mut json = json_fields!(
        gpu; uuid, kind, name, index, total, capacity, overhead, accounting, shortfall, demand, resident, swapped,
        clients, holders, queue, gone, drained, contexts, turn_ends, expected_starts, swapped_in_bytes,
        swapped_out_bytes, link_rate, kept, others,
    );
    let room = |room: &Room| json_fields!(room; who, pid, uid, bytes, ready, ends_in);
    let unproven = |program: &Unproven| json_fields!(program; pid, uid, name);
    json["rooms"] = gpu.rooms.as_ref().map(|rooms| rooms.iter().map(room).collect::<Vec<_>>()).into();
    json["unproven"] = gpu.unproven.as_ref().map(|all| all.iter().map(unproven).collect::<Vec<_>>()).into();
    json
}

/// A client as JSON, with the keys of `ListClients`.
pub fn client_json(client: &Client) -> Value {
    let mut json = json_fields!(
        client; id, pid, uid, name, command, why, unit, slice, container, tenant, pod, pod_namespace, pod_name,
        pod_container, library, rule, rule_origin, share, rule_group, environment, environment_ignored, gang, placed,
        connected_since, stopped, sleep, paused, moving, sleep_obstacle, woken_by, wake_time,
    );
    json["gpus"] = client.gpus.iter().map(use_json).collect();
    json
}

fn use_json(usage: &GpuUse) -> Value {
    json_fields!(
        usage; uuid, state, since, engine, engine_reason, demand, resident, swapped, in_file, pinned, allowance, limit,
        memory_max, environment_memory_max, pending_limit, unverified, mapping_failures, untracked_work,
        eviction_blocked, utilization, lock_time, wait_time, grants, share_due,
    )
}
