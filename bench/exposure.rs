//! The exposure of the scheduler's service according to `systemd-analyze security`, from 0 (minimal
//! privileges) to 10 (unrestricted).
//!
//! `cargo bench --bench exposure [-- --json FILE]`: with a file, the benchmark writes the figure to
//! it (see `bench_support::results`).

use bench_support::results::{Figure, Results};
use std::{path::Path, process::Command};

fn main() {
    let mut results = Results::from_arguments();
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("systemd/nvshare.service");
    let mut command = Command::new("systemd-analyze");
    command.args(["security", "--offline=true", "--no-pager"]).arg(unit).env("LC_ALL", "C.UTF-8");
    let Ok(output) = command.output() else { return println!("systemd-analyze is not there: nothing is measured") };
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().find(|line| line.contains("Overall exposure level")).expect("an answer");
    let score: f64 = line.split_whitespace().find_map(|word| word.parse().ok()).expect("a number");
    println!("{}", line.trim_start_matches(['→', ' ']));
    let version = Command::new("systemd-analyze").arg("--version").output().map(|o| o.stdout).unwrap_or_default();
    let version = String::from_utf8_lossy(&version).lines().next().unwrap_or_default().to_owned();
    let note = format!("systemd-analyze security --offline=true, which says tenths, of {version}");
    results.add(Figure { name: "exposure", value: score, unit: "score", note });
    results.write();
}
