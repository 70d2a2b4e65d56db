//! Warnings about pods. Each warning is logged once, and only a few are logged per pod, so that
//! annotations cannot fill the log.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

/// The limit of warnings per pod.
const MOST: usize = 10;

/// Maximum length of a line in characters.
const LONGEST: usize = 400;

/// The warnings about each pod, by its UID.
#[derive(Debug, Default)]
pub struct PodWarnings(BTreeMap<String, BTreeSet<String>>);

impl PodWarnings {
    /// Logs a sentence about a pod, unless it was logged before.
    pub fn log(&mut self, uid: &str, pod: &str, what: &str) {
        if let Some(line) = self.line(uid, pod, what) {
            warn!("{line}");
        }
    }

    fn line(&mut self, uid: &str, pod: &str, what: &str) -> Option<String> {
        let said = self.0.entry(uid.to_owned()).or_default();
        if said.len() > MOST || said.contains(what) {
            return None;
        }
        said.insert(what.to_owned());
        Some(match said.len() {
            n if n > MOST => format!("pod {pod}: suppressing further warnings about its annotations"),
            _ => format!("pod {pod}: {}", plain(what)),
        })
    }

    /// Forgets pods that no longer exist.
    pub fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| is_there(uid));
    }
}

/// Converts the text to one line without control characters, and cuts it at the maximum length.
fn plain(text: &str) -> String {
    let mut line: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).take(LONGEST).collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_warning_is_logged_once_per_pod() {
        let mut warnings = PodWarnings::default();
        assert_eq!(warnings.line("1", "a/b", "it is wrong").as_deref(), Some("pod a/b: it is wrong"));
        assert_eq!(warnings.line("1", "a/b", "it is wrong"), None);
        assert!(warnings.line("2", "a/b", "it is wrong").is_some());
        warnings.keep(|uid| uid == "2");
        assert!(warnings.line("1", "a/b", "it is wrong").is_some());
    }

    #[test]
    fn one_pod_cannot_fill_the_log() {
        let mut warnings = PodWarnings::default();
        let lines: Vec<_> = (0..1000).filter_map(|n| warnings.line("1", "a/b", &format!("wrong {n}"))).collect();
        assert_eq!(lines.len(), MOST + 1);
        assert!(lines.last().is_some_and(|line| line.contains("suppressing further warnings")), "{lines:?}");
        let line = warnings.line("2", "a/b", &format!("\u{1b}[2J\n{}", "x".repeat(100_000))).expect("a line");
        assert!(line.len() < 500 && !line.contains('\u{1b}') && !line.contains('\n'), "{line}");
    }
}
