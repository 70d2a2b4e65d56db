//! Timelines as text for terminals: one line per program.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use super::axis::{self, Tick};
use super::{Activity, Lane, Timeline};
use crate::identity::printable;

/// The maximum number of programs that are drawn per GPU.
const MOST_LANES: usize = 20;
/// The valid widths of a lane, in characters.
const CELLS: std::ops::RangeInclusive<usize> = 20..=400;
/// The width of a time label below the lanes, including a blank.
const TICK: f64 = 14.0;

/// The terminal's capabilities.
#[derive(Debug, Clone, Copy)]
pub struct Paint {
    pub width: usize,
    pub colour: bool,
    pub unicode: bool,
}

/// The meaning of a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Idle,
    Waits,
    Holds,
    /// The program holds the GPU for less than half of the character's time.
    HoldsShortly,
    Leaves,
    Returns,
}

/// The order of the legend.
const SEEN: [Cell; 5] = [Cell::Holds, Cell::HoldsShortly, Cell::Waits, Cell::Leaves, Cell::Returns];

impl Cell {
    /// Returns the character, its substitute without Unicode, the colour, and the text of the
    /// legend.
    const fn look(self) -> (char, char, &'static str, &'static str) {
        match self {
            Self::Idle => (' ', ' ', "", ""),
            Self::Waits => ('·', '.', "2", "waits"),
            Self::Holds => ('█', '#', "32", "holds the GPU"),
            Self::HoldsShortly => ('▒', '=', "32", "holds it briefly"),
            Self::Leaves => ('▼', 'v', "31", "memory leaves"),
            Self::Returns => ('▲', '^', "36", "memory returns"),
        }
    }

    fn painted(self, count: usize, paint: Paint) -> String {
        let (unicode, ascii, colour, _) = self.look();
        let text = String::from(if paint.unicode { unicode } else { ascii }).repeat(count);
        if paint.colour && !colour.is_empty() { format!("\x1b[{colour}m{text}\x1b[0m") } else { text }
    }
}

/// Draws a timeline above its axis. `names` returns a GPU's name.
pub fn draw(timeline: &Timeline, names: impl Fn(&str) -> String, paint: Paint) -> String {
    if timeline.lanes.is_empty() {
        return "No program used a GPU.\n".into();
    }
    let (begin, end) = timeline.span.unwrap_or_default();
    let mut out = axis::period(timeline).map(|period| printable(&period) + "\n").unwrap_or_default();
    let lanes = || timeline.lanes.values().flat_map(BTreeMap::values);
    let label = lanes().map(|lane| lane.label.chars().count()).max().unwrap_or(0).min(paint.width / 3);
    let margin = label + 4;
    let count = paint.width.saturating_sub(margin).clamp(*CELLS.start(), *CELLS.end());
    let step = end.saturating_sub(begin).as_secs_f64().max(1e-6) / count as f64;
    let mut seen = Vec::new();
    for (gpu, lanes) in &timeline.lanes {
        let _ = writeln!(out, "{}", printable(&names(gpu)));
        let shown = super::busiest(lanes.values(), MOST_LANES, |lane| lane);
        for lane in &shown {
            let cells = cells(lane, begin, step, count);
            seen.extend_from_slice(&cells);
            let name = shortened(&lane.label, label, paint);
            let runs =
                cells.chunk_by(|a, b| a == b).map(|run| (run.first().map_or(Cell::Idle, |cell| *cell), run.len()));
            let line = runs.map(|(cell, count)| cell.painted(count, paint)).collect::<String>();
            let _ = writeln!(out, "  {name:label$}  {}", line.trim_end());
        }
        if shown.len() < lanes.len() {
            let _ = writeln!(out, "  and {} less active programs", lanes.len() - shown.len());
        }
    }
    let mut line = String::new();
    for Tick { at, text } in axis::ticks(timeline, (count as f64 / TICK).max(1.0)) {
        let column = margin + (at.saturating_sub(begin).as_secs_f64() / step) as usize;
        if column + text.len() <= margin + count && (line.is_empty() || column > line.len()) {
            line = format!("{line:column$}{text}");
        }
    }
    let legend = SEEN.into_iter().filter(|cell| seen.contains(cell));
    let legend: Vec<String> = legend.map(|cell| format!("{} {}", cell.painted(1, paint), cell.look().3)).collect();
    let _ = writeln!(out, "{line}\n  {}", legend.join("   "));
    out
}

/// Computes the characters of a lane. Each character shows the activity that fills most of the
/// character's time. Moves take precedence over turns.
fn cells(lane: &Lane, begin: Duration, step: f64, count: usize) -> Vec<Cell> {
    #[derive(Clone, Copy, Default)]
    struct Shares {
        waits: f64,
        holds: f64,
        leaves: f64,
        returns: f64,
        /// Turns that begin and end within the character's time.
        turns: u32,
    }
    let mut shares = vec![Shares::default(); count];
    let mut moves = 0;
    for span in lane.spans.iter().filter(|span| span.is_seen()) {
        let place = |at: Duration| (at.saturating_sub(begin).as_secs_f64() / step).min(count as f64);
        let (from, to) = (place(span.from), place(span.to));
        let (first, last) = ((from as usize).min(count - 1), (to.ceil() as usize).clamp(from as usize + 1, count));
        moves += usize::from(matches!(span.activity, Activity::Leaves | Activity::Returns));
        for (cell, shares) in shares.iter_mut().enumerate().take(last).skip(first) {
            let part = (to.min(cell as f64 + 1.0) - from.max(cell as f64)).max(1e-9);
            match span.activity {
                Activity::Waits => shares.waits += part,
                Activity::Holds => {
                    shares.holds += part;
                    shares.turns += u32::from(last == first + 1);
                }
                Activity::Leaves => shares.leaves += part,
                Activity::Returns => shares.returns += part,
            }
        }
    }
    let turn = |shares: &Shares| match *shares {
        Shares { holds, .. } if holds >= 0.5 => Cell::Holds,
        Shares { turns: 1.., .. } => Cell::HoldsShortly,
        Shares { waits, holds, .. } if holds > waits => Cell::Holds,
        Shares { waits, .. } if waits > 0.0 => Cell::Waits,
        _ => Cell::Idle,
    };
    let mut cells: Vec<Cell> = shares.iter().map(turn).collect();
    // If moves are rare, short moves are shown too. A move never hides a whole turn.
    let least = if moves * 2 <= count { 0.0 } else { 0.5 };
    let is_held = |cells: &[Cell], at: usize| matches!(cells.get(at), Some(Cell::Holds | Cell::HoldsShortly));
    for (at, shares) in shares.iter().enumerate() {
        if shares.returns > least && (!is_held(&cells, at) || is_held(&cells, at + 1)) {
            cells[at] = Cell::Returns;
        }
    }
    for (at, shares) in shares.iter().enumerate() {
        if shares.leaves > least && (!is_held(&cells, at) || at > 0 && is_held(&cells, at - 1)) {
            cells[at] = Cell::Leaves;
        }
    }
    cells
}

fn shortened(label: &str, most: usize, paint: Paint) -> String {
    let label = printable(label);
    if label.chars().count() <= most {
        return label;
    }
    let end = if paint.unicode { '…' } else { '~' };
    label.chars().take(most.saturating_sub(1)).chain([end]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::Span;
    use super::*;

    const PLAIN: Paint = Paint { width: 60, colour: false, unicode: true };

    /// An activity, and its beginning and end in milliseconds.
    type Part = (Activity, u64, u64);

    /// A timeline of one minute with these lanes on one GPU.
    fn timeline(lanes: &[(&str, &[Part])]) -> Timeline {
        let mut timeline = Timeline { span: Some((Duration::ZERO, Duration::from_secs(60))), ..Timeline::default() };
        for (number, (label, spans)) in (1..).zip(lanes) {
            let at = Duration::from_millis;
            let span = |&(activity, from, to): &Part| Span { activity, from: at(from), to: at(to), bytes: 1 };
            timeline.lane("0af9", number, || (*label).to_owned()).spans.extend(spans.iter().map(span));
        }
        timeline
    }

    #[test]
    fn each_program_has_a_line() {
        use Activity::{Holds, Leaves, Returns, Waits};
        let a: &[_] = &[(Holds, 0, 30_000), (Waits, 30_000, 60_000), (Leaves, 30_000, 33_000)];
        let b: &[_] = &[(Waits, 6_000, 33_000), (Holds, 33_000, 57_000), (Returns, 33_000, 33_001)];
        let drawn = draw(&timeline(&[("A (PID 1)", a), ("B (PID 2)", b)]), |_| "GPU 0".into(), PLAIN);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines.len(), 5, "{drawn}");
        assert_eq!(lines[0], "GPU 0");
        let (holds, leaves) = ("█".repeat(23), "▼".repeat(3));
        assert!(lines[1].starts_with(&format!("  A (PID 1)  {holds}{leaves}·")), "{drawn}");
        assert!(lines[2].starts_with(&format!("  B (PID 2)      {}▲███", "·".repeat(21))), "{drawn}");
        assert_eq!(lines[3], "             0              20s             40s", "{drawn}");
        assert_eq!(lines[4], "  █ holds the GPU   · waits   ▼ memory leaves   ▲ memory returns");
        assert!(lines.iter().all(|line| line.chars().count() <= 66), "{drawn}");
    }

    #[test]
    fn moves_do_not_hide_a_turn() {
        use Activity::{Holds, Leaves, Returns, Waits};
        // A character represents 1.25 s.
        let spans = [(Waits, 0, 30_000), (Returns, 30_000, 32_400), (Holds, 30_000, 32_500), (Leaves, 32_300, 35_000)];
        let drawn = draw(&timeline(&[("A", &spans)]), str::to_owned, PLAIN);
        let lane = drawn.lines().nth(1).unwrap_or_default();
        assert!(lane.contains('▲') && lane.contains('█') && lane.contains('▼'), "{drawn}");
    }

    #[test]
    fn short_turns_are_not_solid() {
        let spans: Vec<_> = (0..600)
            .flat_map(|i| [(Activity::Holds, 100 * i, 100 * i + 30), (Activity::Leaves, 100 * i + 30, 100 * i + 35)])
            .collect();
        let drawn = draw(&timeline(&[("A", &spans)]), str::to_owned, Paint { unicode: false, ..PLAIN });
        assert_eq!(drawn.lines().nth(1), Some(format!("  A  {}", "=".repeat(55)).as_str()), "{drawn}");
    }
}
