//! Timelines as SVG: a self-contained picture, without scripts, fonts or external resources.
//!
//! The picture's size is bounded. Short spans less than a pixel apart are drawn as one piece, whose
//! opacity is the fraction of time that they cover. Only the [`MOST_LANES`] most active programs of
//! each GPU are drawn.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use super::axis::{self, Tick};
use super::{Activity, Lane, Span, Timeline};
use crate::config::units;
use crate::identity::printable;

/// The maximum number of programs that are drawn per GPU.
pub const MOST_LANES: usize = 200;

// All lengths are in pixels.
const WIDTH: f64 = 1200.0;
const LEFT: f64 = 250.0;
/// Width of the right margin. Half of the last time label extends into the margin.
const RIGHT: f64 = 44.0;
const ROW: f64 = 24.0;
const HEADING: f64 = 30.0;
const TOP: f64 = 64.0;
const BAR: f64 = 10.0;
const STRIP: f64 = 4.0;
/// Spans that are closer together than this are drawn as one piece. Also the minimum width of a
/// piece.
const FINEST: f64 = 0.75;
/// Spans of at least this width are drawn separately. Also the maximum width of a piece of several
/// spans.
const COLUMN: f64 = 6.0;
/// The minimum opacity, which keeps a rare span visible.
const FAINTEST: f64 = 0.1;
/// The indentation of programs' names.
const INDENT: f64 = 20.0;
const TICKS: f64 = 10.0;

const STYLE: &str = "text{font:12px sans-serif;fill:#222}.gpu{font-weight:bold}.axis{fill:#666}.grid{stroke:#ddd}\
                     .waits{fill:#c4c8ce}.holds{fill:#2e7d4f}.leaves{fill:#cf5b2e}.returns{fill:#3271b8}";

struct Look {
    class: &'static str,
    /// The name in the legend.
    name: &'static str,
    /// The distance from the top of the row.
    top: f64,
    height: f64,
}

const fn look(activity: Activity) -> Look {
    let (class, name, top, height) = match activity {
        Activity::Waits => ("waits", "waits for the GPU", 4.0, BAR),
        Activity::Holds => ("holds", "holds the GPU", 4.0, BAR),
        Activity::Leaves => ("leaves", "memory leaves", 4.0 + BAR, STRIP),
        Activity::Returns => ("returns", "memory returns", 4.0 + BAR, STRIP),
    };
    Look { class, name, top, height }
}

/// The drawing order. Later activities cover earlier ones.
const ACTIVITIES: [Activity; 4] = [Activity::Waits, Activity::Holds, Activity::Leaves, Activity::Returns];

/// A piece of the picture, which represents one or several spans.
#[derive(Debug, PartialEq)]
struct Piece {
    left: f64,
    right: f64,
    from: Duration,
    to: Duration,
    count: usize,
    time: Duration,
    bytes: u64,
}

impl Piece {
    /// Returns the fraction of the piece's time that its spans cover. For a single span, returns 1.
    fn opacity(&self) -> f64 {
        let all = self.to.saturating_sub(self.from).as_secs_f64();
        if self.count == 1 || all <= 0.0 { 1.0 } else { (self.time.as_secs_f64() / all).clamp(FAINTEST, 1.0) }
    }
}

/// Draws a timeline. `title` is the heading, and `names` returns a GPU's name.
pub fn draw(timeline: &Timeline, title: &str, names: impl Fn(&str) -> String) -> String {
    let (begin, end) = timeline.span.unwrap_or_default();
    let length = end.saturating_sub(begin).as_secs_f64().max(1e-6);
    let x = |at: Duration| LEFT + at.saturating_sub(begin).as_secs_f64().min(length) / length * (WIDTH - LEFT - RIGHT);
    let (mut body, mut y, mut blocks) = (String::new(), TOP, Vec::new());
    for (gpu, lanes) in &timeline.lanes {
        let _ = writeln!(body, r#"<text class="gpu" x="8" y="{:.0}">{}</text>"#, y + 20.0, escaped(&names(gpu)));
        y += HEADING;
        let top = y;
        let shown = super::busiest(lanes.values(), MOST_LANES, |lane| lane);
        for lane in &shown {
            draw_lane(&mut body, lane, y, &x);
            y += ROW;
        }
        if shown.len() < lanes.len() {
            let more = lanes.len() - shown.len();
            let _ = writeln!(
                body,
                r#"<text class="axis" x="20" y="{:.0}">and {more} less active programs</text>"#,
                y + 14.0
            );
            y += ROW;
        }
        blocks.push((top, y));
    }
    if timeline.lanes.is_empty() {
        let _ = writeln!(body, r#"<text class="axis" x="8" y="{:.0}">No program used a GPU.</text>"#, y + 20.0);
        y += HEADING;
    }
    let (bottom, mut out) = (y + 6.0, String::new());
    let height = bottom + 24.0;
    let _ = writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0}" height="{height:.0}" viewBox="0 0 {WIDTH:.0} {height:.0}" role="img">"#
    );
    let _ = writeln!(out, "<title>{0}</title>\n<style>{STYLE}</style>", escaped(title));
    let _ = writeln!(out, r##"<rect width="100%" height="100%" fill="#fff"/>"##);
    let _ = writeln!(out, r#"<text class="gpu" x="8" y="22">{}</text>"#, escaped(title));
    if let Some(period) = axis::period(timeline) {
        let _ = writeln!(
            out,
            r#"<text class="axis" x="{:.0}" y="22" text-anchor="end">{}</text>"#,
            WIDTH - 8.0,
            escaped(&period)
        );
    }
    draw_legend(&mut out, timeline);
    draw_axis(&mut out, timeline, &blocks, bottom, &x);
    out + &body + "</svg>\n"
}

/// Draws the names of the activities that occur.
fn draw_legend(out: &mut String, timeline: &Timeline) {
    let all = || timeline.lanes.values().flat_map(BTreeMap::values).flat_map(|lane| &lane.spans);
    let mut left = 8.0;
    for activity in
        ACTIVITIES.into_iter().filter(|activity| all().any(|span| span.activity == *activity && span.is_seen()))
    {
        let Look { class, name, height, .. } = look(activity);
        let top = 44.0 - height / 2.0;
        let _ = writeln!(
            out,
            r#"<rect class="{class}" x="{left:.0}" y="{top:.1}" width="24" height="{height:.0}"/><text x="{:.0}" y="48">{name}</text>"#,
            left + 30.0
        );
        left += 30.0 + width(name) + 24.0;
    }
}

/// Draws lines at round times through the lanes of each GPU, and labels the lines with the times.
fn draw_axis(out: &mut String, timeline: &Timeline, blocks: &[(f64, f64)], bottom: f64, x: &impl Fn(Duration) -> f64) {
    for Tick { at, text } in axis::ticks(timeline, TICKS) {
        let at = x(at);
        let lines = blocks.iter().fold(String::new(), |mut lines, (top, end)| {
            let _ = write!(lines, "M{at:.1} {top:.0}V{end:.0}");
            lines
        });
        let _ = writeln!(
            out,
            r#"<path class="grid" d="{lines}"/><text class="axis" x="{at:.1}" y="{:.0}" text-anchor="middle">{text}</text>"#,
            bottom + 16.0
        );
    }
}

fn draw_lane(out: &mut String, lane: &Lane, top: f64, x: &impl Fn(Duration) -> f64) {
    let label = shortened(&lane.label, LEFT - INDENT - 8.0);
    let _ = writeln!(out, r#"<text x="{INDENT:.0}" y="{:.0}">{}</text>"#, top + 14.0, escaped(&label));
    for activity in ACTIVITIES {
        let Look { class, name, top: offset, height } = look(activity);
        for piece in pieces(&lane.spans, activity, x) {
            let opacity = match piece.opacity() {
                1.0 => String::new(),
                opacity => format!(r#" fill-opacity="{opacity:.2}""#),
            };
            let Piece { left, right, count, time, bytes, .. } = piece;
            let mut told = format!("{name}: {}", units::fine_duration(time));
            if count > 1 {
                let _ = write!(told, " in {count} times");
            }
            if bytes > 0 {
                let _ = write!(told, ", {}", units::size(bytes));
            }
            let _ = writeln!(
                out,
                r#"<rect class="{class}" x="{left:.2}" y="{:.0}" width="{:.2}" height="{height:.0}"{opacity}><title>{told}</title></rect>"#,
                top + offset,
                right - left
            );
        }
    }
}

fn pieces(spans: &[Span], activity: Activity, x: &impl Fn(Duration) -> f64) -> Vec<Piece> {
    let mut of_kind: Vec<&Span> = spans.iter().filter(|span| span.activity == activity && span.is_seen()).collect();
    of_kind.sort_by_key(|span| span.from);
    let mut pieces: Vec<Piece> = Vec::new();
    for Span { from, to, bytes, .. } in of_kind {
        let (left, right, time) = (x(*from), x(*to), to.saturating_sub(*from));
        let right = right.max(left + FINEST);
        match pieces.last_mut() {
            Some(last) if left - last.right < FINEST && right - last.left < COLUMN => {
                (last.right, last.to) = (last.right.max(right), last.to.max(*to));
                (last.count, last.time, last.bytes) = (last.count + 1, last.time + time, last.bytes + bytes);
            }
            _ => pieces.push(Piece { left, right, from: *from, to: *to, count: 1, time, bytes: *bytes }),
        }
    }
    pieces
}

/// An upper estimate of a text's width in a sans-serif font.
fn width(text: &str) -> f64 {
    let letter = |c: char| match c {
        'i' | 'j' | 'l' | 'I' | '.' | ',' | ':' | ';' | '|' | '!' | '\'' | ' ' => 4.0,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => 11.5,
        'A'..='Z' => 8.8,
        c if c.is_ascii() => 7.2,
        _ => 12.0,
    };
    text.chars().map(letter).sum()
}

/// Shortens the text to fit.
fn shortened(text: &str, room: f64) -> String {
    if width(text) <= room {
        return text.to_owned();
    }
    let mut kept = String::new();
    for c in text.chars() {
        if width(&kept) + width("…") + width(c.encode_utf8(&mut [0; 4])) > room {
            break;
        }
        kept.push(c);
    }
    kept + "…"
}

/// Escapes text for XML, and replaces control characters, which XML forbids.
fn escaped(text: &str) -> String {
    printable(text).chars().fold(String::new(), |mut out, c| {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
        out
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeline(spans: Vec<Span>, seconds: u64) -> Timeline {
        let lane = Lane { label: "client 1 <PID 7>".into(), spans };
        let lanes = [("0af9".to_owned(), [(1, lane)].into())].into();
        Timeline { host: None, span: Some((Duration::ZERO, Duration::from_secs(seconds))), lanes }
    }

    fn span(activity: Activity, from_ms: u64, to_ms: u64, bytes: u64) -> Span {
        Span { activity, from: Duration::from_millis(from_ms), to: Duration::from_millis(to_ms), bytes }
    }

    #[test]
    fn turns_are_drawn_at_their_time() {
        let all = vec![span(Activity::Holds, 2500, 5000, 0), span(Activity::Leaves, 5000, 5500, 1 << 30)];
        let svg = draw(&timeline(all, 10), "a & b", |gpu| format!("GPU {gpu}"));
        let scale = (WIDTH - LEFT - RIGHT) / 10.0;
        let holds = format!(r#"<rect class="holds" x="{:.2}" y="98" width="{:.2}""#, LEFT + 2.5 * scale, 2.5 * scale);
        assert!(svg.contains(&holds), "{holds} in {svg}");
        assert!(svg.contains("memory leaves: 500ms, 1 GiB"), "{svg}");
        for text in ["client 1 &lt;PID 7&gt;", "a &amp; b", "GPU 0af9", ">10s<"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }

    #[test]
    fn the_svg_of_a_long_period_is_small() {
        let all = (0..100_000).map(|i| span(Activity::Holds, 20 * i, 20 * i + 10, 0)).collect();
        let svg = draw(&timeline(all, 2000), "", str::to_owned);
        assert!(svg.len() < 40_000, "{} bytes", svg.len());
        let counts = svg.split(" in ").skip(1).filter_map(|rest| rest.split_once(" times")?.0.parse::<u32>().ok());
        assert_eq!(counts.sum::<u32>(), 100_000);
        assert!(!svg.contains(r#"fill-opacity="1"#) && svg.contains(r#"fill-opacity="0.50""#), "{svg}");
    }

    #[test]
    fn opacity_is_the_share_of_time() {
        // A pixel is one second. The spans are a long turn, many short turns, and rare moves.
        let mut all = vec![span(Activity::Holds, 0, 100_000, 0)];
        all.extend((0..40).map(|i| span(Activity::Holds, 100_000 + 1000 * i, 100_250 + 1000 * i, 0)));
        all.push(span(Activity::Leaves, 500_000, 500_001, 1 << 20));
        let seconds = (WIDTH - LEFT - RIGHT) as u64;
        let x = |at: Duration| LEFT + at.as_secs_f64();
        let lane = &timeline(all.clone(), seconds).lanes["0af9"][&1];
        let holds = pieces(&lane.spans, Activity::Holds, &x);
        assert!((holds[0].opacity() - 1.0).abs() < 1e-9 && holds[0].count == 1, "{holds:?}");
        for merged in &holds[1..holds.len() - 1] {
            assert!(merged.right - merged.left <= COLUMN && (0.25..0.35).contains(&merged.opacity()), "{merged:?}");
        }
        let svg = draw(&timeline(all, seconds), "", str::to_owned);
        assert!(svg.contains(r#"height="4"><title>memory leaves: 1.0ms, 1 MiB"#), "one short move is solid: {svg}");
        assert!(svg.contains(">memory leaves</text>") && !svg.contains("memory returns"), "{svg}");
    }

    #[test]
    fn long_names_end_before_the_lanes() {
        for name in ["GPU-b92bf750-d98f-fc0e-85dc-3c863e7ccbb8 of lane", &"W".repeat(60), &"日本".repeat(30)] {
            let short = shortened(name, LEFT - INDENT - 8.0);
            assert!(short.ends_with('…') && width(&short) <= LEFT - INDENT - 8.0, "{short}");
        }
        assert_eq!(shortened("python3 (PID 1234)", 222.0), "python3 (PID 1234)");
    }

    #[test]
    fn a_recording_has_the_time_of_day() {
        let day = |seconds: u64| Duration::from_secs(1_795_780_800 + seconds);
        let lane = Lane {
            label: "x".into(),
            spans: vec![Span { activity: Activity::Holds, from: day(1), to: day(9), bytes: 0 }],
        };
        let lanes = [("0af9".to_owned(), [(1, lane)].into())].into();
        let svg =
            draw(&Timeline { host: Some("lab<3>".into()), span: Some((day(0), day(10))), lanes }, "", str::to_owned);
        assert!(svg.contains("lab&lt;3&gt;, 2026-11-2") && svg.contains(":00:05</text>"), "{svg}");
    }
}
