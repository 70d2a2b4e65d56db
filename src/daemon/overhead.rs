//! How much of a GPU is used by something that is not a client's mapped memory: other programs, the driver, and the
//! contexts of clients.
//!
//! What others use is NVML's total less what NVML says of the clients' processes: both are NVML's, so nothing that is
//! still on its way to us disturbs it. A client's context is what NVML says of its process less what the client says it
//! has mapped; these two are only compared while the client's memory is at rest, and kept until the next time it is.

use std::collections::BTreeMap;

use super::gpus::Sample;
use crate::scheduler::ClientId;

/// Smaller changes are not worth moving anything: the granularity of a GPU's memory.
const WORTH_TELLING: u64 = 2 << 20;

#[derive(Debug, Default)]
pub struct Overhead {
    contexts: BTreeMap<ClientId, u64>,
    told: Option<u64>,
}

/// A client on the GPU of a sample.
#[derive(Debug, Clone, Copy)]
pub struct Attached {
    pub client: ClientId,
    pub pid: u32,
    /// Bytes it says it has mapped.
    pub mapped: u64,
    /// Nothing of its memory was on its way in or out when the sample was taken.
    pub at_rest: bool,
    /// It attached so lately that the machine still puts room aside for its context.
    pub is_new: bool,
}

impl Overhead {
    /// Takes a sample. `context` is what a context is taken to need until it was measured. Returns what is to be told to
    /// the machine; small changes are left out of it. What processes use that are `is_fellow`, though no clients now, does
    /// not count: they have just left and give it back, or are about to come back.
    pub fn sample(
        &mut self,
        sample: &Sample,
        clients: &[Attached],
        context: u64,
        is_fellow: impl Fn(u32) -> bool,
    ) -> Option<u64> {
        self.contexts.retain(|client, _| clients.iter().any(|c| c.client == *client));
        let seen = |pid: u32| sample.processes.get(&pid).copied();
        // What is on its way may be there already, and not be said yet.
        let may_have = |c: &Attached| c.mapped > 0 || !c.at_rest;
        let bytes = if clients.iter().any(|c| may_have(c) && seen(c.pid).is_none()) {
            // NVML does not see these processes (another PID namespace): only the sums can be compared.
            if !clients.iter().all(|c| c.at_rest) {
                return None;
            }
            sample.used.saturating_sub(clients.iter().map(|c| c.mapped).sum())
        } else {
            let mut others = sample.used;
            let mut contexts = 0;
            let is_client = |pid: u32| clients.iter().any(|c| c.pid == pid);
            let fellows = sample.processes.iter().filter(|(pid, _)| !is_client(**pid) && is_fellow(**pid));
            others = others.saturating_sub(fellows.map(|(_, bytes)| bytes).sum());
            for client in clients {
                let Some(used) = seen(client.pid) else { continue };
                others = others.saturating_sub(used);
                if client.at_rest && used >= client.mapped {
                    self.contexts.insert(client.client, used - client.mapped);
                }
                if client.is_new {
                    continue;
                }
                contexts += self.contexts.get(&client.client).copied().unwrap_or(context.min(used));
            }
            others + contexts
        };
        if self.told.is_none_or(|told| told.abs_diff(bytes) > WORTH_TELLING) {
            self.told = Some(bytes);
        }
        self.told
    }

    /// What each client has mapped, whatever it says: what NVML says of its process less its context. NVML does not see
    /// some processes (in another PID namespace, or where it has no figures for processes): what such a client has is
    /// what it says and all that nobody accounts for. `None` where that cannot be said now.
    pub fn present(&self, sample: &Sample, clients: &[Attached], context: u64) -> Option<BTreeMap<ClientId, u64>> {
        let mapped = clients.iter().map(|client| client.mapped).fold(0, u64::saturating_add);
        let surplus =
            self.told.filter(|_| sample.steady).map(|told| sample.used.saturating_sub(told.saturating_add(mapped)));
        let has = |client: &Attached| {
            let bytes = match sample.processes.get(&client.pid) {
                Some(used) => {
                    let context = self.contexts.get(&client.client).copied().unwrap_or(context);
                    // A process may be several clients.
                    let fellows = clients.iter().filter(|c| c.pid == client.pid && c.client != client.client);
                    fellows.fold(used.saturating_sub(context), |rest, fellow| rest.saturating_sub(fellow.mapped))
                }
                None => client.mapped.saturating_add(surplus?),
            };
            Some((client.client, bytes.saturating_sub(WORTH_TELLING)))
        };
        clients.iter().map(has).collect()
    }

    /// How large each client's context is, where that is known.
    pub fn contexts(&self) -> &BTreeMap<ClientId, u64> {
        &self.contexts
    }

    /// What was told last.
    pub fn told(&self) -> Option<u64> {
        self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{GpuId, Uuid};

    const MIB: u64 = 1 << 20;
    const CONTEXT: u64 = 600 * MIB;

    fn sample(used: u64, processes: &[(u32, u64)]) -> Sample {
        let processes = processes.iter().map(|(pid, mib)| (*pid, mib * MIB)).collect();
        Sample { gpu: GpuId(Uuid([0; 16])), begun: Default::default(), steady: true, used: used * MIB, processes }
    }

    fn client(id: u64, mapped: u64, at_rest: bool) -> Attached {
        Attached { client: ClientId(id), pid: id as u32, mapped: mapped * MIB, at_rest, is_new: false }
    }

    #[test]
    fn others_and_contexts_count() {
        let mut overhead = Overhead::default();
        let told =
            overhead.sample(&sample(9000, &[(1, 4500), (7, 3000)]), &[client(1, 4000, true)], CONTEXT, |_| false);
        assert_eq!(told, Some(5000 * MIB), "500 of context, 3000 of process 7, 1500 of nobody");
    }

    #[test]
    fn a_move_changes_nothing() {
        let mut overhead = Overhead::default();
        overhead.sample(&sample(5000, &[(1, 4500)]), &[client(1, 4000, true)], CONTEXT, |_| false);
        // It has unmapped 3 GiB and not said so; it has mapped 2 GiB and not said so.
        for (used, process) in [(2000, 1500), (7000, 6500)] {
            let told = overhead.sample(&sample(used, &[(1, process)]), &[client(1, 4000, false)], CONTEXT, |_| false);
            assert_eq!(told, Some(1000 * MIB));
        }
    }

    #[test]
    fn a_context_that_was_never_measured_is_guessed() {
        let mut overhead = Overhead::default();
        let told = overhead.sample(&sample(5000, &[(1, 4500)]), &[client(1, 0, false)], CONTEXT, |_| false);
        assert_eq!(told, Some(1100 * MIB));
        let told = overhead.sample(&sample(5000, &[(1, 4500)]), &[client(1, 4000, true)], CONTEXT, |_| false);
        assert_eq!(told, Some(1000 * MIB));
    }

    #[test]
    fn who_has_just_left_or_will_be_back_is_no_stranger() {
        let mut overhead = Overhead::default();
        assert_eq!(overhead.sample(&sample(5000, &[(1, 4500)]), &[], CONTEXT, |_| true), Some(500 * MIB));
        assert_eq!(overhead.sample(&sample(5000, &[(1, 4500)]), &[], CONTEXT, |_| false), Some(5000 * MIB));
    }

    #[test]
    fn the_context_of_a_new_client_is_the_machines_to_count() {
        let mut overhead = Overhead::default();
        let new = Attached { is_new: true, ..client(1, 4000, true) };
        assert_eq!(overhead.sample(&sample(5000, &[(1, 4500)]), &[new], CONTEXT, |_| false), Some(500 * MIB));
    }

    #[test]
    fn a_client_that_leaves_leaves_nothing() {
        let mut overhead = Overhead::default();
        overhead.sample(&sample(5000, &[(1, 4500)]), &[client(1, 4000, true)], CONTEXT, |_| false);
        assert_eq!(overhead.sample(&sample(500, &[]), &[], CONTEXT, |_| false), Some(500 * MIB));
    }

    #[test]
    fn processes_that_nvml_does_not_see_are_measured_together_and_at_rest() {
        let mut overhead = Overhead::default();
        let clients = [client(1, 4000, true), client(2, 1000, true)];
        assert_eq!(overhead.sample(&sample(6500, &[]), &clients, CONTEXT, |_| false), Some(1500 * MIB));
        let moving = [client(1, 4000, true), client(2, 1000, false)];
        assert_eq!(overhead.sample(&sample(9000, &[]), &moving, CONTEXT, |_| false), None);
        // What has left or comes back was theirs, and is nobody else's for that.
        let returning = [client(1, 0, false), client(2, 0, true)];
        assert_eq!(overhead.sample(&sample(6000, &[]), &returning, CONTEXT, |_| false), None);
    }

    #[test]
    fn what_a_client_has_is_what_its_process_has_less_its_context() {
        let mut overhead = Overhead::default();
        overhead.sample(&sample(9000, &[(1, 4500), (2, 1500)]), &[client(1, 4000, true)], CONTEXT, |_| false);
        // It says that it has freed 3 GiB, and has freed 1.
        let clients = [client(1, 1000, false), client(2, 900, false)];
        let present = overhead.present(&sample(8000, &[(1, 3500), (2, 1500)]), &clients, CONTEXT).expect("figures");
        assert_eq!(present[&ClientId(1)], 2998 * MIB);
        assert_eq!(present[&ClientId(2)], 898 * MIB, "a context that was never measured is guessed");
    }

    #[test]
    fn what_nobody_accounts_for_may_be_anybodys_whose_process_is_not_seen() {
        let mut overhead = Overhead::default();
        let clients = [client(1, 4000, true), client(2, 1000, true)];
        overhead.sample(&sample(6500, &[]), &clients, CONTEXT, |_| false);
        let clients = [client(1, 1000, false), client(2, 1000, true)];
        let present = overhead.present(&sample(5000, &[]), &clients, CONTEXT).expect("figures");
        assert_eq!((present[&ClientId(1)], present[&ClientId(2)]), (2498 * MIB, 2498 * MIB));
        let unsteady = Sample { steady: false, ..sample(5000, &[]) };
        assert_eq!(overhead.present(&unsteady, &clients, CONTEXT), None);
        assert_eq!(overhead.present(&sample(3500, &[]), &clients, CONTEXT).expect("figures")[&ClientId(1)], 998 * MIB);
    }

    #[test]
    fn small_changes_do_not_count() {
        let mut overhead = Overhead::default();
        assert_eq!(overhead.sample(&sample(500, &[]), &[], CONTEXT, |_| false), Some(500 * MIB));
        assert_eq!(overhead.sample(&sample(501, &[]), &[], CONTEXT, |_| false), Some(500 * MIB));
    }
}
