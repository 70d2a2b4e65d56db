//! When programs are said to push each other's memory off a GPU: made-up samples, and the traces of `tests/traces`.

use nvshare_sched::Traffic;
use nvshare_sched::thrash::{Change, Detector, Sample};
use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

const GIB: u64 = 1 << 30;
const LINK: u64 = 44 * GIB;
const FAULTS: u64 = 20_000;

fn at(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// Two programs that do not fit, with so many GiB a second both ways and so many faults.
fn sample(seconds: f64, to_gpu: f64, from_gpu: f64, faults: Option<u64>) -> Sample {
    let bytes = |gib: f64| Some((gib * GIB as f64) as u64);
    let traffic = Traffic { to_gpu: bytes(to_gpu), from_gpu: bytes(from_gpu), faults };
    Sample {
        at: at(seconds),
        traffic,
        demand: 200 * GIB,
        capacity: 138 * GIB,
        link: LINK,
        is_ordered: false,
        can_be_ended: true,
    }
}

/// When each sample changed something, in whole seconds.
fn changes(samples: impl IntoIterator<Item = Sample>) -> Vec<(u64, Change)> {
    let mut detector = Detector::default();
    let change = |sample: Sample| Some((sample.at.as_secs(), detector.sample(&sample)?));
    samples.into_iter().filter_map(change).collect()
}

/// A sample a second of what that gives for it.
fn each_second(seconds: u64, of: impl Fn(u64) -> Sample) -> Vec<(u64, Change)> {
    changes((0..seconds).map(of))
}

#[test]
fn thrashing_is_found_in_a_few_seconds_and_its_end_too() {
    for faults in [None, Some(FAULTS)] {
        let found = each_second(60, |s| match s {
            10..30 => sample(s as f64, 6.0, 5.0, faults),
            _ => sample(s as f64, 0.2, 0.0, faults.map(|_| 5)),
        });
        assert_eq!(found, [(13, Change::Begins), (33, Change::Ends)]);
    }
}

#[test]
fn a_burst_of_two_seconds_is_nothing_however_often() {
    let found = each_second(3600, |s| match s % 10 {
        0 | 1 => sample(s as f64, 20.0, 20.0, Some(FAULTS)),
        _ => sample(s as f64, 0.1, 0.1, Some(3)),
    });
    assert_eq!(found, []);
}

#[test]
fn half_of_the_time_is_not_enough_and_most_of_it_is() {
    let busy = |s: u64, is_busy: bool| match is_busy {
        true => sample(s as f64, 6.0, 6.0, None),
        false => sample(s as f64, 0.0, 0.0, None),
    };
    assert_eq!(each_second(3600, |s| busy(s, s % 2 == 0)), []);
    let found = each_second(3600, |s| busy(s, s % 4 != 0));
    assert_eq!(found.len(), 1, "it begins, and does not end: {found:?}");
}

#[test]
fn directions_that_take_turns_are_nothing() {
    let found = each_second(600, |s| match s % 2 {
        0 => sample(s as f64, 20.0, 0.1, None),
        _ => sample(s as f64, 0.1, 20.0, None),
    });
    assert_eq!(found, []);
}

#[test]
fn copies_one_way_are_nothing_though_they_show_up_in_both() {
    // At 40 GiB/s, a twentieth is as much as thrashing slowly would be.
    assert_eq!(each_second(600, |s| sample(s as f64, 40.0, 2.2, None)), []);
    assert_eq!(each_second(600, |s| sample(s as f64, 2.2, 40.0, None)), []);
}

#[test]
fn without_more_demand_than_there_is_room_nothing_thrashes() {
    for demand in [0, 100 * GIB, 138 * GIB] {
        let found = each_second(600, |s| Sample { demand, ..sample(s as f64, 20.0, 20.0, Some(FAULTS)) });
        assert_eq!(found, []);
    }
}

#[test]
fn copies_that_programs_make_themselves_are_told_by_faults() {
    assert_eq!(each_second(600, |s| sample(s as f64, 5.0, 5.0, Some(2))), [], "nothing faults");
    let faults_only = each_second(600, |s| sample(s as f64, 5.0, 0.0, Some(FAULTS)));
    assert_eq!(faults_only, [], "what is touched for the first time pushes nothing out");
}

#[test]
fn with_faults_less_traffic_is_enough() {
    assert_eq!(each_second(600, |s| sample(s as f64, 1.0, 0.8, None)), []);
    assert_eq!(each_second(600, |s| sample(s as f64, 1.0, 0.8, Some(FAULTS))), [(4, Change::Begins)]);
}

#[test]
fn what_is_missing_is_done_without_and_where_all_is_nothing_is_claimed() {
    let with = |s: u64, traffic: Traffic| Sample { traffic, ..sample(s as f64, 0.0, 0.0, None) };
    let faults = Traffic { faults: Some(FAULTS), ..Traffic::default() };
    assert_eq!(each_second(600, |s| with(s, faults)), [(4, Change::Begins)]);
    for traffic in [Traffic::default(), Traffic { to_gpu: Some(20 * GIB), ..Traffic::default() }] {
        assert_eq!(each_second(600, |s| with(s, traffic)), []);
    }
}

#[test]
fn who_learns_nothing_more_claims_nothing_more() {
    let found = each_second(60, |s| match s {
        0..20 => sample(s as f64, 6.0, 6.0, None),
        _ => Sample { traffic: Traffic::default(), ..sample(s as f64, 0.0, 0.0, None) },
    });
    assert_eq!(found, [(4, Change::Begins), (29, Change::Ends)]);
    let mut detector = Detector::default();
    for s in 0..10 {
        detector.sample(&sample(f64::from(s), 6.0, 6.0, None));
    }
    assert_eq!(detector.deadline(at(9.5)), Some(at(19.0)), "and so where samples stop");
    assert_eq!(detector.look(at(18.9)), None);
    assert_eq!(detector.look(at(19.0)), Some(Change::Ends));
    assert!(detector.keeps_apart(at(19.0)));
}

#[test]
fn when_nobody_looked_there_was_nothing_to_see() {
    let found = changes((0..100).map(|n| sample(f64::from(n) * 5.0, 6.0, 6.0, None)));
    assert_eq!(found, [], "each stands for itself");
    // For two seconds they are together, and then there is nothing to watch for a while.
    let found = changes((0..100).map(|n| sample(f64::from(n / 3) * 9.0 + f64::from(n % 3), 6.0, 6.0, None)));
    assert_eq!(found, []);
}

#[test]
fn samples_that_come_late_or_twice_do_no_harm() {
    let times = [5.0, 5.0, 3.0, 4.0, 6.0, 6.0, 7.0];
    assert_eq!(changes(times.map(|s| sample(s, 6.0, 6.0, None))), [], "two seconds in all");
}

#[test]
fn what_the_scheduler_moves_itself_is_nothing_as_long_as_it_can_take() {
    let ordered = |s: u64| Sample { is_ordered: true, ..sample(s as f64, 40.0, 40.0, None) };
    // Exchanges one after the other, with a moment in between.
    let found = each_second(600, |s| match s % 5 {
        4 => sample(s as f64, 1.0, 0.1, None),
        _ => ordered(s),
    });
    assert_eq!(found, []);
    // Four times 138 GiB at 44 GiB/s is 12 s: who never answers hides nothing for ever.
    let found = each_second(60, ordered);
    assert_eq!(found.len(), 1);
    assert!((12..20).contains(&found[0].0), "{found:?}");
}

#[test]
fn what_began_goes_on_at_less_than_what_begins_it() {
    let level = |s: u64, most: u64| match s {
        0..10 => sample(s as f64, 6.0, 6.0, None),
        s if s < most => sample(s as f64, 0.9, 0.7, None),
        _ => sample(s as f64, 0.2, 0.1, None),
    };
    assert_eq!(each_second(700, |s| level(s, 600)), [(4, Change::Begins), (603, Change::Ends)]);
    assert_eq!(each_second(600, |s| sample(s as f64, 0.9, 0.7, None)), []);
}

/// Programs that thrash whenever they run together, and are kept apart as long as the detector says.
fn an_hour_in_turns(thrash: impl Fn(u64) -> bool) -> Vec<u64> {
    let mut detector = Detector::default();
    let mut began = Vec::new();
    for s in 0..3600 {
        let apart = detector.keeps_apart(at(s as f64));
        let is_busy = !apart && thrash(s);
        let mut sample = if is_busy { sample(s as f64, 6.0, 6.0, None) } else { sample(s as f64, 0.0, 0.0, None) };
        sample.demand = if apart { 0 } else { sample.demand };
        if detector.sample(&sample) == Some(Change::Begins) {
            began.push(s);
        }
    }
    began
}

#[test]
fn it_does_not_flap_for_an_hour() {
    let began = an_hour_in_turns(|_| true);
    assert!((4..=6).contains(&began.len()), "{began:?}");
    let pauses: Vec<u64> = began.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(pauses.windows(2).all(|pair| pair[1] >= pair[0] * 2 - 10), "each is twice the one before: {pauses:?}");
    assert!((60..70).contains(&pauses[0]), "{pauses:?}");
}

#[test]
fn programs_that_did_well_together_for_long_are_kept_apart_for_a_minute_again() {
    let began = an_hour_in_turns(|s| !(100..=2000).contains(&s));
    let late = began.iter().position(|s| *s > 2000).expect("it begins again");
    assert!((60..70).contains(&(began[late + 1] - began[late])), "{began:?}");
}

#[test]
fn where_nobody_is_kept_apart_the_while_does_not_grow() {
    let mut detector = Detector::default();
    for s in 0..3600 {
        let busy = if s % 20 < 10 { 6.0 } else { 0.0 };
        detector.sample(&Sample { can_be_ended: false, ..sample(f64::from(s), busy, busy, None) });
    }
    assert!(!detector.keeps_apart(at(3600.0 + 60.0)), "it began and ended 180 times");
}

#[test]
fn nobody_is_kept_apart_for_more_than_an_hour() {
    let mut detector = Detector::default();
    let mut second = 0;
    for _ in 0..20 {
        while !detector.thrashes() {
            detector.sample(&sample(f64::from(second), 6.0, 6.0, None));
            second += 1;
        }
        let began = second;
        while detector.keeps_apart(at(f64::from(second))) {
            detector.sample(&Sample { demand: 0, ..sample(f64::from(second), 0.0, 0.0, None) });
            second += 1;
        }
        assert!(second - began <= 3600, "{}", second - began);
    }
    assert!(second > 10 * 3600);
}

// ---- traces ----------------------------------------------------------------------------------------------------------

#[derive(Debug, Default)]
struct Trace {
    samples: Vec<Sample>,
    begins: Option<RangeInclusive<u64>>,
    ends: Option<RangeInclusive<u64>>,
    never: bool,
}

fn seconds(text: &str) -> RangeInclusive<u64> {
    let (from, to) = text.split_once("..").expect("FROM..TO");
    from.trim().parse().expect("seconds")..=to.trim().parse().expect("seconds")
}

/// Reads a file as `tests/traces/README.md` describes it.
fn read(path: &Path) -> Trace {
    let text = std::fs::read_to_string(path).expect("a trace");
    let mut trace = Trace::default();
    let mut link = None;
    for remark in text.lines().filter_map(|line| line.strip_prefix("# ")) {
        match remark.split_once(' ').unwrap_or((remark, "")) {
            ("link", rate) => link = rate.parse().ok(),
            ("begins", when) => trace.begins = Some(seconds(when)),
            ("ends", when) => trace.ends = Some(seconds(when)),
            ("never", _) => trace.never = true,
            _ => {}
        }
    }
    let link = link.expect("a line `# link BYTES`");
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<&str> = lines.next().expect("names of columns").split(',').collect();
    for line in lines {
        let values: HashMap<&str, &str> = names.iter().copied().zip(line.split(',').map(str::trim)).collect();
        let number = |name| values.get(name).filter(|value| !value.is_empty()).map(|v| v.parse().expect("a number"));
        let traffic = Traffic { to_gpu: number("to_gpu"), from_gpu: number("from_gpu"), faults: number("faults") };
        trace.samples.push(Sample {
            at: at(values["seconds"].parse().expect("seconds")),
            traffic,
            demand: number("demand").expect("a demand"),
            capacity: number("capacity").expect("a capacity"),
            link,
            is_ordered: number("ordered") == Some(1),
            can_be_ended: false,
        });
    }
    trace
}

#[test]
fn every_trace_is_what_it_says() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/traces");
    let files = std::fs::read_dir(directory).expect("the traces").map(|file| file.expect("a file").path());
    let files: Vec<_> = files.filter(|path| path.extension().is_some_and(|e| e == "csv")).collect();
    assert!(files.len() > 2, "{files:?}");
    for path in files {
        let trace = read(&path);
        assert!(trace.never != trace.begins.is_some(), "{}: either never or begins", path.display());
        let less = |keep: fn(Traffic) -> Traffic| {
            changes(trace.samples.iter().map(|sample| Sample { traffic: keep(sample.traffic), ..*sample }))
        };
        // Whatever of it is missing.
        for found in
            [less(|all| all), less(|all| Traffic { faults: None, ..all }), less(|all| Traffic { to_gpu: None, ..all })]
        {
            let when = |change| found.iter().find(|(_, what)| *what == change).map(|(when, _)| *when);
            let name = path.display();
            if trace.never {
                assert_eq!(found, [], "{name}");
            }
            for (range, change) in [(&trace.begins, Change::Begins), (&trace.ends, Change::Ends)] {
                let Some(range) = range else { continue };
                assert!(when(change).is_some_and(|when| range.contains(&when)), "{name}: {found:?}, not {range:?}");
            }
            assert!(found.len() <= 2, "{name}: it flaps: {found:?}");
        }
        assert_eq!(less(|_| Traffic::default()), [], "{}", path.display());
    }
}
