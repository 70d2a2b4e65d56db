//! Draws a screen as an SVG file, for the README: text in the terminal's colours, without scripts or fonts.

use std::fmt::Write;

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

// All lengths are in pixels.
const COLUMN: f64 = 8.4;
const ROW: f64 = 19.0;
const MARGIN: f64 = 14.0;

/// The name of the theme's file in `docs`, and the colours of the page, the text and the terminal.
pub struct Theme {
    pub file: &'static str,
    page: &'static str,
    text: &'static str,
    colours: [(Color, &'static str); 6],
}

pub const THEMES: [Theme; 2] = [
    Theme {
        file: "top.svg",
        page: "#f6f8fa",
        text: "#1f2328",
        colours: [
            (Color::Green, "#1a7f37"),
            (Color::Cyan, "#1b7c83"),
            (Color::Red, "#cf222e"),
            (Color::Yellow, "#9a6700"),
            (Color::Magenta, "#8250df"),
            (Color::DarkGray, "#818b98"),
        ],
    },
    Theme {
        file: "top-dark.svg",
        page: "#151b23",
        text: "#f0f6fc",
        colours: [
            (Color::Green, "#3fb950"),
            (Color::Cyan, "#39c5cf"),
            (Color::Red, "#ff7b72"),
            (Color::Yellow, "#d29922"),
            (Color::Magenta, "#be8fff"),
            (Color::DarkGray, "#656c76"),
        ],
    },
];

impl Theme {
    pub fn draw(&self, screen: &Buffer) -> String {
        let (width, height) = (f64::from(screen.area.width) * COLUMN, f64::from(screen.area.height) * ROW);
        let (width, height) = (width + 2.0 * MARGIN, height + 2.0 * MARGIN);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\">\n<title>nvsharectl top</title>\n\
             <style>text{{font:14px monospace;fill:{}}}</style>\n\
             <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{}\"/>\n",
            self.text, self.page
        );
        let rows = screen.content().chunks(screen.area.width.into());
        for (row, cells) in rows.enumerate() {
            let y = MARGIN + ROW * (row as f64 + 0.75);
            let mut column = 0;
            for run in cells.chunk_by(|a, b| (a.fg, a.modifier) == (b.fg, b.modifier)) {
                self.write_run(&mut out, column, y, run);
                column += run.len();
            }
        }
        out + "</svg>\n"
    }

    /// Draws cells of one style. Each part between wide gaps is positioned separately, so that
    /// columns align in every font.
    fn write_run(&self, out: &mut String, column: usize, y: f64, cells: &[Cell]) {
        let mut style = String::new();
        if let Some((_, colour)) = self.colours.iter().find(|(colour, _)| *colour == cells[0].fg) {
            style += &format!(" style=\"fill:{colour}\"");
        }
        if cells[0].modifier.contains(Modifier::BOLD) {
            style += " font-weight=\"bold\"";
        }
        let text: String = cells.iter().map(Cell::symbol).collect();
        let mut at = column;
        for part in text.split("  ") {
            let word = part.trim_start();
            let before = part.chars().count() - word.chars().count();
            let (x, length) = (MARGIN + COLUMN * (at + before) as f64, COLUMN * word.trim_end().chars().count() as f64);
            let word = word.trim_end().replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
            if !word.is_empty() {
                let _ =
                    writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" textLength=\"{length:.1}\"{style}>{word}</text>");
            }
            at += part.chars().count() + 2;
        }
    }
}
