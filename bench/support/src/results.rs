//! Figures for programs: `bench/results.json`, a list of `{"name", "value", "unit", "hardware", "date", "commit", "note"}`.
//! A figure that is measured again replaces the one of that name.

use serde_json::{Value, json};
use std::{path::PathBuf, process::Command};

#[derive(Debug)]
pub struct Figure {
    pub name: &'static str,
    pub value: f64,
    pub unit: &'static str,
    pub note: String,
}

#[derive(Debug)]
pub struct Results {
    file: Option<PathBuf>,
    figures: Vec<Figure>,
}

impl Results {
    /// `--json FILE` names the file; without it nothing is written.
    pub fn from_arguments() -> Self {
        let file = std::env::args_os().skip_while(|a| a != "--json").nth(1).map(PathBuf::from);
        Self { file, figures: Vec::new() }
    }

    pub fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
    }

    pub fn write(self) {
        let Some(file) = self.file else { return };
        let mut all: Vec<Value> = match std::fs::read_to_string(&file) {
            Ok(text) => serde_json::from_str(&text).expect("a list of figures"),
            Err(_) => Vec::new(),
        };
        let (hardware, date) = (hardware(), said_by("date", &["-u", "+%F"]));
        let commit = checked_out();
        for Figure { name, value, unit, note } in self.figures {
            all.retain(|f| f["name"] != name);
            let value = (value * 1e4).round() / 1e4;
            all.push(json!({
                "name": name, "value": value, "unit": unit, "hardware": hardware, "date": date, "commit": commit, "note": note,
            }));
        }
        all.sort_by(|a, b| a["name"].as_str().cmp(&b["name"].as_str()));
        let lines: Vec<String> = all.iter().map(|f| format!("  {f}")).collect();
        std::fs::write(&file, format!("[\n{}\n]\n", lines.join(",\n"))).expect("the file can be written");
    }
}

/// The processor, as the kernel names it, and how many of them.
fn hardware() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map_or("CPU", |l| l.trim_start_matches([' ', '\t', ':']));
    format!("{} × {model}", std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// The commit, with `-dirty` where files that git tracks differ from it, the results aside: then it is not what was measured.
fn checked_out() -> String {
    let commit = said_by("git", &["rev-parse", "--short", "HEAD"]);
    let others = ["diff", "--quiet", "HEAD", "--", ":/", ":!/bench/results.json", ":!/bench/RESULTS.md"];
    let differs = Command::new("git").args(others).status().is_ok_and(|status| !status.success());
    if differs { commit + "-dirty" } else { commit }
}

fn said_by(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    output.map_or("unknown".into(), |o| String::from_utf8_lossy(&o.stdout).trim().to_owned())
}
