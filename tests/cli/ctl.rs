//! `nvsharectl` for users and scripts: its output, its effects and its exit codes.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;

use test_support::daemon::*;

#[test]
fn status_shows_holders_and_waiters() {
    let daemon = Daemon::start();
    let empty = daemon.ctl(&[]);
    assert_eq!((empty.code, empty.stderr.as_str()), (Some(0), ""));
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        empty.stdout.starts_with(&format!("nvshare {version}: time quantum 30s, anti-thrash auto, policy fcfs\n")),
        "{}",
        empty.stdout
    );
    assert!(empty.stdout.contains("No GPU is known yet"), "{}", empty.stdout);

    let ([holder, waiter], _idle) = (daemon.holder_and_waiter(), daemon.client());
    let status = daemon.ctl(&["status"]);
    assert_eq!(status.code, Some(0));
    let lines: Vec<&str> = status.stdout.lines().collect();
    let line = |start: &str| {
        let found = lines.iter().find(|line| line.trim_start().starts_with(start));
        found.unwrap_or_else(|| panic!("no line {start:?} in\n{}", status.stdout))
    };
    line(&format!("GPU  Test GPU  16 GiB  {GPU_NAME}"));
    let pid = std::process::id().to_string();
    let programs: Vec<&str> = lines.iter().copied().filter(|line| line.trim_start().starts_with(&pid)).collect();
    assert!(programs[0].contains(" runs") && programs[0].contains("12 GiB  12 GiB"), "{}", status.stdout);
    assert!(programs[1].contains(" waits, about "), "{}", status.stdout);
    assert!(line(&format!("Process {pid}: ")).contains(" GPU-07070707"), "{}", status.stdout);
    line("On no GPU");
    assert_eq!(programs.len(), 3, "{}", status.stdout);
    assert!(!status.stdout.contains('\x1b'), "no colour but on a terminal");

    let json = daemon.ctl(&["--json"]);
    assert_eq!(json.stdout.lines().count(), daemon.ctl(&["status", "--json"]).stdout.lines().count());
    let json: serde_json::Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!(json["time-quantum"], 30);
    assert_eq!(json["gpus"][0]["holders"][0], holder.id);
    assert_eq!(json["gpus"][0]["queue"][0], waiter.id);
    assert_eq!(json["clients"][0]["gpus"][0]["state"], "holding");
    assert_eq!(json["clients"][0]["pid"], std::process::id());
}

#[test]
fn settings_change_by_commands_and_by_the_original_options() {
    let daemon = Daemon::start();
    let cases: [(&[&str], &str); 13] = [
        (
            &["set", "time-quantum", "45"],
            "time-quantum = \"45s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n",
        ),
        (
            &["set", "time-quantum", "2min"],
            "time-quantum = \"120s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n",
        ),
        (
            &["set", "max-wait", "0"],
            "time-quantum = \"120s\"\nmax-wait = \"0s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n",
        ),
        (
            &["set", "max-wait", "1min"],
            "time-quantum = \"120s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n",
        ),
        (
            &["set", "anti-thrash", "on"],
            "time-quantum = \"120s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n",
        ),
        (&["-T", "7"], "time-quantum = \"7s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n"),
        (&["--set-tq=8"], "time-quantum = \"8s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n"),
        (&["-S", "off"], "time-quantum = \"8s\"\nmax-wait = \"60s\"\nanti-thrash = \"off\"\npolicy = \"fcfs\"\n"),
        (
            &["--anti-thrash", "auto"],
            "time-quantum = \"8s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n",
        ),
        (
            &["-T", "9", "-S", "on"],
            "time-quantum = \"9s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n",
        ),
        (&["reload"], "time-quantum = \"9s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"fcfs\"\n"),
        (
            &["set", "policy", "adaptive"],
            "time-quantum = \"9s\"\nmax-wait = \"60s\"\nanti-thrash = \"on\"\npolicy = \"adaptive\"\n",
        ),
        (&["reset"], "time-quantum = \"30s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n"),
    ];
    for (arguments, expected) in cases {
        let output = daemon.ctl(arguments);
        assert_eq!((output.code, output.stdout.as_str(), output.stderr.as_str()), (Some(0), "", ""), "{arguments:?}");
        assert_eq!(daemon.ctl(&["get"]).stdout, expected, "{arguments:?}");
    }
}

#[test]
fn errors_have_exit_codes_and_sentences() {
    let daemon = Daemon::start();
    let refused = daemon.ctl(&["set", "time-quantum", "3601"]);
    assert_eq!(refused.code, Some(1));
    assert_eq!(
        refused.stderr,
        "nvsharectl: the time quantum cannot be 3601 seconds: whole seconds from 1 to 3600 are allowed\n"
    );
    assert_eq!(daemon.ctl(&["set", "time-quantum", "500ms"]).code, Some(1));
    let usage: [&[&str]; 8] = [
        &["set", "time-quantum", "soon"],
        &["set", "anti-thrash", "maybe"],
        &["-S", "maybe"],
        &["-T"],
        &["dance"],
        &["run"],
        &["set"],
        &["-T", "9", "status"],
    ];
    for arguments in usage {
        assert_eq!(daemon.ctl(arguments).code, Some(2), "{arguments:?}");
    }
    let negative = daemon.ctl(&["set", "time-quantum", "-5"]).stderr;
    assert!(negative.contains("\"-5\" is not a duration") && !negative.contains("tip:"), "{negative}");
    let since = daemon.ctl(&["report", "--since", "7d"]).stderr;
    assert!(since.contains("cannot use the time \"7d\": a time before now starts with a minus"), "{since}");
    assert!(daemon.ctl(&["-S", "maybe"]).stderr.contains("\"auto\", \"on\" or \"off\" are allowed"));
    assert_eq!(
        daemon.ctl(&["get"]).stdout,
        "time-quantum = \"30s\"\nmax-wait = \"60s\"\nanti-thrash = \"auto\"\npolicy = \"fcfs\"\n"
    );
}

#[test]
fn without_a_scheduler_the_exit_code_is_3() {
    let directory = Directory::new();
    let missing = directory.0.join("control.sock");
    let output = Output::of(ctl().arg("--control").arg(&missing));
    assert_eq!(output.code, Some(3));
    assert!(output.stderr.starts_with("nvsharectl: the scheduler is not running ("), "{}", output.stderr);
    assert!(output.stderr.contains("systemctl start"), "{}", output.stderr);
    let output = Output::of(ctl().arg("status").env("NVSHARE_CONTROL", &missing));
    assert_eq!(output.code, Some(3));
    // This machine has no system bus, and no socket at the default path.
    let output = Output::of(ctl().env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={}", missing.display())));
    if !exists(nvshare::config::paths::CONTROL_SOCKET) {
        assert_eq!(output.code, Some(3), "{}", output.stderr);
    }
}

#[test]
fn run_executes_its_command() {
    let directory = Directory::new();
    let library = directory.0.join("libnvshare.so");
    std::fs::write(&library, "").expect("a file");
    let run = || {
        let mut command = ctl();
        command.arg("run").arg("--library").arg(&library);
        command
    };
    let code = Output::of(run().args(["sh", "-c", "exit 42"]));
    assert_eq!(code.code, Some(42));
    let killed = run().args(["--", "sh", "-c", "kill -TERM $$"]).stderr(Stdio::null()).status().expect("it starts");
    assert_eq!(killed.signal(), Some(libc::SIGTERM));

    // The library is an empty file, so the loader only prints an error. The test checks the list.
    let list = Output::of(run().args(["sh", "-c", "echo $LD_PRELOAD"]));
    assert_eq!(list.stdout, format!("{}\n", library.display()));
    let list = Output::of(run().args(["sh", "-c", "echo $LD_PRELOAD"]).env("LD_PRELOAD", "libm.so.6"));
    assert_eq!(list.stdout, format!("{}:libm.so.6\n", library.display()));
    let list = Output::of(ctl().args(["run", "sh", "-c", "echo $LD_PRELOAD"]).env("NVSHARE_LIBRARY", &library));
    assert_eq!(list.stdout, format!("{}\n", library.display()));

    let typo = Output::of(run().arg("true").env("NVSHARE_MEMORY_MAX", "lots"));
    assert_eq!(typo.code, Some(1));
    assert!(typo.stderr.starts_with("nvsharectl: NVSHARE_MEMORY_MAX: "), "{}", typo.stderr);

    let missing = Output::of(run().arg("no-such-command-anywhere"));
    assert_eq!(missing.code, Some(127));
    assert!(missing.stderr.contains("cannot run no-such-command-anywhere: No such file"), "{}", missing.stderr);
    let not_executable = Output::of(run().arg(&library));
    assert_eq!(not_executable.code, Some(126), "{}", not_executable.stderr);
    let no_library = Output::of(ctl().args(["run", "--library", "/nowhere/libnvshare.so", "true"]));
    assert_eq!(no_library.code, Some(1));
    assert!(no_library.stderr.contains("there is no library /nowhere/libnvshare.so"), "{}", no_library.stderr);
}

#[test]
fn preload_status_names_the_running_scheduler() {
    let daemon = Daemon::start();
    let version = env!("CARGO_PKG_VERSION");
    let on = std::fs::read_to_string("/etc/ld.so.preload").is_ok_and(|list| list.contains("libnvshare.so"));
    let status = daemon.ctl(&["preload", "status"]);
    assert_eq!((status.code, &*status.stderr), (Some(if on { 0 } else { 4 }), ""));
    assert!(status.stdout.contains(&format!("  the running scheduler is version {version}\n")), "{}", status.stdout);
    let json = daemon.ctl(&["--json", "preload", "status"]);
    let json: serde_json::Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!((&json["on"], &json["scheduler-version"]), (&on.into(), &version.into()));
}

#[test]
fn lock_runs_a_command_and_returns_its_exit_code() {
    let daemon = Daemon::start();
    let other = daemon.client();
    other.attach();
    other.request();
    other.until_granted();
    let ctl = |words: &[&str]| {
        let mut command = ctl();
        command.arg("--control").arg(daemon.control()).arg("lock").args(words);
        command
    };
    let script = ["--who", "me", "--", "sh", "-c", "echo in; read line; exit 7"];
    let mut child = ctl(&script).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("nvsharectl");
    daemon.log.wait("me connected");
    other.release();
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("its stdout")).read_line(&mut line).expect("a line");
    assert_eq!(line, "in\n");
    let status = daemon.ctl(&["--json"]).stdout;
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    assert_eq!(
        (&status["clients"][1]["name"], &status["clients"][1]["why"]),
        (&"me".into(), &"nvsharectl lock".into())
    );
    assert_eq!(status["clients"][1]["gpus"][0]["state"], "holding");
    other.request();
    drop(child.stdin.take());
    other.until_granted();
    assert_eq!(wait(&mut child).code(), Some(7));

    other.release();
    assert_eq!(Output::of(&mut ctl(&["--", "sh", "-c", "kill -9 $$"])).code, Some(137));
    assert_eq!(Output::of(&mut ctl(&["--", "/no/such/program"])).code, Some(127));
    let refused = Output::of(&mut ctl(&["--gpu", "7", "--", "true"]));
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.contains("unknown GPU \"7\""), "{}", refused.stderr);
}

/// Starts `nvsharectl lock` with a script. The script announces its start, and ends at the end of
/// its input.
fn locked(daemon: &Daemon, options: &[&str]) -> std::process::Child {
    let mut command = ctl();
    command.arg("--control").arg(daemon.control()).arg("lock").args(options);
    command.args(["--", "sh", "-c", "sh -c 'echo in; read line; echo out'; exit 7"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("nvsharectl");
    let mut line = String::new();
    let mut byte = [0];
    // Reads single bytes, because a later reader needs the rest of the output.
    while std::io::Read::read(child.stdout.as_mut().expect("its stdout"), &mut byte).expect("a byte") == 1
        && byte != *b"\n"
    {
        line.push(byte[0].into());
    }
    assert_eq!(line, "in");
    child
}

#[track_caller]
fn next_message(stderr: &mut impl std::io::BufRead) -> String {
    let mut line = String::new();
    stderr.read_line(&mut line).expect("a line");
    line.trim_end().to_owned()
}

/// The state letters of a process's descendants.
fn states_below(pid: u32) -> Vec<char> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let mut states = Vec::new();
    for child in children.split_whitespace().map(|child| child.parse::<u32>().expect("a number")) {
        let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        states.extend(stat.rsplit(") ").next().and_then(|rest| rest.chars().next()));
        states.extend(states_below(child));
    }
    states
}

#[test]
fn a_lost_lock_is_reported_with_its_own_exit_code() {
    let start = |options: &[&str]| {
        let daemon = Daemon::start();
        let client = daemon.client();
        client.attach();
        let mut child = locked(&daemon, options);
        drop(daemon.kill());
        let message = next_message(&mut BufReader::new(child.stderr.take().expect("its stderr")));
        (child, message)
    };
    let lost = "nvsharectl: the lock was lost, because the scheduler ended or an administrator ended the lock. sh";
    let (mut child, message) = start(&[]);
    assert_eq!(message, format!("{lost} continues without the lock"));
    assert!(child.try_wait().expect("a child").is_none(), "the command goes on");
    drop(child.stdin.take());
    assert_eq!(wait(&mut child).code(), Some(5));

    let (mut child, message) = start(&["--on-loss=terminate"]);
    assert_eq!(message, format!("{lost} is terminated"));
    assert_eq!(wait(&mut child).code(), Some(5), "its input is still open");
}

#[test]
fn a_command_can_pause_until_a_lost_lock_is_reacquired() {
    let daemon = Daemon::start();
    let client = daemon.client();
    client.attach();
    let mut child = locked(&daemon, &["--on-loss=pause"]);
    let directory = daemon.kill();
    let mut stderr = BufReader::new(child.stderr.take().expect("its stderr"));
    let paused = next_message(&mut stderr);
    assert!(paused.ends_with("sh is paused until the lock is reacquired"), "{paused}");
    let pid = child.id();
    assert_eq!(states_below(pid), ['T', 'T'], "the script and its child");
    assert!(next_message(&mut stderr).ends_with(". Retrying"));

    // Stops the waiting nvsharectl, so that it does not try to take the lock while the lock is
    // free.
    kill(pid, libc::SIGSTOP);
    let daemon = Daemon::start_in(directory, None, |_, _| ());
    let other = daemon.client();
    other.attach();
    other.request();
    other.until_granted();
    kill(pid, libc::SIGCONT);
    daemon.log.wait("sh connected");
    assert_eq!(states_below(pid), ['T', 'T'], "it waits for the lock");
    other.release();
    assert_held_again(&next_message(&mut stderr), ", so sh continues");
    drop(child.stdin.take());
    assert_eq!(wait(&mut child).code(), Some(7), "its own exit code");
}

#[track_caller]
fn assert_held_again(message: &str, end: &str) {
    let begin = "nvsharectl: reacquired the lock after ";
    assert!(message.starts_with(begin) && message.ends_with(&format!("s{end}")), "{message}");
}

#[test]
fn a_lock_revoked_at_the_end_of_its_turn_is_reported() {
    let begin = |options: &[&str]| {
        let daemon = Daemon::start_with(|command, _| {
            command.args(["--time-quantum-ms", "100"]);
        });
        let other = daemon.client();
        other.attach();
        let mut child = locked(&daemon, options);
        other.request();
        other.until_granted();
        let stderr = BufReader::new(child.stderr.take().expect("its stderr"));
        (daemon, child, other, stderr)
    };
    let lost = "nvsharectl: the lock was lost, because the turn is over and other programs wait. sh";

    let (_daemon, mut child, other, mut stderr) = begin(&[]);
    assert_eq!(next_message(&mut stderr), format!("{lost} continues without the lock"));
    other.release();
    assert_held_again(&next_message(&mut stderr), "");
    drop(child.stdin.take());
    assert_eq!(wait(&mut child).code(), Some(5), "it was not alone all the time");

    let (_daemon, mut child, other, mut stderr) = begin(&["--on-loss=pause"]);
    assert_eq!(next_message(&mut stderr), format!("{lost} is paused until the lock is reacquired"));
    assert_eq!(states_below(child.id()), ['T', 'T'], "the script and its child");
    other.release();
    assert_held_again(&next_message(&mut stderr), ", so sh continues");
    drop(child.stdin.take());
    assert_eq!(wait(&mut child).code(), Some(7), "its own exit code");
}

/// Starts a daemon with a holder, a waiting program, and a lock whose owner has a name.
fn busy() -> (Daemon, [Client; 2], std::process::Child) {
    let daemon = Daemon::start();
    let clients = daemon.holder_and_waiter();
    let mut lock = ctl();
    lock.arg("--control").arg(daemon.control());
    lock.args(["lock", "--who", "secret-who", "--why", "secret-why", "--", "true"]);
    let lock = lock.stdout(Stdio::null()).spawn().expect("nvsharectl");
    daemon.log.wait("secret-who connected");
    (daemon, clients, lock)
}

#[test]
fn a_debug_bundle_is_private_and_omits_program_names() {
    let (daemon, _clients, mut lock) = busy();
    let program = std::env::current_exe().expect("this program");
    let program = program.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
    let directory = &daemon.directory.0;
    let path = directory.join("bundle.jsonl");
    let at = path.to_str().expect("UTF-8");

    let output = daemon.ctl(&["debug", "--output", at]);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
    assert!(output.stdout.starts_with(&format!("The debug bundle is in {at} (")), "{}", output.stdout);
    let metadata = std::fs::metadata(&path).expect("the file");
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&metadata.permissions()) & 0o777, 0o600);
    let bundle = std::fs::read_to_string(&path).expect("the bundle");
    let kinds = ["nvshare-bundle", "configuration", "status", "nvml", "client"];
    for (line, kind) in bundle.lines().zip(kinds) {
        assert!(line.starts_with(&format!("{{\"kind\":\"{kind}\"")), "{line}");
    }
    assert!(bundle.contains("\"time-quantum\":\"30s\"") && bundle.contains(GPU_NAME));
    let name = std::fs::read_to_string("/proc/self/comm").expect("a name");
    for secret in ["secret-who", "secret-why", program.as_str(), name.trim()] {
        assert!(!bundle.contains(secret), "{secret} is in the bundle");
    }
    let more = daemon.ctl(&["debug", "--command-lines", "--output", "-"]);
    for secret in ["secret-who", "secret-why", program.as_str(), "\"command-lines\":true"] {
        assert!(more.stdout.contains(secret), "{secret} is not in the bundle");
    }

    let again = daemon.ctl(&["debug", "--output", at]);
    let expected = format!("nvsharectl: {at} already exists. Use --output to name another file\n");
    assert_eq!((again.code, again.stderr), (Some(1), expected));
    assert_eq!(std::fs::read_to_string(&path).expect("the bundle"), bundle);
    let nowhere = daemon.ctl(&["debug", "--output", "/no/such/directory/bundle"]);
    assert_eq!(nowhere.code, Some(1));
    assert!(nowhere.stderr.contains("cannot create /no/such/directory/bundle: No such file"), "{}", nowhere.stderr);

    let mut command = ctl();
    let named = Output::of(command.arg("--control").arg(daemon.control()).arg("debug").current_dir(directory));
    assert_eq!(named.code, Some(0), "{}", named.stderr);
    let is_default = |name: &str| name.starts_with("nvshare-debug-") && name.ends_with("Z.jsonl");
    let entries = std::fs::read_dir(directory).expect("the directory");
    assert_eq!(entries.filter(|e| is_default(&e.as_ref().expect("an entry").file_name().to_string_lossy())).count(), 1);
    let _ = lock.kill();
    let _ = lock.wait();
}

#[test]
fn timeline_draws_a_live_and_a_recorded_svg() {
    let (daemon, _clients, mut lock) = busy();
    let directory = &daemon.directory.0;
    let path = |name: &str| directory.join(name).to_str().expect("UTF-8").to_owned();
    let holder = format!("(PID {})</text>", std::process::id());
    let is_drawn = |drawn: &str| {
        assert!(drawn.contains("<title>holds the GPU: "), "{drawn}");
        assert!(drawn.contains(&holder), "{drawn}");
    };
    let done = daemon.ctl(&["timeline", "--output", &path("live.svg")]);
    assert_eq!((done.code, done.stderr.as_str(), done.stdout.as_str()), (Some(0), "", ""));
    is_drawn(&std::fs::read_to_string(path("live.svg")).expect("the picture"));

    assert_eq!(daemon.ctl(&["debug", "--output", &path("bundle.jsonl")]).code, Some(0));
    let draw = |more: &[&str]| Output::of(ctl().args(["timeline", "--output", "-"]).args(more));
    let bundle = path("bundle.jsonl");
    is_drawn(&draw(&["--bundle", &bundle, "--gpu", "0", "--since", "-1h"]).stdout);
    let mut terminal = ctl();
    let text = Output::of(terminal.env("LC_ALL", "C").args(["timeline", "--bundle", &bundle])).stdout;
    assert!(text.contains(&format!("(PID {})", std::process::id())) && text.contains("# holds the GPU"), "{text}");
    let json = daemon.ctl(&["timeline", "--json"]).stdout;
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert!(json["begins"].as_f64().expect("a number") > 1.7e9 && json["host"].is_string(), "{json}");
    let nobody = draw(&["--bundle", &bundle, "--gpu", "7"]);
    let expected = "nvsharectl: no program used a GPU \"7\". Name the GPU by its number or UUID\n";
    assert_eq!((nobody.code, nobody.stderr.as_str()), (Some(1), expected));
    assert_eq!(draw(&["--bundle", &bundle, "--since", "10min"]).code, Some(2));

    let _ = lock.kill();
    let _ = lock.wait();
}

#[test]
fn a_debug_bundle_replays_to_the_same_commands() {
    let (daemon, clients, mut lock) = busy();
    let path = daemon.directory.0.join("bundle.jsonl");
    let at = path.to_str().expect("UTF-8");
    assert_eq!(daemon.ctl(&["debug", "--output", at]).code, Some(0));
    let replay = |more: &[&str]| Output::of(ctl().args(["simulate", "--replay", at]).args(more));

    let text = replay(&[]);
    assert_eq!((text.code, text.stderr.as_str()), (Some(0), ""));
    assert!(text.stdout.contains("\nThe scheduler's decisions match the recording.\n"), "{}", text.stdout);
    assert!(text.stdout.contains("granted after "), "{}", text.stdout);
    let json: serde_json::Value = serde_json::from_str(&replay(&["--json"]).stdout).expect("JSON");
    assert_eq!((&json["same"], &json["difference"]), (&true.into(), &serde_json::Value::Null));
    let of = |client: &Client| {
        let all = json["clients"].as_array().expect("a list");
        all.iter().find(|row| row["client"] == client.id).expect("the client").clone()
    };
    assert_eq!((&of(&clients[0])["grants"], &of(&clients[1])["grants"]), (&1.into(), &0.into()));
    assert!(of(&clients[1])["wait-time"].as_f64().expect("a number") > 0.0);
    assert_eq!(json["timeline"][0]["what"], "granted");

    // This bundle looks as if another version of the scheduler had recorded it.
    let bundle = std::fs::read_to_string(&path).expect("the bundle");
    let line = bundle.lines().position(|line| line.contains("\"grant\":")).expect("a grant");
    std::fs::write(&path, bundle.replace("{\"grant\":", "{\"revoke\":")).expect("a bundle");
    let differs = replay(&[]);
    assert_eq!(differs.code, Some(1));
    let expected = format!("(line {}):\n  event      {{\"requested\":", line + 1);
    assert!(differs.stdout.contains(&expected), "{}", differs.stdout);
    let json: serde_json::Value = serde_json::from_str(&replay(&["--json"]).stdout).expect("JSON");
    assert_eq!((&json["same"], &json["difference"]["line"]), (&false.into(), &(line + 1).into()));

    std::fs::write(&path, "[[gpu]]\n").expect("a file");
    let expected = format!(
        "nvsharectl: {at}, line 1: this file is neither a debug bundle of `nvsharectl debug` nor a record of \
         `nvshare-scheduler --record`\n"
    );
    assert_eq!((replay(&[]).code, replay(&[]).stderr), (Some(1), expected));
    assert_eq!(Output::of(ctl().args(["simulate", "--replay", at, "mix.toml"])).code, Some(2));
    assert_eq!(Output::of(ctl().arg("simulate")).code, Some(2));
    let _ = lock.kill();
    let _ = lock.wait();
}

#[test]
fn a_debug_bundle_is_refused_to_a_container() {
    let unshare = |program: &mut std::process::Command| {
        let mut command = std::process::Command::new("unshare");
        command.args(["--pid", "--fork"]).arg(program.get_program()).args(program.get_args());
        command
    };
    let is_possible = unshare(&mut std::process::Command::new("true")).stderr(Stdio::null()).status();
    if !is_possible.is_ok_and(|status| status.success()) {
        return test_support::skip("the right to create PID namespaces");
    }
    let daemon = Daemon::start();
    let mut command = ctl();
    command.arg("--control").arg(daemon.control()).args(["debug", "--output", "-"]);
    let refused = Output::of(&mut unshare(&mut command));
    assert_eq!((refused.code, refused.stdout.as_str()), (Some(1), ""));
    let text = "processes in containers and in other PID namespaces may not create a debug bundle";
    assert!(refused.stderr.contains(text), "{}", refused.stderr);
}

#[test]
fn json_is_printed_or_refused_and_never_ignored() {
    let daemon = Daemon::start();
    let _clients = daemon.holder_and_waiter();
    assert_eq!(daemon.ctl(&["set-rule", "five", "user=5", "allowed-gpus=0", "interactive=true"]).code, Some(0));
    let pid = std::process::id().to_string();
    let parse = |arguments: &[&str]| -> serde_json::Value {
        let output = daemon.ctl(arguments);
        assert_eq!(output.stderr, "", "{arguments:?}");
        serde_json::from_str(&output.stdout).unwrap_or_else(|e| panic!("{arguments:?}: {e}: {}", output.stdout))
    };
    for command in
        [&["status"][..], &["get"], &["pressure"], &["why", &pid], &["preload", "status"], &["preload", "verify"]]
    {
        let after = parse(&[command, &["--json"]].concat());
        assert!(after.is_object() || after.is_array(), "{after}");
        parse(&[&["--json"], command].concat());
    }
    let get = parse(&["get", "--json"]);
    assert_eq!((&get["time-quantum"], &get["policy"]), (&30.into(), &"fcfs".into()));
    let rule = serde_json::json!({
        "name": "five", "user": 5, "allowed-gpus": ["0"], "weight": 100, "interactive": true, "origin": "set at run time"
    });
    assert_eq!(get["rules"], serde_json::json!([rule]));
    for command in [&["top", "-n", "1"][..], &["reload"], &["run", "true"], &["drain", "0"]] {
        let refused = daemon.ctl(&[&["--json"], command].concat());
        assert_eq!((refused.code, refused.stdout.as_str()), (Some(2), ""), "{command:?}");
        assert!(refused.stderr.contains("this command does not support --json"), "{}", refused.stderr);
    }
    assert_eq!(daemon.ctl(&["top", "--json"]).code, Some(2));
}
