//! Sets the wanted limits in the driver, in the NVML thread. What prevents a limit is logged once.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::statfs;
use tracing::{debug, warn};

use super::left::{Left, Places};
use super::{Driver, Refusal, Wanted};
use crate::config::units;
use crate::identity::Cgroup;
use crate::scheduler::GpuId;

/// Where control groups are, for NVML too.
const ROOT: &str = "/sys/fs/cgroup";

/// A GPU, and the path of a control group.
type Place = (GpuId, String);

/// A limit that is set.
#[derive(Debug, Clone, Copy)]
struct Limit {
    /// The control group's number: another one of its name has no limit.
    inode: u64,
    /// `None`: an earlier daemon set it.
    bytes: Option<u64>,
}

#[derive(Debug)]
pub struct Keeper {
    root: PathBuf,
    /// Control groups of version 2 are there.
    is_version_2: bool,
    /// The control group of this process: in a control group with a limit, NVML shows that limit instead of the GPU's
    /// memory.
    own: Cgroup,
    wanted: Wanted,
    set: BTreeMap<Place, Limit>,
    left: Left,
    /// Nothing can be set or taken away here.
    gave_up: bool,
    slices: BTreeSet<GpuId>,
    /// Control groups for which the log has said that they have no limit.
    said: BTreeSet<String>,
    /// The log has said so of all that the kernel does not account for.
    uncounted: bool,
    /// The log has said so of the control groups above this process's own.
    around: bool,
}

impl Keeper {
    /// Knows from the file in that directory what an earlier daemon has set.
    pub fn new(directory: Option<&Path>) -> Self {
        let is_version_2 = statfs(ROOT).is_ok_and(|found| found.f_type == libc::CGROUP2_SUPER_MAGIC);
        let own = Cgroup::read(&std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default());
        Self::below(ROOT.into(), is_version_2, own, directory)
    }

    fn below(root: PathBuf, is_version_2: bool, own: Cgroup, directory: Option<&Path>) -> Self {
        let left = Left::open(directory);
        let limit = |(place, inode): (&Place, &u64)| (place.clone(), Limit { inode: *inode, bytes: None });
        Self {
            root,
            is_version_2,
            own,
            wanted: Wanted::new(),
            set: left.places().iter().map(limit).collect(),
            left,
            gave_up: false,
            slices: BTreeSet::new(),
            said: BTreeSet::new(),
            uncounted: false,
            around: false,
        }
    }

    /// From now on these are to be there, and no others.
    pub fn want(&mut self, mut wanted: Wanted) {
        for path in self.own.within() {
            let before = wanted.len();
            wanted.retain(|(_, wanted), _| wanted != path);
            if wanted.len() < before && !std::mem::replace(&mut self.around, true) {
                let why = "the scheduler is in it itself, and would be told less of each GPU's memory";
                warn!(name: "driver-limits", "driver-limits has no effect on {path}: {why}");
            }
        }
        self.said.retain(|said| wanted.keys().any(|(_, path)| path == said));
        self.wanted = wanted;
    }

    /// Sets and removes limits. What the driver refuses is tried again with the next call.
    pub fn keep(&mut self, driver: &impl Driver) {
        if self.gave_up || (self.set.is_empty() && self.wanted.is_empty()) {
            return;
        }
        if !self.is_version_2 {
            self.give_up(
                "control groups of version 2 are not at /sys/fs/cgroup, see systemd.unified_cgroup_hierarchy=",
            );
            return;
        }
        let (inodes, gone) = self.look();
        self.set.retain(|place, _| !gone.contains(place));
        let unwanted = self.set.keys().filter(|place| !self.wanted.contains_key(*place));
        let mut due: Vec<(Place, Option<u64>)> = unwanted.map(|place| (place.clone(), None)).collect();
        for (place, bytes) in &self.wanted {
            let is_set = self.set.get(place).is_some_and(|limit| limit.bytes == Some(*bytes));
            if !is_set && !self.slices.contains(&place.0) && inodes.contains_key(&place.1) {
                due.push((place.clone(), Some(*bytes)));
            }
        }
        // Before any is set, so that a later daemon knows all of them.
        self.remember(&inodes);
        for (place, bytes) in due {
            self.change(driver, place, bytes, &inodes);
            if self.gave_up {
                break;
            }
        }
        self.remember(&inodes);
    }

    /// Writes down what is set, and what is going to be.
    fn remember(&mut self, inodes: &BTreeMap<String, u64>) {
        let set = self.set.iter().map(|(place, limit)| (place.clone(), limit.inode));
        let wanted = self.wanted.keys().filter(|(gpu, _)| !self.gave_up && !self.slices.contains(gpu));
        let wanted = wanted.filter_map(|place| Some((place.clone(), *inodes.get(&place.1)?)));
        let places: Places = wanted.chain(set).collect();
        self.left.write(places);
    }

    fn change(&mut self, driver: &impl Driver, place: Place, bytes: Option<u64>, inodes: &BTreeMap<String, u64>) {
        let (gpu, cgroup) = (place.0, self.root.join(place.1.trim_start_matches('/')));
        let refused = match (driver.set(gpu, &cgroup, bytes), bytes) {
            (Ok(()), Some(limit)) => {
                debug!(gpu = %gpu.0, bytes = limit, "the driver bounds {} to {}", place.1, units::size(limit));
                self.said.remove(&place.1);
                let inode = inodes.get(&place.1).copied().unwrap_or(0);
                self.set.insert(place, Limit { inode, bytes });
                return;
            }
            (Ok(()), None) => {
                debug!(gpu = %gpu.0, "the driver no longer bounds {}", place.1);
                self.set.remove(&place);
                return;
            }
            (Err(refused), _) => refused,
        };
        match refused {
            Refusal::Unknown => self.give_up(
                "the driver bounds no control groups here. It takes r615 or later, and accounting that is not turned off",
            ),
            Refusal::Forbidden => self.give_up(
                "the driver does not let the scheduler set them. The drop-in for its unit is in nvshare.toml(5); restart it then",
            ),
            Refusal::Slice => {
                self.slices.insert(gpu);
                warn!(name: "driver-limits", "driver-limits has no effect on MIG slice {}: the driver bounds none", gpu.0);
            }
            Refusal::NoGpu => {}
            // Then there is none.
            Refusal::Uncounted if bytes.is_none() => {
                self.set.remove(&place);
            }
            Refusal::Uncounted => {
                if !std::mem::replace(&mut self.uncounted, true) {
                    let why = "the kernel accounts for GPU memory, though not there. nvshare.toml(5) has what to do";
                    warn!(name: "driver-limits", "driver-limits has no effect on {}: {why}", place.1);
                }
            }
            Refusal::Other(why) => {
                if self.said.insert(place.1.clone()) {
                    warn!(name: "driver-limits", "the driver does not take the limit of {}, for now: {why}", place.1);
                }
            }
        }
    }

    fn give_up(&mut self, why: &str) {
        self.gave_up = true;
        if self.wanted.is_empty() {
            warn!(name: "driver-limits", "limits that an earlier scheduler set in the driver stay there: {why}");
        } else {
            warn!(name: "driver-limits", "driver-limits has no effect: {why}");
        }
    }

    /// The numbers of all control groups that matter, and what was set for others that are gone.
    fn look(&self) -> (BTreeMap<String, u64>, BTreeSet<Place>) {
        let paths: BTreeSet<&str> = self.set.keys().chain(self.wanted.keys()).map(|(_, path)| path.as_str()).collect();
        let inode = |path: &str| {
            let below = Path::new(path.trim_start_matches('/'));
            // A path in another namespace of control groups leads out of ours.
            let is_plain = below.components().all(|part| matches!(part, std::path::Component::Normal(_)));
            let found = is_plain.then(|| std::fs::metadata(self.root.join(below)).ok()).flatten()?;
            found.is_dir().then(|| found.ino())
        };
        let inodes: BTreeMap<String, u64> =
            paths.into_iter().filter_map(|path| Some((path.to_owned(), inode(path)?))).collect();
        let gone = self.set.iter().filter(|((_, path), limit)| inodes.get(path) != Some(&limit.inode));
        let gone = gone.map(|(place, _)| place.clone()).collect();
        (inodes, gone)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::scheduler::Uuid;

    const GPU: GpuId = GpuId(Uuid([1; 16]));
    const SLICE: GpuId = GpuId(Uuid([2; 16]));

    /// What it was told, and what it says to the next.
    #[derive(Default)]
    struct Told {
        calls: RefCell<Vec<(String, Option<u64>)>>,
        refuses: Cell<Option<fn() -> Refusal>>,
    }

    impl Told {
        fn take(&self) -> Vec<(String, Option<u64>)> {
            self.calls.take()
        }
    }

    impl Driver for Told {
        fn set(&self, gpu: GpuId, cgroup: &Path, bytes: Option<u64>) -> Result<(), Refusal> {
            if gpu == SLICE {
                return Err(Refusal::Slice);
            }
            let name = cgroup.file_name().expect("a name").to_string_lossy().into_owned();
            self.calls.borrow_mut().push((name, bytes));
            self.refuses.get().map_or(Ok(()), |why| Err(why()))
        }
    }

    struct Place {
        root: tempfile::TempDir,
        state: tempfile::TempDir,
    }

    impl Place {
        /// With these control groups.
        fn new(names: &[&str]) -> Self {
            let place =
                Self { root: tempfile::tempdir().expect("a directory"), state: tempfile::tempdir().expect("another") };
            names.iter().for_each(|name| place.make(name));
            place
        }

        fn make(&self, name: &str) {
            std::fs::create_dir(self.root.path().join(name)).expect("a directory");
        }

        fn keeper(&self) -> Keeper {
            Keeper::below(self.root.path().into(), true, Cgroup::default(), Some(self.state.path()))
        }
    }

    fn wanted(limits: &[(&str, u64)]) -> Wanted {
        limits.iter().map(|(path, bytes)| ((GPU, (*path).to_owned()), *bytes)).collect()
    }

    fn call(name: &str, bytes: impl Into<Option<u64>>) -> (String, Option<u64>) {
        (name.to_owned(), bytes.into())
    }

    #[test]
    fn what_is_wanted_is_set_once_changed_and_taken_away() {
        let (place, driver) = (Place::new(&["a", "b"]), Told::default());
        let mut keeper = place.keeper();
        keeper.keep(&driver);
        keeper.want(wanted(&[("/a", 5), ("/b", 6), ("/gone", 7), ("/../a", 8)]));
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("a", 5), call("b", 6)]);
        keeper.keep(&driver);
        assert_eq!(driver.take(), [], "nothing has changed");
        keeper.want(wanted(&[("/a", 4)]));
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("b", None), call("a", 4)]);
        keeper.want(Wanted::new());
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("a", None)]);
        assert_eq!(std::fs::read_dir(place.state.path()).expect("the directory").count(), 0);
    }

    #[test]
    fn a_successor_takes_away_what_nobody_wants_any_more() {
        let (place, driver) = (Place::new(&["a", "b", "c"]), Told::default());
        let mut killed = place.keeper();
        killed.want(wanted(&[("/a", 5), ("/b", 6), ("/c", 7)]));
        killed.keep(&driver);
        driver.take();
        // Another control group of that name has no limit.
        std::fs::rename(place.root.path().join("c"), place.root.path().join("d")).expect("it goes");
        place.make("c");
        let mut keeper = place.keeper();
        keeper.want(wanted(&[("/a", 5)]));
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("b", None), call("a", 5)]);
        assert_eq!(place.keeper().set.keys().map(|(_, path)| path.as_str()).collect::<Vec<_>>(), ["/a"]);
    }

    #[test]
    fn a_control_group_that_is_made_anew_is_bounded_anew() {
        let (place, driver) = (Place::new(&["a"]), Told::default());
        let mut keeper = place.keeper();
        keeper.want(wanted(&[("/a", 5)]));
        keeper.keep(&driver);
        std::fs::rename(place.root.path().join("a"), place.root.path().join("old")).expect("it goes");
        keeper.keep(&driver);
        place.make("a");
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("a", 5), call("a", 5)]);
    }

    #[test]
    fn no_control_group_is_bounded_that_the_daemon_is_in() {
        let (place, driver) = (Place::new(&["a", "b"]), Told::default());
        let own = Cgroup { path: "/a/nvshare.service".into() };
        let mut keeper = Keeper::below(place.root.path().into(), true, own, None);
        keeper.want(wanted(&[("/a", 5), ("/b", 6)]));
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("b", 6)]);
    }

    #[test]
    fn what_is_refused_for_now_is_tried_again() {
        let (place, driver) = (Place::new(&["a"]), Told::default());
        let mut keeper = place.keeper();
        keeper.want(wanted(&[("/a", 5)]));
        keeper.keep(&driver);
        keeper.want(wanted(&[("/a", 3)]));
        driver.refuses.set(Some(|| Refusal::Other("there is more".into())));
        keeper.keep(&driver);
        assert_eq!(keeper.said.len(), 1);
        assert_eq!(place.keeper().set.len(), 1, "what was set before is there still");
        driver.refuses.set(None);
        keeper.keep(&driver);
        keeper.keep(&driver);
        assert_eq!(driver.take(), [call("a", 5), call("a", 3), call("a", 3)]);
        assert!(keeper.said.is_empty());
    }

    #[test]
    fn where_nothing_can_be_set_nothing_is_tried_again() {
        for why in [(|| Refusal::Forbidden) as fn() -> Refusal, || Refusal::Unknown] {
            let (place, driver) = (Place::new(&["a", "b"]), Told::default());
            let mut keeper = place.keeper();
            driver.refuses.set(Some(why));
            keeper.want(wanted(&[("/a", 5), ("/b", 6)]));
            keeper.keep(&driver);
            keeper.want(wanted(&[("/b", 6)]));
            keeper.keep(&driver);
            assert_eq!(driver.take().len(), 1);
            assert_eq!(std::fs::read_dir(place.state.path()).expect("the directory").count(), 0);
        }
        let (place, driver) = (Place::new(&["a"]), Told::default());
        let mut keeper = Keeper::below(place.root.path().into(), false, Cgroup::default(), None);
        keeper.want(wanted(&[("/a", 5)]));
        keeper.keep(&driver);
        assert!(keeper.gave_up && driver.take().is_empty(), "it is no version 2");
        let mut keeper = place.keeper();
        keeper.want(Wanted::from([((SLICE, "/a".into()), 4), ((GPU, "/a".into()), 5)]));
        keeper.keep(&driver);
        assert_eq!((driver.take().as_slice(), keeper.slices.len()), (&[call("a", 5)][..], 1));
    }
}
