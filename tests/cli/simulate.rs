//! `nvsharectl simulate`: small scenarios whose figures were computed by hand, errors in files, and
//! the examples.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use nvshare::config::rules::LIMIT_KEYS;
use nvshare::simulate::policies::{POLICIES, Policy};
use nvshare::simulate::report::{Figures, Report};
use nvshare::simulate::scenario::Scenario;
use nvshare::simulate::{draw, run};
use nvshare::timeline::{Activity, Span};

const GIB: u64 = 1 << 30;

/// Returns a scenario with these jobs. It has one GPU of 16 GiB without a reserve, and a slow link.
fn one_gpu(jobs: &str) -> String {
    format!("[memory]\nreserve = 0\ncontext = 0\n[[gpu]]\nmemory = \"16G\"\nlink = \"8G\"\n{jobs}")
}

fn job(name: &str, keys: &str) -> String {
    format!("[[job]]\nname = \"{name}\"\n{keys}\n")
}

fn report(text: &str) -> Report {
    let scenario = Scenario::parse(text, Path::new("x.toml")).unwrap_or_else(|e| panic!("{e}\n{text}"));
    run(&scenario, &POLICIES)
}

fn of<'a>(report: &'a Report, policy: &str) -> &'a Figures {
    report.policies.iter().find(|figures| figures.policy == policy).unwrap_or_else(|| panic!("no {policy}"))
}

#[track_caller]
fn near(found: Duration, expected: f64, off: f64) {
    let found = found.as_secs_f64();
    assert!((found - expected).abs() <= off, "{found} s, and not {expected} s");
}

fn last(figures: &Figures) -> Duration {
    figures.last.expect("somebody has ended")
}

#[test]
fn a_single_program_takes_its_work_plus_its_pauses() {
    let text = one_gpu(&job("a", "memory = \"8G\"\nwork = \"10s\"\ngpu-time = \"300ms\"\ncpu-time = \"100ms\""));
    let report = report(&text);
    assert_eq!(report.jobs[0].alone, Duration::from_millis(13_400), "34 pauses");
    for figures in &report.policies {
        near(last(figures), 13.4, 0.001);
        assert_eq!((figures.done, figures.hand_overs, figures.swapped_out), (1, 0, 0), "{}", figures.policy);
        assert_eq!(figures.fairness, None, "there is nobody to be fair to");
        let slowdown = figures.jobs[0].slowdown.expect("it has ended");
        assert!((0.999..1.001).contains(&slowdown), "{slowdown}");
        assert!((figures.busy - 10.0 / 13.4).abs() < 0.001, "{}", figures.busy);
    }
}

#[test]
fn two_programs_that_fit_use_each_others_pauses() {
    let half = "memory = \"8G\"\nwork = \"10s\"\ngpu-time = \"100ms\"\ncpu-time = \"100ms\"";
    let report = report(&one_gpu(&(job("a", half) + &job("b", half))));
    // The two programs have 100 phases each. The 200 phases take 100 ms of GPU time and 1 ms of
    // grace each, and the first phase begins after a pause of 100 ms. The sum is 20.3 s.
    for policy in ["fcfs-on", "fcfs-auto"] {
        let figures = of(&report, policy);
        near(last(figures), 20.3, 0.1);
        assert!((199..=201).contains(&figures.hand_overs), "{}", figures.hand_overs);
        assert_eq!((figures.swapped_out, figures.swapped_in), (0, 0));
        assert!(figures.fairness.is_some_and(|fairness| fairness > 0.999));
    }
    // Both programs work at the same time at half the speed, and pause at the same time.
    let off = of(&report, "fcfs-off");
    near(last(off), 30.0, 0.01);
    assert!((off.busy - 2.0 / 3.0).abs() < 0.01 && off.wait_worst < Duration::from_millis(1));
    // The programs run one after the other.
    let serial = of(&report, "serial");
    near(last(serial), 40.0, 0.0);
    near(serial.wait_worst, 20.0, 0.0);
}

#[test]
fn two_programs_that_do_not_fit_swap_the_excess_at_each_turn() {
    let keys = "memory = \"9G\"\nwork = \"39s\"";
    let text = format!("time-quantum = \"10s\"\nmax-wait = 0\n{}", one_gpu(&(job("a", keys) + &job("b", keys))));
    let report = report(&text);
    // In the mode auto, the length of turns depends on the moved memory.
    for figures in ["fcfs-on", "fcfs-off"].map(|policy| of(&report, policy)) {
        // Turns last 10 s, in the order `a`, `b`, `a`, `b`, `a`, `b`, `a`, `b`. 2 of the 18 GiB do
        // not fit. These 2 GiB are evicted at each of the first six changes. They are restored at
        // all changes except the first, because `b` then allocates new memory.
        assert_eq!((figures.hand_overs, figures.swapped_out, figures.swapped_in), (7, 12 * GIB, 12 * GIB));
        // Evicting 2 GiB at 8 GiB/s takes 0.25 s. The last chunk is then copied in, in 0.03 s. At
        // the last change, `a` has ended, so memory is only copied in.
        near(last(figures), 78.0 + 0.25 + 5.0 * 0.28 + 0.25, 0.02);
        near(figures.wait_worst, 10.5, 0.1);
    }
}

#[test]
fn a_timeline_has_each_turn_and_each_move() {
    let keys = "memory = \"9G\"\nwork = \"39s\"";
    let text = format!("time-quantum = \"10s\"\nmax-wait = 0\n{}", one_gpu(&(job("a", keys) + &job("b", keys))));
    let scenario = Scenario::parse(&text, Path::new("x.toml")).unwrap_or_else(|e| panic!("{e}"));
    let timeline = draw(&scenario, &Policy::by_name("fcfs-on").expect("a policy"));
    let (begin, end) = timeline.span.expect("it has begun");
    assert_eq!(begin, Duration::ZERO);
    near(end, 78.0 + 0.25 + 5.0 * 0.28 + 0.25, 0.02);
    let [lanes] = timeline.lanes.values().collect::<Vec<_>>()[..] else { panic!("{timeline:?}") };
    let names: Vec<&str> = lanes.values().map(|lane| lane.label.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    let of = |activity| {
        let spans = lanes.values().flat_map(|lane| &lane.spans);
        let mut spans: Vec<Span> = spans.filter(|span| span.activity == activity).copied().collect();
        spans.sort_by_key(|span| span.from);
        spans
    };
    let holds = of(Activity::Holds);
    assert_eq!(holds.len(), 8);
    assert!(holds.windows(2).all(|pair| pair[0].to <= pair[1].from), "{holds:?}");
    let worked: Duration = holds.iter().map(|span| span.to - span.from).sum();
    near(worked, 78.25, 0.3); // each program starts while the last of its memory is restored
    for activity in [Activity::Leaves, Activity::Returns] {
        let moves = of(activity);
        assert_eq!(moves.iter().map(|span| span.bytes).sum::<u64>(), 12 * GIB);
        assert!(moves.iter().all(|span| span.bytes == 2 * GIB), "{moves:?}");
        near(moves.iter().map(|span| span.to - span.from).sum(), 6.0 * 0.25, 0.2);
    }
    let waits = of(Activity::Waits);
    assert!(waits.iter().all(|wait| holds.iter().any(|hold| hold.from == wait.to)), "{waits:?}");
}

#[test]
fn queued_work_continues_after_a_revoke() {
    let keys = "memory = \"8G\"\nwork = \"20s\"";
    let jobs = job("a", &format!("{keys}\ndrain = \"500ms\"")) + &job("b", keys);
    let text = format!("anti-thrash = \"on\"\ntime-quantum = \"5s\"\n{}", one_gpu(&jobs));
    let report = report(&text);
    let figures = of(&report, "fcfs-on");
    // Turns alternate between 5.5 s and 5 s. `a` gets 16.5 s in three turns, and its last 3.5 s
    // after the third turn of `b`.
    near(last(figures), 40.0, 0.01);
    near(figures.jobs[0].completion.expect("a has ended"), 35.0, 0.01);
    assert_eq!((figures.hand_overs, figures.busy > 0.999), (7, true));
}

#[test]
fn programs_with_low_utilization_run_concurrently_in_auto() {
    let light = "memory = \"4G\"\nwork = \"5s\"\ngpu-time = \"100us\"\ncpu-time = \"300us\"";
    let report = report(&one_gpu(&(job("a", light) + &job("b", light))));
    assert_eq!(report.jobs[0].alone, Duration::from_secs(20));
    near(last(of(&report, "fcfs-on")), 40.0, 0.01);
    near(last(of(&report, "fcfs-off")), 20.0, 0.01);
    // Each program sometimes holds the GPU alone, and then reports its utilization.
    near(last(of(&report, "fcfs-auto")), 20.5, 0.5);
}

#[test]
fn shares_match_the_rules() {
    let report = report(&example("shares.toml"));
    let part = |policy: &str| of(&report, policy).jobs[0].had.as_secs_f64() / 100.0;
    for policy in ["rules-on", "rules-auto"] {
        assert!((part(policy) - 0.3).abs() < 0.02, "{policy}: {}", part(policy));
        // The programs get 0.3 and 0.7 of the GPU time that each could use alone. Jain's index of
        // these values is (0.3 + 0.7)² / (2 × (0.3² + 0.7²)) = 1 / (2 × 0.58).
        assert!(of(&report, policy).fairness.is_some_and(|fairness| (fairness - 0.862).abs() < 0.01));
    }
    for policy in ["fcfs-on", "fcfs-auto"] {
        assert!((part(policy) - 0.5).abs() < 0.05, "{policy}: {}", part(policy));
    }
    let weighed = "until = \"400s\"\ntime-quantum = \"5s\"\n".to_owned()
        + &one_gpu(
            &(job("a", "memory = \"1G\"\nwork = \"1h\"\nrule = { weight = 100 }")
                + &job("b", "memory = \"1G\"\nwork = \"1h\"\nrule = { weight = 300 }")),
        );
    let report = self::report(&weighed);
    let part = of(&report, "rules-auto").jobs[0].had.as_secs_f64() / 400.0;
    assert!((part - 0.25).abs() < 0.02, "{part}");
}

#[test]
fn a_small_memory_max_fails_the_excess_programs() {
    let keys = "count = 3\nmemory = \"4G\"\nwork = \"5s\"\nrule = { memory-max = \"8G\" }";
    let report = report(&one_gpu(&job("a", keys)));
    let (without, with) = (of(&report, "fcfs-on"), of(&report, "rules-on"));
    assert_eq!((without.done, without.failed), (3, 0));
    assert_eq!((with.done, with.failed, with.unfinished), (2, 1, 0));
    near(last(with), 10.0, 0.01);
}

#[test]
fn a_program_without_room_for_its_memory_fails() {
    let keys = "every = \"1s\"\ncount = 3\nmemory = \"10G\"\nwork = \"5s\"";
    let with = |swap: &str| report(&(format!("[swap]\nmax = \"{swap}\"\n") + &one_gpu(&job("a", keys))));
    for (swap, failed) in [("none", 0), ("14G", 0), ("13G", 1), ("3G", 2)] {
        let report = with(swap);
        assert_eq!(of(&report, "fcfs-auto").failed, failed, "{swap}");
    }
    let report = report(&one_gpu(&job("a", "memory = \"17G\"\nwork = \"5s\"")));
    assert!(report.policies.iter().all(|figures| (figures.done, figures.failed) == (0, 1)));
}

#[test]
fn a_program_on_two_gpus_holds_both_together() {
    let text = "anti-thrash = \"on\"\ntime-quantum = \"5s\"\n[[gpu]]\ncount = 2\nmemory = \"16G\"\n".to_owned()
        + &job("single", "memory = \"2G\"\nwork = \"10s\"\non = [1]")
        + &job("both", "memory = \"2G\"\nwork = \"10s\"\ngpus = 2");
    let figures = &report(&text).policies[0];
    // Turns of 5 s alternate between the single program and the pair.
    near(figures.jobs[0].completion.expect("it has ended"), 15.0, 0.01);
    near(figures.jobs[1].completion.expect("they have ended"), 20.0, 0.01);
    assert!((figures.busy - 30.0 / 40.0).abs() < 0.001, "{}", figures.busy);
}

#[test]
fn serial_is_the_baseline_of_the_comparison() {
    let keys = "count = 3\nevery = \"4s\"\nmemory = \"8G\"\nwork = \"10s\"";
    let report = report(&one_gpu(&job("a", keys)));
    let serial = of(&report, "serial");
    // The jobs end after 10, 20 and 30 s.
    let spread = serial.completion.expect("all have ended");
    near(spread.mean, (10.0 + 16.0 + 22.0) / 3.0, 1e-6);
    near(spread.median, 16.0, 0.0);
    near(spread.worst, 22.0, 0.0);
    near(serial.wait_mean, (0.0 + 6.0 + 12.0) / 3.0, 1e-6);
    assert_eq!((serial.hand_overs, serial.busy, serial.events), (2, 1.0, 0));
}

#[test]
fn unfinished_programs_are_counted() {
    let text = "until = \"8s\"\n".to_owned() + &one_gpu(&job("a", "count = 2\nmemory = \"1G\"\nwork = \"6s\""));
    for figures in &report(&text).policies {
        let expected = if figures.policy == "serial" { (1, 1) } else { (figures.done, 2 - figures.done) };
        assert_eq!((figures.done, figures.unfinished), expected, "{}", figures.policy);
        assert!((figures.busy - 1.0).abs() < 0.001, "{}: {}", figures.policy, figures.busy);
    }
}

#[test]
fn simulations_are_deterministic() {
    let small = example("mix.toml").replace("count = 200", "count = 40").replace("min\"", "s\"");
    let first = report(&small);
    assert_eq!(first, report(&small));
    assert!(first.policies.iter().all(|figures| figures.done == 65), "{first:?}");
    let other = report(&small.replace("seed = 7", "seed = 8"));
    assert_ne!(first, other);
}

fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scenarios")
}

fn example(name: &str) -> String {
    std::fs::read_to_string(scenarios().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

#[test]
fn the_example_scenarios_are_valid() {
    let sizes = [
        ("consumer-card-three.toml", 3, 1),
        ("consumer-card-two.toml", 2, 1),
        ("equals.toml", 6, 1),
        ("heavy-tailed.toml", 203, 2),
        ("hundred-on-one.toml", 100, 1),
        ("language-model-servers.toml", 2, 1),
        ("mix.toml", 225, 8),
        ("notebooks-and-trainings.toml", 70, 1),
        ("shares.toml", 2, 1),
        ("ten-thousand.toml", 10_000, 1000),
        ("three-groups.toml", 14, 1),
    ];
    let mut found: Vec<_> =
        std::fs::read_dir(scenarios()).expect("the directory").map(|e| e.expect("e").path()).collect();
    found.sort();
    assert_eq!(found, sizes.map(|(name, ..)| scenarios().join(name)));
    for (name, programs, gpus) in sizes {
        let scenario = Scenario::load(&scenarios().join(name)).unwrap_or_else(|e| panic!("{e}"));
        let count: u32 = scenario.jobs.iter().map(|job| job.count).sum();
        assert_eq!((count, scenario.gpus.len()), (programs, gpus), "{name}");
    }
}

/// Asserts that the adaptive policy shortens the mean completion time.
#[track_caller]
fn check_that_adaptive_shortens_mean_completion_time(name: &str) {
    let compared: Vec<Policy> =
        ["fcfs-auto", "rules-auto", "adaptive-auto"].into_iter().filter_map(Policy::by_name).collect();
    let scenario = Scenario::parse(&example(name), Path::new(name)).unwrap_or_else(|e| panic!("{e}"));
    let report = run(&scenario, &compared);
    let mean = |policy: &str| of(&report, policy).completion.expect("all have ended").mean;
    let adaptive = of(&report, "adaptive-auto");
    assert_eq!(adaptive.done, report.programs);
    for other in ["fcfs-auto", "rules-auto"] {
        let (mean, other) = (mean("adaptive-auto"), mean(other));
        assert!(mean < other.mul_f64(0.95), "{mean:?}, {other:?}");
    }
    assert!(adaptive.swapped_out < of(&report, "fcfs-auto").swapped_out / 4 * 3);
    // The bound is twice max-wait, plus the turns of programs that had waited equally long.
    assert!(adaptive.wait_worst < Duration::from_secs(2 * 60 + 20), "{:?}", adaptive.wait_worst);
}

#[test]
fn adaptive_policy_shortens_mean_completion_time_with_notebooks() {
    check_that_adaptive_shortens_mean_completion_time("notebooks-and-trainings.toml");
}

#[test]
fn adaptive_policy_shortens_mean_completion_time_of_three_groups() {
    check_that_adaptive_shortens_mean_completion_time("three-groups.toml");
}

#[test]
fn adaptive_policy_shortens_mean_completion_time_of_equal_jobs() {
    check_that_adaptive_shortens_mean_completion_time("equals.toml");
}

#[test]
fn adaptive_policy_shortens_mean_completion_time_of_heavy_tailed_jobs() {
    check_that_adaptive_shortens_mean_completion_time("heavy-tailed.toml");
}

#[test]
fn two_saturated_servers_have_low_latency_and_high_throughput() {
    let name = "language-model-servers.toml";
    let scenario = Scenario::parse(&example(name), Path::new(name)).unwrap_or_else(|e| panic!("{e}"));
    let default: Vec<Policy> = Policy::by_name("fcfs-auto").into_iter().collect();
    let report = run(&scenario, &default);
    let figures = of(&report, "fcfs-auto");
    // An answer takes 0.6 s and is interrupted at most once. One server alone keeps the GPU busy
    // for 0.6 s of every 0.605 s.
    assert!(figures.wait_worst < Duration::from_millis(7400), "{:?}", figures.wait_worst);
    assert!(figures.busy > 0.85 * 0.6 / 0.605, "{}", figures.busy);
}

/// On a card with a slow link, moving memory leaves the GPU idle for at most a tenth of the time.
/// The moves also use at most a tenth of the link's time.
#[test]
fn a_consumer_card_is_busy_for_90_percent_of_the_time() {
    const LINK_TOTAL: f64 = 35.0 * GIB as f64;
    for name in ["consumer-card-two.toml", "consumer-card-three.toml"] {
        let scenario = Scenario::parse(&example(name), Path::new(name)).unwrap_or_else(|e| panic!("{e}"));
        let default: Vec<Policy> = Policy::by_name("fcfs-auto").into_iter().collect();
        let report = run(&scenario, &default);
        let figures = of(&report, "fcfs-auto");
        let moving = (figures.swapped_out + figures.swapped_in) as f64 / LINK_TOTAL / scenario.until.as_secs_f64();
        println!(
            "{name}: idle {:.4}, moving {moving:.4}, {} hand-overs, longest wait {:?}, {:?}",
            1.0 - figures.busy,
            figures.hand_overs,
            figures.wait_worst,
            figures.fairness
        );
        assert!(figures.hand_overs > 40 && moving > 0.01, "{name}: {} hand-overs", figures.hand_overs);
        assert!(figures.busy >= 0.9 && moving <= 0.1, "{name}: {} of the time busy, {moving} moving", figures.busy);
        assert!(figures.fairness.is_some_and(|fairness| fairness > 0.99), "{name}: {:?}", figures.fairness);
        // A program waits at most for one turn of each other program, each as long as the time
        // quantum.
        let others = scenario.jobs[0].count - 1;
        assert!(figures.wait_worst < scenario.settings.time_quantum * others, "{name}: {:?}", figures.wait_worst);
    }
}

#[test]
fn ten_thousand_programs_share_a_thousand_gpus() {
    let text = example("ten-thousand.toml").replace("6min", "2s");
    let scenario = Scenario::parse(&text, Path::new("x")).unwrap_or_else(|e| panic!("{e}"));
    let auto: Vec<Policy> = Policy::by_name("fcfs-auto").into_iter().collect();
    let report = run(&scenario, &auto);
    let figures = of(&report, "fcfs-auto");
    assert_eq!((figures.done, figures.swapped_out), (10_000, 0));
    near(last(figures), 21.0, 1.0);
    assert!(figures.busy > 0.9 && figures.fairness.is_some_and(|fairness| fairness > 0.99));
}

#[test]
fn errors_name_the_line_and_the_allowed_values() {
    const GPU: &str = "[[gpu]]\nmemory = 1\n";
    const JOB: &str = "[[job]]\nname = \"a\"\nmemory = 1\nwork = 1\n";
    let both = |more: &str| format!("{GPU}{JOB}{more}");
    let sets_nothing = format!("7:8: the rule sets nothing: it needs at least one of {}", LIMIT_KEYS.join(", "));
    let cases = [
        (
            String::new(),
            "1:1: GPUs cannot be 0: 1 to 10000 are allowed: write [[gpu]] with memory and, optionally, count",
        ),
        (GPU.into(), "1:1: programs cannot be 0: 1 to 100000 are allowed: write [[job]] with name, memory and work"),
        ("[[gpu]]\ncount = 2\n".into(), "1:1: missing field `memory`"),
        ("[[gpu]]\nmemory = 1\ncount = 0".into(), "3:9: count cannot be 0: 1 to 10000 are allowed"),
        ("[[gpu]]\nmemory = \"2T\"".into(), "2:10: too large: at most 1T is allowed"),
        ("[[gpu]]\nmemory = 1\nlink = \"50\"".into(), "3:8: link cannot be 50: at least 1048576 is allowed"),
        (
            "[[gpu]]\nmemory = \"lots\"".into(),
            "2:10: \"lots\" is not a size: write a number and K, M, G or T, like \"512M\"",
        ),
        (
            "[[gpu]]\nmemory = true".into(),
            "2:10: invalid type: boolean `true`, expected a size like \"16G\" for this key",
        ),
        ("[[gpu]]\nmemory = -1".into(), "2:10: this key cannot be -1: a size like \"16G\" is allowed"),
        (
            "[[gpu]]\nsize = 1".into(),
            "2:1: unknown field `size`, expected one of `count`, `memory`, `link`, `link-total`",
        ),
        (
            "[[gpu]]\nmemory = 1\nlink = \"2G\"\nlink-total = \"1G\"".into(),
            "4:14: link-total cannot be 1073741824: at least 2147483648 is allowed",
        ),
        (
            format!("{GPU}[[job]]\nname = \"\"\nmemory = 1\nwork = 1"),
            "4:8: name: a job's name must be one line of text",
        ),
        (both(JOB), "8:8: name: another job is already called \"a\". Job names must be unique"),
        (both("memory = 2"), "7:1: duplicate key"),
        (both("count = 100001"), "7:9: count cannot be 100001: 1 to 100000 are allowed"),
        (both("count = -1"), "7:9: invalid value: integer `-1`, expected u32"),
        (both("gpus = 2"), "7:8: gpus cannot be 2: 1 to 1 are allowed"),
        (both("on = [0, 1]"), "7:6: on: the scenario has no GPU 1. GPUs are numbered from 0 to 0"),
        (both("on = []"), "7:6: on: the list is empty. Omit it to allow every GPU"),
        (both("user = \"a\"\nusers = 3"), "8:9: users: cannot be combined with the key \"user\". Remove \"user\""),
        (both("every = 1\nrandom = 1"), "8:10: random: cannot be combined with the key \"every\". Remove \"every\""),
        (both("random = 0"), "7:10: random cannot be 0: write a longer time"),
        (both("gpu-time = \"0s\""), "7:12: gpu-time cannot be 0: write a longer time"),
        (
            both("cpu-time = \"soon\""),
            "7:12: \"soon\" is not a duration: write a number and ms, s, min, h or d, like \"30s\"",
        ),
        (both("drain = \"9000d\""), "7:9: too long: at most 3650d is allowed"),
        (both("rule = { weight = 0 }"), "7:19: weight cannot be 0: a number from 1 to 10000, or \"idle\" is allowed"),
        (both("rule = { time-max = \"20%\", time-min = \"30%\" }"), "7:39: time-min cannot be 30%: time-max is 20%"),
        (
            both("rule = { user = 5, weight = 5 }"),
            "7:8: rule: a job's rule always applies to the job's own programs: name, unit, slice, container, pod, user \
             and group are not allowed here",
        ),
        (both("rule = {}"), &*sets_nothing),
        (
            both("[swap]\nmax = \"80%\""),
            "7:1: swap.max: a scenario does not define the amount of RAM. Write a size like \"64G\", or \"none\"",
        ),
        (
            format!("time-quantum = 0\n{GPU}"),
            "1:16: time-quantum: the time quantum cannot be 0 seconds: whole seconds from 1 to 3600 are allowed",
        ),
        ("until = 0".into(), "1:9: until cannot be 0: write a longer time"),
        ("seed = \"x\"".into(), "1:8: invalid type: string \"x\", expected u32"),
        (
            "gpus = 3".into(),
            "1:1: unknown field `gpus`, expected one of `seed`, `until`, `time-quantum`, `max-wait`, `time-period`, \
             `anti-thrash`, `policy`, `memory`, `swap`, `gpu`, `job`",
        ),
    ];
    for (text, expected) in cases {
        let error = Scenario::parse(&text, Path::new("x.toml")).expect_err(&text).to_string();
        assert_eq!(error, format!("x.toml:{expected}"), "{text}");
    }
}

fn ctl(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvsharectl"));
    command.arg("simulate").args(arguments).output().expect("nvsharectl")
}

#[test]
fn the_command_prints_tables_or_json_and_reports_errors() {
    let file = scenarios().join("shares.toml");
    let file = file.to_str().expect("a path");
    let shown = ctl(&[file, "--policy", "fcfs-on", "--policy=rules-auto"]);
    let text = String::from_utf8(shown.stdout).expect("text");
    assert!(shown.status.success() && shown.stderr.is_empty(), "{text}");
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("2 programs of 2 users on 1 GPU"));
    let starts = |start: &str| text.lines().filter(|line| line.starts_with(start)).count();
    let rows =
        ["POLICY ", "JOB ", "fcfs-on ", "fcfs-auto ", "rules-auto ", "serial ", "thirty ", "seventy "].map(starts);
    assert_eq!(rows, [2, 1, 2, 0, 2, 2, 1, 1], "{text}");
    let thirty = text.lines().find(|line| line.starts_with("thirty ")).unwrap_or_default();
    assert_eq!(thirty.split_whitespace().collect::<Vec<_>>(), ["thirty", "1h", "00min", "50.0%", "30.0%", "100.0%"]);

    let json = ctl(&[file, "--json", "--policy", "rules-on"]).stdout;
    let json: serde_json::Value = serde_json::from_slice(&json).expect("JSON");
    assert_eq!((&json["programs"], &json["gpus"]), (&2.into(), &1.into()));
    let policy = &json["policies"][0];
    assert_eq!((&policy["policy"], &policy["unfinished"]), (&"rules-on".into(), &2.into()));
    assert_eq!(policy["jobs"][1]["gpu-time"].as_f64().map(f64::round), Some(70.0));

    let picture = std::env::temp_dir().join(format!("timeline-{}.svg", std::process::id()));
    let path = picture.to_str().expect("a path");
    assert!(ctl(&[file, "--policy", "fcfs-on", "--policy", "rules-auto", "--timeline", path]).status.success());
    let drawn = std::fs::read_to_string(&picture).expect("a picture");
    std::fs::remove_file(&picture).expect("it was there");
    let at = |text: &str| drawn.find(text).unwrap_or_else(|| panic!("no {text}: {drawn}"));
    assert!(at(">fcfs-on<") < at(">thirty<") && at(">thirty<") < at(">rules-auto<"), "{drawn}");
    let nowhere = ctl(&[file, "--policy", "fcfs-on", "--timeline", "/no/such/folder/x.svg"]);
    let said = String::from_utf8(nowhere.stderr).expect("text");
    assert!(said.starts_with("nvsharectl: cannot write /no/such/folder/x.svg: No such file"), "{said}");

    let missing = ctl(&["/no/such/file"]);
    assert_eq!(missing.status.code(), Some(1));
    let said = String::from_utf8(missing.stderr).expect("text");
    assert!(said.starts_with("nvsharectl: cannot read /no/such/file: No such file"), "{said}");
    assert_eq!(ctl(&[file, "--policy", "best"]).status.code(), Some(2));
}
