//! `nvsharectl report`: GPU usage of users, units and containers.

use std::time::{Duration, SystemTime};

use clap::ValueEnum;
use serde_json::{Map, Value, json};

use super::status;
use super::table::{Align, Table};
use super::{CtlError, Target, block_on};
use crate::bus::Usage;
use crate::config::units;

/// The grouping of the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum By {
    User,
    Unit,
    Container,
}

impl By {
    /// Returns the columns to query. Units and containers are grouped per user.
    fn columns(self) -> &'static [&'static str] {
        match self {
            Self::User => &["tenant"],
            Self::Unit => &["tenant", "unit"],
            Self::Container => &["tenant", "container"],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Table,
    Json,
    Csv,
}

const SECONDS_OF_AN_HOUR: f64 = 3600.0;

/// Reports the usage in the period `since` before now.
///
/// # Errors
/// The scheduler does not answer, or keeps no records.
pub fn show(target: &Target, since: Duration, by: By, form: Form) -> Result<String, CtlError> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let since = now.saturating_sub(since).as_secs_f64();
    let mut rows = block_on(async { Ok(target.connect().await?.list_usage(since, by.columns()).await?) })?;
    rows.sort_by(|a, b| b.lock_seconds.total_cmp(&a.lock_seconds));
    Ok(match form {
        Form::Table => text(&rows, by),
        Form::Json => json_text(&rows, by),
        Form::Csv => csv(&rows, by),
    })
}

/// Returns the names and values of a row's grouping columns.
fn names(row: &Usage, by: By) -> Vec<(&'static str, String)> {
    let name = |column: &&'static str| {
        let name = match *column {
            "tenant" => &row.tenant,
            "unit" => &row.unit,
            _ => &row.container,
        };
        (*column, name.clone().unwrap_or_default())
    };
    by.columns().iter().map(name).collect()
}

fn text(rows: &[Usage], by: By) -> String {
    if rows.is_empty() {
        return "No program has used a GPU in that time.\n".into();
    }
    let mut columns: Vec<(&str, Align)> = match by {
        By::User => vec![("USER", Align::Left)],
        By::Unit => vec![("USER", Align::Left), ("UNIT", Align::Left)],
        By::Container => vec![("USER", Align::Left), ("CONTAINER", Align::Left)],
    };
    columns
        .extend(["HELD", "ON GPU", "SWAPPED", "WAITS", "WAITED", "MOVED IN", "MOVED OUT"].map(|c| (c, Align::Right)));
    let mut table = Table::new(&columns);
    let time = |seconds: f64| units::duration(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX));
    let over_time = |byte_seconds: f64| match byte_seconds / SECONDS_OF_AN_HOUR {
        hours if hours < 0.5 => "0".to_owned(),
        hours => format!("{} h", units::size(hours.round() as u64)),
    };
    for row in rows {
        let names = names(row, by).into_iter().map(|(column, name)| match column {
            _ if name.is_empty() => "-".into(),
            "tenant" => status::tenant(&name),
            _ => name,
        });
        let amounts = [
            time(row.lock_seconds),
            over_time(row.resident_byte_seconds),
            over_time(row.swapped_byte_seconds),
            row.grants.to_string(),
            time(row.wait_seconds),
            units::size(row.swapped_in_bytes),
            units::size(row.swapped_out_bytes),
        ];
        table.row(names.chain(amounts).collect());
    }
    table.lines().join("\n") + "\n"
}

/// Returns the names and values of all columns of a row.
fn fields(row: &Usage, by: By) -> Vec<(&'static str, Value)> {
    let names = names(row, by).into_iter().map(|(column, name)| (column, json!(name)));
    let amounts = [
        ("lock-seconds", json!(row.lock_seconds)),
        ("grants", json!(row.grants)),
        ("wait-seconds", json!(row.wait_seconds)),
        ("resident-byte-seconds", json!(row.resident_byte_seconds)),
        ("swapped-byte-seconds", json!(row.swapped_byte_seconds)),
        ("swapped-in-bytes", json!(row.swapped_in_bytes)),
        ("swapped-out-bytes", json!(row.swapped_out_bytes)),
    ];
    names.chain(amounts).collect()
}

fn json_text(rows: &[Usage], by: By) -> String {
    let object = |row| fields(row, by).into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<Map<_, _>>();
    format!("{:#}\n", rows.iter().map(|row| Value::Object(object(row))).collect::<Value>())
}

/// Formats CSV by RFC 4180, except that lines end with LF. Without rows, the text contains only the
/// header.
fn csv(rows: &[Usage], by: By) -> String {
    let quoted = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        match text.contains([',', '"', '\n', '\r']) {
            true => format!("\"{}\"", text.replace('"', "\"\"")),
            false => text,
        }
    };
    let heading = fields(&Usage::default(), by).iter().map(|(name, _)| *name).collect::<Vec<_>>().join(",");
    let line = |row| fields(row, by).iter().map(|(_, value)| quoted(value)).collect::<Vec<_>>().join(",");
    let lines = std::iter::once(heading).chain(rows.iter().map(line));
    lines.map(|line| line + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tenant: &str, unit: &str) -> Usage {
        Usage {
            tenant: Some(tenant.into()),
            unit: Some(unit.into()),
            lock_seconds: 3900.0,
            grants: 12,
            wait_seconds: 62.5,
            resident_byte_seconds: 1.5 * 3600.0 * f64::from(1 << 30),
            swapped_in_bytes: 3 << 30,
            ..Usage::default()
        }
    }

    #[test]
    fn a_table_has_hours_and_sizes() {
        // The first uid has no name. The second has a name on every host.
        let rows = [row("user 4294967294", "a.service"), row("user 0", "")];
        let expected = "\
USER             UNIT           HELD     ON GPU  SWAPPED  WAITS    WAITED  MOVED IN  MOVED OUT
user 4294967294  a.service  1h 05min  1.5 GiB h        0     12  1min 02s     3 GiB        0 B
root             -          1h 05min  1.5 GiB h        0     12  1min 02s     3 GiB        0 B
";
        assert_eq!(text(&rows, By::Unit), expected);
        assert!(text(&rows, By::User).starts_with("USER                 HELD  "));
        assert!(text(&[], By::User).starts_with("No program"));
    }

    #[test]
    fn csv_has_the_json_names_and_quotes_special_characters() {
        let rows = [row("user 1000", "a,\"b.service")];
        let json: Value = serde_json::from_str(&json_text(&rows, By::Unit)).expect("JSON");
        assert_eq!((&json[0]["unit"], &json[0]["wait-seconds"]), (&json!("a,\"b.service"), &json!(62.5)));
        let lines: Vec<String> = csv(&rows, By::Unit).lines().map(str::to_owned).collect();
        let names: Vec<&str> = lines[0].split(',').collect();
        assert!(names.iter().all(|name| !json[0][*name].is_null()) && names.len() == 9, "{names:?}");
        assert_eq!(names[..4], ["tenant", "unit", "lock-seconds", "grants"]);
        assert!(lines[1].starts_with("user 1000,\"a,\"\"b.service\",3900.0,12,62.5,"), "{}", lines[1]);
        assert_eq!(csv(&[], By::Unit).lines().collect::<Vec<_>>(), [lines[0].as_str()]);
    }
}
