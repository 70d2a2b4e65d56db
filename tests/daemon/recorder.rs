//! The flight recorder: a replay of a recording, also from a file, yields exactly the recorded
//! commands.

use std::time::Duration;

use nvshare::recorder::bundle::{self, Circumstances, FORMAT, Header, Process};
use nvshare::recorder::replay::{Difference, replay};
use nvshare::recorder::{Entry, Recorder, Recording};
use nvshare::scheduler::*;
use proptest::prelude::*;
use scheduler_sim::*;
use serde_json::json;

/// Creates random programs on up to three GPUs, with groups, gangs, and stopped and killed clients.
/// The settings change midway.
fn history(seed: u64) -> (Settings, Vec<(Time, Event)>) {
    let mut rng = Dice::new(seed);
    let mode = [AntiThrash::On, AntiThrash::Auto, AntiThrash::Off][rng.below(3) as usize];
    let policy = [PolicyName::Fcfs, PolicyName::Adaptive][rng.below(2) as usize];
    let settings = Settings { policy, ..scheduler_sim::settings(mode, ms(500)) };
    let mut world = World::new(settings.clone(), seed);
    world.thorough = false;
    let gpus = 1 + rng.below(3);
    for n in 0..gpus {
        world.add_gpu(gpu(n), 16 * GIB, 512 * MIB);
    }
    if rng.one_in(2) {
        world.measure();
    }
    if rng.one_in(2) {
        world.set_host((8 + rng.below(64)) * GIB);
    }
    for n in 0..1 + rng.below(10) {
        let start = rng.between(ms(0), ms(2000));
        let share = Share { weight: 1 + rng.below(400) as u16, interactive: rng.one_in(3), ..Share::default() };
        let limits = RuleLimits {
            memory_max: [Amount::Infinity, Amount::Percent(90)][rng.below(2) as usize],
            share: rng.one_in(2).then_some(share),
            on_memory_full: OnMemoryFull::Wait,
            ..RuleLimits::default()
        };
        world.add(Plan {
            gpus: GpuSet::from([gpu(rng.below(gpus)), gpu(rng.below(gpus))]),
            gang: if rng.one_in(3) { 1 + rng.below(2) } else { 0 },
            tenant: TenantId(n % 3),
            group: rng.one_in(3).then_some(Group { id: GroupId(n % 2), limits }),
            own: EnvLimits { weight: rng.one_in(3).then_some(40), ..EnvLimits::default() },
            fullness: [None, Some(1000), Some(100)][rng.below(3) as usize],
            engine: if rng.one_in(4) { Engine::Managed } else { Engine::Swap },
            demand: rng.below(12) * GIB + 4096,
            start,
            phases: 1 + rng.below(4) as u32,
            cpu: rng.between(ms(0), ms(200)),
            gpu: rng.between(ms(1), ms(800)),
            drain: rng.between(ms(0), ms(30)),
            stuck: rng.below(3) as u32,
            stopped: rng.one_in(5).then(|| (start, start + rng.between(ms(1), ms(9000)))),
            killed: rng.one_in(5).then(|| start + rng.between(ms(0), ms(5000))),
            leaves: rng.one_in(2),
            ..Plan::default()
        });
    }
    world.run(Duration::from_secs(5));
    world.feed(Event::Configure(Settings { time_quantum: ms(200), ..settings.clone() }));
    world.run(Duration::from_secs(20));
    (settings, world.history)
}

/// Plays a history on a machine, and records it from event number `from` on.
fn record(settings: Settings, history: &[(Time, Event)], from: usize) -> (Recorder, Vec<Entry>) {
    let mut machine = Machine::new(settings);
    let (before, after) = history.split_at(from);
    for (at, event) in before {
        machine.handle(*at, event.clone());
    }
    let mut recorder = Recorder::new(&machine);
    let entry = |(number, (at, event)): (u64, &(Time, Event))| {
        let commands = handle(&mut recorder, &mut machine, *at, event.clone());
        Entry { number, at: *at, event: event.clone(), commands }
    };
    let entries = (1..).zip(after).map(entry).collect();
    (recorder, entries)
}

/// Passes an event to a machine, and records the event and the commands.
fn handle(recorder: &mut Recorder, machine: &mut Machine, now: Time, event: Event) -> Vec<Command> {
    recorder.begin(machine, now, &event);
    let commands = machine.handle(now, event);
    recorder.finish(&commands);
    commands
}

fn circumstances() -> Circumstances {
    Circumstances {
        header: header(),
        clients: Vec::new(),
        configuration: json!({}),
        status: json!({}),
        nvml: json!({}),
    }
}

fn header() -> Header {
    Header {
        format: FORMAT,
        version: env!("CARGO_PKG_VERSION").into(),
        protocol: (1, 5),
        host: "lab3".into(),
        kernel: "6.1".into(),
        driver: None,
        nvml: None,
        made: u64::MAX,
        now_ns: 0,
        command_lines: false,
    }
}

fn written(recording: &Recording) -> Vec<u8> {
    let mut file = Vec::new();
    bundle::write(&mut file, &circumstances(), recording).expect("a buffer takes it");
    file
}

/// Replays a recording. Returns its entries, and the difference that the replay finds.
fn replayed(recording: &Recording) -> (Vec<Entry>, Option<Difference>) {
    let entries: Vec<Entry> = recording.entries().collect::<Result<_, _>>().expect("they can be decoded");
    let checkpoint = recording.checkpoint().expect("it can be decoded");
    let replay = replay(checkpoint, entries.iter().cloned().map(Ok::<_, ()>)).expect("entries");
    (entries, replay.difference)
}

/// Like [`replayed`], for a recording that was written to a file.
fn replayed_from_file(recording: &Recording) -> (Vec<Entry>, Option<Difference>) {
    let file = written(recording);
    let bundle = bundle::read(&*file).expect("a bundle");
    let entries: Vec<Entry> = bundle.entries.collect::<Result<_, _>>().expect("they can be read");
    let replay = replay(bundle.checkpoint, entries.iter().cloned().map(Ok::<_, ()>)).expect("entries");
    (entries, replay.difference)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_recording_replays_to_the_recorded_commands(seed: u64, from in 0u64..100) {
        let (settings, history) = history(seed);
        let from = history.len() * from as usize / 100;
        let (recorder, entries) = record(settings, &history, from);
        let recording = recorder.recording();
        prop_assert_eq!(replayed(&recording), (entries.clone(), None));
        prop_assert_eq!(replayed_from_file(&recording), (entries, None));
    }
}

/// The record is longer than one of the recorder's spans, and the set of measured clients changes
/// continually.
#[test]
fn a_record_written_at_run_time_has_every_entry() {
    let directory = test_support::Directory::new();
    let path = directory.0.join("record");
    let mut machine = Machine::new(scheduler_sim::settings(AntiThrash::Auto, ms(500)));
    let mut recorder = Recorder::new(&machine);
    let file = std::fs::File::create(&path).expect("a file");
    recorder.write_to(file, &header(), &machine).expect("it can be written");
    let process = Process { client: 1, pid: 77, name: "python3".into(), ..Process::default() };
    recorder.name(|| process.clone());
    let mut entries = Vec::new();
    let measured = (0..6_000).map(|n| {
        let found = (0..5).filter(|c| (n / 7 + c) % 3 != 0).map(|c| (client(c), exactly(n / 100 * 4096))).collect();
        Event::Measured { gpu: gpu(0), begun: ms(n), free: None, evicted: 0, found }
    });
    for (number, event) in (1..).zip([Event::GpuFound { gpu: gpu(0), total: 16 * GIB }].into_iter().chain(measured)) {
        let commands = handle(&mut recorder, &mut machine, ms(number), event.clone());
        entries.push(Entry { number, at: ms(number), event, commands });
    }
    let text = std::fs::read(&path).expect("the record");
    let mut bundle = bundle::read(&*text).expect("a record");
    let read: Vec<Entry> = bundle.entries.by_ref().collect::<Result<_, _>>().expect("they can be read");
    assert!(read == entries, "{} of {}", read.len(), entries.len());
    assert_eq!(bundle.entries.clients, [(1, process)].into());
    let replayed = replay(bundle.checkpoint, read.into_iter().map(Ok::<_, ()>)).expect("entries");
    assert_eq!(replayed.difference, None);
}

/// Returns one event a second for `count` seconds. A GPU and a client come first.
fn ticks(count: u64) -> Vec<(Time, Event)> {
    let first = [
        Event::GpuFound { gpu: gpu(0), total: 16 * GIB },
        Event::Connected { client: client(1), gang: 0, tenant: TenantId(0) },
    ];
    let ticks =
        (0..count).map(|n| Event::GpuOverhead { gpu: gpu(0), begun: ms(n), bytes: n << 20, others: 0, complete: true });
    (0..).map(Duration::from_secs).zip(first.into_iter().chain(ticks)).collect()
}

#[test]
fn the_recorder_keeps_10000_to_15000_entries() {
    let settings = scheduler_sim::settings(AntiThrash::Auto, ms(500));
    for count in [10, 9_998, 14_998, 14_999, 40_000] {
        let (recorder, entries) = record(settings.clone(), &ticks(count), 0);
        let (kept, difference) = replayed(&recorder.recording());
        assert!(kept.len() >= entries.len().min(10_000) && kept.len() <= 15_000, "{} of {}", kept.len(), entries.len());
        assert_eq!((&*kept, difference), (&entries[entries.len() - kept.len()..], None));
    }
}

/// The record of 1,000 clients is bounded, even if all measurements change each time.
#[test]
fn large_entries_are_bounded() {
    let mut machine = Machine::new(scheduler_sim::settings(AntiThrash::Auto, ms(500)));
    let mut recorder = Recorder::new(&machine);
    handle(&mut recorder, &mut machine, ms(0), Event::GpuFound { gpu: gpu(0), total: 16 * GIB });
    for n in 0..1_000 {
        let found = (0..1000).map(|c| (client(c), exactly(n * 4096 + c))).collect();
        handle(
            &mut recorder,
            &mut machine,
            ms(n),
            Event::Measured { gpu: gpu(0), begun: ms(n), free: None, evicted: 0, found },
        );
    }
    assert!(recorder.bytes() <= 16 << 20, "{}", recorder.bytes());
    let recording = recorder.recording();
    let (entries, difference) = replayed(&recording);
    assert!(entries.len() > 500, "{}", entries.len());
    assert_eq!((entries.last().map(|entry| entry.number), &difference), (Some(1_001), &None));
    assert_eq!(replayed_from_file(&recording), (entries, None));
}

#[test]
fn a_replay_reports_different_commands() {
    let (settings, history) = history(7);
    let (recorder, _) = record(settings, &history, 0);
    let recording = recorder.recording();
    let (mut entries, _) = replayed(&recording);
    let at = entries.iter().position(|entry| entry.commands.len() > 1).expect("some");
    let command = entries[at].commands.pop();
    let number = entries[at].number;
    let checkpoint = recording.checkpoint().expect("it can be decoded");
    let replay = replay(checkpoint, entries.into_iter().map(Ok::<_, ()>)).expect("entries");
    let difference = replay.difference.expect("a difference");
    assert_eq!((difference.at, difference.number), (at, number));
    assert_eq!((difference.recorded, difference.replayed), (None, command));
}

#[test]
fn an_unreadable_bundle_is_rejected_with_line_and_reason() {
    let settings = scheduler_sim::settings(AntiThrash::Auto, ms(500));
    let (recorder, _) = record(settings, &ticks(5), 0);
    let text = String::from_utf8(written(&recorder.recording())).expect("UTF-8");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 5 + 7 + 1);
    let message = |lines: &[&str]| {
        let text = lines.join("\n");
        let wrong = match bundle::read(text.as_bytes()) {
            Ok(bundle) => bundle.entries.collect::<Result<Vec<_>, _>>().expect_err("wrong"),
            Err(wrong) => wrong,
        };
        wrong.to_string()
    };
    let but = |at: usize, line: &str| {
        let mut all = lines.clone();
        all[at] = line;
        message(&all)
    };
    assert_eq!(
        message(&[]),
        "line 1: this file is neither a debug bundle of `nvsharectl debug` nor a record of `nvshare-scheduler --record`"
    );
    assert!(but(0, "[[gpu]]").starts_with("line 1: this file is neither a debug bundle"));
    assert!(message(&lines[..9]).starts_with("line 10: the file is truncated"), "{}", message(&lines[..9]));
    let later = lines[0].replace("\"format\":1", "\"format\":2");
    assert!(but(0, &later).starts_with("line 1: this bundle has format 2, but this nvsharectl reads format 1"));
    assert!(but(8, "{\"kind\":").starts_with("line 9: this line is not an object with a kind: EOF"));
    let without = lines[8].replace("\"at-ns\"", "\"at\"");
    assert!(but(8, &without).starts_with("line 9: missing field `at-ns`, at column "), "{}", but(8, &without));
    assert!(
        but(8, lines[7]).starts_with("line 9: entry 3 follows entry 3: entries are missing"),
        "{}",
        but(8, lines[7])
    );
    let other = lines[0].replace(env!("CARGO_PKG_VERSION"), "9.9");
    let mut all = lines.clone();
    (all[0], all[4]) = (&other, "{\"kind\":\"checkpoint\"}");
    assert!(message(&all).contains("the bundle is from version 9.9"), "{}", message(&all));
}
