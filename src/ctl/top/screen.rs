//! Draws `nvsharectl top`: panels of GPUs at the top, the tree in the middle, and a line of keys at
//! the bottom. All information that a colour conveys is also shown as text.

use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{self, Block, Clear, Paragraph, StatefulWidget, Table, TableState, Widget, Wrap};

use super::model::{Kind, Panel, Row, short_size};
use crate::config::units;
use crate::ctl::program_state::Tone;
use crate::ctl::table::wrapped;
use crate::identity::printable;

/// The minimum width of a complete layout. Smaller screens are cut.
const NARROWEST: u16 = 40;
/// Screens narrower than this omit columns in favour of the programs' names.
const NARROW: u16 = 72;

/// The contents of a screen.
#[derive(Debug, Default)]
pub struct Screen {
    pub head: String,
    /// Sentences about problems, below the tree.
    pub problems: Vec<String>,
    pub panels: Vec<Panel>,
    pub rows: Vec<Row>,
    pub foot: String,
    pub has_colour: bool,
    /// The selected line of the tree.
    pub selected: Option<usize>,
    pub popup: Option<Popup>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Popup {
    pub title: String,
    pub text: String,
}

impl Popup {
    pub fn new(title: &str, lines: &[String]) -> Self {
        let lines: Vec<String> = lines.iter().map(|line| printable(line)).collect();
        Self { title: format!(" {} ", printable(title)), text: lines.join("\n") }
    }
}

impl Kind {
    /// The letter and the colour in a bar, and the name in its legend.
    fn look(self, has_contexts: bool) -> (char, Color, &'static str) {
        match self {
            Self::Holder => ('#', Color::Green, "holder"),
            Self::Others => ('=', Color::Cyan, "others"),
            Self::Pinned => ('!', Color::Red, "pinned"),
            Self::Contexts => ('c', Color::Yellow, "contexts"),
            Self::Outside if has_contexts => ('x', Color::Magenta, "other programs"),
            Self::Outside => ('x', Color::Magenta, "contexts, other programs"),
            Self::Free => ('.', Color::DarkGray, "free"),
        }
    }
}

impl Screen {
    /// The height at which all lines fit.
    pub fn height(&self, width: u16) -> u16 {
        let panels: usize = self.panels.iter().map(|panel| self.panel_lines(panel, width).len() + 1).sum();
        let problems = self.problem_lines(width).len();
        u16::try_from(1 + problems + panels + 1 + self.rows.len() + 1).unwrap_or(u16::MAX)
    }

    fn problem_lines(&self, width: u16) -> Vec<String> {
        self.problems.iter().flat_map(|problem| wrapped(problem, width.into())).collect()
    }

    /// Draws the screen. `state` contains the scroll position of the tree.
    pub fn draw(&self, area: Rect, buffer: &mut Buffer, state: &mut TableState) {
        if area.width < NARROWEST || area.height < 3 {
            buffer.set_stringn(area.x, area.y, "too small", area.width.into(), Style::new());
            return;
        }
        let bold = Style::new().add_modifier(Modifier::BOLD);
        buffer.set_stringn(area.x, area.y, &self.head, area.width.into(), bold);
        let foot = Rect { y: area.bottom() - 1, height: 1, ..area };
        let mut y = area.y + 1;
        for line in self.problem_lines(area.width) {
            if y < foot.y {
                buffer.set_stringn(area.x, y, line, area.width.into(), self.paint(Color::Red));
                y += 1;
            }
        }
        let full: Vec<Vec<Line<'_>>> = self.panels.iter().map(|panel| self.panel_lines(panel, area.width)).collect();
        // The tree gets at least half of the height.
        let fits = full.iter().map(|lines| lines.len() + 1).sum::<usize>() <= usize::from(area.height) / 2;
        let is_full = fits || self.panels.len() == 1;
        for (panel, lines) in self.panels.iter().zip(full) {
            let lines = if is_full { lines } else { vec![self.panel_line(panel, area.width)] };
            for line in lines {
                if y + 1 < foot.y {
                    buffer.set_line(area.x, y, &line, area.width);
                    y += 1;
                }
            }
            y += u16::from(is_full);
        }
        if !is_full {
            y += 1;
        }
        if y < foot.y {
            self.draw_tree(Rect { y, height: foot.y - y, ..area }, buffer, state);
        }
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        buffer.set_style(foot, reversed);
        buffer.set_stringn(foot.x, foot.y, &self.foot, foot.width.into(), reversed);
        if let Some(popup) = &self.popup {
            draw_popup(popup, area, buffer);
        }
    }

    fn paint(&self, colour: Color) -> Style {
        if self.has_colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn panel_lines<'a>(&self, panel: &'a Panel, width: u16) -> Vec<Line<'a>> {
        let width = usize::from(width);
        let pressure = panel
            .pressure
            .map_or_else(String::new, |(some, full)| format!("pressure, 10s: some {some:.1}%, full {full:.1}%"));
        let mut lines = vec![Line::from(sides(&panel.title, &pressure, width)).style(Modifier::BOLD)];
        lines.push(self.bar(panel, width));
        lines.extend(self.legend(panel, width));
        let moves = panel.rates.map(|(into, out)| {
            let rate = |bytes: f64| format!("{}/s", short_size(bytes as u64));
            let most = panel.link.map_or_else(String::new, |link| format!(" of {}/s", short_size(link)));
            format!("in {}, out {}{most}", rate(into), rate(out))
        });
        let holders = format!("holder  {}", panel.holders);
        lines.push(Line::from(sides(&holders, &moves.unwrap_or_default(), width)));
        lines.push(Line::from(format!("queue   {}", panel.queue_in_words())));
        lines.extend(panel.notes.iter().map(|note| Line::styled(note.as_str(), self.paint(Color::Red))));
        lines
    }

    /// A panel in one line.
    fn panel_line<'a>(&self, panel: &'a Panel, width: u16) -> Line<'a> {
        let used = panel.total.saturating_sub(panel.bytes(Kind::Free));
        let waiting = match panel.queue.len() {
            0 => String::new(),
            many => format!(", {many} wait"),
        };
        let name = format!("{:<4} ", panel.number);
        let text = format!(" {} of {}  {}{waiting}", short_size(used), short_size(panel.total), panel.holders);
        let mut spans = vec![Span::raw(name)];
        spans.extend(self.bar(panel, usize::from(width) / 3).spans);
        spans.push(Span::raw(text));
        Line::from(spans)
    }

    /// The bar of a GPU's memory by kind.
    fn bar(&self, panel: &Panel, width: usize) -> Line<'static> {
        let cells = cells(&panel.memory, panel.total, width.saturating_sub(2));
        let part = |(kind, cells): (Kind, usize)| {
            let (letter, colour, _) = kind.look(panel.has_contexts);
            Span::styled(letter.to_string().repeat(cells), self.paint(colour))
        };
        let parts = cells.into_iter().map(part);
        Line::from([Span::raw("[")].into_iter().chain(parts).chain([Span::raw("]")]).collect::<Vec<_>>())
    }

    /// The legend of the letters that occur in the bar.
    fn legend(&self, panel: &Panel, width: usize) -> Vec<Line<'static>> {
        let mut lines: Vec<Vec<Span<'static>>> = vec![Vec::new()];
        let mut length = 0;
        for (kind, bytes) in panel.memory.iter().filter(|(kind, bytes)| *bytes > 0 || *kind == Kind::Free) {
            let (letter, colour, name) = kind.look(panel.has_contexts);
            let text = format!("{letter} {name} {}  ", short_size(*bytes));
            if length > 0 && length + text.trim_end().len() > width {
                lines.push(Vec::new());
                length = 0;
            }
            length += text.len();
            if let Some(line) = lines.last_mut() {
                line.push(Span::styled(text, self.paint(colour)));
            }
        }
        lines.into_iter().map(Line::from).collect()
    }

    fn draw_tree(&self, area: Rect, buffer: &mut Buffer, state: &mut TableState) {
        let has_gpus = self.panels.len() > 1;
        let right = |text: String| Line::from(text).right_aligned();
        // Narrow terminals show only the two memory columns.
        let columns = if area.width < NARROW { 2 } else { 5 };
        let names =
            ["ON GPU", "SWAPPED", "DUE", "HAD", "WAITED"].map(|name| right(name.into())).into_iter().take(columns);
        let gpu = has_gpus.then(|| Line::from("GPU"));
        let heading = [Line::from("PROGRAM"), Line::from("STATE")].into_iter().chain(gpu).chain(names);
        let heading = widgets::Row::new(heading).style(Style::new().add_modifier(Modifier::BOLD));
        let rows = self.rows.iter().map(|row| {
            let Row { depth, label, state, amounts, .. } = row;
            let is_process = row.program.is_some();
            let style = match row.tone {
                Tone::Plain => Style::new(),
                Tone::Runs => self.paint(Color::Green),
                Tone::Waits => self.paint(Color::Yellow),
                Tone::Bad => self.paint(Color::Red),
            };
            let percent = |part: f64| format!("{:.0}%", part * 100.0);
            let cells = [
                short_size(amounts.resident),
                short_size(amounts.swapped),
                amounts.due.map_or_else(|| "-".into(), |due| percent(f64::from(due) / 1000.0)),
                amounts.had.map_or_else(|| "-".into(), percent),
                units::duration(Duration::try_from_secs_f64(amounts.waited).unwrap_or_default()),
            ];
            let gpu = has_gpus.then(|| Line::from(row.gpu.as_str()));
            let label = Line::from(format!("{:1$}{label}", "", depth * 2));
            let state = Line::styled(state.as_str(), style);
            let cells = [label, state].into_iter().chain(gpu).chain(cells.map(right).into_iter().take(columns));
            let weight = if is_process { Modifier::empty() } else { Modifier::BOLD };
            widgets::Row::new(cells).style(Style::new().add_modifier(weight))
        });
        let gpu = has_gpus.then_some(Constraint::Length(4));
        let widths = [Constraint::Fill(1), Constraint::Length(19)].into_iter().chain(gpu);
        let widths = widths.chain([7, 7, 4, 4, 9].map(Constraint::Length).into_iter().take(columns));
        let table = Table::new(rows, widths).header(heading).row_highlight_style(Modifier::REVERSED);
        state.select(self.selected);
        StatefulWidget::render(table, area, buffer, state);
    }
}

/// A line with text at both ends. The left text is cut to fit.
fn sides(left: &str, right: &str, width: usize) -> String {
    let length = right.chars().count();
    let room = width.saturating_sub(if length > 0 { length + 2 } else { 0 });
    let left: String = left.chars().take(room).collect();
    let gap = width.saturating_sub(left.chars().count() + length);
    format!("{left}{:gap$}{right}", "")
}

/// Returns the number of cells of each kind of memory in a bar. Each kind that is present gets at
/// least one cell, and free memory gets the remaining cells.
fn cells(memory: &[(Kind, u64)], total: u64, width: usize) -> Vec<(Kind, usize)> {
    let of = |bytes: u64| (bytes as f64 * width as f64 / total.max(1) as f64).round() as usize;
    let used = memory.iter().filter(|(kind, bytes)| *kind != Kind::Free && *bytes > 0);
    let mut cells: Vec<(Kind, usize)> = used.map(|(kind, bytes)| (*kind, of(*bytes).max(1))).collect();
    let sum = |cells: &[(Kind, usize)]| cells.iter().map(|(_, cells)| cells).sum::<usize>();
    while sum(&cells) > width {
        match cells.iter_mut().max_by_key(|(_, cells)| *cells) {
            Some((_, cells)) if *cells > 0 => *cells -= 1,
            _ => break,
        }
    }
    let rest = width.saturating_sub(sum(&cells));
    cells.push((Kind::Free, rest));
    cells
}

fn draw_popup(popup: &Popup, area: Rect, buffer: &mut Buffer) {
    let width = area.width.saturating_sub(4).min(76);
    let text = Paragraph::new(popup.text.as_str()).wrap(Wrap { trim: false });
    let inner = usize::from(width.saturating_sub(2)).max(1);
    // The factor accounts for blanks at the ends of wrapped lines.
    let lines: usize = popup.text.lines().map(|line| line.chars().count() * 10 / 9 / inner + 1).sum();
    let height = u16::try_from(lines + 2).unwrap_or(u16::MAX).min(area.height);
    let place = Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height };
    Clear.render(place, buffer);
    text.block(Block::bordered().title(popup.title.as_str())).render(place, buffer);
}
