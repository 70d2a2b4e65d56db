//! Patterns of names and paths, with checks that reject patterns which can match nothing.

use std::ops::Range;

use toml::Spanned;

use super::parse::Mistake;
use super::rule::Glob;
use crate::identity;

pub(super) const PATTERNS: &str = "* matches anything but /, ? one character, [ab] one of the listed characters, and \
    ** between slashes any number of directories";

/// Parses a pattern. Rejects a pattern that can match nothing.
pub fn pattern(key: &str, text: Spanned<String>) -> Result<(Glob, Range<usize>), Mistake> {
    let span = text.span();
    let text = text.into_inner();
    let wrong = |why: String| (span.clone(), format!("{key}: {text:?} {why}"));
    if text.is_empty() {
        return Err(wrong("matches nothing. Omit the key to match every program".into()));
    }
    let glob =
        glob::Pattern::new(&text).map_err(|e| wrong(format!("is not a valid pattern ({}): {PATTERNS}", e.msg)))?;
    let is_path = text.contains('/');
    if key == "container" && is_path {
        return Err(wrong("cannot match a container. Write its ID, or * for any".into()));
    }
    let slashes = text.matches('/').count();
    let is_of_kubernetes = key == "pod" || key == "claim";
    if is_of_kubernetes && (slashes > 1 || text.starts_with('/') || text.ends_with('/')) {
        return Err(wrong(format!(
            "cannot match a {key}. Write its namespace and name, as in \"team-a/train-*\", or its UID"
        )));
    }
    if !is_of_kubernetes && is_path && !text.starts_with('/') && !text.starts_with("**/") {
        return Err(wrong("cannot match a path: a path begins with / or **/".into()));
    }
    let name = identity::name(&text);
    let is_open = name.ends_with(['*', '?', ']']);
    let example = if name.is_empty() { "jupyter" } else { name.trim_end_matches('.') };
    match key {
        "unit" if !is_open && !is_path && !identity::is_unit(name) => Err(wrong(format!(
            "cannot match a unit: unit names end with .service or .scope, as in \"{example}.service\""
        ))),
        "slice" if !is_open && !identity::is_slice(name) => {
            Err(wrong(format!("cannot match a slice: slice names end with .slice, as in \"{example}.slice\"")))
        }
        _ => Ok((Glob(glob), span)),
    }
}

/// Rejects a rule whose unit is given by a path outside the rule's slice.
pub fn contradiction(unit: Option<&(Glob, Range<usize>)>, slice: Option<&(Glob, Range<usize>)>) -> Result<(), Mistake> {
    let (Some((unit, _)), Some((slice, span))) = (unit, slice) else { return Ok(()) };
    let (unit, slice) = (unit.0.as_str(), slice.0.as_str());
    let is_plain = |text: &str| !text.contains(['*', '?', '[']);
    let path = format!("{unit}/");
    let within =
        if slice.contains('/') { path.starts_with(&format!("{slice}/")) } else { path.contains(&format!("/{slice}/")) };
    if unit.contains('/') && is_plain(unit) && is_plain(slice) && !within {
        return Err((span.clone(), format!("the rule can never match: unit {unit:?} is not in slice {slice:?}")));
    }
    Ok(())
}
