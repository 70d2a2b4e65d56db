//! Puts the figures of `bench/results.json` and their aims into the first table of `bench/RESULTS.md`, draws the charts of that page,
//! and prints which figures were measured before their code was changed.
//!
//! `cargo run -p bench-support --bin figures`

use bench_support::{charts::Chart, figures::Figures};
use std::path::Path;

fn main() {
    let bench = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder bench");
    let figures = Figures::read(bench);
    let page = figures.page_with_table();
    if page != figures.page {
        std::fs::write(bench.join("RESULTS.md"), page).expect("RESULTS.md can be written");
        println!("RESULTS.md has a new table");
    }
    for Chart { name, svg } in figures.charts() {
        let file = bench.join("charts").join(name);
        if std::fs::read_to_string(&file).ok().as_ref() != Some(&svg) {
            std::fs::write(&file, svg).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
            println!("{} is new", file.display());
        }
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
