//! Trouble of GPUs: seemingly free memory that cannot be mapped, and wrong measurements.

use crate::{world::Happening, *};

/// Trouble that prevents clients from mapping memory that seems to be free on a GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct Trouble {
    /// Bytes that other programs use.
    pub stranger: u64,
    /// Bytes that are free but cannot be mapped.
    pub fragmented: u64,
    /// The time until which every mapping fails.
    pub refuses_until: Time,
}

impl World {
    /// Measures with an error. The error also applies to clients' figures.
    pub(crate) fn read_wrongly(&mut self, gpu: GpuId, begun: Time, at: Time, found: BTreeMap<ClientId, Found>) {
        let error = self.rng.below(2 * self.error + 1);
        let wrong = |bytes: u64, error: u64, most: u64| (bytes + error).saturating_sub(most);
        let most = self.error;
        let overhead = self.overheads[&gpu] + self.troubles[&gpu].stranger;
        let bytes = wrong(overhead, error, most);
        let free = Some(wrong(self.really_free(gpu, 0), 2 * most - error, most));
        self.at(at, Happening::ToMachine(Event::GpuOverhead { gpu, begun, bytes, others: 0, complete: true }));
        let found = found.into_iter().map(|(client, Found { least, most })| {
            let spread = self.rng.below(64 * MIB);
            (client, Found { least: least.saturating_sub(spread), most: most + spread })
        });
        let found = found.collect();
        self.at(at, Happening::ToMachine(Event::Measured { gpu, begun, free, evicted: 0, found }));
    }

    /// Returns the free bytes. `coming` bytes of the clients' memory are not mapped yet, and count
    /// as free.
    fn really_free(&self, gpu: GpuId, coming: u64) -> u64 {
        let used: u64 = self.models.values().map(|m| m.has(gpu)).sum();
        self.totals[&gpu].saturating_sub(self.overheads[&gpu] + self.troubles[&gpu].stranger + used - coming)
    }

    /// Returns how many of the `wanted` bytes a client can map now.
    pub(crate) fn mappable(&self, gpu: GpuId, wanted: u64) -> u64 {
        let trouble = self.troubles[&gpu];
        let free = self.really_free(gpu, wanted).saturating_sub(trouble.fragmented);
        match () {
            () if self.now < trouble.refuses_until => 0,
            () if wanted <= free => wanted,
            () => free / (2 * MIB) * (2 * MIB),
        }
    }

    pub(crate) fn make_trouble(&mut self) {
        let is_over = self.now >= self.troubled;
        for gpu in self.totals.keys().copied().collect::<Vec<_>>() {
            let before = self.troubles.get(&gpu).copied().unwrap_or_default();
            self.troubles.insert(gpu, before);
            let free = self.really_free(gpu, 0);
            let rng = &mut self.rng;
            let trouble = Trouble {
                // Other programs can take at most the free memory.
                stranger: if rng.one_in(2) { rng.below(before.stranger + free.min(4 * GIB) + 1) } else { 0 },
                fragmented: if rng.one_in(3) { rng.below(GIB) } else { 0 },
                refuses_until: if rng.one_in(4) { self.now + rng.between(ms(0), ms(2000)) } else { Time::ZERO },
            };
            self.troubles.insert(gpu, if is_over { Trouble::default() } else { trouble });
        }
        if !is_over {
            let after = self.rng.between(ms(20), ms(1500));
            self.at((self.now + after).min(self.troubled), Happening::Trouble);
        }
    }
}
