//! Writes what completes the command line of `nvsharectl` in bash, zsh and fish, from its definition in
//! `src/ctl/arguments.rs`. A program of its own, so that nvsharectl does not carry it.
//!
//! ```text
//! nvshare-completions DIRECTORY
//! ```

use std::path::Path;
use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use nvshare::ctl::arguments::Arguments;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(directory), None) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: nvshare-completions DIRECTORY");
        return ExitCode::from(2);
    };
    match write(Path::new(&directory)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("nvshare-completions: {}: {e}", directory.display());
            ExitCode::FAILURE
        }
    }
}

fn write(directory: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Arguments::command(), "nvsharectl", directory)?;
    }
    Ok(())
}
