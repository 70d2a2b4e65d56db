//! Generates the page `bench/FIGURES.md`. `bench/figures.toml` describes the measurements and their
//! aims, and `bench/results.json` contains the values.

use crate::results::{self, Row};
use serde::Deserialize;
use std::{
    fmt::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// The entry of a figure in `bench/figures.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Wanted {
    pub name: String,
    pub what: String,
    pub unit: String,
    pub at_most: Option<f64>,
    pub at_least: Option<f64>,
    #[serde(default = "any")]
    pub machine: String,
    #[serde(default)]
    pub elsewhere: String,
    #[serde(default = "nearly_all")]
    pub code: Vec<String>,
}

fn any() -> String {
    "any".into()
}

fn nearly_all() -> Vec<String> {
    ["preload", "src", "wire"].map(Into::into).to_vec()
}

impl Wanted {
    /// Returns whether this value meets the aim, or `None` without an aim.
    pub fn is_met(&self, value: f64) -> Option<bool> {
        match (self.at_most, self.at_least) {
            (Some(most), _) => Some(value <= most),
            (_, Some(least)) => Some(value >= least),
            _ => None,
        }
    }

    pub(crate) fn aim(&self) -> String {
        let aim = |sign: &str, value: Option<f64>| value.map(|value| format!("{sign} {}", digits(value, 4)));
        aim("≤", self.at_most).or_else(|| aim("≥", self.at_least)).unwrap_or_default()
    }
}

/// The contents of both files, and the page with the tables that charts show.
#[derive(Debug)]
pub struct Figures {
    pub wanted: Vec<Wanted>,
    pub rows: Vec<Row>,
    /// The text of `RESULTS.md`.
    pub page: String,
    directory: PathBuf,
}

/// The note in the table if the measured code has changed since the measurement.
pub const OLDER: &str = ", *older*";

/// The name of the figure that is the README's length.
pub const README_LINES: &str = "readme-lines";

/// The text above the table.
const HEAD: &str = "\
# All figures

Made by `cargo run -p bench-support --bin figures` from `figures.toml`, which has the aims, and `results.json`, which benchmarks write.
[RESULTS.md](RESULTS.md) says how each was measured.

The chart has the figures whose aim is not 0, in order of their distance from it. An arrow is a value beyond the scale.

<picture>
<source media=\"(prefers-color-scheme: dark)\" srcset=\"charts/aims-dark.svg\">
<img alt=\"Each measured figure divided by its aim, beside what is known from elsewhere\" src=\"charts/aims.svg\">
</picture>

";

impl Figures {
    /// Reads the files of the project's folder `bench`.
    pub fn read(directory: &Path) -> Self {
        #[derive(Deserialize)]
        struct File {
            figure: Vec<Wanted>,
        }
        let text = |name: &str| {
            let file = directory.join(name);
            std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
        };
        let file: File = toml::from_str(&text("figures.toml")).unwrap_or_else(|e| panic!("figures.toml: {e}"));
        Self {
            wanted: file.figure,
            rows: results::read(&directory.join("results.json")),
            page: text("RESULTS.md"),
            directory: directory.to_owned(),
        }
    }

    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// Returns the text of `FIGURES.md`, with all figures that have an aim or were measured.
    pub fn list(&self) -> String {
        let with_rows = || self.wanted.iter().map(|wanted| (wanted, self.row(&wanted.name)));
        let is_met = |(wanted, row): &(&Wanted, Option<&Row>)| row.and_then(|row| wanted.is_met(row.value));
        let has_aim = |(wanted, _): &(&Wanted, Option<&Row>)| !wanted.aim().is_empty();
        let (missed, met) =
            [false, true].map(|verdict| with_rows().filter(|f| is_met(f) == Some(verdict)).count()).into();
        let missing = with_rows().filter(|f| has_aim(f) && f.1.is_none()).count();
        let mut text = HEAD.to_owned();
        let _ = writeln!(
            text,
            "Of {} figures with an aim, {met} meet it, {missed} fall short, and {missing} are not measured. *Older*: commits have \
             changed the measured code since.\n",
            met + missed + missing
        );
        text += "| figure | what | unit | aim | measured | | commit, date | on | elsewhere |\n";
        text += "|---|---|---|---|---|---|---|---|---|\n";
        for figure @ (wanted, row) in with_rows() {
            let aim = wanted.aim();
            let verdict = match is_met(&figure) {
                Some(true) => "met",
                Some(false) => "**falls short**",
                None if has_aim(&figure) => "**not measured**",
                None => "",
            };
            let measured =
                row.map(|row| format!("[{}](results.json \"{}\")", digits(row.value, 3).replace('-', "−"), row.name));
            let from = row.map(|row| {
                let older = if self.commits_since(row) == Some(0) { "" } else { OLDER };
                format!("{}, {}{older}", row.commit, row.date)
            });
            let from = from.unwrap_or_default();
            if aim.is_empty() && row.is_none() {
                continue;
            }
            let on = row.map_or(&wanted.machine, |row| &row.hardware).split(" (").next().unwrap_or_default();
            let Wanted { name, what, unit, elsewhere, .. } = wanted;
            let measured = measured.unwrap_or_default();
            let _ = writeln!(
                text,
                "| `{name}` | {what} | {unit} | {aim} | {measured} | {verdict} | {from} | {on} | {elsewhere} |"
            );
        }
        text
    }

    /// Returns the number of commits since a row's measurement that changed the measured code.
    /// Returns `None` if git does not know the row's commit.
    pub fn commits_since(&self, row: &Row) -> Option<u32> {
        let wanted = self.wanted.iter().find(|wanted| wanted.name == row.name)?;
        let mut command = Command::new("git");
        command.arg("-C").arg(self.directory.parent()?).args(["rev-list", "--count"]);
        let commits = format!("{}..HEAD", row.commit.trim_end_matches("-dirty"));
        let output = command.arg(commits).arg("--").args(&wanted.code).output().ok()?;
        String::from_utf8(output.stdout).ok()?.trim().parse().ok()
    }
}

/// Formats a number with at most `places` decimal places, and commas between thousands.
pub(crate) fn digits(value: f64, places: usize) -> String {
    let text = format!("{value:.places$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    let (sign, text) = text.strip_prefix('-').map_or(("", text), |text| ("-", text));
    let (whole, part) = text.split_once('.').map_or((text, None), |(whole, part)| (whole, Some(part)));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    part.map_or(format!("{sign}{grouped}"), |part| format!("{sign}{grouped}.{part}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_and_have_thousands_separators() {
        let cases =
            [(0.0, "0"), (0.344, "0.344"), (-0.7411, "-0.741"), (11012.0, "11,012"), (-1234567.5, "-1,234,567.5")];
        for (value, text) in cases {
            assert_eq!(digits(value, 3), text);
        }
    }

    #[test]
    fn aims_are_upper_or_lower_bounds() {
        let wanted =
            |aim: &str| -> Wanted { toml::from_str(&format!("name = ''\nwhat = ''\nunit = ''\n{aim}")).expect("TOML") };
        let (most, least, none) = (wanted("at-most = 0.7"), wanted("at-least = 10_000"), wanted(""));
        assert_eq!([most.is_met(0.7), most.is_met(0.71)], [Some(true), Some(false)]);
        assert_eq!([least.is_met(10_000.0), least.is_met(9_999.0)], [Some(true), Some(false)]);
        assert_eq!((none.is_met(1.0), none.aim()), (None, String::new()));
        assert_eq!((most.aim(), least.aim()), ("≤ 0.7".into(), "≥ 10,000".into()));
    }
}
