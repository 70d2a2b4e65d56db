//! `nvsharectl pressure`: the fraction of time for which programs were kept from GPUs.

use serde_json::Value;

use super::status;
use super::table::{Align, Table};
use super::{CtlError, Target, block_on};
use crate::bus::Pressure;
use crate::bus::status::json_fields;

/// Number of displayed characters of a GPU's UUID, which are `GPU-` and the first eight digits.
const SHORT_UUID: usize = 12;

/// Returns the pressure as a table or as JSON.
///
/// # Errors
/// The scheduler does not answer.
pub fn show(target: &Target, as_json: bool) -> Result<String, CtlError> {
    let groups = block_on(async { Ok(target.connect().await?.list_pressure().await?) })?;
    if as_json {
        return Ok(format!("{:#}\n", Value::Array(groups.iter().map(group_json).collect())));
    }
    Ok(text(&groups))
}

fn text(groups: &[Pressure]) -> String {
    if groups.is_empty() {
        return "No program has used a GPU in the last five minutes.\n".into();
    }
    let mut table = Table::new(&[
        ("KIND", Align::Left),
        ("NAME", Align::Left),
        ("SOME 10s", Align::Right),
        ("60s", Align::Right),
        ("300s", Align::Right),
        ("FULL 10s", Align::Right),
        ("60s", Align::Right),
        ("300s", Align::Right),
    ]);
    for group in groups {
        let averages: [f64; 6] = [
            group.some_avg10,
            group.some_avg60,
            group.some_avg300,
            group.full_avg10,
            group.full_avg60,
            group.full_avg300,
        ];
        let averages = averages.map(|percent| format!("{percent:.1}%"));
        // Omits groups whose programs never waited, and groups whose programs ended long ago. A GPU
        // always has a line.
        if group.kind != "gpu" && averages.iter().all(|percent| percent == "0.0%") {
            continue;
        }
        let name = match group.kind.as_str() {
            "tenant" => status::tenant(&group.name),
            // The shortened UUID distinguishes GPUs and fits a terminal. JSON contains the whole
            // UUID.
            "gpu" => group.name.chars().take(SHORT_UUID).collect(),
            _ => group.name.clone(),
        };
        table.row([group.kind.clone(), name].into_iter().chain(averages).collect());
    }
    table.lines().join("\n") + "\n"
}

fn group_json(group: &Pressure) -> Value {
    json_fields!(
        group; kind, name, some_avg10, some_avg60, some_avg300, some_total, full_avg10, full_avg60, full_avg300,
        full_total,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_has_a_line() {
        let group = Pressure {
            kind: "gpu".into(),
            name: "GPU-1".into(),
            some_avg10: 33.34,
            full_avg300: 0.06,
            ..Pressure::default()
        };
        let expected = "KIND  NAME   SOME 10s   60s  300s  FULL 10s   60s  300s\n\
                        gpu   GPU-1     33.3%  0.0%  0.0%      0.0%  0.0%  0.1%\n";
        let ended = Pressure { kind: "tenant".into(), name: "user 5".into(), some_avg300: 0.04, ..Pressure::default() };
        assert_eq!(text(&[group, ended]), expected);
        assert!(text(&[]).starts_with("No program"));
    }
}
