//! Parses arguments of the form `--option value`.

use std::{collections::HashMap, time::Duration};

/// The options of one run.
#[derive(Debug)]
pub struct Args(HashMap<String, String>);

impl Args {
    pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
        let mut options = HashMap::new();
        while let Some(word) = words.next() {
            let name = word.strip_prefix("--").ok_or_else(|| format!("{word}: want --option value"))?;
            let value = words.next().ok_or_else(|| format!("--{name} wants a value"))?;
            options.insert(name.to_owned(), value);
        }
        Ok(Args(options))
    }

    pub fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.0.get(name).map_or(default, String::as_str)
    }

    /// A number, with K, M or G for powers of 1024.
    pub fn size(&self, name: &str, default: &str) -> u64 {
        let text = self.text(name, default);
        let (digits, unit) = text.split_at(text.trim_end_matches(|c: char| c.is_alphabetic()).len());
        let shift = match unit.to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            _ => panic!("--{name} {text}: want a number with K, M or G"),
        };
        digits.parse::<u64>().unwrap_or_else(|_| panic!("--{name} {text}: want a number with K, M or G")) << shift
    }

    pub fn given(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn milliseconds(&self, name: &str, default: &str) -> Duration {
        Duration::from_secs_f64(self.number(name, default) / 1e3)
    }

    pub fn number(&self, name: &str, default: &str) -> f64 {
        let text = self.text(name, default);
        text.parse().unwrap_or_else(|_| panic!("--{name} {text}: want a number"))
    }
}
