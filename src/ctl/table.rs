//! Text in aligned columns.

/// The blanks between columns.
const GAP: &str = "  ";

/// The alignment of a column's cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

#[derive(Debug)]
pub struct Table {
    align: Vec<Align>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Creates a table with these headings.
    pub fn new(columns: &[(&str, Align)]) -> Self {
        Self {
            align: columns.iter().map(|(_, align)| *align).collect(),
            rows: vec![columns.iter().map(|(name, _)| (*name).to_owned()).collect()],
        }
    }

    pub fn row(&mut self, cells: Vec<String>) {
        self.rows.push(cells);
    }

    /// Removes columns in the order of `order`, until a line of `width` characters leaves at least
    /// `least` characters for the last column.
    pub fn fit(&mut self, width: usize, order: &[&str], least: usize) {
        for name in order {
            let widths = self.widths();
            let others: usize = widths.iter().rev().skip(1).map(|width| width + GAP.len()).sum();
            if others + widths.last().copied().unwrap_or(0).min(least) <= width {
                return;
            }
            if let Some(at) = self.rows.first().and_then(|headings| headings.iter().position(|heading| heading == name))
            {
                self.align.remove(at);
                self.rows.iter_mut().filter(|row| at < row.len()).for_each(|row| drop(row.remove(at)));
            }
        }
    }

    fn widths(&self) -> Vec<usize> {
        let width = |column: usize| {
            self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        (0..self.align.len()).map(width).collect()
    }

    /// Returns the lines, headings first, without trailing blanks. Two blanks separate columns.
    pub fn lines(&self) -> Vec<String> {
        let widths = self.widths();
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).zip(&self.align).map(|((cell, width), align)| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            });
            cells.collect::<Vec<_>>().join(GAP).trim_end().to_owned()
        };
        self.rows.iter().map(line).collect()
    }
}

/// Breaks text into lines of at most `width` characters, between words if possible.
pub fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let mut word: Vec<char> = word.chars().collect();
        while let Some(line) = lines.last_mut() {
            let length = line.chars().count();
            let gap = usize::from(length > 0);
            if length + gap + word.len() <= width || (length == 0 && word.len() <= width.max(1)) {
                line.extend(std::iter::repeat_n(' ', gap).chain(word));
                break;
            }
            if length == 0 {
                line.extend(word.drain(..width.max(1)));
            }
            lines.push(String::new());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_omitted_until_the_rest_fits() {
        let columns = ["PID", "ENGINE", "HELD", "COMMAND"].map(|name| (name, Align::Left));
        let fitted = |width: usize| {
            let mut table = Table::new(&columns);
            table.row(["12345", "swap", "4.0s", "python3 train.py"].map(str::to_owned).to_vec());
            table.fit(width, &["ENGINE", "HELD"], 10);
            table.lines()[0].split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(fitted(31), "PID ENGINE HELD COMMAND");
        assert_eq!(fitted(30), "PID HELD COMMAND");
        assert_eq!(fitted(10), "PID COMMAND");
    }

    #[test]
    fn text_wraps_between_words() {
        assert_eq!(wrapped("ab cde f", 5), ["ab", "cde f"]);
        assert_eq!(wrapped("abcdefgh i", 3), ["abc", "def", "gh", "i"]);
        assert_eq!(wrapped("", 3), [""]);
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&[("PID", Align::Right), ("NAME", Align::Left), ("X", Align::Left)]);
        table.row(vec!["1".into(), "größer".into(), String::new()]);
        table.row(vec!["12345".into(), "a".into(), "b".into()]);
        assert_eq!(table.lines(), ["  PID  NAME    X", "    1  größer", "12345  a       b"]);
    }
}
