//! Compares the metrics in the man page and on the dashboard with the metrics that the daemon
//! serves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::scrape::{self, Scrape, scrape};
use nvshare_wire::SchedulerMessage;
use serde_json::Value;
use test_support::daemon::*;

/// Returns a scrape that contains every metric.
fn everything() -> Scrape {
    let daemon = scrape::daemon("", "[[rule]]\nmemory-max = \"2G\"");
    let client = Client::welcomed(&daemon.socket());
    client.attach();
    client.request();
    client.until(|message| matches!(message, SchedulerMessage::Grant { .. }));
    scrape(&daemon.directory.0)
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Returns the names of all samples.
fn samples(scrape: &Scrape) -> BTreeSet<String> {
    let lines = scrape.text.lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split(['{', ' ']).next()).map(str::to_owned).collect()
}

/// Returns each item of the page's section. An item has the form `.It Li NAME Pq TYPE , UNIT`, and
/// its subsection lists the labels after `Labels:`.
fn described() -> BTreeMap<String, (String, String, Vec<String>)> {
    let page = read("man/nvshare.service.8");
    let section = page.split(".Sh METRICS\n").nth(1).expect("a section").split("\n.Sh ").next().expect("its text");
    let mut found = BTreeMap::new();
    for subsection in section.split("\n.Ss ").skip(1) {
        let labels = subsection.lines().skip_while(|line| *line != "Labels:").nth(1).unwrap_or_default();
        let labels = labels.strip_prefix(".Li ").unwrap_or_default().trim_end_matches(" .");
        let mut labels: Vec<String> = labels.split(" , ").filter(|l| !l.is_empty()).map(str::to_owned).collect();
        labels.sort();
        for item in subsection.lines().filter_map(|line| line.strip_prefix(".It Li nvshare_")) {
            let (name, rest) = item.split_once(" Pq ").expect("a type");
            let (kind, unit) = rest.split_once(" , ").unwrap_or((rest, ""));
            found.insert(format!("nvshare_{name}"), (kind.to_owned(), unit.to_owned(), labels.clone()));
        }
    }
    found
}

#[test]
fn the_man_page_describes_every_metric_correctly() {
    let scrape = everything();
    let mut served = BTreeMap::new();
    for (name, family) in &scrape.families {
        let mut labels: Vec<String> = family.samples[0].labels.iter().map(|(label, _)| label.clone()).collect();
        labels.sort();
        // The name that users write in queries.
        let (name, unit) = match family.kind {
            "counter" => (format!("{name}_total"), family.unit.clone()),
            "info" => (format!("{name}_info"), family.unit.clone()),
            "histogram" => (name.clone(), "seconds".into()),
            _ => (name.clone(), family.unit.clone()),
        };
        served.insert(name, (family.kind.to_owned(), unit, labels));
    }
    let described = described();
    assert!(served.len() > 30, "{served:?}");
    for (name, metric) in &served {
        assert_eq!(described.get(name), Some(metric), "{name}");
    }
    assert_eq!(described.len(), served.len(), "the page has metrics that there are not");
    let unit = "# UNIT nvshare_gpu_wait_seconds seconds\n";
    assert!(scrape.text.contains(unit));
}

#[test]
fn each_metric_has_a_help_text_and_a_unit() {
    for (name, family) in everything().families {
        assert!(family.help.ends_with('.') && family.help.starts_with(char::is_uppercase), "{name}: {}", family.help);
        assert!(family.unit.is_empty() || name.ends_with(&format!("_{}", family.unit)), "{name} in {}", family.unit);
    }
}

/// All values of this name in a JSON document.
fn each<'a>(value: &'a Value, name: &str, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get(name));
            fields.values().for_each(|field| each(field, name, found));
        }
        Value::Array(items) => items.iter().for_each(|item| each(item, name, found)),
        _ => {}
    }
}

fn all<'a>(value: &'a Value, name: &str) -> Vec<&'a Value> {
    let mut found = Vec::new();
    each(value, name, &mut found);
    found
}

/// Returns the names of nvshare's metrics in a query.
fn names(query: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    query.split(move |c| !is_part(c)).filter(|word| word.starts_with("nvshare_"))
}

#[test]
fn the_dashboard_queries_only_existing_metrics_and_labels() {
    let dashboard: Value = serde_json::from_str(&read("kubernetes/grafana/nvshare.json")).expect("JSON");
    let scrape = everything();
    let samples = samples(&scrape);
    let labels: BTreeSet<&str> = scrape
        .families
        .values()
        .flat_map(|family| family.samples.iter().flat_map(|sample| sample.labels.iter().map(|(name, _)| name.as_str())))
        .chain(["le", "job", "instance"])
        .collect();
    let mut queries: Vec<&str> = all(&dashboard, "expr").into_iter().filter_map(Value::as_str).collect();
    queries.extend(all(&dashboard, "definition").into_iter().filter_map(Value::as_str));
    assert!(queries.len() > 12, "{queries:?}");
    for query in &queries {
        assert!(names(query).count() > 0, "{query}");
        for name in names(query) {
            assert!(samples.contains(name), "{name} in {query}");
        }
        // Labels occur in `by (…)` and in selectors: `{gpu=~"…", name="…"}`.
        let grouped = query.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        let named = grouped.flat_map(|list| list.split(',')).map(str::trim);
        let selected = query.split('{').skip(1).filter_map(|rest| rest.split('}').next());
        let selected = selected.flat_map(|list| list.split(',')).filter_map(|part| part.split(['=', '!']).next());
        for label in named.chain(selected.map(str::trim)) {
            assert!(labels.contains(label), "label {label:?} in {query}");
        }
    }
    // The dashboard must show at least these metrics.
    for name in [
        "nvshare_gpu_held_seconds_total",
        "nvshare_gpu_wait_seconds_bucket",
        "nvshare_gpu_hand_overs_total",
        "nvshare_gpu_swapped_out_bytes_total",
        "nvshare_gpu_swapped_in_bytes_total",
        "nvshare_gpu_unmoved_bytes_total",
        "nvshare_workload_resident_bytes",
        "nvshare_workload_swapped_bytes",
        "nvshare_workload_pinned_bytes",
        "nvshare_workload_limit_bytes",
        "nvshare_workload_refused_allocations_total",
        "nvshare_workload_wait_seconds_total",
    ] {
        assert!(queries.iter().any(|query| names(query).any(|found| found == name)), "{name}");
    }
}

/// The queries of a file of rules for Prometheus, one in each line.
fn rules(name: &str) -> Vec<String> {
    let text = read(name);
    text.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).map(str::to_owned).collect()
}

/// The labels in a query's `by (…)`, `on (…)`, `group_left (…)` and selectors, and the labels that
/// `label_replace` reads.
fn labels_of(query: &str) -> Vec<String> {
    let lists = ["by (", "on (", "group_left ("].into_iter().flat_map(|start| query.split(start).skip(1));
    let listed = lists.filter_map(|rest| rest.split(')').next()).flat_map(|list| list.split(','));
    let selected = query.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let selected = selected.flat_map(|list| list.split(',')).filter_map(|part| part.split(['=', '!']).next());
    let replaced = query.split("\"$1\", \"").skip(1).filter_map(|rest| rest.split('"').next());
    listed.chain(selected).chain(replaced).map(|label| label.trim().to_owned()).collect()
}

#[test]
fn the_rules_for_prometheus_query_only_existing_metrics_and_labels() {
    let scrape = everything();
    let samples = samples(&scrape);
    let (alerts, names_of_dcgm) =
        (rules("kubernetes/examples/alerts.yaml"), rules("kubernetes/examples/dcgm-names.yaml"));
    assert!(alerts.len() >= 4 && names_of_dcgm.len() >= 4);
    for query in alerts.iter().chain(&names_of_dcgm) {
        let used: Vec<&str> = names(query).collect();
        assert!(!used.is_empty(), "{query}");
        let families =
            scrape.families.iter().filter(|(family, _)| used.iter().any(|name| name.starts_with(family.as_str())));
        let labels: BTreeSet<&str> = families
            .flat_map(|(_, family)| family.samples.iter().flat_map(|sample| &sample.labels))
            .map(|(name, _)| name.as_str())
            .chain(["instance"])
            .collect();
        for name in used {
            assert!(samples.contains(name), "{name} in {query}");
        }
        for label in labels_of(query) {
            assert!(labels.contains(label.as_str()), "label {label:?} in {query}");
        }
    }
    // The page for users lists every name that is recorded.
    let (page, file) = (read("kubernetes/README.md"), read("kubernetes/examples/dcgm-names.yaml"));
    for name in file.lines().filter_map(|line| line.trim().strip_prefix("- record: ")) {
        assert!(page.contains(&format!("| `{name}` |")), "{name} is not in kubernetes/README.md");
    }
    for name in read("kubernetes/examples/alerts.yaml").lines().filter_map(|line| line.trim().strip_prefix("- alert: "))
    {
        assert!(page.contains(&format!("`{name}`")), "{name} is not in kubernetes/README.md");
    }
}

#[test]
fn the_dashboard_imports_into_any_grafana() {
    let dashboard: Value = serde_json::from_str(&read("kubernetes/grafana/nvshare.json")).expect("JSON");
    assert!(dashboard["schemaVersion"].as_u64().is_some_and(|version| version >= 39));
    assert_eq!(dashboard["id"], Value::Null);
    let sources = all(&dashboard, "datasource");
    assert!(sources.len() > 12);
    for source in sources {
        let uid = &source["uid"];
        assert!(uid == "${datasource}" || uid == "-- Grafana --", "{source}");
    }
    let panels = dashboard["panels"].as_array().expect("panels");
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().expect("a number")).collect();
    assert_eq!(ids.len(), panels.len(), "each has a number of its own");
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()), "{panel}");
        assert!(panel["description"].as_str().is_some_and(|text| text.ends_with('.')), "{}", panel["title"]);
        let place = &panel["gridPos"];
        assert!(place["x"].as_u64().zip(place["w"].as_u64()).is_some_and(|(x, w)| x + w <= 24), "{}", panel["title"]);
    }
}
