//! Chooses the slots of a container, if kubelet lets the plugin choose. The slots are on different
//! GPUs if possible. GPUs are ordered by their free slots, and equal GPUs by their NUMA node. The
//! choice is deterministic and does no I/O.

use std::collections::{BTreeMap, BTreeSet};

use crate::config::Allocation;
use crate::devices::Devices;
use crate::names::quoted;

/// kubelet's request.
#[derive(Debug, Clone, Copy)]
pub struct Question<'a> {
    pub available: &'a [String],
    /// The slots that the container already has.
    pub must_include: &'a [String],
    pub size: i32,
}

/// Returns the chosen slots, or a sentence about the mistake in the request.
pub fn prefer(devices: &Devices, allocation: Allocation, asked: Question<'_>) -> Result<Vec<String>, String> {
    let size = usize::try_from(asked.size)
        .map_err(|_| format!("cannot choose {} devices: the number must not be negative", asked.size))?;
    let must: BTreeSet<&String> = asked.must_include.iter().collect();
    if must.len() > size {
        return Err(format!("cannot choose {size} devices: {} must be included", must.len()));
    }
    let mut picked: Vec<String> = Vec::new();
    let mut choice = Choice { devices, allocation, free: BTreeMap::new(), taken: BTreeMap::new() };
    for id in &must {
        let (at, _) =
            devices.find(id).ok_or_else(|| format!("cannot include {}: this node has no such device", quoted(id)))?;
        *choice.taken.entry(at).or_default() += 1;
        picked.push((*id).clone());
    }
    // kubelet's list can be older than the plugin's list, so missing and unhealthy GPUs are
    // skipped.
    for id in asked.available.iter().filter(|id| !must.contains(id)) {
        if let Some((at, slot)) = devices.find(id)
            && devices.gpu(at).is_some_and(|gpu| gpu.problem.is_none())
        {
            choice.free.entry(at).or_default().insert(slot);
        }
    }
    while picked.len() < size {
        let next = choice.next().ok_or_else(|| {
            format!("cannot choose {size} devices: only {} available devices are healthy", picked.len())
        })?;
        picked.push(next);
    }
    Ok(picked)
}

/// The free slots, and the number of chosen slots, by the position of the GPU.
struct Choice<'a> {
    devices: &'a Devices,
    allocation: Allocation,
    free: BTreeMap<usize, BTreeSet<u32>>,
    taken: BTreeMap<usize, usize>,
}

impl Choice<'_> {
    fn next(&mut self) -> Option<String> {
        let best = self.free.keys().copied().min_by_key(|at| (self.rank(*at), self.strangeness(*at), *at))?;
        let slots = self.free.get_mut(&best)?;
        let slot = slots.pop_first()?;
        if slots.is_empty() {
            self.free.remove(&best);
        }
        *self.taken.entry(best).or_default() += 1;
        Some(self.devices.gpu(best)?.id(slot))
    }

    /// Returns the rank of a GPU: first the number of picked slots, then the allocation's
    /// preference.
    fn rank(&self, at: usize) -> (usize, usize) {
        let free = self.free.get(&at).map_or(0, BTreeSet::len);
        let preferred = match self.allocation {
            Allocation::Spread => usize::MAX - free,
            Allocation::Pack => free,
        };
        (self.taken.get(&at).copied().unwrap_or(0), preferred)
    }

    /// Returns the NUMA distance, which is 0 on the node of a picked GPU and 1 on other nodes.
    /// Before the first pick, the distance decreases with the number of GPUs of equal rank on the
    /// same node.
    fn strangeness(&self, at: usize) -> usize {
        let node = |at: usize| self.devices.gpu(at).and_then(|gpu| gpu.numa);
        let (mine, rank) = (node(at), self.rank(at));
        if !self.taken.is_empty() {
            let is_beside = mine.is_some() && self.taken.keys().any(|taken| node(*taken) == mine);
            return usize::from(!is_beside);
        }
        let beside = self.free.keys().filter(|other| node(**other) == mine && self.rank(**other) == rank).count();
        usize::MAX - beside
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Gpu;
    use proptest::prelude::*;

    /// Creates GPUs, each with a number of slots and a NUMA node.
    fn devices(gpus: &[(u32, Option<u32>)]) -> Devices {
        let gpu = |(at, (slots, numa)): (usize, &(u32, Option<u32>))| Gpu {
            uuid: format!("GPU-{}", char::from(b'a' + at as u8)),
            index: Some(at as u32),
            numa: *numa,
            slots: *slots,
            ..Gpu::default()
        };
        Devices { gpus: gpus.iter().enumerate().map(gpu).collect() }
    }

    fn all(devices: &Devices) -> Vec<String> {
        devices.gpus.iter().flat_map(Gpu::ids).collect()
    }

    fn ask(devices: &Devices, allocation: Allocation, used: &[&str], must: &[&str], size: i32) -> Vec<String> {
        let available: Vec<String> = all(devices).into_iter().filter(|id| !used.contains(&id.as_str())).collect();
        let must: Vec<String> = must.iter().map(|id| (*id).to_owned()).collect();
        let asked = Question { available: &available, must_include: &must, size };
        prefer(devices, allocation, asked).expect("there is enough")
    }

    #[test]
    fn several_slots_are_on_different_gpus() {
        let two = devices(&[(3, None), (3, None)]);
        assert_eq!(ask(&two, Allocation::Spread, &[], &[], 2), ["GPU-a::0", "GPU-b::0"]);
        assert_eq!(ask(&two, Allocation::Pack, &[], &[], 2), ["GPU-a::0", "GPU-b::0"]);
        assert_eq!(ask(&two, Allocation::Spread, &[], &[], 3), ["GPU-a::0", "GPU-b::0", "GPU-a::1"]);
    }

    #[test]
    fn spread_prefers_the_emptiest_gpu_and_pack_the_fullest() {
        let three = devices(&[(3, None), (3, None), (3, None)]);
        let used = ["GPU-a::0", "GPU-b::0", "GPU-b::2"];
        assert_eq!(ask(&three, Allocation::Spread, &used, &[], 1), ["GPU-c::0"]);
        assert_eq!(ask(&three, Allocation::Pack, &used, &[], 1), ["GPU-b::1"]);
        assert_eq!(ask(&three, Allocation::Pack, &used, &[], 2), ["GPU-b::1", "GPU-a::1"]);
    }

    #[test]
    fn must_include_devices_count_towards_the_size() {
        let two = devices(&[(3, None), (3, None)]);
        assert_eq!(ask(&two, Allocation::Pack, &["GPU-a::1"], &["GPU-a::0"], 2), ["GPU-a::0", "GPU-b::0"]);
    }

    #[test]
    fn equally_good_gpus_are_chosen_from_one_numa_node() {
        let four = devices(&[(2, Some(0)), (2, Some(1)), (2, Some(0)), (2, Some(1))]);
        assert_eq!(ask(&four, Allocation::Spread, &[], &[], 2), ["GPU-a::0", "GPU-c::0"]);
        // Three GPUs are equally good, and two of these three are on one node.
        assert_eq!(ask(&four, Allocation::Spread, &["GPU-a::0"], &[], 2), ["GPU-b::0", "GPU-d::0"]);
        assert_eq!(ask(&four, Allocation::Spread, &[], &["GPU-b::1"], 2), ["GPU-b::1", "GPU-d::0"]);
    }

    #[test]
    fn impossible_preferences_are_rejected_with_a_reason() {
        let mut two = devices(&[(2, None), (2, None)]);
        let available = all(&two);
        let refused = |devices: &Devices, must: &[String], size| {
            let asked = Question { available: &available, must_include: must, size };
            prefer(devices, Allocation::Spread, asked).expect_err("it makes no sense")
        };
        assert!(refused(&two, &[], -1).contains("cannot choose -1 devices"));
        assert!(refused(&two, &[], i32::MAX).contains("only 4 available"));
        assert!(refused(&two, &available, 1).contains("4 must be included"));
        assert!(refused(&two, &["GPU-z::0".into()], 1).contains("cannot include \"GPU-z::0\""));
        two.gpus[0].problem = Some("it ails".into());
        assert!(refused(&two, &[], 3).contains("only 2 available"));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn the_choice_maximizes_the_number_of_different_gpus(
            gpus in prop::collection::vec((1..6_u32, prop::option::of(0..3_u32)), 1..6),
            picks in any::<[u64; 2]>(),
            size in 0..12_usize,
            pack in any::<bool>(),
        ) {
            let devices = devices(&gpus);
            let chosen = |mask: u64| move |(at, _): &(usize, String)| mask >> (at % 64) & 1 == 1;
            let available: Vec<String> = all(&devices).into_iter().enumerate().filter(chosen(picks[0])).map(|(_, id)| id).collect();
            let must: Vec<String> =
                available.iter().cloned().enumerate().filter(chosen(picks[0] & picks[1])).map(|(_, id)| id).take(size).collect();
            let allocation = if pack { Allocation::Pack } else { Allocation::Spread };
            let asked = Question { available: &available, must_include: &must, size: size as i32 };
            let answer = prefer(&devices, allocation, asked);
            if size > available.len() {
                prop_assert!(answer.is_err());
                return Ok(());
            }
            let answer = answer.expect("there is enough");
            let unique: BTreeSet<&String> = answer.iter().collect();
            prop_assert_eq!(unique.len(), size);
            prop_assert!(must.iter().all(|id| unique.contains(id)) && unique.iter().all(|id| available.contains(id)));
            let of = |id: &String| devices.find(id).expect("ours").0;
            let gpus = |ids: &mut dyn Iterator<Item = &String>| ids.map(of).collect::<BTreeSet<_>>();
            let (had, can) = (gpus(&mut must.iter()), gpus(&mut available.iter()));
            let most = can.len().min(had.len() + (size - must.len()));
            prop_assert_eq!(gpus(&mut answer.iter()).len(), most);
            let mut reversed = available.clone();
            reversed.reverse();
            prop_assert_eq!(prefer(&devices, allocation, Question { available: &reversed, ..asked }), Ok(answer));
        }
    }
}
