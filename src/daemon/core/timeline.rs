//! The flight recorder's timeline for one user. The timeline names the user's own programs, and shows
//! other programs anonymously.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::Duration;

use super::bundle::{Snapshot, sealed};
use super::recording::{header, process};
use crate::identity::Tenant;
use crate::recorder::follow::Follower;
use crate::recorder::replay;
use crate::scheduler::{ClientId, TenantId};
use crate::timeline::{Lane, Timeline, from_moments, from_recording, json};

/// The user that requested a timeline.
#[derive(Debug, Clone)]
pub struct Viewer {
    pub uid: u32,
    pub tenant: Tenant,
    pub sees_all: bool,
}

/// Lanes, spans and width of a live timeline. A span needs about 45 bytes, so that a live timeline
/// needs at most about 90 KB.
const LIVE_LANES: usize = 24;
const LIVE_SPANS: usize = 2000;
const LIVE_PIXELS: u32 = 800;

impl Snapshot {
    /// Replays the recording, and writes the timeline to a sealed memfd as JSON. The replay takes time.
    pub fn timeline(self, viewer: &Viewer) -> Result<OwnedFd, String> {
        let replay = replay::replay(self.recording.checkpoint()?, self.recording.entries())?;
        let labels = self.labels(viewer, &replay.tenants);
        let header = header(self.now, self.driver.clone(), false);
        let timeline = anonymous(from_recording(&replay, &labels, &header), &labels);
        let text = json::write(&timeline, &self.gpu_names())?;
        sealed(c"nvshare-timeline", |file| file.write_all(&text)).map_err(|e| e.to_string())
    }

    /// Writes the last `last` of the timeline of one GPU (`None`: of all GPUs) as JSON. `follower`: the
    /// state of the previous reading.
    ///
    /// # Errors
    /// Returns a sentence if the recording cannot be read.
    pub fn live_timeline(
        &self,
        follower: &mut Option<Follower>,
        viewer: &Viewer,
        last: Duration,
        gpu: Option<&str>,
    ) -> Result<String, String> {
        let mut current = match follower.take() {
            Some(known) => known,
            None => Follower::new(&self.recording)?,
        };
        if !current.read(&self.recording)? {
            current = Follower::new(&self.recording)?;
            current.read(&self.recording)?;
        }
        let begin = self.now.saturating_sub(last);
        let (moments, unfinished) = current.moments(begin, self.now);
        let labels = self.labels(viewer, current.tenants());
        *follower = Some(current);
        let header = header(self.now, self.driver.clone(), false);
        let all = moments.iter().chain(&unfinished);
        let mut timeline = anonymous(from_moments(Some((begin, self.now)), all, &labels, &header), &labels);
        if let Some(gpu) = gpu {
            timeline.keep_gpu(gpu);
        }
        timeline.keep_last(last);
        timeline.thin(LIVE_LANES, LIVE_SPANS, LIVE_PIXELS);
        String::from_utf8(json::write(&timeline, &self.gpu_names())?).map_err(|e| e.to_string())
    }

    /// The labels of the lanes that the viewer may identify, by client number.
    fn labels(&self, viewer: &Viewer, tenants: &BTreeMap<ClientId, TenantId>) -> BTreeMap<u64, String> {
        let mut labels = BTreeMap::new();
        let clients = self.view.list_clients();
        let living = clients.iter().map(|client| (client.id, &client.identity));
        for (client, identity) in self.ended.iter().map(|(client, identity)| (*client, identity)).chain(living) {
            let is_own = identity.uid == viewer.uid || identity.tenant == viewer.tenant;
            if viewer.sees_all || is_own {
                labels.insert(client.0, process(client, identity, false).label());
            }
        }
        // For programs that ended long ago, the recording contains only the tenant.
        for (client, tenant) in tenants {
            if viewer.sees_all || *tenant == TenantId(viewer.tenant.number()) {
                labels.entry(client.0).or_insert_with(|| format!("client {}, which has ended", client.0));
            }
        }
        labels
    }

    /// Titles such as `GPU 0  NVIDIA H200`, by the UUID without its prefix.
    fn gpu_names(&self) -> BTreeMap<String, String> {
        let gpus = self.view.list_gpus();
        let names = gpus.iter().filter_map(|gpu| {
            let uuid = gpu.uuid.split_once('-')?.1.to_owned();
            let number = gpu.index.map_or_else(|| gpu.uuid.clone(), |index| format!("GPU {index}"));
            Some((uuid, format!("{number}  {}", gpu.name)))
        });
        names.collect()
    }
}

/// Makes the lanes without a label anonymous: removes their names, client numbers and bytes.
fn anonymous(timeline: Timeline, labels: &BTreeMap<u64, String>) -> Timeline {
    let lanes = timeline.lanes.into_iter().map(|(gpu, lanes)| {
        let (own, mut others): (BTreeMap<u64, Lane>, _) =
            lanes.into_iter().partition(|(client, _)| labels.contains_key(client));
        for lane in others.values_mut() {
            lane.label = "another user's program".into();
            lane.spans.iter_mut().for_each(|span| span.bytes = 0);
        }
        // The viewer's own lanes come first.
        (gpu, (1u64..).zip(own.into_values().chain(others.into_values())).collect())
    });
    Timeline { lanes: lanes.collect(), ..timeline }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timeline::{Activity, Span};

    #[test]
    fn other_users_lanes_show_only_times() {
        let mut timeline = Timeline::default();
        for client in 1..=3 {
            let span = Span { activity: Activity::Leaves, from: Duration::ZERO, to: Duration::from_secs(1), bytes: 77 };
            let lane = Lane { label: format!("client {client}"), spans: vec![span] };
            timeline.lanes.entry("0af9".into()).or_default().insert(client, lane);
        }
        let seen = anonymous(timeline, &BTreeMap::from([(2, "mine".to_owned())]));
        let lanes: Vec<&Lane> = seen.lanes["0af9"].values().collect();
        assert_eq!(lanes.len(), 3);
        assert_eq!((lanes[0].label.as_str(), lanes[0].spans[0].bytes), ("client 2", 77));
        for lane in &lanes[1..] {
            assert_eq!((lane.label.as_str(), lane.spans[0].bytes), ("another user's program", 0));
            assert_eq!(lane.spans[0].to, Duration::from_secs(1));
        }
    }
}
