//! Small CUDA programs whose results can be checked: `cuda-program NAME [--option value]…`.
//!
//! Each prints one line of JSON with its name and results. It exits with 1 if a result was wrong or
//! a call failed, and with 3 if it was refused memory and is a program that handles that. They use
//! the plain driver API, looked up as `CUDA_LOOKUP` selects, and do not depend on its provider.

mod args;
mod cuda;
mod programs;
mod report;
mod signal;

use report::Report;
use std::{env, process::ExitCode, time::Instant};

fn main() -> ExitCode {
    signal::listen();
    let mut words = env::args().skip(1);
    let name = words.next().unwrap_or_default();
    let Some(program) = programs::find(&name) else {
        eprintln!("usage: cuda-program NAME [--option value]…\n{}", programs::usage());
        return ExitCode::from(2);
    };
    let args = match args::Args::parse(words) {
        Ok(args) => args,
        Err(what) => {
            eprintln!("cuda-program {name}: {what}");
            return ExitCode::from(2);
        }
    };
    let mut report = Report::new(&name);
    let start = Instant::now();
    let result = program(&args, &mut report);
    report.number("seconds", start.elapsed().as_secs_f64());
    report.finish(result)
}
