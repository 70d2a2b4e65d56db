//! Figures in a machine-readable form. `bench/results.json` is a list of [`Row`]s. A new
//! measurement replaces the figure of the same name.

use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    process::Command,
};

#[derive(Debug)]
pub struct Figure {
    /// The figure's name in `bench/figures.toml`.
    pub name: &'static str,
    pub value: f64,
    pub unit: &'static str,
    pub note: String,
}

/// A figure and its origin. The fields are in the order of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The measured commit, with `-dirty` if there were uncommitted changes.
    pub commit: String,
    pub date: String,
    pub hardware: String,
    pub name: String,
    pub note: String,
    pub unit: String,
    pub value: f64,
}

#[derive(Debug)]
pub struct Results {
    file: Option<PathBuf>,
    figures: Vec<Figure>,
}

impl Results {
    /// Reads the file's name from `--json FILE`. Without the option, no file is written.
    pub fn from_arguments() -> Self {
        let file = std::env::args_os().skip_while(|a| a != "--json").nth(1).map(PathBuf::from);
        Self { file, figures: Vec::new() }
    }

    pub fn new(file: PathBuf) -> Self {
        Self { file: Some(file), figures: Vec::new() }
    }

    pub fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    pub fn write(self) {
        let Some(file) = self.file else { return };
        let mut rows = if file.exists() { read(&file) } else { Vec::new() };
        let (hardware, date) = (hardware(), said_by("date", &["-u", "+%F"]));
        let commit = checked_out();
        for Figure { name, value, unit, note } in self.figures {
            rows.retain(|row| row.name != name);
            rows.push(Row {
                commit: commit.clone(),
                date: date.clone(),
                hardware: hardware.clone(),
                name: name.into(),
                note,
                unit: unit.into(),
                value: (value * 1e4).round() / 1e4,
            });
        }
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        let line = |row| format!("  {}", serde_json::to_string(row).expect("numbers are finite"));
        let lines: Vec<String> = rows.iter().map(line).collect();
        std::fs::write(&file, format!("[\n{}\n]\n", lines.join(",\n"))).expect("the file can be written");
    }
}

/// Reads the rows of a results file.
pub fn read(file: &Path) -> Vec<Row> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{} is not a list of figures: {e}", file.display()))
}

/// The machine's load average of the last minute, for notes.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!("load average {}", text.split(' ').next().unwrap_or("unknown"))
}

/// The processor's name and the number of processors.
fn hardware() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map_or("CPU", |l| l.trim_start_matches([' ', '\t', ':']));
    format!("{} × {model}", std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// Returns the commit, with `-dirty` if tracked files other than the results differ from the
/// commit.
fn checked_out() -> String {
    let commit = said_by("git", &["rev-parse", "--short", "HEAD"]);
    let others = ["diff", "--quiet", "HEAD", "--", ":/", ":!/bench/results.json", ":!/bench/*.md"];
    let differs = Command::new("git").args(others).status().is_ok_and(|status| !status.success());
    if differs { commit + "-dirty" } else { commit }
}

fn said_by(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or("unknown".into(), |o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
}
