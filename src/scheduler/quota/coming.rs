//! Room on a GPU for clients that are about to be moved there, or may have to be moved back. Their
//! memory counts towards the limits on that GPU as if the clients were already there. The limits of
//! other clients are lowered, and do not rise until the room is set aside. So a move never uses
//! memory that is still promised to other clients. Nor is a move refused because of memory that
//! those clients might never use.
//!
//! The invariant of a move is: **until a process is restored on another GPU, it counts on the old
//! GPU as if it slept there**. So no other client is promised the process's memory on the old GPU,
//! and no promise is broken if the process has to return there. A move therefore needs room on both
//! GPUs. Rejected: making room on the old GPU when the client returns, because at that time the
//! other clients may need all of their memory.

use super::{Context, Quota, limit::Limit};
use crate::api::*;
use std::collections::{BTreeMap, BTreeSet};

/// Room for a client that is about to be moved to the GPU, or may be moved back to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Coming {
    pub from: GpuId,
    /// The client's demand plus the expected size of its context, in bytes. For a client that may
    /// be moved back, its committed bytes replace its demand.
    pub bytes: u64,
    /// The part of `bytes` that is set aside: all of it or nothing. For a client that may be moved
    /// back, always all of it.
    pub counted: u64,
    pub context: u64,
    pub comes_back: bool,
}

/// A GPU that a client may be moved to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The move from the GPU that the client has attached to the expected GPU.
    pub to: Move,
    /// The expected size of the client's context on the GPU `to.to`, in bytes.
    pub context: u64,
}

/// Whether, and when, the limits on another GPU leave room for a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum RoomToMove {
    None,
    /// Room would exist if clients that do not answer acknowledged lower limits.
    Unanswered,
    /// Room will exist once other clients have acknowledged lower limits.
    Later,
    Now,
}

impl Quota {
    /// Sets room aside for a client and its context on the GPUs in `goes` and `back`, and releases
    /// its room on all other GPUs. `goes`: the GPUs that the client is about to be moved to.
    /// `back`: the GPUs that its process was moved from. The client returns to `back` if it cannot
    /// be restored on the new GPUs.
    pub fn expect(&mut self, cx: Context, client: ClientId, goes: &[Expected], back: &[Expected]) {
        let there = self.gpus.iter().filter_map(|(id, gpu)| Some((*id, *gpu.coming.get(&client)?)));
        let there: BTreeMap<GpuId, Coming> = there.collect();
        let coming = |(place, comes_back): (&Expected, bool)| {
            let Expected { to: Move { from, to }, context } = *place;
            let limit = self.limit(client, from)?;
            let has = if comes_back { limit.committed() } else { limit.demand() };
            let bytes = has.saturating_add(context);
            let is_there = !comes_back && self.limit(client, to).is_some();
            (!is_there).then_some((to, Coming { from, bytes, counted: 0, context, comes_back }))
        };
        let places = goes.iter().map(|place| (place, false)).chain(back.iter().map(|place| (place, true)));
        let wanted: BTreeMap<GpuId, Coming> = places.filter_map(coming).collect();
        for id in there.keys().chain(wanted.keys()).copied().collect::<GpuSet>() {
            let (before, now) = (there.get(&id), wanted.get(&id));
            let counted = before.map_or(0, |before| before.counted);
            if before.copied() == now.map(|now| Coming { counted, ..*now }) {
                continue;
            }
            if before.is_some() {
                self.set_aside(cx, client, id, 0);
                self.gpus.get_mut(&id).and_then(|gpu| gpu.coming.remove(&client));
            }
            if let Some((gpu, coming)) = self.gpus.get_mut(&id).zip(now) {
                gpu.coming.insert(client, *coming);
                if coming.comes_back {
                    self.set_aside(cx, client, id, coming.bytes);
                }
            }
            self.gpus.get_mut(&id).into_iter().for_each(|gpu| gpu.summed_for = None);
            self.note_offer(cx, id);
            self.host.mark_changed(id);
        }
    }

    /// The possible rise of a client's limit, in bytes. A GPU that the client may be moved back to must have
    /// room for the same rise.
    pub(super) fn room_at_home(&self, cx: Context, client: ClientId, from: GpuId) -> u64 {
        let room = |id: GpuId| self.committable(cx, id).min(self.bytes_in_group(cx, client, id).unwrap_or(u64::MAX));
        self.homes(client, from).into_iter().map(room).min().unwrap_or(u64::MAX)
    }

    /// Sets room aside for all clients in `coming` whose GPU has enough room.
    pub(super) fn set_all_aside(&mut self, cx: Context) {
        let wanting = |(id, gpu): (&GpuId, &super::GpuLimits)| {
            let wanting = gpu.coming.iter().filter(|(_, coming)| coming.counted != coming.bytes);
            wanting.map(|(client, coming)| (*client, *id, coming.bytes)).collect::<Vec<_>>()
        };
        for (client, id, bytes) in self.gpus.iter().flat_map(wanting).collect::<Vec<_>>() {
            if bytes <= self.committable(cx, id) && self.bytes_in_group(cx, client, id).is_none_or(|room| bytes <= room)
            {
                self.set_aside(cx, client, id, bytes);
                self.expected.insert(client);
            }
        }
    }

    /// Returns the clients for which room was set aside since the last call.
    pub fn take_expected(&mut self) -> BTreeSet<ClientId> {
        std::mem::take(&mut self.expected)
    }

    /// Bytes that can still be promised to the client's group on a GPU that the client has not
    /// attached. `None`: unlimited.
    fn bytes_in_group(&self, cx: Context, client: ClientId, id: GpuId) -> Option<u64> {
        let (max, group) = self.group_bound(cx, client, id).zip(cx.rules.group(client))?;
        let used = self.gpus.get(&id).and_then(|gpu| gpu.by_group.get(&group)).copied().unwrap_or(0);
        Some(max.saturating_sub(used))
    }

    /// Checks whether the bytes promised to a client on one GPU can be promised on another. Host
    /// memory must suffice for the bytes that do not fit on the second GPU, and the client's group
    /// must stay within its limit. `keeps`: the bytes on the first GPU stay promised to the client,
    /// because it may be moved back. `away`: the client no longer acknowledges lower limits.
    pub fn room_to_move(&self, cx: Context, client: ClientId, place: Expected, keeps: bool, away: bool) -> RoomToMove {
        let Expected { to: both, .. } = place;
        let Some(entry) = self.entry(client, both.from) else { return RoomToMove::None };
        let (committed, demand) = (entry.limit.committed(), entry.limit.demand());
        let own_context = entry.context(cx, both.from);
        let set_aside =
            self.gpus.get(&both.to).and_then(|gpu| gpu.coming.get(&client)).map_or(0, |coming| coming.counted);
        let now = Sums {
            here: self.committed(both.from),
            leaves: committed,
            there: self.committed(both.to).saturating_sub(set_aside),
            comes: committed,
            in_host: self.host.committed - self.excess(cx, both),
        };
        let in_group = self.bytes_in_group(cx, client, both.to).map(|room| room.saturating_add(set_aside));
        if self.fits(cx, place, keeps, &now)
            && in_group.is_none_or(|room| committed.saturating_add(own_context) <= room)
        {
            return RoomToMove::Now;
        }
        let kept = if away { committed } else { demand };
        if self.is_possible(cx, client, place, keeps, kept, |client, limit| self.least(cx, client, limit)) {
            RoomToMove::Later
        } else if self.is_possible(cx, client, place, keeps, kept, |_, limit| limit.demand()) {
            RoomToMove::Unanswered
        } else {
            RoomToMove::None
        }
    }

    /// Checks whether a client can be promised `kept` bytes on another GPU, if each client is promised only
    /// `promise` there and elsewhere. `keeps`: see [`Self::room_to_move`].
    fn is_possible(
        &self,
        cx: Context,
        client: ClientId,
        place: Expected,
        keeps: bool,
        kept: u64,
        promise: impl Fn(ClientId, &Limit) -> u64,
    ) -> bool {
        let Expected { to: both, .. } = place;
        let Some(entry) = self.entry(client, both.from) else { return false };
        let own_context = entry.context(cx, both.from);
        let least = |id: GpuId| {
            let clients = self.gpus.get(&id).into_iter().flat_map(|gpu| &gpu.clients);
            clients.fold(0, |sum: u64, (client, entry)| sum.saturating_add(promise(*client, &entry.limit)))
        };
        let others = self.gpus.keys().filter(|id| **id != both.from && **id != both.to);
        let in_host = others.map(|id| least(*id).saturating_sub(cx.gpus.offer(*id))).fold(0, u64::saturating_add);
        let later = Sums {
            here: least(both.from),
            leaves: promise(client, &entry.limit),
            there: least(both.to),
            comes: kept,
            in_host,
        };
        let max = cx.rules.memory_max(client, cx.gpus.total(both.to));
        let of_group = || {
            let members =
                cx.rules.group_peers(client).filter_map(|member| Some((member, self.entry(member, both.to)?)));
            let sum =
                members.map(|(member, entry)| promise(member, &entry.limit).saturating_add(entry.context(cx, both.to)));
            sum.fold(kept.saturating_add(own_context), u64::saturating_add)
        };
        self.fits(cx, place, keeps, &later) && max.is_none_or(|max| of_group() <= max)
    }

    /// The smallest possible promise to a client once all clients that answer have acknowledged lower limits.
    fn least(&self, cx: Context, client: ClientId, limit: &Limit) -> u64 {
        if self.is_unresponsive(cx, client, limit) { limit.committed() } else { limit.demand() }
    }

    /// Host memory in bytes that the two GPUs need if every client uses its whole limit.
    fn excess(&self, cx: Context, Move { from, to }: Move) -> u64 {
        let of = |id| self.committed(id).saturating_sub(cx.gpus.offer(id));
        of(from).saturating_add(of(to)).min(self.host.committed)
    }

    /// Checks whether host memory suffices for the memory that does not fit on the GPUs after a
    /// move.
    fn fits(&self, cx: Context, place: Expected, keeps: bool, sums: &Sums) -> bool {
        let Expected { to: Move { from, to }, context } = place;
        let (offer_here, offer_there) = (cx.gpus.offer(from), cx.gpus.offer(to));
        let before = sums.here.saturating_sub(offer_here).saturating_add(sums.there.saturating_sub(offer_there));
        let stays = match keeps {
            true => sums.here.saturating_sub(offer_here),
            false => sums.here.saturating_sub(sums.leaves).saturating_sub(offer_here.saturating_add(context)),
        };
        let comes = sums.there.saturating_add(sums.comes).saturating_sub(offer_there.saturating_sub(context));
        let after = stays.saturating_add(comes);
        after <= before || self.host.bytes().is_none_or(|all| sums.in_host.saturating_add(after) <= all)
    }
}

/// Bytes promised on the two GPUs of a move, the moving client's part of them, and the bytes of the
/// other GPUs in host memory.
struct Sums {
    here: u64,
    leaves: u64,
    there: u64,
    comes: u64,
    in_host: u64,
}
