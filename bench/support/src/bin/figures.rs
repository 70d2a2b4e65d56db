//! Writes `bench/FIGURES.md` from the figures of `bench/results.json` and their aims, draws the
//! charts, and lists the figures whose code has changed since they were measured. The program also
//! measures one figure itself, the length of the README.
//!
//! `cargo run -p bench-support --bin figures`

use bench_support::{
    charts::Chart,
    figures::{Figures, README_LINES},
    results::{Figure, Results},
};
use std::path::Path;

fn main() {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder bench");
    let figures = with_readme(bench, Figures::read(bench));
    write(&bench.join("FIGURES.md"), &figures.list());
    for Chart { name, svg } in figures.charts() {
        write(&bench.join("charts").join(name), &svg);
    }
    for row in &figures.rows {
        let age = match figures.commits_since(row) {
            Some(0) => "the code is the same today".into(),
            Some(n) => format!("{n} commits have changed the code since"),
            None => "git does not know that commit".into(),
        };
        println!("{:<40} {:<14} {age}", row.name, row.commit);
    }
}

/// Updates the figure of the README if its length has changed.
fn with_readme(bench: &Path, figures: Figures) -> Figures {
    let readme = std::fs::read_to_string(bench.with_file_name("README.md")).expect("README.md can be read");
    let lines = readme.lines().count() as f64;
    if figures.row(README_LINES).is_some_and(|row| row.value == lines) {
        return figures;
    }
    let mut results = Results::new(bench.join("results.json"));
    results.add(Figure { name: README_LINES, value: lines, unit: "count", note: "lines of README.md".into() });
    results.write();
    Figures::read(bench)
}

/// Writes a file unless it already has this text.
fn write(file: &Path, text: &str) {
    if std::fs::read_to_string(file).ok().as_deref() != Some(text) {
        std::fs::write(file, text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        println!("{} is new", file.display());
    }
}
