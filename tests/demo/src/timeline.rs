//! What happened, as text: a line a turn, and a lane a program. Nothing is wider than 100 columns; colour only on a
//! terminal, and not if `NO_COLOR` says so.

use crate::{
    sizes::mib,
    story::{Lane, Move, Story, Turn},
};
use std::{env, fmt::Write, io::IsTerminal};

pub const WIDTH: usize = 100;

/// How text is marked.
#[derive(Debug, Clone, Copy)]
pub struct Paint {
    colour: bool,
    unicode: bool,
}

impl Paint {
    pub fn of_stdout() -> Paint {
        let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default().to_uppercase();
        Paint {
            colour: std::io::stdout().is_terminal() && set("NO_COLOR").is_none(),
            unicode: locale.contains("UTF-8") || locale.contains("UTF8"),
        }
    }

    fn with(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    pub fn bold(&self, text: &str) -> String {
        self.with("1", text)
    }

    pub fn verdict(&self, right: bool) -> String {
        if right { self.with("32", "   ok") } else { self.with("1;31", "WRONG") }
    }

    fn glyph(&self, lane: Lane) -> char {
        match (lane, self.unicode) {
            (Lane::Runs, true) => '█',
            (Lane::Runs, false) => '#',
            (Lane::Waits, true) => '·',
            (Lane::Waits, false) => '.',
            (Lane::Leaves, true) => '▼',
            (Lane::Leaves, false) => 'v',
            (Lane::Returns, true) => '▲',
            (Lane::Returns, false) => '^',
        }
    }

    fn code(lane: Lane) -> &'static str {
        match lane {
            Lane::Runs => "32",
            Lane::Waits => "2",
            Lane::Leaves => "31",
            Lane::Returns => "36",
        }
    }
}

/// The line above the turns.
pub fn heading(paint: &Paint) -> String {
    paint.bold("      at   lock   waited     held   moved to the host first       moved to the GPU")
}

/// One turn.
pub fn turn(turn: &Turn, names: &[&str; 2], paint: &Paint) -> String {
    let moved = |who: usize, part: Move| match part.bytes {
        0 => "-".to_owned(),
        bytes => format!("{} of {} in {:.2} s", mib(bytes), names[who], part.to - part.from),
    };
    let (out, back) = (moved(1 - turn.who, turn.out), moved(turn.who, turn.back));
    let name = paint.bold(&format!("{:^6}", names[turn.who]));
    format!("{:6.1} s {name} {:6.2} s {:6.2} s   {out:<29} {back}", turn.at, turn.waited, turn.held)
}

/// A lane a program, from the first moment to the last.
pub fn draw(story: &Story, names: &[&str; 2], paint: &Paint) -> String {
    let label = names.iter().map(|name| name.len()).max().unwrap_or(0) + 4;
    let cells = WIDTH - label;
    let step = (story.end / cells as f64).max(1e-3);
    let mut out = String::new();
    for (who, name) in names.iter().enumerate() {
        let _ = write!(out, "  {name}  ");
        let mut run: Option<(Option<Lane>, String)> = None;
        let lanes = (0..cells).map(|cell| at(story, who, cell as f64 * step, (cell + 1) as f64 * step));
        // Equal neighbours are one coloured piece.
        for lane in lanes.map(Some).chain([None]) {
            match (&mut run, lane) {
                (Some((same, text)), Some(lane)) if *same == lane => text.push(lane.map_or(' ', |l| paint.glyph(l))),
                (piece, lane) => {
                    if let Some((lane, text)) = piece.take() {
                        out.push_str(&lane.map_or(text.clone(), |l| paint.with(Paint::code(l), &text)));
                    }
                    run = lane.map(|lane| (lane, lane.map_or(' ', |l| paint.glyph(l)).into()));
                }
            }
        }
        out = out.trim_end().to_owned();
        out.push('\n');
    }
    out.push_str(&axis(label, cells, step));
    let legend = [
        (Lane::Runs, "has the lock"),
        (Lane::Waits, "waits"),
        (Lane::Leaves, "its memory leaves the GPU"),
        (Lane::Returns, "its memory comes back"),
    ];
    let legend =
        legend.map(|(lane, what)| format!("{} {what}", paint.with(Paint::code(lane), &paint.glyph(lane).to_string())));
    let _ = writeln!(out, "{:label$}{}", "", legend.join("   "));
    out
}

/// What a program does in that time: what is most telling, not what is longest.
fn at(story: &Story, who: usize, from: f64, to: f64) -> Option<Lane> {
    let during = |lane: Lane| story.spans(who).iter().any(|span| span.lane == lane && span.from < to && span.to > from);
    [Lane::Leaves, Lane::Returns, Lane::Runs, Lane::Waits].into_iter().find(|lane| during(*lane))
}

/// Seconds below the lanes.
fn axis(label: usize, cells: usize, step: f64) -> String {
    let all = cells as f64 * step;
    let every =
        [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0].into_iter().find(|every| all / every <= 12.0).unwrap_or(300.0);
    let mut line = " ".repeat(label + cells);
    for i in 0.. {
        let column = label + (f64::from(i) * every / step).round() as usize;
        let text =
            if every < 1.0 { format!("{:.1}", f64::from(i) * every) } else { format!("{}", f64::from(i) * every) };
        let text = if i == 0 { "0 s".into() } else { text };
        if column + text.len() > label + cells {
            break;
        }
        line.replace_range(column..column + text.len(), &text);
    }
    format!("{}\n", line.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_axis_is_as_wide_as_the_lanes() {
        for seconds in [0.3, 1.0, 7.7, 24.0, 55.0, 290.0] {
            let line = axis(5, 95, seconds / 95.0);
            assert!(line.trim_end().len() <= WIDTH && line.contains("0 s"), "{line}");
        }
    }
}
