//! The charts of `bench/RESULTS.md` and `bench/FIGURES.md`. One chart compares each figure with its
//! aim. The other charts plot tables of `RESULTS.md` that compare several methods. The values come
//! from `figures.toml`, `results.json` and the tables of `RESULTS.md`. Each chart is one SVG file
//! without scripts or fonts, drawn for light and for dark pages.

use crate::figures::{Figures, Wanted, digits};
use std::fmt::Write;

// All lengths are in pixels.
const WIDTH: f64 = 960.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 64.0;
const ROW: f64 = 20.0;
const RADIUS: f64 = 5.0;

/// The styles that both themes share.
const STYLE: &str =
    "text{font:13px sans-serif}.title,.our{font-weight:bold}.range{stroke-width:2}.serial{stroke-dasharray:2 3}";
const LIGHT: &str = ".page{fill:#fff}.ours,.other{stroke:#fff}text{fill:#1f2328}.quiet{fill:#59636e}.grid{stroke:#ddd}\
                     .aim,.serial{stroke:#59636e}.range{stroke:#bbb}.met,.ours,.our{fill:#1a7f37}.short{fill:#bc4c00}\
                     .other{fill:#fff;stroke:#666}.first{fill:#8a94a0}.second{fill:#3271b8}.plain{fill:#b6bdc5}";
const DARK: &str = ".page{fill:#0d1117}.ours,.other{stroke:#0d1117}text{fill:#f0f6fc}.quiet{fill:#9198a1}.grid{stroke:#30363d}\
                    .aim,.serial{stroke:#9198a1}.range{stroke:#484f58}.met,.ours,.our{fill:#3fb950}.short{fill:#f0883e}\
                    .other{fill:#0d1117;stroke:#9198a1}.first{fill:#818b98}.second{fill:#58a6ff}.plain{fill:#565e68}";

/// A chart: the name of its file in `bench/charts`, and its text.
#[derive(Debug)]
pub struct Chart {
    pub name: &'static str,
    pub svg: String,
}

impl Figures {
    /// Draws all charts, each in both themes.
    pub fn charts(&self) -> Vec<Chart> {
        let drawn = [
            ("aims.svg", "aims-dark.svg", self.aims()),
            ("peers.svg", "peers-dark.svg", self.peers()),
            ("pairs.svg", "pairs-dark.svg", self.pairs()),
            ("growth.svg", "growth-dark.svg", self.growth()),
        ];
        let themes = |(light, dark, svg): (_, _, String)| {
            [Chart { name: dark, svg: svg.replace(LIGHT, DARK) }, Chart { name: light, svg }]
        };
        drawn.into_iter().flat_map(themes).collect()
    }

    /// Draws each figure that has an aim, divided by the aim. The figures are sorted by the
    /// distance from the aim.
    fn aims(&self) -> String {
        let mut rows: Vec<(f64, &Wanted, f64)> = self
            .wanted
            .iter()
            .filter_map(|wanted| {
                let value = self.row(&wanted.name)?.value;
                Some((wanted.over_aim(value)?, wanted, value))
            })
            .collect();
        rows.sort_by(|(a, ..), (b, ..)| b.total_cmp(a));
        let mut picture = Picture {
            left: 290.0,
            right: 180.0,
            scale: Scale::Log { from: 0.02, to: 20.0 },
            ..Picture::new("Figures over their aims: up to 1 the aim is met, and further left is better")
        };
        let keys = [("met", "meets its aim"), ("short", "falls short"), ("other", "known from elsewhere")];
        picture.legend(&keys);
        for (over, wanted, value) in &rows {
            let class = if *over <= 1.0 { "met" } else { "short" };
            let shown = |value: f64| format!("{}{}", digits(value, 3).replace('-', "−"), unit(wanted));
            let told = format!("{}, aim {}", shown(*value), wanted.aim());
            picture.label("", &wanted.name);
            for (other, who) in others(&wanted.elsewhere) {
                if let Some(over) = wanted.over_aim(other) {
                    picture.mark("other", RADIUS, over, &format!("{}: {who}", shown(other)));
                }
            }
            picture.mark(class, RADIUS, *over, &told);
            picture.note(&told);
            picture.next(ROW);
        }
        let ticks =
            [0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0].map(|at| (at, format!("{} ×", digits(at, 2))));
        picture.finish(&ticks, Some(1.0))
    }

    /// Draws two programs under each sharing method as bars. Two panels side by side show the two
    /// halves of the table.
    fn peers(&self) -> String {
        const NAMES: f64 = 160.0;
        const PANEL: f64 = (WIDTH - RIGHT - NAMES) / 2.0;
        const VALUES: f64 = 50.0;
        let table = Table::below(&self.page, "How does it compare with other ways to share?");
        let mut picture = Picture {
            scale: Scale::Linear { to: table.values().fold(0.0, f64::max) },
            ..Picture::new("Two programs on one GPU: seconds until both are done")
        };
        let _ = writeln!(
            picture.body,
            r#"<text class="quiet" x="{:.0}" y="22" text-anchor="end">shorter is better; dotted: one after the other</text>"#,
            WIDTH - RIGHT
        );
        let half = table.rows.len().div_ceil(2);
        let height = ROW * (table.columns.len() as f64 + 2.0);
        for (at, (name, cells)) in table.rows.iter().enumerate() {
            picture.left = NAMES + PANEL * (at / half) as f64;
            picture.right = WIDTH - RIGHT - (picture.left + PANEL - VALUES);
            picture.y = ROW * 2.0 + height * (at % half) as f64;
            picture.heading(name.split(" (commit").next().unwrap_or(name));
            if let Some(serial) = cells.first().and_then(|cell| number(cell)) {
                picture.vertical("serial", serial, ROW * table.columns.len() as f64);
            }
            for (way, cell) in table.columns.iter().zip(cells) {
                let is_ours = way == "nvshare";
                if at < half {
                    picture.label(if is_ours { "our" } else { "" }, way);
                }
                picture.bar(if is_ours { "ours" } else { "plain" }, number(cell), cell);
                picture.next(ROW);
            }
        }
        picture.finish(&[], None)
    }

    /// Draws pairs of loops as points, under three ways to run them.
    fn pairs(&self) -> String {
        let table = Table::below(&self.page, "Do loops gain from running at once?");
        // Later points are smaller, so that no point hides another.
        let ways = [("native", "first", 7.0), ("in turns", "second", 5.5), ("auto", "ours", 4.0)];
        let columns = ways.map(|(way, ..)| table.columns.iter().position(|column| column == way).expect("the column"));
        let values = |cells: &[String]| columns.map(|at| number(cells.get(at)?));
        let longest = table.rows.iter().flat_map(|(_, cells)| values(cells)).flatten().fold(0.0, f64::max);
        let mut picture = Picture {
            left: 150.0,
            scale: Scale::Linear { to: longest },
            ..Picture::new("Two loops of about 3 s each at once: seconds until both are done")
        };
        picture.legend(&ways.map(|(way, class, _)| (class, way)));
        for (name, cells) in &table.rows {
            picture.label("", name);
            picture.range(values(cells).into_iter().flatten());
            for ((way, class, radius), value) in ways.into_iter().zip(values(cells)) {
                if let Some(value) = value {
                    picture.mark(class, radius, value, &format!("{way}: {value} s"));
                }
            }
            picture.next(ROW);
        }
        picture.finish(&picture.scale.ticks(" s"), None)
    }

    /// Draws how costs grow with the number of clients: each cost relative to its value with the
    /// fewest clients.
    fn growth(&self) -> String {
        let table = Table::below(&self.page, "How do costs grow with the number of clients?");
        let clients: Vec<f64> = table.columns.iter().filter_map(|column| number(column)).collect();
        let classes = ["plain", "first", "second", "ours"];
        let mut picture = Picture {
            left: 260.0,
            scale: Scale::Log { from: 0.5, to: 20_000.0 },
            ..Picture::new("Costs of the scheduler by the number of clients, relative to 10 clients")
        };
        let keys: Vec<_> = classes.into_iter().zip(table.columns.iter().map(String::as_str)).collect();
        picture.legend(&keys);
        let n_log_n =
            ("n log n".to_owned(), clients.iter().map(|n| n * n.log2()).map(|cost| cost.to_string()).collect());
        for (name, cells) in std::iter::once(&n_log_n).chain(&table.rows) {
            let values: Vec<f64> = cells.iter().filter_map(|cell| number(cell)).collect();
            let growth = |value: f64| value / values[0];
            picture.label("", name);
            picture.range(values.iter().copied().map(growth));
            for ((class, value), column) in classes.into_iter().zip(&values).zip(&table.columns) {
                picture.mark(class, RADIUS, growth(*value), &format!("{column}: {} ×", digits(growth(*value), 2)));
            }
            picture.next(ROW);
        }
        let ticks = [1.0, 10.0, 100.0, 1_000.0, 10_000.0].map(|at| (at, format!("{} ×", digits(at, 2))));
        picture.finish(&ticks, Some(1.0))
    }
}

impl Wanted {
    /// Returns the value divided by the aim, or the inverse if larger values are better. The result
    /// is at most 1 if the aim is met. Returns `None` if there is no aim or the aim is 0.
    fn over_aim(&self, value: f64) -> Option<f64> {
        match (self.at_most, self.at_least) {
            (Some(most), _) if most > 0.0 => Some(value / most),
            (_, Some(least)) if value > 0.0 => Some(least / value),
            _ => None,
        }
    }
}

/// Returns the short unit of a figure. The short unit is empty for a ratio or a count, and for a
/// long unit, which only the table shows.
fn unit(wanted: &Wanted) -> String {
    match wanted.unit.as_str() {
        "percent" => " %".into(),
        "us" => " µs".into(),
        "ratio" | "count" | "score" => String::new(),
        unit if unit.contains('/') && unit.len() > 8 => String::new(),
        unit => format!(" {unit}"),
    }
}

/// Returns the numbers and their sources in a text such as `21.2 (the original), 17 to 20
/// (HAMi-core)`. For a range, returns both ends. Numbers without a source were not measured, and
/// are skipped.
fn others(text: &str) -> Vec<(f64, String)> {
    // Each part of the text ends with its source in brackets.
    let found = text.split(')').filter_map(|part| {
        let (numbers, who) = part.split_once(" (")?;
        let numbers = numbers.rsplit("; ").flat_map(|part| part.rsplit(", ")).next()?;
        let numbers = numbers.strip_prefix("about ").unwrap_or(numbers).split(" to ");
        let values: Option<Vec<f64>> = numbers.map(|number| number.replace(',', "").parse().ok()).collect();
        Some(values?.into_iter().map(|value| (value, who.to_owned())).collect::<Vec<_>>())
    });
    found.flatten().collect()
}

/// Returns the number at the beginning of a table's cell, without markup: `8.1`,
/// `[1.02](results.json "name")`.
fn number(cell: &str) -> Option<f64> {
    let plain = cell.trim_start_matches(['[', '*']).replace(',', "");
    let end = plain.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(plain.len());
    plain[..end].parse().ok()
}

/// A table of the page.
#[derive(Debug)]
struct Table {
    /// The headings without markup, and without the heading of the rows' names.
    columns: Vec<String>,
    rows: Vec<(String, Vec<String>)>,
}

impl Table {
    /// Finds the first table below a heading that begins with `heading`.
    fn below(page: &str, heading: &str) -> Self {
        let (_, section) =
            page.split_once(&format!("\n## {heading}")).unwrap_or_else(|| panic!("RESULTS.md lacks {heading:?}"));
        let lines = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
        let mut rows = lines.map(|line| {
            let mut cells = line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', ""));
            (cells.next().unwrap_or_default(), cells.collect::<Vec<_>>())
        });
        let (_, columns) = rows.next().unwrap_or_else(|| panic!("RESULTS.md has no table below {heading:?}"));
        Self { columns, rows: rows.skip(1).collect() }
    }

    fn values(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().flat_map(|(_, cells)| cells).filter_map(|cell| number(cell))
    }
}

/// Maps values to positions.
#[derive(Debug, Clone, Copy)]
enum Scale {
    /// A linear scale that starts at 0.
    Linear {
        to: f64,
    },
    Log {
        from: f64,
        to: f64,
    },
}

impl Scale {
    /// Returns the position of a value, clamped to the range 0 to 1.
    fn at(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear { to } => value / to,
            Self::Log { from, to } => (value.max(f64::MIN_POSITIVE) / from).ln() / (to / from).ln(),
        };
        place.clamp(0.0, 1.0)
    }

    /// True if a value is within the scale.
    fn has(self, value: f64) -> bool {
        match self {
            Self::Linear { to } => value <= to,
            Self::Log { from, to } => (from..=to).contains(&value),
        }
    }

    /// Returns round values from 0 on. The step is one, two or five times a power of ten.
    fn ticks(self, unit: &str) -> Vec<(f64, String)> {
        let (Self::Linear { to } | Self::Log { to, .. }) = self;
        let power = 10f64.powf((to / 10.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| to / step <= 10.0);
        let step = step.unwrap_or(to);
        let count = (to / step) as u32;
        (0..=count).map(|n| (f64::from(n) * step, format!("{}{unit}", digits(f64::from(n) * step, 2)))).collect()
    }
}

/// A picture that is drawn row by row.
#[derive(Debug)]
struct Picture {
    title: String,
    /// Width of the space for the rows' names, and of the space for notes after the rows.
    left: f64,
    right: f64,
    scale: Scale,
    body: String,
    y: f64,
}

impl Picture {
    fn new(title: &str) -> Self {
        let (title, scale) = (title.to_owned(), Scale::Linear { to: 1.0 });
        Self { title, left: 200.0, right: 0.0, scale, body: String::new(), y: TOP }
    }

    fn x(&self, value: f64) -> f64 {
        self.left + self.scale.at(value) * (WIDTH - RIGHT - self.right - self.left)
    }

    /// Draws the legend of the marks' classes.
    fn legend(&mut self, keys: &[(&str, &str)]) {
        let mut x = 14.0;
        for (class, text) in keys {
            let _ = writeln!(
                self.body,
                r#"<circle class="{class}" cx="{x:.0}" cy="44" r="{RADIUS:.0}"/><text x="{:.0}" y="48">{text}</text>"#,
                x + 10.0
            );
            x += 30.0 + 7.0 * text.len() as f64;
        }
    }

    fn next(&mut self, height: f64) {
        self.y += height;
    }

    fn heading(&mut self, text: &str) {
        self.next(8.0);
        let (x, y) = (self.left, self.y + 14.0);
        let _ = writeln!(self.body, r#"<text class="title" x="{x:.0}" y="{y:.0}">{}</text>"#, escaped(text));
        self.next(ROW);
    }

    fn label(&mut self, class: &str, text: &str) {
        let (x, y) = (self.left - 12.0, self.y + 14.0);
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" x="{x:.0}" y="{y:.0}" text-anchor="end">{}</text>"#,
            escaped(text)
        );
    }

    /// Draws a vertical line at a value, from the current row down.
    fn vertical(&mut self, class: &str, value: f64, height: f64) {
        let (x, y) = (self.x(value), self.y);
        let _ = writeln!(self.body, r#"<path class="{class}" d="M{x:.1} {y:.0}v{height:.0}"/>"#);
    }

    /// A note after the row.
    fn note(&mut self, text: &str) {
        let (x, y) = (WIDTH - RIGHT - self.right + 12.0, self.y + 14.0);
        let _ = writeln!(self.body, r#"<text class="quiet" x="{x:.0}" y="{y:.0}">{}</text>"#, escaped(text));
    }

    /// Draws a point. If the value is outside the scale, draws an arrow at the end of the scale.
    fn mark(&mut self, class: &str, radius: f64, value: f64, told: &str) {
        let (x, y, told) = (self.x(value), self.y + 10.0, escaped(told));
        if self.scale.has(value) {
            let _ = writeln!(
                self.body,
                r#"<circle class="{class}" cx="{x:.1}" cy="{y:.0}" r="{radius:.1}"><title>{told}</title></circle>"#
            );
            return;
        }
        let from = if self.scale.at(value) > 0.5 { -8.0 } else { 8.0 };
        let _ = writeln!(
            self.body,
            r#"<path class="{class}" d="M{:.1} {:.0}V{:.0}L{x:.1} {y:.0}Z"><title>{told}</title></path>"#,
            x + from,
            y - radius,
            y + radius
        );
    }

    /// Draws a line from the smallest to the largest value.
    fn range(&mut self, values: impl Iterator<Item = f64> + Clone) {
        let (least, most) = (values.clone().fold(f64::MAX, f64::min), values.fold(0.0, f64::max));
        let (from, to, y) = (self.x(least), self.x(most), self.y + 10.0);
        let _ = writeln!(self.body, r#"<path class="range" d="M{from:.1} {y:.0}H{to:.1}"/>"#);
    }

    /// Draws a bar from 0, followed by its text. Without a value, draws only the text. No line
    /// crosses the text.
    fn bar(&mut self, class: &str, value: Option<f64>, text: &str) {
        let (left, y) = (self.left, self.y);
        let width = value.map_or(0.0, |value| self.x(value) - left);
        let mut rectangle = |class, x, width| {
            let (y, height) = (y + 3.0, ROW - 6.0);
            let _ = writeln!(
                self.body,
                r#"<rect class="{class}" x="{x:.1}" y="{y:.0}" width="{width:.1}" height="{height:.0}"/>"#
            );
        };
        rectangle("page", left + width + 2.0, 8.0 * text.len() as f64 + 4.0);
        if value.is_some() {
            rectangle(class, left, width);
        }
        let class = match value {
            Some(_) => "",
            None if text == "out of memory" => "short",
            None => "quiet",
        };
        let (x, y) = (left + width + 6.0, y + 14.0);
        let _ = writeln!(self.body, r#"<text class="{class}" x="{x:.1}" y="{y:.0}">{}</text>"#, escaped(text));
    }

    /// Returns the complete picture, with lines at the ticks and the aim.
    fn finish(&self, ticks: &[(f64, String)], aim: Option<f64>) -> String {
        let (bottom, mut out) = (self.y + 6.0, String::new());
        let height = bottom + 26.0;
        let title = escaped(&self.title);
        let _ = writeln!(
            out,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0}" height="{height:.0}" viewBox="0 0 {WIDTH:.0} {height:.0}" role="img">"#
        );
        let _ = writeln!(out, "<title>{title}</title>\n<style>{STYLE}{LIGHT}</style>");
        let _ = writeln!(out, r#"<rect class="page" width="100%" height="100%"/>"#);
        let _ = writeln!(out, r#"<text class="title" x="8" y="22">{title}</text>"#);
        for (value, text) in ticks {
            let x = self.x(*value);
            let class = if aim == Some(*value) { "aim" } else { "grid" };
            let _ = writeln!(
                out,
                r#"<path class="{class}" d="M{x:.1} {:.0}V{bottom:.0}"/><text class="quiet" x="{x:.1}" y="{:.0}" text-anchor="middle">{text}</text>"#,
                TOP - 4.0,
                bottom + 16.0
            );
        }
        out + &self.body + "</svg>\n"
    }
}

/// Escapes text for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_without_a_source_are_ignored() {
        let of = |text: &str| others(text).into_iter().map(|(value, who)| format!("{value} {who}")).collect::<Vec<_>>();
        assert_eq!(
            of("16.0 (no scheduler), 21.2 (the original); 10 is possible"),
            ["16 no scheduler", "21.2 the original"]
        );
        assert_eq!(of("17.5 to 20.7 (HAMi-core)"), ["17.5 HAMi-core", "20.7 HAMi-core"]);
        assert_eq!(of("47 is what the link gives"), [""; 0]);
        assert_eq!(
            of("0.344 (copies), 0.30 is what the link allows, about 2 (the original)"),
            ["0.344 copies", "2 the original"]
        );
        assert_eq!(
            of("1 to 2 (the original, P100), 0.33 for 7.9 GiB (native)"),
            ["1 the original, P100", "2 the original, P100"]
        );
        assert_eq!(of("91,714 (the original)"), ["91714 the original"]);
    }

    #[test]
    fn a_table_is_found_by_its_heading() {
        let page = "\n## A\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n## How? (H100)\n\ntext\n\n| | `a` | b |\n|---|---|---|\n| one | 1,000.5 | [2](results.json \"r\") |\n| two | out of memory | |\n";
        let table = Table::below(page, "How?");
        assert_eq!(table.columns, ["a", "b"]);
        assert_eq!(table.rows[1], ("two".to_owned(), vec!["out of memory".to_owned(), String::new()]));
        assert_eq!(table.values().collect::<Vec<_>>(), [1000.5, 2.0]);
    }

    #[test]
    fn ticks_are_round_numbers_up_to_the_end() {
        let last = |to: f64| Scale::Linear { to }.ticks("").last().map(|(at, _)| *at);
        assert_eq!([last(9.64), last(14.9), last(100.0)], [Some(9.0), Some(14.0), Some(100.0)]);
    }

    #[test]
    fn values_outside_the_scale_are_clamped() {
        let scale = Scale::Log { from: 0.1, to: 10.0 };
        assert_eq!([scale.at(0.001), scale.at(1.0), scale.at(99.0)], [0.0, 0.5, 1.0]);
        assert!(scale.has(0.1) && !scale.has(-1.0) && !scale.has(99.0));
    }
}
