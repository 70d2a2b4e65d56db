//! Host memory that clients allocate in advance for memory that is still on a GPU and may be
//! evicted later.

use super::{Context, Quota};
use crate::{api::*, effects::Effects};
use std::collections::BTreeMap;

/// The host memory that each client was asked to allocate, in bytes.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct Ahead {
    /// The maximum in bytes for all clients together. `None`: the host is short of memory.
    most: Option<u64>,
    #[serde(with = "crate::encoding::pairs")]
    asked: BTreeMap<(ClientId, GpuId), u64>,
    /// The sum of `asked`.
    sum: u64,
}

impl Default for Ahead {
    fn default() -> Self {
        Self { most: Some(0), asked: BTreeMap::new(), sum: 0 }
    }
}

impl Ahead {
    pub fn forget(&mut self, at: (ClientId, GpuId)) {
        self.sum -= self.asked.remove(&at).unwrap_or(0);
    }

    /// Updates the entries of a client that was moved from one GPU to another.
    pub fn move_client(&mut self, client: ClientId, from: GpuId, to: GpuId) {
        if let Some(bytes) = self.asked.remove(&(client, from)) {
            self.asked.insert((client, to), bytes);
        }
    }

    /// Whether the host is short of memory. Clients must then release unused host memory.
    pub fn is_host_short(&self) -> bool {
        self.most.is_none()
    }
}

impl Quota {
    /// The bytes of host memory that a client with `bytes` on a GPU should allocate ahead. `None`:
    /// the client was already asked for that many bytes, or the maximum for all clients is reached.
    pub fn ahead(&mut self, client: ClientId, id: GpuId, bytes: u64) -> Option<u64> {
        let Ahead { most, sum, asked } = &mut self.ahead;
        let before = asked.get(&(client, id)).copied().unwrap_or(0);
        let others = *sum - before;
        let bytes = bytes.min(most.filter(|_| !self.host.is_scarce())?.saturating_sub(others));
        if bytes <= before {
            return None;
        }
        asked.insert((client, id), bytes);
        *sum = others + bytes;
        Some(bytes)
    }

    /// Sets the maximum of host memory that may be allocated ahead. Returns whether the maximum was
    /// 0 and has risen, so that all clients can be asked.
    pub fn host_ahead(&mut self, cx: Context, fx: &mut Effects, bytes: Option<u64>) -> bool {
        let before = std::mem::replace(&mut self.ahead.most, bytes);
        if before.is_some() != bytes.is_some() {
            (self.ahead.asked, self.ahead.sum) = (BTreeMap::new(), 0);
            for (id, gpu) in &self.gpus {
                gpu.clients.keys().for_each(|client| self.tell_again(cx, fx, *client, *id));
            }
        }
        before.unwrap_or(0) == 0 && bytes.is_some_and(|bytes| bytes > 0)
    }

    /// Bytes of host memory that clients were asked to allocate ahead.
    pub fn asked_ahead(&self) -> u64 {
        self.ahead.sum
    }
}
