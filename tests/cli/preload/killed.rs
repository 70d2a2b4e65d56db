//! Concurrent and killed invocations of `nvsharectl preload`. `/etc/ld.so.preload` is complete at
//! every moment.

use std::time::{Duration, Instant};

use super::host::*;

const OFF: &[u8] = b"# kept\n";
const ON: &[u8] = b"# kept\n/mnt/lib/libnvshare.so\n";

#[test]
fn a_kill_at_any_moment_leaves_the_old_file_or_the_new_one() {
    on_a_host(|host| {
        host.write(OFF);
        for verb in ["enable", "disable"] {
            let began = Instant::now();
            host.preload(verb).fine();
            let takes = began.elapsed();
            for step in 0..40 {
                host.write(if verb == "enable" { OFF } else { ON });
                let mut child = host.start(verb);
                // Kills the invocation after increasing delays.
                std::thread::sleep(takes.mul_f64(f64::from(step) / 32.0).min(Duration::from_secs(1)));
                child.kill().expect("it is killed");
                child.wait().expect("it is gone");
                let text = host.text().expect("there is a file");
                assert!(text == OFF || text == ON, "{verb}, step {step}: {}", String::from_utf8_lossy(&text));
                host.is_sound();
            }
        }
        // The next change removes leftover files.
        host.write(OFF);
        host.preload("enable").fine();
        host.preload("disable").fine();
        host.is_tidy();
        assert_eq!(host.text().as_deref(), Some(OFF));
    });
}

#[test]
fn concurrent_changes_are_serialized() {
    on_a_host(|host| {
        host.write(OFF);
        let verbs = ["enable", "disable", "enable", "enable", "disable", "enable"];
        let children: Vec<_> = verbs.map(|verb| host.start(verb)).into_iter().collect();
        for mut child in children {
            assert!(child.wait().expect("it ends").success());
        }
        let text = host.text().expect("there is a file");
        assert!(text == OFF || text == ON, "{}", String::from_utf8_lossy(&text));
        host.is_tidy();
        host.is_sound();
        host.preload("enable").fine();
        assert_eq!(host.text().as_deref(), Some(ON));
    });
}
