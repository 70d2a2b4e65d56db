//! Prints one line per turn, of at most 100 columns. The line is coloured only on a terminal and
//! without `NO_COLOR`.

use crate::{
    sizes::mib,
    story::{Move, Turn},
};
use std::{env, io::IsTerminal};

pub const WIDTH: usize = 100;

/// The colours of the text.
#[derive(Debug, Clone, Copy)]
pub struct Paint {
    colour: bool,
}

impl Paint {
    pub fn of_stdout() -> Paint {
        let plain = env::var("NO_COLOR").is_ok_and(|value| !value.is_empty());
        Paint { colour: std::io::stdout().is_terminal() && !plain }
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
}

/// The heading of the turns.
pub fn heading(paint: &Paint) -> String {
    paint.bold("      at   lock   waited     held   moved to the host first       moved to the GPU")
}

/// The line of one turn.
pub fn turn(turn: &Turn, names: &[&str; 2], paint: &Paint) -> String {
    let moved = |who: usize, part: Move| match part.bytes {
        0 => "-".to_owned(),
        bytes => format!("{} of {} in {:.2} s", mib(bytes), names[who], part.to - part.from),
    };
    let (out, back) = (moved(1 - turn.who, turn.out), moved(turn.who, turn.back));
    let name = paint.bold(&format!("{:^6}", names[turn.who]));
    format!("{:6.1} s {name} {:6.2} s {:6.2} s   {out:<29} {back}", turn.at, turn.waited, turn.held)
}
