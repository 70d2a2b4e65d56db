//! Quantities in Kubernetes' notation: `40Gi`, `1500m`, `2e3`.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Converts a whole number to Kubernetes' notation.
pub fn of(number: u64) -> Quantity {
    Quantity(number.to_string())
}

/// Returns the number, rounded up to a whole number. Returns `None` if the text is not a number, or
/// if the number is negative or does not fit in 64 bits.
pub fn whole(quantity: &Quantity) -> Option<u64> {
    let text = quantity.0.strip_prefix('+').unwrap_or(&quantity.0);
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let (before, after) = number.split_once('.').unwrap_or((number, ""));
    if (before.is_empty() && after.is_empty()) || after.contains('.') {
        return None;
    }
    let mut multiplier: u128 = 1;
    let mut divisor: u128 = 10_u128.checked_pow(u32::try_from(after.len()).ok()?)?;
    match suffix {
        "Ki" | "Mi" | "Gi" | "Ti" | "Pi" | "Ei" => multiplier <<= 10 * (1 + "KMGTPE".find(suffix.get(..1)?)?),
        "k" | "M" | "G" | "T" | "P" | "E" => {
            multiplier = 1000_u128.pow(1 + u32::try_from("kMGTPE".find(suffix)?).ok()?)
        }
        "m" | "u" | "n" => {
            divisor = divisor.checked_mul(1000_u128.pow(1 + u32::try_from("mun".find(suffix)?).ok()?))?
        }
        "" => {}
        _ => {
            let exponent: i32 = suffix.strip_prefix(['e', 'E'])?.parse().ok()?;
            let power = 10_u128.checked_pow(exponent.unsigned_abs())?;
            if exponent < 0 { divisor = divisor.checked_mul(power)? } else { multiplier = power }
        }
    }
    let digits: u128 = format!("{before}{after}").parse().ok()?;
    u64::try_from(digits.checked_mul(multiplier)?.div_ceil(divisor)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kubernetes_quantity_notation_is_parsed() {
        for (text, expected) in [
            ("0", Some(0)),
            ("42", Some(42)),
            ("+5", Some(5)),
            ("40Gi", Some(40 << 30)),
            ("0.5Gi", Some(1 << 29)),
            ("2Ei", Some(2 << 60)),
            ("85899345920", Some(80 << 30)),
            ("128k", Some(128_000)),
            ("1.5M", Some(1_500_000)),
            ("3E", Some(3_000_000_000_000_000_000)),
            ("1500m", Some(2)),
            ("1n", Some(1)),
            ("2e3", Some(2000)),
            ("15E-1", Some(2)),
            (".5k", Some(500)),
            ("-1", None),
            ("", None),
            (".", None),
            ("1.2.3", None),
            ("5ki", None),
            ("5 Gi", None),
            ("17Ei", None),
            ("1e99", None),
        ] {
            assert_eq!(whole(&Quantity(text.into())), expected, "{text:?}");
        }
        assert_eq!(whole(&of(7)), Some(7));
    }
}
