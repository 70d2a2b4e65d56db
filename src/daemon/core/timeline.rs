//! The flight recorder's timeline for one user. The timeline names the user's own programs, and shows
//! other programs anonymously.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::fd::OwnedFd;

use super::bundle::{Snapshot, sealed};
use super::recording::{header, process};
use crate::identity::Tenant;
use crate::recorder::replay;
use crate::scheduler::TenantId;
use crate::timeline::{Lane, Timeline, from_recording, json};

/// The user that requested a timeline.
#[derive(Debug, Clone)]
pub struct Viewer {
    pub uid: u32,
    pub tenant: Tenant,
    pub sees_all: bool,
}

impl Snapshot {
    /// Replays the recording, and writes the timeline to a sealed memfd as JSON. The replay takes time.
    pub fn timeline(self, viewer: &Viewer) -> Result<OwnedFd, String> {
        let replay = replay::replay(self.recording.checkpoint()?, self.recording.entries())?;
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
        for (client, tenant) in &replay.tenants {
            if viewer.sees_all || *tenant == TenantId(viewer.tenant.number()) {
                labels.entry(client.0).or_insert_with(|| format!("client {}, which has ended", client.0));
            }
        }
        let header = header(self.now, self.driver, false);
        let timeline = anonymous(from_recording(&replay, &labels, &header), &labels);
        let gpus = self.view.list_gpus();
        let names = gpus.iter().filter_map(|gpu| {
            let uuid = gpu.uuid.split_once('-')?.1.to_owned();
            let number = gpu.index.map_or_else(|| gpu.uuid.clone(), |index| format!("GPU {index}"));
            Some((uuid, format!("{number}  {}", gpu.name)))
        });
        let text = json::write(&timeline, &names.collect())?;
        sealed(c"nvshare-timeline", |file| file.write_all(&text)).map_err(|e| e.to_string())
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
    use std::time::Duration;

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
