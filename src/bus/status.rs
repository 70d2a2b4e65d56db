//! The status of the scheduler as one value, and its conversion to JSON for `nvsharectl status
//! --json` and debug bundles.

use serde_json::{Value, json};

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

impl Status {
    /// The status as JSON, with the keys of the D-Bus interface.
    pub fn json(&self) -> Value {
        json!({
            "version": self.version,
            "time-quantum": self.time_quantum,
            "max-wait": self.max_wait,
            "anti-thrash": self.anti_thrash,
            "policy": self.policy,
            "problems": self.problems,
            "gpus": self.gpus.iter().map(gpu_json).collect::<Vec<_>>(),
            "clients": self.clients.iter().map(client_json).collect::<Vec<_>>(),
        })
    }
}

/// A GPU as JSON, with the keys of `ListGpus`.
pub fn gpu_json(gpu: &Gpu) -> Value {
    json!({
        "uuid": gpu.uuid,
        "kind": gpu.kind,
        "name": gpu.name,
        "index": gpu.index,
        "total": gpu.total,
        "capacity": gpu.capacity,
        "overhead": gpu.overhead,
        "accounting": gpu.accounting,
        "shortfall": gpu.shortfall,
        "demand": gpu.demand,
        "resident": gpu.resident,
        "swapped": gpu.swapped,
        "clients": gpu.clients,
        "holders": gpu.holders,
        "queue": gpu.queue,
        "gone": gpu.gone,
        "drained": gpu.drained,
        "contexts": gpu.contexts,
        "turn-ends": gpu.turn_ends,
        "expected-starts": gpu.expected_starts,
        "swapped-in-bytes": gpu.swapped_in_bytes,
        "swapped-out-bytes": gpu.swapped_out_bytes,
        "link-rate": gpu.link_rate,
        "kept": gpu.kept,
        "rooms": gpu.rooms.as_ref().map(|rooms| rooms.iter().map(room_json).collect::<Vec<_>>()),
        "others": gpu.others,
        "unproven": gpu.unproven.as_ref().map(|all| all.iter().map(unproven_json).collect::<Vec<_>>()),
    })
}

fn unproven_json(program: &Unproven) -> Value {
    json!({ "pid": program.pid, "uid": program.uid, "name": program.name })
}

fn room_json(room: &Room) -> Value {
    json!({
        "who": room.who,
        "pid": room.pid,
        "uid": room.uid,
        "bytes": room.bytes,
        "ready": room.ready,
        "ends-in": room.ends_in,
    })
}

/// A client as JSON, with the keys of `ListClients`.
pub fn client_json(client: &Client) -> Value {
    json!({
        "id": client.id,
        "pid": client.pid,
        "uid": client.uid,
        "name": client.name,
        "command": client.command,
        "why": client.why,
        "unit": client.unit,
        "slice": client.slice,
        "container": client.container,
        "tenant": client.tenant,
        "pod": client.pod,
        "pod-namespace": client.pod_namespace,
        "pod-name": client.pod_name,
        "pod-container": client.pod_container,
        "library": client.library,
        "rule": client.rule,
        "rule-origin": client.rule_origin,
        "share": client.share,
        "rule-group": client.rule_group,
        "environment": client.environment,
        "environment-ignored": client.environment_ignored,
        "gang": client.gang,
        "placed": client.placed,
        "connected-since": client.connected_since,
        "stopped": client.stopped,
        "sleep": client.sleep,
        "paused": client.paused,
        "moving": client.moving,
        "sleep-obstacle": client.sleep_obstacle,
        "woken-by": client.woken_by,
        "wake-time": client.wake_time,
        "gpus": client.gpus.iter().map(use_json).collect::<Vec<_>>(),
    })
}

fn use_json(usage: &GpuUse) -> Value {
    json!({
        "uuid": usage.uuid,
        "state": usage.state,
        "since": usage.since,
        "engine": usage.engine,
        "engine-reason": usage.engine_reason,
        "demand": usage.demand,
        "resident": usage.resident,
        "swapped": usage.swapped,
        "in-file": usage.in_file,
        "pinned": usage.pinned,
        "allowance": usage.allowance,
        "limit": usage.limit,
        "memory-max": usage.memory_max,
        "environment-memory-max": usage.environment_memory_max,
        "pending-limit": usage.pending_limit,
        "unverified": usage.unverified,
        "mapping-failures": usage.mapping_failures,
        "untracked-work": usage.untracked_work,
        "eviction-blocked": usage.eviction_blocked,
        "utilization": usage.utilization,
        "lock-time": usage.lock_time,
        "wait-time": usage.wait_time,
        "grants": usage.grants,
        "share-due": usage.share_due,
    })
}
