//! The choice of a GPU for a program that doesn't choose one itself.

use nvshare_sched::*;
use scheduler_sim::*;
use std::collections::BTreeMap;
use std::time::Duration;

const CONTEXT: u64 = GIB / 2;
const PATIENCE: Duration = Duration::from_secs(30);

/// A host with some GPUs, and programs that start on it.
struct Host {
    machine: Machine,
    now: Time,
    gpus: Vec<GpuId>,
}

impl Host {
    fn new(placement: Placement, sizes: &[u64]) -> Self {
        let settings = Settings { context: CONTEXT, placement, ..settings(AntiThrash::Auto, Duration::from_secs(1)) };
        let mut host = Self { machine: Machine::new(settings), now: Duration::from_secs(100), gpus: Vec::new() };
        for (n, size) in (0..).zip(sizes) {
            host.say(Event::GpuFound { gpu: gpu(n), total: size * GIB });
            host.say(Event::GpuOverhead { gpu: gpu(n), begun: host.now, bytes: 0, others: 0, complete: true });
            host.gpus.push(gpu(n));
        }
        host
    }

    fn say(&mut self, event: Event) -> Vec<Command> {
        self.machine.handle(self.now, event)
    }

    fn connect(&mut self, n: u64, labels: Labels) {
        self.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        self.say(Event::Labels { labels: BTreeMap::from([(client(n), labels)]) });
    }

    fn request(&self) -> PlacementRequest {
        PlacementRequest { candidates: self.gpus.clone(), count: 0, bytes: None, ahead: false }
    }

    fn ask(&mut self, n: u64, request: PlacementRequest) -> Result<Vec<u64>, PlacementError> {
        let commands = self.say(Event::PlacementRequested { client: client(n), request });
        let answers = commands.into_iter().filter_map(|command| match command {
            Command::Placed { client: who, gpus } if who == client(n) => {
                let number = |id: &GpuId| self.gpus.iter().position(|other| other == id).unwrap() as u64;
                Some(Ok(gpus.iter().map(number).collect()))
            }
            Command::Unplaced { client: who, why } if who == client(n) => Some(Err(why)),
            _ => None,
        });
        let answers: Vec<_> = answers.collect();
        assert_eq!(answers.len(), 1, "one answer");
        answers.into_iter().next().unwrap()
    }

    /// Places a program and returns the number of its GPU. `bytes` is the memory that it needs, if
    /// known.
    fn start(&mut self, n: u64, bytes: Option<u64>) -> u64 {
        self.connect(n, Labels::default());
        self.ask(n, PlacementRequest { bytes, ..self.request() }).unwrap()[0]
    }

    fn start_labelled(&mut self, n: u64, labels: Labels) -> Result<u64, PlacementError> {
        self.connect(n, labels);
        self.ask(n, self.request()).map(|gpus| gpus[0])
    }

    fn attach(&mut self, n: u64, at: u64, demand: u64) {
        self.say(Event::Attached { client: client(n), gpu: gpu(at), engine: Engine::Swap });
        let report = MemoryReport { ack: u32::MAX, demand, mapped: 0, swapped: 0, pinned: 0, limit_ack: u32::MAX };
        self.say(Event::Memory { client: client(n), gpu: gpu(at), report });
    }

    fn leave(&mut self, n: u64) {
        self.say(Event::Disconnected { client: client(n) });
    }
}

fn affinity(label: &str) -> Labels {
    Labels { affinity: Some(label.into()), ..Labels::default() }
}

fn apart(label: &str) -> Labels {
    Labels { anti_affinity: Some(label.into()), ..Labels::default() }
}

fn exclusive(label: &str) -> Labels {
    Labels { exclusion: Some(label.into()), ..Labels::default() }
}

#[test]
fn pack_chooses_the_fullest_gpu_with_enough_room() {
    let mut host = Host::new(Placement::Pack, &[16, 8, 24]);
    assert_eq!(host.start(1, Some(7 * GIB)), 1);
    assert_eq!(host.start(2, Some(7 * GIB)), 0, "with its context it does not fit beside the first");
    assert_eq!(host.start(3, Some(8 * GIB)), 0);
    assert_eq!(host.start(4, Some(20 * GIB)), 2);
}

#[test]
fn a_program_that_exactly_fits_is_placed() {
    let mut host = Host::new(Placement::Pack, &[8, 16]);
    assert_eq!(host.start(1, Some(8 * GIB - CONTEXT)), 0);
    let mut host = Host::new(Placement::Pack, &[8, 16]);
    assert_eq!(host.start(1, Some(8 * GIB - CONTEXT + 1)), 1);
}

#[test]
fn pack_places_programs_of_unknown_size_on_the_fullest_gpu() {
    let mut host = Host::new(Placement::Pack, &[16, 16]);
    assert_eq!(host.start(1, None), 0);
    host.attach(1, 0, 10 * GIB);
    assert_eq!(host.start(2, None), 0);
    host.attach(2, 0, 4 * GIB);
    assert_eq!(host.start(3, None), 0, "there is room for its context and more");
    host.attach(3, 0, GIB);
    assert_eq!(host.start(4, None), 1);
}

#[test]
fn the_least_overcommitted_gpu_is_chosen_if_none_has_room() {
    for bytes in [None, Some(4 * GIB)] {
        let mut host = Host::new(Placement::Pack, &[16, 16]);
        for (n, at, demand) in [(1, 0, 20), (2, 1, 18)] {
            host.connect(n, Labels::default());
            host.attach(n, at, demand * GIB);
        }
        assert_eq!(host.start(3, bytes), 1);
    }
}

#[test]
fn spread_counts_programs_first_and_then_their_memory() {
    let mut host = Host::new(Placement::Spread, &[16, 16, 16]);
    assert_eq!((1..=6).map(|n| host.start(n, None)).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
    for n in 1..=6 {
        host.attach(n, (n - 1) % 3, n * GIB);
    }
    assert_eq!(host.start(7, None), 0, "1 + 4 GiB");
    host.leave(2);
    assert_eq!(host.start(8, None), 1);
}

#[test]
fn eight_simultaneous_programs_are_spread_over_the_gpus() {
    let places = |placement, bytes| {
        let mut host = Host::new(placement, &[16, 16]);
        let all: Vec<u64> = (1..=8).map(|n| host.start(n, bytes)).collect();
        [0, 1].map(|at| all.iter().filter(|gpu| **gpu == at).count())
    };
    assert_eq!(places(Placement::Spread, None), [4, 4]);
    assert_eq!(places(Placement::Pack, Some(3 * GIB)), [4, 4], "three and a half GiB each");
    assert_eq!(places(Placement::Pack, Some(GIB)), [8, 0]);
}

#[test]
fn a_placed_programs_requested_memory_is_reserved_until_it_exits() {
    let mut host = Host::new(Placement::Pack, &[16, 16]);
    assert_eq!(host.start(1, Some(10 * GIB)), 0);
    host.attach(1, 0, GIB);
    host.now += 2 * PATIENCE;
    assert_eq!(host.start(2, Some(10 * GIB)), 1);
    host.leave(1);
    assert_eq!(host.start(3, Some(10 * GIB)), 0);
}

#[test]
fn a_rules_memory_max_is_expected_for_a_limited_time() {
    let group =
        Group { id: GroupId(7), limits: RuleLimits { memory_max: Amount::Percent(75), ..RuleLimits::default() } };
    let mut host = Host::new(Placement::Pack, &[16, 16]);
    let grouped = |host: &mut Host, n: u64| {
        host.connect(n, Labels::default());
        host.say(Event::Groups { groups: BTreeMap::from([(client(n), Some(group))]) });
        host.ask(n, host.request()).unwrap()[0]
    };
    assert_eq!(grouped(&mut host, 1), 0);
    host.attach(1, 0, GIB);
    assert_eq!(grouped(&mut host, 2), 1, "twelve GiB were expected of the first");
    host.now += PATIENCE;
    assert_eq!(grouped(&mut host, 3), 0, "it takes one GiB only");
}

#[test]
fn a_placement_ahead_is_kept_until_the_program_starts_or_times_out() {
    let mut host = Host::new(Placement::Spread, &[16, 16]);
    let ahead = |host: &mut Host, n: u64| {
        host.connect(n, Labels::default());
        let place = host.ask(n, PlacementRequest { ahead: true, ..host.request() }).unwrap()[0];
        host.leave(n);
        place
    };
    assert_eq!(ahead(&mut host, 1), 0);
    assert_eq!(ahead(&mut host, 2), 1);
    host.connect(3, Labels::default());
    host.say(Event::PlacementTaken { client: client(3), from: client(1) });
    assert_eq!(host.machine.client(client(3)).unwrap().placed, [gpu(0)]);
    host.now += PATIENCE;
    assert_eq!(ahead(&mut host, 4), 1, "the second never came, the third is there");
    host.leave(3);
    assert_eq!(ahead(&mut host, 5), 0);
}

#[test]
fn placements_ahead_are_bounded() {
    let mut host = Host::new(Placement::Spread, &[16, 16]);
    for n in 1..=1000 {
        host.connect(n, Labels::default());
        let request = PlacementRequest { candidates: vec![gpu(0)], ahead: true, ..host.request() };
        host.ask(n, request).unwrap();
        host.leave(n);
    }
    for n in 2001..=2064 {
        host.connect(n, Labels::default());
        host.attach(n, 1, 0);
    }
    assert_eq!(host.start(3000, None), 1, "64 places there, with memory for their contexts, and 64 programs here");
    assert_eq!(host.start(3001, None), 0);
}

#[test]
fn a_program_can_be_placed_on_several_gpus() {
    let mut host = Host::new(Placement::Spread, &[16, 16, 16]);
    assert_eq!(host.start(1, None), 0);
    host.connect(2, Labels::default());
    assert_eq!(host.ask(2, PlacementRequest { count: 2, ..host.request() }), Ok(vec![1, 2]));
    assert_eq!(
        host.ask(2, PlacementRequest { count: 4, ..host.request() }),
        Err(PlacementError::TooFew { wanted: 4, there: 3 })
    );
    assert_eq!(
        host.ask(2, PlacementRequest { candidates: vec![], ..host.request() }),
        Err(PlacementError::TooFew { wanted: 1, there: 0 })
    );
}

#[test]
fn the_first_of_equal_candidates_is_chosen() {
    let mut host = Host::new(Placement::Spread, &[16, 16, 16]);
    host.connect(1, Labels::default());
    assert_eq!(host.ask(1, PlacementRequest { candidates: vec![gpu(2), gpu(1)], ..host.request() }), Ok(vec![2]));
}

#[test]
fn programs_with_the_same_affinity_share_a_gpu() {
    for placement in [Placement::Pack, Placement::Spread] {
        let mut host = Host::new(placement, &[16, 16]);
        host.connect(9, Labels::default());
        host.attach(9, 0, 17 * GIB);
        assert_eq!(host.start_labelled(1, affinity("a")), Ok(1));
        assert_eq!(host.start_labelled(2, affinity("a")), Ok(1));
        host.attach(2, 1, 20 * GIB);
        host.leave(1);
        assert_eq!(host.start_labelled(3, affinity("a")), Ok(1), "however full it is");
        assert_eq!(host.start_labelled(4, affinity("b")), Ok(0));
        let elsewhere = PlacementRequest { candidates: vec![gpu(0)], ..host.request() };
        host.connect(5, affinity("a"));
        assert_eq!(host.ask(5, elsewhere), Err(PlacementError::Affinity("a".into())));
    }
}

#[test]
fn programs_with_the_same_anti_affinity_use_different_gpus() {
    for placement in [Placement::Pack, Placement::Spread] {
        let mut host = Host::new(placement, &[16, 16]);
        assert_eq!(host.start_labelled(1, apart("a")), Ok(0));
        host.attach(1, 0, 0);
        host.now += 2 * PATIENCE;
        assert_eq!(host.start_labelled(2, apart("a")), Ok(1));
        host.now += 2 * PATIENCE;
        let full = host.start_labelled(3, apart("a"));
        assert_eq!(full, Err(PlacementError::AntiAffinity("a".into())), "the second has not attached, and is there");
        assert!(host.start_labelled(4, apart("b")).is_ok());
        host.leave(2);
        assert_eq!(host.ask(3, host.request()), Ok(vec![1]));
    }
}

#[test]
fn programs_with_an_exclusion_share_a_gpu_only_with_each_other() {
    for placement in [Placement::Pack, Placement::Spread] {
        let mut host = Host::new(placement, &[16, 16]);
        assert_eq!(host.start_labelled(1, exclusive("a")), Ok(0));
        assert_eq!(host.start_labelled(2, Labels::default()), Ok(1), "who has none is kept out");
        assert_eq!(host.start_labelled(3, exclusive("a")), Ok(0));
        assert_eq!(host.start_labelled(4, exclusive("b")), Err(PlacementError::Exclusion("b".into())));
        host.leave(2);
        assert_eq!(host.ask(4, host.request()), Ok(vec![1]));
        assert_eq!(host.start_labelled(5, Labels::default()), Err(PlacementError::Exclusion("a".into())));
    }
}

#[test]
fn labels_apply_to_self_placed_programs_and_follow_rule_changes() {
    let mut host = Host::new(Placement::Spread, &[16, 16]);
    host.connect(1, apart("a"));
    host.attach(1, 0, 0);
    assert_eq!(host.start_labelled(2, apart("a")), Ok(1));
    host.say(Event::Labels { labels: BTreeMap::from([(client(1), Labels::default())]) });
    assert_eq!(host.start_labelled(3, apart("a")), Ok(0));
}
