//! Where log lines go: to stderr, which is a container's log.

use nvshare::daemon::config::LogLevel;
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging. Call it once.
pub fn start(level: LogLevel) {
    let own = match level {
        LogLevel::Error => Level::ERROR,
        LogLevel::Warn => Level::WARN,
        LogLevel::Info => Level::INFO,
        LogLevel::Debug => Level::DEBUG,
        LogLevel::Trace => Level::TRACE,
    };
    // kube and what it uses have a line for each request that fails: what is to be known of them is said once, in
    // `kubernetes`.
    let others = if own == Level::TRACE { LevelFilter::WARN } else { LevelFilter::OFF };
    let filter = Targets::new().with_target("nvshare", own).with_default(others);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false).with_target(false);
    tracing_subscriber::registry().with(filter).with(lines.compact()).init();
}
