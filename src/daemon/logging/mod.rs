//! The log: goes to the journal, with fields, if systemd started the daemon, and
//! otherwise to stderr.
//!
//! - `journal`: passes log lines to the journal; `messages`: their IDs.
//! - [`log_rate_limit`]: limits lines about one user's clients.
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

/// Changes the level while the daemon runs.
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

    /// Waits a short time until earlier lines have been written.
    pub fn flush(&self) {
        self.journal.iter().for_each(journal::Sender::flush);
    }
}

/// Starts logging. Call it once.
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
    // The filter is below the sink, so that it can be changed for either sink.
    tracing_subscriber::registry().with(filter).with(sink).init();
    Control { filter: handle, journal: sender }
}

/// nvshare's own lines at the requested level, and warnings and errors of libraries.
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
