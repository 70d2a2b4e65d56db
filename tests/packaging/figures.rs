//! `bench/RESULTS.md` against `bench/results.json`, which benchmarks write.
//!
//! The page links each figure that it takes from there, with the name of its row as the link's title:
//! `[48.6 µs](results.json "handover-daemon-p50")`.

use std::collections::BTreeMap;

const PAGE: &str = include_str!("../../bench/RESULTS.md");
const FIGURES: &str = include_str!("../../bench/results.json");

/// The number that a text starts with, and how many decimal places it shows.
fn number(text: &str) -> (f64, usize) {
    let plain = text.replace('−', "-").replace(',', "");
    let end = plain.find(|c: char| !(c.is_ascii_digit() || c == '-' || c == '.')).unwrap_or(plain.len());
    let places = plain[..end].split_once('.').map_or(0, |(_, places)| places.len());
    (plain[..end].parse().unwrap_or_else(|e| panic!("{text:?} does not start with a number: {e}")), places)
}

/// The text and the row's name of each linked figure.
fn linked() -> Vec<(&'static str, &'static str)> {
    let before_names = PAGE.match_indices("](results.json \"");
    let figure = |(at, link): (usize, &str)| {
        let shown = &PAGE[PAGE[..at].rfind('[').expect("the link's text") + 1..at];
        (shown, PAGE[at + link.len()..].split('"').next().expect("the row's name"))
    };
    before_names.map(figure).collect()
}

#[test]
fn results_md_has_the_figures_of_results_json() {
    let rows: Vec<serde_json::Value> = serde_json::from_str(FIGURES).expect("a list of figures");
    let value = |row: &serde_json::Value| row["value"].as_f64().expect("a value");
    let values: BTreeMap<&str, f64> =
        rows.iter().map(|row| (row["name"].as_str().expect("a name"), value(row))).collect();
    let linked = linked();
    for (shown, name) in &linked {
        let value = values.get(name).unwrap_or_else(|| panic!("results.json has no row {name:?}"));
        let (number, places) = number(shown);
        // Half of the last place shown, and a little for what binary fractions cannot express.
        let tolerance = 0.5 / 10f64.powi(places as i32) + 1e-9;
        assert!((number - value).abs() <= tolerance, "{name} is {shown} in RESULTS.md and {value} in results.json");
    }
    for name in values.keys() {
        assert!(linked.iter().any(|(_, n)| n == name), "RESULTS.md does not show {name}");
    }
}
