//! Timelines as SVG: a picture that stands alone, without scripts, fonts or anything from elsewhere.
//!
//! Its size is bounded: spans that are closer than a pixel are drawn as one, and of each GPU no more than [`MOST_LANES`] programs are
//! drawn, those that did most.

use std::fmt::Write;
use std::time::Duration;

use super::{Activity, Lane, Span, Timeline};
use crate::config::units;
use crate::identity::printable;

/// The most programs of a GPU that are drawn.
pub const MOST_LANES: usize = 200;

// All lengths are pixels.
const WIDTH: f64 = 1200.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 20.0;
const ROW: f64 = 24.0;
const HEADING: f64 = 30.0;
const TOP: f64 = 64.0;
const BAR: f64 = 10.0;
const STRIP: f64 = 4.0;
/// Spans that are this close are drawn as one, and none is narrower.
const FINEST: f64 = 0.75;
/// As many letters as there is room for.
const LABEL: usize = 36;
const TICKS: f64 = 10.0;

const STYLE: &str = "text{font:12px sans-serif;fill:#222}.gpu{font-weight:bold}.axis{fill:#666}.grid{stroke:#ddd}\
                     .waits{fill:#c4c8ce}.holds{fill:#2e7d4f}.leaves{fill:#cf5b2e}.returns{fill:#3271b8}";

struct Look {
    class: &'static str,
    /// In the legend.
    name: &'static str,
    /// From the top of the row.
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

/// In the order in which they are drawn, the last on top.
const ACTIVITIES: [Activity; 4] = [Activity::Waits, Activity::Holds, Activity::Leaves, Activity::Returns];

/// Several spans that are drawn as one.
#[derive(Debug, PartialEq)]
struct Piece {
    left: f64,
    right: f64,
    count: usize,
    time: Duration,
    bytes: u64,
}

/// Draws it; `title` is the heading. `names` gives a GPU's name.
pub fn draw(timeline: &Timeline, title: &str, names: impl Fn(&str) -> String) -> String {
    let (begin, end) = timeline.span.unwrap_or_default();
    let length = end.saturating_sub(begin).as_secs_f64().max(1e-6);
    let x = |at: Duration| LEFT + at.saturating_sub(begin).as_secs_f64().min(length) / length * (WIDTH - LEFT - RIGHT);
    let (mut body, mut y) = (String::new(), TOP);
    for (gpu, lanes) in &timeline.lanes {
        let _ = writeln!(body, r#"<text class="gpu" x="8" y="{:.0}">{}</text>"#, y + 20.0, escaped(&names(gpu)));
        y += HEADING;
        let shown = busiest(lanes.values());
        for lane in &shown {
            draw_lane(&mut body, lane, y, &x);
            y += ROW;
        }
        if shown.len() < lanes.len() {
            let more = lanes.len() - shown.len();
            let _ = writeln!(
                body,
                r#"<text class="axis" x="20" y="{:.0}">and {more} more, which did less</text>"#,
                y + 14.0
            );
            y += ROW;
        }
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
    draw_legend(&mut out);
    draw_axis(&mut out, length, TOP, bottom);
    out + &body + "</svg>\n"
}

fn draw_legend(out: &mut String) {
    for (activity, left) in ACTIVITIES.into_iter().zip([8.0, 160.0, 290.0, 430.0]) {
        let Look { class, name, height, .. } = look(activity);
        let top = 44.0 - height / 2.0;
        let _ = writeln!(
            out,
            r#"<rect class="{class}" x="{left:.0}" y="{top:.1}" width="24" height="{height:.0}"/><text x="{:.0}" y="48">{name}</text>"#,
            left + 30.0
        );
    }
}

/// Lines at round times, and what these are.
fn draw_axis(out: &mut String, length: f64, top: f64, bottom: f64) {
    let step = round_step(length / TICKS);
    let mut tick = 0;
    loop {
        let seconds = f64::from(tick) * step;
        if seconds > length {
            break;
        }
        let at = LEFT + seconds / length * (WIDTH - LEFT - RIGHT);
        let text = if tick == 0 { "0".into() } else { units::fine_duration(Duration::from_secs_f64(seconds)) };
        let _ = writeln!(
            out,
            r#"<path class="grid" d="M{at:.1} {top:.0}V{bottom:.0}"/><text class="axis" x="{at:.1}" y="{:.0}" text-anchor="middle">{text}</text>"#,
            bottom + 16.0
        );
        tick += 1;
    }
}

/// A round number of seconds, and no fewer than that: up to 20 s and from 12 h on one, two or five times a power of ten of seconds or
/// days, else a part of an hour or of a day.
fn round_step(least: f64) -> f64 {
    const MINUTE: f64 = 60.0;
    const HOUR: f64 = 60.0 * MINUTE;
    const DAY: f64 = 24.0 * HOUR;
    let parts = [1.0, 2.0, 5.0, 10.0, 30.0].map(|minutes| minutes * MINUTE).into_iter();
    let mut parts = parts.chain([1.0, 2.0, 6.0, 12.0].map(|hours| hours * HOUR)).filter(|step| *step >= least);
    match parts.next() {
        _ if least <= 20.0 => decimal_step(least),
        Some(step) => step,
        None => decimal_step(least / DAY) * DAY,
    }
}

/// One, two or five times a power of ten, and no less than that.
fn decimal_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-6).log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|times| times * power).find(|step| *step >= least).unwrap_or(10.0 * power)
}

/// Those that held or moved for the longest time, in their own order.
fn busiest<'a>(lanes: impl Iterator<Item = &'a Lane>) -> Vec<&'a Lane> {
    let mut all: Vec<(usize, &Lane)> = lanes.enumerate().collect();
    if all.len() > MOST_LANES {
        let busy = |lane: &Lane| lane.spans.iter().map(|span| span.to.saturating_sub(span.from)).sum::<Duration>();
        all.sort_by_key(|(_, lane)| std::cmp::Reverse(busy(lane)));
        all.truncate(MOST_LANES);
        all.sort_by_key(|(place, _)| *place);
    }
    all.into_iter().map(|(_, lane)| lane).collect()
}

fn draw_lane(out: &mut String, lane: &Lane, top: f64, x: &impl Fn(Duration) -> f64) {
    let label: String = match lane.label.chars().count() > LABEL {
        true => lane.label.chars().take(LABEL - 1).chain(['…']).collect(),
        false => lane.label.clone(),
    };
    let _ = writeln!(out, r#"<text x="20" y="{:.0}">{}</text>"#, top + 14.0, escaped(&label));
    for activity in ACTIVITIES {
        let Look { class, name, top: offset, height } = look(activity);
        for Piece { left, right, count, time, bytes } in pieces(&lane.spans, activity, x) {
            let mut told = format!("{name}: {}", units::fine_duration(time));
            if count > 1 {
                let _ = write!(told, " in {count} times");
            }
            if bytes > 0 {
                let _ = write!(told, ", {}", units::size(bytes));
            }
            let _ = writeln!(
                out,
                r#"<rect class="{class}" x="{left:.2}" y="{:.0}" width="{:.2}" height="{height:.0}"><title>{told}</title></rect>"#,
                top + offset,
                right - left
            );
        }
    }
}

fn pieces(spans: &[Span], activity: Activity, x: &impl Fn(Duration) -> f64) -> Vec<Piece> {
    let mut of_kind: Vec<&Span> = spans.iter().filter(|span| span.activity == activity).collect();
    of_kind.sort_by_key(|span| span.from);
    let mut pieces: Vec<Piece> = Vec::new();
    for Span { from, to, bytes, .. } in of_kind {
        let (left, right, time) = (x(*from), x(*to), to.saturating_sub(*from));
        // Nothing that took no time and moved nothing is to be seen: a grant at once, for instance.
        if time.is_zero() && *bytes == 0 {
            continue;
        }
        let right = right.max(left + FINEST);
        match pieces.last_mut() {
            Some(last) if left - last.right < FINEST => {
                last.right = last.right.max(right);
                (last.count, last.time, last.bytes) = (last.count + 1, last.time + time, last.bytes + bytes);
            }
            _ => pieces.push(Piece { left, right, count: 1, time, bytes: *bytes }),
        }
    }
    pieces
}

/// Text as XML has it, which forbids control characters.
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
        Timeline { span: Some((Duration::ZERO, Duration::from_secs(seconds))), lanes }
    }

    fn span(activity: Activity, from_ms: u64, to_ms: u64, bytes: u64) -> Span {
        Span { activity, from: Duration::from_millis(from_ms), to: Duration::from_millis(to_ms), bytes }
    }

    #[test]
    fn a_turn_is_where_it_was() {
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
    fn the_picture_of_a_long_time_is_small() {
        let all = (0..100_000).map(|i| span(Activity::Holds, 20 * i, 20 * i + 10, 0)).collect();
        let svg = draw(&timeline(all, 2000), "", str::to_owned);
        assert!(svg.len() < 20_000, "{} bytes", svg.len());
        assert!(svg.contains("in 100000 times"), "{svg}");
    }

    #[test]
    fn steps_are_round() {
        let steps = [(0.03, 0.05), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (20.0, 20.0), (21.0, 60.0), (700.0, 1800.0)];
        let long = [(7000.0, 7200.0), (30_000.0, 43_200.0), (50_000.0, 86_400.0), (300_000.0, 432_000.0)];
        for (least, step) in steps.into_iter().chain(long) {
            assert!((round_step(least) - step).abs() < step * 1e-9, "{least}");
        }
    }
}
