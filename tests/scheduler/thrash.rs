//! What the scheduler makes of memory that is seen to move: whom it watches, what it says, and who takes turns for it. When
//! it is thrashing is in `thrash_traces`.

use nvshare_sched::*;
use scheduler_sim::*;
use std::time::Duration;

const SECOND: Duration = Duration::from_secs(1);
/// Thrashing is sure by then, and its end.
const SURE: u32 = 6;
/// Programs are kept apart for so long the first time.
const APART: u32 = 60;

/// Was said of thrashing.
const NOTHING: [bool; 0] = [];

const THRASHES: Traffic = Traffic { to_gpu: Some(6 * GIB), from_gpu: Some(5 * GIB), faults: Some(20_000) };

/// A machine with one GPU of 16 GiB and clients that map what they may.
struct Scene {
    machine: Machine,
    now: Time,
    said: Vec<Command>,
}

impl Scene {
    fn new(mode: AntiThrash) -> Self {
        let mut scene = Self { machine: Machine::new(settings(mode, SECOND)), now: SECOND, said: Vec::new() };
        scene.say(Event::GpuFound { gpu: gpu(0), total: 16 * GIB });
        scene.say(Event::GpuOverhead { gpu: gpu(0), begun: SECOND, bytes: 0, others: 0, complete: true });
        scene
    }

    /// Clients 1 and on with that engine, which need so much and want the GPU.
    fn with(mode: AntiThrash, engine: Engine, demands: &[u64]) -> Self {
        let mut scene = Self::new(mode);
        for (n, demand) in (1..).zip(demands) {
            scene.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
            scene.say(Event::Attached { client: client(n), gpu: gpu(0), engine });
            scene.report(n, *demand);
            scene.report(n, *demand);
            scene.request(n);
        }
        scene
    }

    fn say(&mut self, event: Event) -> Vec<Command> {
        let commands = self.machine.handle(self.now, event);
        self.said.extend(commands.iter().cloned());
        commands
    }

    /// Needs so much, and has mapped what it may.
    fn report(&mut self, n: u64, demand: u64) {
        let attachment =
            self.machine.client(client(n)).and_then(|c| c.attachments.first().map(|attachment| attachment.allowance));
        let mapped = attachment.unwrap_or(0).min(demand);
        self.report_mapped(n, demand, mapped);
    }

    fn report_mapped(&mut self, n: u64, demand: u64, mapped: u64) {
        let swapped = demand - mapped;
        let report = MemoryReport { ack: u32::MAX, demand, mapped, swapped, pinned: 0, limit_ack: u32::MAX };
        self.say(Event::Memory { client: client(n), gpu: gpu(0), report });
    }

    fn request(&mut self, n: u64) {
        self.say(Event::Requested { client: client(n), gpus: gpus([0]) });
    }

    fn release(&mut self, n: u64) {
        let (gpus, reason, busy) = (gpus([0]), ReleaseReason::Revoked, Duration::ZERO);
        self.say(Event::Released { client: client(n), gpus, reason, busy });
    }

    fn fullness(&mut self, n: u64, permille: u32) {
        self.say(Event::Utilization { client: client(n), gpu: gpu(0), permille });
    }

    fn set(&mut self, mode: AntiThrash) {
        self.say(Event::Configure(settings(mode, SECOND)));
    }

    /// So many seconds, with a sample in each. Says what was said of thrashing.
    fn see(&mut self, traffic: Traffic, seconds: u32) -> Vec<bool> {
        let before = self.said.len();
        for _ in 0..seconds {
            self.now += SECOND;
            self.say(Event::Traffic { gpu: gpu(0), traffic });
        }
        self.thrashing_since(before)
    }

    fn thrashing_since(&self, before: usize) -> Vec<bool> {
        let begins = |command: &Command| match command {
            Command::Thrashing { begins, .. } => Some(*begins),
            _ => None,
        };
        self.said[before..].iter().filter_map(begins).collect()
    }

    fn view(&self) -> GpuView {
        self.machine.gpu(gpu(0)).expect("the GPU")
    }

    fn holders(&self) -> Vec<u64> {
        self.view().holders.iter().filter(|h| h.state == LockState::Holding).map(|h| h.client.0).collect()
    }

    fn is_watched(&self) -> bool {
        self.machine.watched().contains(&gpu(0))
    }

    fn is_revoked(&self, n: u64) -> bool {
        self.said.iter().any(|command| matches!(command, Command::Revoke { client: c, .. } if *c == client(n)))
    }
}

#[test]
fn in_off_it_is_said_and_everybody_goes_on() {
    let mut scene = Scene::with(AntiThrash::Off, Engine::Managed, &[10 * GIB, 9 * GIB]);
    assert_eq!(scene.holders(), [1, 2]);
    assert!(scene.is_watched());
    assert_eq!(scene.see(THRASHES, SURE), [true]);
    let begins = Command::Thrashing { gpu: gpu(0), begins: true, demand: 19 * GIB };
    assert!(scene.said.contains(&begins), "{:?}", scene.said);
    let view = scene.view();
    assert!(view.thrashes && !view.serialized, "nobody takes turns in off");
    assert_eq!(scene.see(THRASHES, 600), NOTHING, "it is said once");
    assert_eq!(scene.holders(), [1, 2]);
    assert!(!scene.is_revoked(1) && !scene.is_revoked(2));
    scene.release(2);
    assert!(scene.is_watched(), "until it is over");
    assert_eq!(scene.see(THRASHES, SURE), [false]);
    assert!(!scene.is_watched() && !scene.view().thrashes);
}

#[test]
fn who_fits_or_is_alone_is_not_watched_and_nothing_is_said_of_it() {
    for demands in [&[7 * GIB, 8 * GIB][..], &[40 * GIB]] {
        let mut scene = Scene::with(AntiThrash::Off, Engine::Managed, demands);
        assert_eq!(scene.holders().len(), demands.len());
        assert!(!scene.is_watched(), "{demands:?}");
        assert_eq!(scene.see(THRASHES, 60), NOTHING);
    }
}

#[test]
fn programs_with_engine_swap_do_not_thrash() {
    let mut scene = Scene::with(AntiThrash::Off, Engine::Swap, &[10 * GIB, 9 * GIB]);
    assert_eq!(scene.holders(), [1], "together they do not fit");
    assert!(!scene.is_watched());
    // One turn after the other, with all that moves between them.
    for round in 0..20 {
        assert_eq!(scene.see(THRASHES, 1), NOTHING);
        let holder = 1 + round % 2;
        scene.release(holder);
        scene.report(holder, [10, 9][holder as usize - 1] * GIB);
        scene.report(3 - holder, [9, 10][holder as usize - 1] * GIB);
        scene.request(holder);
    }
}

#[test]
fn what_the_scheduler_has_moved_is_not_taken_for_thrashing() {
    let mut scene = Scene::with(AntiThrash::Off, Engine::Managed, &[10 * GIB, 9 * GIB]);
    // Two of another engine that take turns beside them.
    for n in 3..=4 {
        scene.say(Event::Connected { client: client(n), gang: 0, tenant: TenantId(0) });
        scene.say(Event::Attached { client: client(n), gpu: gpu(0), engine: Engine::Swap });
        scene.report(n, 10 * GIB);
        scene.report(n, 10 * GIB);
    }
    scene.request(3);
    scene.report(3, 10 * GIB);
    scene.release(3);
    scene.request(4);
    // The third has been asked for its memory, and has not said that it is gone.
    let evicts =
        |c: &Command| matches!(c, Command::Allowance { client, bytes, .. } if client.0 == 3 && *bytes == 6 * GIB);
    assert!(scene.said.iter().any(evicts));
    assert_eq!(scene.see(THRASHES, 4), NOTHING, "while it moves");
    scene.report_mapped(3, 10 * GIB, 6 * GIB);
    scene.report(4, 10 * GIB);
    assert_eq!(scene.see(THRASHES, SURE), [true], "and now nothing is to move any more");
}

#[test]
fn in_auto_programs_take_turns_and_are_tried_together_again_later() {
    // They leave the GPU idle, and fit, and so run together.
    let mut scene = Scene::with(AntiThrash::Auto, Engine::Managed, &[GIB, GIB]);
    scene.fullness(1, 300);
    scene.now += ms(150);
    scene.say(Event::Tick);
    scene.release(1);
    scene.fullness(2, 200);
    scene.request(1);
    assert_eq!(scene.holders(), [2, 1]);
    // For a while everybody runs, whatever they need.
    scene.set(AntiThrash::Off);
    scene.report(1, 10 * GIB);
    scene.report(2, 10 * GIB);
    let begins = scene.see(THRASHES, SURE);
    assert_eq!(begins, [true]);
    scene.report(1, GIB);
    scene.report(2, GIB);
    scene.set(AntiThrash::Auto);
    assert!(scene.view().serialized);
    assert!(scene.is_revoked(1), "the second one goes first");
    scene.release(1);
    scene.request(1);
    assert_eq!(scene.holders(), [2], "they take turns");
    assert_eq!(scene.see(Traffic::default(), SURE), [false], "nobody runs beside another");
    let view = scene.view();
    assert!(view.serialized && !view.thrashes);
    // In short turns, in which they say again how full they keep it.
    let mut together = None;
    for half in 0..2 * APART {
        scene.now += SECOND / 2;
        scene.say(Event::Tick);
        let holders = scene.holders();
        if holders.len() == 2 {
            together = Some(half / 2 + 2 * SURE);
            break;
        }
        let n = holders.first().copied().or_else(|| scene.view().holders.first().map(|h| h.client.0)).unwrap();
        scene.fullness(n, 250);
        scene.release(n);
        scene.request(n);
    }
    let together = together.expect("they run together again");
    assert!((APART - 10..=APART + SURE).contains(&together), "after {together} s");
    assert!(!scene.view().serialized);
}

#[test]
fn who_hears_nothing_more_says_that_it_is_over() {
    let mut scene = Scene::with(AntiThrash::Off, Engine::Managed, &[10 * GIB, 9 * GIB]);
    scene.see(THRASHES, SURE);
    let before = scene.said.len();
    let at = scene.machine.deadline().expect("it wants to look again");
    assert!(at > scene.now && at <= scene.now + 10 * SECOND, "{at:?}");
    scene.now = at;
    scene.say(Event::Tick);
    assert_eq!(scene.thrashing_since(before), [false]);
}

#[test]
fn one_that_is_stopped_and_asked_for_the_gpu_runs_beside_nobody() {
    let mut scene = Scene::with(AntiThrash::Off, Engine::Managed, &[10 * GIB, 9 * GIB]);
    scene.say(Event::Stopped { client: client(2), stopped: true });
    scene.set(AntiThrash::Auto);
    scene.say(Event::Stopped { client: client(2), stopped: true });
    assert!(!scene.is_watched(), "{:?}", scene.view().holders);
}
