//! Amounts of memory in the format of the scheduler's configuration: `8G`, `1.5 GiB`, a number of
//! bytes, or `25%` of a GPU.

/// The smallest limit in bytes: the GPU's own granularity.
const LEAST: u64 = 2 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amount {
    Bytes(u64),
    Percent(u64),
}

impl Amount {
    /// Parses an amount. Returns `None` if the text is not an amount. The text then sets no limit, and no
    /// allocation is refused.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = core::str::from_utf8(text).ok()?.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let unit = unit.trim_start();
        if unit == "%" {
            return number.parse().ok().filter(|percent| (1..=100).contains(percent)).map(Self::Percent);
        }
        let unit = unit.strip_suffix("iB").or_else(|| unit.strip_suffix('B')).unwrap_or(unit);
        let shift = ["", "K", "M", "G", "T"].iter().position(|name| name.eq_ignore_ascii_case(unit))? * 10;
        let (whole, part) = number.split_once('.').unwrap_or((number, "0"));
        let (digits, part) = (u32::try_from(part.len()).ok()?, part.parse::<u64>().ok()?);
        let whole = whole.parse::<u64>().ok()?.checked_mul(1 << shift)?;
        let part = part.checked_mul(1 << shift)? / 10u64.checked_pow(digits)?;
        whole.checked_add(part).filter(|bytes| *bytes >= LEAST).map(Self::Bytes)
    }

    /// Returns the amount in bytes, on a GPU of `total` bytes.
    pub fn of(self, total: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (u128::from(total) * u128::from(percent) / 100) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_use_the_configurations_syntax() {
        for (text, expected) in [
            ("8G", Some(8 << 30)),
            (" 1.5 GiB", Some(3 << 29)),
            ("8589934592", Some(8 << 30)),
            ("2m", Some(2 << 20)),
            ("512MB", Some(512 << 20)),
            ("1T", Some(1 << 40)),
            ("1M", None),
            ("0", None),
            ("", None),
            ("lots", None),
            ("8X", None),
            ("-8G", None),
            ("1.2.3G", None),
            (".5G", None),
            ("99999999999999999999", None),
            ("18000000T", None),
            ("1.99999999999999999999G", None),
        ] {
            assert_eq!(Amount::parse(text.as_bytes()), expected.map(Amount::Bytes), "{text:?}");
        }
        for (text, expected) in [("25%", Some(25)), ("100 %", Some(100)), ("0%", None), ("101%", None), ("1.5%", None)]
        {
            assert_eq!(Amount::parse(text.as_bytes()), expected.map(Amount::Percent), "{text:?}");
        }
        assert_eq!(Amount::parse(b"\xff8G"), None);
        assert_eq!(Amount::Percent(25).of(400), 100);
    }
}
