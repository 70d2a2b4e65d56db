//! `nvsharectl simulate`: simulates a described mix of programs under each policy, and prints
//! tables or JSON.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::CtlError;
use super::table::{Align, Table};
use crate::config::units;
use crate::simulate;
use crate::simulate::figures::Spread;
use crate::simulate::policies::{POLICIES, Policy};
use crate::simulate::report::{Figures, JobFigures, Report};
use crate::simulate::scenario::Scenario;
use crate::timeline::{Timeline, svg};

/// Simulates the file's scenario under the named policies. Without names, simulates every policy
/// that agrees with the settings in the file. Returns the text to print. If `timeline` names a
/// file, writes a picture of each policy's timeline to that file.
pub fn simulate(file: &Path, names: &[String], timeline: Option<&Path>, json: bool) -> Result<String, CtlError> {
    let scenario = Scenario::load(file).map_err(|e| CtlError::Failed(e.to_string()))?;
    let policies = policies(&scenario, names);
    if let Some(output) = timeline {
        let title = format!("{} under each policy, simulated", file.display());
        super::timeline::write(output, &picture(&scenario, &policies, &title))?;
    }
    let report = simulate::run(&scenario, &policies);
    Ok(if json { format!("{:#}\n", self::json(&report)) } else { text(&report) })
}

/// Draws the timelines of all policies in one picture, on a common time axis.
fn picture(scenario: &Scenario, policies: &[Policy], title: &str) -> String {
    let mut all = Timeline::default();
    let mut headings = BTreeMap::new();
    for (order, policy) in policies.iter().enumerate() {
        let timeline = simulate::draw(scenario, policy);
        for (place, gpu) in timeline.lanes.keys().enumerate() {
            let of = if scenario.gpus.len() > 1 { format!(", GPU {place}") } else { String::new() };
            headings.insert(format!("{order:04} {gpu}"), format!("{}{of}", policy.name));
        }
        all.append(timeline, |gpu| format!("{order:04} {gpu}"));
    }
    svg::draw(&all, title, |gpu| headings.get(gpu).cloned().unwrap_or_default())
}

fn policies(scenario: &Scenario, names: &[String]) -> Vec<Policy> {
    if !names.is_empty() {
        return POLICIES.into_iter().filter(|policy| names.iter().any(|name| name == policy.name)).collect();
    }
    let differs = |policy: &Policy| {
        scenario.mode.is_none_or(|mode| mode == policy.mode)
            && scenario.policy.is_none_or(|order| order == policy.order)
            && (scenario.has_rules() || !policy.rules)
    };
    POLICIES.into_iter().filter(differs).collect()
}

/// The report as tables.
pub fn text(report: &Report) -> String {
    let number = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    let head = format!(
        "{} of {} on {}",
        number(report.programs, "program"),
        number(report.users, "user"),
        number(report.gpus, "GPU")
    );
    let parts = [vec![head], completions(report), gpus(report), jobs(report)];
    parts.map(|lines| lines.join("\n") + "\n").join("\n")
}

fn completions(report: &Report) -> Vec<String> {
    let mut table = Table::new(&columns(&[
        "POLICY", "DONE", "FAILED", "LEFT", "LAST", "MEAN", "MEDIAN", "95%", "WORST", "WAIT", "99%", "WORST",
    ]));
    for figures in &report.policies {
        let spread = |of: fn(&Spread) -> Duration| shown(figures.completion.as_ref().map(of));
        let waits = [figures.wait_mean, figures.wait_most, figures.wait_worst].map(units::fine_duration);
        let ends = [figures.done, figures.failed, figures.unfinished].map(|count| count.to_string());
        let mut row = vec![figures.policy.to_owned()];
        row.extend(ends);
        row.push(shown(figures.last));
        row.extend([spread(|s| s.mean), spread(|s| s.median), spread(|s| s.most), spread(|s| s.worst)]);
        row.extend(waits);
        table.row(row);
    }
    table.lines()
}

fn gpus(report: &Report) -> Vec<String> {
    let mut table =
        Table::new(&columns(&["POLICY", "FAIRNESS", "GPU BUSY", "HAND-OVERS", "SWAPPED OUT", "SWAPPED IN"]));
    for figures in &report.policies {
        table.row(vec![
            figures.policy.to_owned(),
            figures.fairness.map_or_else(|| "-".to_owned(), |fairness| format!("{fairness:.3}")),
            format!("{:.1}%", figures.busy * 100.0),
            figures.hand_overs.to_string(),
            units::size(figures.swapped_out),
            units::size(figures.swapped_in),
        ]);
    }
    table.lines()
}

/// Returns, for each job, the mean completion time of the job's programs, and the ratio of this
/// time to the time that the job takes alone. If no program of a job has ended, returns the job's
/// share of the GPU time instead.
fn jobs(report: &Report) -> Vec<String> {
    let policies = report.policies.iter().map(|figures| figures.policy.to_uppercase());
    let names: Vec<String> = ["JOB".to_owned(), "ALONE".to_owned()].into_iter().chain(policies).collect();
    let mut table = Table::new(&columns(&names.iter().map(String::as_str).collect::<Vec<_>>()));
    for (at, job) in report.jobs.iter().enumerate() {
        let cell = |figures: &Figures| match figures.jobs.get(at) {
            Some(JobFigures { completion: Some(mean), slowdown: Some(slowdown), .. }) => {
                format!("{} ×{slowdown:.2}", units::duration(*mean))
            }
            Some(JobFigures { had, .. }) if !had.is_zero() => {
                let all: Duration = figures.jobs.iter().map(|job| job.had).sum();
                format!("{:.1}%", had.as_secs_f64() / all.as_secs_f64() * 100.0)
            }
            _ => "-".to_owned(),
        };
        let row = [job.name.clone(), units::duration(job.alone)].into_iter();
        table.row(row.chain(report.policies.iter().map(cell)).collect());
    }
    table.lines()
}

/// Returns columns, of which the first is left-aligned and all others are right-aligned.
fn columns<'a>(names: &[&'a str]) -> Vec<(&'a str, Align)> {
    let align = |at| if at == 0 { Align::Left } else { Align::Right };
    names.iter().enumerate().map(|(at, name)| (*name, align(at))).collect()
}

fn shown(duration: Option<Duration>) -> String {
    duration.map_or_else(|| "-".to_owned(), units::duration)
}

/// Formats the report as JSON, with times in seconds and memory in bytes.
pub fn json(report: &Report) -> Value {
    json!({
        "programs": report.programs,
        "users": report.users,
        "gpus": report.gpus,
        "policies": report.policies.iter().map(|figures| policy(report, figures)).collect::<Vec<_>>(),
    })
}

fn policy(report: &Report, figures: &Figures) -> Value {
    let seconds = |time: Option<Duration>| time.map(|time| time.as_secs_f64());
    let spread = figures.completion.map(|spread| {
        let Spread { mean, median, most, worst } = spread;
        let [mean, median, most, worst] = [mean, median, most, worst].map(|time| time.as_secs_f64());
        json!({ "mean": mean, "total": mean * figures.done as f64, "median": median, "95%": most, "worst": worst })
    });
    let [mean, most, worst] = [figures.wait_mean, figures.wait_most, figures.wait_worst].map(|time| time.as_secs_f64());
    let jobs = report.jobs.iter().zip(&figures.jobs).map(|(job, figures)| {
        json!({
            "name": job.name,
            "programs": job.programs,
            "alone": job.alone.as_secs_f64(),
            "done": figures.done,
            "completion": seconds(figures.completion),
            "slowdown": figures.slowdown,
            "gpu-time": figures.had.as_secs_f64(),
        })
    });
    json!({
        "policy": figures.policy,
        "done": figures.done,
        "failed": figures.failed,
        "unfinished": figures.unfinished,
        "last": seconds(figures.last),
        "completion": spread,
        "wait": { "mean": mean, "99%": most, "worst": worst },
        "fairness": figures.fairness,
        "busy": figures.busy,
        "hand-overs": figures.hand_overs,
        "swapped-out": figures.swapped_out,
        "swapped-in": figures.swapped_in,
        "events": figures.events,
        "jobs": jobs.collect::<Vec<_>>(),
    })
}
