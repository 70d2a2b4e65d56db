//! Scrapes the scheduler's metrics over HTTP without an HTTP library, and reads them with an
//! independent OpenMetrics parser.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use openmetrics_parser::openmetrics::parse_openmetrics;
use openmetrics_parser::{MetricNumber, OpenMetricsType, OpenMetricsValue};

use test_support::daemon::*;

/// Starts a daemon that serves metrics on `listen`. `besides` is added to its configuration.
pub fn daemon(listen: &str, besides: &str) -> Daemon {
    Daemon::start_with(|command, directory| configure(command, directory, listen, besides))
}

pub fn configure(command: &mut Command, directory: &Path, listen: &str, besides: &str) {
    let file = directory.join("nvshare.toml");
    let listen = if listen.is_empty() { metrics_path(directory).display().to_string() } else { listen.into() };
    std::fs::write(&file, format!("{besides}\n[metrics]\nprograms = true\nlisten = {listen:?}\n"))
        .expect("a configuration");
    command.arg("--config").arg(&file);
}

/// Starts a daemon with the default configuration, which exports no metrics of programs.
pub fn daemon_without_programs() -> Daemon {
    Daemon::start_with(|command, directory| {
        configure(command, directory, "", "");
        let file = directory.join("nvshare.toml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        std::fs::write(&file, text.replace("programs = true\n", "")).expect("a configuration");
    })
}

pub fn metrics_path(directory: &Path) -> PathBuf {
    directory.join("metrics/metrics.sock")
}

/// The request for metrics.
pub const GET: &str = "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: application/openmetrics-text\r\n\r\n";

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }
}

/// Connects to a socket of the daemon.
pub fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).expect("the daemon listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Sends a request, and reads until the daemon closes the connection. Returns `None` if the daemon
/// sent no answer.
pub fn ask(mut stream: impl Read + Write, request: &[u8]) -> Option<Answer> {
    let _ = stream.write_all(request); // the daemon may have closed the connection already
    let mut bytes = Vec::new();
    if let Err(e) = stream.read_to_end(&mut bytes) {
        assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}");
    }
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().expect("a status");
    Some(Answer { status, head: head.into(), body: body.into() })
}

/// Parsed metrics.
#[derive(Debug)]
pub struct Scrape {
    pub families: BTreeMap<String, Family>,
    pub text: String,
}

#[derive(Debug)]
pub struct Family {
    pub kind: &'static str,
    pub unit: String,
    pub help: String,
    pub samples: Vec<Sample>,
}

#[derive(Debug, Clone)]
pub struct Sample {
    pub labels: Vec<(String, String)>,
    /// The sample's value, or the sum of a histogram.
    pub value: f64,
    /// The bounds of a histogram with their cumulative counts.
    pub buckets: Vec<(f64, u64)>,
}

impl Sample {
    pub fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.label(name) == Some(value))
    }

    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }
}

pub fn scrape(directory: &Path) -> Scrape {
    read(ask(connect(&metrics_path(directory)), GET.as_bytes()).expect("an answer"))
}

pub fn scrape_tcp(address: &str) -> Scrape {
    let stream = TcpStream::connect(address).expect("the daemon listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    read(ask(stream, GET.as_bytes()).expect("an answer"))
}

/// Parses an answer strictly.
#[track_caller]
pub fn read(answer: Answer) -> Scrape {
    assert_eq!(answer.status, 200, "{answer:?}");
    let content_type = answer.header("content-type");
    assert_eq!(content_type, Some("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert_eq!(answer.header("content-length"), Some(&*answer.body.len().to_string()));
    // The parser wrongly rejects the unit of a histogram, so the test removes this line first.
    let has_unit = |line: &&str| !line.starts_with("# UNIT nvshare_gpu_wait_seconds ");
    let without: String = answer.body.split_inclusive('\n').filter(has_unit).collect();
    let read = parse_openmetrics(&without).unwrap_or_else(|e| panic!("{e}\n{}", answer.body));
    let families = read.families.into_iter().map(|(name, family)| {
        let kind = match family.family_type {
            OpenMetricsType::Counter => "counter",
            OpenMetricsType::Gauge => "gauge",
            OpenMetricsType::Histogram => "histogram",
            OpenMetricsType::Info => "info",
            ref other => panic!("{name} is a {other:?}"),
        };
        let names = family.get_label_names().to_vec();
        let samples = family.iter_samples().map(|sample| {
            let labels = sample.get_labelset().expect("labels");
            let labels = labels.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
            let (value, buckets) = value(&sample.value);
            Sample { labels, value, buckets }
        });
        let samples: Vec<Sample> = samples.collect();
        assert!(samples.iter().all(|sample| sample.labels.len() == names.len()), "{name}");
        (name, Family { kind, unit: family.unit.clone(), help: family.help.clone(), samples })
    });
    Scrape { families: families.collect(), text: answer.body }
}

fn value(value: &OpenMetricsValue) -> (f64, Vec<(f64, u64)>) {
    match value {
        OpenMetricsValue::Counter(counter) => (counter.value.as_f64(), Vec::new()),
        OpenMetricsValue::Gauge(number) => (number.as_f64(), Vec::new()),
        OpenMetricsValue::Histogram(histogram) => {
            let whole = |number: &MetricNumber| number.as_i64().expect("a whole number") as u64;
            let buckets = histogram.buckets.iter().map(|bucket| (bucket.upper_bound, whole(&bucket.count))).collect();
            (histogram.sum.as_ref().expect("a sum").as_f64(), buckets)
        }
        OpenMetricsValue::Info => (1.0, Vec::new()),
        other => panic!("{other:?}"),
    }
}

impl Scrape {
    /// The samples of this name with these labels.
    pub fn all(&self, name: &str, labels: &[(&str, &str)]) -> Vec<&Sample> {
        let family = self.families.get(name).unwrap_or_else(|| panic!("there is no {name}"));
        family.samples.iter().filter(|sample| sample.has(labels)).collect()
    }

    /// The value of the only sample with this name and these labels.
    #[track_caller]
    pub fn one(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        match self.all(name, labels)[..] {
            [sample] => sample.value,
            ref others => panic!("{name} {labels:?}: {others:?}"),
        }
    }

    #[track_caller]
    pub fn of_gpu(&self, name: &str) -> f64 {
        self.one(&format!("nvshare_gpu_{name}"), &[("gpu", GPU_NAME)])
    }

    #[track_caller]
    pub fn of(&self, client: &Client, name: &str) -> f64 {
        self.one(&format!("nvshare_client_{name}"), &[("client", &client.id.to_string())])
    }
}
