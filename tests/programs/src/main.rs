//! Small CUDA programs whose results can be checked: `cuda-program NAME [--option value]…`.
//!
//! Each program prints one line of JSON with its name and results. It exits with 1 if a result was
//! wrong or a call failed. Programs that handle out-of-memory errors exit with 3 if they were
//! refused memory. All programs use the plain driver API, which they look up as `CUDA_LOOKUP`
//! selects. They work with the real driver and with the simulated one.

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
