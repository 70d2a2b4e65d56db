//! Makes untrusted text, such as names of programs, units and GPUs, safe for terminals, logs and pictures.

/// Replaces unsafe characters with `?`: characters that a terminal could interpret as a command,
/// that change the direction of nearby text, or that are invisible.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if is_printable(c) { c } else { '?' }).collect()
}

fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unprintable_characters_are_replaced() {
        assert_eq!(printable("träin.py «7» 日本"), "träin.py «7» 日本");
        assert_eq!(printable("\u{1b}]0;owned\u{7}a\u{9b}31m\n"), "?]0;owned?a?31m?");
        assert_eq!(printable("gpj.\u{202e}yp\u{200b}\u{2066}x\u{feff}"), "gpj.?yp??x?");
    }
}
