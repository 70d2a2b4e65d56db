//! The charts beside the tables of `bench/RESULTS.md`: how far each figure is from its aim and from what is known of others, and tables
//! that compare several ways of doing the same. What they show is read from `figures.toml`, `results.json` and the page's own tables, so
//! they say nothing else than these. Each is a picture that stands alone, without scripts or fonts.

use crate::figures::{Figures, Wanted, digits};
use std::fmt::Write;

// All lengths are pixels.
const WIDTH: f64 = 960.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 64.0;
const ROW: f64 = 20.0;
const RADIUS: f64 = 5.0;

const STYLE: &str = "text{font:12px sans-serif;fill:#222}.title{font-weight:bold}.quiet{fill:#666}.grid{stroke:#ddd}.aim{stroke:#222}\
                     .range{stroke:#bbb;stroke-width:2}.met{fill:#2e7d4f}.ours{fill:#2e7d4f;stroke:#fff}.short{fill:#cf5b2e}.other{fill:#fff;stroke:#666}\
                     .first{fill:#8a94a0}.second{fill:#3271b8}.plain{fill:#c4c8ce}";

/// A chart: the name of its file in `bench/charts`, and what is in it.
#[derive(Debug)]
pub struct Chart {
    pub name: &'static str,
    pub svg: String,
}

impl Figures {
    /// All charts, as they are to be.
    pub fn charts(&self) -> Vec<Chart> {
        let chart = |name, svg| Chart { name, svg };
        vec![chart("aims.svg", self.aims()), chart("peers.svg", self.peers()), chart("pairs.svg", self.pairs())]
    }

    /// Each figure that has an aim, over that aim; those that are furthest from it first.
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
            picture.label(&wanted.name);
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

    /// Programs that share a GPU in several ways, as bars.
    fn peers(&self) -> String {
        let table = Table::below(&self.page, "How does it compare with other ways to share?");
        let longest = table.values().fold(0.0, f64::max);
        let mut picture = Picture {
            left: 170.0,
            right: 60.0,
            scale: Scale::Linear { to: longest },
            ..Picture::new("Two programs in 17 GiB: seconds until both are done")
        };
        picture.legend(&[("ours", "nvshare"), ("plain", "other ways")]);
        for (name, cells) in &table.rows {
            picture.heading(name.split(" (commit").next().unwrap_or(name));
            for (way, cell) in table.columns.iter().zip(cells) {
                picture.label(way);
                let class = if way == "nvshare" { "ours" } else { "plain" };
                picture.bar(class, number(cell), cell);
                picture.next(ROW);
            }
        }
        picture.finish(&picture.scale.ticks(" s"), None)
    }

    /// Pairs of loops under three ways of running them, as points.
    fn pairs(&self) -> String {
        let table = Table::below(&self.page, "Do loops gain from running at once?");
        // Those drawn last are smaller, so that none hides another.
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
            picture.label(name);
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
}

impl Wanted {
    /// A value over the aim, or the aim over the value where it is to be large: no more than 1 if it is met. `None` where that says
    /// nothing: without an aim, or if the aim is 0.
    fn over_aim(&self, value: f64) -> Option<f64> {
        match (self.at_most, self.at_least) {
            (Some(most), _) if most > 0.0 => Some(value / most),
            (_, Some(least)) if value > 0.0 => Some(least / value),
            _ => None,
        }
    }
}

/// The unit behind a figure, as short as it can be: a ratio or a count needs none, and what is long is in the table.
fn unit(wanted: &Wanted) -> String {
    match wanted.unit.as_str() {
        "percent" => " %".into(),
        "us" => " µs".into(),
        "ratio" | "count" | "score" => String::new(),
        unit if unit.contains('/') && unit.len() > 8 => String::new(),
        unit => format!(" {unit}"),
    }
}

/// The numbers in a text that names whose each is: `21.2 (the original), 17 to 20 (HAMi-core)`; of a range both ends. What is only
/// possible, and not measured, has nobody's name.
fn others(text: &str) -> Vec<(f64, String)> {
    // A name ends with a bracket, and so does the part of the text that is its.
    let found = text.split(')').filter_map(|part| {
        let (numbers, who) = part.split_once(" (")?;
        let numbers = numbers.rsplit("; ").flat_map(|part| part.rsplit(", ")).next()?;
        let numbers = numbers.strip_prefix("about ").unwrap_or(numbers).split(" to ");
        let values: Option<Vec<f64>> = numbers.map(|number| number.replace(',', "").parse().ok()).collect();
        Some(values?.into_iter().map(|value| (value, who.to_owned())).collect::<Vec<_>>())
    });
    found.flatten().collect()
}

/// The number that a cell of a table begins with, without what marks up the text: `8.1`, `[1.02](results.json "name")`.
fn number(cell: &str) -> Option<f64> {
    let plain = cell.trim_start_matches(['[', '*']).replace(',', "");
    let end = plain.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(plain.len());
    plain[..end].parse().ok()
}

/// A table of the page.
#[derive(Debug)]
struct Table {
    /// Without that of the rows' names, and without what marks up the text.
    columns: Vec<String>,
    rows: Vec<(String, Vec<String>)>,
}

impl Table {
    /// The first one below a heading that begins so.
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

/// From values to places.
#[derive(Debug, Clone, Copy)]
enum Scale {
    /// From 0.
    Linear {
        to: f64,
    },
    Log {
        from: f64,
        to: f64,
    },
}

impl Scale {
    /// The place of a value, from 0 to 1. What is beyond an end is at that end.
    fn at(self, value: f64) -> f64 {
        let place = match self {
            Self::Linear { to } => value / to,
            Self::Log { from, to } => (value.max(f64::MIN_POSITIVE) / from).ln() / (to / from).ln(),
        };
        place.clamp(0.0, 1.0)
    }

    /// Whether a value has a place of its own.
    fn has(self, value: f64) -> bool {
        match self {
            Self::Linear { to } => value <= to,
            Self::Log { from, to } => (from..=to).contains(&value),
        }
    }

    /// Round values from 0 on, in steps of one, two or five times a power of ten.
    fn ticks(self, unit: &str) -> Vec<(f64, String)> {
        let (Self::Linear { to } | Self::Log { to, .. }) = self;
        let power = 10f64.powf((to / 10.0).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| to / step <= 10.0);
        let step = step.unwrap_or(to);
        let count = (to / step) as u32;
        (0..=count).map(|n| (f64::from(n) * step, format!("{}{unit}", digits(f64::from(n) * step, 2)))).collect()
    }
}

/// A picture in the making, row by row.
#[derive(Debug)]
struct Picture {
    title: String,
    /// Room for the rows' names, and for notes behind them.
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

    /// What the classes of marks mean.
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
        let _ = writeln!(self.body, r#"<text class="title" x="8" y="{:.0}">{}</text>"#, self.y + 14.0, escaped(text));
        self.next(ROW);
    }

    fn label(&mut self, text: &str) {
        let (x, y) = (self.left - 12.0, self.y + 14.0);
        let _ = writeln!(self.body, r#"<text x="{x:.0}" y="{y:.0}" text-anchor="end">{}</text>"#, escaped(text));
    }

    /// What is said behind the row.
    fn note(&mut self, text: &str) {
        let (x, y) = (WIDTH - RIGHT - self.right + 12.0, self.y + 14.0);
        let _ = writeln!(self.body, r#"<text class="quiet" x="{x:.0}" y="{y:.0}">{}</text>"#, escaped(text));
    }

    /// A point; an arrow at the end of the scale if the value is beyond.
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

    /// A line over all of the values.
    fn range(&mut self, values: impl Iterator<Item = f64> + Clone) {
        let (least, most) = (values.clone().fold(f64::MAX, f64::min), values.fold(0.0, f64::max));
        let (from, to, y) = (self.x(least), self.x(most), self.y + 10.0);
        let _ = writeln!(self.body, r#"<path class="range" d="M{from:.1} {y:.0}H{to:.1}"/>"#);
    }

    /// A bar from 0 with its text behind it; only the text if there is no value.
    fn bar(&mut self, class: &str, value: Option<f64>, text: &str) {
        let (left, y) = (self.left, self.y);
        let width = value.map_or(0.0, |value| self.x(value) - left);
        let quiet = if value.is_some() { "" } else { r#" class="quiet""# };
        if value.is_some() {
            let _ = writeln!(
                self.body,
                r#"<rect class="{class}" x="{left:.0}" y="{:.0}" width="{width:.1}" height="{:.0}"/>"#,
                y + 3.0,
                ROW - 6.0
            );
        }
        let _ = writeln!(
            self.body,
            r#"<text{quiet} x="{:.1}" y="{:.0}">{}</text>"#,
            left + width + 6.0,
            y + 14.0,
            escaped(text)
        );
    }

    /// The whole picture, with lines at these values, and one at the aim.
    fn finish(&self, ticks: &[(f64, String)], aim: Option<f64>) -> String {
        let (bottom, mut out) = (self.y + 6.0, String::new());
        let height = bottom + 26.0;
        let title = escaped(&self.title);
        let _ = writeln!(
            out,
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0}" height="{height:.0}" viewBox="0 0 {WIDTH:.0} {height:.0}" role="img">"#
        );
        let _ = writeln!(out, "<title>{title}</title>\n<style>{STYLE}</style>");
        let _ = writeln!(out, r##"<rect width="100%" height="100%" fill="#fff"/>"##);
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

/// Text as XML has it.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_others_are_those_that_somebody_is_named_for() {
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
            of("1 to 2 (the original, P100), 0.33 for 7.9 GiB (e9a5840)"),
            ["1 the original, P100", "2 the original, P100"]
        );
        assert_eq!(of("91,714 (the original)"), ["91714 the original"]);
    }

    #[test]
    fn a_table_is_read_from_below_its_heading() {
        let page = "\n## A\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n## How? (H100)\n\ntext\n\n| | `a` | b |\n|---|---|---|\n| one | 1,000.5 | [2](results.json \"r\") |\n| two | out of memory | |\n";
        let table = Table::below(page, "How?");
        assert_eq!(table.columns, ["a", "b"]);
        assert_eq!(table.rows[1], ("two".to_owned(), vec!["out of memory".to_owned(), String::new()]));
        assert_eq!(table.values().collect::<Vec<_>>(), [1000.5, 2.0]);
    }

    #[test]
    fn ticks_are_round_and_reach_the_end() {
        let last = |to: f64| Scale::Linear { to }.ticks("").last().map(|(at, _)| *at);
        assert_eq!([last(9.64), last(14.9), last(100.0)], [Some(9.0), Some(14.0), Some(100.0)]);
    }

    #[test]
    fn what_is_beyond_the_scale_is_at_its_end() {
        let scale = Scale::Log { from: 0.1, to: 10.0 };
        assert_eq!([scale.at(0.001), scale.at(1.0), scale.at(99.0)], [0.0, 0.5, 1.0]);
        assert!(scale.has(0.1) && !scale.has(-1.0) && !scale.has(99.0));
    }
}
