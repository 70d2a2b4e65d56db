//! Programs that don't use CUDA, or haven't used it yet. The library changes nothing in them.

use crate::compare::*;

/// Pipes, subshells, coprocesses, traps, here-documents, and exits of every kind.
const SHELL: &str = r#"
trap 'echo trapped' USR1; kill -USR1 $$
seq 1000 | grep 7 | wc -l
(exit 3); echo $?
{ bash -c 'kill -9 $$'; } 2>/dev/null; echo $?
coproc cat; echo through >&"${COPROC[1]}"; read -r line <&"${COPROC[0]}"; echo "$line"
x=$(cat <(echo one) <<<two); echo "$x"
for i in {1..20}; do (echo "$i" >/dev/null; exit $((i % 3))) & list="$list $!"; done; wait $list; echo done
set -o pipefail; yes | head -1; echo "${PIPESTATUS[@]}"
echo out; echo err >&2
exec {COPROC[1]}>&-; wait
exec 5>&1 >&-; echo lost; echo found >&5
exit 7
"#;

const PERL: &str = r#"
$SIG{ALRM} = sub { print "alarm\n" }; alarm 1; sleep 3;
my $pid = fork // die; if (!$pid) { exit 5 } waitpid $pid, 0; print $? >> 8, "\n";
print `echo from a child`; END { print "end\n" } die "dies\n";
"#;

const PYTHON: &str = r#"
import multiprocessing, os, signal, subprocess, sys, threading, time
def square(x): return x * x
if __name__ == "__main__":
    pid = os.fork()
    if pid == 0: os._exit(9)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for how in "fork", "spawn":
        with multiprocessing.get_context(how).Pool(2) as pool: print(sum(pool.map(square, range(10))))
    print(subprocess.run(["sh", "-c", "cat; exit 4"], input=b"in", capture_output=True))
    print(subprocess.run(["true"], close_fds=True, start_new_session=True).returncode)
    thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()
    threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(50)]
    [t.start() for t in threads]; [t.join() for t in threads]
    print(len(os.listdir("/proc/self/fd")))
    signal.signal(signal.SIGALRM, lambda *_: print("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.05); signal.pause()
    try: os.kill(os.getpid(), signal.SIGINT); time.sleep(1)
    except KeyboardInterrupt: print("interrupted")
    sys.stdout.flush()
    sys.exit(6)
"#;

#[test]
fn a_shell_runs_unchanged() {
    let host = Host::new();
    let ended = host.case("/bin/bash", &["-c", SHELL]).same();
    assert_eq!(ended.status, (Some(7), None), "{ended:?}");
    assert_eq!(host.clients(), 0);
}

#[test]
fn perl_runs_unchanged() {
    if !std::path::Path::new("/usr/bin/perl").exists() {
        return test_support::skip("perl");
    }
    let host = Host::new();
    let ended = host.case("/usr/bin/perl", &["-e", PERL]).same();
    assert_eq!((&*ended.stderr, &*ended.stdout), ("dies\n", "alarm\nend\n5\nfrom a child\nend\n"));
    assert_eq!(host.clients(), 0);
}

#[test]
fn python_runs_unchanged() {
    let host = Host::new();
    // Runs the interpreter itself, because a wrapper would search for the interpreter.
    let found = std::process::Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output();
    let Ok(found) = found else { return test_support::skip("python3") };
    let script = host.0.path("script.py");
    std::fs::write(&script, PYTHON).expect("a script");
    let python = String::from_utf8_lossy(&found.stdout);
    let ended = host.case(python.trim(), &[&script.to_string_lossy()]).same();
    assert_eq!((ended.status, &*ended.stderr), ((Some(6), None), ""), "{ended:?}");
    assert_eq!(host.clients(), 0);
}

#[test]
fn a_program_without_cuda_has_no_trace_of_the_library() {
    let host = Host::new();
    let program = host.program("untouched");
    // Tests a program without libcuda, and a program that loads libcuda, queries its version and
    // looks up its functions, without initialising CUDA.
    for word in ["none", "loaded"] {
        let ended = host.case(&program, &[word]).succeeds();
        assert!(ended.stdout.contains("threads 1"), "{ended:?}");
    }
    assert_eq!(host.clients(), 0);
}

#[test]
fn no_message_with_a_scheduler_or_without_an_explicit_preload() {
    let host = Host::new();
    host.succeeds("worker", &["2"]);
    let host = Host::without_scheduler();
    let program = host.program("worker");
    // Under this name, the library cannot tell that it was preloaded for this program in
    // particular.
    std::fs::copy(library(), host.0.path("lib/libother.so")).expect("a copy");
    host.case(&program, &["2"]).preloading(&["libother.so".into()]).succeeds();
    let said = host.case(&program, &["2"]).with();
    assert!(said.stderr.starts_with("nvshare: no scheduler at ") && said.stderr.lines().count() == 1, "{said:?}");
}

#[test]
fn a_program_that_daemonizes_continues() {
    let host = Host::new();
    host.succeeds("daemonises", &["plain", "cuda", "late"]);
    // Two of the programs use CUDA, one of them before it becomes a daemon.
    assert_eq!(host.clients(), 2);
}
