//! The memory account of one GPU: the sizes and locations of the program's memory, and its limits.

use super::engine::CHUNK;
use nvshare_wire::{Counts, client::StuckReason};

/// The account of one GPU, in bytes. Ranges are counted in full, so their sizes are multiples of the
/// granule.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Account {
    /// Bytes that must be on the GPU for the program to run.
    pub demand: u64,
    /// The part of `demand` that is on the GPU or being restored.
    pub mapped: u64,
    /// The part of `demand` that is in host memory or in a swap file.
    pub swapped: u64,
    /// The part of `swapped` that is in a swap file.
    pub in_file: u64,
    /// Memory that cannot be evicted, because the driver manages it rather than an engine.
    pub pinned: u64,
    /// Managed memory that the driver has not freed yet, wherever it is.
    pub managed: u64,
    /// The part of `managed` that is in no chunk of this library, and therefore part of `pinned`.
    pub managed_pinned: u64,
    /// Memory that the driver can fault in: managed memory in chunks of this library.
    pub pageable: u64,
    /// The part of `pageable` that is on the GPU.
    pub pageable_mapped: u64,
    /// Whether the limit may exceed the GPU for managed memory, because a rule permits it.
    pub may_exceed_gpu: bool,
    /// The scheduler's limit on mapped bytes; `u64::MAX` without a scheduler.
    pub allowance: u64,
    /// The sequence number of the latest allowance that has been carried out.
    pub ack: u32,
    /// The limit on the demand, the sequence number of that limit, and the highest limit that the client
    /// can request.
    pub limit: u64,
    pub limit_seq: u32,
    pub limit_max: u64,
    /// Whether the present scheduler has sent its limit.
    pub has_limit: bool,
    /// The limit that a rule sets for this program and its group; 0 for none. The limit stays in force when
    /// the scheduler ends.
    pub max: u64,
    /// The limit set by the program's environment; `u64::MAX` for none.
    pub env_max: u64,
    /// Bytes of host buffers that are free or hold copies of chunks on the GPU, and the scheduler's limit
    /// on these bytes.
    pub host_cache: u64,
    pub host_cache_max: u64,
    /// Bytes of host buffers that are being freed. The driver may first wait for running work.
    pub releasing: u64,
    /// Writes to the swap file lag behind. Evictions pause until the writes catch up.
    pub is_file_behind: bool,
    /// Contents were lost while they were written to disk or read back. No more work may use this GPU's
    /// memory.
    pub is_lost: bool,
    /// Bytes of chunks that are being copied, in either direction.
    pub in_flight: u64,
    /// Freed bytes that still count as demand, because earlier work may use them or they are being
    /// moved.
    pub freeing: u64,
    /// Whether pages that are not on the GPU are faulted in on access.
    pub demand_paged: bool,
    /// Without a scheduler, the demand that other clients make room for. 0 if no other clients
    /// exist, `None` while their existence is unknown.
    pub offline_room: Option<u64>,
    /// The largest demand that was completely on the GPU.
    pub peak: u64,
    /// Why all memory stays on the GPU, if it does: the library cannot detect the end of the program's
    /// work, or other devices may access the memory.
    pub unevictable: Option<StuckReason>,
    /// Counters of moved bytes and refused allocations.
    pub counts: Counts,
}

impl Account {
    /// Bytes of host memory in use.
    pub fn host(&self) -> u64 {
        self.swapped - self.in_file + self.host_cache + self.releasing
    }
    /// Bytes that must be on the GPU and are not there, and that the driver cannot fault in.
    pub fn shortfall(&self) -> u64 {
        (self.demand + self.pageable_mapped).saturating_sub(self.pageable + self.mapped)
    }
    pub fn is_complete(&self) -> bool {
        self.mapped >= self.demand
    }
    /// Whether memory is missing from the GPU and the allowance has room for more.
    pub fn may_grow(&self) -> bool {
        !self.is_complete() && self.room() > 0
    }
    /// Whether only managed memory is missing, and the allowance has no room for its chunks. The driver
    /// faults it in, if a rule permits managed memory beyond the GPU.
    fn pages_in(&self) -> bool {
        self.may_exceed_gpu && self.shortfall() == 0 && self.room() < CHUNK.min(self.demand - self.mapped)
    }
    /// Whether the program may run, as far as its memory is concerned: all of it is on the GPU, or pages
    /// fault in on demand. A program whose memory has lost its contents may not run.
    pub fn can_run(&self) -> bool {
        !self.is_lost && (self.demand_paged || (self.in_flight == 0 && (self.is_complete() || self.pages_in())))
    }
    /// Whether the limit is the one in force. It is not if the scheduler that sent it has gone, or if a new
    /// scheduler has not sent its limit yet. An allocation that exceeds such a limit waits: soon, a scheduler
    /// sends a limit, or the client runs without a scheduler.
    pub fn limit_is_known(&self, is_connected: bool) -> bool {
        self.allowance == u64::MAX || (is_connected && self.has_limit)
    }
    /// Returns `bytes`, capped at the limits of the rule and of the environment.
    pub fn at_most(&self, bytes: u64) -> u64 {
        let ruled = if self.max == 0 { bytes } else { bytes.min(self.max) };
        ruled.min(self.env_max)
    }
    /// Whether `len` more bytes can be allocated. With `beyond`, the demand may exceed the scheduler's
    /// limit if no rule sets a limit. The environment's limit still applies.
    pub(super) fn admits(&self, len: u64, beyond: bool) -> bool {
        let wanted = (self.demand + self.pinned - self.freeing).saturating_add(len);
        len <= self.free() || (beyond && self.max == 0 && wanted <= self.env_max)
    }
    /// Whether the scheduler may grant a limit for `len` more bytes, if it grants at most `most` for memory
    /// that must be on the GPU.
    pub fn is_grantable(&self, len: u64, is_managed: bool, most: u64) -> bool {
        let wanted = (self.demand + self.pinned - self.freeing).saturating_add(len);
        let pageable = self.pageable.saturating_add(if is_managed { len } else { 0 });
        wanted.saturating_sub(if self.may_exceed_gpu { pageable } else { 0 }) <= most
    }
    /// Whether the demand exceeds the largest demand that was completely on the GPU. If so, no work can
    /// have used all of the memory yet.
    pub fn exceeds_peak(&self) -> bool {
        !self.demand_paged && !self.is_complete() && self.demand > self.peak
    }
    /// Bytes that the program may still allocate.
    pub fn free(&self) -> u64 {
        self.free_within(self.limit)
    }
    /// Bytes that the program could still allocate under this limit.
    pub(super) fn free_within(&self, limit: u64) -> u64 {
        limit.saturating_sub(self.demand + self.pinned - self.freeing)
    }
    /// Whether `bytes` more would fit if every process on the GPU were a client of nvshare. Assumes the
    /// scheduler's largest reserve, an eighth of `total`.
    pub fn fits_without_others(&self, bytes: u64, total: u64) -> bool {
        let most = self.at_most(total - total / 8);
        self.limit < most && self.demand.saturating_add(self.pinned).saturating_add(bytes) <= most
    }
    /// Whether no scheduler is connected, and the library does not know yet whether other clients
    /// exist that could make room.
    pub fn awaits_company(&self) -> bool {
        self.allowance == u64::MAX && self.offline_room.is_none() && !self.demand_paged
    }
    /// Whether memory that does not fit now can be mapped later, because the scheduler or other clients
    /// make room.
    pub(super) fn room_comes(&self) -> bool {
        self.allowance != u64::MAX || self.demand.saturating_add(self.pinned) <= self.offline_room.unwrap_or(0)
    }
    /// Counts `len` bytes as mapped.
    pub(super) fn map(&mut self, len: u64, is_managed: bool) {
        self.mapped += len;
        self.pageable_mapped += if is_managed { len } else { 0 };
    }
    /// Counts `len` mapped bytes no longer.
    pub(super) fn unmap(&mut self, len: u64, is_managed: bool) {
        self.mapped -= len;
        self.pageable_mapped -= if is_managed { len } else { 0 };
    }
    /// Counts `len` more bytes that the program needs, and that are not on the GPU.
    pub(super) fn demand_more(&mut self, len: u64, is_managed: bool) {
        self.demand += len;
        self.pageable += if is_managed { len } else { 0 };
    }
    /// Counts `len` bytes no longer that are not on the GPU.
    pub(super) fn demand_less(&mut self, len: u64, is_managed: bool) {
        self.demand -= len;
        self.pageable -= if is_managed { len } else { 0 };
    }
    pub(super) fn pin(&mut self, bytes: u64) {
        (self.demand, self.mapped, self.pinned) = (self.demand - bytes, self.mapped - bytes, self.pinned + bytes);
    }
    pub(super) fn unpin(&mut self, bytes: u64) {
        (self.demand, self.mapped, self.pinned) = (self.demand + bytes, self.mapped + bytes, self.pinned - bytes);
    }
    pub(super) fn room(&self) -> u64 {
        self.allowance.saturating_sub(self.mapped + self.pinned)
    }
}
