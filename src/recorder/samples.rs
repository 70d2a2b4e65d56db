//! Compression of measurements. Measurements of GPUs ([`Event::Measured`], [`Event::ContextSizes`])
//! list every client several times a second, and most figures stay the same. The recorder therefore
//! stores only figures that have changed.

use std::collections::BTreeMap;

use crate::scheduler::{ClientId, Event, Found, GpuId};

type Figures<T> = BTreeMap<ClientId, T>;

/// The newest measurement of each kind on each GPU.
#[derive(Debug, Default)]
pub struct Samples {
    present: BTreeMap<GpuId, Figures<Found>>,
    contexts: BTreeMap<GpuId, Figures<u64>>,
}

impl Samples {
    /// Returns the event with only the changed figures (`None`: the event is stored unchanged), and
    /// the clients that are no longer listed.
    pub fn reduce(&mut self, event: &Event) -> (Option<Event>, Vec<ClientId>) {
        match *event {
            Event::Measured { gpu, begun, free, evicted, ref found } => {
                let (found, gone) = differences(self.present.entry(gpu).or_default(), found);
                (Some(Event::Measured { gpu, begun, free, evicted, found }), gone)
            }
            Event::ContextSizes { gpu, ref bytes } => {
                let (bytes, gone) = differences(self.contexts.entry(gpu).or_default(), bytes);
                (Some(Event::ContextSizes { gpu, bytes }), gone)
            }
            _ => (None, Vec::new()),
        }
    }

    /// Restores the event that [`Self::reduce`] reduced.
    pub fn restore(&mut self, event: Event, gone: &[ClientId]) -> Event {
        match event {
            Event::Measured { gpu, begun, free, evicted, found } => {
                let found = whole(self.present.entry(gpu).or_default(), found, gone);
                Event::Measured { gpu, begun, free, evicted, found }
            }
            Event::ContextSizes { gpu, bytes } => {
                let bytes = whole(self.contexts.entry(gpu).or_default(), bytes, gone);
                Event::ContextSizes { gpu, bytes }
            }
            event => event,
        }
    }
}

fn differences<T: Copy + PartialEq>(before: &mut Figures<T>, now: &Figures<T>) -> (Figures<T>, Vec<ClientId>) {
    let gone: Vec<ClientId> = before.keys().filter(|client| !now.contains_key(client)).copied().collect();
    let is_new = |(client, figure): &(&ClientId, &T)| before.get(client) != Some(*figure);
    let changed: Figures<T> = now.iter().filter(is_new).map(|(client, figure)| (*client, *figure)).collect();
    apply(before, &changed, &gone);
    (changed, gone)
}

fn whole<T: Copy>(before: &mut Figures<T>, changed: Figures<T>, gone: &[ClientId]) -> Figures<T> {
    apply(before, &changed, gone);
    before.clone()
}

fn apply<T: Copy>(to: &mut Figures<T>, changed: &Figures<T>, gone: &[ClientId]) {
    to.extend(changed);
    for client in gone {
        to.remove(client);
    }
}
