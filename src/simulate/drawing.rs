//! Records the timeline of a world: the holders, waiters and moved memory of each GPU.

use std::collections::BTreeMap;
use std::time::Duration;

use nvshare_simulated_client::Way;

use crate::scheduler::{ClientId, Command, Event, GpuId, GpuSet, Time};
use crate::timeline::{Activity, Span, Timeline};

/// Copies that follow each other within this time are drawn as one move.
const PAUSE: Duration = Duration::from_millis(50);

/// A timeline that is being recorded.
#[derive(Debug, Default)]
pub struct Drawing {
    /// The name of each program.
    names: Vec<String>,
    timeline: Timeline,
    open: BTreeMap<ClientId, BTreeMap<GpuId, Open>>,
}

/// Unfinished activities of a program on a GPU.
#[derive(Debug, Default)]
struct Open {
    waits: Option<Time>,
    holds: Option<Time>,
    leaves: Option<Span>,
    returns: Option<Span>,
}

impl Drawing {
    /// `names` are the programs' names, in the order of their numbers.
    pub fn new(names: Vec<String>) -> Self {
        Self { names, ..Self::default() }
    }

    /// Records an event and the scheduler's commands.
    pub fn note(&mut self, now: Time, event: &Event, commands: &[Command]) {
        match event {
            Event::Requested { client, gpus } => {
                self.each(*client, gpus, |open| {
                    open.waits.get_or_insert(now);
                    None
                });
            }
            Event::Cancelled { client, gpus } => self.each(*client, gpus, |open| {
                let since = open.waits.take()?;
                Some(span(Activity::Waits, since, now))
            }),
            Event::Released { client, gpus, .. } => self.each(*client, gpus, |open| {
                let since = open.holds.take()?;
                Some(span(Activity::Holds, since, now))
            }),
            Event::Disconnected { client } => self.end(now, *client),
            _ => {}
        }
        for command in commands {
            if let Command::Grant { client, gpus } = command {
                self.each(*client, gpus, |open| {
                    open.holds.get_or_insert(now);
                    let since = open.waits.take()?;
                    Some(span(Activity::Waits, since, now))
                });
            }
        }
    }

    /// Records that `bytes` of a program have moved between `begun` and `now`.
    pub fn moved(&mut self, begun: Time, now: Time, client: ClientId, gpu: GpuId, way: Way, bytes: u64) {
        let open = self.open(client, gpu);
        let (activity, running) = match way {
            Way::Fresh => return,
            Way::Out => (Activity::Leaves, &mut open.leaves),
            Way::Back => (Activity::Returns, &mut open.returns),
        };
        let done = match running {
            Some(span) if span.to + PAUSE >= begun => {
                (span.to, span.bytes) = (now, span.bytes + bytes);
                None
            }
            _ => running.replace(Span { activity, from: begun, to: now, bytes }),
        };
        self.add(client, gpu, done);
    }

    /// Ends the recording and returns the timeline.
    pub fn finish(mut self, now: Time) -> Timeline {
        let open: Vec<ClientId> = self.open.keys().copied().collect();
        open.into_iter().for_each(|client| self.end(now, client));
        self.timeline.span = Some((Time::ZERO, now));
        self.timeline
    }

    fn open(&mut self, client: ClientId, gpu: GpuId) -> &mut Open {
        self.open.entry(client).or_default().entry(gpu).or_default()
    }

    fn end(&mut self, now: Time, client: ClientId) {
        for (gpu, Open { waits, holds, leaves, returns }) in self.open.remove(&client).unwrap_or_default() {
            let until_now = |activity, since: Option<Time>| since.map(|since| span(activity, since, now));
            let spans = [until_now(Activity::Waits, waits), until_now(Activity::Holds, holds), leaves, returns];
            spans.into_iter().for_each(|span| self.add(client, gpu, span));
        }
    }

    fn each(&mut self, client: ClientId, gpus: &GpuSet, change: impl Fn(&mut Open) -> Option<Span>) {
        for gpu in gpus {
            let done = change(self.open(client, *gpu));
            self.add(client, *gpu, done);
        }
    }

    fn add(&mut self, client: ClientId, gpu: GpuId, span: Option<Span>) {
        let name = || {
            let place = usize::try_from(client.0).ok();
            place.and_then(|place| self.names.get(place)).cloned().unwrap_or_default()
        };
        let lane = self.timeline.lane(&gpu.0.to_string(), client.0, name);
        lane.spans.extend(span.filter(|span| span.to > span.from));
    }
}

fn span(activity: Activity, from: Time, to: Time) -> Span {
    Span { activity, from, to, bytes: 0 }
}
