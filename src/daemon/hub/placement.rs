//! Which GPUs a program is to see: what it chose itself, as far as its rule allows that, or the place that the machine
//! gives it; and whose place is kept until its program is there.

use nvshare_wire::env_limits::LimitName;
use nvshare_wire::scheduler::NoPlacement;
use nvshare_wire::visible_devices::Chooser;
use nvshare_wire::{SchedulerMessage, Text, version};
use tracing::{debug, info};

use super::{Client, Gpu, Hub};
use crate::config::rules::variable;
use crate::config::rules::{GpuName, Rule};
use crate::daemon::transport::peer;
use crate::daemon::transport::session::Ask;
use crate::identity::Identity;
use crate::scheduler::{ClientId, Event, GpuId, Labels, Placement, PlacementError, PlacementRequest, Time};
use crate::sys::clock;
use std::collections::BTreeMap;
use std::time::Duration;

/// For how long a process is remembered that asked for the program which it becomes or starts.
const REMEMBERED: Duration = Duration::from_secs(30);
/// How far up it is looked for who started a program.
const MOST_ANCESTORS: usize = 16;

/// A process that has a place for a program which is still to come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ahead {
    pid: i32,
    client: ClientId,
    since: Time,
}

/// A GPU, with what people know it by.
type Known<'a> = (GpuId, &'a Gpu, String);

impl Hub {
    /// Answers which GPUs a client is to see.
    pub(super) fn place(&mut self, client: ClientId, ask: &Ask) {
        let Some(entry) = self.clients.get(&client) else { return };
        if ask.ahead && entry.identity.pid > 0 {
            let pid = entry.identity.pid;
            self.ahead.retain(|ahead| ahead.pid != pid); // one for each process, however often it asks
            self.ahead.push(Ahead { pid, client, since: clock::now() });
        }
        match self.choice(client, ask) {
            Choice::Free => self.unplaced(client, NoPlacement::Free, ""),
            Choice::Of(gpus) => self.placed(client, &gpus),
            Choice::Nothing(why) => self.refuse_place(client, &why, ""),
            Choice::Machines(request) => self.apply(Event::PlacementRequested { client, request }),
        }
    }

    fn choice(&self, client: ClientId, ask: &Ask) -> Choice {
        let known = self.known(ask.devices);
        let ids = |gpus: &[&Known<'_>]| gpus.iter().map(|(id, ..)| *id).collect::<Vec<_>>();
        if known.is_empty() {
            return Choice::Free; // nobody here knows what there is to choose from
        }
        let rule = self.rule_of(client);
        let allowed = rule.and_then(|rule| rule.places.allowed.as_ref());
        let own = self.clients.get(&client).and_then(|entry| entry.own.allowed());
        let is_named = |names: &[GpuName], gpu: &Known<'_>| names.iter().any(|name| means(name, gpu, &known));
        let is_ruled = |gpu: &&Known<'_>| allowed.is_none_or(|names| is_named(names, gpu));
        let chosen: Vec<&Known<'_>> = match ask.chooser {
            Chooser::List => listed(&ask.choice, &known),
            Chooser::Nobody | Chooser::Rank => known.iter().collect(),
        };
        let ruled: Vec<&Known<'_>> = chosen.iter().copied().filter(is_ruled).collect();
        if ruled.is_empty() && !chosen.is_empty() {
            let rule = rule.map(Rule::to_string).unwrap_or_default();
            return Choice::Nothing(format!("rule {rule} allows none of the GPUs that it could see"));
        }
        let left: Vec<&Known<'_>> =
            ruled.iter().copied().filter(|gpu| own.is_none_or(|names| is_named(names, gpu))).collect();
        if left.is_empty() && !chosen.is_empty() {
            let name = variable(LimitName::AllowedGpus);
            return Choice::Nothing(format!("{name} allows none of the GPUs that it could see"));
        }
        let policy = self.config.settings.placement;
        let asks = ask.count > 0 || ask.bytes.is_some();
        if asks || (ask.chooser == Chooser::Nobody && policy != Placement::None) {
            let mut candidates = ids(&left);
            if ask.count > 1 {
                // A process sees no more than one slice.
                candidates = left.iter().filter(|(_, gpu, _)| !gpu.is_slice()).map(|(id, ..)| *id).collect();
            }
            return Choice::Machines(PlacementRequest {
                candidates,
                count: ask.count,
                bytes: ask.bytes,
                ahead: ask.ahead,
            });
        }
        if left.len() == chosen.len() { Choice::Free } else { Choice::Of(ids(&left)) }
    }

    /// GPUs that somebody can see, in the order in which people count them.
    fn known(&self, devices: u64) -> Vec<Known<'_>> {
        let is_seen = |gpu: &Gpu| {
            let number = gpu.minor.filter(|minor| *minor < u64::BITS && devices != 0);
            number.is_none_or(|minor| devices & 1 << minor != 0)
        };
        let seen = self.gpus.iter().filter(|(_, gpu)| is_seen(gpu));
        let mut known: Vec<Known<'_>> = seen.map(|(id, gpu)| (*id, gpu, gpu.label(*id))).collect();
        known.sort_by_key(|(id, gpu, _)| (gpu.index.is_none(), gpu.index, *id));
        known
    }

    /// Says what a rule's programs mind of others.
    pub(super) fn label(&mut self, clients: impl IntoIterator<Item = ClientId>) {
        let labels = |client| {
            let rule = self.rule_of(client);
            (client, rule.map_or_else(Labels::default, |rule| rule.places.labels.clone()))
        };
        let labels: BTreeMap<ClientId, Labels> = clients.into_iter().map(labels).collect();
        self.apply(Event::Labels { labels });
    }

    /// A client has come: perhaps it is what another process, or this one before, had asked a place for.
    pub(super) fn find_place(&mut self, client: ClientId) {
        let now = clock::now();
        self.ahead.retain(|ahead| now < ahead.since + REMEMBERED);
        let Some(mut pid) = self.clients.get(&client).map(|entry| entry.identity.pid) else { return };
        for _ in 0..MOST_ANCESTORS {
            if pid <= 0 || self.ahead.is_empty() {
                return;
            }
            let is_meant = |ahead: &Ahead| ahead.pid == pid && !self.clients.contains_key(&ahead.client);
            // The last to ask counts.
            if let Some(at) = self.ahead.iter().rposition(is_meant) {
                let from = self.ahead.remove(at).client;
                return self.apply(Event::PlacementTaken { client, from });
            }
            pid = peer::parent(pid).unwrap_or(0);
        }
    }

    pub(super) fn placed(&self, client: ClientId, gpus: &[GpuId]) {
        let names: Vec<String> = gpus.iter().filter_map(|id| Some(self.gpus.get(id)?.label(*id))).collect();
        let pid = self.clients.get(&client).map(|entry| entry.identity.pid);
        debug!(client = client.0, pid, gpu = names.join(" "), "placed");
        for (at, id) in (0..).zip(gpus) {
            let Some(gpu) = self.gpus.get(id) else { continue };
            let of = gpus.len() as u32;
            self.answer_place(client, SchedulerMessage::Placed { at, of, uuid: id.0, kind: gpu.kind });
        }
    }

    /// The machine found no place.
    pub(super) fn misfit(&mut self, client: ClientId, why: &PlacementError) {
        let (text, label) = match why {
            PlacementError::TooFew { wanted, there } => (format!("it wants {wanted} GPUs, and can have {there}"), ""),
            PlacementError::Affinity(label) => {
                (format!("affinity {label:?} has it where others of that label are, and it cannot be there"), &**label)
            }
            PlacementError::AntiAffinity(label) => {
                (format!("anti-affinity {label:?}: others of that label are on every GPU that it could have"), &**label)
            }
            PlacementError::Exclusion(label) => {
                (format!("exclusion {label:?} keeps it from those that are on every GPU that it could have"), &**label)
            }
        };
        self.refuse_place(client, &text, label);
    }

    fn refuse_place(&mut self, client: ClientId, why: &str, label: &str) {
        self.unplaced(client, NoPlacement::NoGpu, why);
        let Some(identity) = self.clients.get(&client).map(|entry| entry.identity.clone()) else { return };
        let Identity { pid, uid, unit, name, .. } = &*identity;
        if !self.log_limit.allows("not-placed", *uid) {
            return;
        }
        let rule = self.rule_of(client).map(Rule::to_string).unwrap_or_default();
        let by = if rule.is_empty() { String::new() } else { format!(" (rule {rule})") };
        info!(name: "not-placed", client = client.0, pid, uid, unit, rule, label, "there is no GPU for {name}: {why}{by}");
    }

    fn unplaced(&self, client: ClientId, outcome: NoPlacement, why: &str) {
        if outcome == NoPlacement::Free {
            debug!(client = client.0, "is not placed: it sees what it chooses");
        }
        self.answer_place(client, SchedulerMessage::Unplaced { outcome, text: Text::new(why) });
    }

    fn answer_place(&self, client: ClientId, message: SchedulerMessage) {
        if self.clients.get(&client).is_some_and(|entry: &Client| entry.session.version >= version::PLACEMENT) {
            self.send(client, message);
        }
    }
}

/// Who decides, and how.
enum Choice {
    /// It sees what it would see anyway.
    Free,
    Of(Vec<GpuId>),
    Nothing(String),
    Machines(PlacementRequest),
}

/// Whether a name means that GPU, and no other but a slice of the same one.
fn means(name: &GpuName, (_, gpu, label): &Known<'_>, known: &[Known<'_>]) -> bool {
    let alone = || match name {
        GpuName::Number(_) => true,
        GpuName::Uuid(_) => known.iter().filter(|(_, gpu, label)| name.fits(label, gpu.index)).count() == 1,
    };
    name.fits(label, gpu.index) && alone()
}

/// The GPUs of a list as the driver reads it: it ends before the first name that means none, or one that is there already
/// has it mean nothing at all.
fn listed<'a, 'b>(list: &str, known: &'a [Known<'b>]) -> Vec<&'a Known<'b>> {
    let find = |name: &str| {
        let name = GpuName::parse(name.trim())?;
        known.iter().find(|gpu| means(&name, gpu, known))
    };
    let mut gpus: Vec<&Known<'_>> = Vec::new();
    for gpu in list.split(',').map_while(find) {
        if gpus.iter().any(|other| other.0 == gpu.0) {
            return Vec::new();
        }
        gpus.push(gpu);
    }
    gpus
}
