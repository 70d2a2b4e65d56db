//! The state of GPUs and clients, in the form that D-Bus callers see.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::SystemTime;

use nvshare_wire::client::GpuKind;

use super::view::{ClientView, CopiedClient, View};
use crate::bus;
use crate::config::rules::Rule;
use crate::config::units;
use crate::identity::Tenant;
use crate::scheduler::{self, AttachmentView, ClientId, GpuId, Share, SleepObstacle, Time};

/// Maximum number of attachments of one tenant in a list. A tenant can have 512 clients on 64 GPUs
/// each. A complete list would exceed the bus's limit on messages, and no user would read it.
const MAX_USES: usize = 2048;

/// Maximum number of requests in a GPU's queue for which a start time is estimated.
const MAX_EXPECTED: usize = 128;

/// Describes a rule's share, such as `weight 50, time-max 20%`.
fn in_words(Share { weight, min, max, priority, interactive }: Share) -> String {
    let weight = if weight == 0 { "idle".to_owned() } else { weight.to_string() };
    let all = [
        Some(format!("weight {weight}")),
        (min > 0).then(|| format!("time-min {min}%")),
        (max < 100).then(|| format!("time-max {max}%")),
        (priority != 0).then(|| format!("priority {priority}")),
        interactive.then(|| "interactive".to_owned()),
    ];
    all.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

impl View {
    /// Describes the share and the hours in a client's rule, such as `weight 50, gpu-hours 20h/week (3h
    /// 05min used)`.
    fn share_in_words(&self, client: ClientId, rule: &Rule) -> String {
        let has_used_up = self.clients.get(&client).is_some_and(|entry| entry.has_used_up);
        let limits = if has_used_up { rule.limits_when_used_up() } else { rule.limits };
        let hours = self.clients.get(&client).and_then(|client| client.hours);
        let hours = hours.map(|(hours, used)| format!("gpu-hours {hours} ({} used)", units::duration(used)));
        limits.share.map(in_words).into_iter().chain(hours).collect::<Vec<_>>().join(", ")
    }

    /// All clients. For each tenant, only the first [`MAX_USES`] attachments are included.
    pub fn list_clients(&self) -> Arc<Vec<ClientView>> {
        self.listed_clients.get_or_init(|| Arc::new(self.make_clients())).clone()
    }

    fn make_clients(&self) -> Vec<ClientView> {
        let mut listed: HashMap<&Tenant, usize> = HashMap::new();
        let since = self.since();
        let due: BTreeMap<GpuId, _> = self.gpus.keys().map(|gpu| (*gpu, self.machine.shares_due(*gpu))).collect();
        let view = |seen: scheduler::ClientView| {
            let client = self.clients.get(&seen.client)?;
            let listed = listed.entry(&client.identity.tenant).or_default();
            let uses = seen.attachments.iter().take(MAX_USES.saturating_sub(*listed));
            *listed = listed.saturating_add(seen.attachments.len());
            let uses = uses.map(|attachment| {
                let since = since.get(&(seen.client, attachment.gpu)).copied();
                let due = due.get(&attachment.gpu).and_then(|due| due.get(&seen.client)).copied();
                self.present_use(seen.client, client, attachment, since, due)
            });
            Some(self.present_client(&seen, client, uses.collect()))
        };
        self.machine.clients().into_iter().filter_map(view).collect()
    }

    /// `since`: since when the client has held the lock or waited for it. `due`: its share of the GPU's time, in
    /// thousandths.
    fn present_use(
        &self,
        id: ClientId,
        client: &CopiedClient,
        attachment: &AttachmentView,
        since: Option<Time>,
        due: Option<u32>,
    ) -> bus::GpuUse {
        let gpu = attachment.gpu;
        let stats = client.uses.get(&gpu);
        let since = since.or(stats.map(|stats| stats.idle_since)).unwrap_or(self.now);
        bus::GpuUse {
            uuid: self.gpus.get(&gpu).map_or_else(|| bus::gpu_name(GpuKind::Gpu, gpu), |entry| entry.label(gpu)),
            state: bus::state_name(attachment.state, attachment.attached).into(),
            since: self.now.saturating_sub(since).as_secs_f64(),
            engine: bus::engine_name(attachment.engine).into(),
            engine_reason: stats
                .filter(|_| !client.is_lock)
                .map_or("", |stats| bus::engine_reason(stats.reason))
                .into(),
            demand: attachment.demand,
            resident: attachment.mapped,
            swapped: attachment.swapped,
            in_file: stats.map(|stats| stats.in_file).filter(|bytes| *bytes > 0),
            pinned: attachment.pinned,
            allowance: attachment.allowance,
            limit: attachment.attached.then_some(attachment.limit),
            memory_max: self.machine.memory_max(id, gpu),
            environment_memory_max: self.machine.env_memory_max(id, gpu),
            pending_limit: attachment.pending_limit,
            unverified: attachment.disbelieved.map(|claimed| claimed.saturating_sub(attachment.mapped)),
            mapping_failures: attachment.failures,
            untracked_work: stats.is_some_and(|stats| stats.untracked_work),
            eviction_blocked: match (attachment.eviction_blocked, stats) {
                (_, Some(stats)) if stats.other_device => bus::OTHER_DEVICE,
                (block, _) => block.map_or("", bus::eviction_block_name),
            }
            .into(),
            utilization: attachment.utilization,
            lock_time: attachment.lock_time.as_secs_f64(),
            wait_time: attachment.wait_time.as_secs_f64(),
            grants: attachment.grants,
            share_due: due,
        }
    }

    fn present_client(
        &self,
        seen: &scheduler::ClientView,
        client: &CopiedClient,
        gpus: Vec<bus::GpuUse>,
    ) -> ClientView {
        let (rule, identity) = (self.rule_of(seen.client), &client.identity);
        let mut sleep = self.machine.sleep_of(seen.client);
        if client.is_undetermined {
            sleep.obstacle = Some(SleepObstacle::Unsupported);
        }
        let rule_shown = rule.map_or_else(Default::default, |rule| {
            (rule.name.clone(), rule.origin.to_string(), self.share_in_words(seen.client, rule))
        });
        let label = |gpu: GpuId| Some(self.gpus.get(&gpu)?.label(gpu));
        let shown = bus::Client {
            id: seen.client.0,
            pid: u32::try_from(identity.pid).unwrap_or(0),
            uid: identity.uid,
            name: identity.name.clone(),
            command: None,
            why: identity.why.clone(),
            unit: identity.unit.clone(),
            slice: identity.slice.clone(),
            container: identity.container.clone(),
            tenant: identity.tenant.to_string(),
            pod: identity.pod.uid.clone(),
            pod_namespace: identity.pod.namespace.clone(),
            pod_name: identity.pod.name.clone(),
            pod_container: identity.pod.container.clone(),
            library: client.library.clone(),
            rule: rule_shown.0,
            rule_origin: rule_shown.1,
            share: rule_shown.2,
            rule_group: seen.group.map(|group| group.0),
            environment: client.env_limits.in_words(rule),
            environment_ignored: client.env_limits.remarks(rule),
            gang: seen.gang_peers.iter().map(|peer| peer.0).collect(),
            placed: seen.placed.iter().filter_map(|gpu| label(*gpu)).collect(),
            connected_since: client.connected.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            stopped: seen.stopped,
            sleep: bus::sleep_phase_name(sleep.phase).into(),
            paused: sleep.paused,
            moving: sleep.moving.and_then(|both| label(both.to)).unwrap_or_default(),
            sleep_obstacle: sleep.obstacle.map_or("", bus::sleep_obstacle_name).into(),
            woken_by: sleep.woken.map_or("", |woken| bus::wake_reason_name(woken.by)).into(),
            wake_time: sleep.woken.map(|woken| woken.took.as_secs_f64()),
            gpus,
        };
        ClientView { id: seen.client, identity: identity.clone(), shown }
    }

    /// The time at which each holder got the lock, or each waiter began to wait.
    fn since(&self) -> HashMap<(ClientId, GpuId), Time> {
        let mut since = HashMap::new();
        for gpu in self.machine.gpus() {
            since.extend(gpu.holders.iter().map(|holder| ((holder.client, gpu.gpu), holder.since)));
            since.extend(gpu.waiters.iter().map(|waiter| ((waiter.client, gpu.gpu), waiter.since)));
        }
        since
    }

    /// All GPUs in the order of their indices. GPUs that NVML does not list come last.
    pub fn list_gpus(&self) -> Arc<Vec<bus::Gpu>> {
        self.listed_gpus.get_or_init(|| Arc::new(self.make_gpus())).clone()
    }

    fn make_gpus(&self) -> Vec<bus::Gpu> {
        let now = self.now;
        let attachments: Vec<AttachmentView> =
            self.machine.clients().into_iter().flat_map(|client| client.attachments).collect();
        let view = |seen: scheduler::GpuView| {
            let entry = self.gpus.get(&seen.gpu)?;
            let attachments = || attachments.iter().filter(|attachment| attachment.gpu == seen.gpu);
            let ends =
                seen.holders.iter().filter_map(|holder| Some((holder.client.0, holder.ends?.saturating_sub(now))));
            let starts = self
                .machine
                .expected_starts(seen.gpu, MAX_EXPECTED, now)
                .into_iter()
                .map(|(client, start)| (client.0, start));
            let unproven = self.unproven.iter().filter(|(gpu, _)| *gpu == seen.gpu);
            let counted = self.counts.gpu(seen.gpu).counted;
            Some(bus::Gpu {
                uuid: entry.label(seen.gpu),
                kind: bus::kind_name(entry.kind).into(),
                name: entry.name.clone(),
                index: entry.index,
                total: entry.total,
                capacity: if seen.gone { 0 } else { seen.capacity },
                overhead: entry.overhead,
                accounting: entry.basis.name().into(),
                shortfall: seen.shortfall,
                demand: attachments().map(|attachment| attachment.demand).sum(),
                resident: attachments().map(|attachment| attachment.mapped).sum(),
                swapped: attachments().map(|attachment| attachment.swapped).sum(),
                clients: attachments().count() as u32,
                holders: seen.holders.iter().map(|holder| holder.client.0).collect(),
                queue: seen.waiters.iter().map(|waiter| waiter.client.0).collect(),
                gone: seen.gone,
                drained: seen.drained,
                contexts: entry.contexts,
                turn_ends: Some(ends.map(|(client, left)| (client, left.as_secs_f64())).collect()),
                expected_starts: Some(starts.map(|(client, start)| (client, start.as_secs_f64())).collect()),
                swapped_in_bytes: Some(counted.swapped_in),
                swapped_out_bytes: Some(counted.swapped_out),
                link_rate: seen.link,
                kept: Some(seen.kept),
                rooms: Some(self.present_rooms(&seen.rooms)),
                unproven: Some(unproven.map(|(_, program)| program.clone()).collect()),
                others: Some(entry.others.clone()),
            })
        };
        let mut gpus: Vec<_> = self.machine.gpus().into_iter().filter_map(view).collect();
        gpus.sort_by_key(|gpu| (gpu.index.is_none(), gpu.index));
        gpus
    }
}
