//! The report line of a program.

use crate::programs::Refused;
use std::{error::Error, fmt::Write, process::ExitCode};

/// The exit status of a program that was refused memory and ended normally.
const REFUSED: u8 = 3;

/// A flat JSON object under construction.
#[derive(Debug)]
pub struct Report(String);

impl Report {
    pub fn new(program: &str) -> Report {
        Report(format!("{{\"program\":\"{program}\""))
    }

    pub fn text(&mut self, name: &str, value: &str) {
        let clean: String =
            value.chars().map(|c| if c == '"' || c == '\\' || c.is_control() { '\'' } else { c }).collect();
        let _ = write!(self.0, ",\"{name}\":\"{clean}\"");
    }

    pub fn integer(&mut self, name: &str, value: u64) {
        let _ = write!(self.0, ",\"{name}\":{value}");
    }

    pub fn number(&mut self, name: &str, value: f64) {
        let _ = write!(self.0, ",\"{name}\":{value:.6}");
    }

    /// Prints the report and returns the exit status.
    pub fn finish(mut self, result: Result<(), Box<dyn Error>>) -> ExitCode {
        if let Err(e) = &result {
            self.text("error", &e.to_string());
        }
        println!("{},\"ok\":{}}}", self.0, result.is_ok());
        match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(e) if e.is::<Refused>() => ExitCode::from(REFUSED),
            Err(_) => ExitCode::FAILURE,
        }
    }
}
