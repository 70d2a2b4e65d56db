//! Writes `bench/FIGURES.md` from the figures of `bench/results.json` and their aims, draws the charts, and prints which figures were
//! measured before their code was changed.
//!
//! `cargo run -p bench-support --bin figures`

use bench_support::{charts::Chart, figures::Figures};
use std::path::Path;

fn main() {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder bench");
    let figures = Figures::read(bench);
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

/// Leaves a file alone that is as it should be.
fn write(file: &Path, text: &str) {
    if std::fs::read_to_string(file).ok().as_deref() != Some(text) {
        std::fs::write(file, text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        println!("{} is new", file.display());
    }
}
