//! Compares the pages that show figures with `bench/results.json` and `bench/figures.toml`.
//! Benchmarks write the first file. The second file has the aims.
//!
//! A page links each figure to the first file. The link's title is the name of the figure's row:
//! `[48.6 µs](results.json "handover-daemon-p50")`.

use bench_support::{
    charts::Chart,
    figures::{Figures, OLDER, README_LINES},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

const README: &str = include_str!("../../README.md");
const RESULTS: &str = include_str!("../../bench/RESULTS.md");
const LIST: &str = include_str!("../../bench/FIGURES.md");

/// Returns the number at the start of a text, and how many decimal places the number shows.
fn number(text: &str) -> (f64, usize) {
    let plain = text.replace('−', "-").replace(',', "");
    let end = plain.find(|c: char| !(c.is_ascii_digit() || c == '-' || c == '.')).unwrap_or(plain.len());
    let places = plain[..end].split_once('.').map_or(0, |(_, places)| places.len());
    (plain[..end].parse().unwrap_or_else(|e| panic!("{text:?} does not start with a number: {e}")), places)
}

/// Returns each figure that a page links, as its text and the name of its row.
fn linked(page: &str) -> Vec<(&str, &str)> {
    let before_names = page.match_indices("results.json \"");
    let figure = |(at, link): (usize, &str)| {
        let end = page[..at].rfind("](").expect("a link");
        let shown = &page[page[..end].rfind('[').expect("the link's text") + 1..end];
        (shown, page[at + link.len()..].split('"').next().expect("the row's name"))
    };
    before_names.map(figure).collect()
}

fn figures() -> Figures {
    Figures::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("bench"))
}

/// git determines which measurements are older than their code. There may be none.
#[test]
fn figures_md_lists_all_figures_and_aims() {
    let undated = |page: &str| page.replace(OLDER, "");
    assert!(
        undated(LIST) == undated(&figures().list()),
        "FIGURES.md differs from results.json and figures.toml: cargo run -p bench-support --bin figures"
    );
}

#[test]
fn charts_show_the_values_of_the_tables() {
    let charts = figures().charts();
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/charts");
    let files = std::fs::read_dir(&directory).expect("the charts").map(|file| file.expect("a chart").file_name());
    let names = charts.iter().map(|chart| chart.name.into());
    assert_eq!(files.collect::<BTreeSet<_>>(), names.collect::<BTreeSet<_>>());
    for Chart { name, svg } in charts {
        let file = std::fs::read_to_string(directory.join(name)).expect("a chart");
        assert!(file == svg, "bench/charts/{name} differs from the tables: cargo run -p bench-support --bin figures");
        roxmltree::Document::parse(&svg).unwrap_or_else(|e| panic!("{name} is not XML: {e}"));
        let link = format!("\"charts/{name}\"");
        assert!([RESULTS, LIST].iter().any(|page| page.contains(&link)), "neither page shows {name}");
    }
}

#[test]
fn every_result_is_described_in_figures_toml() {
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

/// Returns the text of all files of a directory with these extensions.
fn sources(directory: &str, extensions: &[&str]) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let files = std::fs::read_dir(directory).expect("a directory").map(|file| file.expect("a file").path());
    let is_source = |path: &PathBuf| path.extension().is_some_and(|own| extensions.iter().any(|one| own == *one));
    files.filter(is_source).map(|path| std::fs::read_to_string(path).expect("a text")).collect()
}

/// A figure that no script measures could not be measured again.
#[test]
fn each_figure_is_measured_by_a_script_for_all_figures() {
    let card = include_str!("../../bench/gpu/all.py");
    let elsewhere = sources("bench", &["rs", "sh"]) + &sources("bench/gpu", &["py"]);
    for wanted in figures().wanted.iter().filter(|wanted| wanted.name != README_LINES) {
        // peers.py derives the names of its figures from the cases.
        let name = format!("\"{}\"", wanted.name.trim_start_matches("peers-"));
        let needs_card = wanted.machine.contains("H200") || wanted.name.starts_with("peers-");
        let (file, text) = if needs_card { ("bench/gpu/all.py", card) } else { ("bench", elsewhere.as_str()) };
        assert!(text.contains(&name) || text.contains(&format!(" {} ", wanted.name)), "{file} lacks {}", wanted.name);
    }
}

#[test]
fn pages_have_the_values_of_results_json() {
    let rows = figures().rows;
    let values: BTreeMap<&str, f64> = rows.iter().map(|row| (row.name.as_str(), row.value)).collect();
    for (page, text) in [("README.md", README), ("RESULTS.md", RESULTS), ("FIGURES.md", LIST)] {
        let linked = linked(text);
        assert!(!linked.is_empty(), "{page} links no figure");
        for (shown, name) in linked {
            let value = values.get(name).unwrap_or_else(|| panic!("{page}: results.json has no row {name:?}"));
            let (number, places) = number(shown);
            // The tolerance is half of the last decimal place, plus an allowance for rounding in
            // binary fractions.
            let tolerance = 0.5 / 10f64.powi(places as i32) + 1e-9;
            assert!((number - value).abs() <= tolerance, "{page}: {name} is {shown}, and {value} in results.json");
        }
    }
    for name in values.keys() {
        assert!(linked(LIST).iter().any(|(_, n)| n == name), "FIGURES.md does not show {name}");
    }
}

#[test]
fn results_md_lists_every_missed_aim() {
    let figures = figures();
    let (_, rest) = RESULTS.split_once("\n## What falls short\n").expect("the section");
    let told: BTreeSet<&str> =
        linked(rest.split("\n## ").next().unwrap_or_default()).into_iter().map(|l| l.1).collect();
    for row in &figures.rows {
        let wanted = figures.wanted.iter().find(|wanted| wanted.name == row.name).expect("its aim");
        match wanted.is_met(row.value) {
            Some(false) => {
                assert!(told.contains(&*row.name), "{} misses its aim, and RESULTS.md does not say so", row.name)
            }
            Some(true) => assert!(!told.contains(&*row.name), "{} meets its aim, and RESULTS.md denies it", row.name),
            None => {}
        }
    }
}

#[test]
fn the_readme_length_in_results_json_is_current() {
    let lines = README.lines().count() as f64;
    let row = figures().rows.into_iter().find(|row| row.name == README_LINES).expect("its row");
    assert_eq!(row.value, lines, "the README has another length now: cargo run -p bench-support --bin figures");
}
