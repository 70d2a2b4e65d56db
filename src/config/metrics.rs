//! `[metrics]`: the address for metrics.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::scalar::Scalar;

/// The section `[metrics]`.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MetricsSection {
    /// An empty text disables metrics.
    #[serde(default, deserialize_with = "read_listen")]
    pub listen: Option<Listen>,
    #[serde(default)]
    pub programs: Option<bool>,
}

/// The address at which the configuration serves metrics.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Listen {
    #[default]
    Nowhere,
    Path(PathBuf),
    Address(SocketAddr),
}

const ALLOWED: &str = "the path of a socket, like \"/run/nvshare-metrics/metrics.sock\", an address with a port, like \
                       \"127.0.0.1:9810\" or \"[::1]:9810\", or \"\"";

impl Listen {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::Nowhere);
        }
        if text.starts_with('/') {
            return Ok(Self::Path(text.into()));
        }
        let wrong = |_| format!("metrics.listen cannot be {text:?}: {ALLOWED} is allowed");
        text.parse().map(Self::Address).map_err(wrong)
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nowhere => f.write_str("nowhere"),
            Self::Path(path) => path.display().fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

fn read_listen<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Listen>, D::Error> {
    let parsed = match Scalar::read(from, "metrics.listen", ALLOWED)? {
        Scalar::Text(text) => Listen::parse(&text),
        Scalar::Number(number) => Err(format!("metrics.listen cannot be {number}: {ALLOWED} is allowed")),
    };
    parsed.map(Some).map_err(de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_or_an_address_with_a_port_is_allowed() {
        assert_eq!(Listen::parse(""), Ok(Listen::Nowhere));
        assert_eq!(Listen::parse("/run/m.sock"), Ok(Listen::Path("/run/m.sock".into())));
        for address in ["127.0.0.1:9810", "[::1]:9810", "0.0.0.0:1"] {
            let Ok(Listen::Address(parsed)) = Listen::parse(address) else { panic!("{address}") };
            assert_eq!(parsed.to_string(), address);
        }
        for wrong in ["9810", "localhost:9810", "::1:9810:x", "127.0.0.1", "metrics.sock", ":9810"] {
            let error = Listen::parse(wrong).expect_err(wrong);
            assert!(error.starts_with(&format!("metrics.listen cannot be {wrong:?}: the path of a socket")), "{error}");
        }
    }
}
