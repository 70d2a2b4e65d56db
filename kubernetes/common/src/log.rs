//! The log, which consists of lines on stderr. Container runtimes store stderr as the container's
//! log.

use nvshare::config::LogLevel;
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging. nvshare's own lines are logged up to `level`, and lines of libraries up to
/// `libraries`. Must be called only once.
pub fn start(level: LogLevel, libraries: LevelFilter) {
    let own = match level {
        LogLevel::Error => Level::ERROR,
        LogLevel::Warn => Level::WARN,
        LogLevel::Info => Level::INFO,
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Trace => Level::TRACE,
    };
    let libraries = libraries.min(LevelFilter::from_level(own));
    let filter = Targets::new().with_target("nvshare", own).with_default(libraries);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_target(false);
    tracing_subscriber::registry().with(filter).with(lines.compact()).init();
}
