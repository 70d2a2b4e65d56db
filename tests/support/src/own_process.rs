use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use crate::{Directory, artifact};

/// The variable that names the test in its process.
const NAME: &str = "NVSHARE_TEST_OWN_PROCESS";

/// Whether this process runs only this test, with a separate simulated GPU and the additional
/// `environment`. If not, starts such a process and waits until the test has succeeded there.
/// `test` is the full name in the test program's list.
///
/// A process reads the variables for its simulated GPU only once. So tests that use a simulated GPU
/// in their own process cannot be threads of one process. The same holds for tests that move their
/// process to a cgroup.
#[track_caller]
pub fn has_own_process(test: &str, environment: &[(&str, String)]) -> bool {
    if std::env::var(NAME).is_ok_and(|name| name == test) {
        return true;
    }
    let simulated = Directory::new();
    symlink(artifact("libnvidia_ml.so"), simulated.0.join("libnvidia-ml.so.1")).expect("a link to NVML");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]).env(NAME, test);
    let gpu = simulated.0.join("gpu");
    command.env("CUDA_SIM_DIR", &gpu).env("NVSHARE_DEVICES", &gpu).env("LD_LIBRARY_PATH", &simulated.0);
    let output = command.envs(environment.iter().map(|(name, value)| (name, value))).stdin(Stdio::null()).output();
    let output = output.expect("this program starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    eprint!("{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && stdout.contains(" 1 passed;"), "{test}: {}\n{stdout}", output.status);
    false
}
