//! Programs that were refused because they have not shown a GPU's device file. They run as without
//! nvshare, so users must be told.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::io::unix::AsyncFd;

use super::model::Model;
use crate::bus;
use crate::daemon::tenants::What;
use crate::identity::{Identity, printable};
use crate::scheduler::{ClientId, GpuId, Time};
use crate::sys::clock;

/// Maximum number of programs that are kept. The oldest are dropped first.
const MAX_KEPT: usize = 256;

/// The time for which a program is kept if the scheduler cannot see the end of its process. The library
/// tries again every few seconds.
const KEPT: Duration = Duration::from_secs(30);

/// A program that was refused on a GPU.
#[derive(Debug)]
struct Unproven {
    gpu: GpuId,
    identity: Arc<Identity>,
    process: Option<Rc<AsyncFd<OwnedFd>>>,
    at: Time,
}

impl Unproven {
    fn is_running(&self, now: Time) -> bool {
        match &self.process {
            // The pidfd is readable once the process has ended.
            Some(process) => poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&Timespec::default())) == Ok(0),
            None => now < self.at + KEPT,
        }
    }

    fn is_of(&self, identity: &Identity) -> bool {
        let key = |identity: &Identity| (identity.pid, identity.uid);
        key(&self.identity) == key(identity)
            && (identity.pid != 0 || self.identity.name == identity.name)
            && self.identity.tenant == identity.tenant
    }
}

/// The programs that were refused, newest last.
#[derive(Debug, Default)]
pub(super) struct UnprovenPrograms(VecDeque<Unproven>);

impl UnprovenPrograms {
    /// Records that a client is refused on a GPU.
    pub fn add(&mut self, model: &Model, client: ClientId, gpu: GpuId) {
        self.remove(model, client, gpu);
        let Some(entry) = model.clients.get(&client) else { return };
        let most = entry.connection.budget().limit(What::Unproven) as usize;
        let (identity, process, at) = (entry.identity.clone(), entry.process.clone(), clock::now());
        self.0.retain(|unproven| unproven.is_running(at));
        let of_tenant = |unproven: &Unproven| unproven.identity.tenant == identity.tenant;
        let superfluous = match self.0.iter().filter(|unproven| of_tenant(unproven)).count() {
            count if count >= most => self.0.iter().position(of_tenant),
            _ => (self.0.len() >= MAX_KEPT).then_some(0),
        };
        superfluous.and_then(|oldest| self.0.remove(oldest));
        self.0.push_back(Unproven { gpu, identity, process, at });
    }

    /// Forgets that a client's process was refused on a GPU.
    pub fn remove(&mut self, model: &Model, client: ClientId, gpu: GpuId) {
        let Some(identity) = model.identity(client) else { return };
        self.0.retain(|unproven| unproven.gpu != gpu || !unproven.is_of(identity));
    }

    /// The programs that still run, each with its GPU.
    pub fn running(&self) -> Vec<(GpuId, bus::Unproven)> {
        let now = clock::now();
        let running = self.0.iter().filter(|unproven| unproven.is_running(now));
        let shown = running.map(|Unproven { gpu, identity, .. }| {
            let pid = u32::try_from(identity.pid).unwrap_or(0);
            (*gpu, bus::Unproven { pid, uid: identity.uid, name: printable(&identity.name) })
        });
        shown.collect()
    }
}
