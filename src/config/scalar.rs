//! A TOML value that may be a number or a text.

use std::fmt;

use serde::de::{self, Deserializer, Visitor};

/// A value that the configuration writes as a number or as a text.
#[derive(Debug)]
pub enum Scalar {
    Number(u64),
    Text(String),
}

impl Scalar {
    pub fn read<'de, D: Deserializer<'de>>(
        from: D,
        key: &'static str,
        allowed: &'static str,
    ) -> Result<Self, D::Error> {
        from.deserialize_any(ScalarVisitor { key, allowed })
    }
}

struct ScalarVisitor {
    key: &'static str,
    allowed: &'static str,
}

impl Visitor<'_> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.allowed, self.key)
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Scalar, E> {
        Ok(Scalar::Number(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Scalar, E> {
        let positive = u64::try_from(value);
        positive
            .map(Scalar::Number)
            .map_err(|_| E::custom(format!("{} cannot be {value}: {} is allowed", self.key, self.allowed)))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(value.to_owned()))
    }
}
