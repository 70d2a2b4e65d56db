//! The log. If systemd started the daemon, lines are sent to the journal with their fields. Otherwise,
//! they are written to stderr.
//!
//! - `journal`: passes log lines to the journal; `messages`: the IDs of log lines.
//! - [`log_rate_limit`]: limits the lines about one tenant's clients.
mod journal;
pub mod log_rate_limit;
mod messages;

use libsystemd::logging::connected_to_journal;
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry};

use crate::config::LogLevel;

/// Changes the log level at run time, and controls the thread that writes to the journal.
#[derive(Debug, Clone)]
pub struct Control {
    filter: Handle<Targets, Registry>,
    journal: Option<journal::Sender>,
}

impl Control {
    pub fn set(&self, level: LogLevel) {
        let _ = self.filter.reload(filter(level));
    }

    pub fn is_journal(&self) -> bool {
        self.journal.is_some()
    }

    /// Starts the thread that writes to the journal. Until then, lines are queued.
    pub fn begin(&self) {
        self.journal.iter().for_each(journal::Sender::begin);
    }

    /// Waits for a short time until earlier lines have been written.
    pub fn flush(&self) {
        self.journal.iter().for_each(journal::Sender::flush);
    }
}

/// Starts logging. Must be called only once.
pub fn start(level: LogLevel) -> Control {
    let (filter, handle) = reload::Layer::new(filter(level));
    let journal = if connected_to_journal() { journal::connect().ok() } else { None };
    let (journal, sender) = journal.unzip();
    let sink: Box<dyn Layer<_> + Send + Sync> = match journal {
        Some(journal) => Box::new(journal),
        None => Box::new(
            tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_target(false).compact(),
        ),
    };
    // The filter is applied before the sink, so one handle changes the level for both kinds of
    // sink.
    tracing_subscriber::registry().with(filter).with(sink).init();
    Control { filter: handle, journal: sender }
}

/// Selects nvshare's own lines at this level, and warnings and errors of libraries.
fn filter(level: LogLevel) -> Targets {
    let own = match level {
        LogLevel::Error => Level::ERROR,
        LogLevel::Warn => Level::WARN,
        LogLevel::Info => Level::INFO,
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Trace => Level::TRACE,
    };
    let others = LevelFilter::from_level(own).min(LevelFilter::WARN);
    Targets::new().with_target("nvshare", own).with_target("nvshare_scheduler", own).with_default(others)
}
