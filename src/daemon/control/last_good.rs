//! The last valid configuration, saved in the directory that systemd provides (`StateDirectory=`). If
//! the configuration files have an error at startup, the scheduler starts with the saved configuration.
//! Without a scheduler, programs would not take turns, and rules would not be enforced.

use std::path::{Path, PathBuf};

use tracing::warn;

use crate::config::file::Sources;
use crate::config::{Config, ConfigError};
use crate::sys::{atomic_file, small_file};

const FILE: &str = "configuration.toml";
const HEADER: &str = "# A copy of the last valid configuration files. The scheduler starts with this copy if the \
    files have an error.\n";

/// The path of the file that contains the texts of the configuration files. `None` without a state
/// directory.
#[derive(Debug, Clone, Default)]
pub struct LastGood(Option<PathBuf>);

/// The configuration to start with if the files have an error.
#[derive(Debug)]
pub struct Fallback {
    pub config: Config,
    /// True if no configuration was saved, so that this is the default configuration.
    pub is_default: bool,
}

impl LastGood {
    pub fn new(directory: Option<&Path>) -> Self {
        Self(directory.map(|directory| directory.join(FILE)))
    }

    /// Reads the configuration files. If they are valid, saves their texts.
    ///
    /// # Errors
    /// Returns the error in the files.
    pub fn load(&self, explicit: Option<&Path>) -> Result<Config, ConfigError> {
        let sources = Sources::read(explicit)?;
        let config = sources.config()?;
        if let Some(path) = &self.0
            && self.read().as_ref() != Some(&sources)
        {
            let text = toml::to_string(&sources).unwrap_or_default();
            if let Err(e) = atomic_file::write(path, &format!("{HEADER}{text}")) {
                warn!("cannot save a copy of the valid configuration in {}: {e}", path.display());
            }
        }
        Ok(config)
    }

    /// The saved configuration, or the default configuration if none was saved. `None` without a state
    /// directory: a scheduler that was started by hand reports the error and exits.
    pub fn fallback(&self) -> Option<Fallback> {
        self.0.as_ref()?;
        let kept = self.read().and_then(|sources| sources.config_as_before().ok());
        Some(Fallback { is_default: kept.is_none(), config: kept.unwrap_or_default() })
    }

    fn read(&self) -> Option<Sources> {
        toml::from_str(&small_file::read(self.0.as_ref()?).ok()?).ok()
    }
}

/// Describes the error in the files, and the configuration that is in effect instead.
pub fn in_effect_despite(error: &str, is_default: bool) -> String {
    let instead = if is_default { "the default settings" } else { "the last valid configuration" };
    format!("{error} (in effect: {instead})")
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::Directory;

    #[test]
    fn a_rule_for_a_deleted_account_matches_no_client() {
        let directory = Directory::new();
        let kept = LastGood::new(Some(&directory.0));
        let text = r#"
            [[file]]
            path = "/etc/nvshare/nvshare.toml"
            text = """
            [[rule]]
            user = "no-such-user-anywhere"
            memory-max = "8G"
            [[rule]]
            user = 5
            memory-max = "9G"
            """
        "#;
        std::fs::write(directory.0.join(FILE), text).expect("a file");
        let Fallback { config, is_default } = kept.fallback().expect("a configuration");
        let users: Vec<Option<u32>> = config.rules.all().map(|rule| rule.subject.user).collect();
        assert_eq!((is_default, users), (false, vec![Some(u32::MAX), Some(5)]));
    }
}
