//! `bench/RESULTS.md` against `bench/results.json`, which benchmarks write, and `bench/figures.toml`, which says what is aimed at.
//!
//! The page links each figure that it takes from there, with the name of its row as the link's title:
//! `[48.6 µs](results.json "handover-daemon-p50")`.

use bench_support::{
    charts::Chart,
    figures::{Figures, OLDER},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

const PAGE: &str = include_str!("../../bench/RESULTS.md");

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

fn figures() -> Figures {
    Figures::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("bench"))
}

/// What was old when the table was made is a question to git, and there may be none.
#[test]
fn results_md_begins_with_all_figures_and_aims() {
    let figures = figures();
    let undated = |page: &str| page.replace(OLDER, "");
    assert!(
        undated(&figures.page) == undated(&figures.page_with_table()),
        "the table in RESULTS.md is not of results.json and figures.toml: cargo run -p bench-support --bin figures"
    );
}

#[test]
fn the_charts_of_results_md_show_what_its_tables_say() {
    let charts = figures().charts();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/charts");
    let files = std::fs::read_dir(&directory).expect("the charts").map(|file| file.expect("a chart").file_name());
    let names = charts.iter().map(|chart| chart.name.into());
    assert_eq!(files.collect::<BTreeSet<_>>(), names.collect::<BTreeSet<_>>());
    for Chart { name, svg } in charts {
        let file = std::fs::read_to_string(directory.join(name)).expect("a chart");
        assert!(file == svg, "bench/charts/{name} is not of these tables: cargo run -p bench-support --bin figures");
        roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{name} is no XML: {e}"));
        assert!(PAGE.contains(&format!("](charts/{name})")), "RESULTS.md does not show {name}");
    }
}

#[test]
fn every_row_is_a_figure_that_figures_toml_describes() {
    let Figures { wanted, rows, .. } = figures();
    let units: BTreeMap<&str, &str> = wanted.iter().map(|w| (w.name.as_str(), w.unit.as_str())).collect();
    assert_eq!(units.len(), wanted.len(), "figures.toml has a figure twice");
    assert_eq!(
        rows.iter().map(|row| &row.name).collect::<BTreeSet<_>>().len(),
        rows.len(),
        "results.json has a row twice"
    );
    for row in &rows {
        let unit = units.get(row.name.as_str()).unwrap_or_else(|| panic!("figures.toml has no figure {:?}", row.name));
        assert_eq!(row.unit, *unit, "the unit of {}", row.name);
        let is_date = row.date.len() == 10 && row.date.split('-').all(|part| part.parse::<u32>().is_ok());
        let is_commit = row.commit.trim_end_matches("-dirty").chars().all(|c| c.is_ascii_hexdigit());
        assert!(is_date && is_commit && !row.hardware.is_empty(), "where {} comes from: {row:?}", row.name);
    }
    for wanted in &wanted {
        assert!(!(wanted.at_most.is_some() && wanted.at_least.is_some()), "{} has two aims", wanted.name);
        for code in &wanted.code {
            let place = Path::new(env!("CARGO_MANIFEST_DIR")).join(code);
            assert!(place.exists(), "the code of {} is not at {code}", wanted.name);
        }
    }
}

#[test]
fn results_md_has_the_figures_of_results_json() {
    let rows = figures().rows;
    let values: BTreeMap<&str, f64> = rows.iter().map(|row| (row.name.as_str(), row.value)).collect();
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
